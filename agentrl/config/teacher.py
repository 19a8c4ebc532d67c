"""The configuration of a teacher: a model whose distribution the policy learns."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from agentrl.config.address import address_problem, without_credentials
from agentrl.config.facts import Advanced, OnlyWith, OnResume, PathTo
from agentrl.config.section import Count, Positive, Section


class TeacherConfig(Section):
    """On-policy distillation: a model that takes the reference's place in the KL penalty. The policy learns to
    continue as this model would, after each token of the episodes that it samples itself.

    `algorithm.kl.coef` weighs the penalty against the rewards; `algorithm.advantage: none` leaves the rewards out.
    The teacher needs the tokenizer of the policy.
    """

    path: Annotated[str | None, PathTo("folder", hub=True), OnResume("fixed")] = None
    """Directory of a Hugging Face model that the learner evaluates, on its own ranks or on
    `learner.reference_ranks`."""
    url: Annotated[str | None, OnResume("free")] = None
    """Base URL of an OpenAI-compatible server that scores given tokens (`/completions` with `echo` and
    `logprobs`): vLLM, SGLang or `agentrl serve`. Needs `rollout.temperature: 1`, the temperature at which servers
    score."""
    model: Annotated[str | None, OnlyWith("url")] = None
    """Name of the model at that URL."""
    key_env: Annotated[str, OnlyWith("url"), OnResume("free"), Advanced()] = ""
    """Environment variable with the API key."""
    max_concurrent: Annotated[Positive, OnlyWith("url"), OnResume("free"), Advanced()] = 32
    """Maximum concurrent requests."""
    timeout_s: Annotated[float, Field(gt=0), OnlyWith("url"), OnResume("free"), Advanced()] = 300.0
    """Timeout of one request."""
    retry_s: Annotated[Count, OnlyWith("url"), OnResume("free"), Advanced()] = 600
    """How long a request that fails is sent again before the run stops."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (not self.path) == (not self.url):
            raise ValueError("teacher needs either path (a model directory) or url (a server), not both")
        if self.url is not None and not self.model:
            raise ValueError("teacher.model is missing: name the model that the server at teacher.url scores with")
        if self.url is not None and (problem := address_problem(self.url)):
            raise ValueError(
                f"teacher.url {self.address!r}: {problem}; give an address such as http://127.0.0.1:8000/v1"
            )
        return self

    @property
    def address(self) -> str:
        """`url` without credentials, for messages and files."""
        return without_credentials(self.url or "")
