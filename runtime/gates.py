"""The gate of `via` mode: keep a drafted token, let the slim verifier rewrite it, or escalate to the full verifier."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from viasd.errors import OptionError
from viasd.runtime.drafters.base import Draft

# Paper thresholds (arXiv 2606.12243): theta_acc = 1 - min(alpha), theta_esc = 1 - max(alpha) with alpha = (0.5, 0.3).
THETA_ACC = 0.7
THETA_ESC = 0.5


class Decision(Enum):
    """What happens to a drafted token."""

    ACCEPT = "accept"
    REWRITE = "rewrite"
    ESCALATE = "escalate"


@dataclass(frozen=True)
class Thresholds:
    """The dual thresholds on ``r(v) = q'(v) / max q'``.

    Attributes:
        accept: At or above it the drafted token stays.
        escalate: Below it the full verifier decides; in between the slim verifier rewrites.

    Raises:
        OptionError: Unless ``0 <= escalate < accept <= 1``.
    """

    accept: float = THETA_ACC
    escalate: float = THETA_ESC

    def __post_init__(self) -> None:
        if not 0 <= self.escalate < self.accept <= 1:
            raise OptionError(
                "thresholds must satisfy 0 <= theta_esc < theta_acc <= 1, but got "
                f"theta_esc {self.escalate:g} and theta_acc {self.accept:g}"
            )

    @classmethod
    def from_alphas(cls, alpha1: float, alpha2: float) -> Thresholds:
        """From the paper's pair: ``theta_acc = 1 - min(alpha)``, ``theta_esc = 1 - max(alpha)``."""
        return cls(1 - min(alpha1, alpha2), 1 - max(alpha1, alpha2))

    def decide(self, ratio: float) -> Decision:
        """The gate on one token's ratio (NaN escalates)."""
        if ratio >= self.accept:
            return Decision.ACCEPT
        return Decision.REWRITE if ratio >= self.escalate else Decision.ESCALATE


def log_ratios(slim_logits: Tensor, tokens: list[int]) -> list[float]:
    """``log r`` of ``tokens[i]`` under row i of raw logits ``[g, V]``: 0 for the row's argmax, negative otherwise."""
    index = torch.as_tensor(tokens, device=slim_logits.device)
    rows = slim_logits[: len(tokens)]
    return (rows.gather(1, index[:, None])[:, 0] - rows.amax(dim=-1)).tolist()


class Gate(Protocol):
    """Judges a drafted block by the slim verifier's rows after the request's logits processors. q is not consulted.

    Without processors these are the raw rows of the paper; with them a penalised or banned token is judged as one.
    """

    def judge(self, slim_logits: Tensor, draft: Draft) -> list[Decision]:
        """One decision a token of the draft; rows are logits ``[g, V]``, no warpers applied."""
        ...

    def sets(self, slim_logits: Tensor, draft: Draft, position: int) -> tuple[Tensor, Tensor]:
        """Membership ``[V]`` of every token in the accept set A and the rewrite set B at one position of the draft."""
        ...

    def learn(self, slim_logits: Tensor, draft: Draft, tokens: list[int], agreement: list[float]) -> None:
        """Hears how far q agreed (0 to 1) with what stood at the first positions of the block.

        Args:
            slim_logits: Rows ``[g, V]`` the block was judged by.
            draft: The block.
            tokens: Tentative tokens, one per agreement; a rewrite differs from the draft's own.
            agreement: What q says of each.
        """
        ...


class RatioGate:
    """The paper's gate: fixed thresholds and nothing else. There is no bound on what it lets pass."""

    def __init__(self, thresholds: Thresholds) -> None:
        self.thresholds = thresholds

    def judge(self, slim_logits: Tensor, draft: Draft) -> list[Decision]:
        """See `Gate`."""
        ratios = torch.tensor(log_ratios(slim_logits, draft.tokens), dtype=torch.float64).exp().tolist()
        return [self.thresholds.decide(r) for r in ratios]

    def sets(self, slim_logits: Tensor, draft: Draft, position: int) -> tuple[Tensor, Tensor]:
        """See `Gate`."""
        log_ratio = slim_logits[position] - slim_logits[position].max()
        # In the precision of `judge`: a token on a threshold must fall on the same side of it in both.
        ratio = (log_ratio if log_ratio.device.type == "mps" else log_ratio.double()).exp()
        accept = ratio >= self.thresholds.accept
        return accept, (ratio >= self.thresholds.escalate) & ~accept

    def learn(self, slim_logits: Tensor, draft: Draft, tokens: list[int], agreement: list[float]) -> None:
        """See `Gate`. Thresholds do not learn."""
