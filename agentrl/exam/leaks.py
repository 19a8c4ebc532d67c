"""Leak scan: is the answer in the prompt, in a tool's schema, or in reach of a tool that no solution needs?"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from agentrl.env.env import Env
from agentrl.env.play import Policy, ScriptedPolicy, call, say
from agentrl.env.toolenv.observe import plain_text
from agentrl.exam.arena import Arena, ExamEpisode, MakePolicy, parameters_of
from agentrl.exam.marks import ExamResult, Level
from agentrl.exam.strategies import arguments_with, is_text
from agentrl.exam.texts import SNOOPED_FILES, SNOOPED_NAMES, SNOOPING_PYTHON, SNOOPING_SHELL
from agentrl.types import Message, Task, ToolSchema

_ANSWER_KEYS = re.compile(
    r"^(the_|correct_|right_|final_|expected_|gold_|true_|reference_)?(answers?|solutions?|expected|gold|truth|ground_?truth|"
    r"labels?|secret|reference|correct|password|expected_output|result)$",
    re.I,
)
_LABEL = re.compile(
    r"(answer|solution|hint|expected|correct|gold|truth|secret|reference|label|result|debug)\w*"
    r"\W{0,4}(?:(?:is|was|equals|for \w+|=|value|the)\W{1,3}){0,2}\W{0,3}$",
    re.I,
)
_FILE_NAME = re.compile(r"[\w-][\w.-]*\.(?!\d+\b)\w{1,5}\b")
_THOUSANDS = re.compile(r"-?[1-9](\d{3,14}|\d{0,2}(,\d{3}){1,4})", re.ASCII)
NUM_SNOOPED = 6
BRIEF = 120
"""Characters of a result that shows little else than the answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a task, as its row or its oracle has it, and what the policy sees before its first action."""

    task: Task
    texts: tuple[str, ...]
    prompt: str
    schemas: str


def answers_of(oracle: Sequence[ExamEpisode], others: Sequence[ExamEpisode]) -> list[Answer]:
    """The answers of tasks: the oracle's last text or call, and columns of the row with telling names."""
    found: dict[str, Answer] = {}
    for played in [*oracle, *others]:
        if played.episode is None or played.task.id in found:
            continue
        first = next((i for i, m in enumerate(played.episode.messages) if m.role == "assistant"), None)
        opening = played.episode.messages[:first]
        last = list(_last_answers(played)) if played in oracle else []
        used = _used_before(played) - set(last) if last else set()
        texts = [*(text for text in row_answers(played.task.row) if text not in used), *last]
        prompt = "\n".join(plain_text(m.content) for m in opening)
        schemas = json.dumps(list(played.episode.tools), ensure_ascii=False, default=str)
        chosen = tuple(dict.fromkeys(t for t in map(_core, texts) if t))
        found[played.task.id] = Answer(played.task, chosen, prompt, schemas)
    return _varied([answer for answer in found.values() if answer.texts])


def row_answers(row: Mapping[str, object]) -> Iterator[str]:
    """The columns of a row whose names suggest that they hold the answer."""
    for key, value in row.items():
        if is_answer_column(key) and isinstance(value, str | int | float) and not isinstance(value, bool):
            yield str(value)


def is_answer_column(name: str) -> bool:
    """Whether the name of a column suggests that it holds the answer."""
    return bool(_ANSWER_KEYS.match(name))


def _used_before(played: ExamEpisode) -> set[str]:
    """Arguments of the oracle's calls before its last one: given to the policy to be used, not to be found."""
    assert played.episode is not None
    made = [c for turn in played.episode.turns for c in turn.message.tool_calls]
    return {str(value) for one in made[:-1] for value in one.arguments.values()}


def _last_answers(played: ExamEpisode) -> Iterator[str]:
    assert played.episode is not None
    if not played.episode.turns:
        return
    last = played.episode.turns[-1].message
    if not last.tool_calls:
        yield plain_text(last.content)
    for made in last.tool_calls[-1:]:
        for value in made.arguments.values():
            if isinstance(value, str | int | float) and not isinstance(value, bool):
                yield str(value)


def _core(text: str) -> str:
    """The answer without common wrappings."""
    for pattern in (r"<answer>(.*?)</answer>", r"\\boxed\{(.*?)\}", r"(?i)^the answer is (.*?)\.?$"):
        if match := re.search(pattern, text, re.S):
            text = match.group(1)
    return text.strip()


def _varied(answers: list[Answer]) -> list[Answer]:
    """The answers without texts that all tasks share: a closing phrase, or a fixed final call."""
    if len(answers) < 2:
        return answers
    common = set.intersection(*[set(answer.texts) for answer in answers])
    kept = [(a, tuple(t for t in a.texts if t not in common)) for a in answers]
    return [Answer(a.task, texts, a.prompt, a.schemas) for a, texts in kept if texts]


def places(text: str, answer: str) -> list[re.Match[str]]:
    """Where an answer occurs in a text as a whole word; a whole number with separators of thousands or without."""
    edge_l = r"(?<![\w.])" if answer[:1].isalnum() else ""
    edge_r = r"(?![\w])(?!\.\d)" if answer[-1:].isalnum() else ""
    found = re.escape(answer)
    if number := _THOUSANDS.fullmatch(answer):
        plain = number[0].replace(",", "")
        found = rf"(?:{plain}|(?<!\d,){int(plain):,}(?!,\d))"
    return list(re.finditer(edge_l + found + edge_r, text))


def examine_prompt(result: ExamResult, answers: Sequence[Answer]) -> None:
    """Look for the answer in the opening messages and the tool schemas."""
    labelled = [(a, t, c) for a in answers for t in a.texts if (c := _labelled(a.prompt, t, answers))]
    if labelled:
        _, text, context = labelled[0]
        said = (
            f"the prompt of {len({a.task.id for a, _, _ in labelled})} of {len(answers)} tasks contains the answer"
        )
        result.add("leak", Level.ERROR, f"{said}, e.g. {text[:40]!r} after {context!r}",
                   list(dict.fromkeys(a.task.id for a, _, _ in labelled)))  # fmt: skip
        return
    if len(answers) < 4:
        return
    if same := _same_place(answers):
        aside = bool(re.search(r"[\[({<?#]\W*$", same))
        text = f"the prompt of all {len(answers)} tasks contains the answer at the same place, after {same!r}"
        text += "" if aside else "; fine only if the task is to copy or extract it"
        result.add("leak", Level.ERROR if aside else Level.WARNING, text)
    long = [a for a in answers if any(len(t) >= 3 and places(a.schemas, t) for t in a.texts)]
    differ = len({a.texts for a in answers}) > 1 and len({a.schemas for a in answers}) > 1
    if differ and len(long) >= 0.9 * len(answers):
        choices = all(_is_choice(a) for a in long)
        if not choices:
            result.add("leak", Level.ERROR, "the schemas of the tools contain the answer of their task")
    elif table := _table(answers):
        text = f"the schemas of the tools contain the answers of {len(table)} of {len(answers)} tasks"
        result.add("leak", Level.ERROR, text, [answer.task.id for answer in table])


def _table(answers: Sequence[Answer]) -> list[Answer]:
    """The tasks whose answer stands in the schemas, which all tasks share, if those of half of the tasks do."""
    found = [
        a
        for a in answers
        if any(len(t) >= 2 and places(a.schemas, t) and not places(a.prompt, t) for t in a.texts)
        and not _is_choice(a)
    ]
    distinct = {a.texts for a in found}
    return found if len(distinct) >= NUM_SNOOPED and 2 * len(found) >= len(answers) else []


def _is_choice(answer: Answer) -> bool:
    """Whether the answer is one of several values of an `enum` in the schemas."""
    lists = [found.group(1) for found in re.finditer(r'"enum": (\[.*?\])', answer.schemas)]
    return any("," in listed and any(places(listed, text) for text in answer.texts) for listed in lists)


def _labelled(prompt: str, text: str, answers: Sequence[Answer]) -> str:
    """The text that announces the answer in the prompt, unless prompts with other answers have it too."""
    for found in places(prompt, text):
        before = prompt[max(0, found.start() - 40) : found.start()].rpartition("\n")[2]
        match = _LABEL.search(before)
        if match is None:
            continue
        snippet = before[match.start() :] + found.group()
        elsewhere = [a for a in answers if a.prompt != prompt and text not in a.texts and snippet in a.prompt]
        if not elsewhere and not _listed(prompt, found.end()):
            return snippet
    return ""


def _listed(prompt: str, end: int) -> bool:
    """Whether other candidates follow: `answer: A, B or C`."""
    return bool(re.match(r"\s*(,|/|\bor\b|\|)", prompt[end:]))


def _same_place(answers: Sequence[Answer]) -> str:
    """The words right before the answer, if they are the same in every prompt."""
    if len({a.texts for a in answers}) < max(2, len(answers) // 2):
        return ""  # few different answers: options of a choice are in every prompt
    common: set[str] | None = None
    for answer in answers:
        contexts = {
            answer.prompt[max(0, at - length) : at]
            for text in answer.texts
            for at in (found.start() for found in places(answer.prompt, text))
            for length in (3, 12)
            if at >= length and answer.prompt.count(answer.prompt[max(0, at - length) : at]) == 1
        }
        common = contexts if common is None else common & contexts
        if not common:
            return ""
    return max(common or {""}, key=len)


# Tools.


def snooping(name: str, given: Sequence[Mapping[str, object]]) -> MakePolicy:
    """Calls one tool with each of the arguments in turn."""

    def make(env: Env, task: Task) -> Policy:
        left = list(given)

        def policy(messages: Sequence[Message]) -> Message:
            return call(name, **left.pop(0)) if left else say("")

        return policy

    return make


def snoop_arguments(tool: ToolSchema) -> list[Mapping[str, object]]:
    """Arguments that ask a tool for an answer without knowing anything of the task."""
    text_names = [name for name, part in parameters_of(tool).items() if is_text(part)]
    if not text_names:
        return [arguments_with(tool, "")]
    about = " ".join([tool["function"]["name"], *text_names]).lower()
    texts: tuple[str, ...] = SNOOPED_NAMES
    if re.search(r"path|file|open|read|view|dir|folder|name", about):
        texts += SNOOPED_FILES
    if re.search(r"command|cmd|shell|bash|exec|run", about):
        texts += SNOOPING_SHELL
    if re.search(r"code|python|script|program", about):
        texts += (SNOOPING_PYTHON,)
    return [arguments_with(tool, text) for text in texts]


def exploring(tools: Sequence[ToolSchema], needed: set[str]) -> MakePolicy:
    """Calls each tool that takes no text, then asks those that no solution needs for the file names that came
    back."""
    lists = [tool for tool in tools if not any(is_text(part) for part in parameters_of(tool).values())]
    reads = [tool for tool in tools if tool not in lists and tool["function"]["name"] not in needed]

    def make(env: Env, task: Task) -> Policy:
        first = [(tool, "") for tool in lists]
        asked: list[tuple[ToolSchema, str]] = []
        listed = False

        def policy(messages: Sequence[Message]) -> Message:
            nonlocal listed
            if first:
                tool, text = first.pop(0)
                return call(tool["function"]["name"], **arguments_with(tool, text))
            if not listed:
                listed = True
                said = "\n".join(plain_text(m.content) for m in messages if m.role == "tool")
                names = list(dict.fromkeys(_FILE_NAME.findall(said)))[:NUM_SNOOPED]
                asked.extend((tool, name) for name in names for tool in reads)
            if not asked:
                return say("")
            tool, text = asked.pop(0)
            return call(tool["function"]["name"], **arguments_with(tool, text))

        return policy

    return make


async def examine_files(
    result: ExamResult, arena: Arena, answers: Sequence[Answer], tools: Sequence[ToolSchema], needed: set[str]
) -> None:
    """Read the files that a tool lists: does one that no solution needs hold the answers?"""
    some = list(answers[:NUM_SNOOPED])
    plan = [("reading the files that a tool lists", a.task, exploring(tools, needed)) for a in some]
    played = await arena.all_of(plan, max_turns=len(tools) * (NUM_SNOOPED + 1) + 1)
    holds: dict[tuple[str, str], list[str]] = {}
    shown: dict[str, list[str]] = {}
    for answer, episode in zip(some, played, strict=True):
        for turn in episode.episode.turns if episode.episode is not None else ():
            for made in turn.message.tool_calls:
                said = "\n".join(plain_text(message.content) for message in turn.observation)
                named = next(
                    (v for v in made.arguments.values() if isinstance(v, str) and _FILE_NAME.match(v)), ""
                )
                brief = not named and made.name not in needed and len(said) <= BRIEF and bool(needed)
                if brief and any(
                    len(t) > 1 and places(said, t) and not places(answer.prompt, t) for t in answer.texts
                ):
                    shown.setdefault(made.name, []).append(answer.task.id)
                if named and made.name not in needed and any(len(t) > 1 and places(said, t) for t in answer.texts):
                    holds.setdefault((made.name, named), []).append(answer.task.id)
    for name, tasks in shown.items():
        if len(tasks) >= max(2, 0.8 * len(some)) and len({a.texts for a in some}) > 1:
            text = f"{name}, which no solution needs, shows the answer of {len(tasks)} of {len(some)} tasks"
            text += " after other calls" if len(tools) > 1 else ""
            result.add("leak", Level.ERROR, text, tasks)
    for (name, file), tasks in holds.items():
        if len(tasks) >= max(2, 0.8 * len(some)):
            level = Level.ERROR if _asks_for_answer(file) else Level.WARNING
            text = f"{name} reads {file!r}, which a tool lists and no solution needs; it holds the answers"
            result.add("leak", level, f"{text} of {len(tasks)} of {len(some)} tasks", tasks)


def _wrong(message: Message) -> Message | None:
    """A wrong answer in the place of the oracle's last message; None if there is nothing to change."""
    if not message.tool_calls:
        return say("qzxv" if not re.fullmatch(r"-?\d+", plain_text(message.content).strip()) else "-987654")
    last = message.tool_calls[-1]
    changed = {
        name: "qzxv" if isinstance(value, str) else -987654 if type(value) in (int, float) else value
        for name, value in last.arguments.items()
    }
    return call(last.name, **changed) if changed != dict(last.arguments) else None


async def examine_replies(
    result: ExamResult, arena: Arena, answers: Sequence[Answer], oracle: Sequence[ExamEpisode]
) -> None:
    """Answer wrongly once: does the reply tell the right answer, which is then still paid?"""
    solved = {p.task.id: p for p in oracle if p.episode is not None and p.episode.turns and p.reward > 0}
    tried, told = 0, list[tuple[Answer, str]]()
    for answer in [a for a in answers if a.task.id in solved][:NUM_SNOOPED]:
        own = solved[answer.task.id].episode
        assert own is not None
        right = own.turns[-1].message
        if (wrong := _wrong(right)) is None:
            continue
        tried += 1
        script = [wrong, right]
        make: MakePolicy = lambda env, task, script=script: ScriptedPolicy(script)  # type: ignore[misc]  # noqa: E731
        played = await arena.one("a wrong answer, then the right one", answer.task, make)
        if played.episode is None or len(played.episode.turns) < 2:
            continue
        if played.episode.solved != own.solved or played.reward < 0.9 * solved[answer.task.id].reward:
            continue
        said = "\n".join(plain_text(m.content) for m in played.episode.turns[0].observation)
        if any(len(t) > 1 and places(said, t) and not places(answer.prompt, t) for t in answer.texts):
            told.append((answer, said))
    if told and len(told) >= 0.6 * tried:
        text = (
            f"a wrong answer is answered with the right one, and the episode goes on, on {len(told)} of {tried} "
            f"tasks: {told[0][1][:80]!r}"
        )
        result.add("leak", Level.ERROR, text, [answer.task.id for answer, _ in told])


async def examine_tools(
    result: ExamResult,
    arena: Arena,
    answers: Sequence[Answer],
    oracle: Sequence[ExamEpisode],
    tools: Sequence[ToolSchema],
) -> None:
    """Ask each tool for the answer, and check whether it reveals it."""
    needed = {
        made.name
        for p in oracle
        if p.episode is not None
        for turn in p.episode.turns
        for made in turn.message.tool_calls
    }
    await examine_files(result, arena, answers, tools[:12], needed)
    some = list(answers[:NUM_SNOOPED])
    for tool in tools[:12]:
        name = tool["function"]["name"]
        given = snoop_arguments(tool)
        plan = [(f"asking {name} for the answer", a.task, snooping(name, given)) for a in some]
        played = await arena.all_of(plan, max_turns=len(given) + 1)
        hits = [(a, how) for a, p in zip(some, played, strict=True) if (how := _given_away(a, p))]
        if len(hits) < max(1, 0.6 * len(some)):
            continue
        how = hits[0][1]
        blind = not any(is_text(part) for part in parameters_of(tool).values())
        if name in needed and (blind or not _asks_for_answer(how)):
            continue
        sure = bool(needed - {name}) or _asks_for_answer(how) or _asks_for_answer(name)
        level = Level.ERROR if sure else Level.WARNING
        tasks = [a.task.id for a, _ in hits]
        result.add(
            "leak", level, f"a tool gives the answer away on {len(hits)} of {len(some)} tasks: {how}", tasks
        )


def _asks_for_answer(text: str) -> bool:
    return bool(
        re.search(r"answer|solution|expected|gold|secret|reference|reveal|peek|cheat|hint|truth|label", text, re.I)
    )


def _given_away(answer: Answer, played: ExamEpisode) -> str:
    """The call whose result is the answer; empty if there is none."""
    if played.episode is None:
        return ""
    for turn in played.episode.turns:
        for message in turn.observation:
            said = plain_text(message.content)
            for text in answer.texts:
                if _reveals(said, text):
                    made = turn.message.tool_calls[0] if turn.message.tool_calls else None
                    return (
                        f"{made.name}({json.dumps(dict(made.arguments))[:120]}) returns {said[:60]!r}"
                        if made
                        else ""
                    )
    return ""


def _reveals(said: str, text: str) -> bool:
    """Whether a result is the answer, or names it as such."""
    if said.strip().strip("\"'") == text:
        return True
    found = places(said, text)
    if not found:
        return False
    return any(_LABEL.search(said[max(0, at.start() - 40) : at.start()]) for at in found) or (
        len(text) >= 12 and len(said) < 4000
    )
