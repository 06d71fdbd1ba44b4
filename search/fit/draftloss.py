"""How far a drafter's rows are from the target's, over a shortlist of words, with the gradient made on the spot.

Rows over thousands of words are the largest thing in training a small drafter, so they exist for some positions at a time:
loss and gradient are computed together and only the gradient of the hidden states is kept.

With z the drafter's logits over the shortlist, p = softmax(z), and q the target's probabilities of the same words (which sum
to Q <= 1, the rest being words that can't be drafted):

    KL      sum q (log q - log p)      d/dz = Q p - q
    accept  1 - sum min(p, q)          d/dz = p (c - [p < q]),  c = sum of p where p < q
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.linalg import vecdot

_ROWS = 128  # positions whose rows exist at one time

Rows = Callable[[Tensor], Tensor]


class Judged(NamedTuple):
    """Sums over n positions, of each step.

    Attributes:
        loss: What is to be minimised, mean over positions, ``[steps]``; carries the gradient.
        kl: Sum of KL(q || p) over the shortlist, in nats, ``[steps]``.
        accept: Sum of the accepted mass, sum min(p, q), ``[steps]``.
        agree: Positions at which both are surest of the same word, ``[steps]``; the target's is of the shortlist too.
    """

    loss: Tensor
    kl: Tensor
    accept: Tensor
    agree: Tensor


def judge(rows: Rows, outputs: Sequence[Tensor], teacher: Tensor, sums: Tensor, teach: Rows, weight: float) -> Judged:
    """Compares what a drafter says at n positions, by several ways of getting there, with what the target says.

    Args:
        rows: Hidden states of the drafter ``[n, k]`` -> logits over the shortlist ``[n, m]``.
        outputs: The drafter's hidden states ``[n, k]``, one tensor a step.
        teacher: The target's hidden states ``[n, d]``.
        sums: Log of the sum over its whole vocabulary, ``[n]``.
        teach: Hidden states of the target ``[n, d]`` -> logits over the shortlist.
        weight: Of the acceptance loss beside KL.
    """
    loss, kl, accept, agree = _Judge.apply(rows, teach, teacher, sums, weight, *outputs)
    return Judged(loss, kl, accept, agree)


class _Judge(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Rows, teach: Rows, teacher: Tensor, sums: Tensor, weight: float, *outputs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        n = teacher.shape[0]
        figures = torch.zeros(3, len(outputs))
        gradients = [torch.zeros_like(o, dtype=torch.float32) for o in outputs]
        for start in range(0, n, _ROWS):
            part = slice(start, start + _ROWS)
            logq = teach(teacher[part]) - sums[part, None]
            q = logq.exp()
            mass, entropy = q.sum(-1), vecdot(q, logq)
            best = logq.argmax(-1)
            for k, output in enumerate(outputs):
                with torch.enable_grad():
                    state = output[part].detach().requires_grad_()
                    z = rows(state)
                logp = torch.log_softmax(z.detach(), dim=-1)
                p = logp.exp()
                below = (p < q).to(p.dtype)
                share = vecdot(p, below)
                figures[0, k] += (entropy - vecdot(q, logp)).sum()
                figures[1, k] += (share + mass - vecdot(q, below)).sum()
                figures[2, k] += (logp.argmax(-1) == best).sum()
                # In place: these rows are most of what a step moves through memory.
                slope = below.mul_(-weight).add_((mass + weight * share)[:, None]).mul_(p).sub_(q)
                (gradient,) = torch.autograd.grad(z, state, slope.to(z.dtype))
                gradients[k][part] = gradient
        kl, accept, agree = figures
        ctx.gradients = [g / max(n, 1) for g in gradients]
        ctx.mark_non_differentiable(kl, accept, agree)
        return (kl + weight * (n - accept)) / max(n, 1), kl, accept, agree

    @staticmethod
    def backward(ctx: FunctionCtx, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor] = ctx.gradients  # type: ignore[attr-defined]
        return (*([None] * 5), *(g * s for g, s in zip(gradients, slopes[0], strict=True)))
