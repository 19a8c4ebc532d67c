"""The run-time check: compare a transcript with a fresh rendering of its messages, by token ids.

Equal ids cost one linear comparison. Otherwise, the tokens that the template wrote are located in the fresh
rendering, in order, and each window between them is classified.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from agentrl.chat.ids import num_shared
from agentrl.chat.template import same_meaning
from agentrl.chat.transcript import Transcript
from agentrl.errors import TemplateError
from agentrl.types import Completion, Message

if TYPE_CHECKING:
    from agentrl.chat.template import Renderer

Mode = Literal["strict", "ignore_strippable", "disable"]
MODES: tuple[Mode, ...] = ("strict", "ignore_strippable", "disable")


class TokenDrift(StrEnum):
    """The kind of difference between a transcript and a fresh rendering, the most serious last."""

    IDENTICAL = "identical"
    """No difference."""
    RETOKENISED = "retokenised"
    """The same text with different ids, in sampled tokens: expected, and the reason for keeping ids."""
    RESERIALISED = "reserialised"
    """The same message as different text, in sampled tokens: JSON spacing, a malformed call kept as text, a turn
    without the stop text that cut it."""
    BOUNDARY = "boundary_whitespace"
    """White space between turns, outside what was sampled."""
    HISTORY_REWRITE = "history_rewrite"
    """The template writes an earlier turn differently than when that turn was the newest."""
    CONTENT = "content"
    """Anything else: the transcript and the messages disagree."""


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """One differing window: `message` is an index in the branch, `at` the transcript's first differing token."""

    drift: TokenDrift
    message: int | None
    at: int
    ledger: str
    fresh: str

    def __str__(self) -> str:
        where = "between turns" if self.message is None else f"message {self.message}"
        return f"{self.drift} at token {self.at} ({where}): {self.ledger[:60]!r} became {self.fresh[:60]!r}"


@dataclass(frozen=True, slots=True)
class TokenReport:
    """The result of a check. `failed` says whether the mode excludes this transcript from training."""

    mode: Mode
    differences: tuple[TokenDifference, ...] = ()
    tolerates_rewrites: bool = False

    @property
    def counts(self) -> Mapping[TokenDrift, int]:
        """Number of windows per class; {IDENTICAL: 1} if there are none."""
        return Counter(d.drift for d in self.differences) or Counter({TokenDrift.IDENTICAL: 1})

    @property
    def worst(self) -> TokenDrift:
        """The most serious class found."""
        order = list(TokenDrift)
        return max((d.drift for d in self.differences), key=order.index, default=TokenDrift.IDENTICAL)

    @property
    def failed(self) -> bool:
        """strict: anything that sampling does not explain. ignore_strippable: the same, except white space between
        turns.

        A rewritten history that the user chose to keep (`history: keep`) fails in strict mode only.
        """
        bad = {TokenDrift.CONTENT}
        if self.mode == "strict":
            bad |= {TokenDrift.BOUNDARY, TokenDrift.HISTORY_REWRITE}
        elif self.mode == "ignore_strippable" and not self.tolerates_rewrites:
            bad |= {TokenDrift.HISTORY_REWRITE}
        return self.mode != "disable" and any(d.drift in bad for d in self.differences)


@dataclass(slots=True)
class TokenCheckBudget:
    """Count reports over a run and stop the run if too many fail.

    Attributes:
        stop_above: maximum fraction (0 to 1) of failed transcripts in a run; None never stops it.
        at_least: minimum number of transcripts before the fraction is checked.
    """

    stop_above: float | None = None
    at_least: int = 20
    checked: int = 0
    failed: int = 0
    counts: Counter[TokenDrift] = field(default_factory=Counter)

    def add(self, report: TokenReport, name: str) -> bool:
        """Count one report; return True if the transcript may be used for training.

        Raises:
            TemplateError: the fraction of failed transcripts is above `stop_above`.
        """
        self.checked += 1
        self.failed += report.failed
        self.counts.update(report.counts)
        rate = self.failed / self.checked
        if (
            report.failed
            and self.stop_above is not None
            and self.checked >= self.at_least
            and rate > self.stop_above
        ):
            first = next(d for d in report.differences if d.drift is report.worst)
            fork = ", history: fork, or" if report.tolerates_rewrites else " or"
            raise TemplateError(
                f"tokenization_check: {report.mode}: {self.failed} of {self.checked} transcripts differ from what "
                f"the chat template renders ({rate:.0%}, allowed {self.stop_above:.0%}); the last one, {name}: "
                f"{first}; use a template that only appends{fork} a milder tokenization_check"
            )
        return not report.failed

    def metrics(self) -> dict[str, float]:
        """Return the fraction of failed transcripts, and the windows of each class per transcript."""
        total = max(1, self.checked)
        return {"failed": self.failed / total} | {str(d): self.counts[d] / total for d in TokenDrift}


def check_tokens(transcript: Transcript, mode: Mode = "strict") -> TokenReport:
    """Compare the branch with a fresh rendering of its messages.

    Messages that the template refuses to render count as a difference of class content.

    Raises:
        ValueError: `mode` is not strict, ignore_strippable or disable.
    """
    if mode not in MODES:
        raise ValueError(f"tokenization_check must be one of {', '.join(MODES)}, got {mode!r}")
    if mode == "disable":
        return TokenReport(mode)
    renderer = transcript.renderer
    context = transcript.context
    try:
        fresh = renderer.encode(context, transcript.tools, generation_prompt=transcript.prompted)
        differences = compare(transcript, fresh)
    except TemplateError as e:
        differences = [TokenDifference(TokenDrift.CONTENT, None, 0, renderer.decode(transcript.ids[:40]), str(e))]
    return TokenReport(mode, tuple(differences), tolerates_rewrites=transcript.history == "keep")


def compare(transcript: Transcript, fresh: Sequence[int]) -> list[TokenDifference]:
    """Return the differing windows between the branch's ids and `fresh`, in order."""
    ledger = transcript.ids
    if tuple(fresh[: len(ledger)]) == ledger and (
        transcript.prompted or _only_ends(transcript, fresh[len(ledger) :])
    ):
        return []
    judge = _Judge(transcript)
    return [judge.classify(*window) for window in _windows(transcript, fresh)]


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive tokens of the branch: one sampled completion, or template text between two of them.

    Tokens after the template's last control token before a completion (the line breaks of a generation prompt) are
    included in the completion as its `lead`, because a tokenizer may merge the two.
    """

    start: int
    ids: tuple[int, ...]
    message: int | None = None  # index of the completion in the branch; None if not sampled
    lead: int = 0


def _runs(transcript: Transcript) -> list[_Run]:
    place, token = transcript.places, transcript.renderer.vocabulary.token
    runs: list[_Run] = []
    at = 0
    written: list[int] = []
    for segment in transcript.branch:
        if segment.origin != "sampled" or segment.message is None:
            written += segment.ids
            continue
        cut = next((n for n in range(len(written), 0, -1) if token(written[n - 1]) is not None), 0)
        runs.append(_Run(at, tuple(written[:cut])))
        lead = tuple(written[cut:])
        runs.append(_Run(at + cut, lead + segment.ids, place[segment.message], len(lead)))
        at += len(written) + len(segment.ids)
        written = []
    runs.append(_Run(at, tuple(written)))
    return [run for run in runs if run.ids]


def _windows(transcript: Transcript, fresh: Sequence[int]) -> list[tuple[list[_Run], tuple[int, ...]]]:
    """Return pairs of (runs of the transcript, ids of the rendering) between text written identically in both.

    A run that was not sampled is searched in the rest of the rendering; ids are mapped to characters so that `str`
    search can be used.
    """
    text = "".join(map(chr, fresh))
    windows: list[tuple[list[_Run], tuple[int, ...]]] = []
    waiting: list[_Run] = []
    at = 0
    for run in _runs(transcript):
        found = text.find("".join(map(chr, run.ids)), at) if run.message is None else -1
        if found < 0:
            waiting.append(run)
            continue
        windows.append((waiting, tuple(fresh[at:found])))
        waiting, at = [], found + len(run.ids)
    rest = tuple(fresh[at:])
    if waiting and waiting[-1].message is not None:
        rest = _through_end(transcript.renderer, waiting[-1], rest)
    elif not waiting and not transcript.prompted and _only_ends(transcript, rest):
        rest = ()
    windows.append((waiting, rest))
    return [(runs, ids) for runs, ids in windows if sum((run.ids for run in runs), ()) != ids]


def _through_end(renderer: Renderer, last: _Run, rest: tuple[int, ...]) -> tuple[int, ...]:
    """Return `rest` up to the token that ends its last turn: the glue after it is not in the transcript yet."""
    closers = [n for n, id in enumerate(rest) if id in renderer.habits.closers]
    if not closers:
        return rest
    stopped = bool(last.ids) and last.ids[-1] in renderer.stop_ids
    return rest[: closers[-1] + stopped]


def _only_ends(transcript: Transcript, rest: Sequence[int]) -> bool:
    """Whether `rest` is only the end of the last turn: its stop token if none was sampled, and white space."""
    renderer = transcript.renderer
    closers = [id for id in rest if id in renderer.habits.closers]
    text = renderer.decode([id for id in rest if id not in renderer.habits.closers])
    return len(closers) <= 1 and not text.strip()


class _Judge:
    """Classify differing windows."""

    def __init__(self, transcript: Transcript) -> None:
        self.transcript, self.renderer = transcript, transcript.renderer
        self.context = transcript.context
        self._rewrites: bool | None = None
        self._agrees: bool | None = None

    def classify(self, runs: Sequence[_Run], fresh: tuple[int, ...]) -> TokenDifference:
        ledger = tuple(id for run in runs for id in run.ids)
        same = num_shared(ledger, fresh)
        end = num_shared(ledger[same:][::-1], fresh[same:][::-1])
        before = self._text(ledger[same : len(ledger) - end])
        after = self._text(fresh[same : len(fresh) - end])
        start = runs[0].start if runs else 0
        sampled = next((run.message for run in runs if run.message is not None), None)
        return TokenDifference(
            self._drift(runs, fresh, sampled, before + after), sampled, start + same, before, after
        )

    def _drift(
        self, runs: Sequence[_Run], fresh: tuple[int, ...], sampled: int | None, changed: str
    ) -> TokenDrift:
        was = self._text([id for run in runs for id in run.ids])
        became = self._text(fresh)
        if was == became and sampled is not None:
            return TokenDrift.RETOKENISED
        inside = None
        if len(runs) == 1 and sampled is not None:
            lead = self._text(runs[0].ids[: runs[0].lead])
            if became.startswith(lead) and not (became.startswith(was) and not became[len(was) :].strip()):
                inside = became[len(lead) :]
        if inside is not None and self._means_the_same(runs[0], inside):
            return TokenDrift.RESERIALISED
        if inside is None and not changed.strip():
            return TokenDrift.BOUNDARY
        if not self._agree():
            return TokenDrift.CONTENT
        if inside is not None and sampled in self.transcript.cut:
            return TokenDrift.RESERIALISED
        if inside is not None and sampled is not None:  # the template itself writes something else
            return TokenDrift.RESERIALISED if self.context[sampled].parse_errors else TokenDrift.HISTORY_REWRITE
        return TokenDrift.HISTORY_REWRITE if self._rewritten() else TokenDrift.CONTENT

    def _text(self, ids: Sequence[int]) -> str:
        """Decode `ids`, composed (NFC) as many tokenizers normalize their input and policies need not."""
        return unicodedata.normalize("NFC", self.renderer.decode(ids))

    def _means_the_same(self, run: _Run, text: str) -> bool:
        tools = self.transcript.tools
        was = self.renderer.read_text(self._text(run.ids[run.lead :]), tools=tools)
        return same_meaning(was, self.renderer.read_text(text, tools=tools))

    def _rewritten(self) -> bool:
        """Whether the template's own renderings, prompt by prompt and turn by turn, are not all prefixes of the
        last one."""
        if self._rewrites is None:
            self._rewrites = self._find_rewrite()
        return self._rewrites

    def _find_rewrite(self) -> bool:
        context, tools = self.context, self.transcript.tools
        now = self.renderer.render(context, tools, generation_prompt=self.transcript.prompted)
        for n, message in enumerate(context):
            if message.role != "assistant":
                continue
            try:
                prompt = self.renderer.render(context[:n], tools, generation_prompt=True)
                turn = self.renderer.render(context[: n + 1], tools)
            except TemplateError:
                continue
            if not now.startswith(prompt) or not (now.startswith(turn) or n + 1 == len(context)):
                return True
        return False

    def _agree(self) -> bool:
        """Whether transcript and messages agree (see `agrees`)."""
        if self._agrees is None:
            self._agrees = agrees(self.transcript)
        return self._agrees


def agrees(transcript: Transcript) -> bool:
    """Whether the transcript agrees with its messages.

    Completions must parse as their messages unless they were cut, and appending the messages turn by turn must
    give the same ids. A branch that continues from a fully rendered context (`resume`, `history: fork`) is only
    parsed.
    """
    branch, place, cut = transcript.branch, transcript.places, transcript.cut
    completions = {place[s.message]: s for s in branch if s.origin == "sampled" and s.message is not None}
    begun = [n for n, segment in enumerate(branch) if segment.origin == "sampled"]
    whole = any(s.origin == "prompt" for s in branch[begun[0] :]) if begun else False
    again = Transcript(transcript.renderer, transcript.tools, history="keep")
    new: list[Message] = []
    try:
        for n, message in enumerate(transcript.context):
            if n not in completions:
                new.append(message)
                continue
            again.extend(new)
            segment, new = completions[n], []
            read = transcript.renderer.parse(segment.ids, tools=transcript.tools, thinking=again.thinking)
            if n not in cut and not same_meaning(read, message):
                return False
            again.complete(Completion(segment.ids, segment.logprobs, segment.versions, "stop"), message=message)
        if new:
            again.extend(new)
    except TemplateError:
        return False
    return whole or tuple(again.ids) == tuple(transcript.ids)
