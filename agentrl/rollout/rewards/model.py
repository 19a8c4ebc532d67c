"""Models that score whole episodes: a classifier in this process or on Ray workers, a judge, or a reward server.

Their vocabularies may differ from the policy's, so they get text: every message with its role, its calls and the
tools' answers. A classifier with exactly the policy's tokenizer gets the tokens of the episode.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from agentrl.config.reward_model import RewardModelConfig
from agentrl.env.env import Env
from agentrl.env.judge import Judge, RewardApi
from agentrl.env.judge_text import fenced
from agentrl.env.toolenv.asked import asking
from agentrl.env.toolenv.observe import cut_text
from agentrl.env.toolenv.rewards import LARGEST
from agentrl.errors import ConfigError, InfraError, JudgeAnswerError
from agentrl.models.folder import check_model_folder, refuse_adapter
from agentrl.rollout.rewards.classifier import Classifier
from agentrl.rollout.rewards.scorers import ScoringWorkers
from agentrl.rollout.rewards.text import conversation_text
from agentrl.types import Episode, StopReason


class Scorer(Protocol):
    """Scores one episode."""

    async def score(self, episode: Episode) -> float:
        """The score. Raises InfraError if none is available."""
        ...

    async def close(self) -> None:
        """Release all resources; idempotent."""
        ...


@dataclass
class RewardModel:
    """Adds the score of a model to the rewards of episodes, under its name.

    An episode whose reward is fixed (a fault of the env, a sandbox that the policy broke) is not scored.
    """

    scorer: Scorer
    name: str
    weight: float
    _lowest: float = 0.0

    async def judged(self, episode: Episode) -> Episode:
        """The episode with an additional reward; if it cannot be scored, an infrastructure failure.

        If the model rejects the conversation, returns no finite number, or its answer cannot be read, the episode
        gets the lowest reward so far, at most 0, and a fault.

        Raises:
            ConfigError: the env has a reward with the same name.
        """
        if episode.error is not None or episode.stop_reason in (StopReason.SANDBOX_BROKEN, StopReason.FAULT):
            return episode
        if self.name in episode.rewards:
            raise ConfigError(
                f"reward_model.name {self.name!r}: the env has a reward of this name; choose another"
            )
        part, fault = 0.0, ""
        with asking() as asked:
            try:
                score = await self.scorer.score(episode)
                part = self.weight * score
                if not abs(part) <= LARGEST:
                    raise JudgeAnswerError(f"the reward model's score is {score:g}, which is no usable reward")
            except InfraError as e:
                error = f"{type(e).__name__}: {e}"
                return replace(episode, error=error, reward=None, stop_reason=StopReason.INFRA)
            except JudgeAnswerError as e:
                part, fault = 0.0, str(e)
        fault = fault or " ".join(asked.unusable)
        self._lowest = min(self._lowest, part)
        if fault:
            part = self._lowest
        return replace(
            episode,
            rewards={**episode.rewards, self.name: part},
            reward=(episode.reward or 0.0) + part,
            faults={**episode.faults, **({self.name: fault} if fault else {})},
        )

    async def close(self) -> None:
        """Release the scorer's resources; idempotent."""
        await self.scorer.close()


def check_reward_model(config: RewardModelConfig | None, envs: Iterable[Env]) -> None:
    """Raises ConfigError for what can be seen before anything is loaded: the key, the folder and the name."""
    if config is None:
        return
    if config.kind == "judge":
        _JudgeScorer(config)
    if config.path is not None:
        refuse_adapter(Path(config.path), f"reward_model.path {config.path}")
        check_model_folder(config.path, f"reward_model.path {config.path}")
    for env in envs:
        if config.name in (env.declared_rewards() or {}):
            where = f"reward_model.name {config.name!r}"
            raise ConfigError(f"{where}: {type(env).__name__} has a reward of this name; choose another")


async def make_reward_model(
    config: RewardModelConfig | None, policy: Path, ray: str | None = None
) -> RewardModel | None:
    """The reward model of a run, or None; the caller closes it.

    Args:
        policy: model directory of the policy; its tokenizer is compared with the classifier's.
        ray: address of the Ray cluster for its workers; None starts one on this machine.

    Raises:
        ConfigError: the classifier cannot be loaded, the cluster has no room for its workers, or an API key is not
            set.
        WorkerLost: a worker did not start.
    """
    if config is None:
        return None
    scorer: Scorer
    if config.kind == "classifier" and config.workers:
        scorer = await ScoringWorkers.start(config, policy, ray)
    elif config.kind == "classifier":
        scorer = Classifier.load(config, policy)
    elif config.kind == "judge":
        scorer = _JudgeScorer(config)
    else:
        scorer = _ServerScorer(config)
    return RewardModel(scorer, config.name, config.weight)


class _JudgeScorer:
    def __init__(self, config: RewardModelConfig) -> None:
        self.config = config
        self.judge = Judge(
            config.url or "",
            config.model or "",
            key_env=config.key_env,
            timeout_s=config.timeout_s,
            retries=config.retries,
            max_concurrent=config.max_concurrent,
            on_malformed=config.on_malformed,
        )

    async def score(self, episode: Episode) -> float:
        c = self.config
        asked = c.prompt.replace("{low}", f"{c.low:g}").replace("{high}", f"{c.high:g}")
        question = f"{asked}\n\n{fenced(_cut(conversation_text(episode.messages), c.max_tokens))}"
        return await self.judge.score(question, low=c.low, high=c.high)

    async def close(self) -> None:
        """No-op."""


class _ServerScorer:
    def __init__(self, config: RewardModelConfig) -> None:
        self.max_tokens = config.max_tokens
        self.api = RewardApi(config.url or "", config.model or "model", config.timeout_s, config.retries)
        self._slots: asyncio.Semaphore | None = None
        self._num_slots = config.max_concurrent

    async def score(self, episode: Episode) -> float:
        if self._slots is None:
            self._slots = asyncio.Semaphore(self._num_slots)
        async with self._slots:
            (score,) = await self.api.score([_cut(conversation_text(episode.messages), self.max_tokens)])
        return score

    async def close(self) -> None:
        """No-op."""


def _cut(text: str, max_tokens: int | None) -> str:
    return text if max_tokens is None else cut_text(text, max_tokens, lambda t: len(t.split()))[0]
