"""Are the tasks sound? Duplicates, leaks into held-out tasks, answers in the prompt or in reach of a tool."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from agentrl.doctor.evidence import Call, Evidence, Played
from agentrl.doctor.finding import Finding
from agentrl.run_folder.task_digests import without_numbering

SECRETS = re.compile(
    r"answer|solution|expected|target|label|gold|truth|result|oracle|canonical|(^|[_ ])(sql|patch|gt)$",
    re.IGNORECASE,
)
"""Names of columns that hold what the policy should find."""
GOALS = re.compile(r"(^|[_ ])(target|label|result)s?$", re.IGNORECASE)
"""Those that may just as well be what the task gives: `make the balance 12`."""
LABELS = "answer|solution|expected|target|gold|truth"
"""What a tool calls the secret that it gives away; a result of its own is no secret."""
LONG = 200
"""Characters of a text that the policy is to read; whoever asks about one has the answer in it."""

_CODE = re.compile(r"[(){}\[\];=<>*+/]")
MIN_TEXT, MAX_TEXT = 16, 20_000
"""Characters of texts that nobody writes twice by chance."""
MOST_VALUES = 64
"""Values of a row that are looked for."""


def leaked(evidence: Evidence) -> Iterator[Finding]:
    """Held-out tasks that are trained on."""
    train, held = set(_digests(evidence, "train")), _digests(evidence, "held_out")
    both = [digest for digest in held if digest in train]
    if not _rows_decide(evidence):
        return
    if held and len(both) >= max(2, 0.02 * len(held)):
        yield Finding(
            "held-out-leak",
            "error",
            f"{len(both)} of {len(held)} held-out tasks are among the training tasks: held-out "
            "results say nothing",
            "data.held_out (rows that are not in data.train), or the env's tasks(split)",
            series=("held_out",),
            why="rows are compared, not ids",
        )


def damaged(evidence: Evidence) -> Iterator[Finding]:
    """Files of episodes that cannot be read to their end."""
    read = len(evidence.episodes)
    for step, reason in evidence.damaged.items():
        yield Finding(
            "episodes-damaged",
            "warning",
            f"the episodes of step {step} cannot be read to their end ({reason}); what is found here rests on the "
            f"{read} episodes that can",
            "this file: restore it from a copy if there is one; training does not need it",
            step=step,
            why="a run writes each of these files whole or not at all, so it was changed or cut later",
        )


def duplicates(evidence: Evidence) -> Iterator[Finding]:
    """The same task under several ids."""
    digests = _digests(evidence, "train")
    rows: dict[str, str] = {}
    for played in evidence.episodes:
        row = played.raw["task"].get("row") or {}
        if row:
            rows[str(played.raw["task"]["id"])] = json.dumps(row, sort_keys=True, default=str)
    known = digests or list(rows.values())
    extra = len(known) - len(set(known))
    if len(known) >= 16 and extra > 0.2 * len(known) and _rows_decide(evidence):
        most = Counter(known).most_common(1)[0][1]
        # An env that draws its tasks from a small world repeats them; that is like several epochs.
        few = len(set(known)) < 2 * evidence.number("rollout.groups_per_step", 1)
        uneven = most > 5 * len(known) / len(set(known))
        yield Finding(
            "duplicate-tasks",
            "warning" if few or uneven or evidence.setting("data.train") else "hint",
            f"{extra} of {len(known)} training tasks repeat another one (one is there {most} times)",
            "data.train: remove the duplicates, or make the env's tasks vary",
            why="rows are compared, not ids",
        )


def _digests(evidence: Evidence, split: str) -> list[str]:
    """The digests of a split's tasks, of their content if that decides what the policy sees."""
    content = evidence.tasks.get(f"{split}_content")
    return list(content if content and _contents_decide(evidence) else evidence.tasks.get(split, ()))


def _contents_decide(evidence: Evidence) -> bool:
    """Whether prompts follow from rows without the columns that number them, and differ where these differ."""
    prompts: dict[str, set[str]] = {}
    for played in evidence.episodes:
        content = without_numbering(played.raw["task"].get("row") or {})
        key = json.dumps(content, sort_keys=True, default=str)
        prompts.setdefault(f"{played.env} {key}", set()).add(f"{played.env} {played.prompt}")
    seen = {prompt for found in prompts.values() for prompt in found}
    return all(len(found) == 1 for found in prompts.values()) and 1 < len(seen) == len(prompts)


def _rows_decide(evidence: Evidence) -> bool:
    """Whether tasks with the same row are the same task: an env may draw the rest from the task's seed."""
    prompts: dict[str, set[str]] = {}
    for played in evidence.episodes:
        row = json.dumps(played.raw["task"].get("row") or {}, sort_keys=True, default=str)
        prompts.setdefault(f"{played.env} {row}", set()).add(played.prompt)
    return all(len(found) == 1 for found in prompts.values())


def same_prompt(evidence: Evidence) -> Iterator[Finding]:
    """Tasks that a policy cannot tell apart: equal prompts, and equal episodes with different rewards."""
    rows: dict[str, set[str]] = {}
    alike: dict[str, dict[str, set[float]]] = {}
    for played in evidence.scored:
        content = without_numbering(played.raw["task"].get("row") or {})
        if not content:
            return  # the seed makes the tasks, perhaps of chance alone
        row = json.dumps(content, sort_keys=True, default=str)
        rows.setdefault(played.opening, set()).add(row)
        alike.setdefault(played.transcript, {}).setdefault(row, set()).add(played.reward or 0.0)
    every = set().union(*rows.values())
    shared = {row for found in rows.values() if len(found) > 1 for row in found}
    if len(every) < 16 or len(shared) < 0.5 * len(every):
        return
    several = [by_row for by_row in alike.values() if len(by_row) > 1]
    told = sum(len(by_row) for by_row in several)
    # Rewards of one task that differ are chance; those of different tasks show what the policy is not told.
    mixed = [
        by_row
        for by_row in several
        if all(len(found) == 1 for found in by_row.values()) and len(set().union(*by_row.values())) > 1
    ]
    if told < 16 or sum(map(len, mixed)) < 0.5 * told:
        return
    first = max(evidence.scored, key=lambda played: len(rows[played.opening]))
    yield Finding(
        "same-prompt",
        "warning",
        f"{len(shared)} of {len(every)} tasks have the prompt of another one, and the same episode is paid in one "
        f"and not in the other: {first.text('user')[:80]!r}",
        "the env's setup (the prompt must contain what the row asks for), or data.train",
        step=first.step,
        episode=first.id,
        series=("reward",),
        why="the policy sees nothing that tells these tasks apart; a guessing game looks the same",
    )


def answer_in_sight(evidence: Evidence) -> Iterator[Finding]:
    """The prompt contains the answer, or a tool gives it away."""
    seen: dict[str, list[Played]] = {"prompt": [], "tool": []}
    tasks: dict[str, set[str]] = {"prompt": set(), "tool": set(), "all": set()}
    for played in evidence.scored:
        secrets, texts = _secrets(played), _texts(played)
        if not secrets and not texts:
            continue
        id = str(played.raw["task"]["id"])
        if secrets:
            tasks["all"].add(id)
        prompt = played.text("system", "user")
        if any(_tells(prompt, secret, played) for secret in secrets):
            tasks["prompt"].add(id)
            seen["prompt"].append(played)
        elif any(_given_away(call, secret) for call in _before_the_end(played) for secret in secrets) or _shown(
            played, texts
        ):
            tasks["all"].add(id)
            tasks["tool"].add(id)
            seen["tool"].append(played)
    if len(tasks["all"]) >= 8 and len(tasks["prompt"]) > 0.5 * len(tasks["all"]):
        found = seen["prompt"][0]
        text = f"the prompt contains the task's answer in {len(tasks['prompt'])} of {len(tasks['all'])} tasks"
        setting = "the env's setup or data: keep the answer's column out of the prompt"
        yield Finding("answer-in-prompt", "warning", text, setting, found.step, found.id)
    elif len(tasks["tool"]) >= 3:
        found = seen["tool"][0]
        text = f"a tool shows the answer of the task in {len(tasks['tool'])} of {len(tasks['all'])} tasks"
        setting = "the env: keep files and tables with answers out of reach of its tools"
        yield Finding("answer-in-reach", "warning", text, setting, found.step, found.id)
    else:
        yield from _answer_copied(evidence)


def _answer_copied(evidence: Evidence) -> Iterator[Finding]:
    """Short final answers of solved episodes that can be read off the prompt, for rows that do not hold them."""
    solved = [p for p in evidence.scored if p.raw.get("solved") and 2 <= len(p.answer) <= 40 and p.tools]
    copied = [p for p in solved if _contains(p.text("system", "user"), p.answer)]
    tasks = {str(p.raw["task"]["id"]) for p in solved}
    if len(tasks) >= 12 and len(copied) > 0.9 * len(solved) and len({p.answer for p in copied}) >= 8:
        text = f"the prompt contains the final answer in {len(copied)} of {len(solved)} solved episodes"
        setting = "the env's setup or data: keep the answer out of the prompt"
        why = "tasks that ask to choose from the prompt look the same"
        yield Finding("answer-in-prompt", "warning", text, setting, copied[0].step, copied[0].id, why=why)


@dataclass(frozen=True, slots=True)
class _Secret:
    """The value of a column whose name says that it is the answer.

    Attributes:
        goal: it may be what the task gives, by its name.
        given: other columns have it as well, in a long text or among choices.
    """

    text: str
    goal: bool
    given: bool


def _secrets(played: Played) -> list[_Secret]:
    row = played.raw["task"].get("row")
    values = list(_values(row))
    found = []
    for name, value in values:
        if SECRETS.search(name):
            text = f"{value:g}" if isinstance(value, float) else str(value).strip()
            if 2 <= len(text) <= 200:
                read = any(len(str(v)) > LONG and _contains(str(v), text) for other, v in values if other != name)
                found.append(_Secret(text, bool(GOALS.search(name)), read or text in _choices(row)))
    return found


def _choices(row: Any) -> set[str]:
    """The items of lists in a row that have several."""
    if isinstance(row, dict):
        return {item for value in row.values() for item in _choices(value)}
    if not isinstance(row, list):
        return set()
    return {str(item).strip() for item in row} if len(row) > 1 else _choices(row[0]) if row else set()


def _tells(prompt: str, secret: _Secret, played: Played) -> bool:
    """Whether the prompt gives the answer away: it is not there to be read or chosen, and not the goal."""
    if not _contains(prompt, secret.text):
        return False
    if secret.given:
        return re.search(_labeled(secret.text), prompt) is not None
    return not secret.goal or _contains(_plain("\n".join(map(_said, _own(played)))), secret.text)


def _own(played: Played) -> list[dict[str, Any]]:
    """The messages of the policy."""
    return [message for message in played.raw.get("messages", ()) if message.get("role") == "assistant"]


def _before_the_end(played: Played) -> list[Call]:
    """The calls whose results the policy could use: not those of the last turn."""
    return played.calls[: len(played.calls) - len((played.raw.get("turns") or [{}])[-1].get("calls", ()))]


def _values(row: Any, name: str = "") -> Iterator[tuple[str, str | int | float]]:
    """The texts and numbers of a row by the name of their column, those inside of objects by the inner name too.

    Of a list only a single item counts: several may be what there is to choose from.
    """
    if isinstance(row, dict):
        inside = [found for key, value in row.items() for found in _values(value, f"{name} {key}".strip())]
        yield from inside[:MOST_VALUES]
    elif isinstance(row, list) and len(row) == 1:
        yield from _values(row[0], name)
    elif isinstance(row, str | int | float) and not isinstance(row, bool):
        yield name, row


def _texts(played: Played) -> dict[str, bool]:
    """Long texts of the row that the prompt does not show, whatever their column is called.

    True for a program in a column for answers: a tool has no other reason to show it.
    """
    prompt = _plain(played.text("system", "user"))
    found = {}
    for name, value in _values(played.raw["task"].get("row")):
        text = _plain(value) if isinstance(value, str) and len(value) <= MAX_TEXT else ""
        if len(text) >= MIN_TEXT and " " in text and text not in prompt:
            found[text] = bool(SECRETS.search(name) and _CODE.search(text))
    return found


def _shown(played: Played, texts: dict[str, bool]) -> bool:
    """Whether a tool shows one of the texts, and the policy then gives it back, or could have no use for it else.

    A text that the policy wrote first is its own work.
    """
    known: set[str] = set()
    for message in played.raw.get("messages", ()) if texts else ():
        said = _plain(_said(message))
        for text, answers in texts.items():
            if text not in said:
                continue
            if message.get("role") == "assistant":
                if text in known:
                    return True
                texts = {other: sure for other, sure in texts.items() if other != text}
            elif message.get("role") == "tool":
                if answers:
                    return True
                known.add(text)
    return False


def _said(message: dict[str, Any]) -> str:
    """All text of a message, that of its calls' arguments included."""
    parts: list[Any] = [message.get("content"), *(c.get("arguments") for c in message.get("tool_calls") or ())]
    found = []
    while parts:
        part = parts.pop()
        if isinstance(part, str):
            found.append(part)
        elif isinstance(part, dict | list):
            parts += part.values() if isinstance(part, dict) else part
    return "\n".join(found)


def _plain(text: str) -> str:
    return " ".join(text.split())


def _given_away(call: Call, secret: _Secret) -> bool:
    """Whether a call names what it asks for, or its result names what it shows, and the secret is there."""
    if not _contains(call.result, secret.text) or _contains(call.arguments, secret.text):
        return False
    return _asks_for_secrets(call) or re.search(_labeled(secret.text), call.result) is not None


def _labeled(secret: str) -> str:
    return rf"(?i:{LABELS})[\"'\s]*[:=][\"'\s]*{re.escape(secret)}(?!\w)"


def _asks_for_secrets(call: Call) -> bool:
    """Whether a call looks something up under the name of a secret, by its tool, a path or a column.

    Sentences of a query do not, nor do names that a program gives to what it computes.
    """
    if SECRETS.search(call.tool):
        return True
    for _, value in _values(from_json(call.arguments)):
        text = str(value)
        code = text if re.search(r"[(){}=;/.|<>*_]|\bselect\b", text, re.IGNORECASE) or " " not in text else ""
        made = re.findall(r"(\w+)\s*=(?!=)|\bas\s+(\w+)|\bdef\s+(\w+)", code, re.IGNORECASE)
        own = {name for names in made for name in names if name}
        if any(SECRETS.search(word) for word in re.findall(r"\w+", code) if word not in own):
            return True
    return False


def _contains(text: str, part: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(part)}(?![\w]|\.\d)", text) is not None


CHECKS = (leaked, damaged, duplicates)
ENV_CHECKS = (same_prompt, answer_in_sight)
