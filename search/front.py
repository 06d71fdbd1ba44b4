"""The masks of a pareto front in a mask file: read, and taken out one at a time."""

from __future__ import annotations

from typing import Any

from viasd.errors import MaskError
from viasd.mask import LayerMask

# What holds for every mask of a search, not only for the one that the file is about.
_SHARED = (
    *("objective", "times", "skip_range", "alpha", "beta", "tau", "theta", "gamma", "seed", "kv", "dtype", "trials"),
    *("calibration", "versions", "date", "report_tokens"),
)


def front_masks(mask: LayerMask) -> list[LayerMask]:
    """The front of a mask file as masks of their own, fewest skipped layers first; empty where it has none.

    Tier and guard figures, which only the file's own mask has, are left out.

    Raises:
        MaskError: If the file's front is not a list of masks.
    """
    front = mask.details.get("front") or []
    try:
        return sorted((_own(mask, entry) for entry in front), key=lambda m: m.skip_ratio)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise MaskError(
            f"mask '{mask.name}': 'front' must be a list of masks with skip_ratio, keep, search, report"
        ) from error


def skipped_layers(mask: LayerMask) -> float:
    """Layers that a mask skips, a half layer counting half."""
    return len(mask.keep) - sum(mask.keep) - len(mask.partial) / 2


def picked(mask: LayerMask, *, skipped: float | None = None, number: int | None = None) -> LayerMask:
    """One mask of a front.

    Args:
        mask: Of a file with a front.
        skipped: Layers that the wanted mask skips, a half layer counting half. Of half layers the front may have several
            masks of a size.
        number: Or its place on the front, from 1.

    Raises:
        MaskError: If the file has no front, none of that size or number, or several of that size.
    """
    masks = front_masks(mask)
    if not masks:
        raise MaskError(f"mask '{mask.name}' has no front; search with --skip-range LO:HI --objective pareto")
    if number is not None:
        if not 1 <= number <= len(masks):
            raise MaskError(f"mask '{mask.name}' has {len(masks)} masks on its front, from 1 on; there is no {number}")
        return masks[number - 1]
    places = [place for place, one in enumerate(masks, 1) if skipped_layers(one) == skipped]
    if not places:
        sizes = ", ".join(dict.fromkeys(f"{skipped_layers(one):g}" for one in masks))
        raise MaskError(f"mask '{mask.name}' has no mask that skips {skipped:g} layers on its front; there are {sizes}")
    if len(places) > 1:
        raise MaskError(
            f"mask '{mask.name}' has {len(places)} masks that skip {skipped:g} layers on its front; pick one by --number "
            f"({', '.join(map(str, places))})"
        )
    return masks[places[0] - 1]


def _own(mask: LayerMask, entry: Any) -> LayerMask:
    """An entry of a front as a mask of its own."""
    halves = {half: entry[half] for half in ("search", "report")}
    figures = halves["report"] or halves["search"] or {}
    shared = {key: mask.details[key] for key in _SHARED if key in mask.details}
    file = {key: value for key, value in mask.to_json().items() if key in ("schema", "pair", "target", "layers")}
    layers = {"keep": entry["keep"], "sublayers": entry.get("sublayers")}
    return LayerMask.from_json({**file, "name": mask.name, **layers, **halves, **shared, **figures}, mask.name)
