"""The environment contract: Gymnasium's interface, with messages as observations and actions."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from agentrl.async_tasks import time_limit
from agentrl.env.solved import SolvedAt, SolvedRule, rule_of
from agentrl.errors import ConfigError
from agentrl.types import CallRecord, Episode, Message, StopReason, Task

CountTokens = Callable[[str], int]
Decode = Callable[[Sequence[int]], str]


def estimate_tokens(text: str) -> int:
    """Estimate the tokens of `text` without a tokenizer: one per three bytes, rounded up."""
    return -(-len(text.encode("utf-8", "replace")) // 3)


@dataclass(frozen=True, slots=True)
class DeclaredReward:
    """A reward that an env declares: what it scores, and its weight in this run."""

    per: Literal["turn", "episode", "group"]
    weight: float = 1.0


@dataclass(slots=True)
class StepInfo:
    """Additional results of `step`, apart from observation and reward."""

    calls: tuple[CallRecord, ...] = ()
    stop_reason: StopReason | None = None
    """Set if the step ended the episode."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Added to the episode's metrics: one entry per mistake (parse_error, invalid_args, ...)."""
    faults: Mapping[str, str] = field(default_factory=dict)
    """Rewards of the turn that raised and count as 0: the error message by reward name."""

    @property
    def rewards(self) -> dict[str, float]:
        """The rewards of the turn by name: those of `metrics` that are named `reward/NAME`."""
        start = "reward/"
        found = self.metrics.items()
        return {name.removeprefix(start): value for name, value in found if name.startswith(start)}


class PolicyModel(Protocol):
    """A separate conversation with the policy: a sub-agent, a user simulator, a judge."""

    async def chat(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), train: bool = False
    ) -> Message:
        """The policy's answer to `messages`, in a separate context; with `train`, its tokens are trained as
        well.

        Raises:
            ValueError: the conversation does not fit into the context.
        """


@dataclass(frozen=True, slots=True)
class PolicyAccess:
    """The access to the policy that an env gets for an episode.

    Attributes:
        model: separate conversations with the policy; None if a program plays the episode.
        count_tokens: counts the tokens of a text with the policy's tokenizer, or estimates them.
        decode: decodes sampled ids to text without special tokens; None if the policy has no token ids.
        reads_images: whether the policy sees images.
    """

    model: PolicyModel | None = None
    count_tokens: CountTokens = estimate_tokens
    decode: Decode | None = None
    reads_images: bool = True


def hint_arguments(env: Env, episode: Episode) -> dict[str, Any]:
    """The arguments of an env's `teacher_hint`: the episode, unless it takes none."""
    name = next(iter(inspect.signature(env.teacher_hint).parameters), None)
    return {} if name is None else {name: episode}


class Env(ABC):
    """An environment: an instance plays one episode at a time, may be reused after `reset`, and is always closed.

    A rollout calls `bind`, `reset`, `step` until the episode ends, `score`, and `close`; `score_group` runs on a
    separate instance after all episodes of a task have ended. Only `reset` and `step` are required.

    The policy's mistakes become observations. An `InfraError` means that the episode could not be played: it is
    excluded from training and replayed. Any other exception in `reset` has the same effect, because the policy has
    not acted yet. The policy may have caused an exception in `step`, `score` or `score_group`: in `step` it ends
    the episode with a reward of 0, and in the other two the reward counts as 0.
    """

    view: ClassVar[str | None] = None
    """A JavaScript file next to the class's file that shows an episode in `agentrl view` (docs/view.md)."""
    solved_at: SolvedAt = None
    """When an episode is solved: at this total reward, or when each part reaches its threshold. A run may set
    it."""
    model: PolicyModel | None = None
    """The policy in a separate conversation: `await self.model.chat(messages)`. Set by `bind`."""
    count_tokens: CountTokens = staticmethod(estimate_tokens)
    """Count the tokens of a text. Set by `bind`."""
    decode: Decode | None = None
    """Decode sampled ids to text without special tokens; None if the episode has no token ids. Set by `bind`."""
    reads_images: bool = True
    """Whether the policy sees images. Set by `bind`."""
    outcome: Any = None
    """The return value of the program under `agent:`, for rewards to read: the value of a JSON object or array,
    else text; None if no program plays."""
    gives_hints: bool = False
    """Whether `teacher_hint` is called after the episode; set for training episodes."""
    hold_back: bool = False
    """Whether `outside_tools` get a placeholder answer instead of being called; set by `agentrl check`."""

    # Playing.

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas of the tools in the OpenAI shape ({"type": "function", "function": {...}}).

        They may depend on the task: from `reset` until `close`, they are the tools of that task.
        """
        return ()

    def bind(self, policy: PolicyAccess) -> None:
        """Receive access to the policy for the next episode; called before `reset`.

        A wrapper passes it on to the wrapped env.
        """
        self.model, self.count_tokens, self.decode = policy.model, policy.count_tokens, policy.decode
        self.reads_images, self.outcome = policy.reads_images, None

    @abstractmethod
    async def reset(self, task: Task) -> tuple[Sequence[Message], Mapping[str, Any]]:
        """Start an episode. Returns the opening messages (system, user) and an info dict."""

    @abstractmethod
    async def step(self, message: Message) -> tuple[Sequence[Message], float, bool, bool, StepInfo]:
        """Apply an assistant message; return (observation, reward, terminated, truncated, info)."""

    async def close(self) -> None:
        """Release all resources; idempotent; called after every episode, however it ended."""
        return None

    # Scoring.

    async def score(self, episode: Episode) -> Mapping[str, float]:
        """Rewards of the finished episode by name, already weighted; their sum is added to the turns' rewards."""
        return {}

    async def score_group(self, episodes: Sequence[Episode]) -> Sequence[Mapping[str, float]]:
        """Rewards that compare the scored episodes of a task: for each episode, weighted values by name.

        Called on an instance that is never reset and is closed afterwards.
        """
        return [{} for _ in episodes]

    def teacher_hint(self, *args: Any, **kwargs: Any) -> Any:
        """What a teacher may know about the finished episode and the policy may not: the solution, or feedback on
        this attempt; may be async. Write `teacher_hint(self, episode)` or `teacher_hint(self)`. Returns text, or
        None for no hint.

        Called after `score` in training, with `teacher.hint` `env` or `both`; not in evaluations. The
        teacher reads the text at the end of the opening (docs/algorithms.md).
        """
        return None

    async def call_teacher_hint(self, episode: Episode, timeout_s: float) -> object:
        """The return value of `teacher_hint`.

        Raises:
            TimeoutError: it took too long.
        """
        if type(self).teacher_hint is Env.teacher_hint:
            return None
        async with time_limit(timeout_s):
            found = self.teacher_hint(**hint_arguments(self, episode))
            return await found if inspect.isawaitable(found) else found

    @property
    def scores_groups(self) -> bool:
        """Whether `score_group` returns any rewards; by default, whether the class overrides it."""
        return type(self).score_group is not Env.score_group

    def solved_rule(self) -> SolvedRule | None:
        """The rule that decides whether an episode is solved; None if nothing is declared."""
        return rule_of(self.solved_at, "solved_at")

    def solved_verdict(self, rewards: Mapping[str, float], total: float) -> bool | None:
        """Whether the episode that was just scored is solved; None if nothing is declared.

        Args:
            rewards: what `score` returned.
            total: their sum with the rewards of the turns.

        Raises:
            JudgeError: a reward that the rule needs is missing.
        """
        rule = self.solved_rule()
        return None if rule is None else rule.verdict(rewards, total)

    # Queries of a run and its checks before any episode.

    @classmethod
    def check_class(cls) -> None:
        """Raises ConfigError if a declaration of the class is invalid."""
        return None

    @classmethod
    def row_problem(cls, row: Mapping[str, Any]) -> str:
        """Why a data row does not fit this env; empty if it fits or if only `reset` can tell."""
        return ""

    def configure(
        self, settings: Mapping[str, Any], reward_weights: Mapping[str, float], solved_at: SolvedAt = None
    ) -> None:
        """Apply `env.settings`, `env.reward_weights` and `env.solved_at` of a run.

        Raises:
            ConfigError: the env has no such setting or reward (by default, it has no settings at all), or
                `solved_at` is not a threshold.
        """
        for key, given in (("env.settings", settings), ("env.reward_weights", reward_weights)):
            if given:
                raise ConfigError(f"{key} has no effect: {type(self).__name__} is not a ToolEnv; remove it")
        if solved_at is not None:
            rule_of(solved_at, "env.solved_at")
            self.solved_at = solved_at

    def declared_rewards(self) -> Mapping[str, DeclaredReward] | None:
        """The declared rewards by name; None if the env does not declare its rewards."""
        return None

    def endpoints(self) -> Sequence[str]:
        """URLs without which episodes fail; a run is refused before its first episode if one is down."""
        return ()

    def own_code(self) -> Sequence[object]:
        """Functions and classes, apart from the env's class, that a resumed run compares with its checkpoint."""
        return ()

    def rewards_of_record(self) -> Sequence[str]:
        """Names of the rewards per episode that read the recorded episode alone, not the env's state."""
        return ()

    def outside_tools(self) -> Sequence[str]:
        """Names of tools that act outside of the episode (MCP, HTTP); `agentrl check` does not call them."""
        return ()

    def image_tools(self) -> Sequence[str]:
        """Names of tools whose return type includes `Image`, which a text-only model cannot read."""
        return ()
