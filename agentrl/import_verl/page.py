"""The table of verl's keys as a page."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from agentrl.import_verl.keys import ROWS, How, Row

HEAD = """\
# Every key of verl, and what it is here

*Written by `scripts/verl-keys` from `agentrl/import_verl/keys.py`; change the rows, not this page.*

`agentrl import-verl FILE --out tools.yaml` translates a YAML file or a launch script (`run_*.sh`, which is
read, never run) by this table, and prints a line for every key that it finds. Where verl's default differs from
agentrl's, the result says verl's value: no KL penalty, both clip limits 0.2, `betas` 0.9 and 0.999, weight
decay 0.01, no warm-up, shuffled rows, bfloat16, recomputed activations. Values that agentrl would refuse are
left out with a note, so that the result loads; paths are taken as they are, relative to the new file.

- **taken**: written to the key of ours.
- **same**: nothing to write, it is always so here. Where verl's value is given, that holds for this value only;
  another one is noted as *by hand*.
- **no effect**: verl itself does not read the key.
- **by hand**: something to decide. Not noted at verl's own value.
- **refused**: not supported, and why. Not noted at verl's own value.
"""


def page() -> str:
    """The whole page, in Markdown."""
    return HEAD + "".join(_sections())


def _sections() -> Iterator[str]:
    rows = sorted(ROWS, key=_place)
    for section, group in groupby(rows, key=lambda row: _section(row.key)):
        yield f"\n## `{section}`\n\n| key | verl | | here |\n|---|---|---|---|\n"
        for row in group:
            yield f"| `{row.key.removeprefix(f'{section}.')}` | {_value(row)} | {row.how} | {_text(row)} |\n"


_ORDER: tuple[How, ...] = ("taken", "same", "no effect", "by hand", "refused")


def _section(key: str) -> str:
    parts = key.split(".")
    return ".".join(parts[:2]) if parts[0] == "actor_rollout_ref" and len(parts) > 2 else parts[0]


def _place(row: Row) -> tuple[int, int]:
    sections = list(dict.fromkeys(_section(each.key) for each in ROWS))
    return sections.index(_section(row.key)), _ORDER.index(row.how)


def _value(row: Row) -> str:
    value = row.default[0] if isinstance(row.default, tuple) else row.default
    return "" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _text(row: Row) -> str:
    text = row.text.replace("|", "\\|")
    return text if row.how != "taken" else f"`{text}`" if " " not in text else text
