"""The configuration of a teacher: a model whose distribution the policy learns."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from agentrl.config.address import address_problem, without_credentials
from agentrl.config.facts import Advanced, OnlyWhen, OnlyWith, OnResume, PathTo
from agentrl.config.section import Count, Positive, Section


class TeacherConfig(Section):
    """On-policy distillation: a model that takes the reference's place in the KL penalty. The policy learns to
    continue as this model would, after each token of the episodes that it samples itself.

    `algorithm.kl.coef` weighs the penalty against the rewards; `algorithm.advantage: none` leaves the rewards out.
    The teacher needs the tokenizer of the policy. With a `hint`, it knows more than the policy, and may be the
    policy itself (self-distillation).
    """

    _place: str = PrivateAttr(default="teacher")

    path: Annotated[str | None, PathTo("folder", hub=True), OnResume("fixed")] = None
    """Directory of a Hugging Face model that the learner evaluates, on its own ranks or on
    `learner.reference_ranks`."""
    url: Annotated[str | None, OnResume("free")] = None
    """Base URL of an OpenAI-compatible server that scores given tokens (`/completions` with `echo` and
    `logprobs`): vLLM, SGLang or `agentrl serve`. Needs `rollout.temperature: 1`, the temperature at which servers
    score."""
    policy: Annotated[Literal["initial", "current", "average"] | None, OnResume("fixed"), Advanced()] = None
    """The policy itself, which the `hint` makes a teacher: as it was when RL training began, as it is in each
    update, or the moving average of its weights."""
    rate: Annotated[float, Field(gt=0, le=1), OnlyWhen("policy", "average"), OnResume("fixed"), Advanced()] = 0.05
    """How far the average moves toward the policy in each step, as a share of the distance."""
    hint: Annotated[Literal["none", "env", "solved", "both"], OnResume("fixed"), Advanced()] = "none"
    """What the teacher reads at the end of the opening, and the policy does not: what the env's method
    `teacher_hint` returns after the episode, another attempt that solved the task, or both. An episode without a
    hint learns nothing from the teacher."""
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
        given = [key for key in ("path", "url", "policy") if getattr(self, key)]
        if len(given) != 1:
            raise ValueError(
                "teacher needs one of path (a model directory), url (a server) or policy (the policy itself), "
                "got " + (" and ".join(given) or "none of them")
            )
        if self.policy is not None and self.hint == "none":
            raise ValueError(
                f"teacher.policy {self.policy} knows nothing that the policy does not: set teacher.hint (env, "
                "solved or both), or name another model under teacher.path or teacher.url"
            )
        if self.url is not None and not self.model:
            raise ValueError("teacher.model is missing: name the model that the server at teacher.url scores with")
        if self.url is not None:
            _check_address(self.url, "teacher.url")
        return self

    @property
    def place(self) -> str:
        """The key of the section: `teacher`, or `envs.NAME.teacher`."""
        return self._place

    @property
    def asks_env(self) -> bool:
        """Whether the env gives hints."""
        return self.hint in ("env", "both")

    @property
    def shows_solved(self) -> bool:
        """Whether other attempts at the task are hints."""
        return self.hint in ("solved", "both")

    @property
    def address(self) -> str:
        """`url` without credentials, for messages and files."""
        return without_credentials(self.url or "")


class TeacherOfEnv(Section):
    """The teacher of one env, on a server, instead of the run's `teacher`. It has the policy's tokenizer."""

    url: Annotated[str, OnResume("free")]
    """Base URL of an OpenAI-compatible server, as for `teacher.url`."""
    model: Annotated[str, OnResume("fixed")]
    """Name of the model at that URL."""
    key_env: Annotated[str, OnResume("free")] = ""
    """Environment variable with the API key."""
    max_concurrent: Annotated[Positive, OnResume("free")] = 32
    """Maximum concurrent requests."""
    timeout_s: Annotated[float, Field(gt=0), OnResume("free")] = 300.0
    """Timeout of one request."""
    retry_s: Annotated[Count, OnResume("free")] = 600
    """How long a request that fails is sent again before the run stops."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _check_address(self.url, "url")
        if not self.model:
            raise ValueError("model is empty: name the model that the server scores with")
        return self

    def at(self, place: str) -> TeacherConfig:
        """The same as the teacher of a run.

        Args:
            place: where it is written, `envs.NAME.teacher`.
        """
        found = TeacherConfig.model_validate(dict(self))
        found._place = place
        return found


def _check_address(url: str, key: str) -> None:
    """Raises ValueError if the URL does not name a server."""
    if problem := address_problem(url):
        raise ValueError(
            f"{key} {without_credentials(url)!r}: {problem}; give an address such as http://127.0.0.1:8000/v1"
        )
