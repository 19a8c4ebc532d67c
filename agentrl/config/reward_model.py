"""The configuration of a model that scores whole episodes."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from agentrl.config.address import address_problem, without_credentials
from agentrl.config.facts import Advanced, OnlyWhen, OnResume, PathTo
from agentrl.config.section import Count, Device, Positive, Section

NEEDED = {"classifier": ("path",), "judge": ("url", "model"), "http": ("url",)}


class RewardModelConfig(Section):
    """A model that scores every training episode; the score is an additional reward.

    If it cannot be reached, that is an infrastructure failure: the episode is replayed and never trained without a
        score. If its answer is malformed, or it refuses only this conversation, the reward is 0 or the lowest
        reward of the model so far, whichever is less. An episode whose reward is fixed (`stop_reason` `fault` or
        `sandbox_broken`) is not scored.
    """

    kind: Literal["classifier", "judge", "http"]
    """A sequence-classification model in the run, a chat model behind an OpenAI-compatible URL, or a reward server
    that answers `{"model", "messages": [text]}` with `{"scores": [number]}`."""
    path: Annotated[str | None, OnlyWhen("kind", "classifier"), PathTo("folder", hub=True)] = None
    """Directory of a Hugging Face sequence-classification model with one label and a tokenizer."""
    url: Annotated[str | None, OnlyWhen("kind", "judge", "http")] = None
    """Base URL of the chat model (`http://127.0.0.1:8000/v1`), or the endpoint of the reward server."""
    model: Annotated[Annotated[str, Field(min_length=1)] | None, OnlyWhen("kind", "judge", "http")] = None
    """Name of the model at that URL."""
    name: Annotated[str, Field(min_length=1)] = "reward_model"
    """Name of the reward in metrics and records."""
    weight: float = 1.0
    """Weight of the score in the episode's reward."""
    key_env: Annotated[str, OnlyWhen("kind", "judge")] = ""
    """Environment variable with the API key."""
    prompt: Annotated[str, OnlyWhen("kind", "judge")] = (
        "Rate how well the assistant solved the task. Answer with one number from {low} to {high}."
    )
    """Prompt placed above the conversation."""
    low: Annotated[float, OnlyWhen("kind", "judge"), Advanced()] = 0.0
    """The lowest score."""
    high: Annotated[float, OnlyWhen("kind", "judge"), Advanced()] = 1.0
    """The highest score."""
    on_malformed: Annotated[Literal["score", "infra"], OnlyWhen("kind", "judge"), Advanced()] = "score"
    """How an answer without a score counts: as the lowest reward (see above), or the episode is replayed.
    The policy's text can provoke such answers, so with `infra` a policy can get its bad episodes replayed."""
    max_tokens: Annotated[Positive | None, Advanced()] = None
    """Maximum conversation length in tokens (`classifier`; otherwise roughly words); the middle of longer ones is
    cut out."""
    device: Annotated[Device, OnlyWhen("kind", "classifier"), OnResume("free"), Advanced()] = "auto"
    """`classifier`: `cpu`, `cuda`, `cuda:N` (a dedicated GPU), or `auto`; for `workers` not `cuda:N`."""
    workers: Annotated[Count, OnlyWhen("kind", "classifier"), OnResume("free"), Advanced()] = 0
    """Ray workers for the model, each with a full copy and a dedicated GPU (or none, on CPUs); 0 scores in the
    training process. A worker that dies is restarted and its requests are retried."""
    batch_size: Annotated[Positive, OnlyWhen("kind", "classifier"), OnResume("free"), Advanced()] = 16
    """Maximum conversations per forward pass."""
    max_concurrent: Annotated[Positive, OnlyWhen("kind", "judge", "http"), Advanced()] = 32
    """Maximum concurrent requests."""
    timeout_s: Annotated[float, Field(gt=0), OnlyWhen("kind", "judge", "http"), Advanced()] = 60.0
    """Timeout of one attempt."""
    retries: Annotated[Count, OnlyWhen("kind", "judge", "http"), Advanced()] = 3
    """Retries after a failed attempt."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for key in NEEDED[self.kind]:
            if getattr(self, key) is None:
                raise ValueError(f"reward_model.{key} is missing: kind {self.kind} needs it")
        if self.url is not None and (problem := address_problem(self.url)):
            raise ValueError(
                f"reward_model.url {self.address!r}: {problem}; give an address such as http://127.0.0.1:8000/v1"
            )
        if self.workers and self.device.startswith("cuda:"):
            raise ValueError(
                f"reward_model.device {self.device!r}: Ray gives workers their GPUs; write cuda, or leave it out"
            )
        if self.low >= self.high:
            raise ValueError(f"reward_model.low = {self.low} must be below reward_model.high = {self.high}")
        return self

    @property
    def address(self) -> str:
        """`url` without credentials, for messages and files."""
        return without_credentials(self.url or "")
