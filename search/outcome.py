"""What a search learnt, and what of it goes into the mask file."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from viasd.mask import LayerMask
from viasd.search.objective import Figures
from viasd.search.proposals import FIGURES, Mask, mask_in
from viasd.search.study import SLOT


@dataclass(frozen=True)
class Timing:
    """Where the time went, in this process.

    Attributes:
        seconds: All of it, the model's loading left out.
        proposals: Seconds choosing masks.
        scoring: Seconds scoring them.
        scored: Masks evaluated by this process.
        reused: Share of layer passes saved because layers before the first skip are never run again.
        pruned: Share of the text that masks given up early did not have to be scored on.
    """

    seconds: float
    proposals: float
    scoring: float
    scored: int
    reused: float
    pruned: float

    @property
    def masks_per_minute(self) -> float | None:
        """Masks evaluated per minute of searching; None where this process evaluated none."""
        spent = self.proposals + self.scoring
        return 60 * self.scored / spent if self.scored and spent else None

    @property
    def proposal_share(self) -> float | None:
        """Share of the searching time that went into proposals; None where this process evaluated none."""
        spent = self.proposals + self.scoring
        return self.proposals / spent if self.scored and spent else None


@dataclass(frozen=True)
class SearchOutcome:
    """A finished (or interrupted) search.

    Attributes:
        mask: The best mask, with everything in its details that goes into the file.
        study: Name of the study.
        storage: Where it lives.
        interrupted: Whether Ctrl-C ended it.
        trials: Distinct masks evaluated.
        wanted: Distinct masks asked for (fewer than the user's where the space is smaller).
        pruned: Of the evaluated ones, those given up early.
        trace: First value of the objective by step; None where pruned.
        points: (`SLIM`, cost) of every mask evaluated whole, where pass times were measured.
        importance: Per layer (or half layer: attention and MLP in turn), mean cost of the evaluated masks that skip it minus
            mean cost of those that keep it; None where one of the two kinds is missing.
        timing: Where the time went.
    """

    mask: LayerMask
    study: str
    storage: str
    interrupted: bool
    trials: int
    wanted: int
    pruned: int
    trace: tuple[float | None, ...]
    points: tuple[tuple[float, float], ...]
    importance: tuple[float | None, ...]
    timing: Timing

    @property
    def sublayers(self) -> bool:
        """Whether attention and MLP were skipped separately."""
        return len(self.importance) > len(self.mask.keep)

    def as_json(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        details = self.mask.details
        return {
            "best": self.mask.to_json(),
            "trials": self.trials,
            **{name: details[name] for name in ("cost", "kl", "tv", "agreement")},
            "controls": details["controls"],
            "beats_random": details["beats_random"],
            "tier": details["tier"],
            "objective": details["objective"],
            "front": details["front"],
            "importance": list(self.importance),
            "trace": list(self.trace),
            "pruned": self.pruned,
            "interrupted": self.interrupted,
            "study": self.study,
            "seconds": self.timing.seconds,
            "masks_per_minute": self.timing.masks_per_minute,
            "proposal_share": self.timing.proposal_share,
            "reuse_saving": self.timing.reused,
            "pruning_saving": self.timing.pruned,
        }


def trial_figures(trial: FrozenTrial) -> Figures:
    """Figures of a completed trial."""
    return {name: float(value) for name, value in trial.user_attrs[FIGURES].items()}


def trace_of(trials: Iterable[FrozenTrial]) -> tuple[float | None, ...]:
    """First value of the objective by step; None where pruned."""
    ordered = sorted(trials, key=lambda t: t.user_attrs[SLOT])
    return tuple(float(t.values[0]) if t.state == TrialState.COMPLETE else None for t in ordered)


def importance_of(
    trials: Iterable[FrozenTrial], controls: Mapping[Mask, Figures], n_units: int
) -> tuple[float | None, ...]:
    """See `SearchOutcome.importance`; control masks count as evaluated ones."""
    costs: dict[Mask, float] = {mask: figures["cost"] for mask, figures in controls.items()}
    for trial in trials:
        mask = mask_in(trial)
        if mask is not None and trial.state == TrialState.COMPLETE:
            costs[mask] = trial_figures(trial)["cost"]
    return tuple(_contrast(costs, unit) for unit in range(n_units))


def _contrast(costs: Mapping[Mask, float], unit: int) -> float | None:
    skipped = [c for m, c in costs.items() if not m[unit]]
    kept = [c for m, c in costs.items() if m[unit]]
    return statistics.fmean(skipped) - statistics.fmean(kept) if skipped and kept else None


def median_of(figures: Sequence[Figures]) -> Figures:
    """Median of every figure on its own."""
    return {name: statistics.median(f[name] for f in figures) for name in figures[0]}
