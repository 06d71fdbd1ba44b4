"""A slim verifier as a model of its own: the target without the layers that a mask skips, for other tools to draft with.

What can be said exactly in the weights and the config of the same architecture is said there. A skipped layer is left out;
a layer that runs in part keeps both halves, one of which adds zero (its last projection is zero); a light head becomes the
LM head, ``E* T``. A stitch can't be: it adds ``h A + b``, which grows with the length of h, to the residual stream, and
whatever a layer adds is computed from the *normed* h, the same for every length. (It could be moved into the weights before
it only if ``1 + A`` kept lengths, so that the norms before it saw no difference.)
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from viasd.decoder import find_decoder
from viasd.errors import HeadsError, MaskError, UnsupportedModelError
from viasd.heads import LightHeads
from viasd.mask import LayerMask
from viasd.routes import ATTENTION

# What a half of a layer adds is this projection's output.
_LAST = {True: "mlp.down_proj.", False: "self_attn.o_proj."}


@dataclass(frozen=True)
class Slimmed:
    """A slim model.

    Attributes:
        model: Only for saving: its weights are the target's own tensors, and what is not saved has no memory.
        layers: Indices, in the target, of its layers.
        regular: Whether the kinds of its layers (sliding or full attention) come in the same order as the target's first.
        window: Length of the target's sliding window, None where no layer has one.
    """

    model: Any
    layers: tuple[int, ...]
    regular: bool
    window: int | None


def slimmed(model: Any, mask: LayerMask, words: int, heads: LightHeads | None = None) -> Slimmed:
    """The slim verifier of a mask as a model of the target's own class. The target is only read.

    Args:
        model: The target, a Hugging Face causal LM with weights as they are (not quantised).
        mask: Layers to keep, without stitches.
        words: Logit rows that stand for real tokens.
        heads: Light heads, for a mask that ends in one.

    Raises:
        MaskError: If the mask has stitches.
        HeadsError: If the mask ends in a head that can't become an LM head, or that is not there.
        UnsupportedModelError: If the model is quantised or of another shape than a decoder of the Llama kind.
    """
    if getattr(model, "is_quantized", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} is quantised, and only weights as they are can be written out; load it unquantised"
        )
    check_expressible(mask)
    decoder, route = find_decoder(model), mask.route
    state = _kept(model, decoder, route.layers, route.parts)
    config, text = _config(model, len(mask.keep), route.layers)
    if mask.prefix is not None:
        transform = _transform(mask, heads, words)
        if transform is not None:
            name = _name(model, model.get_output_embeddings()) + ".weight"
            # One word of the state's own dtype is rounded once, from a product in fp32.
            state[name] = (state[name].float() @ transform.to(state[name].device).float()).to(state[name].dtype)
            config.tie_word_embeddings = text.tie_word_embeddings = False
    with torch.device("meta"):
        slim = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    slim.load_state_dict(state, assign=True)
    slim.tie_weights()
    if getattr(model, "generation_config", None) is not None:
        slim.generation_config = copy.deepcopy(model.generation_config)
    kinds = list(getattr(decoder.config, "layer_types", None) or ["full_attention"] * len(mask.keep))
    now = [kinds[i] for i in route.layers]
    window = decoder.config.sliding_window if "sliding_attention" in kinds else None
    return Slimmed(slim, route.layers, now == kinds[: len(now)], window)


def check_expressible(mask: LayerMask) -> None:
    """Refuses a mask that no weights can stand for.

    Raises:
        MaskError: If it has stitches.
    """
    if mask.stitches is not None:
        raise MaskError(
            f"mask '{mask.name}' has stitches, which no decoder layer can express: a layer reads the normed state, whose "
            "length is lost, and a stitch needs it; export without them (--without-stitches)"
        )


def _kept(model: Any, decoder: Any, layers: tuple[int, ...], parts: dict[int, str]) -> dict[str, Tensor]:
    """The weights of the slim model by name: those outside the layers, and those of its layers, counted anew."""
    place = {index: new for new, index in enumerate(layers)}
    speaking = set(parts)
    before = f"{_name(model, decoder)}.layers."
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if not name.startswith(before):
            state[name] = tensor
            continue
        number, _, rest = name.removeprefix(before).partition(".")
        index = int(number)
        if index in place:
            silent = index in parts and rest.startswith(_LAST[parts[index] == ATTENTION])
            state[f"{before}{place[index]}.{rest}"] = torch.zeros_like(tensor) if silent else tensor
            if silent:
                speaking.discard(index)
    if speaking:
        raise UnsupportedModelError(
            f"{type(model).__name__} has other projections than self_attn.o_proj and mlp.down_proj, so half a layer can't "
            "be written out; use a mask of whole layers"
        )
    return state


def _config(model: Any, n_layers: int, layers: tuple[int, ...]) -> tuple[Any, Any]:
    """A copy of the model's config with these layers alone, and what of it describes the text decoder."""
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    # Whatever a family lists per layer: kinds of attention, layers without rotary embeddings, kinds of MLP.
    listed = {
        name: [value[i] for i in layers]
        for name, value in vars(text).items()
        if "layer" in name and isinstance(value, list | tuple) and len(value) == n_layers
    }
    text.num_hidden_layers = len(layers)
    for name, value in listed.items():
        setattr(text, name, value)
    return config, text


def _transform(mask: LayerMask, heads: LightHeads | None, words: int) -> Tensor | None:
    """T ``[d, d]`` of the head that a mask ends in; None for the identity."""
    if heads is None:
        raise HeadsError(
            f"mask '{mask.name}' ends behind layer {mask.prefix}, so it needs a light head there; add --heads FILE, or "
            f"--heads lens:{mask.prefix} for the model's own"
        )
    if mask.prefix not in heads.exits:
        raise HeadsError(
            f"mask '{mask.name}' ends behind layer {mask.prefix}, but {heads.name} has heads behind "
            f"{', '.join(map(str, heads.exits))}; use one of these"
        )
    if heads.shortlist is not None and len(heads.shortlist) < words:
        raise HeadsError(
            f"{heads.name} knows {len(heads.shortlist)} of {words} words, and an LM head can't say of the others that they "
            f"are impossible; train heads of the whole vocabulary (viasd-fit heads --shortlist {words})"
        )
    return None if heads.transforms is None else heads.transforms[heads.exits.index(mask.prefix)]


def _name(model: Any, wanted: Any) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)
