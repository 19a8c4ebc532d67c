"""Okapi BM25 over some thousands of short documents, in plain Python."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """Lower-case words."""
    return _WORD.findall(text.lower())


class Index:
    """An inverted index of `texts`.

    Source: Robertson and Zaragoza, The Probabilistic Relevance Framework: BM25 and Beyond (2009).
    """

    def __init__(self, texts: Sequence[str], k1: float = 1.5, b: float = 0.75) -> None:
        counts = [Counter(words(text)) for text in texts]
        lengths = [sum(c.values()) for c in counts]
        mean = sum(lengths) / max(1, len(lengths))
        self._postings: dict[str, list[tuple[int, float]]] = defaultdict(list)
        documents = Counter(word for count in counts for word in count)
        for number, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            for word, times in count.items():
                rarity = math.log(1 + (len(texts) - documents[word] + 0.5) / (documents[word] + 0.5))
                damped = times * (k1 + 1) / (times + k1 * (1 - b + b * length / mean))
                self._postings[word].append((number, rarity * damped))

    def search(self, query: str, num: int) -> list[int]:
        """The `num` best documents, best first; ties by position; none that shares no word with the query."""
        scores: dict[int, float] = defaultdict(float)
        for word in words(query):
            for number, score in self._postings.get(word, ()):
                scores[number] += score
        return sorted(scores, key=lambda n: (-scores[n], n))[:num]
