"""Whole runs with a tiny model on the CPU: what they leave behind, that they repeat, resume, and teach."""

from __future__ import annotations

import asyncio
import json
import math
import signal
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from agentrl.config.run import RunConfig
from agentrl.engine.base import Engine
from agentrl.errors import AgentRLError
from agentrl.reporting.report import Silent, Summary
from agentrl.rollout.admission import Ticket
from agentrl.rollout.build import make_engine
from agentrl.rollout.collect import collect
from agentrl.rollout.content import load_content
from agentrl.rollout.scheduler import Scheduler
from agentrl.run_folder.checkpoints import steps_saved
from agentrl.run_folder.records import read_episodes, read_records
from agentrl.run_folder.store import RunStore
from agentrl.trainer import step_log
from agentrl.trainer.run import train_run
from agentrl.types import Group

TIMES = ("seconds", "tokens_per_s")
"""Metrics that a clock decides, by the end of their names."""

ENVS = '''
import random
from typing import Literal

from agentrl import ToolEnv, reward, tool
from agentrl.env.read import final_answer
from agentrl.env.tasks import generated
from agentrl.types import Message, ToolCall

COLOURS = ("red", "blue")


class Words(ToolEnv):
    """Say a colour."""

    def setup(self, number: int) -> str:
        return f"Number {number}."

    @reward
    def solved(self, episode) -> bool:
        return final_answer(episode) == "red"

    @classmethod
    def tasks(cls, split, seed):
        return generated("words", split, seed, 8, lambda rng: {"number": rng.randrange(10)})

    @classmethod
    def demonstrations(cls, seed, num):
        """Three in ten say the right one."""
        rng = random.Random(seed)
        return [
            [
                Message("system", cls.__doc__),
                Message("user", f"Number {rng.randrange(10)}."),
                Message("assistant", COLOURS[rng.random() > 0.3]),
            ]
            for _ in range(num)
        ]


class Buttons(Words):
    """Press a button, then say done."""

    def setup(self, number: int) -> str:
        self.pressed = None
        return f"Number {number}."

    @tool
    async def press(self, colour: Literal["red", "blue"]) -> str:
        """Press a button."""
        self.pressed = colour
        return f"It is {colour}."

    @reward
    def solved(self) -> bool:
        return self.pressed == "red"

    @classmethod
    def demonstrations(cls, seed, num):
        rng = random.Random(seed)
        episodes = []
        for opening in super().demonstrations(seed, num):
            colour = rng.choice(COLOURS)
            episodes.append(
                [
                    *opening[:2],
                    Message("assistant", "", (ToolCall("call00000", "press", {"colour": colour}),)),
                    Message("tool", f"It is {colour}.", tool_call_id="call00000", name="press"),
                    Message("assistant", "done"),
                ]
            )
        return episodes
'''


class Notes(Silent):
    """Keeps what was said; asks the run to stop after a step of training, as a user would."""

    def __init__(self, stop_after: int | None = None, folder: Path = Path("nowhere")) -> None:
        self.stop_after, self.phase_name, self.curve = stop_after, "", folder / "reward_curve.png"
        self.drawn: list[bool] = []
        self.phases: list[tuple[str, int | None, int]] = []
        self.steps: list[Mapping[str, float]] = []

    def phase(self, name: str, total: int | None = None, done: int = 0) -> None:
        self.phases.append((name, total, done))

    def step(self, metrics: Mapping[str, float]) -> None:
        self.steps.append(metrics)
        self.drawn.append(self.curve.exists())
        if self.stop_after is not None and metrics.get("step") == self.stop_after:
            signal.raise_signal(signal.SIGTERM)


def buttons(folder: Path) -> RunConfig:
    """Four steps of calling a tool, after a cold start that taught how."""
    (folder / "envs.py").write_text(ENVS)
    return RunConfig(
        name="buttons",
        steps=4,
        env=f"{folder}/envs.py:Buttons",
        model={"tiny": {"hidden": 32, "layers": 1, "heads": 2, "intermediate": 64, "vocab": 400}},
        warmup={"num": 96, "max_epochs": 10, "probe_every": 20, "probe_tasks": 8, "until_pass": 1.0, "lr": 1e-2},
        rollout={"groups_per_step": 4, "group_size": 4, "max_turns": 3, "max_tokens": 32, "token_budget": 400},
        optim={"lr": 1e-3, "warmup_steps": 2},
        eval={"tasks": 4, "every": 2},
        checkpoint={"every": 2},
    )


def run(config: RunConfig, folder: Path, reporter: Silent | None = None) -> tuple[Summary, list[dict[str, float]]]:
    """Train in this process; the summary and the metrics lines."""
    with RunStore.open(config, folder) as store:
        summary = train_run(config, store, reporter or Silent())
        return summary, [dict(line) for line in store.metrics()]


def assert_same_curve(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    assert [line["step"] for line in found] == [line["step"] for line in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            if not name.endswith(TIMES):
                # What else is computed in a decode step, drafts included, decides how the sampler rounds.
                noise = 1e-5 if name.startswith("drift/") else 1e-6
                assert one[name] == pytest.approx(other[name], abs=noise, rel=1e-6), f"step {one['step']}: {name}"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Summary, list[dict[str, float]], Notes]:
    """A run of four steps, from cold start to the end."""
    base = tmp_path_factory.mktemp("run")
    notes = Notes(folder=base / "whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_log, "DRAW_EVERY_S", math.inf)  # on a busy machine, four steps may take a minute
        return base / "whole", *run(buttons(base), base / "whole", notes), notes


class Told(Silent):
    """Keeps its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_a_weight_of_a_part_that_nobody_gives_is_told_after_the_first_step(tmp_path: Path):
    (tmp_path / "mine.py").write_text("def score(episode):\n    return {'solved': 1.0, 'form': 0.5}\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Say."}\n{"prompt": "Say it."}\n')
    one_step = RunConfig(
        name="weights",
        steps=1,
        env={
            "use": "agentrl.env.compose:ComposedEnv",
            "options": {"reward": f"{tmp_path}/mine.py:score"},
            "reward_weights": {"score/slved": 2.0, "score/form": 0.0},
        },
        model={"tiny": {"hidden": 16, "layers": 1, "heads": 2, "intermediate": 32, "vocab": 300}},
        data={"train": f"{tmp_path}/rows.jsonl"},
        rollout={"groups_per_step": 1, "group_size": 2, "max_tokens": 4, "token_budget": 400},
    )
    told = Told()
    run(one_step, tmp_path / "run", told)
    (said,) = [note for note in told.notes if "reward_weights" in note]
    assert said == (
        "step 1: env.reward_weights: no episode had the part 'score/slved', so its weight has no effect; the "
        "parts were: score/form, score/solved; did you mean 'score/solved'?"
    )


def test_two_tasks_of_one_id_are_told_and_both_are_played(tmp_path: Path):
    own = ENVS.replace(
        'return generated("words", split, seed, 8, lambda rng: {"number": rng.randrange(10)})',
        'return [Task("t", {"number": 1}), Task("t", {"number": 2})]',
    )
    (tmp_path / "mine.py").write_text(own.replace("Message, ToolCall", "Message, Task, ToolCall"))
    one_step = RunConfig(
        name="ids",
        steps=1,
        env=f"{tmp_path}/mine.py:Words",
        model={"tiny": {"hidden": 16, "layers": 1, "heads": 2, "intermediate": 32, "vocab": 300}},
        rollout={"groups_per_step": 2, "group_size": 2, "max_tokens": 4, "token_budget": 400},
    )
    told = Told()
    run(one_step, tmp_path / "run", told)
    train, held_out = (note for note in told.notes if note.startswith("two "))
    assert "two train tasks have the id 't' (number 0 and number 1, counted from 0)" in train
    assert "two held_out tasks have the id 't'" in held_out
    assert sorted(e.task.row["number"] for e in read_episodes(tmp_path / "run", 1)) == [1, 1, 2, 2]


def test_held_out_tasks_are_sampled_as_the_eval_section_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[Group] = []

    async def watched(*args: Any, label: str, **kwargs: Any) -> list[Group]:
        groups = await collect(*args, label=label, **kwargs)
        seen.extend(groups if label == "held-out-0" else [])
        return groups

    monkeypatch.setattr("agentrl.trainer.held_out.collect", watched)
    (tmp_path / "envs.py").write_text(ENVS)

    def played(name: str, **changes: float) -> tuple[list[str], dict[str, float]]:
        config = RunConfig(
            name=name,
            steps=1,
            env=f"{tmp_path}/envs.py:Words",
            model={"tiny": {"hidden": 16, "layers": 1, "heads": 2, "intermediate": 32, "vocab": 300}},
            rollout={"groups_per_step": 1, "group_size": 2, "max_tokens": 8, "token_budget": 400},
            eval={"tasks": 2, "attempts": 3, "temperature": 1.0, **changes},
        )
        seen.clear()
        _, lines = run(config, tmp_path / name)
        return [str([s.ids for s in e.segments]) for g in seen for e in g.episodes], lines[0]

    whole, line = played("whole")
    assert len(whole) == 6, "three attempts at each of two tasks"
    assert len({*whole}) == 6, "attempts at one task are drawn apart"
    assert line["held_out_pass"] >= line["held_out"]
    narrow, _ = played("narrow", top_k=1)
    assert len({*narrow[:3]}) == len({*narrow[3:]}) == 1, "top_k 1 leaves one token to draw"


@pytest.mark.slow
class TestWholeRun:
    def test_the_summary_says_everything(self, finished):
        folder, summary, lines, _ = finished
        written = json.loads((folder / "summary.json").read_text())
        assert set(written) == {
            *("run", "steps", "finished", "held_out_before", "held_out_after"),
            *("warmup_seconds", "train_seconds", "wall_seconds"),
            *("episodes", "scored", "sampled_tokens", "malformed", "limits", "infra_failures"),
            *("held_out_reward_before", "held_out_reward_after"),
            *("env", "redrawn", "redrawn_tasks", "redrawn_examples", "biased", "problems"),
            *("faults", "sandbox_broken", "sandbox_broken_tasks"),
        }
        assert (summary.steps, summary.finished, summary.episodes, summary.scored) == (4, True, 64, 64)
        assert summary.infra_failures == 0
        assert 0 < summary.train_seconds < summary.wall_seconds
        for name in ("malformed", "limits", "sampled_tokens"):
            assert written[name] == sum(line[name] for line in lines[1:])
        assert summary.held_out_before == lines[0]["held_out"]
        assert summary.held_out_after == lines[4]["held_out"]

    def test_the_curve_of_a_short_run_is_drawn_at_its_end_only(self, finished):
        folder, _, _, notes = finished
        assert set(notes.drawn) == {False}
        assert (folder / "reward_curve.png").is_file()

    def test_every_step_has_its_line_and_its_episodes(self, finished):
        folder, _, lines, notes = finished
        assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
        assert ["held_out" in line for line in lines] == [True, False, True, False, True]
        for line in lines[1:]:
            assert line["drift/mean_abs"] < 1e-4
            assert line["drift/max_abs"] < 1e-3
            assert line["grad_norm"] >= 0
            assert line["learner_tokens"] >= line["trained_tokens"] >= 0
            episodes = read_episodes(folder, line["step"])
            assert len(episodes) == line["episodes"] == 16
            assert sum(t.tokens for e in episodes for t in e.turns) == line["sampled_tokens"]
        assert [line["lr"] for line in lines[1:]] == pytest.approx([5e-4, 1e-3, 1e-3, 1e-3])
        assert lines[1]["kl"] == pytest.approx(0, abs=1e-6)
        assert all(line["groups_with_signal"] > 0 and line["turns"] > 1 for line in lines[1:])
        assert [name for name, *_ in notes.phases] == ["warm-up", "start", "train"]
        assert [m["step"] for m in notes.steps if "step" in m] == [1, 2, 3, 4]

    def test_each_sampled_token_says_by_which_weights(self, finished):
        folder, *_ = finished
        for step in (1, 3):
            versions = {
                v
                for e in read_episodes(folder, step)
                for s in e.segments
                if s.origin == "sampled"
                for v in s.versions
            }
            assert versions == {step - 1}

    def test_checkpoints_are_models(self, finished):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder, *_ = finished
        assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["best", "step-2", "step-4"]
        last = folder / "checkpoints" / "step-4"
        AutoModelForCausalLM.from_pretrained(last)
        tokenizer = AutoTokenizer.from_pretrained(last)
        assert "<|im_start|>user" in tokenizer.apply_chat_template(
            [{"role": "user", "content": "x"}], tokenize=False
        )

    def test_servers_that_load_a_checkpoint_leave_the_optimizer_alone(self, finished):
        folder, *_ = finished
        last = folder / "checkpoints" / "step-4"
        listed = json.loads((last / "model.safetensors.index.json").read_text())["weight_map"]
        assert listed == dict.fromkeys(load_file(last / "model.safetensors"), "model.safetensors")
        assert len(listed) > 10
        assert {file.name for file in last.glob("*.safetensors")} - set(listed.values()) == {
            "optimizer.safetensors"
        }

    def test_the_engine_of_a_resumed_run_loads_nothing_that_the_run_deletes(
        self, finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        """A server that is started again loads it again."""
        folder, *_ = finished
        run(buttons(folder.parent), tmp_path / "run", Notes(2))
        loaded: list[Path] = []

        async def noted(config: RunConfig, directory: Path, **more: Any) -> Engine:
            loaded.append(directory)
            return await make_engine(config, directory, **more)

        monkeypatch.setattr("agentrl.trainer.run.make_engine", noted)
        run(buttons(folder.parent), tmp_path / "run")
        assert len(loaded) == 1
        assert "checkpoints" not in loaded[0].parts

    def test_the_same_again_is_the_same(self, finished, tmp_path: Path):
        folder, _, lines, _ = finished
        _, again = run(buttons(folder.parent), tmp_path / "again")
        assert_same_curve(again, lines)

    @pytest.mark.parametrize("stop_after", [1, 2])
    def test_a_run_that_was_stopped_goes_on_as_if_it_had_not(self, finished, tmp_path: Path, stop_after: int):
        folder, whole, lines, _ = finished
        stopped, part = run(buttons(folder.parent), tmp_path / "run", Notes(stop_after))
        assert (stopped.finished, stopped.steps) == (False, stop_after)
        assert_same_curve(part, lines[: stop_after + 1])
        notes = Notes()
        resumed, rest = run(buttons(folder.parent), tmp_path / "run", notes)
        assert notes.phases == [("start", None, 0), ("train", 4, stop_after)], "no second cold start"
        assert_same_curve(rest, lines)
        assert (resumed.finished, resumed.episodes) == (True, whole.episodes)
        assert resumed.wall_seconds > stopped.wall_seconds
        ours, theirs = (p / "checkpoints" / "step-4" / "model.safetensors" for p in (tmp_path / "run", folder))
        assert ours.read_bytes() == theirs.read_bytes()

    @pytest.mark.parametrize("stop_after", [0, 2, 3])
    def test_a_stop_that_ends_the_servers_as_well_leaves_the_step_unfinished(
        self, finished, tmp_path: Path, stop_after: int, monkeypatch: pytest.MonkeyPatch
    ):
        """In the rollout of the next step, before or after a checkpoint of the last one."""
        folder, _, lines, _ = finished
        notes, play = Told(), Scheduler._play

        async def played(scheduler: Scheduler, ticket: Ticket) -> None:
            if ticket.place.label != f"s{stop_after + 1}":
                await play(scheduler, ticket)
                return
            if Engine.ready is not lost:
                monkeypatch.setattr(Engine, "ready", lost)
                signal.raise_signal(signal.SIGTERM)
            await asyncio.Event().wait()

        lost = property(lambda engine: False)
        monkeypatch.setattr(Scheduler, "_play", played)
        stopped, part = run(buttons(folder.parent), tmp_path / "run", notes)
        monkeypatch.undo()
        assert (stopped.finished, stopped.steps) == (False, stop_after)
        assert_same_curve(part, lines[: stop_after + 1])
        assert notes.notes[-1] == f"no server can answer any more: step {stop_after + 1} is left unfinished"
        saved = steps_saved(tmp_path / "run" / "checkpoints")
        assert saved == {0: [], 2: [2], 3: [2, 3]}[stop_after]
        _, rest = run(buttons(folder.parent), tmp_path / "run")
        assert_same_curve(rest, lines)
        ours, theirs = (p / "checkpoints" / "step-4" / "model.safetensors" for p in (tmp_path / "run", folder))
        assert ours.read_bytes() == theirs.read_bytes()

    def test_a_stop_that_ends_the_servers_during_an_update_saves_the_step(
        self, finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        folder, _, lines, _ = finished

        async def sent_weights(*given: object) -> None:
            monkeypatch.setattr(Engine, "ready", property(lambda engine: False))
            signal.raise_signal(signal.SIGTERM)
            await asyncio.Event().wait()

        notes = Told()
        monkeypatch.setattr("agentrl.trainer.training_run.sent_weights", sent_weights)
        stopped, part = run(buttons(folder.parent), tmp_path / "run", notes)
        monkeypatch.undo()
        assert (stopped.finished, stopped.steps) == (False, 1)
        assert_same_curve(part, lines[:2])
        assert not any("unfinished" in note for note in notes.notes)
        _, rest = run(buttons(folder.parent), tmp_path / "run")
        assert_same_curve(rest, lines)

    def test_a_finished_run_is_left_as_it_is(self, finished):
        folder, summary, lines, _ = finished
        again, still = run(buttons(folder.parent), folder)
        assert still == lines
        assert (again.steps, again.held_out_after) == (4, summary.held_out_after)


@pytest.mark.slow
@pytest.mark.parametrize("stop_after", [None, 2])
def test_ahead_of_the_learner_no_token_is_older_than_allowed_and_no_group_is_lost(
    tmp_path: Path, stop_after: int | None, monkeypatch: pytest.MonkeyPatch
):
    held_out: dict[str, set[int]] = {}

    async def watched(*args: Any, label: str, **kwargs: Any) -> list[Group]:
        groups = await collect(*args, label=label, **kwargs)
        held_out[label] = {v for g in groups for e in g.episodes for s in e.segments for v in s.versions}
        return groups

    monkeypatch.setattr("agentrl.trainer.held_out.collect", watched)
    config = buttons(tmp_path)
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_staleness": 2})})
    folder = tmp_path / "run"
    if stop_after is not None:
        stopped, _ = run(config, folder, Notes(stop_after))
        assert stopped.steps == stop_after
    summary, lines = run(config, folder)
    assert summary.finished
    for line in lines[1:]:
        assert 0 <= line["staleness/mean"] <= line["staleness/max"] <= 2
        sampled = [s for e in read_episodes(folder, line["step"]) for s in e.segments if s.origin == "sampled"]
        assert line["staleness/max"] == line["step"] - 1 - min(v for s in sampled for v in s.versions)
    assert max(line["staleness/max"] for line in lines[1:]) > 0
    assert held_out == {f"held-out-{step}": {step} for step in (0, 2, 4)}, "evaluated on one set of weights"
    # Between a group's last episode and the group itself, a line counts neither: one line can say 0.
    ahead = [line["in_flight/episodes"] + line["in_flight/complete_groups"] for line in lines[1:4]]
    assert max(ahead) > 0, "nothing was played during the updates"
    assert lines[4]["in_flight/episodes"] == 0
    names = [e.id for line in lines[1:] for e in read_episodes(folder, line["step"])]
    assert sorted(names) == sorted(f"s{s}/g{g}/e{e}" for s in range(1, 5) for g in range(4) for e in range(4))


def test_reading_tasks_is_no_part_of_the_cold_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now = [0.0]

    def slowly(config: RunConfig) -> Any:
        now[0] += 1000.0
        return load_content(config)

    monkeypatch.setattr("agentrl.trainer.run.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("agentrl.trainer.run.load_content", slowly)
    config = buttons(tmp_path)
    brief = config.warmup.model_copy(update={"max_epochs": 1, "at_least": 0.0})
    summary, _ = run(config.model_copy(update={"steps": 1, "warmup": brief}), tmp_path / "run")
    assert (summary.warmup_seconds, summary.wall_seconds) == (0.0, 1000.0)


@pytest.mark.slow
def test_groups_that_were_put_aside_are_on_disk_and_counted(tmp_path: Path):
    config = buttons(tmp_path)
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"refill_zero_signal": 3})})
    summary, lines = run(config.model_copy(update={"steps": 2}), tmp_path / "run")
    assert sum(line["refilled_groups"] for line in lines[1:]) > 0
    assert summary.scored == 2 * 16 < summary.episodes
    for line in lines[1:]:
        records = read_records(tmp_path / "run", int(line["step"]))
        aside = [r for r in records if r.set_aside]
        assert len(aside) == line["refilled_episodes"] == 4 * line["refilled_groups"]
        assert len(records) == line["episodes"] == 16 + len(aside)
        assert not any(r.advantages for r in aside)
        assert {r.group for r in aside} == set(range(4, 4 + int(line["refilled_groups"])))
        for group in range(4, 4 + int(line["refilled_groups"])):
            assert len({r.episode.reward for r in aside if r.group == group}) == 1


@pytest.mark.slow
def test_groups_that_a_filter_refuses_do_not_train(tmp_path: Path):
    (tmp_path / "filters.py").write_text(
        "def hard(group):\n    return sum(e.reward for e in group.episodes) <= len(group.episodes) / 2\n"
    )
    config = buttons(tmp_path)
    changes = {"refill_zero_signal": 40, "group_filter": f"{tmp_path}/filters.py:hard"}
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update=changes)})
    _, lines = run(config.model_copy(update={"steps": 2}), tmp_path / "run")
    assert 0 < max(line["refilled_groups"] for line in lines[1:]) < 40
    aside = set()
    for line in lines[1:]:
        assert line["refused_groups"] == 0
        earned = Counter[tuple[bool, int | None]]()
        for record in read_records(tmp_path / "run", int(line["step"])):
            earned[record.set_aside, record.group] += int(record.episode.reward or 0)
        assert {total for (refused, _), total in earned.items() if not refused} <= {1, 2}
        aside |= {total for (refused, _), total in earned.items() if refused}
    assert 3 in aside, "a group with signal that the filter refused"


def words(folder: Path, steps: int = 12, max_staleness: int = 0, **algorithm: object) -> RunConfig:
    """Cold-started to say the right one of two words in three answers of ten, there is much to learn."""
    (folder / "envs.py").write_text(ENVS)
    return RunConfig(
        name="words",
        steps=steps,
        env=f"{folder}/envs.py:Words",
        model={"tiny": {"hidden": 32, "layers": 1, "heads": 2, "intermediate": 64, "vocab": 300}},
        warmup={"num": 160, "until_pass": 0.9, "probe_every": 20, "probe_tasks": 8, "lr": 1e-2},
        rollout={
            "groups_per_step": 8,
            "group_size": 8,
            "max_turns": 1,
            "max_tokens": 8,
            "token_budget": 200,
            "max_staleness": max_staleness,
        },
        optim={"lr": 3e-3, "warmup_steps": 0},
        algorithm=algorithm,
        eval={"tasks": 8},
    )


@pytest.mark.parametrize("advantage", ["grpo", "rloo"])
def test_what_is_rewarded_is_said_more_often(tmp_path: Path, advantage: str):
    summary, lines = run(words(tmp_path, advantage=advantage), tmp_path / "run")
    solved = [line["solved"] for line in lines[1:]]
    assert 0.1 < solved[0] < 0.7
    assert sum(solved[-3:]) / 3 > 0.9
    assert summary.held_out_after == 1.0
    assert max(line["drift/mean_abs"] for line in lines[1:] if line["trained_tokens"]) < 1e-4


@pytest.mark.slow
def test_four_steps_stale_and_corrected_it_learns_as_much(tmp_path: Path):
    """The success that the synchronous run above reaches, by episodes whose weights are up to four updates old."""
    corrected = {"correction": {"importance": "token"}}
    summary, lines = run(words(tmp_path, steps=20, max_staleness=4, **corrected), tmp_path / "run")
    solved = [line["solved"] for line in lines[1:]]
    assert 0.1 < solved[0] < 0.7
    assert sum(solved[-6:]) / 6 > 0.9  # which step an episode of old weights falls into is up to the clock
    assert summary.held_out_after == 1.0
    assert max(line["staleness/max"] for line in lines[1:]) == 4
    assert max(line.get("drift/mean_abs", 0.0) for line in lines[1:]) > 1e-3, (
        "the tokens were drawn by another policy"
    )


def test_a_step_whose_sampler_disagrees_leaves_its_metrics_and_no_checkpoint(tmp_path: Path):
    """Whoever runs the command again does not get past the gate by it."""
    changes = {"algorithm": {"drift_gate": {"mean_abs": 1e-30}}, "checkpoint": {"every": 1}, "warmup": None}
    config = RunConfig.model_validate(buttons(tmp_path).model_dump(exclude_unset=True) | changes)
    for _ in range(2):
        with pytest.raises(AgentRLError, match="step 1: sampler and learner disagree too much"):
            run(config, tmp_path / "run")
        with RunStore.open(config, tmp_path / "run") as store:
            assert store.latest_checkpoint() is None
            assert [line["step"] for line in store.metrics()] == [0, 1]
