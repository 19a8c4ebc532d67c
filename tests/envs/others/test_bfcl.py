"""BFCL v4 multi-turn with the data and the simulated APIs of the real package."""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

import pytest

from agentrl import ConfigError, load_config
from agentrl.env.checker import EnvCheckError, check_env
from agentrl.env.load import load_env
from agentrl.env.play import RandomPolicy, ScriptedPolicy, call, play
from agentrl.envs.others.bfcl import read_calls, run_call
from agentrl.preflight.dry_run import rehearse
from bench.reach import ECOSYSTEMS, played

pytest.importorskip("bfcl_eval")
ALL = {"held_out": "all"}


def test_verdicts_equal_bfcls_own_checker():
    agreed, count = ECOSYSTEMS["bfcl"][1](70)
    assert (agreed, count) == (210, 210)


@pytest.mark.parametrize(
    ("category", "format_"),
    [("multi_turn_base", "tools"), ("multi_turn_miss_func", "tools"), ("multi_turn_miss_param", "python")],
)
def test_the_oracle_solves_all_but_the_entry_with_a_bad_label(category, format_):
    options = ALL | {"format": format_}
    env = load_env(f"bfcl:{category}", options)
    tasks = env.tasks("train")
    assert len(tasks) == 200
    episodes = played(f"bfcl:{category}", options, [(task, env.oracle(task)) for task in tasks])
    failed = {e.task.id: e for e in episodes if not e.solved}
    assert list(failed) == [f"{category}_173"]
    said = " ".join(str(m.content) for m in failed[f"{category}_173"].messages)
    assert "ticket_id: expected integer, got 'ticket_001'" in said
    relaxed = played(f"bfcl:{category}", options | {"strict": False}, [(tasks[173], env.oracle(tasks[173]))])
    assert relaxed[0].solved


async def test_the_contract_holds_and_the_check_finds_the_bad_label():
    env = load_env("bfcl:multi_turn_base", ALL)
    tasks = env.tasks("train")
    await check_env(env, tasks[:4], oracle=env.oracle)
    with pytest.raises(EnvCheckError, match=r"multi_turn_base_173: the oracle earned 0\.0, not 1\.0"):
        await check_env(env, [tasks[173]], oracle=env.oracle)


async def test_random_and_silent_policies_earn_nothing():
    env = load_env("bfcl:multi_turn_base")
    tasks = env.tasks("held_out")
    assert (len(tasks), len(env.tasks("train"))) == (40, 160)

    async def one(task, policy):
        return await play(env(), task, policy)

    silent = await asyncio.gather(*[one(task, ScriptedPolicy([])) for task in tasks])
    made = [env() for _ in tasks]
    wild = await asyncio.gather(
        *[
            play(e, t, RandomPolicy(lambda e=e: e.tools, i))
            for i, (e, t) in enumerate(zip(made, tasks, strict=True))
        ]
    )
    assert {e.reward for e in [*silent, *wild]} == {0.0}


async def test_a_withheld_function_comes_with_its_turn():
    env = load_env("bfcl:multi_turn_miss_func", ALL)
    task = env.tasks("train")[0]
    episode = await play(env(), task, env.oracle(task))
    assert "sort" not in [s["function"]["name"] for s in episode.tools]
    assert any('"name": "sort"' in str(m.content) and "updated some more functions" in str(m.content)
               for m in episode.messages if m.role == "user")  # fmt: skip
    assert episode.solved


def test_calls_in_python_text_are_parsed_and_never_evaluated():
    assert read_calls("[cd(folder='a'), ls()]") == [("cd", {"folder": "a"}), ("ls", {})]
    assert read_calls("ls(a=[1, {'b': -2.5}])") == [("ls", {"a": [1, {"b": -2.5}]})]
    for text in (
        "done",
        "[__import__('os').system('x')]",
        "[f(a=open('x'))]",
        "[f(1)]",
        "f(",
        "(" * 9999,
        "[f(**{})]x",
        "[f(a={[]})]",
        "[f(a={[]: 1})]",
        f"[f(a=0x{'f' * 300} + 1j)]",
    ):
        assert read_calls(text) == []


async def test_numbers_without_end_are_answered():
    class Api:
        def same(self, value: object) -> object:
            return value

    huge = 1 << 20_000
    for value in (huge, {"a": huge}, [huge]):
        assert run_call({"Api": Api()}, "same", {"value": value}).startswith(
            "Error during execution: Exceeds the limit"
        )
    assert run_call({"Api": Api()}, "same", {"value": {"a": {1}}}) == "{'a': {1}}"
    env = load_env("bfcl:multi_turn_base", {"format": "python", "strict": False})
    cut = f"[ls(a=0x{'f' * 6000})]"
    episode = await play(env(), env.tasks("train")[0], ScriptedPolicy([cut, "[ls(a={[]})]"]))
    assert episode.solved is False


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("power", {"base": 2, "exponent": 1 << 21}, "the result has too many digits"),
        ("power", {"base": -2, "exponent": 10}, '{"result": 1024}'),
        ("power", {"base": 1, "exponent": 1 << 60}, '{"result": 1}'),
        ("square_root", {"number": 2, "precision": 10_001}, "precision: at most 10,000 digits"),
        ("logarithm", {"value": 2, "base": 3, "precision": 10_001}, "precision: at most 10,000 digits"),
        ("round_number", {"number": 2, "decimal_places": -10_001}, "decimal_places: at most 10,000 digits"),
    ],
)
def test_calculations_that_no_timeout_could_end_are_errors(name: str, arguments: dict[str, Any], said: str):
    module = importlib.import_module("bfcl_eval.eval_checker.multi_turn_eval.func_source_code.math_api")
    text = run_call({"MathAPI": module.MathAPI()}, name, arguments)
    assert text.removeprefix("Error during execution: ") == said


async def test_private_methods_cannot_be_called():
    env = load_env("bfcl:multi_turn_base", {"format": "python", "strict": False})
    task = env.tasks("train")[0]
    episode = await play(env(), task, ScriptedPolicy(["[_load_scenario(scenario={})]"]))
    assert "name '_load_scenario' is not defined" in str(episode.messages[3].content)


async def test_an_episode_that_is_cut_short_is_not_valid():
    env = load_env("bfcl:multi_turn_base")
    task = env.tasks("train")[0]
    episode = await play(env(), task, env.oracle(task), max_turns=3)
    assert (episode.reward, episode.solved) == (0.0, False)


async def test_a_turn_of_too_many_steps_fails():
    env = load_env("bfcl:multi_turn_base")
    task = env.tasks("train")[0]
    script = [*[call("ls")] * 21, *env.oracle(task)._script]
    assert (await play(env(), task, ScriptedPolicy(script))).reward == 0.0
    assert (await play(env(), task, ScriptedPolicy(script[5:]))).reward == 1.0


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match="no such category; did you mean 'multi_turn_base'"):
        load_env("bfcl:multi_turn_bas")
    with pytest.raises(ConfigError, match=r"env\.options\.format"):
        load_env("bfcl:multi_turn_base", {"format": "json"})


def test_check_accepts_it(tmp_path):
    limits = "rollout: {max_tokens: 2000, token_budget: 16000}\ndata: {overlong_prompts: drop}"
    (tmp_path / "tools.yaml").write_text(
        "env: bfcl:multi_turn_base\nmodel: {tiny: {max_context: 32768}}\nwarmup: {use: oracle, num: 8}\n" + limits
    )
    assert rehearse(load_config(tmp_path / "tools.yaml")).findings == ()
