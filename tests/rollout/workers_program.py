"""What test_workers.py runs in a process of its own: episodes on Ray actors. Prints one line of JSON."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.chat.demonstrate import completion_of
from agentrl.chat.template import Renderer
from agentrl.config.compact import CompactConfig
from agentrl.config.reward_model import RewardModelConfig
from agentrl.config.run import RunConfig
from agentrl.env.load import load_env
from agentrl.errors import AgentRLError, ConfigError, EngineError
from agentrl.models.tiny import make_tokenizer
from agentrl.reporting.report import Silent
from agentrl.rollout.build import make_token_check
from agentrl.rollout.collect import collect
from agentrl.rollout.compaction import Compaction
from agentrl.rollout.content import env_factory
from agentrl.rollout.episode import Player
from agentrl.rollout.limits import EpisodeLimits
from agentrl.rollout.ray.worker import WorkerSetup, pack_setup
from agentrl.rollout.ray.workers import RemotePlayer, Workers
from agentrl.rollout.renderer import load_renderer
from agentrl.rollout.rewards.model import make_reward_model
from agentrl.run_folder.records import read_episodes
from agentrl.run_folder.store import RunStore
from agentrl.testing.engine import ScriptedEngine
from agentrl.testing.policy import call, say
from agentrl.trainer.run import train_run
from agentrl.types import Completion, Episode, Group, Sampling, Task

NEIGHBOUR = "WORD = 'found'\n"
ENVS = """
import asyncio, os, signal, threading
from pathlib import Path

from neighbour import WORD

from agentrl import ToolEnv, reward, tool


class Finder(ToolEnv):
    'Find it.'

    def __init__(self, folder):
        super().__init__()
        self.folder = Path(folder)

    def setup(self, number: int, what: str = "") -> str:
        self.number, self.what = number, what
        (self.folder / f"pid-{os.getpid()}").touch()
        return f"Number {number}."

    @tool
    async def find(self, key: str) -> str:
        'Find.'
        if self.what == "hang":
            (self.folder / f"hangs-{id(self)}").touch()
            await asyncio.sleep(1e6)
        if self.what == "die":
            try:
                (self.folder / "died").touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return WORD + key

    @tool(timeout_s=0.1)
    def stick(self) -> str:
        'Never return.'
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

    async def close(self):
        await super().close()
        if getattr(self, "what", "") == "hang":
            (self.folder / f"closed-{os.getpid()}-{id(self)}").touch()

    @reward
    def solved(self) -> float:
        return float(self.number % 2)
"""


class Counting(ScriptedEngine):
    """Takes a moment; by label, fails, is out of reach, or calls a tool that never returns after it was."""

    outage_s = 0.0

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, session: str | None = None) -> Completion:
        if session is not None and session.startswith("broken/"):
            raise EngineError("no engine here")
        if session is not None and session.startswith("outage/"):
            self.outage_s += 1.0
            await asyncio.Event().wait()
        if session is not None and session.startswith("stuck/"):
            self.outage_s += 1.0
            return completion_of(self._renderer, call("stick"), self._tools)
        return await super().generate(ids, sampling, session=session)


def played(groups: Sequence[Group]) -> list[Any]:
    """What does not depend on where it was played."""
    return [
        [
            e.id,
            e.reward,
            e.stop_reason,
            [m.content for m in e.messages],
            [list(s.ids) for s in e.segments],
            e.metrics,
        ]
        for g in groups
        for e in g.episodes
    ]


async def main(folder: Path) -> dict[str, Any]:
    """Everything at once: a Ray cluster takes long to start."""
    model, code, notes = folder / "model", folder / "code", folder / "notes"
    for path in (model, code, notes):
        path.mkdir()
    (code / "neighbour.py").write_text(NEIGHBOUR)
    (code / "envs.py").write_text(ENVS)
    make_tokenizer(model, ["Find it. found Number"] * 4, vocab=320, max_context=4096)
    use = f"{code}/envs.py:Finder"
    config = RunConfig(env={"use": use, "options": {"folder": str(notes)}}, model={"path": str(model)})
    renderer = load_renderer(config, model)
    make_env = env_factory(load_env(use), config)
    engine = Counting(renderer, [call("find", key="it"), say("done")], tools=make_env().tools, delay_s=0.02)
    sampling = Sampling(stop_ids=renderer.stop_ids)
    player = Player(engine, renderer, make_env, EpisodeLimits(timeout_s=60), sampling, make_token_check(config))
    kit = pack_setup(config, model, engine.max_context)
    tasks = [Task(f"t{n}", {"number": n}) for n in range(4)]
    how: dict[str, Any] = {"group_size": 4, "seed": 0}
    here = await collect(player, tasks, label="a", **how)
    shutil.rmtree(code)  # as on another machine
    for file in notes.iterdir():
        file.unlink()
    workers = Workers(2, kit, engine)
    await workers.start()
    found: dict[str, Any] = {}
    try:
        remote = workers.player(player)
        there = await collect(remote, tasks, label="a", **how)
        found["same"] = played(there) == played(here)
        found["processes"] = len(list(notes.glob("pid-*")))
        found["checked"] = player.token_check.watch.checked

        deadly = [*tasks, Task("deadly", {"number": 5, "what": "die"})]
        groups = await collect(remote, deadly, label="b", infra_retries=3, **how)
        found["complete"] = [len(g.episodes) for g in groups]
        failed = [e for g in groups for e in g.failed]
        found["lost"] = len(failed)
        found["errors"] = sorted({e.error.split(":")[0] for e in failed})
        await collect(remote, tasks, label="c", **how)
        found["processes_after"] = len(list(notes.glob("pid-*")))

        broken = await asyncio.gather(
            collect(remote, tasks[:1], label="broken", infra_retries=0, **how), return_exceptions=True
        )
        found["broken"] = str(broken[0])

        hanging = asyncio.ensure_future(
            collect(remote, [Task("slow", {"number": 1, "what": "hang"})], label="d", **how)
        )
        while len(list(notes.glob("hangs-*"))) < 4:  # noqa: ASYNC110  # other processes write them
            await asyncio.sleep(0.05)
        hanging.cancel()
        await asyncio.wait([hanging])
        found["scoring"] = await scoring(folder, here[0].episodes[:2])
        hurried = replace(player, limits=EpisodeLimits(timeout_s=5))
        cut = await workers.player(hurried).play(tasks[0], episode_id="outage/g0/e0", seed=0)
        found["outage"] = [cut.error, cut.reward]
        stuck = await remote.play(tasks[1], episode_id="stuck/g0/e0", seed=0)
        found["stuck"] = [stuck.stop_reason, stuck.error, stuck.reward]
        found["compacted"] = await compacted(config, kit, renderer, make_env, how)
        unusable = Workers(2, replace(kit, code={"envs.py": b"import not_on_this_node"}), engine)
        try:
            await unusable.start()
        except ConfigError as e:
            found["unusable"] = str(e)
        await unusable.close()
        while len(list(notes.glob("closed-*"))) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        found["closed"] = len(list(notes.glob("closed-*")))
        found["without_ray"] = await without_ray(remote, tasks, how)
    finally:
        await workers.close()
    found["released"] = len(engine.released)
    found["tasks_left"] = len(asyncio.all_tasks()) - 1
    return found


async def compacted(
    config: RunConfig, kit: WorkerSetup, renderer: Renderer, make_env: Any, how: dict[str, Any]
) -> dict[str, Any]:
    """Episodes whose context fills up, here and on a worker."""
    compact = CompactConfig(how="drop_tool_results", keep_turns=1, context=1200)
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"compact": compact})})
    script = [*[call("find", key="it " * 60)] * 6, say("done")]
    engine = ScriptedEngine(renderer, script, tools=make_env().tools)
    sampling, limits = Sampling(stop_ids=renderer.stop_ids), EpisodeLimits(timeout_s=60, token_budget=20_000)
    player = Player(engine, renderer, make_env, limits, sampling, None, Compaction.of(config, engine))
    here = await collect(player, [Task("t", {"number": 1})], label="g", **how)
    workers = Workers(1, replace(kit, config=config), engine)
    await workers.start()
    try:
        there = await collect(workers.player(player), [Task("t", {"number": 1})], label="g", **how)
    finally:
        await workers.close()
    times = [e.metrics.get("compact/times") for e in there[0].episodes]
    return {"same": played(there) == played(here), "times": times}


async def without_ray(remote: RemotePlayer, tasks: Sequence[Task], how: dict[str, Any]) -> str:
    """What is said when Ray's own process on this machine is killed: no worker can start again."""
    for file in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, file.read_text().split()):
            if Path(f"/proc/{pid}/comm").read_text() == "raylet\n":
                os.kill(pid, signal.SIGKILL)
    try:
        await collect(remote, tasks, label="e", **how)
        await collect(remote, [Task("slow", {"number": 1, "what": "hang"})], label="f", **how)
    except AgentRLError as e:
        return f"{type(e).__name__}: {e}"
    return ""


async def scoring(folder: Path, episodes: Sequence[Episode]) -> dict[str, Any]:
    """A classifier here and on a worker of its own, which is killed between two scores."""
    from transformers import AutoModelForSequenceClassification, Qwen3Config

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    directory = folder / "scorer"
    shutil.copytree(folder / "model", directory)
    model = AutoModelForSequenceClassification.from_config(
        Qwen3Config(vocab_size=400, num_key_value_heads=1, head_dim=16, num_labels=1, pad_token_id=0, **sizes)
    )
    model.save_pretrained(directory)
    settings = {"kind": "classifier", "path": str(directory), "device": "cpu", "batch_size": 1}
    here = await make_reward_model(RewardModelConfig(**settings), folder / "model")
    there = await make_reward_model(RewardModelConfig(**settings, workers=1), folder / "model")
    wanted = [(await here.judged(e)).rewards["reward_model"] for e in episodes]
    scores = [(await there.judged(e)).rewards["reward_model"] for e in episodes]
    (worker,) = there.scorer.workers
    first = await worker.actor.__ray_call__.remote(lambda self: os.getpid())
    os.kill(first, signal.SIGKILL)
    again = await there.judged(episodes[0])
    second = await worker.actor.__ray_call__.remote(lambda self: os.getpid())
    there.scorer.ray.kill(worker.actor)
    lost = await there.judged(episodes[0])
    missing = str(folder / "nowhere")
    try:
        await make_reward_model(RewardModelConfig(**settings | {"path": missing}, workers=1), folder / "model")
    except ConfigError as e:
        said = str(e)
    await there.close()
    found = {"wanted": wanted, "scores": scores, "again": again.rewards["reward_model"], "lost": lost.error}
    return found | {"started_again": first != second, "missing": said}


def run(folder: Path, workers: int) -> list[Any]:
    """A step of training with a random model: the episodes, and whether their tokens say by which weights."""
    config = RunConfig(
        steps=1,
        env="agentrl.envs.calculator:Calculator",
        model={"tiny": {"hidden": 32, "layers": 1, "heads": 2, "intermediate": 64, "vocab": 400}},
        rollout={"groups_per_step": 2, "group_size": 2, "max_tokens": 8, "workers": workers, "temperature": 1.0},
        eval={"tasks": 2},
        checkpoint={"every": 0},
    )
    with RunStore.open(config, folder / f"run{workers}") as store:
        summary = train_run(config, store, Silent())
        assert summary.finished
        return [[e.id, e.reward, [list(s.ids) for s in e.segments]] for e in read_episodes(store.path, 1)]


if __name__ == "__main__":
    where = Path(sys.argv[1])
    sys.stdout.write(json.dumps(asyncio.run(main(where)) | {"runs": [run(where, 0), run(where, 2)]}) + "\n")
