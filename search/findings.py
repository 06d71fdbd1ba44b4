"""The reporting half: best mask, controls, tiers and guard on text that the search never saw; all of it for the file."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
import torch
import transformers

import viasd
from viasd.mask import LayerMask
from viasd.pair import Pair
from viasd.runtime.config import DecodingConfig
from viasd.runtime.guard import GuardConfig
from viasd.runtime.tiers import measure_tiers
from viasd.search import guardfit
from viasd.search.calibration import Calibration, Passage
from viasd.search.config import SearchConfig
from viasd.search.outcome import Figures, figures_of, median_of, rank
from viasd.search.proposals import Mask, SearchSpace
from viasd.search.scorer import Score, Scorer

_MODE = "via"  # the mode that masks are for


@dataclass(frozen=True)
class Findings:
    """What the searching half says.

    Attributes:
        space: The masks searched.
        best: Best mask.
        best_figures: Its figures.
        even_figures: Those of the even-spaced mask, or None where it was given up early.
        controls: Figures of random masks.
        wanted: How many random masks there should be.
    """

    space: SearchSpace
    best: Mask
    best_figures: Figures
    even_figures: Figures | None
    controls: Mapping[Mask, Figures]
    wanted: int

    @property
    def even(self) -> Mask:
        """The even-spaced mask."""
        return self.space.even()

    @property
    def random_best(self) -> Mask | None:
        """The best of the random masks."""
        return min(self.controls, key=lambda m: rank(self.controls[m]), default=None)

    @property
    def complete(self) -> bool:
        """Whether there are as many random masks as there should be, and at least one."""
        return len(self.controls) == self.wanted > 0


def scorer_of(pair: Pair, config: SearchConfig, passages: Sequence[Passage], *, private: bool | None = None) -> Scorer:
    """A scorer for a half of the text; `private` overrides what the configuration says of the cache."""
    return Scorer(
        pair.target,
        passages,
        block=config.gamma + 1,
        alpha=config.alpha,
        beta=config.beta,
        private_kv=config.private_kv if private is None else private,
    )


def details_of(
    pair: Pair,
    config: SearchConfig,
    text: Calibration,
    scorer: Scorer,
    mask: LayerMask,
    found: Findings,
    trials: int,
    *,
    interrupted: bool,
) -> dict[str, Any]:
    """Everything a mask file carries besides the mask.

    Args:
        pair: The pair.
        config: The search.
        text: Calibration text.
        scorer: Of the searching half.
        mask: The best mask.
        found: What the searching half says.
        trials: Masks evaluated.
        interrupted: Whether Ctrl-C ended the search; tiers and guard are left out then.
    """
    scores: dict[Mask, Score] = {}
    tier: dict[str, Any] | None = None
    guard: dict[str, Any] = {}
    try:
        reporter = scorer_of(pair, config, text.report)
        for wanted in {found.best: None, found.even: None, found.random_best: None}:
            if wanted is not None:
                scores[wanted] = reporter.score(found.space.route(wanted))
        if not interrupted:
            tier = _tier(pair, config, mask)
            guard = _guard(pair, config, text, scorer, reporter, mask)
    except KeyboardInterrupt:
        interrupted = True
    report = {m: figures_of(s) for m, s in scores.items()}
    return {
        # The figures to go by: of text that the search did not see, where there was time for it.
        **(report.get(found.best) or found.best_figures),
        "search": found.best_figures,
        "report": report.get(found.best),
        "report_tokens": reporter.tokens if scores else None,
        "controls": _controls(found, scores, report),
        "beats_random": _beats_random(found, scores),
        "alpha": config.alpha,
        "beta": config.beta,
        "tau": config.tau,
        "theta": config.theta,
        "gamma": config.gamma,
        "seed": config.seed,
        "kv": "private" if config.private_kv else "shared",
        "dtype": pair.dtype,
        "trials": trials,
        "interrupted": interrupted,
        "calibration": {"name": text.name, "hash": text.hash},
        "tier": tier,
        **guard,
        "versions": {
            "viasd": viasd.__version__,
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
            "optuna": optuna.__version__,
        },
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _controls(found: Findings, scores: Mapping[Mask, Score], report: Mapping[Mask, Figures]) -> dict[str, Any]:
    controls: dict[str, Any] = {
        "random_masks": len(found.controls),
        "even": {"search": found.even_figures, "report": report.get(found.even)},
        "random_median": None,
        "random_best": None,
        "margin": None,
    }
    best = found.random_best
    if best is not None:
        controls["random_median"] = {"search": median_of(list(found.controls.values()))}
        controls["random_best"] = {
            "search": dict(found.controls[best]),
            "report": report.get(best),
            "keep": list(best),
        }
        if best in scores and found.best in scores:
            gain = scores[best].per_token - scores[found.best].per_token
            controls["margin"] = {"mean": float(gain.mean()), "error": float(gain.std() / math.sqrt(len(gain)))}
    return controls


def _beats_random(found: Findings, scores: Mapping[Mask, Score]) -> bool | None:
    """Whether the best mask is better than the best of as many random ones on the reporting half; None if unknown."""
    best = found.random_best
    if not found.complete or best is None or best not in scores or found.best not in scores:
        return None
    return scores[found.best].cost < scores[best].cost


def _tier(pair: Pair, config: SearchConfig, mask: LayerMask) -> dict[str, Any]:
    report = measure_tiers(pair, mask, DecodingConfig(gamma=config.gamma), _MODE)
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


def _guard(
    pair: Pair, config: SearchConfig, text: Calibration, scorer: Scorer, reporter: Scorer, mask: LayerMask
) -> dict[str, Any]:
    """Start values of the guard and how well they hold; nothing where the drafter had too little to say."""
    if config.private_kv:  # the guard works in the runtime, which shares the cache
        scorer = scorer_of(pair, config, text.search, private=False)
        reporter = scorer_of(pair, config, text.report, private=False)
    seen = guardfit.observe(pair, scorer, mask.route, config.gamma)
    other = guardfit.observe(pair, reporter, mask.route, config.gamma)
    if len(seen) < guardfit.MIN_OBSERVATIONS or not len(other):
        return {}
    estimator = guardfit.fit(seen)
    found = guardfit.reliability(estimator, other)
    # Start values that would let too much pass are worse than none: without them the guard is lossless until it knows.
    good = found["passed_disagreed"] <= GuardConfig().max_disagreement * found["passed"]
    return {**({"guard": estimator.state()} if good else {}), "guard_reliability": {**found, "stored": good}}
