"""One training step: agentrl against TRL's GRPOTrainer with its own tool calling, on the same CPU.

    pip install -e '.[train,bench]'
    python bench/vs_trl.py [--quick] [--shapes short,slow,long] [--models DIR] [--json FILE]

Both start from the same weights (a tiny model, made and cold-started once so that it calls the tool), play the
same tasks in the same order with the same prompts (token for token; checked) and limits, in groups of the same
size, and take the same number of optimizer steps. Each runs in a process of its own; the two take turns, one step
each, and the one whose turn it is not does nothing. First steps are not timed. The learning rate is so small that
both policies stay what they were, so that every step is the same work.

agentrl runs as `agentrl train` does, with the same defaults, including the comparison of every ledger with a fresh
rendering and the run folder's records. TRL runs with what is fastest for it here: float32, SDPA, no gradient
checkpointing, no reference model, one micro-batch a step, padded `generate`, and one thread or all, whichever is
faster in a trial before the timed steps.

Shapes: `short` has one operation a task (one tool call), `long` three operations with a model three times the size
and a long system prompt, `slow` is `short` with a tool that takes 50 ms. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
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
from agentrl.env import reward, tool
from agentrl.env.read import final_answer
from agentrl.env.toolenv.observe import error_text
from agentrl.envs.calculator import Calculator, CalculatorError, evaluate
from agentrl.envs.calculator.expression import as_text
from agentrl.reporting.report import Silent
from agentrl.run_folder.records import read_episodes
from agentrl.types import Episode
from bench.shared.step_bound import bound

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.shared.names import names_of
from bench.shared.verdict import finish

SLOW_TOOL_S = 0.05
LR = 1e-7
UNTIMED = 3
"""Steps of agentrl before the timed ones: the first import what records and curve need."""
SEED = 0


def agreement(said: str, right: str) -> float:
    """Share of characters that agree, place by place."""
    return sum(a == b for a, b in zip(said, right, strict=False)) / max(len(said), len(right))


class Graded(Calculator):
    """The calculator with a reward by degrees, so that nearly every group has something to learn from."""

    @reward
    def agree(self, episode: Episode) -> float:
        return agreement(final_answer(episode).strip(), str(self.problem.result))


class Short(Graded):
    """Use the calculator, then answer with the number."""

    @tool(inline=True)
    def calculator(self, expression: str) -> str:
        """Evaluate arithmetic.

        Args:
            expression: Arithmetic.
        """
        return as_text(evaluate(expression))


class Slow(Graded):
    """Use the calculator, then answer with the number."""

    @tool
    def calculator(self, expression: str) -> str:
        """Evaluate arithmetic.

        Args:
            expression: Arithmetic.
        """
        time.sleep(SLOW_TOOL_S)
        return as_text(evaluate(expression))


class Long(Short):
    """You are a careful assistant for arithmetic. The user names a number to start with and then up to three
    operations; apply them strictly from left to right, each one to the result of the one before, whatever the
    usual order of operations would say. Never compute anything in your head: call the calculator once for every
    operation, wait for what it answers, and build the next call from that result. The calculator knows plus,
    minus, times, division and parentheses, works on whole numbers, and answers exactly. When it refuses an
    expression, read the message, correct the expression and call it again. When all operations are done, answer
    with the final number alone: no words, no punctuation, no units, no explanation, and nothing after it.
    """


@dataclass(frozen=True)
class Shape:
    """What both are given. Token limits are those of one episode after its prompt."""

    env: type[Calculator]
    operations: int
    """Of every task; each is one call if the policy does as it was shown."""
    tool_turns: int
    """Completions that may call the tool; one more may follow."""
    completion_tokens: int
    tiny: Mapping[str, int]
    warmup: Mapping[str, Any]
    goal: float
    """Ratio aimed at."""
    groups: int = 16
    group_size: int = 8
    steps: int = 6
    """Timed optimizer steps of each."""
    device: str = "cpu"
    """`cuda`: both compute in bfloat16, with parameters in float32."""

    @property
    def model(self) -> str:
        """Shapes with the same prompt share their start model."""
        return "long" if self.env is Long else "short"


SMALL = {"hidden": 128, "layers": 3, "vocab": 512}
MIDDLE = {"hidden": 192, "layers": 4, "intermediate": 576, "vocab": 640}
SHORT_WARMUP = {"num": 1600, "max_epochs": 8, "probe_every": 50, "until_pass": 0.95, "at_least": 0.0}
LONG_WARMUP = {"num": 600, "max_epochs": 4, "probe_every": 1000, "until_pass": 0.5, "at_least": 0.0}
SHAPES = {
    "short": Shape(Short, 1, 2, 128, SMALL, SHORT_WARMUP, goal=5.0, steps=6),
    "long": Shape(Long, 3, 4, 256, MIDDLE, LONG_WARMUP, goal=10.0, steps=3),
    "slow": Shape(Slow, 1, 2, 128, SMALL, SHORT_WARMUP, goal=5.0, steps=4),
}
QUICK_WARMUP = SHORT_WARMUP | {"num": 960, "max_epochs": 5, "probe_every": 150}
QUICK = {"short": Shape(Short, 1, 2, 128, SMALL, QUICK_WARMUP, goal=5.0, steps=4)}


@dataclass(frozen=True)
class Step:
    """One optimizer step as its worker saw it."""

    seconds: float
    episodes: int
    sampled: int
    """Tokens sampled."""
    learnt: int
    """Tokens that went through the learner, padding not counted."""
    positions: int
    """The same, padding counted."""
    solved: float
    turns: float
    """Completions an episode."""
    signal: float
    """Share of groups whose episodes differ in reward."""


# Both sides


def run_config(shape: Shape, model: Mapping[str, Any], **changes: Any) -> RunConfig:
    operations = {"min_operations": shape.operations, "max_operations": shape.operations}
    return RunConfig.model_validate(
        {
            "name": "bench",
            "seed": SEED,
            "steps": 10_000,
            "env": f"{Path(__file__).resolve()}:{shape.env.__name__}",
            "model": model,
            "data": {"options": operations},
            "rollout": {
                "groups_per_step": shape.groups,
                "group_size": shape.group_size,
                "max_turns": shape.tool_turns + 1,
                "max_tokens": shape.completion_tokens,
            },
            "algorithm": {"kl": {"coef": 0.0}},
            "optim": {"lr": LR},
            "eval": {"tasks": 1},
            "learner": {"device": shape.device, **({"precision": "bfloat16"} if shape.device == "cuda" else {})},
            "engine": {"device": shape.device},
            **changes,
        }
    )


def make_model(shape: Shape, folder: str) -> None:
    """Make the tiny model and cold-start it; the folder then holds it under `start`."""
    from agentrl.rollout.content import load_content
    from agentrl.trainer.start import make_start

    options = {"quality": 0.8, "min_operations": shape.operations, "max_operations": shape.operations}
    warmup = {**shape.warmup, "options": options}
    config = run_config(shape, {"tiny": dict(shape.tiny)}, warmup=warmup)
    content = load_content(config)
    asyncio.run(make_start(config, content, Path(folder), reporter=Silent(), stopping=lambda: False))


# agentrl


class Turns(Silent):
    """A reporter that stops after every step of the training until it is told to go on."""

    def __init__(self, pipe: Connection, shape: Shape) -> None:
        self.pipe, self.shape = pipe, shape
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
        if not self.training:
            return
        seconds = time.perf_counter() - self.started
        learnt = int(metrics["learner_tokens"])
        self.pipe.send(
            Step(
                seconds,
                int(metrics["episodes"]),
                int(metrics["sampled_tokens"]),
                learnt,
                learnt,
                metrics["solved"],
                metrics["turns"],
                metrics["groups_with_signal"] / self.shape.groups,
            )
        )
        self._wait()


def run_ours(shape: Shape, folder: str, pipe: Connection) -> None:
    """Train as told; the pipe first says from which model, and how long its prompts are at most."""
    from agentrl.run_folder.store import RunStore
    from agentrl.trainer.run import train_run

    model, prompt_tokens = pipe.recv()
    config = run_config(shape, {"path": model})
    rollout = config.rollout.model_copy(update={"token_budget": prompt_tokens + shape.completion_tokens})
    config = config.model_copy(update={"rollout": rollout})
    with RunStore.open(config, Path(folder)) as store:
        train_run(config, store, Turns(pipe, shape))


# TRL


def make_tool(shape: Shape) -> Any:
    """The calculator as the plain function that TRL asks for; it answers in the words of ours."""

    def calculator(expression: str):  # type: ignore[no-untyped-def]  # a return type would enter the schema
        """Evaluate arithmetic.

        Args:
            expression: Arithmetic.
        """
        if shape.env is Slow:
            time.sleep(SLOW_TOOL_S)
        try:
            return as_text(evaluate(expression))
        except CalculatorError as e:
            return f"Error: {error_text(e)}"

    return calculator


def final(messages: Sequence[Mapping[str, Any]]) -> str:
    """What an episode ends with; empty where it ends in a call or a result."""
    last = messages[-1]
    return "" if last["role"] != "assistant" or last.get("tool_calls") else last["content"].strip()


def solved(completions: Sequence[Sequence[Mapping[str, Any]]], answer: Sequence[str], **_: Any) -> list[float]:
    """TRL's reward function, by the rule of the env: one number in the last message, and the right one."""
    said = [re.findall(r"-?\d+", final(messages)) for messages in completions]
    return [float(numbers == [right]) for numbers, right in zip(said, answer, strict=True)]


def agree(completions: Sequence[Sequence[Mapping[str, Any]]], answer: Sequence[str], **_: Any) -> list[float]:
    """The other one."""
    return [agreement(final(messages), right) for messages, right in zip(completions, answer, strict=True)]


def prompts(shape: Shape) -> list[tuple[list[dict[str, str]], str]]:
    """Messages and answer of every task, in the order in which agentrl takes them."""
    from agentrl.envs.calculator.env import Problem

    n = shape.operations
    num = shape.groups * (shape.steps + 8)
    found = []
    for task in shape.env.tasks("train", SEED, min_operations=n, max_operations=n)[:num]:
        problem = Problem(task.row["start"], tuple((o, x) for o, x in task.row["operations"]))
        opening = [
            {"role": "system", "content": shape.env().system()},
            {"role": "user", "content": problem.text},
        ]
        found.append((opening, str(problem.result)))
    return found


def same_prompts(shape: Shape, model: str, tokenizer: Any, calculator: Any) -> int:
    """Length of the longest prompt in tokens, once both sides have been seen to render the same ids."""
    from agentrl.chat.template import Renderer
    from agentrl.chat.transcript import Transcript
    from agentrl.types import Message

    renderer, tools, longest = Renderer.from_directory(Path(model)), list(shape.env().tools), 0
    for messages, _ in prompts(shape):
        transcript = Transcript(renderer, tools)
        transcript.extend([Message(m["role"], m["content"]) for m in messages])  # type: ignore[arg-type]
        theirs = tokenizer.apply_chat_template(
            messages, tools=[calculator], add_generation_prompt=True, return_dict=False
        )
        assert list(transcript.ids) == theirs, "the two sides render different prompts"
        longest = max(longest, len(theirs))
    return longest


def run_trl(shape: Shape, folder: str, pipe: Connection) -> None:
    """Train as told; the pipe first says from which model, and then gets the length of the longest prompt."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    model = pipe.recv()
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = qwen3_template  # Hermes-style calls, as our template writes them
    calculator = make_tool(shape)
    pipe.send(same_prompts(shape, model, tokenizer, calculator))
    last: dict[str, Any] = {}

    class Counting(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            out = super()._generate_and_score_completions(inputs)
            own = (out["completion_mask"] * out["tool_mask"]).bool()
            begins = own & ~torch.nn.functional.pad(own, (1, 0))[:, :-1]
            groups = out["advantages"].view(-1, shape.group_size)
            last.update(
                episodes=len(own),
                sampled=int(own.sum()),
                learnt=int(out["prompt_mask"].sum() + out["completion_mask"].sum()),
                positions=out["prompt_mask"].numel() + out["completion_mask"].numel(),
                turns=float(begins.sum() / len(own)),
                signal=float((groups != 0).any(dim=1).float().mean()),
            )
            return out

    def counted(**kwargs: Any) -> list[float]:
        scores = solved(**kwargs)
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
            if shape.device == "cuda":
                torch.cuda.synchronize()
            pipe.send(Step(seconds=time.perf_counter() - self.started, **last))
            self.wait()

    rows = [{"prompt": messages, "answer": answer} for messages, answer in prompts(shape)]
    episodes = shape.groups * shape.group_size
    trainer = Counting(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa"),
        processing_class=tokenizer,
        reward_funcs=[counted, agree],  # type: ignore[list-item]
        tools=[calculator],
        train_dataset=Dataset.from_list(rows),
        callbacks=[Wait()],
        args=GRPOConfig(
            output_dir=folder,
            use_cpu=shape.device == "cpu",
            bf16=shape.device == "cuda",
            gradient_checkpointing=False,
            per_device_train_batch_size=episodes,
            gradient_accumulation_steps=1,
            num_generations=shape.group_size,
            max_completion_length=shape.completion_tokens,
            max_tool_calling_iterations=shape.tool_turns,
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.28,
            learning_rate=LR,
            lr_scheduler_type="constant",
            max_steps=shape.steps + 8,
            shuffle_dataset=False,
            dataloader_pin_memory=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=SEED,
        ),
    )
    trainer.train()


# The comparison


class Worker:
    """A side in a process of its own, which takes a step when it is told to."""

    def __init__(self, target: Any, *args: Any) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(*args, theirs))  # which has a child itself
        self.process.start()
        theirs.close()

    def step(self, threads: int = 0) -> Step:
        self.pipe.send(threads)
        result: Step = self.pipe.recv()
        return result

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()


def start_model(shape: Shape, models: Path) -> str:
    """Where the start model of this shape lies; made where it is not there yet."""
    folder = models / f"{shape.model}-{shape.operations}"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "start").is_dir():
        process = get_context("spawn").Process(target=make_model, args=(shape, str(folder)))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"making the start model failed with exit code {process.exitcode}")
    return str(folder / "start")


def best_threads(trl: Worker) -> int:
    """One thread or one for each core, whichever took the shortest of two steps; a first step does not count."""
    cores = len(os.sched_getaffinity(0))
    trl.step(cores)
    if cores == 1:
        return 1
    trials = [(trl.step(threads).seconds, threads) for threads in (1, cores, 1, cores)]
    return min(trials)[1]


def compare(shape: Shape, models: Path, runs: Path, threads: int) -> dict[str, Any]:
    """Both sides in turn; `threads` of TRL, 0 where they are still to be found."""
    # They import while the model is made.
    with Worker(run_trl, shape, str(runs / "trl")) as trl, Worker(run_ours, shape, str(runs / "ours")) as ours:
        model = start_model(shape, models)
        trl.pipe.send(model)
        prompt_tokens = trl.pipe.recv()
        if threads:
            trl.step(threads)
        else:
            threads = best_threads(trl)
        ours.pipe.send((model, prompt_tokens))
        for _ in range(UNTIMED):
            ours.step()
        pairs = [(ours.step(), trl.step(threads)) for _ in range(shape.steps)]
    number = UNTIMED + shape.steps
    least = bound(model, read_episodes(runs / "ours", number)) if shape.device == "cpu" else {}
    sides = {"agentrl": figures([a for a, _ in pairs]), "trl": figures([b for _, b in pairs])}
    ours_s = sides["agentrl"]["step_s_median"]
    share = {}
    if least:
        share = {"share_of_bound": round((least["update_bound_s"] + least["rollout_bound_s"]) / ours_s, 3)}
    ratio = sides["agentrl"]["episodes_per_s"] / sides["trl"]["episodes_per_s"]
    return {
        "prompt_tokens": prompt_tokens,
        "steps": shape.steps,
        "episodes_a_step": shape.groups * shape.group_size,
        "trl_threads": threads,
        **sides,
        **{name: float(f"{value:.3g}") for name, value in least.items()},
        **share,
        "ratio": round(ratio, 2),
        "goal": shape.goal,
        "met": ratio >= shape.goal,
    }


def figures(steps: Sequence[Step]) -> dict[str, float]:
    total = sum(s.seconds for s in steps)
    found = {
        "step_s": total / len(steps),
        "step_s_median": statistics.median(s.seconds for s in steps),
        "step_s_min": min(s.seconds for s in steps),
        "step_s_max": max(s.seconds for s in steps),
        "episodes_per_s": sum(s.episodes for s in steps) / total,
        "sampled_tokens_per_s": sum(s.sampled for s in steps) / total,
        "trained_tokens_per_s": sum(s.learnt for s in steps) / total,
        "sampled_tokens_an_episode": sum(s.sampled for s in steps) / sum(s.episodes for s in steps),
        "turns_an_episode": statistics.mean(s.turns for s in steps),
        "solved": statistics.mean(s.solved for s in steps),
        "groups_with_signal": statistics.mean(s.signal for s in steps),
        "padding": 1 - sum(s.learnt for s in steps) / max(1, sum(s.positions for s in steps)),
    }
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def table(name: str, result: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{name}: prompts of {result['prompt_tokens']} tokens, {result['episodes_a_step']} episodes a step, "
        f"{result['steps']} steps each; trl on {result['trl_threads']} thread(s)"
    )
    ours, trl = result["agentrl"], result["trl"]
    yield f"  {'':28}{'agentrl':>10}{'trl':>10}{'ratio':>8}"
    for key in ours:
        faster = trl[key] / ours[key] if key.startswith("step_s") and ours[key] else 0.0
        if key.endswith("per_s") and trl[key]:
            faster = ours[key] / trl[key]
        yield f"  {key:28}{ours[key]:>10g}{trl[key]:>10g}" + (f"{faster:>7.1f}x" if faster else "")
    yield (
        f"  bound of agentrl's step: update {result['update_bound_s']:g} s, "
        f"rollout {result['rollout_bound_s']:g} s at {result['gflops']:g} GFLOP/s; "
        f"share {result['share_of_bound']:.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="one shape, few steps: under a minute")
    parser.add_argument(
        "--shapes", type=names_of(SHAPES), default="short,slow,long", help="which, by comma (default: all)"
    )
    parser.add_argument("--models", type=Path, help="keep the start models here and use those that are there")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    options = parser.parse_args()
    shapes = QUICK if options.quick else {name: SHAPES[name] for name in options.shapes.split(",")}
    results: dict[str, dict[str, Any]] = {}
    last: dict[str, Any] = {}
    threads = len(os.sched_getaffinity(0)) if options.quick else 0
    with tempfile.TemporaryDirectory() as scratch:
        models = (options.models or Path(scratch) / "models").resolve()
        for name, shape in shapes.items():
            results[name] = compare(shape, models, Path(scratch) / name, threads)
            threads = results[name]["trl_threads"]
            print("\n".join(table(name, results[name])), flush=True)
            last = summary(results)
            if options.json:
                options.json.write_text(json.dumps(last | {"shapes": results}, indent=2) + "\n")
    finish(last, timed=True)


def summary(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The last line: the long shape's figures where it was run, and the ratio of each."""
    main_shape = "long" if "long" in results else next(iter(results))
    return {
        "bench": "vs_trl",
        "shape": main_shape,
        "ours": results[main_shape]["agentrl"]["episodes_per_s"],
        "baseline": results[main_shape]["trl"]["episodes_per_s"],
        "ratio": results[main_shape]["ratio"],
        "unit": "episodes/s",
        "goal": results[main_shape]["goal"],
        "met": all(r["met"] for r in results.values()),
        "ratios": {name: r["ratio"] for name, r in results.items()},
    }


if __name__ == "__main__":
    main()
