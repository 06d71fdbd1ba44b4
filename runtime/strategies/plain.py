"""Plain decoding: one full pass a token. The yardstick of everything else."""

from __future__ import annotations

from collections.abc import Sequence

from viasd.runtime.passes import Steps
from viasd.runtime.strategies.base import Emission, SteppedStrategy, Workbench, full_step


class Plain(SteppedStrategy):
    """Autoregressive decoding by the full verifier alone."""

    def __init__(self, bench: Workbench) -> None:
        self._bench = bench

    def steps(self, tokens: Sequence[int], room: int) -> Steps[Emission]:
        """See `Strategy`."""
        self._bench.counters.rounds += 1
        return (yield from full_step(self._bench, tokens))
