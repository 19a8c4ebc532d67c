"""The messages on docs/troubleshooting.md are messages of agentrl."""

from __future__ import annotations

import re

from tests.docs.blocks import ROOT


def messages() -> list[str]:
    """The message column of the tables."""
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `([^`]+)` (?:\(\w+\) )?\|", page, re.MULTILINE)


def test_every_message_is_in_the_source():
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "agentrl").rglob("*.py"))
    source = re.sub(r"\"\s*\n\s*f?\"", "", text).replace("`", "")
    assert len(messages()) > 20
    parts = [(message, part.strip()) for message in messages() for part in message.split("...")]
    assert [message for message, part in parts if part and part not in source] == []
