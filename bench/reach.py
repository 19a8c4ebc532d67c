"""How many ecosystems' own scores our adapters reproduce: `python -m bench.reach [--quick] [--write] [NAME ...]`.

Each ecosystem is played by scripted, random and, where it has one, oracle policies: through our adapter, 64
episodes at a time, and directly with the ecosystem's package, one at a time. It counts if every reward agrees.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.env.load import load_env
from agentrl.env.play import Policy, ScriptedPolicy, play
from agentrl.types import Episode, Task
from bench.shared.reach_apart import APART

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.shared.names import names_of
from bench.shared.verdict import finish

RESULTS = Path(__file__).parent / "results" / "reach.json"
GOAL = 8
"""Ecosystems that should agree."""
AT_ONCE = 64
Actions = Sequence[str]
Score = Callable[[Task, Actions], float]


def played(use: str, options: Mapping[str, Any], given: Sequence[tuple[Task, Policy]]) -> list[Episode]:
    """Episodes through our adapter, `AT_ONCE` at a time."""
    env = load_env(use, options)

    async def run() -> list[Episode]:
        places = asyncio.Semaphore(AT_ONCE)

        async def one(task: Task, policy: Policy) -> Episode:
            async with places:
                return await play(env(), task, policy, max_turns=200)

        return list(await asyncio.gather(*[one(*pair) for pair in given]))

    return asyncio.run(run())


def compared(
    use: str, options: Mapping[str, Any], cases: Sequence[tuple[Task, Actions]], score: Score
) -> tuple[int, int]:
    """(agreed, all) of the rewards of texts, through our adapter and by `score`."""
    episodes = played(use, options, [(task, ScriptedPolicy(actions)) for task, actions in cases])
    agreed = sum(
        abs((episode.reward or 0.0) - score(task, actions)) < 1e-9
        for episode, (task, actions) in zip(episodes, cases, strict=True)
    )
    return agreed, len(cases)


def cases_of(
    use: str, options: Mapping[str, Any], num: int, moves: Callable[[int, random.Random], Actions]
) -> Any:
    """`num` tasks of an env, each with the moves of its number."""
    tasks = load_env(use, options).tasks("train", 0)  # type: ignore[attr-defined]
    return [(tasks[i], moves(i, random.Random(i))) for i in range(num)]


def total(*parts: tuple[int, int]) -> tuple[int, int]:
    """The sums of (agreed, all)."""
    return sum(a for a, _ in parts), sum(n for _, n in parts)


def textarena(num: int) -> tuple[int, int]:
    """2048, TowerOfHanoi and TicTacToe."""
    import textarena as ta

    def score(use: str, replies: Actions = ()) -> Score:
        def scored(task: Task, actions: Actions) -> float:
            game = ta.make(use)
            game.reset(num_players=2 if replies else 1, seed=task.seed)
            ours, theirs, done = iter(actions), 0, False
            while not done:
                player, _ = game.get_observation()
                if player == 0:
                    done, _ = game.step(next(ours, "done"))
                else:
                    done, _ = game.step(replies[theirs % len(replies)])
                    theirs += 1
            rewards, _ = game.close()
            return float(rewards[0])

        return scored

    def slide(i: int, rng: random.Random) -> Actions:
        if i % 2:
            return ["[Left]", "[Down]", "[Right]", "[Up]"] * 40
        return [rng.choice(["[Up]", "[Down]", "[Left]", "[Right]"]) for _ in range(160)]

    def hanoi(i: int, rng: random.Random) -> Actions:
        solution = ["[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]"]
        return solution if i % 2 else [f"[{rng.choice('ABC')} {rng.choice('ABC')}]" for _ in range(20)]

    def crosses(i: int, rng: random.Random) -> Actions:
        return [f"[{rng.randrange(9)}]" for _ in range(9)]

    replies = ["[0]", "[8]", "[2]", "[5]", "[7]"]
    against = {"opponent": "scripted", "script": replies}
    small, easy, two = "2048-v0-ultra-easy", "TowerOfHanoi-v0", "TicTacToe-v0"
    return total(
        compared(f"textarena:{small}", {}, cases_of(f"textarena:{small}", {}, num, slide), score(small)),
        compared(f"textarena:{easy}", {}, cases_of(f"textarena:{easy}", {}, num, hanoi), score(easy)),
        compared(
            f"textarena:{two}", against, cases_of(f"textarena:{two}", against, num, crosses), score(two, replies)
        ),
    )


def gem(num: int) -> tuple[int, int]:
    """GuessTheNumber and Sudoku."""
    import gem
    import gem.envs  # registers them

    def score(use: str) -> Score:
        def scored(task: Task, actions: Actions) -> float:
            random.seed(task.seed)
            game = gem.make(use)
            game.reset(seed=task.seed)
            earned = 0.0
            for action in [*actions, *["done"] * 200]:
                _, reward, terminated, truncated, _ = game.step(action)
                earned += float(reward)
                if terminated or truncated:
                    break
            return earned

        return scored

    def guess(i: int, rng: random.Random) -> Actions:
        return [f"\\boxed{{{rng.randint(1, 10)}}}" for _ in range(4)]

    def fill(i: int, rng: random.Random) -> Actions:
        if i % 2:
            return [f"\\boxed{{{r} {c} {v}}}" for r in range(1, 5) for c in range(1, 5) for v in range(1, 5)]
        return [f"\\boxed{{{rng.randint(1, 4)} {rng.randint(1, 4)} {rng.randint(1, 4)}}}" for _ in range(15)]

    one, two = "game:GuessTheNumber-v0-easy", "game:Sudoku-v0-easy"
    return total(
        compared(f"gem:{one}", {}, cases_of(f"gem:{one}", {}, num, guess), score(one)),
        compared(f"gem:{two}", {}, cases_of(f"gem:{two}", {}, num, fill), score(two)),
    )


def reasoning_gym(num: int) -> tuple[int, int]:
    """Two datasets and a composite, answered by the oracle and at random."""
    import reasoning_gym as rg
    from reasoning_gym.composite import DatasetSpec

    parts = [
        {"name": "chain_sum", "weight": 1.0, "config": {}},
        {"name": "leg_counting", "weight": 2.0, "config": {}},
    ]
    found = []
    for name in ("mini_sudoku", "leg_counting", "composite"):
        options: dict[str, Any] = {"size": num} | ({"datasets": parts} if name == "composite" else {})
        extra = {"datasets": [DatasetSpec(**part) for part in parts]} if name == "composite" else {}
        data = rg.create_dataset(name, size=num, seed=0, **extra)

        def answer(i: int, rng: random.Random, data: Any = data) -> Actions:
            kinds = [data[i]["answer"], str(rng.randint(0, 60)), "1 2 3 4", ""]
            return [f"<answer>{kinds[i % 4]}</answer>"]

        def score(task: Task, actions: Actions, data: Any = data) -> float:
            said = actions[0].removeprefix("<answer>").removesuffix("</answer>")
            return float(data.score_answer(said, data[task.row["index"]]))

        use = f"reasoning_gym:{name}"
        found.append(compared(use, options, cases_of(use, options, num, answer), score))
    return total(*found)


def bfcl(num: int) -> tuple[int, int]:
    """Calls of the ground truth, whole, cut short, in reverse and mixed with those of other entries."""
    import bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker as own

    from agentrl.env.play import calls, say
    from agentrl.envs.others.bfcl import entries, true_call

    found = []
    for category in ("multi_turn_base", "multi_turn_miss_func", "multi_turn_long_context"):
        options = {"strict": False, "held_out": "all"}
        env: Any = load_env(f"bfcl:{category}", options)
        tasks, given, verdicts = env.tasks("train"), [], []
        for i in range(min(num, 200)):
            entry, truth = entries(category)[i]
            made = env()
            made.entry = entry
            known = made.load_apis()
            plan = _plan(truth, entries(category), i, random.Random(i))
            script: list[Any] = []
            for turn in plan:
                valid = [t for t in turn if _known(t, known)]
                turn[:] = valid
                script += [calls(*[true_call(t, known) for t in valid])] if valid else []
                script.append(say("done"))
            given.append((tasks[i], ScriptedPolicy(script)))
            steps = [[turn] if turn else [] for turn in plan]
            verdicts.append(own.multi_turn_checker(steps, truth, entry, category, f"reach{i}")["valid"])
        episodes = played(f"bfcl:{category}", options, given)
        agreed = sum(e.reward == float(v) for e, v in zip(episodes, verdicts, strict=True))
        found.append((agreed, len(episodes)))
    return total(*found)


def _plan(truth: list[list[str]], entries: Any, i: int, rng: random.Random) -> list[list[str]]:
    """The calls of each turn: as they should be, or with one of three mistakes."""
    other = entries[rng.randrange(len(entries))][1]
    if i % 4 == 1:
        return [turn[:-1] if rng.random() < 0.3 else turn[:] for turn in truth]
    if i % 4 == 2:
        return [turn[::-1] for turn in truth]
    if i % 4 == 3:
        return [[*turn, *rng.choice(other)] for turn in truth]
    return [turn[:] for turn in truth]


def _known(text: str, apis: Any) -> bool:
    """Whether a call names a function of these APIs."""
    from agentrl.envs.others.bfcl import api_method

    return api_method(apis, text.partition("(")[0].strip()) is not None


def gymnasium(num: int) -> tuple[int, int]:
    """FrozenLake (slippery) and CliffWalking with random actions."""
    import gymnasium as gym

    from agentrl.env.play import call

    def direct(name: str, seed: int, actions: Sequence[int]) -> float:
        game, earned = gym.make(name), 0.0
        game.reset(seed=seed)
        for action in actions:
            _, reward, terminated, truncated, _ = game.step(action)
            earned += float(reward)
            if terminated or truncated:
                break
        game.close()
        return earned

    agreed = 0
    for name in ("FrozenLake-v1", "CliffWalking-v1"):
        cases = cases_of(f"gymnasium:{name}", {}, num, lambda i, rng: [str(rng.randrange(4)) for _ in range(40)])
        given = [(task, ScriptedPolicy([call("act", action=int(a)) for a in moves])) for task, moves in cases]
        for episode, (task, moves) in zip(played(f"gymnasium:{name}", {}, given), cases, strict=True):
            agreed += episode.reward == direct(name, task.seed, [int(a) for a in moves])
    return agreed, 2 * num


ECOSYSTEMS: dict[str, tuple[str, Callable[[int], tuple[int, int]]]] = {
    "textarena": ("textarena", textarena),
    "gem": ("gem", gem),
    "reasoning_gym": ("reasoning_gym", reasoning_gym),
    "bfcl": ("bfcl_eval", bfcl),
    "gymnasium": ("gymnasium", gymnasium),
}
"""Each with the module it needs, and a function of the episodes per game that returns (agreed, all)."""


def main() -> None:
    """Play every installed ecosystem and print how many agree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", type=names_of((*ECOSYSTEMS, *APART)), help="ecosystems; all by default"
    )
    parser.add_argument("--quick", action="store_true", help="25 episodes per game instead of 400")
    parser.add_argument("--write", action="store_true", help=f"replace bench/results/{RESULTS.name}")
    args = parser.parse_args()
    ours, counts = 0, dict[str, list[int] | str]()
    for name in args.names or [*ECOSYSTEMS, *APART]:
        needed, run = ECOSYSTEMS[name] if name in ECOSYSTEMS else APART[name]
        found = needed.exists() if isinstance(needed, Path) else importlib.util.find_spec(needed) is not None
        if not found:
            counts[name] = "not installed"
            print(f"{name:<16} skipped: not found: {needed}", flush=True)
            continue
        start = time.perf_counter()
        agreed, count = run(25 if args.quick else 400)
        ours, counts[name] = ours + (agreed == count), [agreed, count]
        print(f"{name:<16} {agreed} of {count} rewards agree ({time.perf_counter() - start:.1f} s)", flush=True)
    line = {"bench": "reach", "ours": ours, "baseline": GOAL, "ratio": ours / GOAL, "unit": "ecosystems"}
    line |= {"goal": GOAL, "met": ours >= GOAL, "agreed": counts}
    if args.write:
        RESULTS.write_text(json.dumps(line, indent=1) + "\n")
    finish(line, timed=True)


if __name__ == "__main__":
    main()
