"""How far a drafter P is from its verifier Q, token by token, and what that costs in time.

`log_p` and `log_q` are `[N, V]` logits or log-probabilities (log-softmax is applied to both and changes only the
former), one row a token. They are read in chunks of rows, so that bf16 input never exists as one `[N, V]` fp32 copy.
Results are `[N]` fp32 (fp64 for fp64 input). Log-probabilities are floored at -50: a banned token costs much, not
infinitely much.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import torch

from viasd.errors import OptionError

LOG_FLOOR = -50.0
_CHUNK_ELEMENTS = 1 << 22  # rows * V of one fp32 temporary: 16 MiB, a few of which are alive at once

_RowFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def stage_cost(log_p: torch.Tensor, log_q: torch.Tensor, alpha: float = 0.5, beta: float = 0.5) -> torch.Tensor:
    """Routing cost of a stage in VIA-SD (arXiv 2606.12243).

    `R(P||Q) = sum P relu(log(1-alpha) + log P/Q) + sum Q relu(log beta + log P/Q)`.
    The first term is at least the lossy rejection rate `sum max(0, P - Q/(1-alpha))`. R = 0 does not imply P = Q:
    break ties by `kl`.

    Args:
        log_p: `[N, V]`, the stage's drafter.
        log_q: `[N, V]`, its verifier.
        alpha: In (0, 1]; 1 drops the first term.
        beta: In (0, 1]; the theory needs `beta >= 1 - alpha`, less is allowed with a warning.

    Returns:
        `[N]` costs in nats, at least 0.

    Raises:
        OptionError: alpha or beta is outside (0, 1].
    """
    for name, value in (("alpha", alpha), ("beta", beta)):
        if not 0 < value <= 1:
            raise OptionError(f"{name} must be in (0, 1], but got {value}")
    if beta < 1 - alpha:
        warnings.warn(
            f"stage_cost expects 1 - alpha <= beta <= 1, but got alpha={alpha}, beta={beta}: the cost no longer bounds "
            "a lossy rejection rate",
            stacklevel=2,
        )
    keep = math.log1p(-alpha) if alpha < 1 else -math.inf

    def rows(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        ratio = p - q
        return (p.exp() * (ratio + keep).relu() + q.exp() * (ratio + math.log(beta)).relu()).sum(-1)

    return _by_chunk(rows, log_p, log_q)


def stage_figures(log_p: torch.Tensor, log_q: torch.Tensor, alpha: float = 0.5, beta: float = 0.5) -> torch.Tensor:
    """`[N, 3]`: `stage_cost`, `kl` and `total_variation`, reading both rows once instead of three times.

    Unlike `stage_cost` it expects alpha and beta to be sound and says nothing.
    """
    keep = math.log1p(-alpha) if alpha < 1 else -math.inf

    def rows(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        ratio, p, q = p - q, p.exp(), q.exp()
        divergence = torch.linalg.vecdot(p, ratio)
        distance = (p - q).abs().sum(-1) / 2
        cost = torch.linalg.vecdot(p, (ratio + keep).relu_()) + torch.linalg.vecdot(
            q, ratio.add_(math.log(beta)).relu_()
        )
        return torch.stack([cost, divergence, distance], dim=-1)

    return _by_chunk(rows, log_p, log_q)


def total_variation(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """`[N]` total variation distance `sum |P - Q| / 2`, in [0, 1]."""
    return _by_chunk(lambda p, q: (p.exp() - q.exp()).abs().sum(-1) / 2, log_p, log_q)


def kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """`[N]` Kullback-Leibler divergence `sum P log(P/Q)` in nats, at most 50 because of the floor."""
    return _by_chunk(lambda p, q: (p.exp() * (p - q)).sum(-1), log_p, log_q)


def accept_mass(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """`[N]` probability `sum min(P, Q) = 1 - TV` that speculative sampling keeps a token drawn from P."""
    return _by_chunk(lambda p, q: torch.minimum(p, q).exp().sum(-1), log_p, log_q)


def rejection_rate(log_p: torch.Tensor, log_q: torch.Tensor, alpha: float = 0.0) -> torch.Tensor:
    """`[N]` lossy rejection rate `sum max(0, P - Q/(1-alpha))` (Faster Cascades, ICLR 2025).

    alpha = 0 is the lossless rate, `1 - accept_mass`.

    Raises:
        OptionError: alpha is outside [0, 1).
    """
    if not 0 <= alpha < 1:
        raise OptionError(f"alpha must be in [0, 1), but got {alpha}")
    return _by_chunk(lambda p, q: (p.exp() - q.exp() / (1 - alpha)).relu().sum(-1), log_p, log_q)


def expected_tokens(rejection: float, gamma: float) -> float:
    """Tokens a round of gamma drafted ones emits, bonus included, each refused with probability R independently.

    `(1 - (1-R)^(gamma+1)) / R`, gamma + 1 at R = 0. `gamma` may be a mean number of tokens.

    Raises:
        OptionError: rejection is outside [0, 1] or gamma below 0.
    """
    if not 0 <= rejection <= 1 or gamma < 0:
        raise OptionError(f"rejection must be in [0, 1] and gamma at least 0, but got {rejection} and {gamma}")
    if rejection in (0, 1):
        return 1.0 + gamma * (1 - rejection)
    # Written so that it keeps its digits next to R = 0.
    return -math.expm1((gamma + 1) * math.log1p(-rejection)) / rejection


def predicted_seconds_sd(rejection: float, gamma: float, c_p: float, c_q: float) -> float:
    """Seconds per token of two-tier speculative decoding, `(gamma c_p + c_q) / E(R)`.

    Args:
        rejection: R of drafter against full verifier.
        gamma: Drafted tokens per round, or their mean number.
        c_p: Seconds of one drafter step.
        c_q: Seconds of one full pass over gamma + 1 tokens.
    """
    return (gamma * c_p + c_q) / expected_tokens(rejection, gamma)


def predicted_seconds_cascade(
    rejection: float, gamma: int, c_p: float, c_slim: float, escalation_share: float, c_escalation: float
) -> float:
    """Seconds per token with a slim verifier in the middle, `(gamma c_p + c_slim + P_esc c_esc) / E(R)`.

    Args:
        rejection: R of drafter against the gate of the slim verifier.
        gamma: Drafted tokens per round.
        c_p: Seconds of one drafter step.
        c_slim: Seconds of one slim pass over gamma + 1 tokens.
        escalation_share: Measured share of rounds that call the full verifier, in [0, 1].
        c_escalation: Seconds of such a call: the layers after the shared prefix and the back-fill.

    Raises:
        OptionError: rejection or escalation_share is outside [0, 1] or gamma below 0.
    """
    if not 0 <= escalation_share <= 1:
        raise OptionError(f"escalation_share must be in [0, 1], but got {escalation_share}")
    return (gamma * c_p + c_slim + escalation_share * c_escalation) / expected_tokens(rejection, gamma)


def _by_chunk(function: _RowFunction, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    if log_p.dim() != 2 or log_p.shape != log_q.shape:
        raise ValueError(f"P and Q must both be [N, V], but got {tuple(log_p.shape)} and {tuple(log_q.shape)}")
    rows = max(1, _CHUNK_ELEMENTS // max(1, log_p.shape[1]))
    parts = [
        function(_log_softmax(p), _log_softmax(q)) for p, q in zip(log_p.split(rows), log_q.split(rows), strict=True)
    ]
    return torch.cat(parts)


def _log_softmax(rows: torch.Tensor) -> torch.Tensor:
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    return torch.log_softmax(rows, dim=-1, dtype=dtype).clamp_(min=LOG_FLOOR)
