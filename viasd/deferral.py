"""Target laws of the lossy baselines: when a drafter p may stand in for its verifier q, and what is then emitted.

Chow, Diff, OPT and the token rules V1 to V3 are those of Narasimhan et al., "Faster Cascades via Speculative Decoding"
(ICLR 2025), who also give the law of lossy speculative decoding. Each yields a law pi of the two rows at a position, and
speculative decoding with pi in q's place emits exactly pi. None but `lossy_law` bounds how far pi is from q.

All rows are ``[n, V]`` probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from viasd.errors import OptionError

_Refuses = Callable[[Tensor, Tensor, float], Tensor]


def _best(rows: Tensor) -> Tensor:
    return rows.amax(dim=-1, keepdim=True)


def _distance(p: Tensor, q: Tensor) -> Tensor:
    return (p - q).abs().sum(dim=-1, keepdim=True) / 2


# Whether q decides instead of p: once a position (Chow, Diff, OPT), or token by token (V1 to V3).
_REFUSES: dict[str, _Refuses] = {
    "chow": lambda p, q, alpha: _best(p) < 1 - alpha,
    "diff": lambda p, q, alpha: _best(p) < _best(q) - alpha,
    "opt": lambda p, q, alpha: _best(p) < _best(q) - alpha * _distance(p, q),
    "token-v1": lambda p, q, alpha: p < _best(q) - alpha,
    "token-v2": lambda p, q, alpha: q < _best(q) - alpha,
    "token-v3": lambda p, q, alpha: q < (1 - alpha) * _best(q),
}
RULES = tuple(_REFUSES)
#: Rules that read the drafter's own probabilities, which prompt lookup does not have.
READS_DRAFTER = ("chow", "diff", "opt", "token-v1")


@dataclass(frozen=True)
class DeferralRule:
    """A rule of Faster Cascades.

    Attributes:
        name: One of `RULES`.
        alpha: Its parameter, in ``[0, 1)``; larger ones defer less.

    Raises:
        OptionError: If the name is unknown or alpha out of range.
    """

    name: str
    alpha: float

    def __post_init__(self) -> None:
        if self.name not in _REFUSES:
            raise OptionError(f"a deferral rule must be one of {', '.join(RULES)}, but got '{self.name}'")
        if not 0 <= self.alpha < 1:
            raise OptionError(f"alpha must be at least 0 and below 1, but got {self.alpha:g}")

    def refuses(self, p: Tensor, q: Tensor) -> Tensor:
        """r: boolean ``[n, V]``, where a token drafted from p is left to q."""
        return _REFUSES[self.name](p, q, self.alpha).expand_as(q)

    def law(self, p: Tensor, q: Tensor) -> Tensor:
        """``pi = p (1 - r) + q sum_v r(v) p(v)``, ``[n, V]``."""
        inside = p * self.refuses(p, q)
        return p - inside + inside.sum(dim=-1, keepdim=True) * q


def lossy_law(p: Tensor, q: Tensor, alpha: float) -> Tensor:
    """Law ``pi = max(min(p, q / (1 - alpha)), q / beta)`` of lossy speculative decoding; beta makes it a distribution.

    A drafted token is kept with probability ``min(1, q / ((1 - alpha) p))``, and what is refused is drawn from
    ``norm(max(0, q / beta - p))``. pi is at most ``q / (1 - alpha)``, so its total variation to q is at most alpha.

    Args:
        p: ``[n, V]``.
        q: ``[n, V]``.
        alpha: In ``[0, 1)``; 0 gives q.
    """
    kept = torch.minimum(p, q / (1 - alpha))
    missing = (1 - kept.sum(dim=-1, keepdim=True)).clamp_min(0)
    # Raise s = 1 / beta until sum max(0, s q - p) is what was refused. That sum is linear in s between the ratios p / q, so
    # with the tokens in order of their ratio it is solved exactly.
    ratio, order = torch.where(q > 0, p / q, torch.inf).sort(dim=-1)
    mass_q, mass_p = q.gather(-1, order).cumsum(dim=-1), p.gather(-1, order).cumsum(dim=-1)
    at_ratio = torch.where(ratio.isfinite(), ratio * mass_q - mass_p, torch.inf)
    covered = (at_ratio <= missing).sum(dim=-1, keepdim=True).clamp_min(1) - 1
    scale = (missing + mass_p.gather(-1, covered)) / mass_q.gather(-1, covered)
    return torch.maximum(kept, scale * q)
