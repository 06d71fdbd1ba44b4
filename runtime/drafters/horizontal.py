"""A drafter for the first tokens of a block and a cheaper one for the rest: the horizontal cascade of CS Drafting."""

from __future__ import annotations

from collections.abc import Sequence

from viasd.draws import Draws
from viasd.rows import Rows
from viasd.runtime.drafters.base import Draft, Drafter, SteppedDrafter
from viasd.runtime.passes import Steps
from viasd.sampling import Ahead


class HorizontalDrafter(SteppedDrafter):
    """Later tokens of a block are seldom reached, so they may be guessed more cheaply (Chen et al. 2023).

    Args:
        first: Drafts the beginning of a block.
        then: Drafts the rest of it, after what `first` proposed.
        share: Number of tokens that are left to `first`.
    """

    def __init__(self, first: Drafter, then: Drafter, share: int) -> None:
        self.name = "horizontal"
        self._first = first
        self._then = then
        self._share = share

    def drafting(self, tokens: Sequence[int], limit: int, ahead: Ahead, draws: Draws) -> Steps[Draft]:
        """See `Drafter`. Each token is tested against the law of whoever drew it."""
        start = yield from self._first.drafting(tokens, min(self._share, limit), ahead, draws)
        if len(start.tokens) < self._share:
            return start  # it had a reason to stop there: an end token, or too little confidence
        rest = yield from self._then.drafting([*tokens, *start.tokens], limit - len(start.tokens), ahead, draws)
        if not rest.tokens:
            return start
        laws = [start.rows[i] for i in range(len(start.tokens))] + [rest.rows[i] for i in range(len(rest.tokens))]
        return Draft([*start.tokens, *rest.tokens], Rows.joined(laws), [*start.confidence, *rest.confidence])

    def warm(self, tokens: Sequence[int], keep: int) -> bool:
        """See `Drafter`."""
        return self._first.warm(tokens, keep) or self._then.warm(tokens, keep)

    def rewind(self, tokens: Sequence[int]) -> None:
        """See `Drafter`."""
        self._first.rewind(tokens)
        self._then.rewind(tokens)

    def settle(self, tokens: Sequence[int]) -> None:
        """See `Drafter`."""
        self._first.settle(tokens)
        self._then.settle(tokens)
