"""Two tiers: a drafter proposes, the full verifier decides (Leviathan et al. 2023, Chen et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence

from viasd.runtime.drafters.base import Drafter
from viasd.runtime.judge import judge_block
from viasd.runtime.strategies.base import Emission, Workbench, full_step


class SpeculativeDecoding:
    """Speculative decoding; lossless with ``alpha = 0``, within total variation alpha per token otherwise.

    Args:
        bench: What the request works with.
        drafter: Source of proposals.
        gamma: Longest block.
        alpha: Lossy acceptance (`bounded` mode).
    """

    def __init__(self, bench: Workbench, drafter: Drafter, *, gamma: int, alpha: float = 0.0) -> None:
        self._bench = bench
        self._drafter = drafter
        self._gamma = gamma
        self._alpha = alpha

    def round(self, tokens: Sequence[int], room: int) -> Emission:
        """See `Strategy`."""
        bench, counters = self._bench, self._bench.counters
        counters.rounds += 1
        # The verifier always adds a token of its own, so a block as long as the room left would waste one.
        limit = min(self._gamma, room - 1)
        draft = self._drafter.propose(tokens, limit, bench.sampler.ahead(tokens), bench.draws)
        if not draft.tokens:
            return full_step(bench, tokens)
        counters.drafted += len(draft.tokens)
        logits = bench.target.full([*tokens, *draft.tokens], len(draft.tokens) + 1)
        verdict, _ = judge_block(
            logits, draft.tokens, draft.rows, bench.sampler, bench.sampler.ahead(tokens), bench.draws, self._alpha
        )
        n = verdict.accepted
        counters.gated += min(n + 1, len(draft.tokens))
        counters.kept += n
        return Emission(
            [*draft.tokens[:n], verdict.token],
            ["drafter"] * n + ["full"],
            logits[: n + 1],
            [True] * n + [False],
        )
