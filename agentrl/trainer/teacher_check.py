"""Check before the first step that a teacher reads the policy's tokens as the policy does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.config.run import RunConfig
from agentrl.config.teacher import TeacherConfig
from agentrl.errors import ConfigError
from agentrl.learner.teacher_server import TeacherServer
from agentrl.models.folder import check_model_folder, refuse_adapter
from agentrl.trainer.room import longest_episode

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NUM_COMPARED = 256
"""Ids, spread over the vocabulary, whose texts on a server are compared with the policy's."""
AT_ONCE = 64
"""How many of them are in one request, so that it fits into a short context."""
OTHERS = 0.1
"""Share of other texts from which the tokenizer is another; servers write some tokens in other ways."""
TOKENIZER = "tokenizer.json"


def check_teacher_folder(config: RunConfig, policy: Path) -> list[str]:
    """Compare the tokenizer of `teacher.path` with that of the policy's folder; nothing without such a teacher.

    Returns:
        Notes: tokens that the teacher does not know.

    Raises:
        ConfigError: the folder holds no model, ids mean other tokens there, or an episode does not fit.
    """
    teacher = config.teacher
    if teacher is None or teacher.path is None:
        return []
    directory, where = Path(teacher.path), f"teacher.path {teacher.path}"
    check_model_folder(directory, where)
    refuse_adapter(directory, where)
    known, own = _ids(directory, where), _ids(policy, f"the policy's folder {policy}")
    texts = {id: token for token, id in known.items()}
    other = sorted(id for token, id in own.items() if texts.get(id, token) != token or known.get(token, id) != id)
    if other:
        mine = {id: token for token, id in own.items()}
        raise ConfigError(
            f"{where}: another tokenizer: {len(other)} of {len(own)} tokens differ (id {other[0]} is "
            f"{mine[other[0]]!r} for the policy and {texts.get(other[0])!r} for the teacher): distillation needs "
            "a teacher with the policy's tokenizer"
        )
    (rows, context), (sampled, _) = model_sizes(directory), model_sizes(policy)
    sampled = max(max(own.values()) + 1, sampled or 0)  # also ids that no token has, as from padded embeddings
    if rows is not None and sampled > rows:
        raise ConfigError(
            f"{where}: has {rows} embeddings, and the policy samples ids up to {sampled - 1}: enlarge those of "
            f"the teacher (resize_token_embeddings({sampled}) in transformers)"
        )
    longest = _longest_episode(config, policy)
    if context is not None and context < longest:
        raise ConfigError(
            f"{where}: its context is {context} tokens, and an episode may have {longest}: set "
            f"rollout.token_budget to at most {context}"
        )
    new = sorted(token for token, id in own.items() if id not in texts)
    shown = ", ".join(map(repr, new[:4])) + (", ..." if len(new) > 4 else "")
    return [f"{where}: was not trained with {len(new)} of the policy's tokens ({shown})"] if new else []


async def check_teacher(config: RunConfig, policy: Path) -> list[str]:
    """Both checks, of `check_teacher_folder` and `check_teacher_server`; returns notes."""
    notes = check_teacher_folder(config, policy)
    await check_teacher_server(config, policy)
    return notes


async def check_teacher_server(config: RunConfig, policy: Path) -> None:
    """See whether the servers of teachers score the policy's tokens; nothing without such a teacher.

    Raises:
        ConfigError: it scores no given tokens, reads ids as other tokens, or an episode does not fit.
        EngineError: it does not answer.
    """
    for env, teacher in config.teachers_on_servers.items():
        server = TeacherServer(teacher)
        try:
            await asyncio.to_thread(check_texts, server, policy)
        finally:
            server.close()  # ends the thread, too, if this is cancelled
        longest, episode = await longest_on_server(teacher), _longest_episode(config.by_env[env], policy)
        if longest is not None and longest < episode:
            where = f"envs.{env}." if env else ""
            raise ConfigError(
                f"{server.where}: scores at most {longest} tokens, less than its context, and an episode may have "
                f"{episode}: set {where}rollout.token_budget to at most {longest}"
            )


async def longest_on_server(teacher: TeacherConfig) -> int | None:
    """The most tokens that the server of a teacher scores at once; None if it does not say."""
    server = TeacherServer(teacher)
    try:
        return await asyncio.to_thread(server.longest)
    finally:
        server.close()


def check_texts(server: TeacherServer, policy: Path) -> None:
    """Compare the texts of some ids on the server with those of the policy; see `check_teacher_server`."""
    tokenizer = _tokenizer(policy, f"the policy's folder {policy}")
    every = sorted(tokenizer.get_vocab().values())
    ids: Sequence[int] = every[:: -(-len(every) // NUM_COMPARED)]
    texts = [text for n in range(0, len(ids), AT_ONCE) for text in server.scored(ids[n : n + AT_ONCE])[1]]
    own = [tokenizer.decode([id], skip_special_tokens=False) for id in ids]
    both = [(mine, text.replace("Ġ", " ").replace("▁", " ")) for mine, text in zip(own, texts, strict=False)]
    whole = [(mine, text) for mine, text in both if mine.isascii() and text.isascii()]
    other = [(mine, text) for mine, text in whole if mine.strip() != text.strip()]
    if len(other) > OTHERS * len(whole):
        mine, text = other[0]
        raise ConfigError(
            f"{server.where}: another tokenizer: what is {mine!r} for the policy is {text!r} there: distillation "
            "needs a teacher with the policy's tokenizer"
        )


def _tokenizer(directory: Path, where: str) -> Tokenizer:
    from tokenizers import Tokenizer

    file = directory / TOKENIZER
    if not file.is_file():
        raise ConfigError(f"{where}: has no {TOKENIZER} to compare: copy it from the model's repository")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as e:  # tokenizers raises plain Exception
        raise ConfigError(f"{file}: {str(e)[:300]}") from e


def _ids(directory: Path, where: str) -> dict[str, int]:
    return _tokenizer(directory, where).get_vocab(with_added_tokens=True)


def _longest_episode(config: RunConfig, policy: Path) -> int:
    """Maximum number of tokens of an episode that also fits into the policy's context."""
    budget, (_, reach) = longest_episode(config), model_sizes(policy)
    return min(budget, reach or budget)


def model_sizes(directory: Path) -> tuple[int | None, int | None]:
    """The number of embeddings and the longest context, where config.json says them."""
    try:
        found = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(f"{directory / 'config.json'}: {e}") from e
    text = found.get("text_config") if isinstance(found.get("text_config"), dict) else found
    sizes = (text.get("vocab_size"), text.get("max_position_embeddings"))
    rows, context = (size if isinstance(size, int) else None for size in sizes)
    return rows, context
