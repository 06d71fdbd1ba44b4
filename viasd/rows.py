"""Next-token laws as rows: one-hot (greedy decoding, prompt lookup) or dense probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def likeliest(rows: Tensor) -> list[int]:
    """Column of the largest value of each row ``[n, V]``, of several the first: as `argmax`, which takes longer on a CPU."""
    if rows.device.type != "cpu" or rows.dtype is torch.bfloat16:
        found: list[int] = rows.argmax(dim=-1).tolist()
    else:
        found = rows.detach().numpy().argmax(axis=-1).tolist()
    return found


@dataclass(frozen=True)
class Row:
    """One next-token law.

    Exactly one of the two is set: `token` for a law that puts all its mass there, `probs` (``[V]``) otherwise.
    """

    token: int | None = None
    probs: Tensor | None = None

    def prob(self, token: int) -> float:
        """Probability of a token."""
        if self.probs is None:
            return float(token == self.token)
        return float(self.probs[token])

    def dense(self, like: Tensor) -> Tensor:
        """The row as probabilities, shaped as `like` (``[V]``)."""
        if self.probs is not None:
            return self.probs.to(like.device)  # drafter and target may sit on different devices
        row = torch.zeros_like(like)
        row[self.token] = 1
        return row


@dataclass(frozen=True)
class Rows:
    """The laws of consecutive positions, kept together so that reading them costs one transfer."""

    tokens: tuple[int, ...] | None = None
    probs: Tensor | None = None

    @classmethod
    def one_hot(cls, tokens: Sequence[int]) -> Rows:
        """Rows that each put all mass on one token."""
        return cls(tokens=tuple(tokens))

    @classmethod
    def joined(cls, rows: Sequence[Row]) -> Rows:
        """From single rows of one kind; a mixture of kinds becomes dense."""
        dense = next((r.probs for r in rows if r.probs is not None), None)
        if dense is None:
            return cls(tokens=tuple(int(r.token) for r in rows if r.token is not None))
        return cls(probs=torch.stack([r.dense(dense) for r in rows]))

    def __len__(self) -> int:
        return len(self.tokens) if self.tokens is not None else self.probs.shape[0]  # type: ignore[union-attr]

    def __getitem__(self, index: int) -> Row:
        if self.tokens is not None:
            return Row(token=self.tokens[index])
        assert self.probs is not None
        return Row(probs=self.probs[index])

    def first(self, n: int) -> Rows:
        """The first n rows."""
        if self.tokens is not None:
            return Rows(tokens=self.tokens[:n])
        assert self.probs is not None
        return Rows(probs=self.probs[:n])

    def at(self, tokens: Sequence[int]) -> list[float]:
        """Probability of ``tokens[i]`` under row i."""
        if self.tokens is not None:
            return [float(a == b) for a, b in zip(self.tokens, tokens, strict=False)]
        assert self.probs is not None
        index = torch.as_tensor(list(tokens), device=self.probs.device)
        return self.probs[: len(tokens)].gather(1, index[:, None])[:, 0].tolist()
