"""Weight-only 8 and 4 bits for the written-out layers on a CPU, by our own kernels or by torch's packed products.

The quantised model is one model for all tiers: drafting with skipped layers, the slim verifier and the full verifier run
the same quantised weights. *Lossless* is therefore relative to the quantised target, which is another model than the
unquantised one.

Int8 has one scale per output row; int4 has a scale and an offset per 32 weights of a row, and takes over the codes of a
GGUF file's Q4_1 weights as they are, with no second quantisation. With our kernels (passes of at most 32 tokens) a row's
result does not depend on how many travel together, and nor does attention; with torch's products that was found too up to
32 rows, but not for attention over bf16 keys. The embedding table stays as it is, and so does an LM head that shares it,
because its memory is needed anyway.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from viasd.decoder import find_decoder
from viasd.errors import LoadError, OptionError, UnsupportedModelError
from viasd.forms import ModelProducts
from viasd.kernels import build
from viasd.kernels.matrices import NativeInt4
from viasd.lean import LayerProducts, linear_groups, obstacle
from viasd.products import FEW_ROWS, Matrix, Product, dense, fast_bf16

QUANTIZED = ("int8", "int4")
#: Weights that share a scale in int4: the size of GGUF's blocks, and the smallest that torch's product knows.
GROUP = 32

_OPERATIONS = {
    "int8": ("_weight_int8pack_mm",),
    "int4": ("_convert_weight_to_int4pack_for_cpu", "_weight_int4pack_mm_for_cpu"),
}
# Torch's kernels read whole vectors: other shapes raise, or worse, read beyond the end.
_INPUTS, _INT4_OUTPUTS = 32, 16


class GroupCodes(NamedTuple):
    """Weights ``[o, k]`` as 4-bit codes: ``w = (code - 8) * scale + zero``, a scale and a zero for each `GROUP` of k.

    Attributes:
        codes: ``[o, k]``, 0 to 15, uint8.
        scale: ``[o, k / GROUP]``.
        zero: ``[o, k / GROUP]``.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor

    def weights(self) -> Tensor:
        """The weights they stand for, ``[o, k]`` in fp32."""
        scale, zero = (part.float().repeat_interleave(GROUP, dim=1) for part in (self.scale, self.zero))
        return (self.codes.float() - 8) * scale + zero


class Int8:
    """A product with 8-bit weights ``codes * scale``.

    Args:
        codes: ``[o, k]`` int8, k a multiple of 32.
        scale: ``[o]``, in the dtype of the rows.
        bias: ``[o]`` or None.
    """

    least_rows = 1

    def __init__(self, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        self._codes, self._scale, self._bias = codes, scale, bias

    @property
    def tensors(self) -> Sequence[Tensor]:
        """See `Product`."""
        return [t for t in (self._codes, self._scale, self._bias) if t is not None]

    @property
    def matrices(self) -> Sequence[Matrix]:
        """See `Product`."""
        return [Matrix("int8", self._codes, self._scale, bias=self._bias)]

    def __call__(self, rows: Tensor) -> Tensor:
        """See `Product`."""
        if rows.shape[0] > FEW_ROWS and (rows.dtype == torch.float32 or fast_bf16()):
            # A prompt: a tenth of the packed product's time on a Sapphire Rapids, and bf16 holds every code exactly.
            out = linear(rows, self._codes.to(rows.dtype)) * self._scale
        else:
            out = torch._weight_int8pack_mm(rows.contiguous(), self._codes, self._scale)
        return out if self._bias is None else out + self._bias


class Int4:
    """A product with 4-bit weights by torch, where our kernels can't be had.

    Args:
        groups: The weights; o a multiple of 16, k of 32.
        dtype: Of the rows; scales and zeros are rounded to it.
        bias: ``[o]`` or None.
    """

    least_rows = 1

    def __init__(self, groups: GroupCodes, dtype: torch.dtype, bias: Tensor | None = None) -> None:
        self._packed = torch._convert_weight_to_int4pack_for_cpu(groups.codes.to(torch.int32), 1)
        self._scales = torch.stack((groups.scale.t(), groups.zero.t()), dim=-1).to(dtype).contiguous()
        self._bias = bias

    @property
    def tensors(self) -> Sequence[Tensor]:
        """See `Product`."""
        return [t for t in (self._packed, self._scales, self._bias) if t is not None]

    @property
    def matrices(self) -> Sequence[Matrix]:
        """See `Product`; none, because the weights are packed as torch's product wants them."""
        return []

    def __call__(self, rows: Tensor) -> Tensor:
        """See `Product`."""
        out: Tensor = torch._weight_int4pack_mm_for_cpu(rows.contiguous(), self._packed, GROUP, self._scales)
        return out if self._bias is None else out + self._bias


def int8_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric 8-bit codes ``[o, k]`` and their scales ``[o]`` in the weight's dtype, largest magnitude to 127."""
    wide = weight.float()
    # Rounded first, so that codes fit the scale that is used.
    scale = (wide.abs().amax(dim=1) / 127).clamp_min(1e-8).to(weight.dtype)
    codes = (wide / scale.float()[:, None]).round().clamp(-127, 127)
    return codes.to(torch.int8), scale


def int4_codes(weight: Tensor) -> GroupCodes:
    """4-bit codes of the weights, smallest of a group to 0, largest to 15; scale and zero in the weight's dtype."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    low, high = groups.aminmax(dim=-1)
    scale = ((high - low) / 15).clamp_min(1e-8).to(weight.dtype)
    zero = (low + 8 * scale.float()).to(weight.dtype)
    codes = ((groups - zero.float()[..., None]) / scale.float()[..., None]).round().add(8).clamp(0, 15)
    return GroupCodes(codes.flatten(1).to(torch.uint8), scale, zero)


def check_quantized(name: str, layers: str, device: torch.device) -> None:
    """Refuses what can't be quantised, before anything is loaded.

    Raises:
        OptionError: If layers are to run through their modules, or the device is no CPU.
        LoadError: If this torch lacks the products.
    """
    if layers == "hf":
        raise OptionError(
            f"quantization {name} needs layers that are written out, but layers='hf' was asked for; leave one out"
        )
    if device.type != "cpu":
        raise OptionError(f"quantization {name} runs on a CPU, but the device is {device}; use torchao-{name} there")
    if missing := [operation for operation in _OPERATIONS[name] if not hasattr(torch, operation)]:
        raise LoadError(f"quantization {name} needs torch's {missing[0]}; use torch 2.6 or newer")


@torch.no_grad()
def quantize(
    model: Any, name: str, known: Mapping[str, GroupCodes] | None = None, *, kernels: bool = True
) -> ModelProducts:
    """Quantises the linear layers of a model.

    The model's own weights are overwritten with what the codes stand for, so that its forward is the reference for the
    probe; `release` frees them afterwards. A matrix whose shape a kernel can't take keeps 8 bits, or its weights.

    Args:
        model: A Hugging Face causal LM on a CPU, which nobody else uses.
        name: ``int8`` or ``int4``.
        known: Codes of some weights by the parameter's name, taken as they are in int4.
        kernels: Whether int4 weights are laid out for our own kernels, where these can be had (`viasd.kernels`).

    Raises:
        UnsupportedModelError: If a layer can't be written out.
    """
    decoder = find_decoder(model)
    library = build.load() if kernels and build.why_missing() is None else None
    names = {id(parameter): key for key, parameter in model.named_parameters()}
    made = []
    for index, layer in enumerate(decoder.layers):
        if reason := obstacle(layer):
            raise UnsupportedModelError(
                f"{type(model).__name__}: layer {index} can't be quantised to {name}: {reason}; use a back-end "
                f"such as torchao-{name}"
            )
        made.append(
            LayerProducts(*(_product(group, name, names, known or {}, library) for group in linear_groups(layer)))
        )
    head = model.get_output_embeddings()
    shared = head.weight is decoder.embed_tokens.weight
    return ModelProducts(
        made, None if shared or type(head) is not nn.Linear else _product([head], "int8", names, {}, library)
    )


def release(model: Any, products: ModelProducts) -> None:
    """Frees the weights that `products` stand for. The model's own forward no longer works; its `state_dict` has no values.

    Where a matrix could not be quantised its weights stay.
    """
    groups = [group for layer in find_decoder(model).layers for group in linear_groups(layer)]
    made = [product for layer in products.layers for product in layer]
    if products.head is not None:
        groups.append([model.get_output_embeddings()])
        made.append(products.head)
    for group, product in zip(groups, made, strict=True):
        if isinstance(product, Int8 | Int4 | NativeInt4):
            for module in group:
                module.weight = nn.Parameter(module.weight.detach().to("meta"), requires_grad=False)


def _product(
    modules: Sequence[Any],
    name: str,
    names: Mapping[int, str],
    known: Mapping[str, GroupCodes],
    library: ctypes.CDLL | None,
) -> Product:
    weights = [module.weight for module in modules]
    inputs, outputs = weights[0].shape[1], sum(weight.shape[0] for weight in weights)
    biases = [module.bias for module in modules]
    if inputs % _INPUTS or (any(b is None for b in biases) and any(b is not None for b in biases)):
        return dense(modules)
    bias = None if biases[0] is None else torch.cat(biases).detach()
    if name == "int8" or (outputs % _INT4_OUTPUTS and library is None):
        parts = [int8_codes(weight.detach()) for weight in weights]
        for weight, (codes, scale) in zip(weights, parts, strict=True):
            weight.copy_(codes.float() * scale.float()[:, None])
        return Int8(torch.cat([codes for codes, _ in parts]), torch.cat([scale for _, scale in parts]), bias)
    groups = [known.get(names[id(weight)]) or int4_codes(weight.detach()) for weight in weights]
    for weight, group in zip(weights, groups, strict=True):
        weight.copy_(group.weights())
    joined = GroupCodes(*(torch.cat([part.to(torch.float32) for part in parts]) for parts in zip(*groups, strict=True)))
    dtype = weights[0].dtype
    if library is not None and dtype in (torch.float32, torch.bfloat16):
        return NativeInt4(joined.codes.to(torch.uint8), joined.scale.to(dtype), joined.zero.to(dtype), bias, library)
    return Int4(joined, dtype, bias)
