"""The form in which each layer of a model runs: by our CPU kernels, written out, or through its own module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from viasd.errors import OptionError, UnsupportedModelError
from viasd.fuse import fuse
from viasd.kernels import build
from viasd.kernels.native import NativeLayer, layer_obstacle
from viasd.lean import LayerProducts, LeanLayer, obstacle
from viasd.products import Product

LAYERS = ("auto", "hf", "fused", "native")


class ModelProducts(NamedTuple):
    """Matrix products in place of a model's linear layers.

    Attributes:
        layers: One set per layer.
        head: The LM head, None for the model's own.
    """

    layers: Sequence[LayerProducts]
    head: Product | None


def layer_forms(
    name: str, layers: Sequence[nn.Module], how: str, weights: ModelProducts | None
) -> list[LeanLayer | NativeLayer | None]:
    """Each layer as it runs, None where that is its module.

    Args:
        name: Of the model, for errors.
        layers: Its layers.
        how: See `viasd.layered.LayeredModel`.
        weights: See there.

    Raises:
        OptionError: If `how` is unknown.
        UnsupportedModelError: If a form is asked for that a layer can't have.
    """
    if how not in LAYERS:
        raise OptionError(f"layers must be one of {', '.join(LAYERS)}, but got '{how}'")
    if how == "hf":
        return [None] * len(layers)
    reasons = [obstacle(layer) for layer in layers]
    if how != "auto":
        _all_can(name, reasons, "fused" if how == "fused" else "run by the CPU kernels")
    if how == "fused" and weights is None:
        fuse(layers)
    products = [None] * len(layers) if weights is None else weights.layers
    lean = [
        None if reason else LeanLayer(layer, made)
        for layer, reason, made in zip(layers, reasons, products, strict=True)
    ]
    if how == "fused":
        return list(lean)
    reasons = [None if layer is None else layer_obstacle(layer) for layer in lean]
    if how == "native":
        if missing := build.why_missing():
            raise UnsupportedModelError(f"layers='native' needs the CPU kernels, but {missing}; use --layers auto")
        _all_can(name, reasons, "run by the CPU kernels")
    elif all(layer is None or reason for layer, reason in zip(lean, reasons, strict=True)) or build.why_missing():
        return list(lean)
    library = build.load()
    return [
        layer if layer is None or reason else NativeLayer(layer, library)
        for layer, reason in zip(lean, reasons, strict=True)
    ]


def _all_can(name: str, reasons: Sequence[str | None], what: str) -> None:
    for index, reason in enumerate(reasons):
        if reason:
            raise UnsupportedModelError(f"{name}: layer {index} can't be {what}: {reason}; use --layers auto")
