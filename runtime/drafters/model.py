"""A drafter that is a model of its own."""

from __future__ import annotations

from collections.abc import Sequence

from viasd.layered import LayeredModel
from viasd.runtime.drafters.line import ModelLine
from viasd.runtime.metrics import Counters
from viasd.runtime.packed import Line
from viasd.shortlist import ShortReadout


class ModelDrafter(ModelLine):
    """Drafts with a small model that shares the target's tokenizer.

    Args:
        model: The drafter, its vocabulary cut to what both tokenizers share.
        counters: Where calls, tokens fed and seconds are added up.
        min_confidence: See `draft_stepwise`.
        stop_tokens: See `draft_stepwise`.
        readout: In the place of the model's own, where only some words are wanted.
    """

    def __init__(
        self,
        model: LayeredModel,
        counters: Counters,
        *,
        min_confidence: float = 0.0,
        stop_tokens: frozenset[int] = frozenset(),
        readout: ShortReadout | None = None,
    ) -> None:
        super().__init__(
            "model", model, None, counters, readout=readout, min_confidence=min_confidence, stop_tokens=stop_tokens
        )
        self.kv = model.new_kv()

    def warm(self, tokens: Sequence[int], keep: int) -> bool:
        """See `Drafter`."""
        left = tokens[self.kv.full_len :]
        if len(tokens) >= self.model.context_length:
            return False  # it will propose nothing
        return len(self.catch_up(left, keep, pieces=1)) < len(left)

    def rewind(self, tokens: Sequence[int]) -> None:
        """See `Drafter`."""
        self.kv.roll_back(len(tokens) - 1)

    settle = rewind

    def begin(self, tokens: Sequence[int]) -> int:
        """See `BlockDrafter`."""
        return self.kv.full_len

    def keep(self, length: int) -> None:
        """See `BlockDrafter`."""
        self.kv.roll_back(length)

    def line(self, tokens: Sequence[int]) -> Line:
        """See `ModelLine`."""
        return Line(self.kv, self.kv.full_len, tokens)

    def ran(self, n: int) -> None:
        """See `ModelLine`."""
        self.kv.full_len = self.kv.slim_len = self.kv.full_len + n
