"""Randomness of one request, in separate streams, so that a feature that should not matter can't shift another's draws."""

from __future__ import annotations

import random
from typing import Protocol

import torch

from viasd.rows import Row


class Draws(Protocol):
    """Everything random that decoding does. Tests replace it to enumerate every outcome."""

    def token(self, row: Row) -> int:
        """Draws from a verifier's row (bonus, residual, rewrite, plain decoding)."""
        ...

    def draft(self, row: Row) -> int:
        """Draws a drafter's token."""
        ...

    def accept(self, probability: float) -> bool:
        """Accept test of one token."""
        ...

    def audit(self, probability: float) -> bool:
        """Whether a block is audited."""
        ...


class SeededDraws:
    """Draws from one seed, with one stream each for drafting, accepting, verifier tokens and audits.

    Args:
        seed: Any integer. The same seed gives the same draws on every device.
    """

    def __init__(self, seed: int) -> None:
        self._token = random.Random(f"{seed}:token")
        self._draft = random.Random(f"{seed}:draft")
        self._accept = random.Random(f"{seed}:accept")
        self._audit = random.Random(f"{seed}:audit")

    def token(self, row: Row) -> int:
        """See `Draws`."""
        return _inverse_cdf(row, self._token)

    def draft(self, row: Row) -> int:
        """See `Draws`."""
        return _inverse_cdf(row, self._draft)

    def accept(self, probability: float) -> bool:
        """See `Draws`. Always consumes one number, so that a certain test does not shift later ones."""
        return self._accept.random() < probability

    def audit(self, probability: float) -> bool:
        """See `Draws`."""
        return self._audit.random() < probability


def _inverse_cdf(row: Row, stream: random.Random) -> int:
    """One token by inverting the cumulative distribution; a token of probability 0 is never returned."""
    u = stream.random()
    if row.probs is None:
        assert row.token is not None
        return row.token
    precise = torch.float32 if row.probs.device.type == "mps" else torch.float64
    cumulative = row.probs.cumsum(0, dtype=precise)
    total = cumulative[-1]
    # `right=True` steps over tokens whose cumulative value equals u, that is, over tokens of probability 0. Rounding may
    # put u * total at the very top: clamp to the last token that has mass.
    index = torch.searchsorted(cumulative, (u * total).reshape(1), right=True)
    last = torch.searchsorted(cumulative, total.reshape(1))
    return int(torch.minimum(index, last))
