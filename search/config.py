"""What a user can ask of a search, checked before anything is loaded or run."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from viasd.confident import ConfidentConfig
from viasd.errors import OptionError

COST, TIME, PARETO = "cost", "time", "pareto"
OBJECTIVES = (COST, TIME, PARETO)

SKIP_RATIO = 0.45  # of the paper
TRIALS = 100
TAU = 512


@dataclass(frozen=True)
class SearchConfig:
    """One search.

    Attributes:
        skip: Share of the target's layers that a mask skips, in ``(0, 1)``; rounded to a whole number of layers. None is
            the default where there is no range.
        skip_range: Least and largest share, for a search over masks of many sizes.
        objective: ``cost`` (R alone), ``time`` (predicted seconds per token) or ``pareto`` (the front of R against the time
            of a slim pass); None is time for a range and cost for one ratio.
        trials: Distinct masks to evaluate, at least 1.
        theta: Every theta-th proposal is Bayesian.
        refine: Share of the others that are one swap away from the best mask.
        keep_prefix: Layers kept at the beginning, at least 1.
        alpha: See `viasd.divergences.stage_cost`.
        beta: Likewise.
        tau: Scored tokens per half of the calibration text.
        prompts: Built-in questions to use at most, an even number; None uses as many as `tau` needs.
        gamma: Drafted tokens a block.
        sublayers: Skip attention and MLP of a layer separately.
        calibration: ``self``, or a file.
        private_kv: Score with a cache of the slim path's own, for comparison.
        storage: Optuna storage, see `viasd.search.study.open_storage`; None is a journal file in the cache folder.
        study: Name of the study; None makes one of the pair and the settings.
        seed: Seed of every random choice.
        controls: Random masks to compare with; None is as many as `trials`.
        heads: Light heads (what ``--heads`` takes), each of which is reported beside the masks as a slim verifier of the
            layers before it; None reports none.
        stitch: Fit stitches to the best masks and take the one that is best with them: on the text of a corpus file, or on
            the searching half (``calibration``); None leaves masks as they are.
        readout: Which of the last layers it runs the slim verifier is read out from (`viasd.confident`), the last one for
            None; goes into the mask file, and decoding does the same.
        backtrack_layers: Its window.
        backtrack_ratio: Likewise.
        readout_compat: Windows as the authors' code counts them.

    Raises:
        OptionError: If a value is out of range or contradicts another.
    """

    skip: float | None = None
    skip_range: tuple[float, float] | None = None
    objective: str | None = None
    trials: int = TRIALS
    theta: int = 10
    refine: float = 0.8
    keep_prefix: int = 1
    alpha: float = 0.5
    beta: float = 0.5
    tau: int = TAU
    prompts: int | None = None
    gamma: int = 5
    sublayers: bool = False
    calibration: str = "self"
    private_kv: bool = False
    storage: str | None = None
    study: str | None = None
    seed: int = 0
    controls: int | None = None
    heads: str | None = None
    stitch: str | None = None
    readout: str | None = None
    backtrack_layers: int | None = None
    backtrack_ratio: float | None = None
    readout_compat: bool = False

    def __post_init__(self) -> None:
        if self.skip is not None and not 0 < self.skip < 1:
            raise OptionError(f"skip must be above 0 and below 1 (a share of the layers), but got {self.skip:g}")
        if self.skip_range is not None:
            low, high = self.skip_range
            if self.skip is not None:
                raise OptionError("skip and skip_range contradict each other: one ratio, or a range; leave one out")
            if not 0 < low < high < 1:
                raise OptionError(f"skip_range must be LO:HI with 0 < LO < HI < 1, but got {low:g}:{high:g}")
        if self.goal not in OBJECTIVES:
            raise OptionError(f"objective must be one of {', '.join(OBJECTIVES)}, but got '{self.goal}'")
        if self.stitch is not None and (self.sublayers or self.private_kv or self.goal == PARETO):
            name = "sublayers" if self.sublayers else "private_kv" if self.private_kv else "objective pareto"
            raise OptionError(
                f"stitch and {name} contradict each other: stitches are fitted for one mask of whole layers over the full "
                "path's cache; leave one out"
            )
        if self.goal == PARETO and self.skip_range is None:
            raise OptionError("a pareto front needs masks of several sizes; add --skip-range LO:HI")
        for name, least in (("trials", 1), ("theta", 1), ("keep_prefix", 1), ("gamma", 1), ("tau", 16)):
            if getattr(self, name) < least:
                raise OptionError(f"{name} must be at least {least}, but got {getattr(self, name)}")
        for name in ("alpha", "beta"):
            if not 0 < getattr(self, name) <= 1:
                raise OptionError(f"{name} must be above 0 and at most 1, but got {getattr(self, name):g}")
        if not 0 <= self.refine <= 1:
            raise OptionError(f"refine must be between 0 and 1, but got {self.refine:g}")
        if self.controls is not None and self.controls < 0:
            raise OptionError(f"controls must be at least 0, but got {self.controls}")
        if self.prompts is not None:
            if self.calibration != "self":
                raise OptionError("prompts are the built-in questions of --calibration self, but a file was given")
            if self.prompts < 2 or self.prompts % 2:
                raise OptionError(
                    f"prompts must be an even number (half of them for each half), but got {self.prompts}"
                )
        if self.readout is None and (self.backtrack_layers, self.backtrack_ratio) != (None, None):
            raise OptionError("backtrack_layers and backtrack_ratio are windows of a readout; add --readout trough")
        if self.readout is None and self.readout_compat:
            raise OptionError("readout_compat is about the window of a readout; add --readout trough")
        if self.confident is not None and self.goal != COST:
            raise OptionError(
                f"objective {self.goal} predicts times, and what a confident readout takes is not known to it; use "
                "--objective cost with --readout"
            )
        if self.study is not None and not self.study.strip():
            raise OptionError("the study's name is empty; give it some text or leave it out")

    @property
    def ratios(self) -> tuple[float, float]:
        """Least and largest share of skipped layers."""
        ratio = SKIP_RATIO if self.skip is None else self.skip
        return self.skip_range or (ratio, ratio)

    @property
    def goal(self) -> str:
        """The objective."""
        return self.objective or (TIME if self.skip_range is not None else COST)

    @property
    def confident(self) -> ConfidentConfig | None:
        """The slim verifier's readout, None for the last layer's."""
        if self.readout is None:
            return None
        return ConfidentConfig(
            self.readout,
            max_backtrack_layers=self.backtrack_layers,
            backtrack_ratio=self.backtrack_ratio or 0.0,
            reference_compat=self.readout_compat,
        )

    @property
    def warning(self) -> str | None:
        """What is allowed but not advised, in words."""
        if self.goal == COST and self.skip_range is not None:
            return "objective cost prefers the fewest skipped layers, whatever they cost; time and pareto weigh both"
        if self.beta < 1 - self.alpha:
            return (
                f"beta {self.beta:g} is below 1 - alpha = {1 - self.alpha:g}: the cost no longer bounds a lossy rejection "
                "rate"
            )
        return None

    @property
    def n_controls(self) -> int:
        """Random masks to compare with."""
        return self.trials if self.controls is None else self.controls


def name_of_study(pair: str, setup: dict[str, Any]) -> str:
    """Name of a study nobody named: the pair, and a hash of everything that decides a mask's cost."""
    digest = hashlib.sha256(json.dumps(setup, sort_keys=True).encode()).hexdigest()[:10]
    return f"{as_file_name(pair)}-{digest}"


def as_file_name(text: str) -> str:
    """A text with everything but letters, digits, dots and dashes turned into single dashes."""
    return "-".join("".join(c if c.isalnum() or c == "." else " " for c in text).split())
