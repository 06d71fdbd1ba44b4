"""Two tiers with another law than q in the verifier's place: lossy speculative decoding and the rules of Faster Cascades."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from viasd.accept import acceptance, residual
from viasd.deferral import DeferralRule, lossy_law
from viasd.rows import Row, Rows
from viasd.runtime.drafters.base import Draft, Drafter
from viasd.runtime.passes import FullPass, Steps
from viasd.runtime.strategies.base import Emission, SteppedStrategy, Workbench, full_step


@dataclass(frozen=True)
class Judged:
    """A drafted block and what both models say along it.

    Attributes:
        tokens: The n drafted tokens.
        p: The n laws they were drawn from.
        q: The verifier's n processed laws.
        soft_p: The drafter's probabilities ``[n, V]`` after the request's processors but before temperature and filters, or
            None where the drafter has no model; at temperature 0 the laws are one-hot and say nothing of confidence.
        soft_q: The verifier's.
        greedy: Whether the temperature is 0.
    """

    tokens: Sequence[int]
    p: Rows
    q: Rows
    soft_p: Tensor | None
    soft_q: Tensor
    greedy: bool


TargetLaw = Callable[[Judged], list[Row]]


def rule_law(rule: DeferralRule) -> TargetLaw:
    """The law of a deferral rule, position by position.

    Above temperature 0 the rule reads the processed laws. At temperature 0 it reads the probabilities before temperature,
    and what it lets stand is the drafter's argmax, what it defers the verifier's.
    """

    def law(block: Judged) -> list[Row]:
        if not block.greedy:
            q = _dense(block.q)
            pi = rule.law(torch.stack([block.p[i].dense(q[i]) for i in range(len(q))]), q)
            return [Row(probs=row) for row in pi]
        soft_p = block.soft_q if block.soft_p is None else block.soft_p  # a rule that reads p is given one
        refused = rule.refuses(soft_p, block.soft_q)
        deferred: list[bool] = refused[torch.arange(len(block.tokens)), list(block.tokens)].tolist()
        return [block.q[i] if defer else Row(token=block.tokens[i]) for i, defer in enumerate(deferred)]

    return law


def lossy(alpha: float) -> TargetLaw:
    """The law of lossy speculative decoding (`viasd.deferral.lossy_law`).

    At temperature 0 a drafted token x stays iff ``q(x) >= (1 - alpha) max q``.
    """

    def law(block: Judged) -> list[Row]:
        if not block.greedy:
            q = _dense(block.q)
            pi = lossy_law(torch.stack([block.p[i].dense(q[i]) for i in range(len(q))]), q, alpha)
            return [Row(probs=row) for row in pi]
        soft = block.soft_q
        drafted = soft[torch.arange(len(block.tokens)), list(block.tokens)]
        stays: list[bool] = (drafted >= (1 - alpha) * soft.amax(dim=-1)).tolist()
        return [Row(token=block.tokens[i]) if stay else block.q[i] for i, stay in enumerate(stays)]

    return law


class DeferringDecoding(SteppedStrategy):
    """Speculative decoding towards a law pi of the rows p and q: what it emits has law pi exactly.

    No bonus token follows an accepted block: its law pi would need a row of the drafter that was never asked for.

    Args:
        bench: What the request works with.
        drafter: Source of proposals. Where it proposes nothing, the verifier decides alone.
        law: The target law.
        gamma: Longest block.
    """

    def __init__(self, bench: Workbench, drafter: Drafter, law: TargetLaw, *, gamma: int) -> None:
        self._bench = bench
        self._drafter = drafter
        self._law = law
        self._gamma = gamma

    def steps(self, tokens: Sequence[int], room: int) -> Steps[Emission]:
        """See `Strategy`."""
        bench, counters = self._bench, self._bench.counters
        counters.rounds += 1
        draft = yield from self._drafter.drafting(
            tokens, min(self._gamma, room), bench.sampler.ahead(tokens), bench.draws
        )
        n = len(draft.tokens)
        if not n:
            return (yield from full_step(bench, tokens))
        counters.drafted += n
        logits = yield FullPass(bench.target, [*tokens, *draft.tokens[:-1]], n)
        laws = self._law(self._judged(tokens, draft, logits))
        for i, (token, law) in enumerate(zip(draft.tokens, laws, strict=True)):
            if bench.draws.accept(acceptance(law.prob(token), draft.rows[i].prob(token))):
                continue
            counters.gated += i + 1
            counters.kept += i
            drawn = bench.draws.token(residual(law, draft.rows[i]))
            return Emission(
                [*draft.tokens[:i], drawn], ["drafter"] * i + ["full"], logits[: i + 1], [*[True] * i, False]
            )
        counters.gated += n
        counters.kept += n
        return Emission(list(draft.tokens), ["drafter"] * n, logits, [True] * n)

    def _judged(self, tokens: Sequence[int], draft: Draft, logits: Tensor) -> Judged:
        sampler = self._bench.sampler
        processed = sampler.ahead(tokens).block(logits, draft.tokens)
        soft_p = None
        if sampler.greedy and draft.logits:
            raw = torch.stack(list(draft.logits)).to(logits.device)
            soft_p = torch.softmax(sampler.ahead(tokens).block(raw, draft.tokens), dim=-1)
        return Judged(
            tokens=draft.tokens,
            p=draft.rows,
            q=sampler.law(processed),
            soft_p=soft_p,
            soft_q=torch.softmax(processed, dim=-1),
            greedy=sampler.greedy,
        )


def _dense(rows: Rows) -> Tensor:
    assert rows.probs is not None
    return rows.probs
