"""Decoder layers of known families written out: the same numbers as Hugging Face's own, with less between the products.

A decoding step is bound by memory bandwidth in its matrix products and, on small models, by the overhead of everything
around them. A `LeanLayer` uses the very weights of the layer it stands for (nothing is copied or re-pointed but the norm
weights of Gemma, which are stored as an offset from 1) and runs fewer operations: fused RMS norms, rotary embeddings
applied to queries and keys together, keys written straight into the cache. It is used only where every part is of a known
type; everything else (quantised, sharded, hooked, unknown) runs through Hugging Face's module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

from viasd.attention import Step, attend
from viasd.routes import ATTENTION, MLP

# Class names of decoder layers whose forward is written out below. Exact: a subclass may do something else.
_KNOWN = {
    "LlamaDecoderLayer",
    "MistralDecoderLayer",
    "Qwen2DecoderLayer",
    "Qwen3DecoderLayer",
    "Gemma2DecoderLayer",
    "Gemma3DecoderLayer",
}
_SANDWICH = {"Gemma2DecoderLayer", "Gemma3DecoderLayer"}  # norms after attention and MLP as well as before


class LeanLayer:
    """One decoder layer as a function of ``hidden [1, N, d]``, rotary ``(cos, sin)`` and a `Step`.

    Args:
        layer: The module whose weights it uses. See `lean_layer` for which are fit.
    """

    def __init__(self, layer: Any) -> None:
        attn, mlp = layer.self_attn, layer.mlp
        self._attn, self._mlp = attn, mlp
        self._index: int = attn.layer_idx
        self._head_dim: int = attn.head_dim
        self._scaling: float = attn.scaling
        # Mistral reads the window from its config on every call, the others keep it on the module.
        holder = attn if hasattr(attn, "sliding_window") else attn.config
        windowed = type(layer).__name__ != "LlamaDecoderLayer"
        self._window: int | None = getattr(holder, "sliding_window", None) if windowed else None
        self._softcap: float | None = getattr(attn, "attn_logit_softcapping", None)
        self._before_attention = _Norm(layer.input_layernorm)
        sandwich = type(layer).__name__ in _SANDWICH
        self._after_attention = _Norm(layer.post_attention_layernorm) if sandwich else None
        self._before_mlp = _Norm(layer.pre_feedforward_layernorm if sandwich else layer.post_attention_layernorm)
        self._after_mlp = _Norm(layer.post_feedforward_layernorm) if sandwich else None
        self._query_norm = _Norm(attn.q_norm) if getattr(attn, "q_norm", None) is not None else None
        self._key_norm = _Norm(attn.k_norm) if getattr(attn, "k_norm", None) is not None else None

    def __call__(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], step: Step, part: str | None = None) -> Tensor:
        """Runs the layer, or one half of it; its keys and values are stored where `step` says.

        Args:
            hidden: ``[1, N, d]``.
            rotary: cos and sin, each ``[1, N, D]``.
            step: The pass.
            part: ``attention`` or ``mlp`` for that half alone, None for both.
        """
        if part != MLP:
            hidden = self._with_attention(hidden, rotary, step)
        return hidden if part == ATTENTION else self._with_mlp(hidden)

    def _with_attention(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], step: Step) -> Tensor:
        out = self._attention(self._before_attention(hidden), rotary, step)
        if self._after_attention is not None:
            out = self._after_attention(out)
        return hidden + out

    def _with_mlp(self, hidden: Tensor) -> Tensor:
        mlp = self._mlp
        rows = self._before_mlp(hidden)
        out = product(mlp.act_fn(product(rows, mlp.gate_proj)) * product(rows, mlp.up_proj), mlp.down_proj)
        if self._after_mlp is not None:
            out = self._after_mlp(out)
        return hidden + out

    def _attention(self, rows: Tensor, rotary: tuple[Tensor, Tensor], step: Step) -> Tensor:
        attn, n, dim = self._attn, rows.shape[1], self._head_dim
        query = product(rows, attn.q_proj).view(n, -1, dim)
        key = product(rows, attn.k_proj).view(n, -1, dim)
        value = product(rows, attn.v_proj).view(n, -1, dim)
        if self._query_norm is not None and self._key_norm is not None:
            query, key = self._query_norm(query), self._key_norm(key)
        both = _rotate(torch.cat((query, key), dim=1), rotary)  # [n, H + H_kv, D]
        heads = query.shape[1]
        step.windows[self._index] = self._window
        views = step.store(self._index, both[:, heads:].transpose(0, 1), value.transpose(0, 1))
        out = attend(step, both[:, :heads].transpose(0, 1)[None], views, self._scaling, self._window, self._softcap)
        return product(out.reshape(1, n, -1), attn.o_proj)


def product(rows: Tensor, module: nn.Linear) -> Tensor:
    """``rows [1, n, d]`` times a linear layer.

    A single row in bf16 on a CPU takes the matrix-vector kernel: the general one lays the weights out anew on every call,
    which costs a third of a decoding step. Both accumulate in fp32 and round once.
    """
    if rows.shape[1] == 1 and rows.dtype == torch.bfloat16 and rows.device.type == "cpu" and module.bias is None:
        return torch.mv(module.weight, rows[0, 0])[None, None]
    return linear(rows, module.weight, module.bias)


class _Norm:
    """RMS norm as one fused operation, in fp32 inside as Hugging Face does it."""

    def __init__(self, norm: Any) -> None:
        self._eps: float = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
        # Gemma scales by 1 + w, computed in fp32 and rounded once; the others by w, after rounding the normed value.
        self._offset = type(norm).__name__.startswith("Gemma")
        weight = norm.weight.detach()
        self._weight: Tensor = weight.float() + 1.0 if self._offset else weight
        self._shape = (weight.shape[0],)

    def __call__(self, hidden: Tensor) -> Tensor:
        if hidden.dtype == torch.float32:
            return rms_norm(hidden, self._shape, self._weight, self._eps)
        wide = hidden.float()
        if self._offset:
            return rms_norm(wide, self._shape, self._weight, self._eps).to(hidden.dtype)
        return rms_norm(wide, self._shape, None, self._eps).to(hidden.dtype) * self._weight


def _rotate(heads: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of ``[n, H, D]``; ``cos`` and ``sin`` are ``[1, n, D]``."""
    cos, sin = rotary[0][0][:, None], rotary[1][0][:, None]
    half = heads.shape[-1] // 2
    turned = torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)
    return heads * cos + turned * sin


def lean_layer(layer: nn.Module) -> LeanLayer | None:
    """The layer written out, or None where Hugging Face's own module has to run."""
    if type(layer).__name__ not in _KNOWN or not type(layer).__module__.startswith("transformers.models."):
        return None
    parts: Any = layer
    linears = [getattr(parts.self_attn, n, None) for n in ("q_proj", "k_proj", "v_proj", "o_proj")]
    linears += [getattr(parts.mlp, n, None) for n in ("gate_proj", "up_proj", "down_proj")]
    if any(type(m) is not nn.Linear for m in linears):
        return None  # quantised, or an adapter
    if not untouched(layer):
        return None
    if len({(p.device, p.dtype) for p in layer.parameters()}) != 1:
        return None
    return LeanLayer(layer)


def untouched(module: nn.Module) -> bool:
    """Whether nobody has put a hook on a module or its parts (accelerate's sharding does, and so may a user)."""
    return not any(
        "forward" in vars(part) or part._forward_hooks or part._forward_pre_hooks for part in module.modules()
    )
