"""The worked example of docs/engines.md, and engines that do something wrong."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl.engine.base import Engine, EngineCapabilities
from agentrl.errors import EngineError
from agentrl.types import Completion

DOCS = Path(__file__).parents[2] / "docs" / "engines.md"
EXAMPLE = re.search(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)[1]
exec(compile(EXAMPLE, str(DOCS), "exec"))
PlainEngine = globals()["PlainEngine"]


async def make_plain(model, config):
    """Engines may be made by a coroutine."""
    return PlainEngine(model, config, max_context=64)


class Fixed(PlainEngine):
    """Cannot take new weights."""

    capabilities = EngineCapabilities(weights=False, prompt_logprobs=True)


class WrongLogprobs(PlainEngine):
    """Reports log-probabilities of another distribution."""

    async def generate(self, ids, sampling, *, session=None):
        found = await super().generate(ids, sampling, session=session)
        return replace(found, logprobs=tuple(p - 1.0 for p in found.logprobs))


class Short(PlainEngine):
    """Loses a log-probability."""

    async def generate(self, ids, sampling, *, session=None):
        found = await super().generate(ids, sampling, session=session)
        return replace(found, logprobs=found.logprobs[1:])


class Boastful(PlainEngine):
    """States what it does not implement."""

    capabilities = EngineCapabilities(streaming=True)


class Partial(Engine):
    """Does not implement the contract."""


def not_an_engine(model, config):
    """Something else."""
    return object()


NUMBER = 3


def leaves(model, config):
    """Ends the program, as scripts do that read flags."""
    raise SystemExit(3)


class Versionless(PlainEngine):
    """Cannot say which weights it has, and cannot be closed."""

    @property
    def policy_version(self):
        raise RuntimeError("no version yet")

    async def close(self):
        raise OSError("already gone")


class Turning(PlainEngine):
    """Does something wrong after the trial."""

    def __init__(self, model, config, *, how):
        super().__init__(model, config)
        self.how, self.calls = how, 0

    async def generate(self, ids, sampling, *, session=None):
        self.calls += 1
        good = await super().generate(ids, sampling, session=session)
        if self.calls == 1:
            return good
        if self.how == "raise":
            raise RuntimeError("out of slots")
        if self.how == "lose":
            raise EngineError("lost")
        if self.how == "nothing":
            return None
        return replace(good, **{self.how: WRONG[self.how](good)})

    async def update_weights(self, weights, version):
        pass


@dataclass(frozen=True)
class Frozen(Engine):
    """Takes no new attributes."""

    model: Path
    config: object
    max_context: int = 64
    policy_version = 0

    async def generate(self, ids, sampling, *, session=None):
        ids = (3,) * (sampling.max_tokens if len(ids) == 2 else sampling.max_tokens + 1)
        return Completion(ids, (-1.0,) * len(ids), (0,) * len(ids), "length")


WRONG = {
    "ids": lambda good: list(good.ids),
    "logprobs": lambda good: (float("nan"),) * len(good.ids),
    "versions": lambda good: (7,) * len(good.ids),
    "finish": lambda good: "eos",
}
