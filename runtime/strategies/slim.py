"""The slim verifier alone: what the middle tier would say if nobody checked it."""

from __future__ import annotations

from collections.abc import Sequence

from viasd.runtime.passes import SlimPass, Steps
from viasd.runtime.strategies.base import Emission, SteppedStrategy, Workbench


class SlimAlone(SteppedStrategy):
    """Autoregressive decoding by the target with layers skipped, after a prompt that the whole target has read."""

    def __init__(self, bench: Workbench) -> None:
        self._bench = bench

    def steps(self, tokens: Sequence[int], room: int) -> Steps[Emission]:
        """See `Strategy`."""
        bench = self._bench
        bench.counters.rounds += 1
        logits = yield SlimPass(bench.target, tokens, 1)
        token = bench.draws.token(bench.sampler.ahead(tokens).row(logits[0]))
        return Emission([token], ["slim"], logits, [False], unseen=1)
