"""Matrix products by the kernels: 4-bit weights in an order of their own, and weights as they are."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_int64, c_void_p

import torch
from torch import Tensor

from viasd.kernels.structs import DTYPES, MatrixStruct, ProductStruct, check, described, dtype_of
from viasd.products import Matrix, Product, padded

#: A sequence's pass of more tokens runs through torch, where the kernels do not know how to multiply many rows: from here on
#: computing takes longer than reading the weights. Which of the two it is must not depend on the other sequences in the
#: pass, so their tokens do not count.
MOST_TOKENS = 32


class NativeInt4:
    """A product with 4-bit weights in the order in which our kernel reads them.

    Args:
        codes: ``[o, k]``, 0 to 15, uint8; k a multiple of 32.
        scale: ``[o, k / 32]`` in the dtype of the rows.
        zero: The same; a weight is ``(code - 8) * scale + zero``.
        bias: ``[o]`` or None.
        kernels: The compiled kernels (`build.load`).
    """

    least_rows = 1

    def __init__(self, codes: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None, kernels: ctypes.CDLL) -> None:
        halves = codes.unflatten(1, (-1, 2, 16))
        packed = (halves[:, :, 0] | (halves[:, :, 1] << 4)).flatten(1).contiguous()
        self._matrix = Matrix("int4", packed, scale.contiguous(), zero.contiguous(), bias)
        self._kernels = kernels

    @property
    def tensors(self) -> Sequence[Tensor]:
        """See `viasd.products.Product`."""
        return [t for t in self._matrix[1:] if isinstance(t, Tensor)]

    @property
    def matrices(self) -> Sequence[Matrix]:
        """See `viasd.products.Product`."""
        return [self._matrix]

    def __call__(self, rows: Tensor) -> Tensor:
        """See `viasd.products.Product`. Many rows are multiplied with the weights that the codes stand for."""
        if rows.shape[0] <= MOST_TOKENS:
            return multiplied(rows, self._matrix, self._kernels)
        return torch.nn.functional.linear(rows, self.weights(), self._matrix.bias)

    def weights(self) -> Tensor:
        """The weights that the codes stand for, ``[o, k]`` in the dtype of the scales."""
        matrix = described(self._matrix)
        dtype = dtype_of(self._matrix)
        out = torch.empty(matrix.rows, matrix.cols, dtype=dtype)
        threads = c_int64(torch.get_num_threads())
        check(self._kernels.viasd_expand(byref(matrix), c_void_p(out.data_ptr()), c_int64(DTYPES[dtype]), threads))
        return out


class NativeProduct:
    """A product of which few rows run by the kernel; many, and rows that are differentiated, through torch.

    Args:
        product: Of one matrix, without a `product_obstacle`.
        kernels: The compiled kernels (`build.load`).

    Attributes:
        product: The product.
    """

    def __init__(self, product: Product, kernels: ctypes.CDLL) -> None:
        (self._matrix,) = product.matrices
        self.product = product
        self._dtype = dtype_of(self._matrix)
        self._known = described(self._matrix)
        self._kernels = kernels

    def __call__(self, rows: Tensor, steady: bool = False) -> Tensor:
        """Rows ``[n, k]`` -> ``[n, o]``. With `steady` no number of rows is too large for the kernel."""
        many = rows.shape[0] > MOST_TOKENS and not steady
        if many or rows.requires_grad or rows.dtype != self._dtype:
            return self.product(padded(rows, self.product))[: rows.shape[0]]
        return _times(rows, self._known, self._kernels)


def multiplied(rows: Tensor, matrix: Matrix, kernels: ctypes.CDLL) -> Tensor:
    """Rows ``[n, k]`` times a matrix of k columns, ``[n, o]``."""
    return _times(rows, described(matrix), kernels)


def _times(rows: Tensor, matrix: MatrixStruct, kernels: ctypes.CDLL) -> Tensor:
    rows = rows.contiguous()
    out = rows.new_empty(rows.shape[0], matrix.rows)
    threads = torch.get_num_threads()
    call = ProductStruct(matrix, rows.data_ptr(), out.data_ptr(), rows.shape[0], threads, DTYPES[rows.dtype])
    check(kernels.viasd_product(byref(call)))
    return out


def product_obstacle(product: Product) -> str | None:
    """Why a product can't run by the kernels, None where it can."""
    if not product.matrices:
        return "its weights are stored in a form of torch's"
    for matrix in product.matrices:
        if dtype_of(matrix) not in DTYPES:
            return f"its dtype is {dtype_of(matrix)}"
        if any(isinstance(t, Tensor) and not t.is_contiguous() for t in matrix[1:]):
            return "its weights are not contiguous"
    return None
