"""A drafter that is the target itself with more layers skipped."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from viasd.attention import Segment
from viasd.draws import Draws
from viasd.errors import OptionError
from viasd.routes import Route
from viasd.runtime.drafters.base import Draft, SteppedDrafter
from viasd.runtime.drafters.stepwise import draft_stepwise
from viasd.runtime.passes import Steps, timed
from viasd.runtime.target import Stopwatch, TieredTarget
from viasd.sampling import Ahead


class SelfDrafter(SteppedDrafter):
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
        # A pass is not waited for: drawing from its rows does that, within the same tier's time.
        self._watch = Stopwatch(target.counters.seconds_by_tier, "drafter", None)
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
        return timed(steps, self._watch)

    def rewind(self, tokens: Sequence[int]) -> None:
        """See `Drafter`. Nothing to do: every draft starts again at the target's own watermark."""

    settle = rewind

    @property
    def context_length(self) -> int:
        """See `BlockDrafter`."""
        return self._target.model.context_length

    def begin(self, tokens: Sequence[int]) -> int:
        """See `BlockDrafter`."""
        self._position = self._target.kv.slim_len
        return self._position

    def keep(self, length: int) -> None:
        """See `BlockDrafter`."""
        self._position = length

    def rows(self, tokens: Sequence[int], n: int) -> Tensor:
        """See `BlockDrafter`."""
        target = self._target
        model = target.model
        target.counters.drafter_calls += 1
        target.counters.drafter_tokens_fed += len(tokens)
        with self._watch:
            step = model.step([Segment(target.kv, self._position, len(tokens))])
            route = self.route
            hidden, _ = model.run(model.embed(tokens), route.layers, step, parts=route.parts, stitches=route.stitches)
            self._position += len(tokens)
            return (self.route.readout or model.readout)(hidden[:, -n:])
