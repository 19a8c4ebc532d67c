"""The rows of one forward pass: which tokens are computed, and which slots draw from their logits.

Slots with the same tokens share rows: the episodes of a group start with the same prompt, and a policy that is
sure of its next token gives it to all of them. Each slot still draws its own token, with its own random number.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from agentrl.engine.local.cache import CacheSpan, Copies
from agentrl.engine.local.sampler import IntArray
from agentrl.engine.local.slots import SlotTable, Twins


class ForwardRows:
    """The rows of slots that decode, then those of prefills.

    Of the rows that decode, each kind of twins has `widths`: the last token of the first slot of the kind, and its
    drafts. Logits are computed for these rows, and for the last row of each prefill that ends in this pass.

    Attributes:
        decode: the slots that decode, ascending.
        first: of these, the first slot of each kind.
        widths: the number of rows of each kind.
        spans: the prefills.
        slots: the slots that draw, one for each token that is drawn, those of a slot next to each other.
        ahead: how many tokens the drawn one is behind the next token of its slot.
        source: the row of the logits that each is drawn from.
    """

    def __init__(
        self, table: SlotTable, decode: IntArray, twins: Twins, widths: IntArray, spans: Sequence[CacheSpan]
    ) -> None:
        self.decode, self.first, self.widths, self.spans = decode, decode[twins.first], widths, spans
        self._ready = [span for span in spans if span.start + span.count == table.known[span.slot]]
        each = widths[twins.kind]
        ahead = columns(each)
        self._decoded = decode.repeat(each)
        self._decoded_from = (np.cumsum(widths) - widths)[twins.kind].repeat(each) + ahead
        last = [slot for span in self._ready for slot in span.slots]
        last_from = [self._num + row for row, span in enumerate(self._ready) for _ in span.slots]
        self.slots = np.concatenate([self._decoded, np.array(last, dtype=np.int64)])
        self.ahead = np.concatenate([ahead, np.zeros(len(last), dtype=np.int64)])
        self.source = np.concatenate([self._decoded_from, np.array(last_from, dtype=np.int64)])

    @property
    def _num(self) -> int:
        """The number of rows that decode."""
        return int(self.widths.sum())

    def computed(self, table: SlotTable) -> tuple[IntArray, IntArray]:
        """Return the slots and positions of all rows."""
        slots = [self.first.repeat(self.widths), *(np.full(span.count, span.slot) for span in self.spans)]
        positions = [table.computed[slots[0]] + columns(self.widths), *map(_positions, self.spans)]
        return np.concatenate(slots), np.concatenate(positions)

    def kept(self) -> list[int]:
        """Return the rows whose logits are computed."""
        return [*range(self._num), *(span.offset + span.count - 1 for span in self._ready)]

    def copies(self) -> Copies | None:
        """Return where keys and values go, if those of some rows go to several slots."""
        if len(self._decoded) == self._num and not any(span.copies for span in self.spans):
            return None
        places = [(span, slot) for span in self.spans for slot in span.slots]
        rows = [self._decoded_from, *(np.arange(span.count) + span.offset for span, _ in places)]
        slots = [self._decoded, *(np.full(span.count, slot) for span, slot in places)]
        return Copies(torch.from_numpy(np.concatenate(rows)), torch.from_numpy(np.concatenate(slots)))

    def advance(self, table: SlotTable) -> None:
        """Count what has been computed; drafts count when they are drawn."""
        table.computed[self.decode] += 1
        for span in self.spans:
            table.computed[list(span.slots)] += span.count


def columns(widths: IntArray) -> IntArray:
    """Return 0 to w - 1 for each width w, end to end."""
    ends = np.cumsum(widths)
    return np.arange(int(widths.sum())) - (ends - widths).repeat(widths)


def _positions(span: CacheSpan) -> IntArray:
    return np.arange(span.start, span.start + span.count)
