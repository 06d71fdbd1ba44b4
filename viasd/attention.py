"""One attention function for every model: packed sequences, explicit positions, sliding windows, softcaps, shared heads.

It is registered with transformers' attention interface under `ATTENTION_NAME`; a decoder layer of any family reaches it
with its own scaling, window and softcap, and finds the keys and values of each packed sequence in the `Step` it was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from viasd.errors import UnsupportedModelError
from viasd.kv import SequenceKV

ATTENTION_NAME = "viasd"

# Scores of at most this many query rows are held at once when a softcap rules out fused kernels.
_EAGER_QUERY_CHUNK = 256


@dataclass(frozen=True)
class Segment:
    """The part of a packed pass that belongs to one sequence: `length` tokens at positions ``start ...`` of `kv`."""

    kv: SequenceKV
    start: int
    length: int


class Pass(Protocol):
    """What a layer that is written out asks of the pass it is part of."""

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
        """Stores a layer's new keys and values ``[H_kv, N, D]``; queries ``[1, H, N, D]`` over all -> ``[1, N, H, D_v]``."""
        ...


class Step:
    """One pass through some layers: which tokens of which sequences travel packed as one row ``[1, N, d]``.

    It is what a layer sees as its cache (`update`) and what the attention function reads back.

    Attributes:
        segments: Sequences in the order in which their tokens are packed.
        starts: Position of each segment's first token, as rotary embeddings know it; by default where its keys are stored.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        device: torch.device,
        kernel: str = "sdpa",
        starts: Sequence[int] | None = None,
    ) -> None:
        self.segments = tuple(segments)
        self.starts = tuple(s.start for s in segments) if starts is None else tuple(starts)
        self.kernel = kernel
        self._device = device
        self.windows: dict[int, int | None] = {}  # sliding window that each layer's module asked for, by layer index
        self._views: list[tuple[Tensor, Tensor]] = []
        self._masks: dict[tuple[int, int | None, int, torch.device], Tensor] = {}
        self._biases: dict[tuple[int, int | None, int, torch.device], Tensor] = {}
        self._pieces: dict[int, list[tuple[slice, Step]]] = {}

    @cached_property
    def positions(self) -> Tensor:
        """Position of every packed token, ``[1, N]``."""
        runs = zip(self.starts, self.segments, strict=True)
        return torch.cat([torch.arange(start, start + s.length, device=self._device) for start, s in runs])[None]

    def pieces(self, longest: int) -> list[tuple[slice, Step]]:
        """The pass in parts, as (rows, pass): each segment of more than `longest` tokens alone, those between together."""
        if longest not in self._pieces:
            parts: list[tuple[slice, Step]] = []
            offset = 0
            for alone, group in groupby(enumerate(self.segments), lambda item: item[1].length > longest):
                members = list(group)
                for some in [[member] for member in members] if alone else [members]:
                    length = sum(segment.length for _, segment in some)
                    starts = [self.starts[index] for index, _ in some]
                    part = Step([segment for _, segment in some], self._device, self.kernel, starts)
                    part.windows = self.windows
                    parts.append((slice(offset, offset + length), part))
                    offset += length
            self._pieces[longest] = parts
        return self._pieces[longest]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores a layer's new keys and values ``[1, H_kv, N, D]`` in each sequence (the cache call of HF attention)."""
        self._views = self.store(layer_idx, key_states[0], value_states[0])
        return key_states, value_states

    def store(self, layer: int, keys: Tensor, values: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Stores a layer's new keys and values ``[H_kv, N, D]``; returns all of them up to here, per segment."""
        if len(self.segments) == 1:
            segment = self.segments[0]
            return [segment.kv.write(layer, segment.start, keys, values)]
        views, offset = [], 0
        for segment in self.segments:
            rows = slice(offset, offset + segment.length)
            views.append(segment.kv.write(layer, segment.start, keys[:, rows], values[:, rows]))
            offset += segment.length
        return views

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
        """See `Pass`."""
        self.windows[layer] = window
        return attend(self, query, self.store(layer, keys, values), scale, window, softcap)

    def views(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values per segment, as the layer now running has just stored them."""
        if len(self._views) != len(self.segments):
            raise UnsupportedModelError(
                "expected the layer to hand its keys and values to the cache before attending, but it did not; "
                "this architecture can't be driven layer by layer"
            )
        views, self._views = self._views, []
        return views

    def mask(self, index: int, window: int | None, groups: int, device: torch.device) -> Tensor:
        """Boolean mask ``[groups * n, end - low]`` of segment `index`: causal, and within `window` where there is one.

        Built once a pass and shared by all its layers. `groups` repeats the rows for query heads that share a key head.
        """
        cached = self._masks.get((index, window, groups, device))
        if cached is None:
            segment = self.segments[index]
            end = segment.start + segment.length
            query = torch.arange(segment.start, end, device=device)[:, None]
            key = torch.arange(window_low(segment.start, window), end, device=device)[None]
            cached = visible(query, key, window).repeat(groups, 1)
            self._masks[(index, window, groups, device)] = cached
        return cached

    def bias(self, index: int, window: int | None, groups: int, like: Tensor) -> Tensor:
        """`mask` as what is added to the scores, in the dtype of `like`: SDPA would convert it in every layer."""
        cached = self._biases.get((index, window, groups, like.device))
        if cached is None:
            seen = self.mask(index, window, groups, like.device)
            cached = like.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)
            self._biases[(index, window, groups, like.device)] = cached
        return cached


def visible(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """Which keys a query sees, by their positions: none after it, and only the last `window` up to it where there is one."""
    causal = key <= query
    return causal if window is None else causal & (key > query - window)


def window_low(start: int, window: int | None) -> int:
    """First position that a query at `start` can see."""
    return 0 if window is None else max(0, start - window + 1)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    viasd_step: Step | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of packed queries ``[1, H, N, D]`` over the sequences of `viasd_step`.

    Returns:
        ``[1, N, H, D_v]`` and no weights, as transformers' attention interface expects.

    Raises:
        UnsupportedModelError: If the layer did not pass the step on, or wants a kind of attention that is not known here.
    """
    if viasd_step is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} does not hand keyword arguments on to the attention function; "
            "this architecture can't be driven layer by layer"
        )
    for name in ("s_aux", "sinks", "position_bias"):
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(f"{type(module).__name__} uses attention with '{name}', which is not supported")
    viasd_step.windows[getattr(module, "layer_idx", -1)] = sliding_window
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(viasd_step, query, viasd_step.views(), scale, sliding_window, softcap), None


def attend(
    step: Step,
    query: Tensor,
    views: list[tuple[Tensor, Tensor]],
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Packed queries ``[1, H, N, D]`` over each segment's keys and values -> ``[1, N, H, D_v]``."""
    outputs, offset = [], 0
    for index, (keys, values) in enumerate(views):
        segment = step.segments[index]
        rows = query[:, :, offset : offset + segment.length]
        offset += segment.length
        low = window_low(segment.start, window)
        if low:
            keys, values = keys[:, :, low:], values[:, :, low:]
        if softcap is not None or step.kernel == "eager":
            allowed = step.mask(index, window, 1, query.device)
            outputs.append(written_out(rows, keys, values, allowed, scale, softcap))
        else:
            outputs.append(_fused(step, index, rows, keys, values, scale, window))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _fused(
    step: Step, index: int, query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
) -> Tensor:
    """SDPA of one segment."""
    n, groups = query.shape[2], query.shape[1] // keys.shape[1]
    if n > 1 and keys.shape[2] == n and (window is None or n <= window):
        # A prompt from its beginning: plain causal attention, no mask tensor.
        out = scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale, enable_gqa=groups > 1)
        return out.transpose(1, 2)
    return folded(query, keys, values, None if n == 1 else step.bias(index, window, groups, query), scale)


def folded(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """SDPA of queries ``[1, H, n, D]`` whose heads that share a key head become query rows: keys are never repeated.

    Args:
        query: The queries.
        keys: ``[1, H_kv, m, D]``.
        values: ``[1, H_kv, m, D_v]``.
        bias: Added to the scores, ``[H / H_kv * n, m]``.
        scale: Factor on the scores.

    Returns:
        ``[1, n, H, D_v]``.
    """
    _, heads, n, dim = query.shape
    rows = query.reshape(1, keys.shape[1], -1, dim)
    out = scaled_dot_product_attention(rows, keys, values, attn_mask=bias, scale=scale)
    return out.reshape(1, heads, n, -1).transpose(1, 2)


def written_out(
    query: Tensor, keys: Tensor, values: Tensor, allowed: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """Attention written out: for softcapped scores (Gemma2), and as the reference that ``--attn eager`` asks for.

    Args:
        query: ``[1, H, n, D]``.
        keys: ``[1, H_kv, m, D]``.
        values: ``[1, H_kv, m, D_v]``.
        allowed: Which keys a query sees, ``[n, m]``.
        scale: Factor on the scores.
        softcap: Scores are squeezed into (-softcap, softcap) where there is one.

    Returns:
        ``[1, n, H, D_v]``.
    """
    _, heads, n, dim = query.shape
    kv_heads = keys.shape[1]
    groups = heads // kv_heads
    grouped = query.reshape(1, kv_heads, groups, n, dim)
    pieces = []
    for first in range(0, n, _EAGER_QUERY_CHUNK):
        chunk = grouped[:, :, :, first : first + _EAGER_QUERY_CHUNK]
        rows = chunk.shape[3]
        scores = (chunk.reshape(1, kv_heads, groups * rows, dim) @ keys.transpose(2, 3)) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        seen = allowed[first : first + rows].repeat(groups, 1)
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
        pieces.append((weights @ values).reshape(1, kv_heads, groups, rows, -1))
    out = torch.cat(pieces, dim=3).reshape(1, heads, n, -1)
    return out.transpose(1, 2)
