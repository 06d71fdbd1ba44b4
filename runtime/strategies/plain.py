"""Plain decoding: one full pass a token. The yardstick of everything else."""

from __future__ import annotations

from collections.abc import Sequence

from viasd.runtime.strategies.base import Emission, Workbench, full_step


class Plain:
    """Autoregressive decoding by the full verifier alone."""

    def __init__(self, bench: Workbench) -> None:
        self._bench = bench

    def round(self, tokens: Sequence[int], room: int) -> Emission:
        """See `Strategy`."""
        self._bench.counters.rounds += 1
        return full_step(self._bench, tokens)
