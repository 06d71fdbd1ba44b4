"""The reporting half: best mask, controls, tiers and guard on text that the search never saw; all of it for the file."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import optuna
import torch
import transformers

import viasd
from viasd.mask import LayerMask
from viasd.pair import Pair
from viasd.runtime.assembly import headed
from viasd.runtime.readouts import recorded
from viasd.search.calibration import Calibration, Passage
from viasd.search.config import COST, SearchConfig
from viasd.search.objective import Evaluation, Figures, Objective, rank, sound
from viasd.search.outcome import median_of
from viasd.search.proposals import Mask, SearchSpace
from viasd.search.scorer import Scorer
from viasd.search.stitched import Choice
from viasd.search.trust import trust_curve
from viasd.search.verdicts import guard_of, tier_of
from viasd.search.walk import PassTimes
from viasd.shipped import resolve_heads


@dataclass(frozen=True)
class Findings:
    """What the searching half says.

    Attributes:
        space: The masks searched.
        objective: What was minimised.
        known: Figures of every mask evaluated whole.
        best: Best mask.
        front: Masks of the front, fewest skipped layers first; empty where one value was minimised.
        controls: Figures of random masks.
        wanted: How many random masks there should be.
    """

    space: SearchSpace
    objective: str
    known: Mapping[Mask, Figures]
    best: Mask
    front: Sequence[Mask]
    controls: Mapping[Mask, Figures]
    wanted: int

    @property
    def even(self) -> Mask:
        """The even-spaced mask that skips as much as the best one."""
        return self.space.even(self.best.count(0))

    @property
    def random_best(self) -> Mask | None:
        """The best of the random masks."""
        return min(self.controls, key=lambda m: rank(self.controls[m], self.objective), default=None)

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
        readout=config.confident,
    )


def details_of(
    pair: Pair,
    config: SearchConfig,
    text: Calibration,
    objective: Objective,
    times: PassTimes | None,
    mask: LayerMask,
    found: Findings,
    trials: int,
    choice: Choice | None = None,
    *,
    interrupted: bool,
) -> dict[str, Any]:
    """Everything a mask file carries besides the mask.

    Args:
        pair: The pair.
        config: The search.
        text: Calibration text.
        objective: Of the searching half.
        times: What passes cost; None where only the cost counts.
        mask: The best mask.
        found: What the searching half says.
        trials: Masks evaluated.
        choice: How the mask came to its stitches, if it has any.
        interrupted: Whether Ctrl-C ended the search; tiers and guard are left out then.
    """
    report: dict[Mask, Evaluation] = {}
    even = found.known.get(found.even) or found.controls.get(found.even)
    tier: dict[str, Any] | None = None
    more: dict[str, Any] = {}
    tokens: int | None = None
    try:
        reporter = Objective(config.goal, pair, scorer_of(pair, config, text.report), config.gamma, times)
        for wanted in (found.best, found.even, found.random_best, *found.front):
            if wanted is not None and wanted not in report:
                evaluation = reporter.evaluate(found.space.route(wanted))
                tokens = reporter.scorer.tokens
                if sound(evaluation.figures):
                    report[wanted] = evaluation
        if choice is not None:
            stitched = reporter.evaluate(mask.route).figures
            more["stitched"] = {"tried": list(choice.tried), "search": choice.figures, "report": stitched}
        if not interrupted:
            if even is None and sound(figures := objective.evaluate(found.space.route(found.even)).figures):
                even = figures
            if times is not None:
                more["two_tiers"] = reporter.two_tiers(mask.route)
            more |= prefixes_of(pair, config, reporter.scorer)
            tier = tier_of(pair, config.gamma, mask, config.confident)
            seen, unseen = objective.scorer, reporter.scorer
            if config.private_kv:  # decoding shares the cache, and so does the guard
                seen, unseen = (scorer_of(pair, config, half, private=False) for half in (text.search, text.report))
            more |= guard_of(pair, config.gamma, seen, unseen, mask)
            routes = {"without stitches": replace(mask.route, stitches=None)} if mask.stitches is not None else {}
            routes["slim verifier"] = mask.route
            more["trust"] = {name: trust_curve(seen, unseen, route).as_json() for name, route in routes.items()}
    except KeyboardInterrupt:
        interrupted = True
    reported = {m: e.figures for m, e in report.items()}
    return {
        # The figures to go by: of text that the search did not see, where there was time for it.
        **(reported.get(found.best) or found.known[found.best]),
        **_with_stitches(more),
        **recorded(config.confident),
        "objective": config.goal,
        "search": found.known[found.best],
        "report": reported.get(found.best),
        "report_tokens": tokens,
        "controls": _controls(found, even, report),
        "beats_random": _beats_random(found, reported),
        "front": [_front_entry(mask, found, m, reported.get(m)) for m in found.front],
        "times": None if times is None else times.as_json(),
        "skip_range": None if config.skip_range is None else list(config.skip_range),
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
        **more,
        "versions": {
            "viasd": viasd.__version__,
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
            "optuna": optuna.__version__,
        },
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _with_stitches(more: Mapping[str, Any]) -> Figures:
    """The figures to go by of a stitched mask; nothing where it has no stitches."""
    stitched = more.get("stitched") or {}
    found: Figures = stitched.get("report") or {}
    return found if sound(found) else {}


def _front_entry(best: LayerMask, found: Findings, mask: Mask, report: Figures | None) -> dict[str, Any]:
    """A mask of the front, in the words of a mask file."""
    route = found.space.route(mask)
    file = replace(best, keep=route.keep, partial=route.partial, details={}, stitches=None).to_json()
    own: dict[str, Any] = {name: file[name] for name in ("keep", "sublayers", "skip_ratio") if name in file}
    return {**own, "search": found.known[mask], "report": report}


def _controls(found: Findings, even: Figures | None, report: Mapping[Mask, Evaluation]) -> dict[str, Any]:
    def reported(mask: Mask) -> Figures | None:
        return report[mask].figures if mask in report else None

    controls: dict[str, Any] = {
        "random_masks": len(found.controls),
        "even": {"search": even, "report": reported(found.even)},
        "random_median": None,
        "random_best": None,
        "margin": None,
    }
    best = found.random_best
    if best is not None:
        controls["random_median"] = {"search": median_of(list(found.controls.values()))}
        controls["random_best"] = {
            "search": dict(found.controls[best]),
            "report": reported(best),
            "keep": list(best),
        }
        if found.objective == COST and best in report and found.best in report:
            gain = report[best].score.per_token - report[found.best].score.per_token
            controls["margin"] = {"mean": float(gain.mean()), "error": float(gain.std() / math.sqrt(len(gain)))}
    return controls


def _beats_random(found: Findings, report: Mapping[Mask, Figures]) -> bool | None:
    """Whether the best mask is better than the best of as many random ones on the reporting half; None if unknown."""
    best = found.random_best
    if not found.complete or best is None or best not in report or found.best not in report:
        return None
    return rank(report[found.best], found.objective) < rank(report[best], found.objective)


def prefixes_of(pair: Pair, config: SearchConfig, scorer: Scorer) -> dict[str, Any]:
    """Slim verifiers that need no mask: the layers before each light head, scored as masks are. Nothing without heads."""
    if config.heads is None:
        return {}
    heads = resolve_heads(config.heads, pair.name)
    found = []
    for layers in heads.exits:
        mask = headed(LayerMask.first(pair.target.n_layers, layers), heads, pair)
        assert mask is not None
        score = scorer.score(mask.route)
        figures = {"cost": score.cost, "kl": score.kl, "agreement": score.agreement, "accept_mass": score.accept_mass}
        found.append({"layers": layers, **figures})
    return {"prefixes": {"heads": heads.name, "of": pair.target.n_layers, "found": found}}
