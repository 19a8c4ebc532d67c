"""Models that score whole episodes: a classifier in this process or on Ray workers, a judge, or a reward server.

They have vocabularies of their own, so what they are given is text: every message with its role, its calls and
what the tools answered. A classifier with the very tokenizer of the policy is given the tokens of the episode.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from agentrl.chat.transcript import rows_of
from agentrl.config.reward_model import RewardModelConfig
from agentrl.env.judge import Judge, RewardApi
from agentrl.env.judge_text import fenced, neutral
from agentrl.env.toolenv.asked import asking
from agentrl.env.toolenv.observe import cut_text, plain_text
from agentrl.errors import ConfigError, InfraError, JudgeAnswerError, JudgeError
from agentrl.rollout.rewards.scorers import ScoringWorkers
from agentrl.types import Episode, Message, StopReason


class Scorer(Protocol):
    """Scores one episode."""

    async def score(self, episode: Episode) -> float:
        """The score. Raises InfraError where there is none to be had."""
        ...

    async def close(self) -> None:
        """Free what it holds; idempotent."""
        ...


@dataclass
class RewardModel:
    """Adds the score of a model to the rewards of episodes, under its name."""

    scorer: Scorer
    name: str
    weight: float
    _lowest: float = 0.0

    async def judged(self, episode: Episode) -> Episode:
        """The episode with one more reward; one that nobody can score becomes an infrastructure failure.

        A conversation that the model itself cannot score (it refuses it, or gives no finite number) gets the
        lowest score so far, 0 at most, and a fault.

        Raises:
            ConfigError: the env has a reward of the same name.
        """
        if episode.error is not None or episode.stop_reason is StopReason.SANDBOX_BROKEN:
            return episode
        if self.name in episode.rewards:
            raise ConfigError(
                f"reward_model.name {self.name!r}: the env has a reward of this name; choose another"
            )
        fault = ""
        with asking() as asked:
            try:
                score = await self.scorer.score(episode)
                if not math.isfinite(score):
                    raise JudgeAnswerError(f"the reward model's score is {score}")
            except InfraError as e:
                error = f"{type(e).__name__}: {e}"
                return replace(episode, error=error, reward=None, stop_reason=StopReason.INFRA)
            except JudgeAnswerError as e:
                score, fault = self._lowest, str(e)
        self._lowest = min(self._lowest, score)
        fault = fault or " ".join(asked.unusable)
        part = self.weight * score
        return replace(
            episode,
            rewards={**episode.rewards, self.name: part},
            reward=(episode.reward or 0.0) + part,
            faults={
                **episode.faults,
                **({self.name: fault} if fault else {}),
            },
        )

    async def close(self) -> None:
        """Free what its scorer holds; idempotent."""
        await self.scorer.close()


async def make_reward_model(
    config: RewardModelConfig | None, policy: Path, ray: str | None = None
) -> RewardModel | None:
    """The reward model of a run, None where it has none; it is closed by the caller.

    Args:
        policy: directory of the policy, whose tokenizer is compared with the classifier's.
        ray: address of the cluster that its workers live in; None starts one on this machine.

    Raises:
        ConfigError: the classifier cannot be loaded, its workers have no room, or a key is not in the environment.
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
        """Nothing is held."""


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
        """Nothing is held."""


@dataclass
class Classifier:
    """A sequence-classification model with one label; episodes that wait are scored together."""

    model: Any
    encode: Callable[[Episode], list[int]]
    max_tokens: int
    batch_size: int
    pad_id: int
    _waiting: list[tuple[list[int], asyncio.Future[float]]] = field(default_factory=list)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    def load(cls, config: RewardModelConfig, policy: Path) -> Classifier:
        """From a model directory.

        Raises:
            ConfigError: there is no such model, it has several labels, or its head has no weights.
        """
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        from agentrl.models.device import pick_device
        from agentrl.models.probe import refuse_adapter

        directory = Path(config.path or "")
        refuse_adapter(directory, f"reward_model.path {directory}")
        try:
            loaded: Any = AutoModelForSequenceClassification.from_pretrained(
                directory,
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
            tokenizer: Any = AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError) as e:
            raise ConfigError(
                f"reward_model.path {directory} cannot be loaded: {' '.join(str(e).split())[:300]}"
            ) from e
        model, report = loaded
        if model.config.num_labels != 1 or report["missing_keys"]:
            what = f"{model.config.num_labels} labels" if model.config.num_labels != 1 else "no trained head"
            raise ConfigError(f"reward_model.path {directory}: has {what}; it must give one number a conversation")
        pad_id = model.config.pad_token_id if model.config.pad_token_id is not None else tokenizer.pad_token_id
        if pad_id is None:
            raise ConfigError(f"reward_model.path {directory}: neither model nor tokenizer has a padding token")
        model.config.pad_token_id = pad_id
        limit = int(getattr(model.config, "max_position_embeddings", 1 << 20))
        return cls(
            model=model.to(pick_device(config.device)).eval(),
            encode=_encoder(tokenizer, directory, policy),
            max_tokens=min(config.max_tokens or limit, limit),
            batch_size=config.batch_size,
            pad_id=pad_id,
        )

    async def score(self, episode: Episode) -> float:
        """The model's number for an episode."""
        ids = await asyncio.to_thread(self.encode, episode)
        if len(ids) > self.max_tokens:
            half = self.max_tokens // 2
            ids = ids[:half] + ids[len(ids) - (self.max_tokens - half) :]
        mine: tuple[list[int], asyncio.Future[float]] = (ids, asyncio.get_running_loop().create_future())
        self._waiting.append(mine)
        try:
            async with self._turn:
                if not mine[1].done():
                    await self._score_some()
        finally:
            if mine in self._waiting:
                self._waiting.remove(mine)
        return mine[1].result()

    async def close(self) -> None:
        """Nothing to end: it lives in this process."""

    async def _score_some(self) -> None:
        """One forward pass over those that have waited longest, the one that leads among them."""
        while self._waiting:
            some = self._waiting[: self.batch_size]
            try:
                scores = await asyncio.to_thread(self._forward, [ids for ids, _ in some])
            except RuntimeError as e:  # out of memory, a lost device
                raise JudgeError(f"the reward model failed: {str(e)[:300]}") from e
            for (_, future), score in zip(some, scores, strict=True):
                if not future.done():
                    future.set_result(score)
            self._waiting = [waiting for waiting in self._waiting if not waiting[1].done()]

    def _forward(self, batch: Sequence[list[int]]) -> list[float]:
        import torch

        width, device = max(map(len, batch)), self.model.device
        rows = torch.tensor([ids + [self.pad_id] * (width - len(ids)) for ids in batch], device=device)
        real = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in batch], device=device)
        with torch.inference_mode():
            scores = self.model(input_ids=rows, attention_mask=real).logits[:, 0].float()
        found: list[float] = scores.tolist()
        return found


def _encoder(tokenizer: Any, directory: Path, policy: Path) -> Callable[[Episode], list[int]]:
    """The classifier's ids of an episode."""
    ours, theirs = policy / "tokenizer.json", directory / "tokenizer.json"
    if ours.is_file() and theirs.is_file() and ours.read_bytes() == theirs.read_bytes():
        return lambda episode: max((list(row.ids) for row in rows_of(episode.segments)), key=len, default=[])
    if tokenizer.chat_template is None:
        return lambda episode: list(tokenizer(conversation_text(episode.messages))["input_ids"])

    def by_template(episode: Episode) -> list[int]:
        text = tokenizer.apply_chat_template(plain_roles(episode.messages), tokenize=False)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    return by_template


def conversation_text(messages: Sequence[Message]) -> str:
    """A conversation as text: each message under its role, calls as JSON."""
    return "\n\n".join(
        f"{m.role}{f' {m.name}' if m.role == 'tool' and m.name else ''}:\n{_body(m)}" for m in messages
    )


def plain_roles(messages: Sequence[Message]) -> list[dict[str, str]]:
    """A conversation in the roles that every chat template knows: what tools answered is said by the user."""
    out: list[dict[str, str]] = []
    for message in messages:
        role = "user" if message.role == "tool" else message.role
        body = f"Tool result: {_body(message)}" if message.role == "tool" else _body(message)
        if out and out[-1]["role"] == role:
            out[-1]["content"] += f"\n{body}"
        else:
            out.append({"role": role, "content": body})
    return out


def _body(message: Message) -> str:
    calls = [json.dumps({"name": c.name, "arguments": dict(c.arguments)}, default=str) for c in message.tool_calls]
    said = "\n".join(part for part in (plain_text(message.content), *(f"call: {call}" for call in calls)) if part)
    return neutral(said)


def _cut(text: str, max_tokens: int | None) -> str:
    return text if max_tokens is None else cut_text(text, max_tokens, lambda t: len(t.split()))[0]
