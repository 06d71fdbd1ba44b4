"""A drafter that is the target itself with more layers skipped."""

from __future__ import annotations

from collections.abc import Sequence

from viasd.errors import OptionError
from viasd.routes import Route
from viasd.runtime.drafters.line import ModelLine
from viasd.runtime.packed import Line
from viasd.runtime.target import TieredTarget


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
        super().__init__(
            "self", target.model, route, target.counters, min_confidence=min_confidence, stop_tokens=stop_tokens
        )
        self._target = target
        self._position = 0

    def warm(self, tokens: Sequence[int], keep: int) -> bool:
        """See `Drafter`. The target's prefill is this drafter's too."""
        return False

    def rewind(self, tokens: Sequence[int]) -> None:
        """See `Drafter`. Nothing to do: every draft starts again at the target's own watermark."""

    settle = rewind

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
