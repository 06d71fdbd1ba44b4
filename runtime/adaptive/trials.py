"""Drafts that are longer than pays, now and then, so that a change is noticed."""

from __future__ import annotations

from collections.abc import Sequence

from viasd.estimator import Array
from viasd.runtime.adaptive.costs import StepCosts
from viasd.runtime.adaptive.stopping import Limit

_SHARE = 0.01  # of all seconds that trials may cost
_LEAST_STEPS = 8  # between two of them, however little they cost
_WHOLE_EVERY = 4  # of so many trials one is as long as a block can be


class Trials:
    """Chooses the sequence and the limit of a trial where drafts are cut short, seldom enough to cost at most 1 %.

    Where nothing is drafted, most trials are drafts of the best length that there is: they tell whether it would pay. Every
    fourth is whole, as are all where drafts are only cut. A counter and the costs decide, never what was drafted.

    Attributes:
        chosen: The sequence of this step, None in most.
        limit: Its limit.
        count: How often there was one.
    """

    def __init__(self) -> None:
        self.chosen: int | None = None
        self.limit = Limit(0)
        self.count = 0
        self._saved = 0.0
        self._steps = 0
        self._priced: tuple[Array, StepCosts, float, Limit] | None = None
        self._cost = 0.0  # of a trial by these

    def begin(
        self,
        sequences: Sequence[int],
        current: Limit,
        best: Limit,
        gamma: int,
        usual: Array,
        costs: StepCosts,
        rate: float,
    ) -> None:
        """A step begins.

        Args:
            sequences: Those to choose from.
            current: The limit of this step.
            best: The best of those that draft something.
            gamma: Longest block.
            usual: Chances that places usually have, at least `gamma`.
            costs: Of a step.
            rate: Tokens a second that the current limit promises.
        """
        self.chosen = None
        if not sequences or (current.places >= gamma and current.floor <= 0):
            return
        whole = current.places or self.count % _WHOLE_EVERY == _WHOLE_EVERY - 1
        limit = Limit(gamma if whole else best.places)
        if self._priced is None or self._priced[0] is not usual or self._priced[1:] != (costs, rate, limit):
            self._priced, self._cost = (usual, costs, rate, limit), regret(limit.places, usual, costs, rate)
        cost = self._cost
        self._saved = min(cost, self._saved + _SHARE * costs.nothing)
        self._steps += 1
        if self._saved >= cost and self._steps >= _LEAST_STEPS:
            self.chosen = sequences[self.count % len(sequences)]
            self.limit = limit
            self.count += 1
            self._saved, self._steps = 0.0, 0

    def stop(self) -> None:
        """No trial in this step."""
        self.chosen = None


def regret(length: int, usual: Array, costs: StepCosts, rate: float) -> float:
    """Seconds that a draft of one sequence costs more than its tokens would take under the current limit; at least 0.

    With a rate of R tokens a second, a draft that brings E tokens in t seconds more than a step without it is E / R - t
    seconds ahead. Those under the current limit, which gives that rate, are V / n - 1 / R ahead, with V seconds of a step
    of n sequences that draft nothing.

    Args:
        length: Of the draft.
        usual: Chances of its places.
        costs: Of a step of all sequences, of which the others draft nothing.
        rate: Tokens a second under the current limit, at least those of drafting nothing.
    """
    spent = length * float(costs.drafting(1.0)) + float(costs.verifying(length)) - costs.nothing
    ahead = float(usual[:length].cumprod().sum()) / rate - spent
    return max(0.0, costs.nothing / costs.sequences - 1 / rate - ahead)
