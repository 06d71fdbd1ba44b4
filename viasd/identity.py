"""What an artefact remembers of the target it was made for."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import torch

from viasd.layered import LayeredModel

_SHAPE_KEYS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "layer_types",
    "sliding_window",
    "rms_norm_eps",
)


@dataclass(frozen=True)
class ModelIdentity:
    """What a mask, or what was fitted to one, remembers of its target.

    Attributes:
        id: Hub id or local path, as it was asked for.
        config: Hash of the architecture (shape keys of the config).
        weights: Hash of a few small, never quantised weights (norms, rounded to bf16 so that the load dtype is immaterial).
    """

    id: str
    config: str
    weights: str

    @classmethod
    def of(cls, model: LayeredModel, model_id: str) -> ModelIdentity:
        """Identity of a loaded model."""
        shape = {key: getattr(model.config, key, None) for key in _SHAPE_KEYS}
        first, last = model.layers[0], model.decoder.norm
        norms = [p for m in (first, last) for n, p in m.named_parameters() if "norm" in n or m is last]
        digest = hashlib.sha256()
        for weight in norms:
            digest.update(weight.detach().to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
        text = json.dumps(shape, sort_keys=True, default=str)
        return cls(model_id, hashlib.sha256(text.encode()).hexdigest()[:16], digest.hexdigest()[:16])

    def difference(self, model: LayeredModel) -> str | None:
        """What of a loaded model is not as it was: ``architecture``, ``weights``, or None for nothing."""
        found = ModelIdentity.of(model, self.id)
        if found.config != self.config:
            return "architecture"
        return "weights" if found.weights != self.weights else None
