"""Rotary embeddings prepared once: one table per layer type, cut to the positions of a pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from viasd.attention import Step

_FIRST_CAPACITY = 512


class Rotation(NamedTuple):
    """Rotary embedding of n positions, for heads ``[n, H, D]``.

    Attributes:
        cos: ``[n, 1, D]``.
        sin: ``[n, 1, D]``, its first half negated, so that the halves need only change places.
    """

    cos: Tensor
    sin: Tensor

    def __call__(self, heads: Tensor) -> Tensor:
        """Heads ``[n, H, D]``, rotated."""
        return heads * self.cos + heads.roll(heads.shape[-1] // 2, dims=-1) * self.sin


class RotaryTable:
    """Rotations by position, computed by a model's own module and kept.

    Args:
        compute: Positions ``[1, n]`` and a layer type -> cos and sin, each ``[1, n, D]``.
        limit: The context length: the table does not grow beyond it unless a position does, because a module may change its
            frequencies for longer texts.
    """

    def __init__(self, compute: Callable[[Tensor, str], tuple[Tensor, Tensor]], limit: int) -> None:
        self._compute = compute
        self._limit = limit
        self._tables: dict[tuple[str, torch.device], Rotation] = {}

    def rotation(self, step: Step, kind: str, device: torch.device) -> Rotation:
        """The rotation of a pass's tokens in layers of type `kind`."""
        end = max(start + segment.length for start, segment in zip(step.starts, step.segments, strict=True))
        table = self.upto(end, kind, device)
        if len(step.segments) == 1:
            start = step.starts[0]
            return Rotation(table.cos[start:], table.sin[start:])
        positions = step.positions[0].to(device)
        return Rotation(table.cos[positions], table.sin[positions])

    def upto(self, end: int, kind: str, device: torch.device) -> Rotation:
        """The rotation of the positions below `end`, in layers of type `kind`."""
        table = self._tables.get((kind, device))
        if table is None or table.cos.shape[0] < end:
            table = self._tables[kind, device] = self._table(end, kind, device)
        return Rotation(table.cos[:end], table.sin[:end])

    def _table(self, end: int, kind: str, device: torch.device) -> Rotation:
        capacity = _FIRST_CAPACITY
        while capacity < end:
            capacity *= 2
        capacity = max(end, min(capacity, self._limit))
        # Kept beyond this pass, so these must be ordinary tensors even if the pass runs in inference mode.
        with torch.inference_mode(mode=False), torch.no_grad():
            cos, sin = self._compute(torch.arange(capacity, device=device)[None], kind)
            half = sin.shape[-1] // 2
            signed = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)
            return Rotation(cos[0][:, None], signed[:, None])
