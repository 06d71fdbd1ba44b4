"""A drafter that is the target itself with more layers skipped."""

from __future__ import annotations

from collections.abc import Sequence

from viasd.draws import Draws
from viasd.errors import OptionError
from viasd.routes import Route
from viasd.runtime.drafters.base import Draft, ModelLine
from viasd.runtime.drafters.stepwise import draft_stepwise
from viasd.runtime.packed import Line
from viasd.runtime.passes import Steps, timed
from viasd.runtime.target import Stopwatch, TieredTarget
from viasd.sampling import Ahead


class SelfDrafter(ModelLine):
    """Drafts with a route through the target that skips more layers than the slim verifier does.

    It reads the target's cache and writes its own keys only above the slim watermark, where the verifier that judges the
    block writes over them before reading. So it costs no memory and no second prefill.

    Args:
        target: The sequence's target.
        route: Layers to draft with; where there is a slim tier, a subset of its layers (it reads that tier's keys).
        min_confidence: See `draft_stepwise`.
        stop_tokens: See `draft_stepwise`.

    Raises:
        OptionError: If `route` keeps a layer that the slim tier skips.
    """

    def __init__(
        self,
        target: TieredTarget,
        route: Route,
        *,
        min_confidence: float = 0.0,
        stop_tokens: frozenset[int] = frozenset(),
    ) -> None:
        if target.route is not None and not set(route.layers) <= set(target.route.whole_layers):
            raise OptionError("the self drafter must keep only layers that the slim verifier keeps")
        self.name = "self"
        self.route = route
        self._target = target
        self.model = target.model
        self.counters = target.counters
        self.watch = Stopwatch(target.counters.seconds_by_tier, "drafter", None)
        self._position = 0
        self._min_confidence = min_confidence
        self._stop_tokens = stop_tokens

    def drafting(self, tokens: Sequence[int], limit: int, ahead: Ahead, draws: Draws) -> Steps[Draft]:
        """See `Drafter`."""
        steps = draft_stepwise(
            self,
            tokens[self.begin(tokens) :],
            limit,
            ahead,
            draws,
            min_confidence=self._min_confidence,
            stop_tokens=self._stop_tokens,
        )
        return timed(steps, self.watch)

    def warm(self, tokens: Sequence[int], keep: int) -> bool:
        """See `Drafter`. The target's prefill is this drafter's too."""
        return False

    def rewind(self, tokens: Sequence[int]) -> None:
        """See `Drafter`. Nothing to do: every draft starts again at the target's own watermark."""

    settle = rewind

    @property
    def context_length(self) -> int:
        """See `BlockDrafter`."""
        return self.model.context_length

    def begin(self, tokens: Sequence[int]) -> int:
        """See `BlockDrafter`."""
        self._position = self._target.kv.slim_len
        return self._position

    def keep(self, length: int) -> None:
        """See `BlockDrafter`."""
        self._position = length

    def line(self, tokens: Sequence[int]) -> Line:
        """See `ModelLine`."""
        return Line(self._target.kv, self._position, tokens)

    def ran(self, n: int) -> None:
        """See `ModelLine`."""
        self._position += n
