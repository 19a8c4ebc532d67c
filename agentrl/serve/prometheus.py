"""The endpoint's metrics in Prometheus format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The counters of one server; each server has separate counters."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "agentrl_requests", "Requests answered.", ["route", "status"], registry=self._registry
        )
        tokens = Counter(
            "agentrl_tokens",
            "Tokens: of prompts, of these not computed again, and sampled.",
            ["kind"],
            registry=self._registry,
        )
        self.prompt_tokens, self.cached_tokens = tokens.labels("prompt"), tokens.labels("cached")
        self.sampled_tokens = tokens.labels("sampled")
        self.matched = Counter(
            "agentrl_prompts", "Prompts by how the turn that they continue was recognized.", ["matched"],
            registry=self._registry,
        )  # fmt: skip
        self.drift = Counter(
            "agentrl_drift", "Differences between what was sampled and what came back.", ["kind"],
            registry=self._registry,
        )  # fmt: skip
        self.running = Gauge("agentrl_requests_running", "Requests in the engine.", registry=self._registry)
        self.seconds = Histogram(
            "agentrl_request_seconds",
            "From the request to the end of its answer.",
            ["route"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.first_token_seconds = Histogram(
            "agentrl_first_token_seconds",
            "From the request to the first token of a streamed answer.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.version = Gauge("agentrl_policy_version", "Version of the weights.", registry=self._registry)

    def text(self) -> bytes:
        """Return all metrics in the format of GET /metrics."""
        return generate_latest(self._registry)
