"""Key/value buffers that outlive their sequence, so that a captured pass finds the next one's at the address it knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Slot(NamedTuple):
    """Place of a buffer. It goes to the same layer again, or a captured pass would have to be recorded anew."""

    layer: int
    what: str
    capacity: int


class BufferPool:
    """Buffers of sequences that are over or have outgrown them, the last one given back first.

    It holds what the sequences alive at one time needed at most, and never gives memory back.
    """

    def __init__(self) -> None:
        self._free: dict[Slot, list[Tensor]] = {}

    def take(self, slot: Slot, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A buffer of zeros, with dtype and device of `like`."""
        free = self._free.get(slot)
        if free:
            return free.pop().zero_()
        # An ordinary tensor whatever the mode: compiled code tells inference tensors apart.
        with torch.inference_mode(mode=False):
            buffer = torch.zeros(shape, dtype=like.dtype, device=like.device)
        torch._dynamo.mark_static_address(buffer)
        return buffer

    def give(self, slot: Slot, buffer: Tensor) -> None:
        """Takes a buffer back."""
        self._free.setdefault(slot, []).append(buffer)

    def give_all(self, what: str, buffers: Sequence[Tensor | None]) -> None:
        """Takes back what a sequence had, one buffer a layer."""
        for layer, buffer in enumerate(buffers):
            if buffer is not None:
                self.give(Slot(layer, what, buffer.shape[2]), buffer)
