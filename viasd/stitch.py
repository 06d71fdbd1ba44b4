"""A stitch: an affine map of hidden states, applied between two layers of the slim pass.

Where layers are skipped the slim path hands on the state that they should have changed. A stitch, applied before the next
layer that runs, makes of it what the full path has there, as nearly as an affine map can: ``h <- h + h A + b``. The same
form with a thin A serves as an adapter before any layer after the first gap, or before the readout. The full path never
sees one, so q stays what it is, and so does every promise made about it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from viasd.products import Dense, padded


class Affine:
    """A stitch in one dtype on one device: ``[1, n, d]`` -> the same.

    Attributes:
        tensors: What it reads.
    """

    def __init__(self, factors: Iterable[Tensor], shift: Tensor) -> None:
        *first, last = factors
        # Linear layers keep their weights as [out, in].
        self._products = (*(Dense(f.t().contiguous()) for f in first), Dense(last.t().contiguous(), shift))
        self.tensors = [tensor for product in self._products for tensor in product.tensors]

    def __call__(self, hidden: Tensor) -> Tensor:
        """See `Stitch`."""
        rows = added = hidden[0]
        for product in self._products:
            added = product(padded(added, product))[: rows.shape[0]]
        return (rows + added)[None]


@dataclass(frozen=True, eq=False)
class Stitch:
    """``h + h A + b`` on hidden states ``[1, n, d]``.

    Attributes:
        factors: A as one matrix ``[d, d]``, or as the two thin ones ``[d, r]`` and ``[r, d]`` whose product it is.
        shift: b, ``[d]``.
    """

    factors: tuple[Tensor, ...]
    shift: Tensor
    _placed: dict[tuple[torch.dtype, torch.device], Affine] = field(default_factory=dict, repr=False)

    @property
    def width(self) -> int:
        """Width of the hidden states."""
        return self.shift.shape[0]

    @property
    def rank(self) -> int | None:
        """Columns of a thin A, None of a whole one."""
        return self.factors[0].shape[1] if len(self.factors) == 2 else None

    @property
    def parameters(self) -> int:
        """Numbers that a pass has to read."""
        return sum(tensor.numel() for tensor in (*self.factors, self.shift))

    def to(self, dtype: torch.dtype) -> Stitch:
        """A copy, rounded to a dtype, on the CPU."""
        # Laid out as it is read from a file: products of another layout round differently.
        with torch.inference_mode(mode=False), torch.no_grad():
            factors = tuple(f.to("cpu", dtype, copy=True).contiguous() for f in self.factors)
            return Stitch(factors, self.shift.to("cpu", dtype, copy=True))

    def on(self, dtype: torch.dtype, device: torch.device) -> Affine:
        """The same, ready for hidden states of a dtype on a device; made once."""
        key = (dtype, device)
        if key not in self._placed:
            # Kept beyond this pass, so these must be ordinary tensors even if the pass runs in inference mode.
            with torch.inference_mode(mode=False), torch.no_grad():
                self._placed[key] = Affine((f.to(device, dtype) for f in self.factors), self.shift.to(device, dtype))
        return self._placed[key]

    def __call__(self, hidden: Tensor) -> Tensor:
        """``[1, n, d]`` -> the same, in the same dtype."""
        return self.on(hidden.dtype, hidden.device)(hidden)
