"""Three tiers in a chain: what the slim verifier lets through has its law, and the full verifier tests it against that."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from viasd.rows import Row, Rows
from viasd.runtime.drafters.base import Drafter
from viasd.runtime.judge import judge_block
from viasd.runtime.passes import Admission, FullPass, Judged, SlimPass, Steps
from viasd.runtime.strategies.base import Emission, SteppedStrategy, Workbench, full_step
from viasd.sampling import Ahead


class ChainedCascade(SteppedStrategy):
    """`cascade` in lossless and bounded mode.

    The slim verifier tests the drafter's block by the exact rule, so the tokens that leave it (its own residual or bonus
    token included) have law q' exactly. After `slim_rounds` such blocks the full verifier tests all of them with q' as
    the proposal. When to stop depends on tokens already drawn, and all of them are kept, so the outcome has law q.

    Args:
        bench: What the request works with.
        drafter: Source of proposals.
        gamma: Longest drafted block.
        slim_rounds: Blocks the slim verifier judges before the full one is called.
        alpha: Lossy acceptance by the full verifier (`bounded` mode); 0 is exact.
        stop_tokens: After one of these nothing more is drafted.
    """

    def __init__(
        self,
        bench: Workbench,
        drafter: Drafter,
        *,
        gamma: int,
        slim_rounds: int = 1,
        alpha: float = 0.0,
        stop_tokens: frozenset[int] = frozenset(),
    ) -> None:
        self._bench = bench
        self._drafter = drafter
        self._gamma = gamma
        self._slim_rounds = slim_rounds
        self._alpha = alpha
        self._stop_tokens = stop_tokens

    def steps(self, tokens: Sequence[int], room: int) -> Steps[Emission]:
        """See `Strategy`."""
        bench, counters = self._bench, self._bench.counters
        counters.rounds += 1
        pending: list[int] = []
        laws: list[Row] = []
        drafted: list[bool] = []
        seen: list[Tensor] = []  # raw q' rows of the pending tokens, for stateful processors
        for _ in range(self._slim_rounds):
            # The slim verifier adds one token to a block and the full verifier another.
            limit = min(self._gamma, room - len(pending) - 2)
            prefix = [*tokens, *pending]
            draft = yield from self._drafter.drafting(prefix, limit, self._ahead(tokens, pending, seen), bench.draws)
            counters.drafted += len(draft.tokens)
            if draft.tokens:
                draft = draft.first(
                    (yield Admission("drafter", "slim", draft.tokens, draft.evidence, draft.confidence))
                )
            if not draft.tokens:
                break
            logits = yield SlimPass(bench.target, [*prefix, *draft.tokens], len(draft.tokens) + 1)
            verdict, rows = judge_block(
                logits, draft.tokens, draft.rows, bench.sampler, self._ahead(tokens, pending, seen), bench.draws
            )
            n = verdict.accepted
            counters.gated += min(n + 1, len(draft.tokens))
            pending += [*draft.tokens[:n], verdict.token]
            drafted += [True] * n + [False]
            laws += [rows[i] for i in range(n + 1)]
            seen.append(logits[: n + 1])
            yield Judged("drafter", "slim", draft.tokens, n, draft.rows, rows)
            # What was run behind a refused token is worthless; the next slim pass starts at the last pending token.
            bench.target.settle([*tokens, *pending])
            self._drafter.rewind([*tokens, *pending])
            if self._stop_tokens.intersection(pending):
                break
        if pending:
            admitted = yield Admission("slim", "full", pending, torch.cat(seen))
            if admitted < len(pending):
                pending, laws, drafted = pending[:admitted], laws[:admitted], drafted[:admitted]
                bench.target.settle([*tokens, *pending])
        if not pending:
            return (yield from full_step(bench, tokens))
        full_logits = yield FullPass(bench.target, [*tokens, *pending], len(pending) + 1)
        proposed = Rows.joined(laws)
        verdict, final = judge_block(
            full_logits,
            pending,
            proposed,
            bench.sampler,
            bench.sampler.ahead(tokens),
            bench.draws,
            self._alpha,
        )
        n = verdict.accepted
        counters.kept += sum(drafted[:n])
        yield Judged("slim", "full", pending, n, proposed, final, exact=not self._alpha)
        tiers = ["drafter" if d else "slim" for d in drafted[:n]] + ["full"]
        return Emission([*pending[:n], verdict.token], tiers, full_logits[: n + 1], [*drafted[:n], False])

    def _ahead(self, tokens: Sequence[int], pending: Sequence[int], seen: Sequence[Tensor]) -> Ahead:
        """The request's processors after the pending tokens (which are not committed yet)."""
        ahead = self._bench.sampler.ahead(tokens)
        if pending:
            ahead.block(torch.cat(list(seen)), pending)
        return ahead
