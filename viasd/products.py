"""Matrix products of decoding: few rows times large weights, by the kernel that reads the weights fastest.

In bf16 on a CPU that is ``weight @ rows.T``: the weights enter as the left operand, as they lie in memory, where
``rows @ weight.T`` (what `torch.nn.functional.linear` computes) lays them out anew on every call. Measured on two cores of a
Sapphire Rapids, a 3072 x 576 product of 1, 2, 5 and 16 rows takes 327, 342, 352 and 589 us as ``linear``, 180, 129, 130
and 156 us this way. A single row travels twice, because the kernel of two rows is the faster one. Up to 32 rows both give
the same bits (found on every shape tried). Beyond that they are about equally fast once the result is laid out as rows, and
``linear`` rounds differently now and then: there it is used too, to stay with what transformers computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

#: Up to here reading the weights takes longer than computing with them.
FEW_ROWS = 32


class Matrix(NamedTuple):
    """A matrix as a kernel of our own reads it; see `viasd.kernels`.

    Attributes:
        kind: ``dense``, ``int8`` or ``int4``.
        weight: ``[o, k]``; int4: ``[o, k / 2]`` bytes, of which the low halves are the first 16 weights of a group of 32.
        scale: int8: ``[o]``; int4: ``[o, k / 32]``.
        zero: int4: ``[o, k / 32]``.
        bias: ``[o]``, or None.
    """

    kind: str
    weight: Tensor
    scale: Tensor | None = None
    zero: Tensor | None = None
    bias: Tensor | None = None

    def rows(self, start: int, end: int) -> Matrix:
        """Some of its rows, as views."""
        return Matrix(self.kind, *(None if t is None else t[start:end] for t in self[1:]))  # type: ignore[arg-type]


class Product(Protocol):
    """A linear layer of a decoder, or several of the same rows side by side.

    Attributes:
        least_rows: Fewest rows it is fast with; see `padded`.
    """

    least_rows: int

    @property
    def tensors(self) -> Sequence[Tensor]:
        """What it has to read: weights as they are stored, scales, biases."""
        ...

    @property
    def matrices(self) -> Sequence[Matrix]:
        """Its matrices one under the other, for kernels of our own; none if they are stored in a form of torch's."""
        ...

    def __call__(self, rows: Tensor) -> Tensor:
        """``[n, k]`` -> ``[n, o]``, which need not be contiguous."""
        ...


class Dense:
    """A product with weights as they are, ``[o, k]``, and perhaps a bias ``[o]``."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self._weight_first = weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and fast_bf16()
        self.least_rows = 2 if self._weight_first else 1

    @property
    def tensors(self) -> Sequence[Tensor]:
        """See `Product`."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    @property
    def matrices(self) -> Sequence[Matrix]:
        """See `Product`."""
        return [Matrix("dense", self.weight, bias=self.bias)]

    def __call__(self, rows: Tensor) -> Tensor:
        """See `Product`."""
        if not self._weight_first or rows.shape[0] > FEW_ROWS:
            return linear(rows, self.weight, self.bias)
        if self.bias is None:
            return torch.mm(self.weight, rows.t()).t()
        return torch.addmm(self.bias[:, None], self.weight, rows.t()).t()


class SideBySide:
    """Several products of the same rows, their results one after the other: for weights that must stay where they are."""

    def __init__(self, products: Sequence[Product]) -> None:
        self._products = tuple(products)
        self.least_rows = max(product.least_rows for product in products)

    @property
    def tensors(self) -> Sequence[Tensor]:
        """See `Product`."""
        return [tensor for product in self._products for tensor in product.tensors]

    @property
    def matrices(self) -> Sequence[Matrix]:
        """See `Product`."""
        return [matrix for product in self._products for matrix in product.matrices]

    def __call__(self, rows: Tensor) -> Tensor:
        """See `Product`."""
        return torch.cat([product(rows) for product in self._products], dim=-1)


def padded(rows: Tensor, product: Product) -> Tensor:
    """Rows ``[n, k]`` as they are, or a single one twice where `product` is faster with two; cut its result to n rows."""
    return rows if rows.shape[0] >= product.least_rows else torch.cat((rows, rows))


def dense(modules: Sequence[nn.Linear]) -> Product:
    """The product of linear layers of the same input: one, where their weights lie one after the other in memory."""
    weights = adjoining([module.weight.detach() for module in modules])
    biases = [module.bias.detach() for module in modules if module.bias is not None]
    bias = adjoining(biases) if len(biases) == len(modules) else None
    if weights is not None and (bias is not None or not biases):
        return Dense(weights, bias)
    return SideBySide([Dense(m.weight.detach(), None if m.bias is None else m.bias.detach()) for m in modules])


def adjoining(parts: Sequence[Tensor]) -> Tensor | None:
    """One tensor over contiguous tensors that lie one after the other in one buffer, None if they do not."""
    first = parts[0]
    if len(parts) == 1:
        return first
    storage, end = first.untyped_storage().data_ptr(), first.storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == storage and part.storage_offset() == end
        if first.is_meta or not same or not part.is_contiguous() or part.shape[1:] != first.shape[1:]:
            return None
        end += part.numel()
    shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
    return first.as_strided(shape, first.stride(), first.storage_offset())


def fast_bf16() -> bool:
    """Whether oneDNN multiplies bf16 natively here; elsewhere ``weight @ rows.T`` falls back to something slow."""
    supported: Callable[[], bool] = torch.ops.mkldnn._is_mkldnn_bf16_supported
    return torch.backends.mkldnn.is_available() and bool(supported())
