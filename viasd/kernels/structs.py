"""The structures of ``decode.cpp`` as ctypes, and how tensors are told to it.

A structure holds addresses only: whoever keeps one keeps the tensors too.
"""

from __future__ import annotations

from ctypes import Structure, c_double, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from viasd.errors import KernelError
from viasd.lean import Norm
from viasd.products import Matrix

KINDS = {"int8": 2, "int4": 3}
DTYPES = {torch.float32: 0, torch.bfloat16: 1}


class MatrixStruct(Structure):
    """`viasd.products.Matrix`."""

    _fields_ = (
        ("weight", c_void_p),
        ("scale", c_void_p),
        ("zero", c_void_p),
        ("bias", c_void_p),
        ("rows", c_int64),
        ("cols", c_int64),
        ("kind", c_int64),
    )


class NormStruct(Structure):
    """`viasd.lean.Norm`."""

    _fields_ = (("weight", c_void_p), ("eps", c_double), ("offset", c_int64))


class LayerStruct(Structure):
    """A decoder layer: its matrices, norms and shape."""

    _fields_ = (
        ("qkv", MatrixStruct * 3),
        *((name, MatrixStruct) for name in ("out", "gate", "up", "down")),
        *(
            (name, NormStruct)
            for name in ("before_attention", "after_attention", "before_mlp", "after_mlp", "query", "key")
        ),
        *((name, c_int64) for name in ("width", "inner", "heads", "kv_heads", "head_dim", "window")),
        ("scale", c_double),
        ("softcap", c_double),
        ("activation", c_int64),
        ("half", c_int64),
    )


class CallStruct(Structure):
    """One layer after another over some rows."""

    _fields_ = (
        *((name, c_void_p) for name in ("layers", "input", "output", "cos", "sin", "segments")),
        *((name, c_int64) for name in ("count", "n_segments", "rows", "threads", "part")),
    )


class ReadoutStruct(Structure):
    """Final norm and LM head."""

    _fields_ = (("head", MatrixStruct), ("norm", NormStruct), ("width", c_int64), ("half", c_int64))


class ProductStruct(Structure):
    """One matrix times some rows."""

    _fields_ = (
        ("matrix", MatrixStruct),
        ("input", c_void_p),
        ("output", c_void_p),
        ("rows", c_int64),
        ("threads", c_int64),
        ("half", c_int64),
    )


def described(matrix: Matrix) -> MatrixStruct:
    """A matrix by its addresses."""
    rows, cols = matrix.weight.shape
    kind = KINDS.get(matrix.kind, DTYPES.get(matrix.weight.dtype))
    addresses = (None if t is None else t.data_ptr() for t in (matrix.weight, matrix.scale, matrix.zero, matrix.bias))
    return MatrixStruct(*addresses, rows, cols * 2 if matrix.kind == "int4" else cols, kind)


def norm_struct(norm: Norm | None) -> tuple[NormStruct, list[Tensor]]:
    """A norm, or none, and the tensors that have to be kept for it."""
    if norm is None:
        return NormStruct(None, 0.0, 0), []
    weight = norm.weight.float().contiguous()
    return NormStruct(weight.data_ptr(), norm.eps, int(norm.offset)), [weight]


def dtype_of(matrix: Matrix) -> torch.dtype:
    """Of the rows that it takes."""
    return matrix.weight.dtype if matrix.scale is None else matrix.scale.dtype


def check(failed: Any) -> None:
    """Raises what a kernel reported.

    Raises:
        KernelError: If there was no memory.
    """
    if failed:
        raise KernelError("there was no memory for a pass of few tokens; free some, or use --layers fused")
