"""What is learned from the same samples: agentrl against TRL's GRPOTrainer, from the same start weights.

    pip install -e '.[train,bench]'
    python -m bench.learning_vs_trl [--quick] [--seeds 1,2,3,4,5] [--arms matched,defaults]
                                    [--envs calculator,sqlite] [--models DIR] [--records DIR] [--write]

Both start from the same weights (a tiny model, made and cold-started once per env), play the same tasks in the
same order in groups of the same size under the same limits, and take one optimizer step on each batch, on the same
CPU in processes of their own that take turns. What differs is the random numbers of sampling, and the code. There
are two arms:

- `matched`: the same objective on both sides: GRPO with the group's standard deviation, token mean, no KL penalty,
  AdamW with betas 0.9 and 0.999, a constant learning rate without warmup; and, as with TRL, a call that cannot be
  parsed ends the episode;
- `defaults`: each side as it comes, with the same learning rate only.

Success is the share of sampled episodes that solve their task. Training tasks are new in every step, so the curve
is also one of tasks not seen before. After the last step, both final models play the same 200 held-out tasks
greedily in the same engine.

Goal: with matched settings, success of agentrl in no quarter of the run below TRL's by more than the noise (two
standard errors over seeds and episodes); at equal wall time, ahead at the end of each quarter of agentrl's run.
Wall times mean something only on a machine with nothing else to do. `--records` keeps one file for each finished
run, so that an interrupted benchmark continues; `--write` replaces bench/results/learning_vs_trl.{json,png}.
With `--quick`: one short run, under a minute. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from agentrl.config.run import RunConfig
from agentrl.env import ToolEnv, reward, tool
from agentrl.env.read import final_answer
from agentrl.env.toolenv.observe import error_text
from agentrl.envs.calculator import Calculator, CalculatorError, evaluate
from agentrl.envs.calculator.env import Problem
from agentrl.envs.calculator.expression import as_text
from agentrl.envs.sqlite import Sqlite
from agentrl.envs.sqlite.database import SCHEMA, QueryError, as_table, build, run
from agentrl.envs.sqlite.env import same_rows
from agentrl.reporting.report import Silent
from agentrl.types import Episode, Message, Task, ToolCall
from bench.vs_trl import Worker, final, solved

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.shared.names import names_of
from bench.shared.verdict import finish

HERE = Path(__file__).parent
SILENCE = "TRL_EXPERIMENTAL_SILENCE"
"""What turns off TRL's note that `environment_factory` may change."""
QUARTERS = 4
SIDES = ("agentrl", "trl")


class Sum(Calculator):
    """Use the calculator, then answer with the number."""

    @tool(inline=True)
    def calculator(self, expression: str) -> str:
        """Evaluate arithmetic.

        Args:
            expression: Arithmetic.
        """
        return as_text(evaluate(expression))


class Query(ToolEnv):
    """Answer the question about the database with one SQLite SELECT. Try queries first; the last message is the
    SELECT alone.
    """  # unlike the shipped env, no call ends an episode, and tools are in alphabetical order: TRL's are

    tasks = Sqlite.tasks

    def setup(self, question: str, sql: str, database: int) -> str:
        self.gold, self.database = sql, database
        self.connection = build(database)
        return question

    def teardown(self) -> None:
        self.connection.close()

    @tool
    def query(self, sql: str) -> str:
        """Run a SELECT and see up to 20 rows.

        Args:
            sql: One SELECT.
        """
        return as_table(*run(self.connection, sql))

    @tool
    def schema(self) -> str:
        """Show the tables."""
        return SCHEMA.strip()

    @reward(solved=True)
    def solved(self, episode: Episode) -> bool:
        """The same rows as the reference on this database and on another one with the same tables."""
        return right_rows(self.database, self.gold, final_answer(episode).strip())

    @classmethod
    def demonstrations(cls, seed: int, num: int, *, silent: float = 0.0) -> list[list[Message]]:
        """`num` episodes that try the reference query and hand it in; a share of `silent` of them ends without it,
        which a policy can learn not to do.
        """
        rng, schema = random.Random(f"learning_vs_trl/{seed}"), SCHEMA.strip()
        episodes = []
        for task in cls.tasks("train", seed + 1_000)[:num]:
            sql, connection = task.row["sql"], build(task.row["database"])
            opening = [Message("system", cls().system()), Message("user", task.row["question"])]
            looks = _called(0, "schema", {}, schema)
            tries = _called(1, "query", {"sql": sql}, as_table(*run(connection, sql)))
            connection.close()
            answer = Message("assistant", "Done." if rng.random() < silent else sql)
            episodes.append([*opening, *looks, *tries, answer])
        return episodes


def _called(number: int, name: str, arguments: dict[str, Any], result: str) -> list[Message]:
    made = ToolCall(f"call_{number}", name, arguments)
    return [Message("assistant", tool_calls=(made,)), Message("tool", result, tool_call_id=made.id, name=name)]


def right_rows(database: int, gold: str, sql: str) -> bool:
    """Whether `sql` answers like `gold` on this database and on another one."""
    for seed in (database, database + 1):
        connection = build(seed)
        try:
            if not sql or not same_rows(connection, gold, sql):
                return False
        finally:
            connection.close()
    return True


@dataclass(frozen=True)
class Shape:
    """What both are given. Token limits are those of one episode after its prompt."""

    env: type[Sum] | type[Query]
    options: Mapping[str, Any]
    """Of the env's tasks."""
    tool_turns: int
    """Completions that may call a tool; one more may follow."""
    completion_tokens: int
    tiny: Mapping[str, int]
    warmup: Mapping[str, Any]
    lr: float
    groups: int = 8
    group_size: int = 8
    steps: int = 32
    held_out: int = 200
    """Tasks that the final models play."""


SHAPES = {
    "calculator": Shape(
        Sum,
        {"max_operations": 2},
        tool_turns=3,
        completion_tokens=200,
        tiny={"hidden": 128, "layers": 3, "vocab": 512},
        warmup={
            "num": 2400,
            "max_epochs": 12,
            "anneal_epochs": 2,
            "until_pass": 0.5,
            "options": {"quality": 0.85, "silent": 0.8, "max_operations": 2},
        },
        lr=4e-4,
    ),
    "sqlite": Shape(
        Query,
        {},
        tool_turns=3,
        completion_tokens=500,
        tiny={"hidden": 128, "layers": 3, "vocab": 1024, "max_context": 1536},
        warmup={
            "num": 2400,
            "max_epochs": 12,
            "anneal_epochs": 2,
            "until_pass": 0.4,
            "at_least": 0.1,
            "options": {"silent": 0.5},
        },
        lr=1e-4,
        steps=24,
    ),
}
QUICK = Shape(
    Sum,
    {"max_operations": 1},
    tool_turns=2,
    completion_tokens=128,
    tiny=SHAPES["calculator"].tiny,
    warmup={
        "num": 400,
        "max_epochs": 8,
        "anneal_epochs": 1,
        "until_pass": 0.3,
        "at_least": 0.0,
        "options": {"quality": 0.85, "max_operations": 1},
    },
    lr=4e-4,
    groups=4,
    steps=4,
    held_out=50,
)

OURS: Mapping[str, Mapping[str, Any]] = {
    "matched": {
        "algorithm": {"kl": {"coef": 0.0}, "advantage": {"name": "grpo", "eps": 1e-4}},
        "optim": {"betas": (0.9, 0.999), "warmup_steps": 0},
        "env": {"settings": {"mistakes": {"parse_error": "terminate"}}},
    },
    "defaults": {},
}
TRL: Mapping[str, Mapping[str, Any]] = {
    "matched": {"beta": 0.0, "epsilon_high": 0.28, "lr_scheduler_type": "constant", "adam_beta2": 0.999},
    "defaults": {},
}


# Both sides


def run_config(shape: Shape, model: Mapping[str, Any], seed: int, **changes: Any) -> RunConfig:
    optim = {"lr": shape.lr} | dict(changes.pop("optim", {}))
    env = {"use": f"{Path(__file__).resolve()}:{shape.env.__name__}"} | dict(changes.pop("env", {}))
    return RunConfig.model_validate(
        {
            "name": "bench",
            "seed": seed,
            "steps": shape.steps,
            "env": env,
            "model": model,
            "data": {"options": dict(shape.options)},
            "rollout": {
                "groups_per_step": shape.groups,
                "group_size": shape.group_size,
                "max_turns": shape.tool_turns + 1,
                "max_tokens": shape.completion_tokens,
            },
            "optim": optim,
            "eval": {"tasks": 1},
            "checkpoint": {"every": 0, "best": False},
            **changes,
        }
    )


def make_model(shape: Shape, folder: str) -> None:
    """Make the tiny model and cold-start it; the folder then holds it under `start`."""
    from agentrl.rollout.content import load_content
    from agentrl.trainer.start import make_start

    config = run_config(shape, {"tiny": dict(shape.tiny)}, 0, warmup=dict(shape.warmup))
    content = load_content(config)
    asyncio.run(make_start(config, content, Path(folder), reporter=Silent(), stopping=lambda: False))


def chosen_tasks(shape: Shape, seed: int) -> list[Task]:
    """The tasks of a run, in the order in which agentrl takes them."""
    return list(shape.env.tasks("train", seed, **shape.options)[: shape.groups * shape.steps])


def text_of(task: Task) -> str:
    """The user message of a task of either env."""
    row = task.row
    return str(row["question"] if "question" in row else Problem(row["start"], _operations(row)).text)


def _operations(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple((operator, number) for operator, number in row["operations"])


@dataclass(frozen=True)
class Step:
    """One optimizer step as its worker saw it."""

    seconds: float
    solved: float
    sampled: int
    """Tokens sampled."""


# agentrl


class Turns(Silent):
    """A reporter that stops after every step of the training until it may go on."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.started = 0.0
        self.training = False

    def _wait(self) -> None:
        self.pipe.recv()
        self.started = time.perf_counter()

    def phase(self, name: str, total: int | None = None, done: int = 0) -> None:
        self.training = name == "train"
        if self.training:
            self._wait()

    def step(self, metrics: Mapping[str, float]) -> None:
        if self.training:
            seconds = time.perf_counter() - self.started
            self.pipe.send(Step(seconds, metrics["solved"], int(metrics["sampled_tokens"])))
            self._wait()


def run_ours(shape: Shape, arm: str, seed: int, model: str, limit: int, folder: str, pipe: Connection) -> None:
    from agentrl.run_folder.records import read_episodes
    from agentrl.run_folder.store import RunStore
    from agentrl.trainer.run import train_run

    config = run_config(shape, {"path": model}, seed, **OURS[arm])
    rollout = config.rollout.model_copy(update={"token_budget": limit})
    config = config.model_copy(update={"rollout": rollout})
    with RunStore.open(config, Path(folder)) as store:
        train_run(config, store, Turns(pipe))
    played = [next(str(m.content) for m in e.messages if m.role == "user") for e in read_episodes(Path(folder), 1)]
    wanted = {text_of(task) for task in chosen_tasks(shape, seed)[: shape.groups]}
    assert set(played) == wanted, "the two sides do not play the same tasks"
    pipe.send(str(Path(folder) / "checkpoints" / f"step-{shape.steps}"))


# TRL


def calculator_tool() -> Any:
    """The calculator as the plain function that TRL asks for; it answers in the words of ours."""

    def calculator(expression: str):  # type: ignore[no-untyped-def]  # a return type would enter the schema
        """Evaluate arithmetic.

        Args:
            expression: Arithmetic.
        """
        try:
            return as_text(evaluate(expression))
        except CalculatorError as e:
            return f"Error: {error_text(e)}"

    return calculator


class Database:
    """The sqlite env as TRL's `environment_factory` wants it; it answers in the words of ours."""

    def __init__(self) -> None:
        self.connection: Any = None

    def reset(self, database: int, **_: Any) -> None:
        if self.connection is not None:
            self.connection.close()
        self.connection = build(database)

    def schema(self):  # type: ignore[no-untyped-def]  # a return type would enter the schema
        """Show the tables."""
        return SCHEMA.strip()

    def query(self, sql: str):  # type: ignore[no-untyped-def]
        """Run a SELECT and see up to 20 rows.

        Args:
            sql: One SELECT.
        """
        try:
            return as_table(*run(self.connection, sql))
        except QueryError as e:
            return f"Error: {error_text(e)}"


Conversations = Sequence[Sequence[Mapping[str, Any]]]


def solved_sql(completions: Conversations, database: Sequence[int], sql: Sequence[str], **_: Any) -> list[float]:
    """TRL's reward function, by the rule of the env."""
    given = zip(completions, database, sql, strict=True)
    return [float(right_rows(number, gold, final(messages))) for messages, number, gold in given]


def rows_of(shape: Shape, seed: int) -> list[dict[str, Any]]:
    """TRL's dataset: the tasks of the run in order."""
    system, rows = shape.env().system(), []
    for task in chosen_tasks(shape, seed):
        opening = [{"role": "system", "content": system}, {"role": "user", "content": text_of(task)}]
        if shape.env is Sum:
            answer = str(Problem(task.row["start"], _operations(task.row)).result)
            rows.append({"prompt": opening, "answer": answer})
        else:
            rows.append({"prompt": opening, "database": task.row["database"], "sql": task.row["sql"]})
    return rows


def same_prompts(shape: Shape, rows: Sequence[Mapping[str, Any]], model: str, tokenizer: Any, tools: Any) -> int:
    """Length of the longest prompt in tokens, once both sides have been seen to render the same ids."""
    from agentrl.chat.template import Renderer
    from agentrl.chat.transcript import Transcript
    from agentrl.types import Message

    renderer, ours, longest = Renderer.from_directory(Path(model)), list(shape.env().tools), 0
    for row in rows:
        transcript = Transcript(renderer, ours)
        transcript.extend([Message(m["role"], m["content"]) for m in row["prompt"]])
        theirs = tokenizer.apply_chat_template(
            row["prompt"], tools=tools, add_generation_prompt=True, return_dict=False
        )
        assert list(transcript.ids) == theirs, "the two sides render different prompts"
        longest = max(longest, len(theirs))
    return longest


def run_trl(shape: Shape, arm: str, seed: int, model: str, folder: str, pipe: Connection) -> None:
    os.environ[SILENCE] = "1"
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = qwen3_template  # Hermes-style calls, as our template writes them
    rows = rows_of(shape, seed)
    last: dict[str, Any] = {}

    class Counting(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            out = super()._generate_and_score_completions(inputs)
            last["sampled"] = int((out["completion_mask"] * out["tool_mask"]).sum())
            return out

    def counted(**kwargs: Any) -> list[float]:
        scores = solved(**kwargs) if shape.env is Sum else solved_sql(**kwargs)
        last["solved"] = statistics.mean(scores)
        return scores

    class Wait(TrainerCallback):
        started = 0.0

        def wait(self) -> None:
            torch.set_num_threads(pipe.recv())
            self.started = time.perf_counter()

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.wait()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            pipe.send(Step(time.perf_counter() - self.started, **last))
            self.wait()

    episodes = shape.groups * shape.group_size
    given = {"tools": [calculator_tool()]} if shape.env is Sum else {"environment_factory": Database}
    trainer = Counting(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa"),
        processing_class=tokenizer,
        reward_funcs=[counted],  # type: ignore[list-item]
        train_dataset=Dataset.from_list(rows),
        callbacks=[Wait()],
        args=GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=episodes,
            gradient_accumulation_steps=1,
            num_generations=shape.group_size,
            max_completion_length=shape.completion_tokens,
            max_tool_calling_iterations=shape.tool_turns,
            learning_rate=shape.lr,
            max_steps=shape.steps,
            shuffle_dataset=False,
            dataloader_pin_memory=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=seed,
            **TRL[arm],
        ),
        **given,
    )
    pipe.send(same_prompts(shape, rows, model, tokenizer, trainer.tools))
    trainer.train()
    target = Path(folder) / "final"
    shutil.copytree(model, target)
    trainer.save_model(str(target))
    pipe.send(str(target))


# The comparison


def held_out(shape: Shape, model: str, folder: str, pipe: Connection) -> None:
    """Greedy success of a model directory on held-out tasks, in our engine whoever trained it."""
    from agentrl.eval.evaluate import EvalOptions, Subject, evaluate

    config = run_config(shape, {"path": model}, 0)
    options = EvalOptions(tasks=shape.held_out, concurrency=64)
    result = evaluate(Subject(Path(model)), config, options, folder=Path(folder), reporter=Silent())
    pipe.send(result.estimates["solved"].mean)


def start_model(name: str, shape: Shape, models: Path) -> str:
    """Where the start model of this env lies; made where it is not there yet."""
    folder = models / name
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "start").is_dir():
        process = get_context("spawn").Process(target=make_model, args=(shape, str(folder)))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"making the start model failed with exit code {process.exitcode}")
    return str(folder / "start")


def measure(target: Any, *args: Any) -> float:
    with Worker(target, *args) as worker:
        return float(worker.pipe.recv())


def one_run(shape: Shape, arm: str, seed: int, model: str, scratch: Path) -> dict[str, Any]:
    """Both sides in turns of one step; which goes first changes with every step."""
    cores = len(os.sched_getaffinity(0))
    with Worker(run_trl, shape, arm, seed, model, str(scratch / "trl")) as trl:
        limit = trl.pipe.recv() + shape.completion_tokens
        with Worker(run_ours, shape, arm, seed, model, limit, str(scratch / "ours")) as ours:
            steps: dict[str, list[Step]] = {"agentrl": [], "trl": []}
            for n in range(shape.steps):
                turns = [("agentrl", ours), ("trl", trl)]
                for name, worker in turns if n % 2 else reversed(turns):
                    worker.pipe.send(cores)
                    steps[name].append(worker.pipe.recv())
            for worker in (ours, trl):
                worker.pipe.send(cores)
            finals = {"agentrl": ours.pipe.recv(), "trl": trl.pipe.recv()}
            after = {
                name: measure(held_out, shape, where, str(scratch / f"eval-{name}"))
                for name, where in finals.items()
            }
    return {
        name: {
            "seconds": [round(s.seconds, 3) for s in taken],
            "solved": [round(s.solved, 4) for s in taken],
            "sampled": [s.sampled for s in taken],
            "held_out": after[name],
        }
        for name, taken in steps.items()
    }


Run = Mapping[str, Mapping[str, Any]]


def quarters(values: Sequence[float]) -> list[float]:
    """The means of the four quarters of a curve."""
    n = len(values)
    return [statistics.mean(values[n * q // QUARTERS : n * (q + 1) // QUARTERS]) for q in range(QUARTERS)]


def at_time(side: Mapping[str, Any], seconds: float) -> float:
    """Success in the last steps complete by then (at most five); that of the first step before there are any."""
    passed, done = 0.0, 0
    for taken in side["seconds"]:
        passed += taken
        if passed > seconds:
            break
        done += 1
    return statistics.mean(side["solved"][max(0, done - 5) : done] or side["solved"][:1])


def by_time(found: Run) -> list[tuple[float, float]]:
    """(agentrl, TRL) at the end of each quarter of agentrl's wall time."""
    total = sum(found["agentrl"]["seconds"])
    points = [total * (q + 1) / QUARTERS + 1e-6 for q in range(QUARTERS)]
    return [(at_time(found["agentrl"], t), at_time(found["trl"], t)) for t in points]


def noise(differences: Sequence[float], shares: Sequence[float], episodes: int) -> float:
    """Two standard errors of a mean difference of two shares: over runs or over episodes, whichever is larger."""
    p = statistics.mean(shares)
    by_episodes = math.sqrt(2 * max(p * (1 - p), 1e-4) / (episodes * len(differences)))
    by_runs = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 2 else 0.0
    return 2 * max(by_episodes, by_runs)


def judge(shape: Shape, runs: Sequence[Run]) -> dict[str, Any]:
    """One env and arm, over its seeds."""
    ours = [quarters(r["agentrl"]["solved"]) for r in runs]
    theirs = [quarters(r["trl"]["solved"]) for r in runs]
    episodes = shape.groups * shape.group_size * shape.steps // QUARTERS
    rows = []
    for q in range(QUARTERS):
        a, b = [o[q] for o in ours], [t[q] for t in theirs]
        differences = [x - y for x, y in zip(a, b, strict=True)]
        timed = [by_time(r)[q] for r in runs]
        rows.append(
            {
                "agentrl": round(statistics.mean(a), 4),
                "trl": round(statistics.mean(b), 4),
                "difference": round(statistics.mean(differences), 4),
                "noise": round(noise(differences, a + b, episodes), 4),
                "agentrl_by_time": round(statistics.mean(x for x, _ in timed), 4),
                "trl_by_time": round(statistics.mean(y for _, y in timed), 4),
            }
        )
    return {
        "seeds": len(runs),
        "quarters": rows,
        "held_out": {
            side: round(statistics.mean(r[side]["held_out"] for r in runs), 4) for side in ("agentrl", "trl")
        },
        "seconds": {
            side: round(statistics.mean(sum(r[side]["seconds"]) for r in runs), 1) for side in ("agentrl", "trl")
        },
        "not_below": all(row["difference"] >= -row["noise"] for row in rows),
        "ahead_by_time": all(row["agentrl_by_time"] >= row["trl_by_time"] for row in rows),
    }


def table(env: str, arm: str, result: Mapping[str, Any]) -> Iterator[str]:
    held, seconds = result["held_out"], result["seconds"]
    yield (
        f"{env}, {arm} settings, {result['seeds']} seed(s): held-out success {held['agentrl']:.3f} (TRL "
        f"{held['trl']:.3f}), wall time {seconds['agentrl']:.0f} s (TRL {seconds['trl']:.0f} s)"
    )
    yield (
        f"  {'':10}{'agentrl':>8}{'TRL':>8}{'difference':>12}{'noise':>8}{'at equal time: agentrl':>26}{'TRL':>8}"
    )
    for q, row in enumerate(result["quarters"], 1):
        yield (
            f"  quarter {q} {row['agentrl']:>7.3f}{row['trl']:>8.3f}{row['difference']:>+12.3f}"
            f"{row['noise']:>8.3f}{row['agentrl_by_time']:>26.3f}{row['trl_by_time']:>8.3f}"
        )


def summary(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """The last line: mean success over whole runs with matched settings (with any where none were)."""
    matched = [by["matched"] for by in results.values() if "matched" in by]
    shown = matched or [result for by in results.values() for result in by.values()]
    ours, theirs = (
        statistics.mean(row[side] for result in shown for row in result["quarters"]) for side in ("agentrl", "trl")
    )
    return {
        "bench": "learning_vs_trl",
        "ours": round(ours, 4),
        "baseline": round(theirs, 4),
        "ratio": round(ours / theirs, 3) if theirs else None,
        "unit": "share of sampled episodes solved, mean of the run",
        "goal": "in no quarter below TRL beyond noise; ahead at equal wall time",
        "met": all(result["not_below"] and result["ahead_by_time"] for result in shown),
        "not_below": all(result["not_below"] for result in shown),
        "ahead_by_time": all(result["ahead_by_time"] for result in shown),
    }


def play(
    shapes: Mapping[str, Shape],
    arms: Sequence[str],
    seeds: Sequence[int],
    models: Path,
    records: Path,
    recorded_only: bool,
) -> Iterator[tuple[str, str, int, Run]]:
    """Every run; those with a file in `records` are read from there."""
    records.mkdir(parents=True, exist_ok=True)
    for arm in arms:
        for seed in seeds:
            for name, shape in shapes.items():
                file = records / f"{name}-{arm}-{seed}.json"
                if recorded_only and not file.exists():
                    continue
                if not file.exists():
                    model = start_model(name, shape, models)
                    with tempfile.TemporaryDirectory() as scratch:
                        found = one_run(shape, arm, seed, model, Path(scratch))
                    file.write_text(json.dumps(found) + "\n")
                yield name, arm, seed, json.loads(file.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="one short run: under a minute")
    parser.add_argument("--seeds", default="1,2,3,4,5", help="seeds, separated by commas")
    parser.add_argument(
        "--arms",
        type=names_of(("matched", "defaults")),
        default="matched,defaults",
        help="which, separated by commas",
    )
    parser.add_argument(
        "--envs", type=names_of(SHAPES), default="calculator,sqlite", help="which, separated by commas"
    )
    parser.add_argument("--models", type=Path, help="keep the start models here and use those that are there")
    parser.add_argument("--records", type=Path, help="keep finished runs here and use those that are there")
    parser.add_argument("--recorded", action="store_true", help="only runs that are in --records")
    parser.add_argument("--write", action="store_true", help="replace bench/results/learning_vs_trl.*")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    arms, shapes = options.arms.split(","), {name: SHAPES[name] for name in options.envs.split(",")}
    if options.quick:
        seeds, arms, shapes = [1], ["matched"], {"calculator": QUICK}
    runs: dict[str, dict[str, list[Run]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        models = (options.models or Path(scratch) / "models").resolve()
        records = options.records or Path(scratch) / "records"
        for env, arm, seed, found in play(shapes, arms, seeds, models, records, options.recorded):
            runs.setdefault(env, {}).setdefault(arm, []).append(found)
            print(
                "\n".join(table(env, arm, judge(shapes[env], [found]))).replace("1 seed(s)", f"seed {seed}"),
                flush=True,
            )
    results = {env: {arm: judge(shapes[env], of) for arm, of in by.items()} for env, by in runs.items()}
    lines = [line for env, by in results.items() for arm, result in by.items() for line in table(env, arm, result)]
    print("\n".join(lines))
    last = summary(results)
    if options.write:
        write(runs, results, last)
    finish(last | {"met": None, "why": "one short run is within noise"} if options.quick else last)


def write(
    runs: Mapping[str, Mapping[str, Sequence[Run]]],
    results: Mapping[str, Mapping[str, Mapping[str, Any]]],
    last: Mapping[str, Any],
) -> None:
    """bench/results/learning_vs_trl.{json,png}."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    target = HERE / "results"
    (target / "learning_vs_trl.json").write_text(json.dumps({**last, "results": results, "runs": runs}) + "\n")
    shown = [(env, arm) for env, by in runs.items() for arm in by]
    figure, axes = plt.subplots(len(shown), 2, figsize=(9, 3 * len(shown)), squeeze=False)
    for (env, arm), row in zip(shown, axes, strict=True):
        for side, color in (("agentrl", "tab:blue"), ("trl", "tab:orange")):
            draw(row, [found[side] for found in runs[env][arm]], side, color)
        for axis, label in zip(row, ("step", "wall time, s"), strict=True):
            axis.set(xlabel=label, ylabel="solved", ylim=(0, 1), title=f"{env}, {arm}")
            axis.legend()
    figure.tight_layout()
    figure.savefig(target / "learning_vs_trl.png", dpi=90)


def draw(axes: Any, runs: Sequence[Mapping[str, Any]], side: str, color: str) -> None:
    """The mean over seeds, smoothed over five steps, with the band from the lowest to the highest seed."""
    curves = [[statistics.mean(r["solved"][max(0, i - 4) : i + 1]) for i in range(len(r["solved"]))] for r in runs]
    mean = [statistics.mean(values) for values in zip(*curves, strict=True)]
    low, high = ([pick(values) for values in zip(*curves, strict=True)] for pick in (min, max))
    times = [statistics.mean(sum(r["seconds"][: i + 1]) for r in runs) for i in range(len(mean))]
    for axis, x in zip(axes, (range(1, len(mean) + 1), times), strict=True):
        axis.plot(x, mean, color=color, label=side)
        axis.fill_between(x, low, high, color=color, alpha=0.2)


if __name__ == "__main__":
    main()
