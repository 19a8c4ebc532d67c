"""The commands as a user runs them: what they print, and how they refuse."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from safetensors import SafetensorError

import agentrl
from agentrl.cli import main
from agentrl.cli.app import _with_home
from agentrl.config import dump_config, load_config
from agentrl.config.describe import json_schema
from agentrl.env.load import load_env
from agentrl.extras import EXTRAS
from agentrl.run_folder.records import EpisodeRecord
from agentrl.run_folder.store import RunStore
from agentrl.types import CallRecord, Episode, Message, Segment, StopReason, Task, ToolCall, Turn

GOOD = "env: agentrl.envs.calculator:Calculator\nmodel: {tiny: {vocab: 400}}\nwarmup: {num: 20}\n"


STEPS = '''
from agentrl import Task, ToolEnv, reward, tool
from agentrl.env import ToolResult
from agentrl.testing.policy import ScriptedPolicy, call


class Steps(ToolEnv):
    """Go on."""

    def setup(self) -> str:
        return "Go."

    @tool
    def go(self, worth: float) -> ToolResult:
        """Go one step."""
        return ToolResult("went", reward=worth)

    @classmethod
    def tasks(cls, split, seed):
        return [Task("t")]

    @classmethod
    def oracle(cls, task):
        return ScriptedPolicy([call("go", worth=1.0), call("go", worth=0.5), "done"])
'''

MAILING = '''
from pathlib import Path

from agentrl import Task, ToolEnv, reward, tool


class Mail:
    outside = True

    @tool
    def send(self, text: str) -> str:
        """Send a mail."""
        Path(__file__).with_name("sent").write_text(text)
        return "sent"


class Mailing(ToolEnv):
    """Send a mail."""

    toolboxes = (Mail,)

    def setup(self) -> str:
        return "Send one."

    @reward
    def solved(self, episode) -> bool:
        return bool(episode.turns[0].calls)

    @classmethod
    def tasks(cls, split, seed):
        return [Task("t")]
'''

ASKING = '''
from agentrl import Message, Task, ToolEnv, reward


class Asking(ToolEnv):
    """Talk."""

    async def setup(self) -> str:
        said = await self.model.chat([Message("user", "Begin.")])
        return said.content + "hi"

    @reward
    def solved(self, episode) -> bool:
        return len(episode.turns) > 3

    @classmethod
    def tasks(cls, split, seed):
        return [Task("t")]
'''

CONTEST = '''
from typing import Literal

from agentrl import Task, ToolEnv, reward, tool
from agentrl.env.read import final_answer
from agentrl.testing.policy import ScriptedPolicy


class Contest(ToolEnv):
    """Write at length."""

    def __init__(self, prize: float):
        self.prize = prize

    def setup(self) -> str:
        return "Write."

    @tool
    def write(self, style: Literal["short", "long"] = "short", note: str | None = None) -> str:
        """Write."""
        return "written"

    @reward
    def solved(self, episode) -> bool:
        return len(final_answer(episode)) > 4

    @reward(per="turn", weight=0.5)
    def tidy(self, turn) -> bool:
        return not turn.calls

    @reward(per="group")
    def longest(self, episodes) -> list[float]:
        lengths = [len(final_answer(e)) for e in episodes]
        return [self.prize if n == max(lengths) else 1.0 for n in lengths]

    @classmethod
    def tasks(cls, split, seed):
        return [Task("t")]

    @classmethod
    def oracle(cls, task):
        return ScriptedPolicy(["a long text"])
'''


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Runs a command in this process; gives its exit code, standard output and standard error."""
    monkeypatch.setenv("COLUMNS", "160")

    def call(*words: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main([str(word) for word in words])
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return call


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def episode(name: str, reward: float | None, outcome: str = "ok") -> Episode:
    call = ToolCall("c1", "calculator", {"expression": "1+2"})
    asked, answer = Message("assistant", "", (call,)), Message("tool", "3", tool_call_id="c1", name="calculator")
    last = Message("assistant", f"the answer of {name}")
    return Episode(
        id=name,
        task=Task("t1", {"question": "1+2?"}),
        messages=(Message("user", "1+2?"), asked, answer, last),
        turns=(
            Turn(asked, (answer,), 0.0, "stop", 5, 0.2, 0.01, (CallRecord(call, "3", outcome, 0.01),)),
            Turn(last, (), 0.0, "stop", 2, 0.1, 0.0),
        ),
        segments=(Segment((1,), "prompt", -1, 0), Segment((2, 3), "sampled", 0, 1, (-1.0, -1.0), (0, 0))),
        stop_reason=StopReason.ANSWERED if reward is not None else StopReason.INFRA,
        reward=reward,
        rewards={"solved": reward or 0.0},
        solved=None if reward is None else reward > 0,
        error=None if reward is not None else "SandboxError: the box is gone",
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder with two steps of episodes."""
    config = load_config(write(tmp_path / "tools.yaml", GOOD))
    with RunStore.open(config, tmp_path / "runs/r") as store:
        for step in (1, 2):
            records = [
                EpisodeRecord.of(step, 0, episode(f"s{step}/good", 1.0), 0.7),
                EpisodeRecord.of(step, 0, episode(f"s{step}/bad", 0.0, outcome="invalid_args"), -0.7),
                EpisodeRecord.of(step, 0, episode(f"s{step}/lost", None), None),
            ]
            store.write_episodes(step, records)
    return tmp_path / "runs/r"


class TestTheTree:
    def test_help_and_the_entry_point(self):
        result = subprocess.run([sys.executable, "-m", "agentrl", "--help"], capture_output=True, text=True)
        assert result.returncode == 0
        for command in ("train", "eval", "check", "show", "new", "config", "doctor"):
            assert f"│ {command} " in result.stdout

    def test_the_version_and_shell_completion(self, run):
        code, out, _ = run("--version")
        assert (code, out.strip()) == (0, f"agentrl {version('agentrl-train')}")
        code, out, _ = run("--show-completion")
        assert code in (0, 1)  # 1 where the shell is not known
        env = os.environ | {"_AGENTRL_COMPLETE": "complete_bash", "COMP_WORDS": "agentrl do", "COMP_CWORD": "1"}
        done = subprocess.run([sys.executable, "-m", "agentrl"], env=env, capture_output=True, text=True)
        assert "doctor" in done.stdout

    def test_envs_claims_no_package_that_another_python_may_have(self, run):
        code, out, _ = run("envs")
        lines = [line.strip() for line in out.splitlines()]
        assert code == 0
        assert "verifiers:ID  needs verifiers, in any Python" in lines
        assert "inspect:FILE@TASK  needs inspect-ai, in any Python" in lines
        assert "gymnasium:ID  installed" in lines

    def test_a_wrong_option_is_told_apart_from_a_failure(self, run):
        code, _, err = run("train", "x.yaml", "--frsh")
        assert code == 2
        assert "--fresh" in err
        assert "Traceback" not in err

    def test_a_run_that_starts_over_has_no_changed_code_to_accept(self, run):
        code, _, err = run("train", "x.yaml", "--fresh", "--accept-code")
        assert (code, err) == (2, "--accept-code has no effect with --fresh, which resumes nothing\n")

    def test_the_home_folder_is_meant_by_a_tilde_that_the_shell_leaves(self, run, tmp_path: Path, monkeypatch):
        (tmp_path / "home").mkdir()
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.chdir(tmp_path)
        assert run("new", "~/mine")[0] == 0
        assert run("runs", "~/mine")[0] == run("runs", str(tmp_path / "home" / "mine"))[0]
        assert sorted(os.listdir(tmp_path)) == ["home"]
        assert _with_home("--out=~/e") == f"--out={tmp_path}/home/e"
        assert [_with_home(text) for text in ("a~", "--set=a=~/b", "--", "-v", "")] == [
            "a~",
            "--set=a=~/b",
            "--",
            "-v",
            "",
        ]

    def test_a_closed_pipe_is_no_error(self, folder: Path):
        command = f"{sys.executable} -m agentrl show {folder} -n 200 | head -1"
        result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        assert "Traceback" not in result.stderr
        assert "step 2" in result.stdout

    def test_an_encoding_without_the_lines_of_a_table_is_no_error(self, folder: Path):
        env = {**os.environ, "PYTHONIOENCODING": "ascii"}
        command = [sys.executable, "-m", "agentrl", "show", str(folder)]
        result = subprocess.run(command, capture_output=True, text=True, env=env)
        assert (result.returncode, result.stderr) == (0, "")
        assert "\\u2500" in result.stdout


class TestBadInput:
    def test_mistakes_in_the_yaml_are_printed_without_a_traceback(self, run, tmp_path: Path):
        path = write(tmp_path / "tools.yaml", GOOD + "rollout:\n  grop_size: 3\nstepz: 1\n")
        for command in ("train", "check"):
            code, out, err = run(command, path)
            assert code == 2
            assert out == ""
            assert err.startswith(f"{path}:5:3: rollout.grop_size: unknown key; did you mean 'group_size'?\n")
            assert f"{path}:6:1: stepz: unknown key; did you mean 'steps'?" in err
            assert "Traceback" not in err

    def test_a_flag_is_named_as_it_was_written(self, run, tmp_path: Path):
        path = write(tmp_path / "tools.yaml", GOOD)
        code, _, err = run("train", path, "--set", "rollout.group_size=1.5")
        assert code == 2
        assert err == "--set rollout.group_size=1.5: rollout.group_size must be a whole number, got 1.5\n"

    def test_a_missing_model_directory(self, run, tmp_path: Path):
        path = write(tmp_path / "tools.yaml", GOOD.replace("{tiny: {vocab: 400}}", "{path: qwen}"))
        code, _, err = run("train", path)
        assert code == 2
        assert f"{path}:2:15: model.path: there is no folder {tmp_path}/qwen" in err
        assert not (tmp_path / "runs").exists()

    def test_a_folder_that_is_no_model(self, run, tmp_path: Path):
        (tmp_path / "qwen").mkdir()
        path = write(tmp_path / "tools.yaml", GOOD.replace("{tiny: {vocab: 400}}", "{path: qwen}"))
        code, _, err = run("check", path)
        assert code == 2
        assert "qwen: has no config.json, so it is not a Hugging Face model" in err

    @pytest.mark.parametrize(
        ("body", "said"),
        [
            ("    @reward\n    def r(self): return float('nan')", "reward 'r' of E returned nan"),
            ("    @reward\n    def r(self): return 'good'", "reward 'r' of E returned 'good', not a number"),
            ("    @tool\n    def t(self, x): 'doc'", "argument 'x' has no type hint"),
            ("    def setup(self, a: int, b: str): return 'hi'", "argument 'b' of E.setup is missing; it has: a"),
            ("    def setup(self, a: int): raise KeyError('x')", "E.setup on task"),
            ("    nope = nope", "NameError"),
        ],
    )
    def test_an_env_that_cannot_be_used(self, run, tmp_path: Path, body: str, said: str):
        base = (
            "from agentrl import ToolEnv, reward, tool\n"
            "from agentrl.env.tasks import generated\n"
            "class Base(ToolEnv):\n"
            "    'A test.'\n"
            "    def setup(self, a: int): return 'hi'\n"
            "    @classmethod\n"
            "    def tasks(cls, split='train', seed=0):\n"
            "        return generated('b', split, seed, 10, lambda rng: {'a': 1})\n"
            f"class E(Base):\n{body}\n"
        )
        write(tmp_path / "bad.py", base)
        path = write(tmp_path / "tools.yaml", "env: bad.py:E\nmodel: {tiny: {}}\n")
        code, _, err = run("check", path)
        assert code == 2
        assert said in err
        assert f"{Path(agentrl.__file__).parent}/" not in err  # a traceback shows the author's lines only

    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ("data: {sampler: {order: own.py:Order}}", "data.sampler.order"),
            ("rollout: {refill_zero_signal: 4, group_filter: own.py:trains}", "rollout.group_filter"),
        ],
    )
    def test_an_order_and_a_filter_that_do_not_exist(self, run, tmp_path: Path, settings: str, said: str):
        write(tmp_path / "steps.py", STEPS)
        write(tmp_path / "own.py", "")
        path = write(tmp_path / "tools.yaml", f"env: steps.py:Steps\nmodel: {{tiny: {{}}}}\n{settings}\n")
        code, _, err = run("check", path)
        assert code == 2
        assert f"{said} '{tmp_path}/own.py:" in err

    def test_a_tool_that_fails_is_said(self, run, tmp_path: Path):
        path = write(tmp_path / "tools.yaml", "env: steps.py:Steps\nmodel: {tiny: {}}\n")
        for body, said in (("return ToolResult(", False), ("raise RuntimeError('boom') #", True)):
            write(tmp_path / "steps.py", STEPS.replace("return ToolResult(", body))
            _, out, err = run("check", path)
            assert ("the tool go failed in the scripted episode: Error: RuntimeError: boom" in out) == said, (
                out + err
            )

    def test_an_env_with_slow_tools_is_checked_with_few_turns(self, run, tmp_path: Path, monkeypatch):
        monkeypatch.setattr("agentrl.preflight.dry_run.SLOW_TURN_S", 0.05)
        slow = (
            "import time; time.sleep(0.1)\n"
            "        with open('calls.txt', 'a') as file: file.write('x')\n"
            "        return ToolResult("
        )
        write(tmp_path / "steps.py", STEPS.replace("return ToolResult(", slow))
        path = write(tmp_path / "tools.yaml", "env: steps.py:Steps\nmodel: {tiny: {}}\n")
        monkeypatch.chdir(tmp_path)
        code, out, err = run("check", path)
        assert code == 0, err
        assert re.search(r"a turn takes 0\.\d s: checking the env takes about \d+ s", err)
        assert "the env was checked on one task with few turns" in out
        few = (tmp_path / "calls.txt").stat().st_size
        monkeypatch.setattr("agentrl.preflight.dry_run.SLOW_TURN_S", 60.0)
        assert "a turn takes" not in run("check", path)[2]
        assert (tmp_path / "calls.txt").stat().st_size - few > 2 * few

    def test_tools_that_act_outside_are_called_only_when_asked(self, run, tmp_path: Path):
        write(tmp_path / "mine.py", MAILING)
        path = write(tmp_path / "tools.yaml", "env: mine.py:Mailing\nmodel: {tiny: {vocab: 400}}\n")
        code, out, err = run("check", path)
        assert code == 0, out + err
        assert "were not called: send; --play calls them" in out
        assert "(not called by agentrl check)" in out
        assert not (tmp_path / "sent").exists()
        code, out, _ = run("check", path, "--play")
        assert (code, "were not called" in out) == (0, False)
        assert (tmp_path / "sent").exists()

    def test_the_model_may_be_asked_in_setup(self, run, tmp_path: Path):
        write(tmp_path / "mine.py", ASKING)
        path = write(tmp_path / "tools.yaml", "env: mine.py:Asking\nmodel: {tiny: {vocab: 400}}\n")
        code, out, err = run("check", path)
        assert code == 0, out + err
        assert "(no model is loaded)" in out

    def test_overlong_prompts_are_left_out_as_in_training(self, run, tmp_path: Path):
        write(
            tmp_path / "mine.py",
            ASKING.replace("setup(self)", "setup(self, more=1)").replace('"hi"', '"hi " * more'),
        )
        rows = "".join(json.dumps({"more": n}) + "\n" for n in (1, 2, 900))
        write(tmp_path / "rows.jsonl", rows)
        text = "env: mine.py:Asking\nmodel: {tiny: {vocab: 400}}\nrollout: {token_budget: 400}\n"
        path = write(tmp_path / "tools.yaml", text + "data: {train: rows.jsonl, overlong_prompts: drop}\n")
        code, out, err = run("check", path)
        assert code == 0, out + err
        assert "1 of 3 training tasks are left out" in out
        code, out, _ = run("check", path, "--set", "data.overlong_prompts=null")
        assert (code, "nothing can be sampled" in out) == (2, True)

    def test_layers_that_the_model_does_not_have_are_refused(self, run, tmp_path: Path):
        path = write(tmp_path / "tools.yaml", GOOD)
        for command in ("check", "train"):
            code, _, err = run(command, path, "--set", "learner.lora.targets=[q_proj, k_prj]")
            assert code == 2
            assert err == (
                "learner.lora.targets: the model has no linear layer 'k_prj'; did you mean 'k_proj'?; its linear "
                "layers are down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj\n"
            )
            assert not list(tmp_path.glob("runs/*"))
        assert run("check", path, "--set", "learner.lora.targets=[self_attn.q_proj, v_proj]")[0] == 0

    @pytest.mark.parametrize(
        ("extra", "flag", "key"),
        [
            ("lora", "learner.lora.rank=2", "learner.lora"),
            ("ray", "rollout.workers=2", "rollout.workers"),
            ("serve", "agent.command=[sh]", "agent"),
        ],
    )
    def test_a_package_that_the_run_needs_later_is_asked_for_at_once(
        self, run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: str, flag: str, key: str
    ):
        monkeypatch.setattr("agentrl.extras.EXTRAS", {**EXTRAS, extra: ("no_such_package",)})
        path = write(tmp_path / "tools.yaml", GOOD)
        for command in ("check", "train"):
            code, _, err = run(command, path, "--set", flag)
            said = f"{key} needs no_such_package, which is not installed: pip install 'agentrl-train[{extra}]'\n"
            assert (code, err) == (2, said)
            assert not list(tmp_path.glob("runs/*"))

    @pytest.mark.parametrize(
        ("extra", "words", "command"),
        [
            ("train", ["rescore", "runs/x"], "agentrl rescore"),
            ("serve", ["view", "."], "agentrl view"),
            ("serve", ["env", "package", "a:B", "--as", "verifiers"], "agentrl env package"),
        ],
    )
    def test_a_package_that_a_command_needs_is_asked_for_by_its_name(
        self, run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: str, words: list[str], command: str
    ):
        (tmp_path / "episodes").mkdir()
        write(tmp_path / "config.yaml", GOOD)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("agentrl.extras.EXTRAS", {**EXTRAS, extra: ("no_such_package",)})
        code, _, err = run(*words)
        said = f"{command} needs no_such_package, which is not installed: pip install 'agentrl-train[{extra}]'\n"
        assert (code, err) == (2, said)

    def test_more_held_out_tasks_than_there_are_is_said(self, run, tmp_path: Path):
        write(tmp_path / "rows.jsonl", '{"start": 1, "operations": [["+", 2]]}\n' * 3)
        rows = "data: {train: rows.jsonl, held_out: rows.jsonl}\n"
        path = write(tmp_path / "tools.yaml", GOOD + rows + "eval: {tasks: 100000000}\n")
        code, out, err = run("check", path)
        assert code == 0, out + err
        assert "note: eval.tasks is 100,000,000, and there are 3: all of them are played" in out
        path = write(tmp_path / "tools.yaml", GOOD + rows + "eval: {sets: {more: {tasks: 5}}}\n")
        assert "note: eval.sets.more.tasks is 5, and there are 3: all of them are played" in run("check", path)[1]
        path = write(tmp_path / "tools.yaml", GOOD + rows)
        assert "all of them are played" not in run("check", path)[1]

    def test_nobody_asks_for_the_tools_of_tasks_without_demonstrations(self, run, tmp_path: Path, monkeypatch):
        """Asking resets an env for each of eight tasks."""
        asked: list[object] = []

        async def tools(make_env, tasks):
            asked.append(tasks)
            return []

        monkeypatch.setattr("agentrl.preflight.dry_run.task_tools", tools)
        plain = GOOD.replace("warmup: {num: 20}\n", "")
        assert run("check", write(tmp_path / "tools.yaml", plain))[0] == 0
        assert not asked
        assert run("check", write(tmp_path / "tools.yaml", GOOD))[0] == 0
        assert asked

    def test_a_demonstration_that_cannot_be_written_is_named(self, run, tmp_path: Path):
        said = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "<think>Hm.</think>Done."}]
        rows = ([said[0], {"role": "assistant", "content": "Done."}], said)
        (tmp_path / "shown.jsonl").write_text("\n".join(json.dumps({"messages": row}) for row in rows))
        path = write(tmp_path / "tools.yaml", GOOD.replace("num: 20", "demonstrations: shown.jsonl"))
        code, _, err = run("check", path)
        assert code == 2
        assert "warmup: demonstration 2: an assistant message has '</think>' in its text" in err

    def test_demonstrations_that_the_policy_may_not_sample_are_said(self, run, tmp_path: Path):
        talk = {
            "messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "many words " * 40}]
        }
        short = {"messages": [talk["messages"][0], {"role": "assistant", "content": "yes"}]}
        write(tmp_path / "shown.jsonl", json.dumps(talk) + "\n" + json.dumps(short) + "\n")
        path = write(tmp_path / "tools.yaml", GOOD.replace("num: 20", "demonstrations: shown.jsonl"))
        code, out, err = run("check", path, "--set", "rollout.max_tokens=40")
        assert code == 0, out + err
        assert (
            "note: 1 of 2 demonstrations have a completion above rollout.max_tokens = 40 (the longest has " in out
        )
        assert "may not sample" not in run("check", path, "--set", "rollout.max_tokens=2000")[1]

    def test_demonstrations_of_tools_that_are_not_there_are_said(self, run, tmp_path: Path):
        def shown(name: str, **more: object) -> str:
            call = {
                "id": "1",
                "type": "function",
                "function": {"name": name, "arguments": '{"expression": "1+1"}'},
            }
            asked = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "tool_calls": [call]}]
            answer = {"role": "tool", "tool_call_id": "1", "content": "2"}
            return json.dumps({"messages": [*asked, answer, {"role": "assistant", "content": "2"}], **more}) + "\n"

        own = [{"type": "function", "function": {"name": "abacus", "parameters": {"type": "object"}}}]
        write(tmp_path / "shown.jsonl", shown("calculator") + shown("calulator") + shown("abacus", tools=own))
        path = write(tmp_path / "tools.yaml", GOOD.replace("num: 20", "demonstrations: shown.jsonl"))
        code, out, err = run("check", path)
        assert code == 0, out + err
        assert "note: 1 of 3 demonstrations call a tool that the policy is not offered" in out
        assert "demonstration 2 calls calulator (did you mean 'calculator'?)" in out

    def test_a_prompt_that_does_not_fit_is_a_problem(self, run, tmp_path: Path):
        path = write(tmp_path / "tools.yaml", GOOD.replace("400", "400, max_context: 100"))
        code, out, _ = run("check", path, "--set", "rollout.token_budget=90")
        assert code == 2
        assert "the model takes 100: nothing can be sampled" in out
        assert "rollout.token_budget is 90: nothing can be sampled" in out
        assert "demonstration has" in out

    def test_limits_that_no_good_episode_keeps_are_a_problem(self, run, tmp_path: Path):
        path = write(tmp_path / "tools.yaml", GOOD)
        code, out, _ = run("check", path, "--set", "rollout.max_turns=1")
        assert code == 2
        assert "the scripted episode was cut: max_turns after 1 turn" in out
        code, out, _ = run("check", path, "--set", "rollout.max_tokens=9", "--set", "rollout.token_budget=150")
        assert code == 2
        assert "tokens, rollout.max_tokens is 9: the policy would be cut there; set rollout.max_tokens to" in out
        assert "tokens, rollout.token_budget is 150" in out

    def test_a_weight_of_a_part_that_no_episode_has_is_a_problem(self, run, tmp_path: Path):
        write(tmp_path / "mine.py", "def score(episode):\n    return {'solved': 1.0, 'form': 0.5}\n")
        write(tmp_path / "rows.jsonl", '{"prompt": "Say."}\n')
        text = (
            "env:\n  use: agentrl.env.compose:ComposedEnv\n  options: {reward: mine.py:score}\n"
            "  reward_weights: {score/slved: 2}\nmodel: {tiny: {vocab: 300}}\ndata: {train: rows.jsonl}\n"
        )
        code, out, _ = run("check", write(tmp_path / "tools.yaml", text))
        assert code == 2
        assert "no episode had the part 'score/slved', so its weight has no effect" in out
        assert "the parts were: score/form, score/solved; did you mean 'score/solved'?" in out
        code, out, _ = run("check", write(tmp_path / "tools.yaml", text.replace("slved", "solved")))
        assert (code, "no episode had" in out) == (0, False)

    def test_two_tasks_of_one_id_are_told_and_are_no_problem(self, run, tmp_path: Path):
        tasks = 'return [Task("t"), Task("u"), Task("t")]'
        write(tmp_path / "mine.py", STEPS.replace('return [Task("t")]', tasks))
        path = write(tmp_path / "tools.yaml", "env: mine.py:Steps\nmodel: {tiny: {vocab: 400}}\n")
        code, out, err = run("check", path, "--set", "rollout.max_tokens=400")
        assert "note: two train tasks have the id 't' (number 0 and number 2, counted from 0)" in out
        assert "note: two held_out tasks have the id 't'" in out
        assert code == 0, out + err
        write(tmp_path / "mine.py", STEPS)
        assert "note: two" not in run("check", path)[1]

    def test_a_module_that_is_not_there(self, run, tmp_path: Path):
        path = write(tmp_path / "tools.yaml", GOOD.replace("agentrl.envs.calculator", "shops.big"))
        code, _, err = run("check", path)
        assert code == 2
        assert "shops" in err


class TestCheck:
    def test_it_shows_the_tokens_with_their_advantage(self, run, tmp_path: Path):
        code, out, _ = run("check", write(tmp_path / "tools.yaml", GOOD))
        assert code == 0
        assert "calculator(expression: string)" in out
        assert "rewards         solved" in out
        assert "solved          solved (@reward(solved=...))" in out
        assert "the template only appends" in out
        assert "played by the env's oracle" in out
        assert "sampled: 3" in out
        assert "advantage +0.94" in out
        assert "prompt: " in out
        assert "observation: " in out
        assert out.rstrip().endswith(f"agentrl train {tmp_path / 'tools.yaml'}")
        assert os.listdir(tmp_path) == ["tools.yaml"]  # nothing is left behind

    def test_a_declaration_that_the_oracle_misses_or_silence_meets_is_noted(self, run, tmp_path: Path):
        path = write(tmp_path / "tools.yaml", GOOD.replace("env: ", "env:\n  use: "))
        assert "count as solved" not in (run("check", path)[1])
        code, out, _ = run("check", path, "--set", "env.solved_at=3")
        assert code == 0
        assert "note: the oracle's episode does not count as solved (total reward at least 3" in out
        out = run("check", path, "--set", "env.solved_at=-1")[1]
        assert "note: an episode whose policy only says 'done' counts as solved (total reward at least -1" in out

    def test_dr_grpo_shows_its_own_advantage(self, run, tmp_path: Path):
        path = write(tmp_path / "tools.yaml", GOOD)
        code, out, _ = run("check", path, "--set", "algorithm.advantage=dr_grpo")
        assert code == 0
        assert "advantage +0.50" in out
        assert out.rstrip().endswith(f"agentrl train {path} --set algorithm.advantage=dr_grpo")

    def test_turn_level_shows_an_advantage_for_each_turn(self, run, tmp_path: Path):
        write(tmp_path / "steps.py", STEPS)
        path = write(tmp_path / "tools.yaml", "env: steps.py:Steps\nmodel: {tiny: {vocab: 400}}\n")
        code, out, _ = run("check", path, "--set", "algorithm.advantage=turn_level")
        assert code == 0, out
        shown = [float(value) for value in re.findall(r"advantage ([+-][0-9.]+)", out)]
        assert len(shown) == 3
        # The first turn earns 1 and the third nothing; what is still to come counts for each.
        assert shown[0] > shown[1] > shown[2]

    def test_every_reward_is_named_and_played(self, run, tmp_path: Path):
        write(tmp_path / "contest.py", CONTEST)
        text = "env: {use: contest.py:Contest, options: {prize: 3}}\nmodel: {tiny: {vocab: 400}}\n"
        path = write(tmp_path / "tools.yaml", text)
        code, out, _ = run("check", path)
        assert code == 0, out
        assert "rewards         solved, tidy per turn (weight 0.5), longest per group\n" in out
        assert 'write(style?: "short" | "long", note?: string | null)' in out
        assert "reward: 4.5 (solved 1, longest 3, tidy 0.5)" in out
        assert "half score 4.5 like this one and half 1.5" in out
        write(tmp_path / "contest.py", CONTEST.replace("[self.prize if", "[self.price if"))
        code, _, err = run("check", path)
        assert code == 2
        assert (
            "reward 'longest' of Contest raised AttributeError: 'Contest' object has no attribute 'price'" in err
        )


class TestShow:
    def test_the_last_step_by_default(self, run, folder: Path):
        code, out, _ = run("show", folder)
        assert code == 0
        assert "step 2 (recorded: 1 to 2): 3 episodes" in out
        assert 'calculator(expression="1+2")' in out
        assert "the answer of s2/good" in out
        assert "advantage: +0.70" in out

    def test_the_worst_come_first(self, run, folder: Path):
        code, out, _ = run("show", folder, "--worst", "--step", 1, "-n", 2)
        assert code == 0
        assert out.index("s1/lost") < out.index("s1/bad") < out.index("s1/good")
        assert "failed: SandboxError: the box is gone" in out
        assert "not trained" in out
        assert "invalid_args" in out
        assert "the answer of s1/good" not in out

    def test_one_by_its_id(self, run, folder: Path):
        code, out, _ = run("show", folder, "--episode", "s2/bad")
        assert code == 0
        assert "the answer of s2/bad" in out
        assert "s2/good" not in out
        code, _, err = run("show", folder, "--episode", "s2/baad")
        assert code == 2
        assert re.search(r"not in any step of .*; did you mean 's2/bad'\?", err)
        code, out, _ = run("show", folder, "--episode", "s1/good")  # of an earlier step
        assert (code, "the answer of s1/good" in out) == (0, True)
        code, _, err = run("show", folder, "--episode", "s1/good", "--step", 2)
        assert code == 2
        assert "not in step 2 of" in err

    def test_what_is_not_there(self, run, folder: Path, tmp_path: Path):
        code, _, err = run("show", folder, "--step", 9)
        assert code == 1
        assert "no episodes of step 9; it has steps 1 to 2" in err
        code, _, err = run("show", tmp_path)
        assert code == 1
        assert "no run folder" in err

    def test_text_of_the_policy_is_never_markup(self, run, tmp_path: Path):
        config = load_config(write(tmp_path / "tools.yaml", GOOD))
        nasty = replace(episode("a[b]/c", 1.0), messages=(Message("user", "[red]x[/red] [/nope] \x1b[31m"),))
        with RunStore.open(config, tmp_path / "r") as store:
            store.write_episodes(1, [EpisodeRecord.of(1, 0, nasty, 0.0)])
        code, out, _ = run("show", tmp_path / "r")
        assert code == 0
        assert "[red]x[/red] [/nope]" in out
        assert "\x1b" not in out
        assert "␛[31m" in out


class TestConfig:
    def test_schema(self, run, tmp_path: Path):
        code, out, _ = run("config", "schema")
        assert code == 0
        assert json.loads(out) == json_schema()
        assert run("config", "schema", "-o", tmp_path / "s.json")[0] == 0
        assert json.loads((tmp_path / "s.json").read_text()) == json_schema()

    def test_a_missing_folder_is_named(self, run, tmp_path: Path):
        code, _, err = run("config", "schema", "-o", tmp_path / "no/such.json")
        assert (code, "there is no folder" in err) == (2, True)
        code, _, err = run("show", "x" * 5000)
        assert (code, err.count("\n")) == (1, 1)

    def test_show_and_diff(self, run, tmp_path: Path):
        path = write(tmp_path / "tools.yaml", GOOD)
        code, out, _ = run("config", "show", "--all", path, "--set", "seed=4")
        assert code == 0
        assert out == dump_config(load_config(path, ["seed=4"]))
        other = write(tmp_path / "other.yaml", out)
        assert run("config", "diff", path, other) == (0, "seed: 0 -> 4\n", "")
        assert run("config", "diff", path, path) == (0, "no difference\n", "")


class TestNew:
    def test_it_makes_an_env_that_checks_and_passes_its_tests(self, run, tmp_path: Path):
        code, out, _ = run("new", tmp_path / "shop")
        assert code == 0
        assert f"agentrl train {tmp_path}/shop/tools.yaml" in out
        assert run("check", tmp_path / "shop/tools.yaml")[0] == 0
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=.", "test_env.py"]
        result = subprocess.run(command, cwd=tmp_path / "shop", capture_output=True, text=True)
        assert result.returncode == 0, result.stdout
        assert "2 passed" in result.stdout

    def test_its_readme_names_the_files_the_tools_the_rewards_and_commands_that_work(self, run, tmp_path: Path):
        assert run("new", tmp_path / "shop")[0] == 0
        page = (tmp_path / "shop" / "README.md").read_text()
        assert {f"`{file.name}`" for file in (tmp_path / "shop").iterdir()} - set(re.findall("`[^`]*`", page)) == {
            "`README.md`"
        }
        shop = load_env("env.py:Shop", base=tmp_path / "shop")
        for tool in shop.spec().tools:
            assert f"**Tool** `{tool.name}({', '.join(tool.signature.names)})`" in page
        assert re.findall(r"\*\*Reward\*\* `(\w+)`", page) == [r.name for r in shop.spec().rewards]
        for command in re.findall(r"^agentrl (\w+)", page, re.MULTILINE):
            assert run(command, "--help")[0] == 0

    def test_it_overwrites_nothing(self, run, tmp_path: Path):
        write(tmp_path / "tools.yaml", "mine")
        code, _, err = run("new", tmp_path)
        assert code == 2
        assert "already holds tools.yaml; nothing was changed" in err
        assert os.listdir(tmp_path) == ["tools.yaml"]
        write(tmp_path / "file", "x")
        assert run("new", tmp_path / "file")[0] == 2


class TestDoctor:
    def test_it_says_what_works_here(self, run):
        code, out, _ = run("doctor")
        assert code == 0
        for name in ("agentrl", "kernel", "pydantic", "tokenizers", "peft", "vllm", "docker engine", "cuda"):
            assert re.search(rf"^{name} +\S", out, re.MULTILINE)
        assert f"python          {sys.version_info.major}.{sys.version_info.minor}" in out
        assert "GiB free" in out
        assert "| files " in out
        assert "namespace" in out

    def test_it_can_look_at_sandboxes_alone(self, run):
        code, out, _ = run("doctor", "sandbox")
        assert code == 0
        assert "| files " in out
        assert "python  " not in out


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device"), "No space left on device; free some space"),
        (OSError(28, "No space left on device", "runs/a"), "runs/a: No space left on device; free some space"),
        (OSError(28, "No space left on device", "model/a", None, "runs/a"), "runs/a: No space left on device"),
        (OSError(27, "File too large", "model/a", None, "runs/a"), "runs/a: File too large"),
        (OSError(13, "Permission denied", "runs/a"), "runs/a: Permission denied"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "No space left on device; free"),
        (RuntimeError("can't start new thread"), "can't start new thread: "),
        (
            ImportError("libtorch_cpu.so: failed to map segment from shared object"),
            "libtorch_cpu.so: failed to map segment from shared object: there is no memory left to load it",
        ),
    ],
)
def test_an_error_of_the_machine_is_one_line(error: Exception, said: str, monkeypatch, capsys):
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr("agentrl.cli.app.app", fail)
    with pytest.raises(SystemExit):
        main([])
    assert capsys.readouterr().err.startswith(said)


def test_a_command_runs_in_any_thread(monkeypatch):
    ran: list[str] = []
    monkeypatch.setattr("agentrl.cli.app.app", lambda **_: ran.append("here"))
    thread = threading.Thread(target=main, args=([],))
    thread.start()
    thread.join()
    assert ran == ["here"]


def test_a_deleted_current_folder_is_one_line(tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "tools.yaml").write_text("env: env.py:Env\nmodel: {tiny: {}}\n")
    monkeypatch.chdir(tmp_path)  # where the test ends
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    with pytest.raises(SystemExit) as left:
        main(["check", "../tools.yaml"])
    os.chdir(tmp_path)
    assert left.value.code == 1
    assert capsys.readouterr().err.startswith("the current folder was deleted; change to another one")
