"""A drafter without a model: what followed this n-gram the last time?"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from viasd.draws import Draws
from viasd.rows import Rows
from viasd.runtime.drafters.base import Draft, PasslessDrafter
from viasd.runtime.metrics import Counters
from viasd.sampling import Ahead

LONGEST = 3
SHORTEST = 1


class LookupDrafter(PasslessDrafter):
    """Prompt lookup: finds the latest earlier occurrence of the last n tokens and proposes what came after it.

    An index of all n-grams is kept up as tokens are committed, so a proposal costs a few dictionary reads however long
    the text is. The proposal is a point mass (a law that puts everything on one token), and is tested as one.

    Args:
        counters: Where seconds are added up.
        longest: Longest n-gram looked for, tried first.
        shortest: Shortest one.
        min_confidence: Stop before a token whose n-gram was followed by it in less than this share of its occurrences.
        stop_tokens: After one of these there is nothing left to draft.
    """

    def __init__(
        self,
        counters: Counters,
        *,
        longest: int = LONGEST,
        shortest: int = SHORTEST,
        min_confidence: float = 0.0,
        stop_tokens: frozenset[int] = frozenset(),
    ) -> None:
        self.name = "lookup"
        self._counters = counters
        self._sizes = range(longest, shortest - 1, -1)
        self._min_confidence = min_confidence
        self._stop_tokens = stop_tokens
        self._indexed = 0
        # n-gram -> position right after its latest occurrence; n-gram -> how often each token followed it.
        self._latest: dict[tuple[int, ...], int] = {}
        self._followers: dict[tuple[int, ...], dict[int, int]] = {}

    def propose(self, tokens: Sequence[int], limit: int, ahead: Ahead, draws: Draws) -> Draft:
        """See `Drafter`. Looks only at committed text and at what was proposed from it, never at a later token."""
        before = perf_counter()
        proposed: list[int] = []
        confidence: list[float] = []
        match = self._find(tokens) if limit > 0 else None
        if match is not None:
            position, size = match
            text = list(tokens)
            while len(proposed) < limit and position < len(text):
                token = text[position]
                share = self._share(tuple(text[-size:]), token)
                if share < self._min_confidence:
                    break
                proposed.append(token)
                confidence.append(share)
                text.append(token)
                position += 1
                if token in self._stop_tokens:
                    break
        self._counters.seconds_by_tier["drafter"] += perf_counter() - before
        return Draft(proposed, Rows.one_hot(proposed), confidence)

    def match(self, tokens: Sequence[int]) -> int:
        """Length of the n-gram that a proposal after `tokens` would go by; 0 where there is none."""
        found = self._find(tokens)
        return 0 if found is None else found[1]

    def next_token(self, tokens: Sequence[int]) -> int | None:
        """The single token that would be proposed after committed `tokens`, or None."""
        self.settle(tokens)
        match = self._find(tokens)
        return None if match is None else tokens[match[0]]

    def rewind(self, tokens: Sequence[int]) -> None:
        """See `Drafter`. Tentative tokens are never indexed."""

    def settle(self, tokens: Sequence[int]) -> None:
        """See `Drafter`. Committed tokens never go away, so the index only grows."""
        for end in range(max(self._indexed, 1), len(tokens)):
            follower = tokens[end]
            for size in self._sizes:
                if size <= end:
                    gram = tuple(tokens[end - size : end])
                    self._latest[gram] = end
                    counts = self._followers.setdefault(gram, {})
                    counts[follower] = counts.get(follower, 0) + 1
        self._indexed = max(self._indexed, len(tokens))

    def _find(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        for size in self._sizes:
            if size <= len(tokens):
                position = self._latest.get(tuple(tokens[-size:]))
                if position is not None:
                    return position, size
        return None

    def _share(self, gram: tuple[int, ...], token: int) -> float:
        """How often `token` followed `gram` in the committed text, of all its occurrences."""
        counts = self._followers.get(gram)
        if not counts:
            return 0.0
        return counts.get(token, 0) / sum(counts.values())
