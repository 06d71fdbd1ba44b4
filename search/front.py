"""The masks of a pareto front in a mask file: read, and taken out one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from viasd.errors import MaskError
from viasd.mask import LayerMask

# What holds for every mask of a search, not only for the one that the file is about.
_SHARED = (
    *("objective", "times", "skip_range", "alpha", "beta", "tau", "theta", "gamma", "seed", "kv", "dtype", "trials"),
    *("calibration", "versions", "date", "report_tokens"),
)


def front_entries(mask: LayerMask) -> list[tuple[float, Mapping[str, Any]]]:
    """The front of a mask file as (skipped layers, entry), fewest first; empty where it has none.

    Raises:
        MaskError: If the file's front is not a list of masks.
    """
    front = mask.details.get("front") or []
    try:
        n = len(mask.keep)
        found = [(round(2 * n * float(entry["skip_ratio"])) / 2, entry) for entry in front]
        return sorted(found, key=lambda e: e[0])
    except (TypeError, KeyError, ValueError) as error:
        raise MaskError(
            f"mask '{mask.name}': 'front' must be a list of masks with skip_ratio, keep, search, report"
        ) from error


def picked(mask: LayerMask, skipped: float, name: str) -> LayerMask:
    """One mask of a front as a mask of its own. Tier and guard figures, which only the file's own mask has, are left out.

    Args:
        mask: Of a file with a front.
        skipped: Layers that the wanted mask skips, a half layer counting half.
        name: Of the new mask.

    Raises:
        MaskError: If the file has no front, or none of that size.
    """
    entries = dict(front_entries(mask))
    if not entries:
        raise MaskError(f"mask '{mask.name}' has no front; search with --skip-range LO:HI --objective pareto")
    if skipped not in entries:
        sizes = ", ".join(f"{size:g}" for size in entries)
        raise MaskError(f"mask '{mask.name}' has no mask that skips {skipped:g} layers on its front; there are {sizes}")
    entry = entries[skipped]
    shared = {key: mask.details[key] for key in _SHARED if key in mask.details}
    figures = entry.get("report") or entry.get("search") or {}
    data = {**mask.to_json(), "sublayers": None, **entry, "name": name}
    plain = {
        k: data[k] for k in ("schema", "name", "pair", "target", "layers", "keep", "sublayers", "search", "report")
    }
    return LayerMask.from_json({**plain, **shared, **figures}, name)
