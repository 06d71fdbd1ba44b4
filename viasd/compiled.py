"""Passes of few tokens as functions of fixed shape, which `torch.compile` turns into one graph each.

On a GPU a decoding step is short enough for the launching of its kernels to take longer than the kernels; a pass that is
compiled and recorded as a CUDA graph is launched as one. That asks for fixed shapes and addresses: the tokens of a pass are
padded to a bucket, its position is a tensor, keys are written at that position into whole buffers, and attention goes over
the whole buffer with a mask made of the position inside the graph. There is one graph for each set of layers, bucket and
capacity of the buffers, so their number is bounded however long texts and however varied blocks are.

Padding rows come after the last token. Their keys land above the end of the sequence, where the next pass overwrites them
before any query may see them.
"""

from __future__ import annotations

import threading
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from viasd.attention import Segment, Step, folded, visible, written_out
from viasd.buffers import BufferPool
from viasd.errors import OptionError
from viasd.lean import LeanLayer
from viasd.rotary import RotaryTable, Rotation
from viasd.routes import MLP
from viasd.stitch import Stitch

#: Tokens of a pass are padded to the next of these; a pass of more runs as it always does. One token, a block of the usual
#: length, several blocks caught up with. Few, because each costs compiling, and where reading the weights decides padding
#: costs next to nothing.
BUCKETS = (1, 8, 32)
BACKEND = "inductor"

Backend = str | Callable[..., Any]
StateMap = Callable[[Tensor], Tensor]


class Key(NamedTuple):
    """What a graph is made for.

    Attributes:
        layers: Indices of the layers, in order.
        parts: The half that runs of layers that run in part.
        stitches: What hidden states go through before the layer of that index.
        capture: Layers whose input is wanted; see `LayeredModel.run`.
        bucket: Tokens.
        capacity: Positions of the key/value buffers.
    """

    layers: tuple[int, ...]
    parts: tuple[tuple[int, str], ...]
    stitches: tuple[tuple[int, StateMap], ...]
    capture: tuple[int, ...]
    bucket: int
    capacity: int


class StaticPass:
    """The pass inside a graph: as `viasd.attention.Step`, but positions are a tensor and views are whole buffers.

    Args:
        positions: Of the tokens, ``[B]``.
        buffers: Keys ``[1, H_kv, C, D]`` and values by layer.
        kernel: ``sdpa`` or ``eager``.
    """

    def __init__(self, positions: Tensor, buffers: Mapping[int, tuple[Tensor, Tensor]], kernel: str) -> None:
        self._positions = positions
        self._buffers = buffers
        self._kernel = kernel
        self._allowed: dict[int | None, Tensor] = {}
        self._biases: dict[tuple[int | None, int], Tensor] = {}

    def attended(
        self,
        layer: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """See `viasd.attention.Pass`."""
        all_keys, all_values = self._buffers[layer]
        all_keys.index_copy_(2, self._positions, keys[None])
        all_values.index_copy_(2, self._positions, values[None])
        if softcap is not None or self._kernel == "eager":
            allowed = self._mask(window, all_keys.shape[2])
            return written_out(query, all_keys, all_values, allowed, scale, softcap)
        return folded(query, all_keys, all_values, self._bias(window, query, all_keys), scale)

    def _mask(self, window: int | None, capacity: int) -> Tensor:
        if window not in self._allowed:
            query, key = self._positions[:, None], torch.arange(capacity, device=self._positions.device)[None]
            self._allowed[window] = visible(query, key, window)
        return self._allowed[window]

    def _bias(self, window: int | None, query: Tensor, keys: Tensor) -> Tensor:
        groups = query.shape[1] // keys.shape[1]
        if (window, groups) not in self._biases:
            seen = self._mask(window, keys.shape[2]).repeat(groups, 1)
            bias = torch.zeros(seen.shape, dtype=query.dtype, device=query.device)
            self._biases[window, groups] = bias.masked_fill(~seen, -torch.inf)
        return self._biases[window, groups]


class _Graph:
    """One compiled function with the buffers it reads its input from."""

    def __init__(self, function: Callable[..., Any], hidden: Tensor, start: Tensor) -> None:
        self.function = function
        self.hidden = hidden
        self.start = start

    def __call__(self, hidden: Tensor, start: int, buffers: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Runs hidden states ``[1, n, d]`` at positions ``start ...``; returns copies, one for each of its results."""
        n = hidden.shape[1]
        self.hidden[:, :n].copy_(hidden)
        self.start.fill_(start)
        torch.compiler.cudagraph_mark_step_begin()
        results = self.function(self.hidden, self.start, buffers)
        # What a CUDA graph returns lies in memory that its next run writes over.
        return [result[:, :n].clone() for result in results]


class CompiledSteps:
    """The graphs of one model, made when they are first needed.

    Args:
        layers: Its layers, all written out.
        kinds: The rotary embedding that each uses.
        rotations: Rotary embeddings by position.
        limit: The context length.
        kernel: ``sdpa`` or ``eager`` attention.
        backend: Of `torch.compile`.
        buckets: Numbers of tokens that graphs are made for, ascending.

    Raises:
        OptionError: If the layers lie on several devices, or there is no compiler in this torch.

    Attributes:
        pool: Where the caches of this model's sequences get their buffers.
        failure: Why nothing is compiled any more, None while it is.
    """

    def __init__(
        self,
        layers: Sequence[LeanLayer],
        kinds: Sequence[str],
        rotations: RotaryTable,
        limit: int,
        *,
        kernel: str,
        backend: Backend,
        buckets: Sequence[int] = BUCKETS,
    ) -> None:
        constants = [tensor for layer in layers for tensor in layer.constants]
        if len(devices := {str(tensor.device) for tensor in constants}) > 1:
            raise OptionError(f"compile needs all layers on one device, but they are on {', '.join(sorted(devices))}")
        if not torch._dynamo.is_dynamo_supported():
            raise OptionError("compile needs torch.compile, which this build of torch or this Python does not have")
        self.pool = BufferPool()
        self.failure: str | None = None
        self._layers = tuple(layers)
        self._kinds = tuple(kinds)
        self._rotations = rotations
        self._limit = limit
        self._kernel = kernel
        self._backend = backend
        self._buckets = tuple(sorted(set(buckets)))
        self._graphs: dict[Key, _Graph] = {}
        self._lock = threading.Lock()  # graphs read their input from a buffer of their own
        for tensor in constants:
            torch._dynamo.mark_static_address(tensor)

    @property
    def graphs(self) -> int:
        """How many have been made."""
        return len(self._graphs)

    def run(
        self,
        hidden: Tensor,
        layers: tuple[int, ...],
        step: Step,
        capture: Sequence[int],
        parts: Mapping[int, str],
        stitches: Mapping[int, StateMap],
    ) -> tuple[Tensor, dict[int, Tensor]] | None:
        """See `LayeredModel.run`; None if this pass has to run as it always does.

        That is one of several sequences, of more tokens than the largest bucket, up to the very end of the context, one
        through layers that have no buffers yet, or one outside of inference mode.
        """
        if self.failure or len(step.segments) != 1 or not layers or not torch.is_inference_mode_enabled():
            return None
        segment = step.segments[0]
        bucket = next((size for size in self._buckets if size >= segment.length), None)
        if bucket is None or step.starts != (segment.start,) or segment.start + bucket > self._limit:
            return None
        halves = tuple((i, parts[i]) for i in layers if i in parts)
        attending = [i for i in layers if parts.get(i) != MLP]
        buffers = segment.kv.reserve(attending, segment.start, segment.start + bucket)
        if not buffers:
            return None
        wanted = tuple(sorted({i for i in capture if i in layers or i == len(self._layers)}))
        applied = tuple((i, stitches[i]) for i in (*layers, len(self._layers)) if i in stitches)
        key = Key(layers, halves, applied, wanted, bucket, buffers[0][0].shape[2])
        try:
            with self._lock:
                return self._run(key, hidden, segment, buffers)
        except Exception as error:
            if not _could_not_compile(error):
                raise
            cause = getattr(error, "inner_exception", error)
            self.failure = str(cause).strip().partition("\n")[0] or type(cause).__name__
        warnings.warn(f"running without --compile, torch can't compile this model here: {self.failure}", stacklevel=3)
        return None

    def _run(
        self, key: Key, hidden: Tensor, segment: Segment, buffers: Sequence[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._graph(key, hidden)
        last, *captured = graph(hidden, segment.start, buffers)
        return last, dict(zip(key.capture, captured, strict=True))

    def _graph(self, key: Key, like: Tensor) -> _Graph:
        # Ordinary tensors, as they are kept.
        with torch.inference_mode(mode=False):
            hidden = torch.zeros((1, key.bucket, like.shape[2]), dtype=like.dtype, device=like.device)
            start = torch.zeros((), dtype=torch.long, device=like.device)
        kinds = {self._kinds[i] for i in key.layers}
        tables = {
            kind: self._rotations.upto(min(key.capacity, self._limit), kind, like.device) for kind in sorted(kinds)
        }
        stitches = {i: s.on(like.dtype, like.device) if isinstance(s, Stitch) else s for i, s in key.stitches}
        constants = [tensor for stitch in stitches.values() for tensor in getattr(stitch, "tensors", ())]
        for tensor in (hidden, start, *constants, *(part for table in tables.values() for part in table)):
            torch._dynamo.mark_static_address(tensor)
        function = torch.compile(
            _pass_of(key, self._layers, self._kinds, tables, stitches, self._kernel),
            fullgraph=True,
            dynamic=False,
            backend=self._backend,
            mode="reduce-overhead" if self._backend == BACKEND and like.device.type == "cuda" else None,
        )
        return _Graph(function, hidden, start)


def _pass_of(
    key: Key,
    layers: Sequence[LeanLayer],
    kinds: Sequence[str],
    tables: Mapping[str, Rotation],
    stitches: Mapping[int, StateMap],
    kernel: str,
) -> Callable[..., list[Tensor]]:
    """The pass as a function of hidden states ``[1, B, d]``, position ``[]`` and buffers; a code object of its own."""
    parts = dict(key.parts)
    chosen = [(i, layers[i], kinds[i], parts.get(i), stitches.get(i)) for i in key.layers]
    attending = [index for index in key.layers if parts.get(index) != MLP]
    end = len(layers)
    last = stitches.get(end)

    def run(hidden: Tensor, start: Tensor, buffers: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        positions = start + torch.arange(key.bucket, device=hidden.device)
        step = StaticPass(positions, dict(zip(attending, buffers, strict=True)), kernel)
        rotations = {kind: Rotation(table.cos[positions], table.sin[positions]) for kind, table in tables.items()}
        inputs: dict[int, Tensor] = {}
        for index, layer, kind, part, stitch in chosen:
            inputs[index] = hidden
            if stitch is not None:
                hidden = stitch(hidden)
            hidden = layer(hidden, rotations[kind], step, part)
        inputs[end] = hidden
        if last is not None:
            hidden = last(hidden)
        return [hidden, *(inputs[index] for index in key.capture)]

    # Compiled code is kept by code object, of which all closures made here would share one: every pass would look through
    # the others' entries, and torch would stop compiling after a few of them.
    return types.FunctionType(run.__code__.replace(), run.__globals__, run.__name__, None, run.__closure__)


def _could_not_compile(error: Exception) -> bool:
    """Whether tracing or the compiler failed, rather than the pass itself."""
    return isinstance(error, torch._dynamo.exc.TorchDynamoException)
