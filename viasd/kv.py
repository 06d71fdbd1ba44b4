"""Key/value buffers of one sequence in one model, with two watermarks instead of crops and copies."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import numpy as np
from torch import Tensor

from viasd.buffers import BufferPool, Slot

_FIRST_CAPACITY = 256


def capacity(length: int) -> int:
    """Positions that a buffer for `length` of them has, once it has grown to hold them."""
    held = _FIRST_CAPACITY
    while held < length:
        held *= 2
    return held


class SequenceKV:
    """Keys and values of one sequence, layer by layer, at explicit positions.

    A layer's buffer is allocated on its first write, on the device and in the dtype of what is written (so sharded
    models work), and grows by doubling. Nothing is ever cropped: rolling back moves an integer, and what lies above it
    is overwritten before attention can read it.

    Args:
        n_layers: Layers of the model.
        pool: Where buffers come from and go back to; None allocates them.

    Attributes:
        full_len: Positions ``[0, full_len)`` hold keys and values of the full path, in every layer.
        slim_len: Positions ``[full_len, slim_len)`` hold those of the slim path, in the layers its route keeps.
            Never below `full_len`.
        boundary: Hidden states ``[1, slim_len - full_len, d]`` of the pending positions at the route's first gap. Up to
            there the slim path computed exactly what the full path would have, so the full path can start from them.
            None when nothing is pending.
        table: Where each layer's buffers are: addresses of keys and values, and positions that both have room for,
            int64 ``[n_layers, 3]``; zeros before a layer's first write. For kernels that run many layers in one call.
    """

    def __init__(self, n_layers: int, pool: BufferPool | None = None) -> None:
        self.full_len = 0
        self.slim_len = 0
        self.boundary: Tensor | None = None
        self._keys: list[Tensor | None] = [None] * n_layers
        self._values: list[Tensor | None] = [None] * n_layers
        self.table = np.zeros((n_layers, 3), dtype=np.int64)
        self._pool = pool
        if pool is not None:
            for what, buffers in (("keys", self._keys), ("values", self._values)):
                weakref.finalize(self, pool.give_all, what, buffers).atexit = False

    @property
    def pending(self) -> int:
        """Positions that the slim path has run and the full path has not."""
        return self.slim_len - self.full_len

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores ``[H_kv, n, D]`` keys and values at ``start`` and returns views of everything up to their end.

        Args:
            layer: Index of the layer in the model.
            start: Position of the first of the n tokens. Positions below it must have been written before.
            keys: Rotated keys, ``[H_kv, n, D]``.
            values: Values, ``[H_kv, n, D_v]``.

        Returns:
            Views ``[1, H_kv, start + n, D]`` and ``[1, H_kv, start + n, D_v]`` into the buffers.
        """
        end = start + keys.shape[1]
        key_buffer = self._grown("keys", layer, end, start, keys)
        value_buffer = self._grown("values", layer, end, start, values)
        key_buffer[0, :, start:end] = keys
        value_buffer[0, :, start:end] = values
        return key_buffer[:, :, :end], value_buffer[:, :, :end]

    def read(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """Views ``[1, H_kv, end, D]`` of the keys and values of positions below `end`, which must have been written."""
        keys, values = self._keys[layer], self._values[layer]
        assert keys is not None
        assert values is not None
        return keys[:, :, :end], values[:, :, :end]

    def reserve(self, layers: Iterable[int], start: int, end: int) -> list[tuple[Tensor, Tensor]] | None:
        """Buffers of layers with room for positions below `end`, all of one capacity.

        Args:
            layers: Indices of the layers.
            start: Positions below it are kept where a buffer has to grow.
            end: Positions that must fit.

        Returns:
            Keys ``[1, H_kv, C, D]`` and values ``[1, H_kv, C, D_v]`` per layer; None if one of them has never been written.
        """
        held = [(layer, self._keys[layer], self._values[layer]) for layer in layers]
        views = []
        room = max((end, *(keys.shape[2] for _, keys, _ in held if keys is not None)))
        for layer, keys, values in held:
            if keys is None or values is None:
                return None
            grown = [self._grown(what, layer, room, start, own) for what, own in (("keys", keys), ("values", values))]
            views.append((grown[0], grown[1]))
        return views

    def room(self, layer: int, start: int, end: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's buffers with room for positions below `end`, for a kernel that writes them itself.

        Args:
            layer: Index of the layer in the model.
            start: First position that will be written; those below it are kept where a buffer has to grow.
            end: Positions that must fit.
            keys: Any tensor of the right heads, width, dtype and device, ``[H_kv, n, D]``.
            values: Likewise.

        Returns:
            Keys ``[1, H_kv, C, D]`` and values ``[1, H_kv, C, D_v]``, contiguous.
        """
        return self._grown("keys", layer, end, start, keys), self._grown("values", layer, end, start, values)

    def _grown(self, what: str, layer: int, end: int, keep: int, like: Tensor) -> Tensor:
        """A layer's buffer with room for `end` positions, heads and dtype as those of `like` ``[..., H_kv, n, D]``."""
        buffers = self._keys if what == "keys" else self._values
        buffer = buffers[layer]
        if buffer is not None and buffer.shape[2] >= end:
            return buffer
        capacity = _FIRST_CAPACITY if buffer is None else buffer.shape[2]
        while capacity < end:
            capacity *= 2
        shape = (1, like.shape[-3], capacity, like.shape[-1])
        # Zeros, not empty: uninitialised memory may hold NaN, and 0 x NaN is NaN under an additive mask.
        grown = (
            like.new_zeros(shape) if self._pool is None else self._pool.take(Slot(layer, what, capacity), shape, like)
        )
        buffers[layer] = grown
        self.table[layer, 0 if what == "keys" else 1] = grown.data_ptr()
        pair = self._keys[layer], self._values[layer]
        self.table[layer, 2] = min(0 if held is None else held.shape[2] for held in pair)
        if buffer is not None:
            grown[:, :, :keep] = buffer[:, :, :keep]
            if self._pool is not None:
                self._pool.give(Slot(layer, what, buffer.shape[2]), buffer)
        return grown

    def roll_back(self, length: int) -> None:
        """Forgets every position from `length` on; later positions are simply overwritten."""
        if length >= self.slim_len:
            return
        self.slim_len = length
        self.full_len = min(self.full_len, length)
        self.boundary = None if self.boundary is None or not self.pending else self.boundary[:, : self.pending]

    def stretch(self, length: int) -> None:
        """Counts all positions below `length` as run, with keys and values of zero: to measure what a pass there costs.

        At least one position must have been run, so that the buffers are there.
        """
        for what, buffers in (("keys", self._keys), ("values", self._values)):
            for layer, buffer in enumerate(buffers):
                if buffer is not None:
                    self._grown(what, layer, length, self.slim_len, buffer)
        self.full_len = self.slim_len = length
        self.boundary = None

    def forget_pending(self) -> None:
        """Drops what only the slim path has run (a change of route makes it worthless)."""
        self.roll_back(self.full_len)

    def nbytes(self) -> int:
        """Bytes held by all buffers."""
        return sum(t.numel() * t.element_size() for t in (*self._keys, *self._values) if t is not None)
