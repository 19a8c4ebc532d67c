"""One contract: what an engine states in `capabilities` is what it implements."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from agentrl.engine.base import Engine, EngineCapabilities, GenerateOptions
from agentrl.engine.local.local_engine import LocalEngine
from agentrl.engine.local.process import ProcessEngine
from agentrl.engine.servers.server_engine import ServedEngine
from agentrl.errors import EngineError
from agentrl.rollout.ray.worker import RemoteEngine
from agentrl.testing.engine import ScriptedEngine
from agentrl.types import Completion, Sampling

METHODS = {
    "weights": "update_weights",
    "streaming": "generate_streaming",
    "prompt_logprobs": "prompt_logprobs",
    "separate_weights": "logprobs_by_server",
    "sleep": "sleep",
}


@pytest.mark.parametrize("kind", [LocalEngine, ProcessEngine, ServedEngine, RemoteEngine, ScriptedEngine])
def test_an_engine_implements_what_its_capabilities_state_and_nothing_else(kind: type[Engine]) -> None:
    for capability, method in METHODS.items():
        overridden = getattr(kind, method) is not getattr(Engine, method)
        assert getattr(kind.capabilities, capability) == overridden, f"{kind.__name__}.{method}"


class Smallest(Engine):
    """Only what is abstract."""

    capabilities = EngineCapabilities(weights=False)
    max_context = 8

    @property
    def policy_version(self) -> int:
        return 0

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, session: str | None = None) -> Completion:
        return Completion((1,), (0.0,), (0,), "stop")


async def test_the_defaults_answer_or_say_what_the_engine_cannot_do() -> None:
    engine = Smallest()
    assert engine.ready
    assert engine.outage_s == 0.0
    await engine.release("s")
    await engine.close()
    for call in (
        engine.update_weights({}, 1),
        engine.generate_streaming([1], Sampling(), GenerateOptions()),
        engine.prompt_logprobs([1]),
        engine.logprobs_by_server([[1]]),
        engine.sleep(),
    ):
        with pytest.raises(EngineError, match="Smallest cannot"):
            await call
