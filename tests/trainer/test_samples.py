"""From scored groups to rows: who trains, with which advantage, and who only votes or does not even vote."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.algo.advantages import ESTIMATORS
from agentrl.config.run import AlgorithmConfig, RunConfig
from agentrl.errors import ConfigError
from agentrl.rollout.content import load_content
from agentrl.rollout.episode_metrics import episode_metrics
from agentrl.run_folder.records import EpisodeRecord
from agentrl.trainer.algorithm import Algorithm
from agentrl.trainer.estimator import check_penalties, check_weights
from agentrl.trainer.samples import Flat, episode_samples, own_segments, penalized, segment_turns, to_records
from agentrl.types import LIMITS, Episode, Group, Message, Sample, Segment, StopReason, Task, Turn

BOXED = """
from agentrl import Task, ToolEnv, reward
from agentrl.sandbox import Sandbox


class Boxed(ToolEnv):
    sandbox = Sandbox(death_reward=-1.0)

    @classmethod
    def tasks(cls, split, seed):
        return [Task(f"{split}-{n}", {}) for n in range(20)]

    def setup(self) -> str:
        return "Go."

    @reward
    def solved(self) -> bool:
        return False
"""
PROMPT = Segment((1, 2), "prompt", -1, 0)
ANSWER = Segment((7, 8, 9), "sampled", 0, 1, (-0.1, -0.2, -0.3), (4, 4, 5))


def episode(
    name: str,
    reward: float | None,
    *,
    stop: StopReason = StopReason.ANSWERED,
    segments: tuple[Segment, ...] = (PROMPT, ANSWER),
    **more: object,
) -> Episode:
    turn = Turn(Message("assistant", "x"), (), 0.0, "stop", 3, 0.1, 0.2)
    error = None if reward is not None else "SandboxError: gone"
    stop = stop if reward is not None else StopReason.INFRA
    messages = (Message("user", "u"), turn.message, Message("user", "v"), Message("assistant", "y"))
    solved = None if reward is None else reward > 0
    return Episode(name, Task("t"), messages, (turn,), segments, stop, reward, error=error, solved=solved, **more)


def group(*rewards: float, failed: int = 0, name: str = "e") -> Group:
    return Group(
        Task("t"),
        tuple(episode(f"{name}{i}", r) for i, r in enumerate(rewards)),
        tuple(episode(f"f{i}", None) for i in range(failed)),
    )


def to_samples(
    groups: list[Group], config: AlgorithmConfig, *, overlong: str, step: int
) -> tuple[list[Sample], list[EpisodeRecord]]:
    """Rows with advantages, and records, as a step of the learner makes them."""
    algorithm = Algorithm(config, overlong=overlong)
    found = algorithm.advantages(algorithm.rows(groups))
    return list(found.samples), to_records(groups, found.by_segment, step=step)


def advantages(rewards: list[float], config: AlgorithmConfig) -> list[float]:
    _, records = to_samples([group(*rewards)], config, overlong="train", step=1)
    return [record.advantages[0] if record.advantages else 0.0 for record in records]


def algorithm(advantage: str = "grpo") -> AlgorithmConfig:
    return AlgorithmConfig(advantage=advantage)


@pytest.mark.parametrize(
    ("kind", "rewards", "wanted"),
    [
        ("grpo", [1, 0, 0, 0], [1.5, -0.5, -0.5, -0.5]),  # mean 1/4, std with G - 1 is 1/2
        ("grpo", [3, 1], [math.sqrt(0.5), -math.sqrt(0.5)]),
        ("dr_grpo", [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        ("dr_grpo", [3, 1], [1, -1]),
        ("rloo", [1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),  # minus the mean of the three others
        ("rloo", [3, 1], [2, -2]),
        ("rloo", [6, 3, 0], [4.5, 0, -4.5]),
    ],
)
def test_advantages_by_hand(kind: str, rewards: list[float], wanted: list[float]):
    assert advantages(rewards, algorithm(kind)) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("rewards", [[0.1, 0.1, 0.1], [0.0] * 4, [1.0]])
def test_a_group_without_a_difference_has_rows_without_advantage(kind: str, rewards: list[float]):
    samples, records = to_samples([group(*rewards)], algorithm(kind), overlong="train", step=1)
    assert [set(sample.advantages) for sample in samples] == [{0.0}] * len(rewards)
    assert [r.advantages for r in records] == [()] * len(rewards)


def test_rows_carry_their_advantage_their_group_and_what_was_sampled():
    samples, records = to_samples(
        [group(1, 1, name="a"), group(1, 0, name="b")], algorithm("dr_grpo"), overlong="train", step=3
    )
    found = [(s.episode_id, s.group, s.advantages[-1]) for s in samples]
    assert found == [("a0", 0, 0.0), ("a1", 0, 0.0), ("b0", 1, 0.5), ("b1", 1, -0.5)]
    assert samples[0].ids == (1, 2, 7, 8, 9)
    assert samples[0].loss_mask == (False, False, True, True, True)
    assert samples[0].logprobs == (0.0, 0.0, -0.1, -0.2, -0.3)
    assert samples[0].versions == (-1, -1, 4, 4, 5)
    assert [r.advantages for r in records] == [(), (), (0.5,), (-0.5,)]
    assert {r.step for r in records} == {3}


def test_failed_episodes_neither_train_nor_vote():
    with_failures, records = to_samples([group(1, 0, failed=3)], algorithm(), overlong="train", step=1)
    without, _ = to_samples([group(1, 0)], algorithm(), overlong="train", step=1)
    assert with_failures == without
    assert [(r.episode.id, r.advantages) for r in records[2:]] == [("f0", ()), ("f1", ()), ("f2", ())]


def test_every_group_or_none_has_a_greedy_episode_to_compare_with():
    groups = [replace(group(1.0, 0.0), greedy=episode("g", 0.5)), group(0.0, 1.0, name="f")]
    assert Algorithm(algorithm()).rows(groups).scores.greedy is None, "of a mixture, only some envs have one"
    groups[1] = replace(groups[1], greedy=episode("h", 0.25))
    assert Algorithm(algorithm()).rows(groups).scores.greedy == [0.5, 0.5, 0.25, 0.25]
    groups[0] = replace(groups[0], greedy=episode("g", 0.0))
    assert Algorithm(algorithm()).rows(groups).scores.greedy == [0.0, 0.0, 0.25, 0.25]


def test_an_episode_whose_tokens_failed_their_check_votes_but_does_not_train():
    broken = episode("broken", 1.0, metrics={"tokens/failed": 1.0})
    pair = Group(Task("t"), (broken, episode("sound", 0.0)))
    samples, _ = to_samples([pair], algorithm("dr_grpo"), overlong="train", step=1)
    assert [(s.episode_id, s.advantages[-1]) for s in samples] == [("sound", -0.5)]


@pytest.mark.parametrize("stop", list(StopReason))
def test_masked_overlong_episodes_vote_but_do_not_train(stop: StopReason):
    cut = Group(Task("t"), (episode("cut", 1.0, stop=stop), episode("whole", 0.0)))
    trained, _ = to_samples([cut], algorithm("dr_grpo"), overlong="train", step=1)
    masked, records = to_samples([cut], algorithm("dr_grpo"), overlong="mask", step=1)
    assert [s.episode_id for s in trained] == ["cut", "whole"]
    assert masked == (trained[1:] if stop in LIMITS else trained)
    assert masked[-1].advantages[-1] == -0.5, "the reward of the masked one still counts for its sibling"
    assert (records[0].advantages == ()) == (stop in LIMITS)


@pytest.mark.parametrize("failed", [{}, {"tokens/failed": 1.0}])
def test_opo_weighs_a_masked_episode_by_its_own_length(failed: dict[str, float]):
    def of(name: str, reward: float, length: int, **more: object) -> Episode:
        ids = tuple(range(10, 10 + length))
        answer = Segment(ids, "sampled", 0, 1, (-0.5,) * length, (4,) * length)
        return episode(name, reward, segments=(PROMPT, answer), **more)

    stop = StopReason.ANSWERED if failed else StopReason.MAX_TOKENS
    cut = of("cut", 0.0, 6, stop=stop, metrics=failed)
    one = Group(Task("t"), (cut, of("good", 1.0, 2), of("fair", 0.25, 4)))
    other = Group(Task("u"), (of("only", 1.0, 3), of("lost", 0.0, 9, stop=stop, metrics=failed)))
    samples, _ = to_samples([one, other], algorithm("opo"), overlong="mask", step=1)

    baseline = (6 * 0.0 + 2 * 1.0 + 4 * 0.25) / (6 + 2 + 4)  # arXiv:2505.23585: sum(l r) / sum(l) of the group
    wanted = {"good": 1.0 - baseline, "fair": 0.25 - baseline, "only": 1.0 - (3 * 1.0 + 9 * 0.0) / (3 + 9)}
    assert {s.episode_id: s.advantages[-1] for s in samples} == pytest.approx(wanted)


@pytest.mark.parametrize("stop", list(StopReason))
def test_penalised_overlong_episodes_lose_reward_before_the_comparison(stop: StopReason):
    cut = Group(Task("t"), (episode("cut", 1.0, stop=stop, rewards={"solved": 1.0}), episode("whole", 1.0)))
    less = penalized([cut], 0.25)
    samples, _ = to_samples(less, algorithm("dr_grpo"), overlong="penalise", step=1)
    metrics = episode_metrics(less)
    if stop in LIMITS:
        assert less[0].episodes[0].rewards == {"solved": 1.0, "overlong": -0.25}
        assert [s.advantages[-1] for s in samples] == [-0.125, 0.125]
        assert (metrics["reward/overlong"], metrics["reward"], metrics["solved"]) == (-0.125, 0.875, 1.0)
    else:
        assert less == [cut]
        assert [s.advantages[-1] for s in samples] == [0.0, 0.0]
        assert "reward/overlong" not in metrics


def test_a_greedy_episode_pays_the_penalty_as_well():
    (found,) = penalized([replace(group(1.0, 0.0), greedy=episode("g", 1.0, stop=StopReason.MAX_TOKENS))], 0.25)
    assert found.greedy is not None
    assert found.greedy.reward == 0.75


def test_the_penalty_is_added_to_a_reward_of_the_env_with_its_name():
    cut = episode("cut", 0.5, stop=StopReason.TIMEOUT, rewards={"overlong": -0.5, "solved": 1.0})
    (group,) = penalized([Group(Task("t"), (cut,))], 0.25)
    assert (group.episodes[0].reward, group.episodes[0].rewards["overlong"]) == (0.25, -0.75)


def test_gdpo_counts_a_part_that_is_0():
    """Turn rewards 2, 1, 0, 0 against solved 0, 0, 1, 1: who earned none of the one is below who earned some."""
    earned, solved = (2.0, 1.0, 0.0, 0.0), (0.0, 0.0, 1.0, 1.0)
    episodes = []
    for i, (turns, goal) in enumerate(zip(earned, solved, strict=True)):
        one = episode(f"e{i}", turns + goal, rewards={"solved": goal})
        episodes.append(replace(one, turns=(replace(one.turns[0], reward=turns),)))
    gdpo = Algorithm(algorithm("gdpo"))
    found = gdpo.advantages(gdpo.rows([Group(Task("t"), tuple(episodes))])).samples
    table = torch.tensor([earned, solved], dtype=torch.float64).T
    total = ((table - table.mean(0)) / (table.std(0) + 1e-6)).sum(1)
    wanted = (total - total.mean()) / (total.std() + 1e-6)
    assert [s.advantages[-1] for s in found] == pytest.approx(wanted.tolist(), abs=1e-6)
    assert found[0].advantages[-1] > 0, "the best episode is pushed up"


@pytest.mark.parametrize("turns", [1.0, 3.0], ids=["", "turns weigh more"])
@pytest.mark.parametrize("stop", [StopReason.FAULT, StopReason.SANDBOX_BROKEN])
def test_gdpo_gives_nothing_for_turns_before_the_env_was_broken(stop: StopReason, turns: float):
    """The turns of the first episode earned 0.5, its reward is fixed at 0; the others ended as they should."""
    rewards = {"sandbox_broken": -0.5} if stop is StopReason.SANDBOX_BROKEN else {}
    one = episode("broken", 0.0, stop=stop, rewards=rewards)
    broken = replace(one, turns=(replace(one.turns[0], reward=0.5),))
    others = [episode(f"e{i}", 0.5 * i, rewards={"solved": 0.5 * i}) for i in range(3)]
    weighed = replace(others[2], turns=(replace(one.turns[0], reward=0.25),))  # the part exists
    gdpo = Algorithm(AlgorithmConfig(advantage={"name": "gdpo", "weights": {"turns": turns}}))
    found = gdpo.advantages(gdpo.rows([Group(Task("t"), (broken, *others[:2], weighed))])).samples
    first, failed, *_ = (s.advantages[-1] for s in found)
    assert first == pytest.approx(failed), "as an episode that failed honestly"
    assert first < 0


def test_gdpo_counts_an_overlong_penalty_that_only_some_have():
    cut = episode("cut", 1.0, stop=StopReason.MAX_TURNS, rewards={"solved": 1.0})
    pair = penalized([Group(Task("t"), (cut, episode("whole", 1.0, rewards={"solved": 1.0})))], 0.25)
    weighed = AlgorithmConfig(advantage={"name": "gdpo", "weights": {"overlong": 2.0, "turns": 1.0}})
    gdpo = Algorithm(weighed, overlong="penalise")
    found = gdpo.advantages(gdpo.rows(pair)).samples
    first, second = (s.advantages[-1] for s in found)
    assert first < 0 < second
    misspelt = Algorithm(AlgorithmConfig(advantage={"name": "gdpo", "weights": {"overlog": 2.0}}))
    with pytest.raises(ConfigError, match="'overlog'; the rewards of this env are"):
        misspelt.advantages(misspelt.rows(pair))


def test_limits_are_what_cuts_an_episode():
    assert {s.value for s in LIMITS} == {
        "timeout",
        "context_full",
        "token_budget",
        "tool_call_limit",
        "max_turns",
        "max_tokens",
    }


def test_every_branch_gives_a_row_and_each_token_trains_once():
    fork = Segment((5,), "prompt", 0, 2)
    again = Segment((6, 9), "sampled", 2, 3, (-0.4, -0.5), (5, 5))
    rows = episode_samples(episode("e", 1.0, segments=(PROMPT, ANSWER, fork, again)), group=4)
    assert [r.ids for r in rows] == [(1, 2, 7, 8, 9), (1, 2, 5, 6, 9)]
    assert [sum(r.loss_mask) for r in rows] == [3, 2]
    assert {(r.episode_id, r.group) for r in rows} == {("e", 4)}
    assert [r.columns["segment"] for r in rows] == [(1.0, 1.0, 1.0), (3.0, 3.0)]
    assert [r.columns["reward"] for r in rows] == [(0.0, 0.0, 0.0), (0.0, 1.0)], "once, on the last token of all"


def test_a_reward_on_a_trailing_observation_is_not_lost():
    """verl multiplies by the mask and gets advantages of 0 everywhere."""
    end = Segment((3,), "observation", 1, 2)
    turn = Turn(Message("assistant", "x"), (), 1.0, "stop", 3, 0.1, 0.2)
    ended = replace(episode("e", 1.5, segments=(PROMPT, ANSWER, end)), turns=(turn,))
    (row,) = episode_samples(ended)
    assert (row.ids, sum(row.loss_mask)) == ((1, 2, 7, 8, 9), 3)
    assert row.columns["reward"] == (0.0, 0.0, 1.5)


def test_a_reward_of_an_empty_completion_is_on_the_token_before_it():
    asked, nothing = Segment((3,), "observation", 1, 2), Segment((), "sampled", 2, 3)
    turns = tuple(
        Turn(Message("assistant", text), (), reward, "stop", tokens, 0.1, 0.2, place=place)
        for text, reward, tokens, place in (("x", 1.0, 3, 1), ("", 0.25, 0, 3))
    )
    (row,) = episode_samples(replace(episode("e", 2.0, segments=(PROMPT, ANSWER, asked, nothing)), turns=turns))
    assert row.columns["reward"] == (0.0, 0.0, 2.0)


def test_an_episode_without_a_sampled_token_gives_no_row():
    assert episode_samples(episode("e", 1.0, segments=(PROMPT,))) == []


def branched(name: str, *texts: tuple[int, ...], reward: float = 1.0, task: Task | None = None) -> Episode:
    """An episode of one turn with branches from its prompt, each of which samples such ids."""
    answers = [Segment(ids, "sampled", 0, 1, (-0.5,) * len(ids), (4,) * len(ids)) for ids in texts]
    return replace(episode(name, reward, segments=(PROMPT, *answers)), task=task or Task("t"))


def test_records_name_the_advantage_of_each_sampled_segment_and_say_what_the_teacher_read():
    first, silent, last = (7,), (), (8, 9)
    groups = [replace(Group(Task("t"), (branched("e", first, silent, last),)), greedy=episode("g", 0.5))]
    records = to_records(groups, {"e": {3: -0.25, 1: 0.5}}, step=2, hints={"e": "the answer"})
    assert [(r.episode.id, r.advantages, r.hint, r.baseline) for r in records] == [
        ("e", (0.5, 0.0, -0.25), "the answer", False),
        ("g", (), None, True),
    ]


def test_rows_of_several_envs_keep_their_order_and_their_advantages():
    tasks = {env: Task("t", env=env) for env in "ab"}
    groups = [
        Group(
            tasks[env], tuple(branched(f"{env}{n}", (7, n), (8, n, n), reward=n, task=tasks[env]) for n in (1, 3))
        )
        for env in "ab"
    ]
    mixed = Algorithm(algorithm("dr_grpo"))
    rows = mixed.rows([groups[1], groups[0]])
    found = mixed.advantages(rows).samples
    assert [s.env for s in found] == ["b"] * 4 + ["a"] * 4
    assert [s.ids for s in found] == [s.ids for s in rows.samples]
    assert [(s.episode_id, s.advantages[-1]) for s in found] == [
        *(("b1", -1.0), ("b1", -1.0), ("b3", 1.0), ("b3", 1.0)),
        *(("a1", -1.0), ("a1", -1.0), ("a3", 1.0), ("a3", 1.0)),
    ]


class TestFlat:
    def flat(self, *, reverse: bool = False) -> Flat:
        rows = [*episode_samples(branched("a", (7, 8), (5,), (6, 9))), *episode_samples(branched("b", (7, 8, 9)))]
        return Flat.of(rows[::-1] if reverse else rows)

    def test_keys_are_those_of_a_token_whatever_the_order_of_the_rows(self):
        keys = [
            {
                (row.episode_id, row.ids): tuple(part.tolist())
                for row, part in zip(flat.rows, torch.split(flat.keys_N, flat.counts), strict=True)
            }
            for flat in (self.flat(), self.flat(reverse=True))
        ]
        assert keys[0] == keys[1]
        assert len({key for part in keys[0].values() for key in part}) == 8, "no two tokens have the same"

    def test_tokens_that_are_not_kept_have_no_place_in_mask_and_columns(self):
        flat = self.flat()
        flat.add("weight", torch.arange(8, dtype=torch.float64) / 3)
        kept = flat.kept(torch.tensor([False, True, False, True, True, True, False, True]))
        assert [(row.ids, row.loss_mask) for row in kept] == [
            ((1, 2, 7, 8), (False, False, False, True)),
            ((1, 2, 6, 9), (False, False, True, True)),
            ((1, 2, 7, 8, 9), (False, False, True, False, True)),
        ], "a row without any is left out"
        assert [row.columns["weight"] for row in kept] == [(1 / 3,), (1.0, 4 / 3), (5 / 3, 7 / 3)]


@pytest.mark.parametrize("coef", [0.0, 0.5])
def test_rows_say_what_the_env_answered_if_it_has_a_loss(coef: float):
    told = Segment((3, 4), "observation", 1, 2)
    more = Segment((8,), "sampled", 2, 3, (-0.4,), (5,))
    pair = Group(Task("t"), (episode("a", 1.0, segments=(PROMPT, ANSWER, told, more)), episode("b", 0.0)))
    row, _ = Algorithm(AlgorithmConfig(observation_coef=coef)).rows([pair]).samples
    assert row.observed == ((False,) * 5 + (True, True, False) if coef else ())


def test_a_turn_of_a_scripted_policy_has_no_segment():
    scripted = Turn(Message("assistant", "y"), (), 1.0, "stop", 0, 0.1, 0.2, place=3)
    sampled = Turn(Message("assistant", "x"), (), 0.0, "stop", 3, 0.1, 0.2, place=1)
    assert own_segments(replace(episode("e", 1.0), turns=(scripted, sampled))) == {1: 1}


@pytest.mark.parametrize("first", [1.0, -1.0])
def test_what_a_turn_earns_or_costs_is_on_its_last_token(first: float):
    told, end = Segment((3,), "observation", 1, 2), Segment((8, 9), "sampled", 2, 3, (-0.4, -0.5), (5, 5))
    turns = tuple(
        Turn(Message("assistant", text), (), reward, "stop", tokens, 0.1, 0.2, place=place)
        for text, reward, tokens, place in (("x", first, 3, 1), ("y", -0.5, 2, 3))
    )
    (row,) = episode_samples(replace(episode("e", first + 1.5, segments=(PROMPT, ANSWER, told, end)), turns=turns))
    assert row.columns["reward"] == (0.0, 0.0, first, 0.0, 1.5), "the last has the episode's rewards as well"


class TestTurnLevel:
    """Two turns an episode: the first pays at once or not, the whole pays at the end."""

    def two_turns(self, name: str, first: float, end: float) -> Episode:
        said = [Message("assistant", "a"), Message("assistant", "b")]
        again = Segment((3,), "observation", 1, 2)
        last = Segment((8, 9), "sampled", 2, 3, (-0.4, -0.5), (5, 5))
        turns = tuple(
            Turn(m, (), r, "stop", n, 0.1, 0.2) for m, r, n in zip(said, (first, 0.0), (3, 2), strict=True)
        )
        messages = (Message("user", "u"), said[0], Message("tool", "t"), said[1])
        return Episode(
            name, Task("t"), messages, turns, (PROMPT, ANSWER, again, last), StopReason.ANSWERED, first + end
        )

    @pytest.mark.parametrize("discount", [1.0, 0.5])
    def test_each_turn_is_compared_by_what_came_after_it(self, discount: float):
        pair = Group(Task("t"), (self.two_turns("a", 1.0, 2.0), self.two_turns("b", 0.0, 0.0)))
        config = AlgorithmConfig(advantage={"name": "turn_level", "gamma": discount})
        samples, records = to_samples([pair], config, overlong="train", step=1)
        returns = [1 + 2 * discount, 2.0, 0.0, 0.0]
        mean = sum(returns) / 4
        std = math.sqrt(sum((r - mean) ** 2 for r in returns) / 3)
        wanted = [(r - mean) / std for r in returns]
        assert samples[0].loss_mask == (False, False, True, True, True, False, True, True)
        assert samples[0].advantages == pytest.approx((0, 0, *[wanted[0]] * 3, 0, *[wanted[1]] * 2), abs=1e-5)
        assert records[0].advantages == pytest.approx(wanted[:2], abs=1e-5)
        assert records[1].advantages == pytest.approx(wanted[2:], abs=1e-5)

    def test_equal_returns_give_no_advantage(self):
        pair = Group(Task("t"), (self.two_turns("a", 0.0, 1.0), self.two_turns("b", 0.0, 1.0)))
        samples, records = to_samples([pair], AlgorithmConfig(advantage="turn_level"), overlong="train", step=1)
        assert [set(s.advantages) for s in samples] == [{0.0}, {0.0}]
        assert [r.advantages for r in records] == [(), ()]

    def test_a_branch_belongs_to_the_turn_before_it(self):
        episode = self.two_turns("a", 1.0, 2.0)
        branch = (Segment((4,), "prompt", -1, 4), Segment((5, 6), "sampled", 2, 5, (-0.1, -0.1), (4, 4)))
        messages = (*episode.messages[:3], Message("user", "x"), Message("assistant", "y"), episode.messages[3])
        segments = (PROMPT, ANSWER, branch[0], branch[1], Segment((3,), "observation", 1, 2))
        moved = replace(branch[1], message=4)
        last = Segment((8, 9), "sampled", 4, 5, (-0.4, -0.5), (5, 5))
        whole = replace(episode, messages=messages, segments=(*segments[:3], moved, segments[4], last))
        assert segment_turns(whole) == {1: 0, 3: 0, 5: 1}, "by what was said, as in earlier records"
        same = (*messages[:4], messages[5], messages[5])  # the branch says what the next turn says
        places = tuple(replace(turn, place=place) for turn, place in zip(whole.turns, (1, 5), strict=True))
        whole = replace(whole, messages=same, turns=places)
        assert segment_turns(whole) == {1: 0, 3: 0, 5: 1}
        late = (Segment((4,), "prompt", -1, 6), Segment((5, 6), "sampled", 6, 7, (-0.1, -0.1), (4, 4)))
        later = replace(whole, messages=(*same, messages[3], messages[4]), segments=(*whole.segments, *late))
        assert segment_turns(later) == {1: 0, 3: 0, 5: 1, 7: 1}

    @pytest.mark.parametrize("from_file", [False, True])
    def test_a_branch_that_says_the_same_as_a_turn_is_no_turn(self, from_file: bool):
        said = [Message("assistant", text) for text in "abab"]
        turns = tuple(Turn(said[n], (), 1.0, "stop", 2, 0.1, 0.2, place=place) for n, place in ((0, 3), (3, 7)))
        asked, more = Message("user", "u"), Message("user", "more")
        messages = (asked, Message("assistant", "a"), asked, said[0], asked, said[1], more, said[3])
        answer = Segment((5, 6), "sampled", 0, 1, (-0.1, -0.1), (0, 0))
        segments = (
            Segment((1,), "prompt", -1, 0),  # asked in `setup`
            answer,
            Segment((2,), "prompt", -1, 2),
            replace(answer, parent=2, message=3),
            Segment((3,), "prompt", -1, 4),  # asked after turn 0
            replace(answer, parent=4, message=5),
            Segment((4,), "observation", 3, 6),
            replace(answer, parent=6, message=7),
        )
        one = Episode("a", Task("t"), messages, turns, segments, StopReason.ANSWERED, 2.0)
        if from_file:
            one = replace(one, turns=deepcopy(turns))
        assert own_segments(one) == {0: 3, 1: 7}
        assert segment_turns(one) == {1: 0, 3: 0, 5: 0, 7: 1}


class TestMetrics:
    def test_failures_are_counted_and_enter_no_mean(self):
        metrics = episode_metrics([group(1, 0, failed=2), group(1, 1)])
        assert (metrics["episodes"], metrics["infra_failures"]) == (6, 2)
        assert (metrics["solved"], metrics["reward"]) == (0.75, 0.75)
        assert (metrics["groups_with_signal"], metrics["sampled_tokens"]) == (1, 12)
        assert "stop/infra" not in metrics

    def test_malformed_and_limits_count_episodes_not_mistakes(self):
        episodes = (
            episode("a", 0.0, metrics={"parse_error": 3.0, "unknown_tool": 1.0}),
            episode("b", 0.0, metrics={"invalid_args": 1.0}, stop=StopReason.MAX_TURNS),
            episode("c", 0.0, metrics={"tool_error": 2.0}, stop=StopReason.TOKEN_BUDGET),
        )
        metrics = episode_metrics([Group(Task("t"), episodes)])
        assert (metrics["malformed"], metrics["limits"]) == (2, 2)
        assert (metrics["stop/max_turns"], metrics["stop/answered"]) == (1, 1)
        assert metrics["env/parse_error"] == 3

    def test_a_step_of_nothing_has_no_division_by_zero(self):
        assert episode_metrics([])["reward"] == 0


def test_rewards_that_an_advantage_does_not_take_are_named_and_a_bug_is_none(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match=r"algorithm\.advantage max_rl: divides by the mean .* got -1"):
        advantages([1.0, -1.0], AlgorithmConfig(advantage="max_rl"))

    def buggy(step: object, config: object) -> None:
        raise ValueError("zip() argument 2 is shorter than argument 1")

    monkeypatch.setitem(ESTIMATORS, "max_rl", ESTIMATORS["max_rl"]._replace(fn=buggy))
    with pytest.raises(ValueError, match="zip"):
        advantages([1.0, 0.0], AlgorithmConfig(advantage="max_rl"))


@pytest.mark.parametrize("advantage", ["grpo", "max_rl"])
def test_a_policy_cannot_end_a_run_by_breaking_its_sandbox(tmp_path: Path, advantage: str):
    (tmp_path / "boxed.py").write_text(BOXED)
    given = {"name": "m", "model": {"tiny": {}}, "env": {"use": f"{tmp_path}/boxed.py:Boxed"}}
    config = RunConfig.model_validate(given | {"algorithm": {"advantage": advantage}})
    if advantage == "grpo":
        return check_penalties(config, load_content(config))
    with pytest.raises(ConfigError, match=r"sandbox of Boxed has death_reward=-1, and .* max_rl needs"):
        check_penalties(config, load_content(config))


def test_a_weight_of_a_part_that_the_run_does_not_add_is_refused():
    given = {"name": "m", "model": {"tiny": {}}, "env": "agentrl.envs.calculator:Calculator"}

    def checked(part: str, **more: Any) -> None:
        advantage = {"name": "gdpo", "weights": {part: 2.0}}
        config = RunConfig.model_validate(given | {"algorithm": {"advantage": advantage}} | more)
        check_weights(config, load_content(config))

    scorer = {"kind": "http", "url": "http://127.0.0.1:1"}
    for part, named in (
        ("overlong", "rollout.overlong: penalise"),
        ("reward_model", "a reward_model of this name"),
    ):
        with pytest.raises(ConfigError, match=rf"advantage\.weights\.{part} has no effect without {named}"):
            checked(part)
    with pytest.raises(ConfigError, match="reward_model has no effect"):
        checked("reward_model", reward_model=scorer | {"name": "style"})
    checked("overlong", rollout={"overlong": "penalise"})
    checked("reward_model", reward_model=scorer)
