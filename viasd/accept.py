"""Accepting a proposal so that what comes out has the verifier's law (or is within a stated distance of it).

p is the law a token was really drawn from, q the law to reproduce. Rules: Leviathan et al. 2023 and Chen et al. 2023 for
the exact test; Narasimhan et al., "Faster Cascades via Speculative Decoding", ICLR 2025, for the lossy one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from viasd.draws import Draws
from viasd.rows import Row, Rows, likeliest


@dataclass(frozen=True)
class Verdict:
    """What a verifier makes of a proposed block.

    Attributes:
        accepted: Length of the accepted prefix.
        token: The token the verifier adds: a residual draw where it refused, the bonus where it accepted everything.
    """

    accepted: int
    token: int


def acceptance(q: float, p: float, alpha: float = 0.0) -> float:
    """Probability of keeping a token that has probability `p` in the proposal and `q` in the target.

    ``min(1, q / ((1 - alpha) p))``. With ``alpha = 0`` the outcome has law q; otherwise its total variation distance to q
    is at most alpha, and its probabilities are at most ``q / (1 - alpha)``.
    """
    return 1.0 if q >= (1 - alpha) * p else q / ((1 - alpha) * p)


def residual(q: Row, p: Row) -> Row:
    """The law to draw from after a refusal: ``norm(max(0, q - p))``, or q where that is zero everywhere."""
    if q.probs is None:
        # All of q's mass sits on one token: either p misses it (the residual is q) or covers it (it is zero: q again).
        return q
    rest = q.probs - p.dense(q.probs)
    rest = rest.clamp_min(0)
    total = rest.sum()
    return q if float(total) <= 0 else Row(probs=rest / total)


def overlaps(p: Rows, q: Rows, n: int) -> list[float]:
    """Chances that a token drawn from `p` is kept by `q`, ``sum_v min(p, q)``, at the first n positions."""
    if p.probs is not None and q.probs is not None:
        shared = torch.minimum(p.probs[:n].to(q.probs.device), q.probs[:n]).sum(dim=-1)
        found: list[float] = shared.clamp(0.0, 1.0).tolist()
        return found
    if p.tokens is not None and q.tokens is not None:
        return [float(a == b) for a, b in zip(p.tokens[:n], q.tokens[:n], strict=True)]
    sharp, broad = (p, q) if p.tokens is not None else (q, p)
    assert sharp.tokens is not None
    return broad.at(sharp.tokens[:n])


def verify(tokens: Sequence[int], p: Rows, q: Rows, draws: Draws, alpha: float = 0.0) -> Verdict:
    """Tests a proposed block in order.

    Args:
        tokens: Proposed tokens, n of them, ``tokens[i]`` drawn from ``p[i]``.
        p: The n laws they were drawn from.
        q: The ``n + 1`` laws of the verifier at these positions and after them.
        draws: Source of randomness.
        alpha: Lossy acceptance; 0 is exact.

    Returns:
        The accepted prefix and the token that follows it, which together have law q (for ``alpha = 0``).
    """
    for i, (q_x, p_x) in enumerate(zip(q.at(tokens), p.at(tokens), strict=True)):
        if not draws.accept(acceptance(q_x, p_x, alpha)):
            return Verdict(i, draws.token(residual(q[i], p[i])))
    return Verdict(len(tokens), draws.token(q[len(tokens)]))


def verify_greedy(tokens: Sequence[int], logits: Tensor, alpha: float = 0.0) -> Verdict:
    """Tests a proposed block at temperature 0.

    Keeps a token x iff ``q(x) >= (1 - alpha) max q``: with ``alpha = 0`` the outcome is plain greedy decoding (ties go to
    the lowest id).

    Args:
        tokens: Proposed tokens, n of them.
        logits: The verifier's logits ``[n + 1, V]`` after the request's processors.
        alpha: In ``[0, 1)``.
    """
    n, choices = len(tokens), likeliest(logits)
    if alpha > 0 and n:
        best, index = (torch.as_tensor(ids, device=logits.device) for ids in (choices, list(tokens)))
        gap = (logits[:n].gather(1, index[:, None]) - logits[:n].gather(1, best[:n, None]))[:, 0]
        near: list[bool] = (gap >= torch.log1p(torch.tensor(-alpha, dtype=gap.dtype, device=gap.device))).tolist()
    else:
        near = [False] * n
    for i, token in enumerate(tokens):
        if token != choices[i] and not near[i]:
            return Verdict(i, choices[i])
    return Verdict(n, choices[n])


def gated_law(p: Row, slim: Row, rewrite: Tensor) -> Row:
    """Law m of the tentative token at a gated position.

    ``m(x) = p(x) [x not in B] + p(B) q'(x)``: a drafted token outside the rewrite set B stays, one inside is replaced by a
    draw from q'. It is the law to test against, also when the token happened to be accepted.

    Args:
        p: Law the token was drafted from.
        slim: Processed row q' of the slim verifier.
        rewrite: Boolean ``[V]``, membership in B.
    """
    if p.probs is None:
        assert p.token is not None
        return slim if bool(rewrite[p.token]) else p
    proposal = p.probs.to(rewrite.device)
    inside = proposal * rewrite
    mass = inside.sum()
    return Row(probs=proposal - inside + mass * slim.dense(proposal))
