"""Three tiers with a gate (VIA-SD, arXiv 2606.12243): the full verifier is called only where the slim one objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from viasd.accept import gated_law
from viasd.rows import Row, Rows
from viasd.runtime.drafters.base import Draft, Drafter
from viasd.runtime.gates import Decision, Gate
from viasd.runtime.judge import judge_block
from viasd.runtime.passes import Admission, FullPass, SlimPass, Steps
from viasd.runtime.strategies.base import Emission, SteppedStrategy, Workbench, full_step


@dataclass(frozen=True)
class _Slim:
    """What the slim verifier says of a draft, position by position.

    Attributes:
        logits: Raw logits ``[g, V]``.
        judged: The same after the request's logits processors: what the gate looks at, so that a penalty or a ban holds in
            this tier too, whatever the drafter proposes.
        laws: Processed rows (warpers included), which rewrites are drawn from.
    """

    logits: Tensor
    judged: Tensor
    laws: Rows


@dataclass(frozen=True)
class _Walk:
    """A block after the gate: what stands at each gated position, and whether it ended in an escalation.

    Attributes:
        tokens: Tentative tokens at the gated positions. An escalated one is the drafted token.
        kept: For each, whether it is the drafted token.
        escalated: Whether the last of them is for the full verifier to decide.
    """

    tokens: list[int]
    kept: list[bool]
    escalated: bool


class GatedCascade(SteppedStrategy):
    """`cascade` in `via` mode. Lossy: what the gate lets pass, q never sees, except in audits.

    Args:
        bench: What the request works with.
        drafter: Source of proposals.
        gate: Decides accept / rewrite / escalate.
        gamma: Longest block.
        recheck: Where the full verifier runs anyway, let it test the tokens before the escalated one too.
        audit: Probability that a block which would have skipped the full verifier is checked by it.
    """

    def __init__(
        self, bench: Workbench, drafter: Drafter, gate: Gate, *, gamma: int, recheck: bool = True, audit: float = 0.05
    ) -> None:
        self._bench = bench
        self._drafter = drafter
        self._gate = gate
        self._gamma = gamma
        self._recheck = recheck
        self._audit = audit

    def steps(self, tokens: Sequence[int], room: int) -> Steps[Emission]:
        """See `Strategy`."""
        bench, counters = self._bench, self._bench.counters
        counters.rounds += 1
        draft = yield from self._drafter.drafting(
            tokens, min(self._gamma, room), bench.sampler.ahead(tokens), bench.draws
        )
        counters.drafted += len(draft.tokens)
        if draft.tokens:
            draft = draft.first((yield Admission("drafter", "slim", draft.tokens, draft.evidence, draft.confidence)))
        if not draft.tokens:
            return (yield from full_step(bench, tokens))
        # Judging d_1 .. d_g needs the rows before each of them; the row after d_g is not looked at.
        logits = yield SlimPass(bench.target, [*tokens, *draft.tokens[:-1]], len(draft.tokens))
        judged = bench.sampler.ahead(tokens).block(logits, draft.tokens)
        slim = _Slim(logits, judged, bench.sampler.law(judged))
        walk = self._walk(draft, slim)
        counters.gated += len(walk.tokens)
        if walk.escalated:
            counters.escalated_rounds += 1
            return (yield from self._escalate(tokens, draft, slim, walk))
        if bench.draws.audit(self._audit):
            return (yield from self._audited(tokens, draft, slim, walk))
        return self._unseen(slim, walk)

    def _walk(self, draft: Draft, slim: _Slim) -> _Walk:
        standing: list[int] = []
        kept: list[bool] = []
        greedy = self._bench.sampler.greedy
        for i, decision in enumerate(self._gate.judge(slim.judged, draft)):
            drafted = draft.tokens[i]
            if decision is Decision.ESCALATE:
                return _Walk([*standing, drafted], [*kept, True], escalated=True)
            if decision is Decision.ACCEPT:
                standing.append(drafted)
                kept.append(True)
                continue
            token = self._bench.draws.token(slim.laws[i])
            standing.append(token)
            kept.append(token == drafted)
            # Above temperature 0 a rewrite ends the block even if it drew the drafted token again (its law is m either way).
            if not greedy or token != drafted:
                break
        return _Walk(standing, kept, escalated=False)

    def _unseen(self, slim: _Slim, walk: _Walk) -> Emission:
        """The gate's own outcome, without the full verifier."""
        counters = self._bench.counters
        counters.kept += sum(walk.kept)
        counters.rewrites += len(walk.kept) - sum(walk.kept)
        return Emission(walk.tokens, _tiers(walk), slim.logits[: len(walk.tokens)], list(walk.kept), len(walk.tokens))

    def _escalate(self, tokens: Sequence[int], draft: Draft, slim: _Slim, walk: _Walk) -> Steps[Emission]:
        """One full pass over everything it has not run, the rest of the block included; it decides from there."""
        first = len(walk.tokens) - 1
        block = [*walk.tokens, *draft.tokens[first + 1 :]]
        full = yield FullPass(self._bench.target, [*tokens, *block], len(block) + 1)
        laws = self._tentative_laws(draft, slim, len(walk.tokens))
        laws += [draft.rows[i] for i in range(first + 1, len(block))]
        kept = [*walk.kept, *[True] * (len(block) - len(walk.kept))]
        # From the whole block, not only up to the escalation: a guard that lets nothing pass yet escalates the first token
        # of every block, and would never hear of the later positions.
        self._learn(tokens, draft, slim, laws, full, block)
        if self._recheck:
            return self._tested(tokens, block, laws, full, kept, gated=len(walk.tokens))
        return self._decided_from(first, tokens, block, laws, full, kept)

    def _audited(self, tokens: Sequence[int], draft: Draft, slim: _Slim, walk: _Walk) -> Steps[Emission]:
        """A block that would have skipped q, judged by q all the same: recorded, learnt from and (recheck) corrected."""
        # A rewrite stands where the slim path ran the drafted token: what it left there must not be taken for the rewrite's.
        self._bench.target.settle([*tokens, *walk.tokens])
        full = yield FullPass(self._bench.target, [*tokens, *walk.tokens], len(walk.tokens) + 1)
        laws = self._tentative_laws(draft, slim, len(walk.tokens))
        # Before the gate learns from this very block.
        disagreement = self._disagreement(tokens, draft, slim, full, walk.tokens)
        self._learn(tokens, draft, slim, laws, full, walk.tokens)
        self._bench.counters.audit.blocks.append((len(walk.tokens), disagreement))
        if self._recheck:
            return self._tested(tokens, walk.tokens, laws, full, walk.kept, gated=len(walk.tokens))
        return self._unseen(slim, walk)

    def _tested(
        self, tokens: Sequence[int], block: list[int], laws: list[Row], full: Tensor, kept: list[bool], gated: int
    ) -> Emission:
        """Every token of the block against q, each with the law it was really drawn from."""
        bench = self._bench
        verdict, _ = judge_block(
            full, block, Rows.joined(laws), bench.sampler, bench.sampler.ahead(tokens), bench.draws
        )
        n = verdict.accepted
        self._count(n, kept, gated)
        tiers = ["drafter" if k else "slim" for k in kept[:n]] + ["full"]
        return Emission([*block[:n], verdict.token], tiers, full[: n + 1], [*kept[:n], False])

    def _decided_from(
        self, first: int, tokens: Sequence[int], block: list[int], laws: list[Row], full: Tensor, kept: list[bool]
    ) -> Emission:
        """Without recheck: tokens before `first` stand, q draws the one at `first`, and tests what follows it.

        The drafted token at `first` is known to lie in C, so its law is p restricted to C: it can't be tested as a draw
        from p. q draws afresh; if that gives the drafted token, the rest of the block is still a draw from p after it.
        """
        bench = self._bench
        ahead = bench.sampler.ahead(tokens)
        ahead.block(full[:first], block)
        token = bench.draws.token(ahead.row(full[first]))
        n = first
        if token == block[first]:
            rest = block[first + 1 :]
            ahead.push(token)
            verdict, _ = judge_block(
                full[first + 1 :],
                rest,
                Rows.joined(laws[first + 1 :]) if rest else Rows(tokens=()),
                bench.sampler,
                ahead,
                bench.draws,
            )
            n, token = first + 1 + verdict.accepted, verdict.token
        self._count(n, kept, gated=first + 1)
        tiers = ["drafter" if k else "slim" for k in kept[:n]] + ["full"]
        return Emission([*block[:n], token], tiers, full[: n + 1], [*kept[:n], False], unseen=first)

    def _count(self, accepted: int, kept: list[bool], gated: int) -> None:
        """Counts kept tokens; those behind the gate's last position were judged by q, up to the one it refused."""
        counters = self._bench.counters
        judged = min(accepted + 1, len(kept))
        counters.gated += max(0, judged - gated)
        counters.kept += sum(kept[:accepted])
        counters.rewrites += sum(not k for k in kept[: min(accepted, gated)])

    def _tentative_laws(self, draft: Draft, slim: _Slim, gated: int) -> list[Row]:
        """The law m of every gated position (`viasd.accept.gated_law`)."""
        if self._bench.sampler.greedy:
            return [draft.rows[i] for i in range(gated)]  # greedy verification asks for no laws
        return [gated_law(draft.rows[i], slim.laws[i], self._gate.sets(slim.judged, draft, i)[1]) for i in range(gated)]

    def _learn(
        self,
        tokens: Sequence[int],
        draft: Draft,
        slim: _Slim,
        laws: list[Row],
        full: Tensor,
        standing: list[int],
    ) -> None:
        """Tells the gate how far q agrees: at temperature 0 whether it would say the same, above it min(1, q / m)."""
        sampler, n = self._bench.sampler, len(standing)
        rows = sampler.law(sampler.ahead(tokens).block(full[:n], standing))
        q = rows.at(standing)
        if sampler.greedy:
            agreement = q
        else:
            agreement = [
                min(1.0, q_x / m_x) if m_x > 0 else 0.0
                for q_x, m_x in zip(q, (law.prob(t) for law, t in zip(laws, standing, strict=False)), strict=True)
            ]
        self._gate.learn(slim.judged, draft, standing, agreement)

    def _disagreement(
        self, tokens: Sequence[int], draft: Draft, slim: _Slim, full: Tensor, standing: list[int]
    ) -> float:
        """Summed disagreement of a block with q: tokens that q would not have said, or total variation L to q."""
        sampler, n = self._bench.sampler, len(standing)
        rows = sampler.law(sampler.ahead(tokens).block(full[:n], standing))
        if sampler.greedy:
            return float(n - sum(rows.at(standing)))
        assert rows.probs is not None
        total = 0.0
        for i in range(n):
            q = rows.probs[i]
            accept, rewrite = self._gate.sets(slim.judged, draft, i)
            law = emitted_law(draft.rows[i], slim.laws[i], q, accept, rewrite)
            total += min(1.0, float((law - q).abs().sum()) / 2)  # fp32 sums may pass 1 by their rounding
        return total


def emitted_law(p: Row, slim: Row, q: Tensor, accept: Tensor, rewrite: Tensor) -> Tensor:
    """Law of the token emitted at one gated position without recheck.

    ``L(x) = p(x) 1_A(x) + p(B) q'(x) + p(C) q(x)`` (VIA-SD's emission).

    Args:
        p: Law the token was drafted from.
        slim: Processed row of q'.
        q: Processed row ``[V]`` of q.
        accept: Membership ``[V]`` in A.
        rewrite: Membership ``[V]`` in B.
    """
    proposal = p.dense(q)
    kept = proposal * accept
    rewritten = (proposal * rewrite).sum()
    escalated = (proposal * ~(accept | rewrite)).sum()
    law: Tensor = kept + rewritten * slim.dense(q) + escalated * q
    return law


def _tiers(walk: _Walk) -> list[str]:
    return ["drafter" if kept else "slim" for kept in walk.kept]


__all__ = ["GatedCascade", "emitted_law"]
