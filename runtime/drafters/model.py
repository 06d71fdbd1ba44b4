"""A drafter that is a model of its own."""

from __future__ import annotations

from collections.abc import Sequence

from viasd.draws import Draws
from viasd.layered import LayeredModel
from viasd.runtime.drafters.base import Draft, ModelLine
from viasd.runtime.drafters.stepwise import draft_stepwise
from viasd.runtime.metrics import Counters
from viasd.runtime.packed import Line
from viasd.runtime.passes import Steps, timed
from viasd.runtime.target import Stopwatch
from viasd.sampling import Ahead
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
        self.name = "model"
        self.readout = readout
        self.model = model
        self.route = None
        self.kv = model.new_kv()
        self.counters = counters
        self.watch = Stopwatch(counters.seconds_by_tier, "drafter", None)
        self._min_confidence = min_confidence
        self._stop_tokens = stop_tokens

    def drafting(self, tokens: Sequence[int], limit: int, ahead: Ahead, draws: Draws) -> Steps[Draft]:
        """See `Drafter`. Beyond its own context, which may be shorter than the target's, it proposes nothing."""
        steps = draft_stepwise(
            self,
            tokens[self.kv.full_len :],
            min(limit, self.model.context_length - len(tokens)),
            ahead,
            draws,
            min_confidence=self._min_confidence,
            stop_tokens=self._stop_tokens,
            stop=self.stop,
        )
        return timed(steps, self.watch)

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

    @property
    def context_length(self) -> int:
        """See `BlockDrafter`."""
        return self.model.context_length

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
