"""Two inference servers on the loopback that hold the run's policy, one of them slow."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from agentrl.engine.local.local_engine import LocalEngine
from agentrl.testing.sglang_server import LoopbackServer
from agentrl.types import Sampling


class PolicyServer(LoopbackServer):
    """Samples from the weights that it was sent; waits `slowness` times as long as that took before it answers."""

    def __init__(self, slowness: float) -> None:
        super().__init__()
        self.slowness = slowness
        self.engine: LocalEngine | None = None

    async def _take_weights(self, path: str, body: dict[str, Any]) -> tuple[int, object]:
        folder, version = Path(body["model_path"]), int(body["weight_version"].partition("@")[0])
        if self.engine is None:
            self.engine = await asyncio.to_thread(LocalEngine.from_directory, folder)
        await self.engine.update_weights(load_file(folder / "model.safetensors"), version)
        return await super()._take_weights(path, body)

    async def _post_generate(self, body: dict[str, Any]) -> tuple[int, object]:
        assert self.engine is not None
        ids, params = body["input_ids"], body["sampling_params"]
        if "logprob_start_len" in body:
            found = await self.engine.prompt_logprobs(ids)
            scores = [[None, ids[0], None], *([one.logprob, one.id, None] for one in found)]
            return 200, {"output_ids": [], "meta_info": {"input_token_logprobs": scores}}
        began = time.monotonic()
        drawn = await self.engine.generate(
            ids,
            Sampling(
                temperature=params["temperature"],
                max_tokens=params["max_new_tokens"],
                stop_ids=frozenset(params["stop_token_ids"]),
                seed=params.get("sampling_seed"),
            ),
        )
        await asyncio.sleep(self.slowness * (time.monotonic() - began))
        count = len(drawn.ids)
        meta = {
            "finish_reason": {"type": drawn.finish},
            "prompt_tokens": len(ids),
            "completion_tokens": count,
            "weight_versions": [{"version": self.version, "start": 0, "end": count}],
            "output_token_logprobs": [[v, id, None] for v, id in zip(drawn.logprobs, drawn.ids, strict=True)],
        }
        return 200, {"output_ids": list(drawn.ids), "meta_info": meta}

    async def die(self) -> None:
        await super().die()
        if self.engine is not None:
            await self.engine.close()


@contextmanager
def servers(*slowness: float) -> Iterator[Mapping[str, Any]]:
    """Such servers in a thread; the settings of a run that samples from them."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def wait(work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, loop).result(60)

    started = [PolicyServer(each) for each in slowness]
    try:
        for server in started:
            wait(server.start())
        yield {"engine": {"kind": "sglang", "server": {"urls": [server.url for server in started]}}}
    finally:
        for server in started:
            wait(server.die())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
