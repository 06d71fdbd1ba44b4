"""Features scored on labelled drafts, each by the estimator run online: predict, then observe, then go on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from viasd.estimator import Array, LogisticEstimator
from viasd.runtime.adaptive.edges import REFIT_OBSERVATIONS, REFIT_STEPS
from viasd.runtime.adaptive.reliability import BINS
from viasd.runtime.bench.acceptance.features import FEATURES, MEASURED, SHIPPED, Feature

_FLOOR = 1e-7  # a certain and wrong prediction costs much, not infinitely much


@dataclass(frozen=True)
class Online:
    """One feature's predictions, each made before its label was seen.

    Attributes:
        predicted: ``[n]``, in the order of the drafts.
        coefficients: After every refit: drafts seen, slope, and the K intercepts.
    """

    predicted: Array
    coefficients: list[tuple[int, float, list[float]]]


def run_online(feature: Feature, columns: Mapping[str, Array], labels: str) -> Online:
    """Runs one feature's estimator along the drafts, refitted as Adaptive Verification refits it.

    Args:
        feature: The feature.
        columns: Labelled drafts (`viasd.runtime.bench.acceptance.drafts.COLUMNS`).
        labels: ``kept`` (0 or 1) or ``overlap`` (the chance of being kept): what is learnt from.
    """
    values = feature.of({name: columns[name] for name in MEASURED})
    if not feature.fitted:
        return Online(values, [])
    positions = columns["position"].astype(np.int64)
    estimator = LogisticEstimator(replace(feature.config, positions=int(positions.max(initial=0)) + 1))
    predicted = np.empty(len(values))
    course: list[tuple[int, float, list[float]]] = []
    starts = np.flatnonzero(np.diff(columns["prompt"] * 1e6 + columns["round"], prepend=-1.0))
    steps = 0
    for begin, end in zip(starts, [*starts[1:], len(values)], strict=True):
        f, k = values[begin:end, None], positions[begin:end]
        predicted[begin:end] = estimator.predict(f, k)
        estimator.observe(f, k, columns[labels][begin:end])
        steps += 1
        if steps >= REFIT_STEPS or estimator.pending >= REFIT_OBSERVATIONS:
            estimator.refit()
            steps = 0
            course.append((int(end), float(estimator.slopes[0]), estimator.intercepts.tolist()))
    return Online(predicted, course)


def auc(score: Array, kept: Array) -> float | None:
    """Area under the ROC curve: the chance that a kept token has the higher score, ties counting half.

    None where all drafts were kept or none was: there is nothing to tell apart then.
    """
    positives = kept.sum()
    negatives = len(kept) - positives
    if not positives or not negatives:
        return None
    _, inverse, counts = np.unique(score, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return float((ranks[kept > 0.5].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def log_loss(predicted: Array, kept: Array) -> float:
    """Mean negative log-likelihood of the labels, in nats."""
    p = predicted.clip(_FLOOR, 1 - _FLOOR)
    return float(-np.mean(kept * np.log(p) + (1 - kept) * np.log(1 - p)))


@dataclass(frozen=True)
class Bin:
    """Drafts whose predictions fall into one tenth of [0, 1]."""

    drafts: int
    predicted: float
    kept: float


def reliability(predicted: Array, kept: Array) -> list[Bin]:
    """Mean prediction and share kept, by tenths of the prediction; empty ones have 0 drafts."""
    which = np.minimum((predicted * BINS).astype(int), BINS - 1)
    n = np.bincount(which, minlength=BINS)
    some = np.maximum(n, 1)
    means = np.bincount(which, predicted, minlength=BINS) / some
    shares = np.bincount(which, kept, minlength=BINS) / some
    return [Bin(int(a), float(b), float(c)) for a, b, c in zip(n, means, shares, strict=True)]


def calibration_error(bins: list[Bin]) -> float:
    """Expected calibration error: mean distance of prediction and share kept, weighted by drafts."""
    return sum(b.drafts * abs(b.predicted - b.kept) for b in bins) / max(1, sum(b.drafts for b in bins))


def score(columns: Mapping[str, Array], labels: str) -> dict[str, Any]:
    """Every feature's figures on all drafts, and the course of the shipped one; JSON-able.

    Figures are against what became of the drafts (kept or not), whatever the estimators learnt from.
    """
    kept = columns["kept"]
    runs = {feature.name: run_online(feature, columns, labels) for feature in FEATURES}
    table = {}
    for feature in FEATURES:
        predicted = runs[feature.name].predicted
        table[feature.name] = {
            "auc": auc(predicted, kept),
            "log_loss": log_loss(predicted, kept),
            "ece": calibration_error(reliability(predicted, kept)),
            "lossless": feature.lossless,
        }
    shipped = runs[SHIPPED]
    return {
        "drafts": len(kept),
        "kept": float(kept.mean()),
        "labels": labels,
        "features": table,
        "reliability": [vars(b) for b in reliability(shipped.predicted, kept)],
        "coefficients": [{"drafts": n, "slope": w, "intercepts": b} for n, w, b in shipped.coefficients],
        "by_position": by_position(shipped.predicted, columns),
    }


def by_position(predicted: Array, columns: Mapping[str, Array]) -> list[dict[str, float]]:
    """Mean prediction and share kept at every place of a block."""
    found = []
    for place in range(int(columns["position"].max(initial=-1)) + 1):
        here = columns["position"] == place
        found.append(
            {
                "position": place,
                "drafts": int(here.sum()),
                "predicted": float(predicted[here].mean()) if here.any() else 0.0,
                "kept": float(columns["kept"][here].mean()) if here.any() else 0.0,
            }
        )
    return found
