"""One edge of the cascade (drafter to full, drafter to slim, slim to full): what the receiver keeps, learnt online."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from viasd.errors import OptionError
from viasd.estimator import Array, EstimatorConfig, LogisticEstimator
from viasd.runtime.adaptive.reliability import Reliability

EDGES = ("drafter->full", "drafter->slim", "slim->full")
REFIT_STEPS = 100
REFIT_OBSERVATIONS = 200
# By refits from 200 observations alone coefficients wander with every batch; measured on labelled drafts of two drafters,
# 500 to 2000 remembered ones predict best.
MEMORY = 1000.0
_FIRST_REFIT = 50  # the first ones come sooner, whenever as much again was observed: the start values are anybody's
_KNOWN = 50  # tokens of a place from which on its intercept is its own


@dataclass(frozen=True)
class Outcome:
    """What became of one block at a verifier.

    Attributes:
        features: Logits of the largest probability of the rows that its tokens were drawn from, at least `admitted`.
        admitted: Tokens that were sent.
        accepted: How many of them were kept, from the first on.
        overlaps: For each judged token the chance that it would be kept, ``sum_v min(p, q)``; None where not computed.
        lossy: The verifier's rule keeps more than its law allows.
        processed: The rows that were judged by had logits processors that the features don't know of.
    """

    features: Sequence[float] | Array
    admitted: int
    accepted: int
    overlaps: Sequence[float] | Array | None = None
    lossy: bool = False
    processed: bool = False

    @property
    def judged(self) -> int:
        """Tokens whose fate is known: those kept, and the first refused one."""
        return min(self.accepted + 1, self.admitted)


def refit_due(estimator: LogisticEstimator, steps: int, waiting: int = 0) -> bool:
    """Whether an estimator has seen enough since its last refit, so many decode steps ago.

    Args:
        estimator: The estimator.
        steps: Decode steps since then.
        waiting: Observations that it will be told of before it is refitted.
    """
    fitted, pending = estimator.observations - estimator.pending, estimator.pending + waiting
    return steps >= REFIT_STEPS or pending >= min(REFIT_OBSERVATIONS, max(_FIRST_REFIT, fitted))


class Edge:
    """Chances that a verifier keeps the tokens of a block, by their place and the row each was drawn from.

    Args:
        name: One of `EDGES`.
        positions: Longest block.
    """

    def __init__(self, name: str, positions: int) -> None:
        if name not in EDGES:
            raise OptionError(f"an edge must be one of {', '.join(EDGES)}, but got '{name}'")
        self.name = name
        self._estimator = LogisticEstimator(EstimatorConfig(positions=positions, memory=MEMORY))
        self._steps = 0
        # Observed and not yet added to the estimator's sums, which takes as long for many tokens as for one.
        self._waiting: list[tuple[float, int, float]] = []
        self._observed = np.zeros(positions)

    @property
    def estimator(self) -> LogisticEstimator:
        """The estimator, told of everything that was observed."""
        if self._waiting:
            features, places, labels = (np.array(column) for column in zip(*self._waiting, strict=True))
            self._waiting = []
            self._estimator.observe(features[:, None], places, labels)
            np.add.at(self._observed, places, 1)
        return self._estimator

    @property
    def observations(self) -> int:
        """Judged tokens that were learnt from."""
        return self._estimator.observations + len(self._waiting)

    def chances(self, features: Sequence[float] | Array) -> list[float]:
        """Chance of every token of a block, given that those before it are kept.

        Args:
            features: Logits of the largest probability of their rows, ``[n]``; places beyond the longest block count as its
                last.
        """
        f = np.asarray(features, dtype=np.float64)
        if not f.size:
            return []
        found: list[float] = self._estimator.predict(f[:, None], self._places(len(f))).tolist()
        return found

    def chance(self, feature: float, place: int) -> float:
        """The same of a single place."""
        # Asked for every token that is drafted, and an array of one takes ten times as long.
        b = self._estimator.intercepts
        z = float(self._estimator.slopes[0]) * feature + float(b[min(place, len(b) - 1)])
        return 1 / (1 + math.exp(-z)) if z > 0 else math.exp(z) / (1 + math.exp(z))

    def chances_at(self, features: Sequence[float] | Array, place: int) -> Array:
        """The same of many blocks at one place, ``[n]``; NaN where a feature is."""
        f = np.asarray(features, dtype=np.float64)
        return self._estimator.predict(f[:, None], np.full(len(f), min(place, len(self._estimator.intercepts) - 1)))

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learns from blocks: their kept tokens and the first refused one, of those that were sent.

        Nothing is learnt from a lossy verdict, nor where processors were at work that the features don't know of.
        """
        most = len(self._estimator.intercepts) - 1
        for each in outcomes:
            if each.lossy or each.processed:
                continue
            for place in range(each.judged):
                label = float(place < each.accepted if each.overlaps is None else each.overlaps[place])
                self._waiting.append((float(each.features[place]), min(place, most), label))

    def score(self, heard: Sequence[tuple[Outcome, Reliability]]) -> None:
        """Counts what was predicted of blocks beside what became of them; before they are learnt from."""
        for outcome, counts in heard:
            for place in range(outcome.judged):
                chance = self.chance(float(outcome.features[place]), place)
                if chance == chance:  # a row of NaN predicts nothing
                    counts.add(chance, place < outcome.accepted)

    def step(self) -> None:
        """A decode step went by: refits where that is due."""
        self._steps += 1
        if refit_due(self._estimator, self._steps, len(self._waiting)):
            if self.estimator.refit():
                self._carry()
            self._steps = 0

    @property
    def coefficients(self) -> list[float]:
        """The slope and the intercepts."""
        found: list[float] = [*self._estimator.slopes.tolist(), *self._estimator.intercepts.tolist()]
        return found

    def state(self) -> dict[str, Any]:
        """Coefficients after all that was observed, ready for `json.dumps`."""
        estimator = self.estimator.copy()
        estimator.refit()
        return {"edge": self.name, "estimator": estimator.state(), "observed": self._observed.tolist()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Edge:
        """An edge that goes on from `state()`.

        Raises:
            OptionError: If it is malformed.
        """
        try:
            name, stored = state["edge"], state["estimator"]
            observed = np.asarray(state.get("observed", []), dtype=np.float64)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise OptionError(f"the state of an edge must be what Edge.state() gives, but {error!r}") from error
        estimator = LogisticEstimator.from_state(stored)
        if len(estimator.slopes) != 1:
            raise OptionError(f"the state of an edge must have one slope, but it has {len(estimator.slopes)}")
        edge = cls(name, len(estimator.intercepts))
        edge._estimator = estimator
        estimator.config = replace(estimator.config, memory=MEMORY)  # of a version that remembered nothing, say
        if "observed" not in state:  # of a version that did not count
            observed = np.full(len(estimator.intercepts), float(_KNOWN))
        if observed.shape != edge._observed.shape or not (observed >= 0).all():
            raise OptionError(
                f"'observed' in the state of an edge must be one count a place, but got {observed.tolist()}"
            )
        edge._observed = observed
        return edge

    def _carry(self) -> None:
        """What is known of a place says something of the next one, until that one is known itself.

        Drafts that were cut short would else have the places behind judged by the start value for long.
        """
        b = self._estimator.intercepts
        for place in range(1, len(b)):
            own = min(1.0, self._observed[place] / _KNOWN)
            b[place] = own * b[place] + (1 - own) * b[place - 1]

    def _places(self, n: int) -> NDArray[np.intp]:
        return np.minimum(np.arange(n), len(self._estimator.intercepts) - 1)
