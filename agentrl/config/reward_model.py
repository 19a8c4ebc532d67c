"""The configuration of a model that scores whole episodes."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from agentrl.config.facts import MayChangeOnResume, OnlyWhen, PathTo
from agentrl.config.section import Count, Device, Positive, Section

NEEDED = {"classifier": ("path",), "judge": ("url", "model"), "http": ("url",)}


class RewardModelConfig(Section):
    """A model that scores every training episode; its score is one more reward.

    Where it cannot be reached, that is an infrastructure failure: the episode is played again and never trained
    unscored. Where it answers in another form, or refuses this conversation and not others, the score is 0 or the
    lowest it has given so far, whichever is less.
    """

    kind: Literal["classifier", "judge", "http"]
    """A sequence-classification model of the run, a chat model behind an OpenAI-compatible URL, or a reward server
    that answers `{"model", "messages": [text]}` with `{"scores": [number]}`."""
    path: Annotated[str | None, OnlyWhen("kind", "classifier"), PathTo("folder", hub=True)] = None
    """Directory of a Hugging Face sequence-classification model with one label and a tokenizer."""
    url: Annotated[str | None, OnlyWhen("kind", "judge", "http")] = None
    """Base URL of the chat model (`http://127.0.0.1:8000/v1`), or the endpoint of the reward server."""
    model: Annotated[str | None, OnlyWhen("kind", "judge", "http")] = None
    """Name of the model there."""
    name: str = "reward_model"
    """The name of its reward in metrics and records."""
    weight: float = 1.0
    """The score counts this much."""
    key_env: Annotated[str, OnlyWhen("kind", "judge")] = ""
    """Environment variable with the API key."""
    prompt: Annotated[str, OnlyWhen("kind", "judge")] = (
        "Rate how well the assistant solved the task. Answer with one number from {low} to {high}."
    )
    """What is asked, above the conversation."""
    low: Annotated[float, OnlyWhen("kind", "judge")] = 0.0
    """The lowest score."""
    high: Annotated[float, OnlyWhen("kind", "judge")] = 1.0
    """The highest score."""
    on_malformed: Annotated[Literal["score", "infra"], OnlyWhen("kind", "judge")] = "score"
    """An answer that states no score counts 0 (or `low` where that is less), or is played again. What the
    policy wrote can bring such an answer about, so `infra` lets a policy have its bad episodes drawn again."""
    max_tokens: Positive | None = None
    """Longest conversation in tokens (`classifier`) or, roughly, words; longer ones lose their middle."""
    device: Annotated[Device, OnlyWhen("kind", "classifier"), MayChangeOnResume()] = "auto"
    """`classifier`: `cpu`, `cuda`, `cuda:N` (a GPU of its own), or `auto`; for `workers` not `cuda:N`."""
    workers: Annotated[Count, OnlyWhen("kind", "classifier"), MayChangeOnResume()] = 0
    """Ray workers that hold the model, each with a whole one and a GPU of its own (or none, on
    CPUs); 0 scores in the process that trains. One that dies is started again, and is asked again."""
    batch_size: Annotated[Positive, OnlyWhen("kind", "classifier"), MayChangeOnResume()] = 16
    """Conversations in one forward pass at most."""
    max_concurrent: Annotated[Positive, OnlyWhen("kind", "judge", "http")] = 32
    """Questions asked at the same time."""
    timeout_s: Annotated[float, Field(gt=0), OnlyWhen("kind", "judge", "http")] = 60.0
    """Limit of one attempt."""
    retries: Annotated[Count, OnlyWhen("kind", "judge", "http")] = 3
    """Further attempts after a failed one."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for key in NEEDED[self.kind]:
            if getattr(self, key) is None:
                raise ValueError(f"reward_model.{key} is missing: kind {self.kind} needs it")
        if self.workers and self.device.startswith("cuda:"):
            raise ValueError(
                f"reward_model.device {self.device!r}: Ray gives workers their GPUs; write cuda, or leave it out"
            )
        if self.low >= self.high:
            raise ValueError(f"reward_model.low = {self.low} must be below reward_model.high = {self.high}")
        return self
