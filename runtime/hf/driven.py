"""The user's own models, driven layer by layer: wrapped and probed once, and again where something of them has changed."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from viasd.errors import OptionError, UnsupportedModelError
from viasd.layered import LayeredModel
from viasd.probe import probe
from viasd.shortlist import UNKNOWN
from viasd.vocab import common_vocabulary

# What was found out about a model is kept in its own __dict__: it has to die with the model, and every value refers to it.
_KEPT = "_viasd_driven"


class WidenedModel(LayeredModel):
    """A drafter that knows fewer words than its target: rows as wide as the target's, the rest with probability 0.

    Their logit is -1e4, not -inf, as in `viasd.shortlist`: a law is left where processors ban all that the drafter knows.

    Attributes:
        width: Columns of a row; None leaves rows as they are.
    """

    width: int | None = None

    def embed(self, ids: Sequence[int] | Tensor) -> Tensor:
        """See `LayeredModel.embed`. A word that it does not know is any word to it: that costs a draft, not a law."""
        if self.width is None:
            return super().embed(ids)
        row = torch.as_tensor(ids, dtype=torch.long, device=self.device)
        return super().embed(row.clamp(max=self.decoder.embed_tokens.weight.shape[0] - 1))

    def readout(self, hidden: Tensor, head: Any = None, *, steady: bool = False) -> Tensor:
        """See `LayeredModel.readout`."""
        rows = super().readout(hidden, head, steady=steady)
        missing = 0 if self.width is None else self.width - rows.shape[1]
        return rows if missing <= 0 else nn.functional.pad(rows, (0, missing), value=UNKNOWN)


@dataclass(eq=False)
class Driven:
    """What is kept of one model.

    Attributes:
        state: Its `state_of` when it was wrapped.
        models: Its wrapped forms by (logit rows, width).
        measured: What was measured with it as the target (`viasd.pair.Pair.measured`), by drafter.
    """

    state: tuple[Any, ...]
    models: dict[tuple[int, int | None], WidenedModel] = field(default_factory=dict)
    measured: MutableMapping[Any, dict[Any, Any]] = field(default_factory=WeakKeyDictionary)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied model starts anew."""

    def __reduce__(self) -> tuple[Any, ...]:
        """So does one that was pickled; its file does not mention viasd."""
        return type(None), ()


def state_of(model: nn.Module) -> tuple[Any, ...]:
    """Everything that a wrapped model relies on: modules, hooks, and where the weights are and whether they were written to.

    Weights that are changed behind autograd's back (through ``.data``) are not noticed where they stay where they are.
    """
    modules = tuple(
        (id(m), type(m), len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in vars(m))
        for m in model.modules()
    )
    return modules, tuple(_tensor_state(t) for t in chain(model.parameters(), model.buffers()))


def _tensor_state(tensor: Tensor) -> tuple[Any, ...]:
    version = None if tensor.is_inference() else tensor._version
    # Only ordinary tensors have an address; of a quantised one it is the object that is replaced.
    address = tensor.data_ptr() if type(tensor) in (Tensor, nn.Parameter) else None
    return id(tensor), address, version, tensor.dtype, tensor.device


def driven(model: Any, rows: int, width: int | None = None) -> WidenedModel:
    """A model driven layer by layer, its logits cut to `rows` and padded to `width`; probed the first time.

    Raises:
        UnsupportedModelError: If it can't be driven so, or is training.
    """
    if model.training:
        raise UnsupportedModelError(
            f"expected {type(model).__name__} in eval mode, but it is training; call model.eval()"
        )
    models = kept(model).models
    if (rows, width) not in models:
        # Ordinary tensors, whatever the caller's mode: they are kept beyond this call.
        with torch.inference_mode(mode=False), torch.no_grad():
            made = WidenedModel(model, vocabulary=rows)
            probe(made)
            made.width = width
        models[rows, width] = made
    return models[rows, width]


def kept(model: Any) -> Driven:
    """What is known of a model as it is now."""
    found, state = vars(model).get(_KEPT), state_of(model)
    if not isinstance(found, Driven) or found.state != state:
        found = vars(model)[_KEPT] = Driven(state)
    return found


def logit_rows(model: Any) -> int:
    """Columns of a model's logits."""
    head = model.get_output_embeddings()
    return int(head.weight.shape[0] if hasattr(head, "weight") else model.config.get_text_config().vocab_size)


def target_and_assistant(
    model: Any, assistant: Any | None, tokenizer: Any | None, assistant_tokenizer: Any | None
) -> tuple[WidenedModel, WidenedModel | None]:
    """Both models wrapped, their logits equally wide: the target keeps every row that transformers would sample from.

    Args:
        model: The target.
        assistant: The drafter, or None.
        tokenizer: The target's tokenizer, where it is known.
        assistant_tokenizer: The drafter's, likewise.

    Raises:
        OptionError: If nothing says that the two mean the same by their ids.
        TokenizerMismatchError: If they don't.
        UnsupportedModelError: If one of them can't be driven layer by layer.
    """
    rows = logit_rows(model)
    target = driven(model, rows)
    if assistant is None:
        return target, None
    own = logit_rows(assistant)
    sizes = [m.config.get_text_config().vocab_size for m in (model, assistant)]
    if tokenizer is not None and assistant_tokenizer is not None:
        shared = common_vocabulary(assistant_tokenizer, tokenizer, own, rows)
    elif sizes[0] == sizes[1]:
        shared = min(own, rows)
    else:
        raise OptionError(
            f"the model has a vocabulary of {sizes[0]} and assistant_model one of {sizes[1]}, so it takes both tokenizers "
            "to see whether they mean the same: viasd.hf.generate(model, ..., tokenizer=..., assistant_tokenizer=...)"
        )
    return target, driven(assistant, shared, None if shared == rows else rows)
