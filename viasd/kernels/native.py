"""Layers and the readout by the kernels in ``decode.cpp``: for passes of few tokens on a CPU, in fp32 and bf16.

A row's result does not depend on how many rows travel together. So a verifier pass over a block says bit for bit what
one-token passes would have said, and lossless decoding equals plain decoding token for token in bf16 as well, as long as
no sequence has more than `NativeLayer.most` tokens in a pass. How many sequences share the pass does not matter.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from ctypes import byref, c_int64, c_void_p

import numpy as np
import torch
from torch import Tensor

from viasd.attention import Step
from viasd.kernels.matrices import MOST_TOKENS, product_obstacle
from viasd.kernels.structs import (
    DTYPES,
    CallStruct,
    LayerStruct,
    MatrixStruct,
    NormStruct,
    ReadoutStruct,
    check,
    described,
    dtype_of,
    norm_struct,
)
from viasd.lean import LeanLayer, Norm
from viasd.products import Matrix, Product
from viasd.rotary import Rotation

# Rows of one call, so that what goes into a product stays in a thread's cache.
_MOST_ROWS = 128
# Every thread norms all rows for itself. With more threads than this a long prompt would be about nothing else.
_MOST_THREADS = 16

_MOST_DIM = 512  # as in decode.cpp
_ACTIVATIONS = {"SiLU": 0, "SiLUActivation": 0, "GELUTanh": 1, "PytorchGELUTanh": 1}
_PARTS = {None: 0, "attention": 1, "mlp": 2}


class NativeLayer:
    """A `LeanLayer` whose passes of few tokens run in one call.

    Args:
        lean: The layer, without a `layer_obstacle`. It runs what the kernel does not: longer passes, and passes that are
            differentiated.
        kernels: The compiled kernels (`build.load`).

    Attributes:
        most: Tokens of a sequence that the kernels run in one pass.
    """

    def __init__(self, lean: LeanLayer, kernels: ctypes.CDLL) -> None:
        self.lean = lean
        self.kernels = kernels
        self._held: list[Tensor] = []  # whose addresses the kernel knows
        made, norms = lean.products, lean.norms
        qkv = made.qkv.matrices
        gate, up = _halves(made.gate_up.matrices, lean.inner)
        weight = norms.before_attention.weight
        self.dtype = _activations(made)
        self._layer = LayerStruct(
            (MatrixStruct * 3)(*(self._matrix(matrix) for matrix in qkv)),
            *(self._matrix(matrix) for matrix in (made.out.matrices[0], gate, up, made.down.matrices[0])),
            *(self._norm(norm) for norm in norms),
            weight.shape[0],
            lean.inner,
            lean.heads,
            lean.kv_heads,
            lean.head_dim,
            lean.window or 0,
            lean.scaling,
            lean.softcap or 0.0,
            _ACTIVATIONS[type(lean.activation).__name__],
            DTYPES[self.dtype],
        )
        #: What a pass stores of one token: shape and dtype for a cache that has nothing yet.
        self.stored = torch.empty(lean.kv_heads, 1, lean.head_dim, dtype=self.dtype)
        self.address = ctypes.addressof(self._layer)
        self.most = MOST_TOKENS
        if kernels.viasd_many() and torch.get_num_threads() <= _MOST_THREADS and all(map(_in_columns, made)):
            self.most = sys.maxsize

    @property
    def form(self) -> str:
        """``native``, and the kind of its weights where they are quantised."""
        kind = self.lean.products.qkv.matrices[0].kind
        return "native" if kind == "dense" else f"native {kind}"

    @property
    def tensors(self) -> list[Tensor]:
        """See `LeanLayer`."""
        return self.lean.tensors

    def takes(self, hidden: Tensor, step: Step) -> bool:
        """Whether the kernel runs these hidden states ``[1, n, d]``."""
        # A step of another class stores or attends in its own way.
        ordinary = type(step) is Step and step.kernel == "sdpa"
        if not ordinary or hidden.dtype != self.dtype or hidden.requires_grad:
            return False
        return hidden.shape[1] <= MOST_TOKENS or max(segment.length for segment in step.segments) <= self.most

    def __call__(self, hidden: Tensor, rotation: Rotation, step: Step, part: str | None = None) -> Tensor:
        """See `LeanLayer`."""
        if not self.takes(hidden, step):
            return self.lean(hidden, rotation, step, part)
        return run_layers([self], hidden, [rotation], step, part)

    def _matrix(self, matrix: Matrix) -> MatrixStruct:
        self._held += [t for t in matrix[1:] if isinstance(t, Tensor)]
        return described(matrix)

    def _norm(self, norm: Norm | None) -> NormStruct:
        made, kept = norm_struct(norm)
        self._held += kept
        return made


def run_layers(
    layers: Sequence[NativeLayer], hidden: Tensor, rotations: Sequence[Rotation], step: Step, part: str | None = None
) -> Tensor:
    """Layers one after another in one call.

    Args:
        layers: The layers, which take this pass (`NativeLayer.takes`).
        hidden: ``[1, n, d]``.
        rotations: Of each layer.
        step: The pass.
        part: ``attention`` or ``mlp`` alone, of a single layer.

    Returns:
        ``[1, n, d]``.
    """
    indices = [layer.lean.index for layer in layers]
    for layer in layers:
        step.windows[layer.lean.index] = layer.lean.window
    segments = np.empty((len(layers), len(step.segments), 5), dtype=np.int64)  # in the order of decode.cpp's Segment
    for i, segment in enumerate(step.segments):
        kv, end = segment.kv, segment.start + segment.length
        buffers = kv.table[indices]
        if int(buffers[:, 2].min()) < end:
            for layer in layers:
                kv.room(layer.lean.index, segment.start, end, layer.stored, layer.stored)
            buffers = kv.table[indices]
        segments[:, i, :3] = buffers
        segments[:, i, 3:] = segment.start, segment.length
    entered = hidden.contiguous()
    out = torch.empty_like(entered)
    called = np.array([layer.address for layer in layers])
    distinct = {id(rotation): rotation for rotation in rotations}
    tables = {key: (rotation.cos.data_ptr(), rotation.sin.data_ptr()) for key, rotation in distinct.items()}
    angles = np.array([tables[id(rotation)] for rotation in rotations]).T.copy()
    row = entered.stride(1) * entered.element_size()
    angle = np.array([rotation.cos.stride(0) * rotation.cos.element_size() for rotation in rotations])
    # Later rows of a sequence see what earlier ones stored, and nothing the other way round.
    for first, some in _cut(segments, hidden.shape[1]):
        call = CallStruct(
            called.ctypes.data,
            entered.data_ptr() + first * row,
            out.data_ptr() + first * row,
            angles[0].ctypes.data,
            angles[1].ctypes.data,
            some.ctypes.data,
            len(layers),
            some.shape[1],
            int(some[0, :, 4].sum()),
            torch.get_num_threads(),
            _PARTS[part],
        )
        check(layers[0].kernels.viasd_layers(byref(call)))
        angles += angle * call.rows
    return out


def _cut(segments: np.ndarray, rows: int) -> Iterator[tuple[int, np.ndarray]]:
    """Segments ``[layers, n, 5]`` as calls of at most `_MOST_ROWS` rows: the first row of each, and its segments."""
    if rows <= _MOST_ROWS:
        yield 0, segments
        return
    ends = segments[0, :, 4].cumsum()
    starts = ends - segments[0, :, 4]
    for first in range(0, rows, _MOST_ROWS):
        end = min(first + _MOST_ROWS, rows)
        inside = (ends > first) & (starts < end)
        some = np.ascontiguousarray(segments[:, inside])
        skipped = np.maximum(first - starts[inside], 0)
        some[:, :, 3] += skipped
        some[:, :, 4] = np.minimum(ends[inside], end) - starts[inside] - skipped
        yield first, some


class NativeReadout:
    """Final norm and LM head in one call.

    Args:
        norm: The norm.
        head: The head, of one matrix.
        rows: Logit rows that are wanted, from the first on.
        kernels: The compiled kernels (`build.load`).
    """

    def __init__(self, norm: Norm, head: Product, rows: int, kernels: ctypes.CDLL) -> None:
        matrix = head.matrices[0].rows(0, rows)
        self._run = kernels.viasd_readout
        self._rows = rows
        self._dtype = dtype_of(matrix)
        made, kept = norm_struct(norm)
        self._held = [*kept, *matrix[1:]]
        self._readout = ReadoutStruct(described(matrix), made, norm.weight.shape[0], DTYPES[self._dtype])

    def __call__(self, hidden: Tensor, steady: bool = False) -> Tensor | None:
        """Hidden states ``[1, n, d]`` -> logits ``[n, rows]`` in fp32; None for a pass that has to run through torch.

        With `steady` no number of rows is too large.
        """
        n = hidden.shape[1]
        if (n > MOST_TOKENS and not steady) or hidden.dtype != self._dtype or hidden.requires_grad:
            return None
        entered = hidden.contiguous()
        logits = torch.empty(n, self._rows, dtype=torch.float32)
        threads = torch.get_num_threads()
        address = c_void_p(entered.data_ptr()), c_void_p(logits.data_ptr())
        check(self._run(byref(self._readout), *address, c_int64(n), c_int64(threads)))
        return logits


def layer_obstacle(lean: LeanLayer) -> str | None:
    """Why a layer can't run by the kernels, None where it can."""
    activation = type(lean.activation).__name__
    if activation not in _ACTIVATIONS:
        return f"its activation is {activation}"
    if any(tensor.device.type != "cpu" for tensor in lean.constants):
        return "it is not on a CPU"
    for product in lean.products:
        if reason := product_obstacle(product):
            return reason
    if len(lean.products.qkv.matrices) > 3 or len(lean.products.gate_up.matrices) > 2:
        return "its weights are in too many pieces"
    if lean.head_dim > _MOST_DIM:
        return f"its heads are {lean.head_dim} wide"
    return None if _activations(lean.products) in DTYPES else f"its dtype is {_activations(lean.products)}"


def _activations(products: Sequence[Product]) -> torch.dtype:
    return dtype_of(products[0].matrices[0])


def _in_columns(product: Product) -> bool:
    """Whether decode.cpp multiplies many rows by it side by side."""
    return all(
        m.kind == "dense" and m.weight.dtype == torch.bfloat16 and m.weight.shape[1] % 32 == 0 for m in product.matrices
    )


def _halves(matrices: Sequence[Matrix], inner: int) -> tuple[Matrix, Matrix]:
    if len(matrices) == 2:
        return matrices[0], matrices[1]
    return matrices[0].rows(0, inner), matrices[0].rows(inner, 2 * inner)
