"""The configuration of a model that scores whole episodes."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from agentrl.config.section import Count, Device, Positive, Section

KEYS = {
    "classifier": ("path", "device", "batch_size", "workers"),
    "judge": (
        *("url", "model", "key_env", "prompt", "low", "high", "on_malformed"),
        *("max_concurrent", "timeout_s", "retries"),
    ),
    "http": ("url", "model", "max_concurrent", "timeout_s", "retries"),
}
"""What each kind reads beside `kind`, `name`, `weight` and `max_tokens`."""
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
    path: str | None = None
    """`classifier`: directory of a Hugging Face sequence-classification model with one label and a tokenizer."""
    url: str | None = None
    """`judge`: base URL (`http://127.0.0.1:8000/v1`); `http`: the endpoint."""
    model: str | None = None
    """`judge`, `http`: name of the model there."""
    name: str = "reward_model"
    """The name of its reward in metrics and records."""
    weight: float = 1.0
    """The score counts this much."""
    key_env: str = ""
    """`judge`: environment variable with the API key."""
    prompt: str = "Rate how well the assistant solved the task. Answer with one number from {low} to {high}."
    """`judge`: what is asked, above the conversation."""
    low: float = 0.0
    """`judge`: the lowest score."""
    high: float = 1.0
    """`judge`: the highest score."""
    on_malformed: Literal["score", "infra"] = "score"
    """`judge`: an answer that states no score counts 0 (or `low` where that is less), or is played again. What the
    policy wrote can bring such an answer about, so `infra` lets a policy have its bad episodes drawn again."""
    max_tokens: Positive | None = None
    """Longest conversation in tokens (`classifier`) or, roughly, words; longer ones lose their middle."""
    device: Device = "auto"
    """`classifier`: `cpu`, `cuda`, `cuda:N` (a GPU of its own), or `auto`; for `workers` not `cuda:N`."""
    workers: Count = 0
    """`classifier`: Ray workers that hold the model, each with a whole one and a GPU of its own (or none, on
    CPUs); 0 scores in the process that trains. One that dies is started again, and is asked again."""
    batch_size: Positive = 16
    """`classifier`: conversations in one forward pass at most."""
    max_concurrent: Positive = 32
    """`judge`, `http`: questions asked at the same time."""
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """`judge`, `http`: limit of one attempt."""
    retries: Count = 3
    """`judge`, `http`: further attempts after a failed one."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for key in NEEDED[self.kind]:
            if getattr(self, key) is None:
                raise ValueError(f"reward_model.{key} is missing: kind {self.kind} needs it")
        read = {"kind", "name", "weight", "max_tokens", *KEYS[self.kind]}
        for key, field in type(self).model_fields.items():
            if key not in read and getattr(self, key) != field.default:
                kinds = " or ".join(kind for kind, keys in KEYS.items() if key in keys)
                raise ValueError(
                    f"reward_model.{key} has no effect unless reward_model.kind is {kinds}: remove it"
                )
        if self.workers and self.device.startswith("cuda:"):
            raise ValueError(
                f"reward_model.device {self.device!r}: Ray gives workers their GPUs; write cuda, or leave it out"
            )
        if self.low >= self.high:
            raise ValueError(f"reward_model.low = {self.low} must be below reward_model.high = {self.high}")
        return self
