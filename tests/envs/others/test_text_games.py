"""TextArena, GEM, Reasoning Gym, Gymnasium and MCP by their schemes, with the real packages."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from agentrl import ConfigError, Task, load_config
from agentrl.config.schemes import SCHEMES, scheme_of
from agentrl.env.checker import check_env
from agentrl.env.load import load_env
from agentrl.env.play import ScriptedPolicy, call, play
from agentrl.preflight.dry_run import rehearse
from agentrl.rollout.content import load_content
from agentrl.trainer.rewardless import no_reward
from agentrl.types import Message
from bench.reach import ECOSYSTEMS

SERVER = Path(__file__).parents[2] / "env" / "mcp_server.py"


@pytest.mark.parametrize("name", ["textarena", "gem", "reasoning_gym", "gymnasium"])
def test_rewards_equal_the_ecosystems_own(name):
    pytest.importorskip(name)
    agreed, count = ECOSYSTEMS[name][1](70)
    assert count >= 140
    assert agreed == count


@pytest.mark.parametrize(
    ("use", "options", "low"),
    [
        ("textarena:2048-v0-ultra-easy", {}, 0),
        ("textarena:TicTacToe-v0", {"opponent": "random"}, -1),
        ("textarena:TicTacToe-v0", {"opponent": "random", "player": 1}, -1),
        ("gem:game:Sudoku-v0-easy", {}, -10),
        ("reasoning_gym:mini_sudoku", {"config": {"max_empty": 10}}, 0),
    ],
)
async def test_the_contract_holds(use, options, low):
    pytest.importorskip(use.split(":")[0])
    env = load_env(use, options)
    await check_env(env, env.tasks("train", 0), reward_range=(low, 10), oracle=None)


async def test_the_oracle_of_reasoning_gym_earns_everything_and_splits_differ():
    pytest.importorskip("reasoning_gym")
    env = load_env("reasoning_gym:chain_sum", {"size": 20})
    train, held_out = env.tasks("train", 3), env.tasks("held_out", 3)
    assert len(train) == 20
    questions = set()
    for task in [*train, *held_out]:
        episode = await play(env(), task, env.oracle(task))
        assert (episode.reward, episode.solved) == (1.0, True)
        questions.add(episode.messages[1].content)
    assert len(questions) > 35


def test_a_dataset_without_answers_has_no_oracle(tmp_path):
    pytest.importorskip("reasoning_gym")
    assert load_env("reasoning_gym:rush_hour", {"size": 2}).oracle is None
    config = config_of(tmp_path, "env: reasoning_gym:rush_hour\nwarmup: oracle")
    with pytest.raises(ConfigError, match="rush_hour has no oracle"):
        rehearse(config)


async def test_a_game_keeps_the_global_generator_as_it_was():
    pytest.importorskip("textarena")
    env = load_env("textarena:2048-v0-ultra-easy")
    random.seed(5)
    before = random.getstate()
    episode = await play(env(), env.tasks("train", 0)[0], ScriptedPolicy(["[Up]"]))
    assert random.getstate() == before
    assert 0 < episode.reward < 1


async def test_a_random_opponent_makes_valid_moves_and_wins_against_nonsense():
    pytest.importorskip("textarena")
    env = load_env("textarena:TicTacToe-v0", {"opponent": "random"})
    tasks = env.tasks("train", 0)
    lost = await play(env(), tasks[0], ScriptedPolicy([], otherwise="nonsense"))
    assert lost.reward == -1.0
    moves = [f"[{i}]" for i in (0, 4, 8, 1, 7, 2, 6, 3, 5)]
    episodes = [await play(env(), task, ScriptedPolicy(moves)) for task in tasks[:12]]
    assert {"Player 1 made an invalid move" in str(e.messages[-1].content) for e in episodes} == {False}
    assert any(e.solved for e in episodes)


@pytest.mark.parametrize(
    ("use", "options", "said"),
    [
        ("textarena:2048-v1", {}, r"no such game; did you mean '2048-v0"),
        ("textarena:2048-v0", {"oponent": "random"}, r"env\.options\.oponent: unknown; did you mean 'opponent'"),
        ("textarena:2048-v0", {"opponent": "random"}, "a game for one player"),
        ("textarena:2048-v0", {"make": {"sides": 3}}, "sides"),
        ("textarena:TicTacToe-v0", {}, "a game for two: set env.options.opponent"),
        ("textarena:TicTacToe-v0", {"opponent": "scripted"}, r"env\.options\.script: give it with"),
        ("textarena:TicTacToe-v0", {"opponent": "human"}, r"env\.options\.opponent"),
        ("textarena:TicTacToe-v0", {"opponent": "random", "url": "http://x"}, r"env\.options\.url"),
        ("textarena:ThreePlayerTicTacToe-v0", {}, "more than two players"),
        ("gem:game:Sudoku-v0-esy", {}, "did you mean 'game:Sudoku-v0-easy'"),
        ("reasoning_gym:sudokuu", {}, "did you mean 'sudoku'"),
        ("reasoning_gym:sudoku", {"config": {"empty": 3}}, r"env\.options\.config does not fit sudoku.*empty"),
        ("reasoning_gym:sudoku", {"config": {"min_empty": 99}}, r"env\.options\.config does not fit sudoku"),
        ("reasoning_gym:composite", {}, r"env\.options\.datasets"),
        ("reasoning_gym:sudoku", {"size": "ten"}, r"env\.options\.size must be"),
        ("gymnasium:FrozenLake-v99", {}, "FrozenLake"),
        ("gymnasium:FrozenLake-v1", {"actions": ["up"]}, "4 different action names"),
        ("gym:x", {}, "gym:x|'gym'"),
        ("textarena:", {}, "write textarena:ID"),
    ],
)
def test_a_mistake_is_one_clear_error(use, options, said):
    if (scheme := scheme_of(use)) is not None:
        pytest.importorskip(SCHEMES[scheme[0]].modules[0])
    with pytest.raises(ConfigError, match=said):
        load_env(use, options)


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr("agentrl.env.adapter.missing_module", lambda scheme: "textarena")
    with pytest.raises(ConfigError, match=r"needs textarena.*pip install 'agentrl-train\[textarena\]'"):
        load_env("textarena:2048-v0")


def config_of(tmp_path, text):
    (tmp_path / "tools.yaml").write_text(text + "\nmodel: {tiny: {}}\nrollout: {max_tokens: 200}\n")
    return load_config(tmp_path / "tools.yaml")


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("reasoning_gym", "env: reasoning_gym:chain_sum\nwarmup: oracle"),
        ("gymnasium", "env: {use: gymnasium:FrozenLake-v1, options: {make: {is_slippery: false}}}"),
    ],
)
def test_check_accepts_a_scheme(tmp_path, module, text):
    pytest.importorskip(module)
    assert rehearse(config_of(tmp_path, text)).findings == ()


def test_an_unknown_scheme_is_refused_by_the_file(tmp_path):
    with pytest.raises(ConfigError, match=r"tools\.yaml:1:6.*SCHEME:REST.*did you mean 'textarena'"):
        config_of(tmp_path, "env: textarea:2048-v0")


def test_gymnasium_rewards_are_the_games_own():
    import asyncio

    env = load_env("gymnasium:FrozenLake-v1", {"make": {"is_slippery": False}, "reward_scale": 2.0})
    way = [call("act", action=a) for a in (1, 1, 2, 1, 2, 2)]
    episode = asyncio.run(play(env(), env.tasks("train", 0)[0], ScriptedPolicy(way)))
    assert episode.reward == 2.0


def test_an_mcp_server_by_its_command(tmp_path):
    pytest.importorskip("mcp")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "add 1 and 2"}\n')
    (tmp_path / "own.py").write_text("def right(episode) -> bool:\n    return True\n")
    use = f"mcp:{sys.executable} {SERVER}"
    reward = f"{tmp_path}/own.py:right"
    config = config_of(
        tmp_path, f"env: {{use: '{use}', options: {{reward: '{reward}'}}}}\ndata: {{train: rows.jsonl}}"
    )
    content = load_content(config)
    assert content.train_tasks[0].row == {"prompt": "add 1 and 2"}
    assert len(content.make_env().tools) > 0


async def test_an_unreachable_opponent_is_infrastructure():
    pytest.importorskip("textarena")
    options = {"opponent": "endpoint", "url": "http://127.0.0.1:9/v1", "model": "m"}
    env = load_env("textarena:TicTacToe-v0", options)
    from agentrl.errors import InfraError

    with pytest.raises(InfraError, match=r"the opponent at http://127\.0\.0\.1:9/v1 does not answer"):
        await play(env(), Task("t", {}, 1), ScriptedPolicy(["[0]"]))


@pytest.mark.parametrize(
    ("use", "options", "problem"),
    [
        ("reasoning_gym:chain_sum", {"config": {"seed": 3}}, "config.seed has no effect"),
        ("reasoning_gym:composite", {"datasets": ["chain_sum"]}, r"datasets\[0\] must be a section"),
        ("gymnasium:FrozenLake-v1", {"reward_scale": float("nan")}, "reward_scale must be a number"),
        ("gymnasium:FrozenLake-v1", {"reward_scale": 0}, "a finite number other than 0"),
        ("textarena:TicTacToe-v0", {"opponent": "endpoint", "url": "x", "model": "m"}, "not an http or https URL"),
        ("mcp:python 'x", {}, "no command line"),
        ("mcp:ftp://x", {}, "not an http or https URL"),
        ("mcp:http://127.0.0.1:1/mcp", {"server": {"nope": 1}}, "unknown key 'nope'"),
        ("mcp:http://127.0.0.1:1/mcp", {"server": {"url": "http://y"}}, "server.url"),
    ],
)
def test_options_are_checked_when_the_env_is_named(use, options, problem):
    if "mcp" not in use:
        pytest.importorskip(use.partition(":")[0])
    with pytest.raises(ConfigError, match=problem):
        load_env(use, options)


def test_a_url_among_a_commands_arguments_is_no_address():
    env = load_env("mcp:python server.py --from http://127.0.0.1:1", {})
    assert env.server() == {"command": ["python", "server.py", "--from", "http://127.0.0.1:1"]}


@pytest.mark.parametrize("name", ["GermanWhist-v0", "QuantumTicTacToe-v0", "PublicGoodsGame-v0"])
def test_a_game_for_two_is_never_played_alone(name):
    # The first refuses one player with a ValueError, the second ignores the number, and the third never ends.
    pytest.importorskip("textarena")
    with pytest.raises(ConfigError, match=r"a game for two: set env\.options\.opponent"):
        load_env(f"textarena:{name}")
    assert load_env(f"textarena:{name}", {"opponent": "random"}).num_players == 2


def test_what_else_a_game_needs_is_said(monkeypatch):
    pytest.importorskip("textarena")
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="env textarena:TwentyQuestions-v0: OpenRouter API key not found"):
        load_env("textarena:TwentyQuestions-v0")


async def test_the_reward_of_an_invalid_move_counts_where_the_game_swaps_it_with_the_reason():
    pytest.importorskip("textarena")
    env = load_env("textarena:Countdown-v0")
    episode = await play(env(), env.tasks("train", 0)[0], ScriptedPolicy([], otherwise="nonsense"))
    assert 0 < episode.reward < 1  # its progress
    assert (episode.faults, episode.solved) == ({}, False)
    assert str(episode.messages[-1].content).startswith("Invalid Move: Invalid action format.")


async def test_a_game_that_the_opponents_first_moves_ended_takes_no_move():
    pytest.importorskip("textarena")
    env = load_env("textarena:Nim-v0", {"opponent": "scripted", "script": ["nonsense"], "player": 1})
    game = env()
    await game.reset(env.tasks("train", 0)[0])
    rounds = game.game.state.turn
    _, _, terminated, _, _ = await game.step(Message("assistant", "[0 1]"))
    assert terminated
    assert game.game.state.turn == rounds
    assert game.game_reward() == 1.0
    await game.close()


async def test_an_opponent_that_never_gives_the_turn_is_an_error():
    pytest.importorskip("textarena")
    options = {"opponent": "scripted", "script": ["nonsense"], "player": 1}
    env = load_env("textarena:SantoriniBaseFixed-v0", options)
    with pytest.raises(ConfigError, match="made 1000 moves in a row"):
        await env().reset(env.tasks("train", 0)[0])


async def test_the_rewards_of_gem_may_be_rare():
    pytest.importorskip("gem")
    env = load_env("gem:rg:chain_sum")()
    episode = await play(env, env.tasks("train", 0)[0], ScriptedPolicy(["nonsense"]))
    assert (episode.reward, episode.solved, dict(episode.rewards)) == (0.0, False, {"won": 0.0})
    assert no_reward(env, [episode]) == ""


async def test_an_entry_of_reasoning_gym_is_the_same_in_every_episode():
    pytest.importorskip("reasoning_gym")
    env = load_env("reasoning_gym:list_functions", {"size": 20})
    for task in (env.tasks("train", 3)[i] for i in (7, 12, 17)):  # these draw from the global generator
        episodes = [await play(env(), task, env.oracle(task)) for _ in range(4)]
        assert len({e.messages[1].content for e in episodes}) == 1
        assert [e.reward for e in episodes] == [1.0] * 4


async def test_an_answer_that_a_dataset_cannot_read_scores_nothing():
    pytest.importorskip("reasoning_gym")
    env = load_env("reasoning_gym:prime_factorization", {"size": 2})
    task = env.tasks("train", 0)[0]
    episode = await play(env(), task, ScriptedPolicy(["hello"]))
    assert (episode.reward, episode.solved, episode.faults) == (0.0, False, {})
    assert (await play(env(), task, env.oracle(task))).solved
