"""The decoder inside a Hugging Face model, and whether it is of the kind that can be driven layer by layer."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn

from viasd.errors import UnsupportedModelError

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_GIVEN = {"hidden_states", "attention_mask", "position_embeddings", "position_ids", "cache", "past_key_values"}


def find_decoder(model: nn.Module) -> Any:
    """The module with ``embed_tokens, layers, norm, rotary_emb``: the text decoder, also inside a multimodal wrapper.

    Raises:
        UnsupportedModelError: If there is none.
    """
    parts = ("embed_tokens", "layers", "norm", "rotary_emb")
    seen: Any = getattr(model, "model", None)
    for candidate in (seen, getattr(seen, "language_model", None), getattr(model, "language_model", None)):
        if candidate is not None and all(hasattr(candidate, part) for part in parts):
            return candidate
    missing = ", ".join(p for p in parts if not hasattr(seen, p)) if seen is not None else "a decoder named 'model'"
    kind = getattr(getattr(model, "config", None), "model_type", "unknown")
    raise UnsupportedModelError(
        f"{type(model).__name__} (model type '{kind}') has another shape than expected: it lacks {missing}; "
        "supported are decoders of the Llama kind (Llama, Mistral, Qwen2, Qwen3, Gemma2, Gemma3, Phi3, OLMo2, SmolLM3)"
    )


def layer_types_of(name: str, config: Any, layers: Sequence[nn.Module]) -> list[str]:
    """The kind of attention of each layer.

    Raises:
        UnsupportedModelError: If one keeps a state that can't be rolled back.
    """
    types = list(getattr(config, "layer_types", None) or ["full_attention"] * len(layers))
    for index, kind in enumerate(types[: len(layers)]):
        if kind not in _LAYER_TYPES:
            raise UnsupportedModelError(
                f"{name}: layer {index} is of type '{kind}', whose state can't be rolled back here; "
                f"supported are {' and '.join(sorted(_LAYER_TYPES))}"
            )
    return types


def check_layers(name: str, layers: Sequence[nn.Module]) -> None:
    """Refuses layers that need more than a decoder layer of the Llama kind is given.

    Raises:
        UnsupportedModelError: Naming the layer and what it needs.
    """
    for index, layer in enumerate(layers):
        if not hasattr(layer, "self_attn"):
            raise UnsupportedModelError(
                f"{name}: layer {index} ({type(layer).__name__}) has no self-attention whose keys can be rolled "
                "back; models with recurrent or convolutional state are not supported"
            )
        for name, parameter in inspect.signature(layer.forward).parameters.items():
            required = parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            if required and name not in _GIVEN:
                raise UnsupportedModelError(
                    f"{name}: layer {index} needs an input '{name}' that a plain decoder layer does not have; "
                    "this architecture can't be driven layer by layer"
                )
