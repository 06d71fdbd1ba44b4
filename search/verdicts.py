"""What decoding makes of a mask: whether its slim tier pays, and what the guard can know beforehand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from viasd.confident import ConfidentConfig
from viasd.mask import LayerMask
from viasd.pair import Pair
from viasd.runtime.config import DecodingConfig
from viasd.runtime.guard import GuardConfig
from viasd.runtime.readouts import Readouts
from viasd.runtime.tiers import measure_tiers
from viasd.search import guardfit
from viasd.search.scorer import Scorer

_MODE = "via"  # the mode that masks are for


def tier_of(pair: Pair, gamma: int, mask: LayerMask, readout: ConfidentConfig | None = None) -> dict[str, Any]:
    """Delta and predicted times of three tiers, for a mask file.

    Args:
        pair: The pair.
        gamma: Drafted tokens a block.
        mask: The mask.
        readout: Of its slim verifier; None is the last layer's.
    """
    report = measure_tiers(pair, mask, DecodingConfig(gamma=gamma), _MODE, readouts=Readouts(None, readout))
    return {
        "mode": _MODE,
        "delta": report.delta,
        "pays": report.keeps_slim,
        "sentence": report.sentence(),
        "seconds": _finite(report.seconds),
        "per_token": _finite(report.per_token),
        "rejection": _finite(report.rejection),
    }


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """JSON knows no infinity: a tier that can't be predicted is null."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def guard_of(pair: Pair, gamma: int, search: Scorer, report: Scorer, mask: LayerMask) -> dict[str, Any]:
    """Start values of the guard and how well they hold; nothing where the drafter had too little to say.

    Args:
        pair: The pair.
        gamma: Drafted tokens a block.
        search: Scores the text that they are fitted on; shares the full path's cache, as decoding does.
        report: The same of the text on which they are tried.
        mask: The mask.
    """
    seen = guardfit.observe(pair, search, mask.route, gamma)
    other = guardfit.observe(pair, report, mask.route, gamma)
    if len(seen) < guardfit.MIN_OBSERVATIONS or not len(other):
        return {}
    estimator = guardfit.fit(seen)
    found = guardfit.reliability(estimator, other)
    # Start values that would let too much pass are worse than none: without them the guard is lossless until it knows.
    good = found["passed_disagreed"] <= GuardConfig().max_disagreement * found["passed"]
    return {**({"guard": estimator.state()} if good else {}), "guard_reliability": {**found, "stored": good}}
