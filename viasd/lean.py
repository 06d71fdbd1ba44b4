"""Decoder layers of known families written out: the same numbers as Hugging Face's own, with less between the products.

A decoding step is bound by memory bandwidth in its matrix products and, on small models, by the overhead of everything
around them. A `LeanLayer` uses the very weights of the layer it stands for (nothing is copied or re-pointed but the norm
weights of Gemma, which are stored as an offset from 1) and runs fewer operations: one product for queries, keys and values
and one for gate and up where the weights have been laid together (`viasd.fuse`), rotary embeddings applied to queries and
keys together, keys written straight into the cache. It is used only where every part is of a known type; everything else
(quantised by a back-end, sharded, hooked, unknown) runs through Hugging Face's module.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from viasd.attention import Pass
from viasd.products import Product, dense, padded
from viasd.rotary import Rotation
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

#: Linear layers that share their input, in the order in which their results are used; by the part they belong to.
GROUPS = (
    ("self_attn", ("q_proj", "k_proj", "v_proj")),
    ("self_attn", ("o_proj",)),
    ("mlp", ("gate_proj", "up_proj")),
    ("mlp", ("down_proj",)),
)


class LayerProducts(NamedTuple):
    """The matrix products of a layer, one for each of `GROUPS`."""

    qkv: Product
    out: Product
    gate_up: Product
    down: Product


class LayerNorms(NamedTuple):
    """The norms of a layer; None where its family has none there."""

    before_attention: Norm
    after_attention: Norm | None
    before_mlp: Norm
    after_mlp: Norm | None
    query: Norm | None
    key: Norm | None


class LeanLayer:
    """One decoder layer as a function of ``hidden [1, N, d]``, a `Rotation` and a `Pass`.

    Args:
        layer: The module it stands for, without an `obstacle`.
        products: Its matrix products; None takes the module's weights as they are.

    Attributes:
        products: Its matrix products.
        norms: Its norms.
        activation: Between the products of the MLP.
        index: Its place in the model.
        inner: Width of the MLP.
        heads: Query heads.
        kv_heads: Heads of keys and values.
        head_dim: Width of a head.
        scaling: Factor on attention scores.
        window: Last positions that a query sees, None for all.
        softcap: Bound of the attention scores, None for none.
    """

    def __init__(self, layer: Any, products: LayerProducts | None = None) -> None:
        attn, mlp = layer.self_attn, layer.mlp
        self.products = products or LayerProducts(*(dense(modules) for modules in linear_groups(layer)))
        self.activation = mlp.act_fn
        self.inner: int = mlp.gate_proj.weight.shape[0]
        self.index: int = attn.layer_idx
        self.head_dim: int = attn.head_dim
        self.heads: int = attn.q_proj.weight.shape[0] // attn.head_dim
        self.kv_heads: int = attn.k_proj.weight.shape[0] // attn.head_dim
        self.scaling: float = attn.scaling
        # Mistral reads the window from its config on every call, the others keep it on the module.
        holder = attn if hasattr(attn, "sliding_window") else attn.config
        windowed = type(layer).__name__ != "LlamaDecoderLayer"
        self.window: int | None = getattr(holder, "sliding_window", None) if windowed else None
        self.softcap: float | None = getattr(attn, "attn_logit_softcapping", None)
        sandwich = type(layer).__name__ in _SANDWICH
        self.norms = LayerNorms(
            Norm(layer.input_layernorm),
            Norm(layer.post_attention_layernorm) if sandwich else None,
            Norm(layer.pre_feedforward_layernorm if sandwich else layer.post_attention_layernorm),
            Norm(layer.post_feedforward_layernorm) if sandwich else None,
            Norm(attn.q_norm) if getattr(attn, "q_norm", None) is not None else None,
            Norm(attn.k_norm) if getattr(attn, "k_norm", None) is not None else None,
        )

    @property
    def form(self) -> str:
        """Kind of its matrix products: ``dense`` (laid together), ``sidebyside``, ``int8``, ``int4``."""
        return type(self.products.qkv).__name__.lower()

    @property
    def tensors(self) -> list[Tensor]:
        """What its products have to read."""
        return [tensor for made in self.products for tensor in made.tensors]

    @property
    def constants(self) -> list[Tensor]:
        """Every tensor that it reads: those of its products and the weights of its norms."""
        return [*self.tensors, *(norm.weight for norm in self.norms if norm is not None)]

    def __call__(self, hidden: Tensor, rotation: Rotation, step: Pass, part: str | None = None) -> Tensor:
        """Runs the layer, or one half of it; its keys and values are stored where `step` says.

        Args:
            hidden: ``[1, N, d]``.
            rotation: Rotary embedding of the N positions.
            step: The pass.
            part: ``attention`` or ``mlp`` for that half alone, None for both.
        """
        rows, norms = hidden[0], self.norms
        if part != MLP:
            out = self._attention(norms.before_attention(rows), rotation, step)
            rows = rows + (out if norms.after_attention is None else norms.after_attention(out))
        if part != ATTENTION:
            out = self._mlp(norms.before_mlp(rows))
            rows = rows + (out if norms.after_mlp is None else norms.after_mlp(out))
        return rows[None]

    def _mlp(self, rows: Tensor) -> Tensor:
        gate_up, down = self.products.gate_up, self.products.down
        both = gate_up(padded(rows, gate_up))
        inner = self.activation(both[:, : self.inner]) * both[:, self.inner :]
        return down(padded(inner, down))[: rows.shape[0]]

    def _attention(self, rows: Tensor, rotation: Rotation, step: Pass) -> Tensor:
        n, heads, rotated = rows.shape[0], self.heads, self.heads + self.kv_heads
        qkv_product, out_product = self.products.qkv, self.products.out
        # Contiguous, because fused attention takes nothing else.
        qkv = qkv_product(padded(rows, qkv_product))[:n].contiguous().view(n, -1, self.head_dim)  # [n, H + 2 H_kv, D]
        both, value = qkv[:, :rotated], qkv[:, rotated:]
        if self.norms.query is not None and self.norms.key is not None:
            both = torch.cat((self.norms.query(both[:, :heads]), self.norms.key(both[:, heads:])), dim=1)
        both = rotation(both)
        query = both[:, :heads].transpose(0, 1)[None]
        keys, values = both[:, heads:].transpose(0, 1), value.transpose(0, 1)
        out = step.attended(self.index, query, keys, values, self.scaling, self.window, self.softcap).reshape(n, -1)
        return out_product(padded(out, out_product))[:n]


class Norm:
    """RMS norm in fp32 inside, in Hugging Face's own order of operations, so that bf16 gives the same bits.

    Args:
        norm: The module. Its weight is read, not kept in step with later changes.

    Attributes:
        weight: What the normed value is multiplied by.
        eps: Added to the mean square.
        offset: Whether the product is rounded once (Gemma), instead of the normed value first.
    """

    def __init__(self, norm: Any) -> None:
        self.eps: float = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
        weight = norm.weight.detach()
        # Gemma scales by 1 + w, computed in fp32 and rounded once; the others by w, after rounding the normed value.
        self.offset = type(norm).__name__.startswith("Gemma")
        self.weight: Tensor = weight.float() + 1.0 if self.offset else weight

    def __call__(self, hidden: Tensor) -> Tensor:
        """``[..., d]`` -> the same, in the same dtype."""
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.offset:
            return (normed * self.weight).to(hidden.dtype)
        return normed.to(hidden.dtype) * self.weight


def linear_groups(layer: Any) -> list[list[Any]]:
    """The linear layers of a decoder layer that share their input, as in `GROUPS`."""
    return [[getattr(getattr(layer, part), name, None) for name in names] for part, names in GROUPS]


def obstacle(layer: nn.Module) -> str | None:
    """Why a layer has to run through Hugging Face's own module, None where it can be written out."""
    kind = type(layer).__name__
    if kind not in _KNOWN or not type(layer).__module__.startswith("transformers.models."):
        return f"{kind} is not one of the layers written out"
    for module in (module for group in linear_groups(layer) for module in group):
        if type(module) is not nn.Linear:
            return f"it has a {type(module).__name__} where a plain linear layer is expected (quantised, or an adapter)"
    if not untouched(layer):
        return "a hook is on it (a user's, or of weights spread over devices)"
    if len({(p.device, p.dtype) for p in layer.parameters()}) != 1:
        return "its weights are of several dtypes or on several devices"
    return None


def untouched(module: nn.Module) -> bool:
    """Whether nobody has put a hook on a module or its parts (accelerate's sharding does, and so may a user)."""
    return not any(
        "forward" in vars(part) or part._forward_hooks or part._forward_pre_hooks for part in module.modules()
    )
