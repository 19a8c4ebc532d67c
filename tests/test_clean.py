"""Text from outside: what is unsafe becomes visible, what a reader sees stays as it is."""

from __future__ import annotations

import pytest

from agentrl.clean import clean_text, visible

UNSAFE = {
    "\x00": r"\u0000",
    "a\x1b[31mb": r"a\u001b[31mb",
    "\x9b2J": r"\u009b2J",
    "\x85": r"\u0085",
    "\x7f": r"\u007f",
    "file\u202egpj.exe": r"file\u202egpj.exe",
    "\u2066x\u2069": r"\u2066x\u2069",
    "\u200e\u200f\u061c": r"\u200e\u200f\u061c",
    "pass\u200bword": r"pass\u200bword",
    "pass\u200dword": r"pass\u200dword",
    "pass\u2060word\ufeff": r"pass\u2060word\ufeff",
    "so\xadft": r"so\u00adft",
    "\ud800": r"\ud800",
    "a\udfffb": r"a\udfffb",
    "\U000e0041\U000e0042": r"\U000e0041\U000e0042",
    "a\ufe0f": r"a\ufe0f",
    "a\u034f\u115f\u3164\uffa0": r"a\u034f\u115f\u3164\uffa0",
    "\U0001d173\U0001bca0\U000e0fff": r"\U0001d173\U0001bca0\U000e0fff",
    "a\u180b": r"a\u180b",
    "\U0001f600\U000e0101\U000e0102": "\U0001f600" + r"\U000e0101\U000e0102",
}
SAFE = [
    *("plain", "two\nlines\r\n\tand a tab", "naïve café", "日本語", "Привет", "שלום", "مرحبا"),
    *("👨\u200d👩\u200d👧", "❤\ufe0f", "👩\u200d❤\ufe0f\u200d👨", "🏳\ufe0f\u200d🌈", "1\ufe0f\u20e3", "👍🏽"),
    *("می\u200cخواهم", "क\u094d\u200dष", "葛\U000e0100", "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e007f"),
    *("\\u202e", "x\u0301", "\u182d\u180b", "\u2028", "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋"),
]


@pytest.mark.parametrize("text", UNSAFE)
def test_what_is_unsafe_is_shown(text: str):
    assert clean_text(text) == UNSAFE[text]
    assert clean_text(clean_text(text)) == clean_text(text)
    clean_text(text).encode()


@pytest.mark.parametrize("text", SAFE)
def test_what_a_reader_sees_stays(text: str):
    assert clean_text(text) == text


def test_a_terminal_obeys_only_line_ends_and_tabs():
    assert visible("a\r\x1b[2Jb\n\t\x9b\u202e\ud800") == "a␍␛[2Jb\n\t\ufffd\\u202e\\ud800"
