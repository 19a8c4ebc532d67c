"""What a Hugging Face model directory says about its chat template and stop tokens."""

from __future__ import annotations

from pathlib import Path

from agentrl.chat.vocabulary import Vocabulary, read_json
from agentrl.errors import ConfigError

CHATML_TEMPLATE = (Path(__file__).parent / "chatml.jinja").read_text(encoding="utf-8")
"""The project's own template: ChatML with Hermes-style tool calls; it only appends."""


def template_source(folder: Path, template: str | None) -> str:
    """Jinja source: the directory's own, or what `template` names (see `Renderer.from_directory`).

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    if template == "chatml":
        return CHATML_TEMPLATE
    if template is not None:
        if "{%" in template or "{{" in template:
            return template
        try:
            return Path(template).read_text(encoding="utf-8")
        except OSError as e:
            raise ConfigError(
                f"chat template {template!r}: not 'chatml', and no file that can be read: {e}"
            ) from e
    for file in (folder / "additional_chat_templates" / "tool_use.jinja", folder / "chat_template.jinja"):
        if file.is_file():
            return file.read_text(encoding="utf-8")
    found = read_json(folder / "tokenizer_config.json").get("chat_template")
    found = found or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        named = {entry["name"]: entry["template"] for entry in found}
        found = named.get("tool_use", named.get("default"))
    if not isinstance(found, str):
        raise ConfigError(
            f"{folder}: no chat template there (chat_template.jinja, or chat_template in tokenizer_config.json); "
            "choose one, for example 'chatml'"
        )
    return found


def eos_ids(folder: Path, vocabulary: Vocabulary) -> set[int]:
    """Ids that generation_config.json, config.json and the tokenizer name as the end of a completion."""
    ids: set[int | None] = set()
    for file in ("generation_config.json", "config.json"):
        found = read_json(folder / file).get("eos_token_id")
        ids |= set(found if isinstance(found, list) else [found])
    ids.add(vocabulary.control.get(vocabulary.special_tokens.get("eos_token", "")))
    return {id for id in ids if isinstance(id, int)}
