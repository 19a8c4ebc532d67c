"""The contract of an environment: Gymnasium's shape, with messages as observation and action."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from agentrl.env.solved import SolvedAt, SolvedRule, rule_of
from agentrl.errors import ConfigError
from agentrl.types import CallRecord, Episode, Message, StopReason, Task

CountTokens = Callable[[str], int]
Decode = Callable[[Sequence[int]], str]


def estimate_tokens(text: str) -> int:
    """Tokens of `text` where no tokenizer is at hand: one for every three bytes, rounded up."""
    return -(-len(text.encode("utf-8", "replace")) // 3)


@dataclass(frozen=True, slots=True)
class DeclaredReward:
    """A reward that an env declares: what it scores, and its weight in this run."""

    per: Literal["turn", "episode", "group"]
    weight: float = 1.0


@dataclass(slots=True)
class StepInfo:
    """What `step` returns besides observation and reward."""

    calls: tuple[CallRecord, ...] = ()
    stop_reason: StopReason | None = None
    """Set when the step ended the episode."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Added to the episode's metrics: one entry per mistake (parse_error, invalid_args, ...)."""
    faults: Mapping[str, str] = field(default_factory=dict)
    """Rewards of the turn that raised and count 0: what happened, by name."""


class PolicyModel(Protocol):
    """A separate conversation with the policy: a sub-agent, a user simulator, a judge."""

    async def chat(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), train: bool = False
    ) -> Message:
        """The policy's answer to `messages`, in a context of only those; with `train` its tokens train too."""


@dataclass(frozen=True, slots=True)
class PolicyAccess:
    """What an env gets of the policy that plays an episode.

    Attributes:
        model: conversations with the policy; None where it cannot be asked (a program plays).
        count_tokens: counts the tokens of a text with the policy's tokenizer, or estimates them.
        decode: text of sampled ids without special tokens; None where the policy has no tokens.
        reads_images: whether the policy sees images.
    """

    model: PolicyModel | None = None
    count_tokens: CountTokens = estimate_tokens
    decode: Decode | None = None
    reads_images: bool = True


class Env(ABC):
    """One instance plays one episode at a time, may be reused after `reset`, and is always closed.

    A rollout calls `bind`, `reset`, `step` until the episode ends, `score`, and `close`; `score_group` runs on a
    separate instance once all episodes of a task have ended. Only `reset` and `step` must be written.

    Mistakes of the policy are observations. `InfraError` means that the episode could not be played: it is
    excluded from training and played again. So does any other exception of `reset`, because the policy has not
    acted yet. An exception of `step` ends the episode, which then earns nothing, and one of `score` or
    `score_group` counts 0: the policy may have caused it.
    """

    solved_at: SolvedAt = None
    """When an episode is solved: at this total reward, or where each part reaches its number. A run may set it."""
    model: PolicyModel | None = None
    """The policy in a separate conversation: `await self.model.chat(messages)`. Set by `bind`."""
    count_tokens: CountTokens = staticmethod(estimate_tokens)
    """Counts the tokens of a text. Set by `bind`."""
    decode: Decode | None = None
    """Text of sampled ids without special tokens; None where an episode has no tokens. Set by `bind`."""
    reads_images: bool = True
    """Whether the policy sees images. Set by `bind`."""
    outcome: str | None = None
    """What the program under `agent:` returned, for rewards to read; None where no program plays."""
    hold_back: bool = False
    """Whether `outside_tools` answer without being called; set by `agentrl check`."""

    # Playing an episode.

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas of the tools in the OpenAI shape ({"type": "function", "function": {...}}); constant."""
        return ()

    def bind(self, policy: PolicyAccess) -> None:
        """Receive the policy of the next episode; called before `reset`.

        An env that wraps another one passes it on.
        """
        self.model, self.count_tokens, self.decode = policy.model, policy.count_tokens, policy.decode
        self.reads_images, self.outcome = policy.reads_images, None

    @abstractmethod
    async def reset(self, task: Task) -> tuple[Sequence[Message], Mapping[str, Any]]:
        """Begin an episode. Returns the opening messages (system, user) and an info dict."""

    @abstractmethod
    async def step(self, message: Message) -> tuple[Sequence[Message], float, bool, bool, StepInfo]:
        """Take an assistant message; return (observation, reward, terminated, truncated, info)."""

    async def close(self) -> None:
        """Free everything; idempotent; runs after every episode, however it ended."""
        return None

    # Scoring it.

    async def score(self, episode: Episode) -> Mapping[str, float]:
        """Rewards of the finished episode by name, already weighted; their sum joins the turns' rewards."""
        return {}

    async def score_group(self, episodes: Sequence[Episode]) -> Sequence[Mapping[str, float]]:
        """Rewards that compare the scored episodes of one task: for each of them, weighted values by name.

        Runs on an instance that is never reset, and that is closed afterwards.
        """
        return [{} for _ in episodes]

    @property
    def scores_groups(self) -> bool:
        """Whether `score_group` gives any reward; by default, whether a class overrides it."""
        return type(self).score_group is not Env.score_group

    def solved_rule(self) -> SolvedRule | None:
        """What decides whether an episode is solved; None where nothing is declared."""
        return rule_of(self.solved_at, "solved_at")

    def solved_verdict(self, rewards: Mapping[str, float], total: float) -> bool | None:
        """Whether the episode that was just scored is solved; None where nothing is declared.

        Args:
            rewards: what `score` returned.
            total: their sum with the rewards of the turns.

        Raises:
            JudgeError: a reward that must decide is missing.
        """
        rule = self.solved_rule()
        return None if rule is None else rule.verdict(rewards, total)

    # What a run and its checks ask before anything is played.

    @classmethod
    def check_class(cls) -> None:
        """Raises ConfigError where the class declares something that cannot be used."""
        return None

    @classmethod
    def row_problem(cls, row: Mapping[str, Any]) -> str:
        """Why a data row does not fit this env; empty where it does, or where only `reset` can tell."""
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
        """The declared rewards by name; None where the env does not declare its rewards."""
        return None

    def outside_tools(self) -> Sequence[str]:
        """Tools that act outside of the episode (MCP, HTTP), which `agentrl check` does not call."""
        return ()

    def image_tools(self) -> Sequence[str]:
        """Tools whose return type has an `Image`, which a text model cannot read."""
        return ()
