"""A sequence-classification reward model in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from agentrl.chat.transcript import rows_of
from agentrl.config.reward_model import RewardModelConfig
from agentrl.errors import ConfigError, JudgeAnswerError, JudgeError
from agentrl.rollout.rewards.text import conversation_text, plain_roles
from agentrl.types import Episode, Message


@dataclass
class Classifier:
    """A sequence-classification model with one label; waiting episodes are scored in one batch."""

    model: Any
    encode: Callable[[Episode], list[int]]
    max_tokens: int
    batch_size: int
    pad_id: int
    _waiting: list[tuple[list[int], asyncio.Future[float]]] = field(default_factory=list)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    def load(cls, config: RewardModelConfig, policy: Path) -> Classifier:
        """Load from a model directory.

        Raises:
            ConfigError: the model is missing, it has several labels, or its head has no weights.
        """
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        from agentrl.models.device import pick_device
        from agentrl.models.folder import refuse_adapter
        from agentrl.models.loading import LOADING
        from agentrl.models.model_config import NO_WEIGHTS, any_config, one_line

        directory = Path(config.path or "")
        refuse_adapter(directory, f"reward_model.path {directory}")
        shape = any_config(directory, f"reward_model.path {directory}")
        try:
            with LOADING:
                loaded: Any = AutoModelForSequenceClassification.from_pretrained(
                    directory,
                    config=shape,
                    dtype=torch.float32,
                    local_files_only=True,
                    trust_remote_code=False,
                    output_loading_info=True,
                )
            tokenizer: Any = AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
        except NO_WEIGHTS as e:
            raise ConfigError(f"reward_model.path {directory} cannot be loaded: {one_line(e)}") from e
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
        """The model's score of an episode."""
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
        """No-op: the model runs in this process."""

    async def _score_some(self) -> None:
        """Run one forward pass over the longest-waiting episodes, including the leading one."""
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
    """The classifier's token ids of an episode."""
    ours, theirs = policy / "tokenizer.json", directory / "tokenizer.json"
    if ours.is_file() and theirs.is_file() and ours.read_bytes() == theirs.read_bytes():
        return lambda episode: max((list(row.ids) for row in rows_of(episode.segments)), key=len, default=[])
    if tokenizer.chat_template is None:
        return lambda episode: list(tokenizer(conversation_text(episode.messages))["input_ids"])

    system = _takes_system(tokenizer, directory)

    def by_template(episode: Episode) -> list[int]:
        try:
            text = tokenizer.apply_chat_template(plain_roles(episode.messages, system=system), tokenize=False)
        except TemplateError as e:
            raise JudgeAnswerError(f"the reward model's chat template refuses the conversation: {e}") from e
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    return by_template


def _takes_system(tokenizer: Any, directory: Path) -> bool:
    """Whether the chat template has system messages. Raises ConfigError if it writes no conversation at all."""
    messages = [Message(role, "text") for role in ("system", "user", "assistant")]
    for system in (True, False):
        try:
            tokenizer.apply_chat_template(plain_roles(messages, system=system), tokenize=False)
        except TemplateError as e:
            problem = e
        else:
            return system
    raise ConfigError(f"reward_model.path {directory}: its chat template writes no conversation: {problem}")
