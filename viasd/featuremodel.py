"""A feature drafter at work on its target: entries in, hidden states and logits out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from viasd.attention import Segment, Step
from viasd.feature import FUSE, FeatureDrafterFile
from viasd.forms import layer_forms
from viasd.fuse import fuse
from viasd.heads import unit
from viasd.kernels import build
from viasd.kernels.native import NativeLayer, NativeProduct
from viasd.kv import SequenceKV
from viasd.layered import LayeredModel
from viasd.products import Dense, padded
from viasd.rotary import RotaryTable
from viasd.shortlist import ShortReadout


class FeatureModel:
    """The layers of a feature drafter on one target, in the target's dtype and on its device.

    Args:
        file: The drafter, which has passed `FeatureDrafterFile.check`.
        model: The target.

    Attributes:
        file: The drafter.
        model: The target.
        logits: Results of `run` ``[1, n, d]`` -> raw logits ``[n, V]`` of the token after next, -1e4 off the shortlist.
    """

    def __init__(self, file: FeatureDrafterFile, model: LayeredModel) -> None:
        self.file = file
        self.model = model
        device, dtype = model.device, model.dtype
        layers = file.shape.layers().to(device, dtype).eval().requires_grad_(False)
        layers.load_state_dict(
            {k.removeprefix("layers."): v.to(device, dtype) for k, v in file.weights.items() if k != FUSE}
        )
        fuse(list(layers))
        self._forms = [form for form in layer_forms(file.name, list(layers), "auto", None) if form is not None]
        self._rotary = LlamaRotaryEmbedding(file.shape.config).to(device)
        self._rotations = RotaryTable(self._turned, file.shape.context)
        self.logits = ShortReadout(model, file.shortlist)
        weight = file.weights[FUSE].to(device, dtype).contiguous()
        native = all(isinstance(form, NativeLayer) for form in self._forms)
        self._fuse = NativeProduct(Dense(weight), build.load()) if native else _padding(Dense(weight))

    @property
    def form(self) -> str:
        """How its layers run, see `LayeredModel.form`."""
        return "+".join(sorted({form.form for form in self._forms}))

    def new_kv(self) -> SequenceKV:
        """An empty cache for one sequence."""
        return SequenceKV(self.file.shape.depth)

    def run(self, states: Tensor, following: Sequence[int], kv: SequenceKV) -> Tensor:
        """Runs n entries, which follow those that `kv` counts, and counts them.

        Args:
            states: The target's hidden states behind its last layer ``[1, n, d]``, or earlier results of this instead.
            following: The token after each of these positions.
            kv: Cache of this sequence.

        Returns:
            What stands for the target's state one position further on, ``[1, n, d]``.
        """
        dtype, n = self.model.dtype, len(following)
        step = Step([Segment(kv, kv.full_len, n)], self.model.device)
        entered = torch.cat((states.to(self.model.device), self.model.embed(following)), dim=0)
        both = unit(entered.float()).to(dtype)
        hidden = self._fuse(torch.cat((both[0], both[1]), dim=-1))[None]
        rotation = self._rotations.rotation(step, "full", hidden.device)
        for form in self._forms:
            hidden = form(hidden, rotation, step)
        kv.full_len = kv.slim_len = kv.full_len + n
        return hidden

    def _turned(self, positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        cos, sin = self._rotary(torch.empty(0, dtype=self.model.dtype, device=positions.device), positions)
        return cos, sin


def _padding(product: Dense) -> Callable[[Tensor], Tensor]:
    return lambda rows: product(padded(rows, product))[: rows.shape[0]]
