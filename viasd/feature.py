"""Feature drafters (EAGLE, arXiv 2401.15077): the weights of a small layer over the target's last hidden states, as a file.

Entry i of the drafter is ``x_i = W [unit(h_i) ; unit(e_{i+1})]``: the target's hidden state behind its last layer at
position i beside the embedding of the token that came next. One or two decoder layers over these entries say ``g_i``, which
stands for ``h_{i+1}``: the target's own norm and head make of it the law of token i + 2. Further ahead ``g_i`` is fed in
the place of the state that the target has not computed. The head is cut to a shortlist of words: a word outside has
probability 0, which is a law like any other and stays exact where it is tested.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from viasd.artefacts import read_artefact
from viasd.errors import DrafterError
from viasd.files import write_atomically
from viasd.identity import ModelIdentity
from viasd.layered import LayeredModel

SCHEMA_VERSION = 1
KIND = "feature"
FUSE = "fuse.weight"
SHORTLIST = "shortlist"
_META = "viasd"  # the one entry of the file's metadata, JSON


@dataclass(frozen=True)
class FeatureShape:
    """Sizes of a feature drafter.

    Attributes:
        width: Of the target's hidden states.
        inner: Width of the MLPs.
        depth: Decoder layers.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Width of a head.
        context: Positions.
    """

    width: int
    inner: int
    depth: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int

    @classmethod
    def of(cls, model: LayeredModel, depth: int = 1, inner: int | None = None) -> FeatureShape:
        """Layers of the target's own shape, or with another width of the MLP."""
        config = model.config
        heads = int(config.num_attention_heads)
        return cls(
            int(config.hidden_size),
            int(config.intermediate_size) if inner is None else inner,
            depth,
            heads,
            int(getattr(config, "num_key_value_heads", None) or heads),
            int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            model.context_length,
        )

    @cached_property
    def config(self) -> LlamaConfig:
        """The same for transformers: the layers are those of Llama whatever the target's are."""
        return LlamaConfig(
            hidden_size=self.width,
            intermediate_size=self.inner,
            num_hidden_layers=self.depth,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.context,
            attn_implementation="sdpa",
        )

    def layers(self) -> nn.ModuleList:
        """Decoder layers of this shape, with transformers' own initial values."""
        layers = nn.ModuleList(LlamaDecoderLayer(self.config, index) for index in range(self.depth))
        for module in layers.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=self.config.initializer_range)
        return layers


@dataclass(frozen=True, eq=False)
class FeatureDrafterFile:
    """A feature drafter of one target, with provenance.

    Attributes:
        shape: Its sizes.
        weights: Fusing matrix ``[d, 2 d]`` under `FUSE`, and the layers' parameters under ``layers.N. ...``.
        shortlist: Token ids ``[m]`` that it can propose, ascending.
        target: Identity of the target it was trained for.
        name: Where it came from, for people.
        details: Everything else the file carries (corpus, training, figures, versions).

    Raises:
        DrafterError: If weights and shape do not fit together, or a weight is no number.
    """

    shape: FeatureShape
    weights: Mapping[str, Tensor]
    shortlist: Tensor
    target: ModelIdentity
    name: str = "drafter"
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with torch.device("meta"):
            expected = {f"layers.{k}": v.shape for k, v in self.shape.layers().state_dict().items()}
        expected[FUSE] = torch.Size((self.shape.width, 2 * self.shape.width))
        found = {name: tensor.shape for name, tensor in self.weights.items()}
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                raise DrafterError(
                    f"{self.name} must have a tensor '{name}' of shape {_said(expected.get(name))}, but it has "
                    f"{_said(found.get(name))}; fit the drafter anew (viasd-fit drafter)"
                )
        words = self.shortlist
        if words.dim() != 1 or len(words) < 2 or not bool((words.diff() > 0).all()) or int(words[0]) < 0:
            raise DrafterError(f"the shortlist of {self.name} must be ascending token ids, two or more")
        if not all(bool(tensor.isfinite().all()) for tensor in self.weights.values()):
            raise DrafterError(f"{self.name} has numbers that are not finite; fit the drafter anew")

    @cached_property
    def digest(self) -> str:
        """Hash of sizes and weights: two files of one digest are the same drafter."""
        digest = hashlib.sha256(repr(self.shape).encode())
        for name in sorted(self.weights):
            digest.update(self.weights[name].float().numpy().tobytes())
        digest.update(self.shortlist.long().numpy().tobytes())
        return digest.hexdigest()[:16]

    @cached_property
    def chances(self) -> tuple[float, float] | None:
        """Chance that the first token of a block is kept, and each later one, as its record says; None where it does not."""
        decoded = self.details.get("decoded")
        places = decoded.get("by_place") if isinstance(decoded, Mapping) else None
        if not isinstance(places, list) or not places or not all(isinstance(p, int | float) for p in places):
            return None
        later = places[1:] or places
        return float(places[0]), sum(later) / len(later)

    def check(self, model: LayeredModel, model_id: str) -> None:
        """Refuses a target that the drafter was not trained for.

        Raises:
            DrafterError: Saying what differs.
        """
        difference = self.target.difference(model)
        if difference is None and int(self.shortlist[-1]) >= model.vocabulary:
            difference = f"vocabulary ({model.vocabulary} words, the drafter knows one of id {int(self.shortlist[-1])})"
        if difference is not None:
            raise DrafterError(
                f"drafter {self.name} was trained on {self.target.id}, but the {difference} of {model_id} is another; fit "
                f"one for it: viasd-fit drafter --kind feature --target {model_id}"
            )

    def save(self, path: str | Path) -> None:
        """Writes a safetensors file, to a temporary name first.

        Raises:
            DrafterError: If it can't be written.
        """
        about = {
            "schema": SCHEMA_VERSION,
            "kind": KIND,
            "name": self.name,
            "shape": asdict(self.shape),
            "target": asdict(self.target),
            **self.details,
        }
        held = {name: tensor.contiguous() for name, tensor in self.weights.items()}
        held[SHORTLIST] = self.shortlist.int().contiguous()
        write_atomically(Path(path), safetensors.torch.save(held, {_META: json.dumps(about)}), DrafterError)

    @classmethod
    def load(cls, path: str | Path) -> FeatureDrafterFile:
        """Reads a file that `save` wrote.

        Raises:
            DrafterError: If it can't be read or holds something else.
        """
        about, tensors = read_artefact(path, _META, "drafter file", "file of a feature drafter", DrafterError)
        known = isinstance(about, dict) and about.get("kind") == KIND and about.get("schema") == SCHEMA_VERSION
        if not known:
            found = (
                f"kind {about.get('kind')!r}, schema {about.get('schema')!r}" if isinstance(about, dict) else "neither"
            )
            raise DrafterError(
                f"expected a feature drafter of schema {SCHEMA_VERSION} in '{path}', but found {found}; make one by "
                "viasd-fit drafter --kind feature"
            )
        try:
            shape = FeatureShape(**{k: int(v) for k, v in about["shape"].items()})
            identity = ModelIdentity(**about["target"])
            shortlist, name = tensors.pop(SHORTLIST).long(), str(about["name"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DrafterError(f"'{path}' must say shape, target, name and shortlist, but {error!r}") from error
        details = {k: v for k, v in about.items() if k not in ("schema", "kind", "name", "shape", "target")}
        return cls(shape, tensors, shortlist, identity, name, details)


def _said(shape: torch.Size | None) -> str:
    return "none" if shape is None else "x".join(map(str, shape))
