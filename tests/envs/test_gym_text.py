"""The text games: lake maps match Gymnasium's, and games share a transition table but no other state."""

from __future__ import annotations

import random

import pytest
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from agentrl.envs.gym_text import CliffWalking, FrozenLake, Taxi
from agentrl.envs.gym_text.env import goal_in_reach, random_lake


def test_maps_are_those_of_gymnasium():
    rng = random.Random(0)
    for size, seed in [(rng.randint(4, 7), rng.getrandbits(31)) for _ in range(300)]:
        assert random_lake(size, seed) == generate_random_map(size=size, p=0.8, seed=seed)


def test_a_way_bends_and_no_way_leaves_the_map():
    assert goal_in_reach(["SFFF", "HHHF", "FFFF", "FHHG"])
    assert goal_in_reach(["SHFF", "FHFF", "FHFH", "FFFG"])
    assert not goal_in_reach(["SFFF", "HHHH", "FFFF", "FFFG"])
    assert not goal_in_reach(["SFFH", "HHHF", "FFFF", "FFFG"])


@pytest.mark.parametrize("kind", [CliffWalking, FrozenLake, Taxi])
def test_games_share_their_table_and_nothing_else(kind):
    one, other = kind().game, kind().game
    one.reset(seed=3)
    other.reset(seed=3)
    begun = other.unwrapped.s
    while one.unwrapped.s == begun:
        one.step(one.action_space.sample())
    assert other.unwrapped.s == begun
    assert one.unwrapped.P is other.unwrapped.P
    assert one.unwrapped.np_random is not other.unwrapped.np_random
    other.step(other.action_space.sample())


def test_games_of_other_options_have_other_tables():
    lake = ["SFFF", "FHFH", "FFFH", "HFFG"]
    walks, slips = FrozenLake(), FrozenLake(is_slippery=True)
    assert len(walks.make_game(desc=lake).unwrapped.P[0][0]) == 1
    assert len(slips.make_game(desc=lake).unwrapped.P[0][0]) == 3
    assert walks.make_game(desc=lake).unwrapped.desc.shape == (4, 4)
    assert walks.make_game(desc=["SF", "FG"]).unwrapped.desc.shape == (2, 2)
