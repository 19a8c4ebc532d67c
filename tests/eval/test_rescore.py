"""Rewards of recorded episodes, computed again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.cli.rescore import _print as print_rescoring
from agentrl.config import RunConfig, dump_config
from agentrl.config.load import load_config
from agentrl.config.reward_model import RewardModelConfig
from agentrl.env.load import load_env
from agentrl.env.play import ScriptedPolicy, call, calls, play, say
from agentrl.errors import CheckpointError, ConfigError
from agentrl.eval.rescore import TURNS, RescoredEpisode, RescoredPart, RescoreOptions, Rescoring, rescore
from agentrl.rollout.content import env_factory
from agentrl.rollout.limits import less_overlong
from agentrl.run_folder.records import EpisodeRecord, compress, episodes_file, read_records
from agentrl.types import Episode, StopReason, Task

ENV = '''
from agentrl import Stop, Task, ToolEnv, reward, tool


class Ledger(ToolEnv):
    """Reach the target."""

    solved_at = {"reached": 1.0}

    @classmethod
    def tasks(cls, split, seed):
        return [Task(f"{split}-{n}", {"target": n}) for n in range(4)]

    def setup(self, target: int) -> str:
        self.balance, self.target = 0, target
        return f"Reach {target}."

    @tool
    def add(self, n: int) -> str:
        """Add n."""
        self.balance += n
        return f"Balance: {self.balance}"

    @reward
    def reached(self) -> bool:
        return self.balance == self.target

    @reward(weight=-0.1)
    def wordy(self, episode) -> int:
        return len(str(episode.messages[-1].content))

    @reward(per="turn")
    def tidy(self, turn) -> float:
        return 0.5 if len(turn.calls) == 1 else 0.0

    @reward(per="group")
    def fewest(self, episodes) -> list[float]:
        least = min(len(e.turns) for e in episodes)
        return [float(len(e.turns) == least) for e in episodes]
'''


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make_run(source: str = ENV, name: str = "ledger.py", *, error: bool = False) -> Path:
    """A run folder with one group of three episodes at step 1."""
    Path(name).write_text(source)
    folder = Path("runs/shop")
    (folder / "episodes").mkdir(parents=True)
    use = f"{Path(name).absolute()}:Ledger"
    config = RunConfig.model_validate({"name": "shop", "model": {"path": "."}, "env": {"use": use}})
    (folder / "config.yaml").write_text(dump_config(config))
    make = env_factory(load_env(use, {}), config)
    task = Task("train-3", {"target": 3})
    scripts = (
        [call("add", n=3), say("ok")],
        [calls(("add", {"n": 1}), ("add", {"n": 1})), say("done")],
        [say("no")],
    )

    async def records() -> list[EpisodeRecord]:
        from agentrl.rollout.group import with_group_rewards

        played = [
            await play(make(), task, ScriptedPolicy(script), episode_id=f"s1/g0/e{i}")
            for i, script in enumerate(scripts)
        ]
        scored = await with_group_rewards(make(), played)
        if error:
            scored = [*scored[:2], lost(scored[2])]
        return [EpisodeRecord(1, 0, episode) for episode in scored]

    episodes_file(folder, 1).write_bytes(compress(asyncio.run(records())))
    return folder


def lost(episode: Episode) -> Episode:
    return replace(episode, error="SandboxError: gone", reward=None, stop_reason=StopReason.INFRA)


def scored(run: Path, *changes: str, play: bool = False) -> Rescoring:
    config = load_config(run / "config.yaml", list(changes), check_paths=False)
    return rescore(run, config, RescoreOptions(play_outside=play))


def test_the_same_env_gives_the_same_rewards():
    found = scored(make_run())
    assert [episode.replayed for episode in found.episodes] == ["", "", ""]
    assert [episode.recorded for episode in found.episodes] == pytest.approx([1.3, -0.4, 0.8])
    for episode in found.episodes:
        assert episode.rescored == pytest.approx(episode.recorded)
        assert not any(part.changed or part.reason for part in episode.parts.values())
    assert found.episodes[0].parts.keys() == {"reached", "wordy", "fewest", TURNS}


def test_a_changed_reward_shows_by_part_and_episode():
    run = make_run()
    changed = ENV.replace("self.balance == self.target", "self.balance >= 2").replace("0.5 if", "0.25 if")
    Path("ledger.py").write_text(changed)
    other = Path("other.py")
    other.write_text(changed)
    found = scored(run, f"env.use={other.absolute()}:Ledger", "env.reward_weights.wordy=0.0")
    first, second, third = found.episodes
    assert first.parts[TURNS].recorded == 0.5
    assert first.parts[TURNS].rescored == 0.25
    assert second.parts["reached"].changed
    assert (second.rescored, second.recorded) == (pytest.approx(1.0), pytest.approx(-0.4))
    assert second.solved_recorded is False
    assert second.solved is True
    assert third.parts["wordy"].rescored == 0.0


def test_another_env_computes_what_reads_only_the_record():
    run = make_run()
    other = Path("other.py")
    other.write_text(
        ENV.replace("Balance: {", "Now: {")
        .replace("len(str(episode.messages[-1].content))", "2 * len(episode.turns)")
        .replace('"""Add n."""', '"""Add n."""\n        assert n != 99')
    )
    found = scored(run, f"env.use={other.absolute()}:Ledger")
    first, _, third = found.episodes
    assert first.replayed == "the env answers turn 0 differently"
    assert third.replayed == "", "it called no tool"
    assert first.parts["reached"].reason == first.replayed
    assert first.parts["wordy"].rescored == pytest.approx(-0.4)
    assert first.parts["wordy"].reason == ""
    assert first.parts["fewest"].reason == "", "group rewards see records only"
    assert first.rescored == pytest.approx(1.0 - 0.4 + 0.5 + 0.0)
    assert first.solved is None


def test_an_env_with_other_tasks_says_so():
    run = make_run()
    other = Path("other.py")
    other.write_text(ENV.replace("target: int)", "goal: int)").replace("{target}", "{goal}"))
    found = scored(run, f"env.use={other.absolute()}:Ledger")
    assert all("target" in episode.replayed for episode in found.episodes)
    assert all(episode.parts["reached"].reason for episode in found.episodes)
    assert all(not episode.parts["wordy"].reason for episode in found.episodes)


def test_a_reward_that_raises_is_named_and_counts_nothing():
    run = make_run()
    other = Path("other.py")
    other.write_text(ENV.replace("return len(str(", "return 1 // 0 + len(str("))
    found = scored(run, f"env.use={other.absolute()}:Ledger")
    assert "ZeroDivisionError" in found.episodes[0].faults["wordy"]
    assert found.episodes[0].parts["wordy"].rescored == 0.0


def test_a_turn_reward_that_raises_is_named_and_the_episode_is_not_solved():
    run = make_run()
    other = Path("other.py")
    other.write_text(ENV.replace("return 0.5 if", "return 1 // turn.index if"))
    first, _, third = scored(run, f"env.use={other.absolute()}:Ledger").episodes
    assert "ZeroDivisionError" in first.faults["tidy"]
    assert (first.solved_recorded, first.solved) == (True, False)
    assert first.parts[TURNS].rescored == 0.0
    assert third.faults == {}, "it calls no tool"


STEPS = """
from agentrl.env import Env, StepInfo
from agentrl.types import Message


class Ledger(Env):
    solved_at = 0.0

    async def reset(self, task):
        return [Message("user", "Go.")], {}

    async def step(self, message):
        return [], REWARD, True, False, StepInfo()
"""


def test_a_step_reward_that_is_no_number_counts_nothing_and_is_named():
    run = make_run(STEPS.replace("REWARD", "1.0"))
    other = Path("other.py")
    for value in ("float('nan')", "None", "10**400"):
        other.write_text(STEPS.replace("REWARD", value))
        for episode in scored(run, f"env.use={other.absolute()}:Ledger").episodes:
            assert (episode.recorded, episode.rescored) == (1.0, 0.0)
            assert "Ledger.step returned the reward" in episode.faults["step"]
            assert (episode.solved_recorded, episode.solved) == (True, False)
            assert episode.replayed == ""


def test_episodes_without_a_reward_are_left_out():
    found = scored(make_run(error=True))
    assert len(found.episodes) == 2
    assert found.left_out == {"infrastructure failure": 1}


def test_a_tool_that_acts_outside_is_not_called_again(monkeypatch: pytest.MonkeyPatch):
    source = (
        ENV
        + """

    def outside_tools(self):
        return ["add"]
"""
    )
    run = make_run(source)
    found = scored(run)
    assert "add, which acts outside of the episode" in found.episodes[0].replayed
    assert found.episodes[2].replayed == ""
    assert scored(run, play=True).episodes[0].replayed == ""


def test_the_command():
    run = make_run()
    Path("other.py").write_text(ENV.replace("self.balance == self.target", "True"))
    said = CliRunner().invoke(app, ["rescore", str(run), "--env", f"{Path('other.py').absolute()}:Ledger"])
    assert said.exit_code == 0, said.output
    assert "3 episodes, 3 replayed exactly" in said.stdout
    assert "s1/g0/e1 (train-3): -0.4 -> 0.6; reached 0 -> 1" in said.stdout
    same = CliRunner().invoke(app, ["rescore", str(run), "--step", "1", "--json"])
    body = json.loads(same.stdout)
    assert [each["rescored"] for each in body["episodes"]] == pytest.approx([1.3, -0.4, 0.8])
    nothing = CliRunner().invoke(app, ["rescore", str(run)])
    assert nothing.stdout.splitlines()[-1] == "no episode changed"


def rewritten(run: Path, change: Callable[[Episode], Episode]) -> None:
    """Change the recorded episodes."""
    records = [replace(record, episode=change(record.episode)) for record in read_records(run, 1)]
    episodes_file(run, 1).write_bytes(compress(records))


def test_the_table_compares_the_same_episodes_before_and_after(capsys: pytest.CaptureFixture[str]):
    def episode(number: int, recorded: float, rescored: float, why: str = "") -> RescoredEpisode:
        part = RescoredPart(recorded, None if why else rescored, why)
        verdict = None if why else rescored == 1.0
        names = (f"e{number}", f"t{number}", "")
        return RescoredEpisode(
            1, number, *names, recorded, part.value, recorded == 1.0, verdict, {"solved": part}, why
        )

    unlike = "the env answers turn 0 differently"
    episodes = [episode(0, 1.0, 1.0), episode(1, 0.0, 0.0, unlike), episode(2, 0.0, 0.0, unlike)]
    print_rescoring(Console(width=100), Rescoring([*episodes, episode(3, 0.5, 0.4)], {}))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["solved", "0.75", "0.7", "1", "2", "of", "4"] in lines
    assert ["1", "0.375", "0.35", "50%", "50%", "1"] in lines


def test_a_part_that_an_episode_lacked_counts_as_0_in_the_mean(capsys: pytest.CaptureFixture[str]):
    def episode(number: int, **parts: RescoredPart) -> RescoredEpisode:
        total = sum(part.recorded or 0.0 for part in parts.values()), sum(part.value for part in parts.values())
        return RescoredEpisode(1, number, f"e{number}", "t", "", *total, None, None, parts, "")

    earned, gained = RescoredPart(1.0, 1.0), RescoredPart(None, 1.0)
    print_rescoring(
        Console(width=100), Rescoring([episode(0, bonus=earned), episode(1, bonus=gained, new=gained)], {})
    )
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["bonus", "0.5", "1", "1", "2", "of", "2"] in lines
    assert ["new", "1", "1", "1", "of", "1"] in lines  # the run did not have it at all
    unlike = RescoredPart(1.0, None, "the env answers turn 0 differently")
    print_rescoring(Console(width=100), Rescoring([episode(0, bonus=gained), episode(1, bonus=unlike)], {}))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["bonus", "0", "1", "1", "1", "of", "2"] in lines


def test_the_penalty_of_cut_episodes_is_that_of_the_step():
    run = make_run()
    config = load_config(run / "config.yaml", check_paths=False)
    penalized = config.rollout.model_copy(update={"overlong": "penalise", "overlong_penalty": 0.25})
    (run / "configs").mkdir()
    dumped = dump_config(config.model_copy(update={"rollout": penalized}))
    (run / "configs/to-step-1.yaml").write_text(dumped)  # later steps have none

    def cut(episode: Episode) -> Episode:
        return less_overlong(replace(episode, stop_reason=StopReason.MAX_TURNS), 0.25)

    rewritten(run, cut)
    found = scored(run)
    assert [episode.parts["overlong"].rescored for episode in found.episodes] == [-0.25] * 3
    assert [episode.rescored for episode in found.episodes] == [episode.recorded for episode in found.episodes]


def test_settings_of_training_that_are_refused_today_keep_no_rewards_from_being_computed():
    run = make_run()
    file = run / "config.yaml"
    written = file.read_text().replace("overlong: train", "overlong: penalise")
    file.write_text(written.replace("algorithm:", "algorithm:\n  gone: 1"))
    rewritten(run, lambda episode: less_overlong(replace(episode, stop_reason=StopReason.MAX_TURNS), 0.5))
    said = CliRunner().invoke(app, ["rescore", str(run)])
    assert said.exit_code == 0, said.output
    assert said.stdout.splitlines()[-1] == "no episode changed"


def test_rewards_per_group_see_the_episodes_whose_reward_is_fixed():
    run = make_run()

    def shortest_failed(episode: Episode) -> Episode:
        if episode.id.endswith("e2"):  # the only one with a single turn
            return replace(episode, stop_reason=StopReason.FAULT, rewards={}, reward=0.0)
        return episode

    rewritten(run, shortest_failed)
    found = scored(run)
    assert list(found.left_out.values()) == [1]
    assert [episode.parts["fewest"].rescored for episode in found.episodes] == [0.0, 0.0]
    assert not any(part.changed for episode in found.episodes for part in episode.parts.values())


def test_the_score_of_a_reward_model_stays_and_says_nothing_about_solved():
    ranked = "e.rewards.get('reward_model', 7.0)"
    run = make_run(ENV.replace("len(e.turns) for e", f"{ranked} for e").replace("len(e.turns) ==", f"{ranked} =="))

    def judged(episode: Episode) -> Episode:
        score = float(episode.id[-1])
        rewards = {**episode.rewards, "reward_model": score, "fewest": float(score == 0)}
        return replace(episode, rewards=rewards, reward=(episode.reward or 0.0) + score - 1.0 + (score == 0))

    rewritten(run, judged)
    config = load_config(run / "config.yaml", check_paths=False)
    model = RewardModelConfig.model_validate({"kind": "classifier", "path": "."})
    found = rescore(run, config.model_copy(update={"reward_model": model}), RescoreOptions())
    assert [e.rescored for e in found.episodes] == pytest.approx([e.recorded for e in found.episodes])
    assert [episode.solved for episode in found.episodes] == [True, False, False]


def test_a_judge_that_is_gone_costs_its_own_rewards_only():
    """A group reward without an answer, one that reads the lost part, and parts of a reward in parts."""
    judged = """
    @reward
    async def style(self, episode) -> dict[str, float]:
        return {"short": 0.25, "plain": 0.5}

    @reward
    def tail(self) -> float:
        return 0.125

    @reward(per="group")
    def styled(self, episodes) -> list[float]:
        return [e.rewards["style/short"] for e in episodes]
"""
    run = make_run(ENV + judged)
    gone = (ENV + judged).replace("return 0.125", "return 0.25")
    for line, said in ('return {"short"', "judge gone"), ("least = min", "no judge"):
        gone = gone.replace(line, f"raise InfraError({said!r})\n        {line}")
    Path("ledger.py").write_text(gone.replace("from agentrl import ", "from agentrl import InfraError, ", 1))
    found = scored(run)
    for episode in found.episodes:
        why = {name: part.reason for name, part in episode.parts.items() if part.reason}
        assert why == {"style/short": "judge gone", "style/plain": "judge gone", "fewest": "no judge"}
        assert episode.rescored == pytest.approx(episode.recorded + 0.125), "the recorded value counts"
        assert (episode.parts["styled"].rescored, episode.solved) == (0.25, None)


def test_a_step_that_is_named_twice_counts_once():
    said = CliRunner().invoke(app, ["rescore", str(make_run()), "--step", "1", "--step", "1", "--json"])
    ids = [episode["id"] for episode in json.loads(said.stdout)["episodes"]]
    assert len(ids) == len(set(ids)) == 3


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (["--step", "7"], CheckpointError, "no episodes of step 7; it has steps 1 to 1"),
        (["--set", "optim.lr=1"], ConfigError, "has no effect on rewards"),
        (["--set", "reward_model.weight=0.5"], ConfigError, "has no effect on rewards"),
        (["--set", "envs.a.share=2"], ConfigError, "has no effect on rewards"),
        (["--env", "missing.py:Ledger"], ConfigError, "missing.py"),
        (["--set", "env.reward_weights.reachd=1"], ConfigError, "reachd"),
    ],
)
def test_what_cannot_be_rescored_says_why(arguments: list[str], error: type[Exception], match: str):
    run = make_run()
    said = CliRunner().invoke(app, ["rescore", str(run), *arguments])
    assert isinstance(said.exception, error)
    assert match in str(said.exception)


def test_a_folder_that_is_no_run():
    said = CliRunner().invoke(app, ["rescore", "."])
    assert isinstance(said.exception, CheckpointError)
