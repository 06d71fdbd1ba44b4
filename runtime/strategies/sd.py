"""Two tiers: a drafter proposes, the full verifier decides (Leviathan et al. 2023, Chen et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence

from viasd.runtime.drafters.base import Drafter
from viasd.runtime.judge import judge_block
from viasd.runtime.lengths import Pace
from viasd.runtime.passes import Admission, FullPass, Judged, Steps
from viasd.runtime.strategies.base import Emission, SteppedStrategy, Workbench, full_step


class SpeculativeDecoding(SteppedStrategy):
    """Speculative decoding; lossless with ``alpha = 0``, within total variation alpha per token otherwise.

    Args:
        bench: What the request works with.
        drafter: Source of proposals.
        gamma: Longest block.
        alpha: Lossy acceptance (`bounded` mode).
        pace: How long each block is; None drafts `gamma` tokens every time.
    """

    def __init__(
        self, bench: Workbench, drafter: Drafter, *, gamma: int, alpha: float = 0.0, pace: Pace | None = None
    ) -> None:
        self._bench = bench
        self._drafter = drafter
        self._gamma = gamma
        self._alpha = alpha
        self._pace = pace

    def steps(self, tokens: Sequence[int], room: int) -> Steps[Emission]:
        """See `Strategy`."""
        bench, counters = self._bench, self._bench.counters
        counters.rounds += 1
        # The verifier always adds a token of its own, so a block as long as the room left would waste one.
        limit = min(self._gamma, room - 1)
        if self._pace is not None:
            limit = self._pace.limit(tokens, limit)
        draft = yield from self._drafter.drafting(tokens, limit, bench.sampler.ahead(tokens), bench.draws)
        counters.drafted += len(draft.tokens)
        if draft.tokens:
            admitted = yield Admission("drafter", "full", draft.tokens, draft.evidence, draft.confidence)
            draft = draft.first(admitted)
        if not draft.tokens:
            emission = yield from full_step(bench, tokens)
            if self._pace is not None:
                self._pace.passed(emission.tokens)
            return emission
        logits = yield FullPass(bench.target, [*tokens, *draft.tokens], len(draft.tokens) + 1)
        verdict, laws = judge_block(
            logits, draft.tokens, draft.rows, bench.sampler, bench.sampler.ahead(tokens), bench.draws, self._alpha
        )
        n = verdict.accepted
        judged = min(n + 1, len(draft.tokens))
        counters.gated += judged
        counters.kept += n
        if self._pace is not None:
            self._pace.judged(n, judged)
        yield Judged("drafter", "full", draft.tokens, n, draft.rows, laws, exact=not self._alpha)
        return Emission(
            [*draft.tokens[:n], verdict.token],
            ["drafter"] * n + ["full"],
            logits[: n + 1],
            [True] * n + [False],
        )
