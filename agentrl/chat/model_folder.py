"""Read the chat template and stop tokens of a Hugging Face model directory."""

from __future__ import annotations

import re
from pathlib import Path

from agentrl.chat.vocabulary import Vocabulary, read_json
from agentrl.errors import ConfigError

CHATML_TEMPLATE = (Path(__file__).parent / "chatml.jinja").read_text(encoding="utf-8")
"""The built-in template: ChatML with Hermes-style tool calls; it is append-only."""


def template_source(folder: Path, template: str | None) -> str:
    """Return Jinja source: the directory's template, or the one `template` names (see `Renderer.from_directory`).

    Of a directory with a template named `tool_use` it is one source that chooses for each conversation, as
    transformers does.

    Raises:
        ConfigError: the template is missing or cannot be read.
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
    named = _named_templates(folder)
    if not named.keys() & {"default", "tool_use"}:
        has = f"; there are only the templates {', '.join(sorted(named))}" if named else ""
        raise ConfigError(
            f"{folder}: no chat template there (chat_template.jinja, or chat_template in tokenizer_config.json)"
            f"{has}; choose one, for example 'chatml'"
        )
    default, with_tools = named.get("default"), named.get("tool_use")
    if with_tools is None or with_tools == default:
        return str(default)
    parts = (_ONE_OF_TWO, "{% if tools %}", _inside(with_tools) + "{%+ else %}", _inside(default or _NO_DEFAULT))
    return "\n".join(parts) + "{%+ endif %}"


def is_one_of_two(source: str) -> bool:
    """Whether `template_source` joined two templates, of which the tools of a conversation choose one."""
    return source.startswith(_ONE_OF_TWO)


_ONE_OF_TWO = "{# tool_use where tools are offered, else default #}"
_NO_DEFAULT = "{{ raise_exception('the model has a chat template for conversations with tools only (tool_use)') }}"


def _inside(source: str) -> str:
    """The source for a place between tags: Jinja drops the line break that ends a template."""
    return re.sub(r"\r?\n\Z", "", source)


def _named_templates(folder: Path) -> dict[str, str]:
    """The directory's templates by name; a single one is the default. Files replace those of the JSON, as for
    transformers, but for a default that only the JSON has."""
    found = read_json(folder / "tokenizer_config.json").get("chat_template")
    found = found or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(found, str):
        found = {"default": found}
    elif isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}
    files = {file.stem: file for file in (folder / "additional_chat_templates").glob("*.jinja")}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    named: dict[str, str] = found if isinstance(found, dict) else {}
    if files:
        named = {name: named[name] for name in named.keys() & {"default"}}
    return named | {name: file.read_text(encoding="utf-8") for name, file in files.items()}


def eos_ids(folder: Path, vocabulary: Vocabulary) -> set[int]:
    """Return the ids that generation_config.json, config.json and the tokenizer define as ends of a completion."""
    ids: set[int | None] = set()
    for file in ("generation_config.json", "config.json"):
        found = read_json(folder / file).get("eos_token_id")
        ids |= set(found if isinstance(found, list) else [found])
    ids.add(vocabulary.control.get(vocabulary.special_tokens.get("eos_token", "")))
    return {id for id in ids if isinstance(id, int)}


def num_embeddings(folder: Path) -> int | None:
    """Return the vocabulary size by config.json; None if there is no such file, or it does not say."""
    config = read_json(folder / "config.json")
    text = config.get("text_config")
    found = (text if isinstance(text, dict) else config).get("vocab_size")
    return found if isinstance(found, int) else None
