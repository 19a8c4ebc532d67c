"""Transcripts of token ids: sampled tokens are kept as sampled, new tokens are appended, nothing is re-rendered.

A transcript is one branch of a tree of segments. Branches share their common prefix, so retries, sub-agents,
compacted contexts and templates that rewrite history are neither computed nor trained twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from agentrl.chat.branch_tokens import Alike, BranchTokens
from agentrl.chat.ids import GrowingIds, Ids
from agentrl.chat.routes import routed, routes_of
from agentrl.types import Completion, Message, Origin, Routes, Segment

if TYPE_CHECKING:
    from agentrl.chat.template import Addition, History, Renderer


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One context from root to leaf; every tuple except `spans` has the length of `ids`.

    `loss_mask` is True on the sampled tokens that this row trains. `logprobs` and `versions` come from the sampler
    for sampled tokens and are 0.0 and -1 elsewhere. `spans` lists (segment, start, stop) of what it trains.
    `routes` covers all tokens, if the engine returned any. `observed` is True on the tokens of the env's answers
    that this row counts in the observation loss.
    """

    ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    spans: tuple[tuple[int, int, int], ...]
    routes: Routes | None = None
    observed: tuple[bool, ...] = ()


class Transcript:
    """One branch of an episode's token tree: prompt, completion, observation, completion, ...

    Args:
        renderer: converts messages to ids and completions to messages.
        tools: the schemas offered in this branch.
        history: what to do if the template rewrites earlier turns; None uses the renderer's setting.
    """

    def __init__(
        self, renderer: Renderer, tools: Sequence[Mapping[str, Any]] = (), *, history: History | None = None
    ) -> None:
        self.renderer, self.tools = renderer, tuple(tools)
        self.history: History = history or renderer.history
        self._segments: list[Segment] = []  # shared by all branches, like the messages
        self._branch_tokens = BranchTokens(self._segments)
        self._messages: list[Message] = []
        self._cut: set[int] = set()  # messages that say less than their completions
        self._answers: set[int] = set()  # messages that answer the policy
        self._ids = GrowingIds()
        self._node = -1
        self._context: list[int] = []  # messages of this branch, by index in the episode
        self._before: tuple[int, int] | None = None  # (node, messages) before the pending extension
        self._thinking = False

    @property
    def ids(self) -> Ids:
        """The full context of this branch, which the engine continues. Reading it makes no copy."""
        return self._ids.view()

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All segments of the episode, across branches, in the order they were added."""
        return tuple(self._segments)

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages of the episode, across branches; `Segment.message` is an index into them."""
        return tuple(self._messages)

    @property
    def branch(self) -> tuple[Segment, ...]:
        """The segments of this branch, root first."""
        return tuple(self._segments[i] for i in path_of(self._segments, self._node))

    @property
    def spent(self) -> int:
        """Tokens of this branch and of all branches of the episode that have a completion; where branches begin
        alike, they count once."""
        return self._branch_tokens.with_branch(self._node)

    @property
    def context(self) -> tuple[Message, ...]:
        """The messages of this branch."""
        return tuple(self._messages[i] for i in self._context)

    @property
    def places(self) -> Mapping[int, int]:
        """Where each message of this branch is located in `context`, by its index in `messages`."""
        return {index: place for place, index in enumerate(self._context)}

    @property
    def cut(self) -> Set[int]:
        """Places in `context` of messages that were cut: they say less than the tokens of their completions."""
        return {place for index, place in self.places.items() if index in self._cut}

    @property
    def prompted(self) -> bool:
        """Whether the branch ends with a generation prompt that has no completion yet."""
        return self._before is not None

    @property
    def thinking(self) -> bool:
        """Whether the generation prompt has already opened a think block."""
        return self._thinking

    @property
    def calls(self) -> int:
        """The number of tool calls in the context, if the template numbers them; else 0."""
        return self._calls_in(self._context)

    def extend(self, messages: Sequence[Message], *, answers: int | None = None) -> None:
        """Append new messages and the generation prompt for the next completion.

        If called again before a completion, the messages are added to those of the earlier call. If the template
        rewrites earlier turns and `history` is "fork", the branch continues from a fresh rendering.

        Args:
            answers: how many of the last messages answer the policy, and are no prompt; by default all after a
                completion, and none before the first.

        Raises:
            TemplateError: the template refuses these messages.
        """
        waiting: list[int] = []
        if self._before is not None:
            node, count = self._before
            waiting = self._context[count:]
            self._move(node, self._context[:count])
        self._before = (self._node, len(self._context))
        added = range(len(self._messages), len(self._messages) + len(messages))
        self._messages.extend(messages)
        new = [*waiting, *added]
        given = [self._messages[i] for i in new]
        last = self._newest_completion()
        count = answers if answers is not None else 0 if last is None else len(messages)
        self._answers.update(i for i in added[len(added) - count :] if self._messages[i].role != "assistant")
        if last is None:
            self._append(self.renderer.opening(given, self.tools), new)
        else:
            addition = self.renderer.following(
                self._messages[last.message or 0],
                self._stop_of(last),
                given,
                self.tools,
                system=bool(self._context) and self._messages[self._context[0]].role == "system",
                calls=self._calls_in(self._context[:-1]),
            )
            rewritten = self._rewritten(given, addition) if self.history == "fork" else None
            if rewritten is None:
                self._append(addition, new)
            else:
                self._restart(rewritten, addition, new)
        self._context += new

    def resume(self, ids: Sequence[int], messages: Sequence[Message], *, thinking: bool | None = None) -> None:
        """Continue with a full context rendered by the caller: it starts with this branch, and the rest is prompt.

        Args:
            ids: the context, including the generation prompt.
            messages: the messages in the rest of it; at least one.
            thinking: whether it opens a think block; None means the template's default.

        Raises:
            ValueError: `ids` does not start with the ids of this branch.
        """
        count = len(self._ids.view())
        if tuple(ids[:count]) != tuple(self.ids):
            raise ValueError(f"a context to continue from must begin with the {count} ids of its branch")
        self._before = (self._node, len(self._context))
        new = list(range(len(self._messages), len(self._messages) + len(messages)))
        self._messages.extend(messages)
        self._context += new
        self._add(Segment(tuple(ids[count:]), "prompt", self._node, new[-1]))
        self._thinking = self.renderer.habits.thinks if thinking is None else thinking

    def complete(self, completion: Completion, *, message: Message | None = None, cut: bool = False) -> Message:
        """Append a completion exactly as sampled and return the message it parses as.

        Args:
            message: the parsed completion, if already known; it is not parsed again.
            cut: `message` says less than the tokens, because a stop text of the client ended it.

        Raises:
            ValueError: the completion's ids, logprobs and versions differ in length.
        """
        if not len(completion.ids) == len(completion.logprobs) == len(completion.versions):
            raise ValueError(
                f"a completion of {len(completion.ids)} ids has {len(completion.logprobs)} logprobs and "
                f"{len(completion.versions)} versions; engines must give one of each per token"
            )
        number = len(self._messages)
        if message is None:
            message = self.renderer.parse(completion.ids, tools=self.tools, thinking=self._thinking, number=number)
        self._messages.append(message)
        if cut:
            self._cut.add(number)
        self._context.append(number)
        self._add(Segment(completion.ids, "sampled", self._node, number, completion.logprobs, completion.versions))
        if completion.routes is not None:
            routed(self._segments, path_of(self._segments, self._node), completion.routes)
        self._before = None
        return message

    def fork(
        self,
        *,
        keep: int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        renderer: Renderer | None = None,
    ) -> Transcript:
        """Return another branch of the same episode, for a retry, sub-agent, user simulator or compacted context.

        Args:
            keep: how many messages of this branch to keep: None for everything so far, 0 for an empty context,
                otherwise a number that ends with a completion.
            tools: the schemas offered there; by default the same.
            renderer: with other template options there; by default the same.

        Raises:
            ValueError: `keep` does not end with a completion of this branch.
        """
        tools = self.tools if tools is None else tools
        other = Transcript(renderer or self.renderer, tools, history=self.history)
        other._segments, other._messages = self._segments, self._messages
        other._branch_tokens = self._branch_tokens
        other._cut, other._answers = self._cut, self._answers
        if keep is None:
            other._move(self._node, list(self._context))
            other._before, other._thinking = self._before, self._thinking
        elif keep > 0:
            ends = [i for i in path_of(self._segments, self._node) if self._segments[i].origin == "sampled"]
            wanted = self._context[keep - 1] if keep <= len(self._context) else None
            node = next((i for i in ends if self._segments[i].message == wanted), None)
            if node is None:
                raise ValueError(f"fork(keep={keep}): message {keep - 1} of this branch is not a completion")
            other._move(node, self._context[:keep])
        return other

    def apart(self) -> Transcript:
        """Return an independent copy: what is added to it is not part of the episode."""
        other = self.fork()
        other._segments, other._messages = list(self._segments), list(self._messages)
        other._branch_tokens = self._branch_tokens.apart(other._segments)
        other._cut, other._answers = set(self._cut), set(self._answers)
        return other

    def rows(self) -> list[TrainingRow]:
        """Return the whole episode, all branches, as rows for training (see `rows_of`)."""
        return rows_of(self._segments)

    def _calls_in(self, context: Sequence[int]) -> int:
        if not self.renderer.habits.numbers_calls:
            return 0
        return sum(len(self._messages[i].tool_calls) for i in context)

    def _newest_completion(self) -> Segment | None:
        if self._node >= 0 and self._segments[self._node].origin == "sampled":
            return self._segments[self._node]
        return None

    def _stop_of(self, completion: Segment) -> int | None:
        last = completion.ids[-1] if completion.ids else None
        return last if last in self.renderer.stop_ids else None

    def _rewritten(self, given: Sequence[Message], addition: Addition) -> list[int] | None:
        """Return a fresh context if the template now writes the history before `given` differently."""
        renderer, past = self.renderer, self.context
        if renderer.appends_only:
            return None
        fresh = renderer.render([*past, *given], self.tools, generation_prompt=True)
        if fresh.startswith(renderer.render(past, self.tools)):
            return None
        ids = renderer.vocabulary.encode(fresh)
        appended = [*self.ids, *(id for piece in addition.pieces for id in piece.ids)]
        return None if renderer.decode(ids) == renderer.decode(appended) else ids

    def _restart(self, ids: Sequence[int], addition: Addition, new: Sequence[int]) -> None:
        """Continue from where `ids` diverge from this branch. What is rewritten becomes prompt, part of the first
        new message, and so do the new messages unless `ids` end like `addition`."""
        before, message = self._before, new[0] if new else self._context[-1]
        node, at = -1, 0
        for i in path_of(self._segments, self._node):
            end = at + len(self._segments[i].ids)
            if tuple(ids[at:end]) != self._segments[i].ids:
                break
            node, at = i, end
        self._move(node, self._context)
        first = next((n for n, piece in enumerate(addition.pieces) if piece.message is not None), 0)
        pieces = addition.pieces[first:]
        tail = [id for piece in pieces for id in piece.ids]
        cut = len(ids) - len(tail)
        if cut >= at and list(ids[cut:]) == tail:
            if cut > at:
                self._add(Segment(tuple(ids[at:cut]), "prompt", node, message))
            self._append(replace(addition, pieces=pieces), new)
        else:
            self._add(Segment(tuple(ids[at:]), "prompt", node, message))
        self._before, self._thinking = before, addition.thinking  # a later extension replaces this one

    def _append(self, addition: Addition, new: Sequence[int]) -> None:
        """Add the pieces of the messages `new`, and what is between them."""
        starts = [piece.message for piece in addition.pieces if piece.message is not None]
        ends = iter([*starts[1:], len(new)])
        for piece in addition.pieces:
            if piece.message is None:
                self._add(Segment(piece.ids, "glue", self._node))
            else:
                held = new[piece.message : next(ends)]
                answers = self._node >= 0 and self._answers.issuperset(held)  # nothing predicts the first one
                origin: Origin = "observation" if answers else "prompt"
                self._add(Segment(piece.ids, origin, self._node, held[0]))
        self._thinking = addition.thinking

    def _add(self, segment: Segment) -> None:
        self._segments.append(segment)
        self._node = len(self._segments) - 1
        self._ids.extend(segment.ids)

    def _move(self, node: int, context: list[int]) -> None:
        self._node, self._context = node, context
        self._ids = GrowingIds()
        for i in path_of(self._segments, node):
            self._ids.extend(self._segments[i].ids)
        self._before = None


def rows_of(segments: Sequence[Segment]) -> list[TrainingRow]:
    """Linearize a tree of segments leaf by leaf; each sampled token is trained in exactly one row.

    A token shared by several leaves is trained with the first of them and is context in the others. An answer that
    several branches were given in the same context is observed in the first of them. A branch that adds no sampled
    tokens produces no row, and a row ends with its last trained token.
    """
    inner = {segment.parent for segment in segments}
    alike = Alike()
    first = [alike.add(segment) for segment in segments]
    trained: set[int] = set()
    observed: set[int] = set()
    rows = []
    for leaf in range(len(segments)):
        if leaf in inner:
            continue
        path = path_of(segments, leaf)
        new = [i for i in path if segments[i].origin == "sampled" and segments[i].ids and i not in trained]
        if new:
            kept = path[: path.index(new[-1]) + 1]
            answers = {i for i in kept if segments[i].origin == "observation" and first[i] not in observed}
            rows.append(_row(segments, kept, set(new), answers))
            trained.update(new)
            observed.update(first[i] for i in answers)
    return rows


def path_of(segments: Sequence[Segment], node: int) -> list[int]:
    """Return the indices of the segments from the root to `node`."""
    path = []
    while node >= 0:
        path.append(node)
        node = segments[node].parent
    return path[::-1]


def _row(segments: Sequence[Segment], path: Sequence[int], trained: set[int], answers: set[int]) -> TrainingRow:
    ids: list[int] = []
    mask: list[bool] = []
    observed: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    spans = []
    for i in path:
        segment = segments[i]
        count = len(segment.ids)
        if i in trained:
            spans.append((i, len(ids), len(ids) + count))
        ids += segment.ids
        mask += [i in trained] * count
        observed += [i in answers] * count
        sampled = segment.origin == "sampled"
        logprobs += segment.logprobs if sampled else [0.0] * count
        versions += segment.versions if sampled else [-1] * count
    routes = routes_of([segments[i] for i in path])
    return TrainingRow(
        tuple(ids), tuple(mask), tuple(logprobs), tuple(versions), tuple(spans), routes, tuple(observed)
    )
