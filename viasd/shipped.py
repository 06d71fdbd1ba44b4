"""The masks and light heads that come with the package, and everything that ``--mask`` and ``--heads`` can name."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib import resources

from viasd import masks
from viasd.errors import HeadsError, MaskError
from viasd.heads import LENS, LightHeads, parse_exits
from viasd.mask import LayerMask

_HEADS = ".heads.safetensors"


def resolve_mask(spec: str, n_layers: int, pair: str | None) -> LayerMask | None:
    """What `--mask` names.

    ``none``, ``auto`` (`shipped_mask` of the pair), ``even:RATIO``, ``prefix:E`` (the first E layers and a light head), or
    what `find_mask` finds.

    Raises:
        MaskError: If the ratio or the number of layers is not a number, or there is no such mask.
    """
    if spec == "none":
        return None
    if spec == "auto":
        return None if pair is None else shipped_mask(pair)
    if spec.startswith("even:"):
        try:
            ratio = float(spec.removeprefix("even:"))
        except ValueError as error:
            raise MaskError(f"expected --mask even:RATIO with a number such as even:0.45, but got '{spec}'") from error
        return LayerMask.even(n_layers, ratio)
    if spec.startswith("prefix:"):
        try:
            layers = int(spec.removeprefix("prefix:"))
        except ValueError as error:
            raise MaskError(f"expected --mask prefix:E with a number of layers, but got '{spec}'") from error
        return LayerMask.first(n_layers, layers)
    return find_mask(spec)


def find_mask(spec: str) -> LayerMask:
    """A mask file, or a shipped mask by its name (``smollm2-135m.skip20``).

    Raises:
        MaskError: If there is neither, or the file is malformed.
    """
    names = masks.names()
    # Not `Path.exists`, which raises on a name that is too long.
    if spec in names and not os.path.exists(spec):
        return _read(spec)
    try:
        return LayerMask.load(spec)
    except MaskError as error:
        if os.path.exists(spec):
            raise
        raise MaskError(f"{error} (shipped masks, by name: {', '.join(names) or 'none'})") from error


def shipped_masks(pair: str) -> list[LayerMask]:
    """Masks shipped for a pair's target, found by ``FAMILY-TARGET.``; the drafter is immaterial to them."""
    family, _, rest = pair.rpartition("-")
    target = rest.partition(":")[2]
    return [_read(name) for name in masks.names() if name.startswith(f"{family}-{target}.")]


def shipped_mask(pair: str) -> LayerMask | None:
    """The one of them that decoding takes by itself: least predicted time of three tiers beside plain decoding.

    Both times are those that the search measured for its pair; whether the tier pays on this machine and with this
    drafter is found out before it is used.
    """
    return min(shipped_masks(pair), key=_predicted, default=None)


def resolve_heads(spec: str, pair: str | None) -> LightHeads:
    """What ``--heads`` names: ``auto`` (shipped for the pair's target), ``lens:E,E,...`` (untrained heads), or a file.

    Raises:
        HeadsError: If none are shipped for this target, or the file can't be read or is malformed.
        OptionError: If the exits of a lens are.
    """
    if spec.startswith(LENS):
        return LightHeads.lens(parse_exits(spec.removeprefix(LENS)))
    if spec != "auto":
        return LightHeads.load(spec)
    family, _, rest = (pair or "").rpartition("-")
    file = resources.files(masks) / f"{family}-{rest.partition(':')[2]}{_HEADS}"
    if not file.is_file():
        raise HeadsError(
            f"no light heads come with viasd for {pair or 'this target'}: train some by viasd-fit heads and add --heads "
            "FILE, or take untrained ones behind so many layers, such as --heads lens:7,15,22"
        )
    with resources.as_file(file) as path:
        return LightHeads.load(path)


def _predicted(mask: LayerMask) -> float:
    tier = mask.details.get("tier")
    times = tier.get("per_token") if isinstance(tier, Mapping) else None
    plain, cascade = (times.get(name) if isinstance(times, Mapping) else None for name in ("plain", "cascade"))
    return cascade / plain if plain and cascade else float("inf")


def _read(name: str) -> LayerMask:
    text = (resources.files(masks) / f"{name}{masks.SUFFIX}").read_text(encoding="utf-8")
    return LayerMask.from_json(json.loads(text), name)
