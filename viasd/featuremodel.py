"""A feature drafter at work on its target: entries in, hidden states and logits out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from viasd.attention import Segment, Step
from viasd.feature import FUSE, FeatureDrafterFile
from viasd.forms import layer_forms
from viasd.fuse import fuse
from viasd.heads import unit
from viasd.kernels import build
from viasd.kernels.matrices import MOST_TOKENS, NativeProduct
from viasd.kernels.native import NativeLayer
from viasd.kv import SequenceKV
from viasd.layered import LayeredModel
from viasd.products import Dense, padded
from viasd.rotary import RotaryTable
from viasd.shortlist import ShortReadout


class Entries(NamedTuple):
    """One sequence's share of a pass.

    Attributes:
        states: See `FeatureModel.run`.
        following: Likewise.
        kv: Likewise.
    """

    states: Tensor
    following: Sequence[int]
    kv: SequenceKV


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
        device, dtype = self._device, self._dtype = model.device, model.dtype  # looked up once: modules are slow to ask
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
        native = [form for form in self._forms if isinstance(form, NativeLayer)]
        self._native = len(native) == len(self._forms)
        self._most = min((form.most for form in native), default=MOST_TOKENS)
        self._fuse = NativeProduct(Dense(weight), build.load()) if self._native else _padding(Dense(weight))

    @property
    def form(self) -> str:
        """How its layers run, see `LayeredModel.form`."""
        return "+".join(sorted({form.form for form in self._forms}))

    def new_kv(self) -> SequenceKV:
        """An empty cache for one sequence."""
        return SequenceKV(self.file.shape.depth)

    def run(self, states: Tensor, following: Sequence[int], kv: SequenceKV) -> Tensor:
        """Runs n entries of one sequence, which follow those that `kv` counts, and counts them.

        Args:
            states: The target's hidden states behind its last layer ``[1, n, d]``, or earlier results of this instead.
            following: The token after each of these positions.
            kv: Cache of this sequence.

        Returns:
            What stands for the target's state one position further on, ``[1, n, d]``.
        """
        hidden = self.together([Entries(states, following, kv)])[0]
        kv.full_len = kv.slim_len = kv.full_len + len(following)
        return hidden

    def together(self, parts: Sequence[Entries]) -> list[Tensor]:
        """One pass over entries of several sequences, as `run` for each; no cache counts them yet.

        With the CPU kernels each has the bits that it has alone.
        """
        lengths = [len(part.following) for part in parts]
        step = Step(
            [Segment(part.kv, part.kv.full_len, n) for part, n in zip(parts, lengths, strict=True)], self._device
        )
        # The target's states lie where its last layer is, results of this where its first one is.
        placed = [part.states.to(self._device) for part in parts]
        states = placed[0] if len(placed) == 1 else torch.cat(placed, dim=1)
        following = self.model.embed([token for part in parts for token in part.following])
        both = unit(torch.cat((states, following), dim=0).float()).to(self._dtype)
        entered = torch.cat((both[0], both[1]), dim=-1)
        total = sum(lengths)
        # Whether the kernels run a sequence's entries must not depend on how many another one has.
        mixed = self._native and len(parts) > 1 and total > self._most
        pieces = step.pieces(self._most) if mixed else [(slice(0, total), step)]
        ran = [self._ran(entered[rows], piece) for rows, piece in pieces]
        hidden = ran[0] if len(ran) == 1 else torch.cat(ran, dim=1)
        return [hidden] if len(parts) == 1 else list(hidden.split(lengths, dim=1))

    def _ran(self, entered: Tensor, step: Step) -> Tensor:
        # By the kernel wherever the layers are.
        hidden = self._fuse(entered, max(segment.length for segment in step.segments) <= self._most)[None]
        rotation = self._rotations.rotation(step, "full", hidden.device)
        for form in self._forms:
            hidden = form(hidden, rotation, step)
        return hidden

    def _turned(self, positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        cos, sin = self._rotary(torch.empty(0, dtype=self._dtype, device=positions.device), positions)
        return cos, sin


def _padding(product: Dense) -> Callable[[Tensor, bool], Tensor]:
    return lambda rows, _: product(padded(rows, product))[: rows.shape[0]]
