"""Verify that servers have the learner's weights, by comparing log-probabilities of fixed tokens."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence

from agentrl.chat.template import Renderer
from agentrl.engine.base import Engine
from agentrl.env.env import Env
from agentrl.errors import AgentRLError
from agentrl.types import Sample

TEXT = "The 7 wizards quickly jinxed 5,240 gnomes; {'vapour': [1, 2.5, null]} is what they left behind."
"""Text in addition to the schemas of the env's tools: common words, digits, punctuation."""
MOST_TOKENS = 256


class WeightCheck:
    """Compares servers with the learner after each update of weights.

    This detects weights corrupted in transfer, a server that kept old ones, a stale cache, and servers whose
    computation differs from the learner's.
    """

    def __init__(
        self,
        engine: Engine,
        learner: Callable[[Sequence[Sample]], Awaitable[list[list[float]]]],
        rows: Sequence[Sequence[int]],
        tolerance: float,
    ) -> None:
        """Compare on `rows`.

        Args:
            engine: returns the log-probabilities of all tokens except the first of each row.
            learner: log-probabilities (temperature 1) of the tokens under the mask of each sample.
            rows: fixed token ids.
            tolerance: maximum mean difference.
        """
        self._engine, self._learner, self._tolerance = engine, learner, tolerance
        self._rows = [tuple(row) for row in rows]

    async def gap(self, version: int) -> float:
        """The largest mean difference per token between a server and the learner.

        Raises:
            AgentRLError: it is above the tolerance.
        """
        wanted = [value for row in await self._learner(list(map(_sample, self._rows))) for value in row]
        worst = 0.0
        for name, rows in (await self._engine.logprobs_by_server(self._rows)).items():
            found = [value for row in rows for value in row]
            gap = sum(abs(a - b) for a, b in zip(found, wanted, strict=True)) / len(wanted)
            if not gap <= self._tolerance:
                raise AgentRLError(
                    f"weights of version {version}: {name} and the learner differ by {gap:.3g} per token "
                    f"on fixed tokens, above engine.sync_tolerance ({self._tolerance:g}): the weights did not "
                    "arrive, or the server computes something else (engine.dtype, quantisation, attention)"
                )
            worst = max(worst, gap)
        return worst


def check_rows(renderer: Renderer, env: Env, most: int) -> list[list[int]]:
    """Fixed token ids in the policy's vocabulary: the schemas of the env's tools, and a line of text."""
    texts = [json.dumps(list(env.tools)), TEXT]
    rows = [renderer.encode_text(text)[: min(most, MOST_TOKENS)] for text in texts]
    return [list(row) for row in rows if len(row) > 1]


def _sample(ids: Sequence[int]) -> Sample:
    count = len(ids)
    return Sample(
        ids=tuple(ids),
        loss_mask=(False,) + (True,) * (count - 1),
        logprobs=(0.0,) * count,
        advantages=(0.0,) * count,
        versions=(0,) * count,
        episode_id="check",
    )
