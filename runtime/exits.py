"""Whether a token waits at an exit of the target while its successor is guessed there (AdaDecode).

A rule sees the head's row and what became of earlier guesses, never the token that would be drawn from that row: the law of
what comes out is then the target's, whatever the rule says (a guess that was drawn is always kept and tested).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from viasd.errors import HeadsError, OptionError
from viasd.estimator import EstimatorConfig, LogisticEstimator

_REFIT_EVERY = 32  # observations
_TRY_AGAIN = 24  # cycles without a guess after which the last exit is taken: else nothing would ever be observed again


class ExitRule(Protocol):
    """Decides, exit by exit, for the tokens of one cycle."""

    def begin(self) -> None:
        """A new cycle begins."""
        ...

    def looks(self, layers: int, promise: float | None) -> bool:
        """Whether the head behind so many layers is worth reading for the newest token."""
        ...

    def exits(self, layers: int, certainty: float) -> bool:
        """Whether the newest token waits there.

        Args:
            layers: Layers it has run.
            certainty: Logit of the largest probability of the head's row (`viasd.estimator.logit_of_max`).
        """
        ...

    def waits(self) -> None:
        """It does."""
        ...

    def judged(self, labels: Sequence[float]) -> None:
        """What became of the guesses of the cycle, from the first to the first refused: how far the verifier agreed."""
        ...


class FixedExits:
    """The paper's rule: exit where the largest probability is above a threshold.

    Args:
        threshold: gamma; from 1 on nothing ever exits.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold

    def begin(self) -> None:
        """See `ExitRule`."""

    def looks(self, layers: int, promise: float | None) -> bool:
        """See `ExitRule`. Every head is read, unless none could be sure enough."""
        return self._threshold < 1

    def exits(self, layers: int, certainty: float) -> bool:
        """See `ExitRule`."""
        return 1 / (1 + math.exp(-certainty)) > self._threshold

    def waits(self) -> None:
        """See `ExitRule`."""

    def judged(self, labels: Sequence[float]) -> None:
        """See `ExitRule`. Nothing is learnt."""


@dataclass(frozen=True)
class ExitCosts:
    """What a cycle costs, in passes through one layer.

    Attributes:
        layers: Layers of the target.
        head: Reading one head.
        readout: The full readout at the top.
    """

    layers: int
    head: float
    readout: float


class CalibratedExits:
    """Exits where one more guess raises the expected tokens of a cycle per cost.

    A cycle with guesses that survive with chances S_1 >= S_2 ... is worth ``E = 1 + S_1 + S_2 + ...`` tokens. At an exit
    behind e layers the newest token could go on to the top, for ``C + (L - e)`` passes in all, or wait for ``C + L``: its
    successor climbs from the bottom and takes it along. It waits where ``(E + S c) / (C + L) > E / (C + L - e)``. The
    chance c that the guess is right follows from the head's certainty, with an intercept for every exit and number of
    guesses that wait already. It stops at the first exit that pays, and a guess that was made is never taken back.

    Args:
        costs: Of a cycle.
        exits: Layer counts with a head, ascending.
        max_pending: Longest cycle.
        start: Coefficients stored with the heads (`LogisticEstimator.state`, one position an exit), or None.

    Raises:
        HeadsError: If these coefficients are of other exits.
    """

    def __init__(
        self, costs: ExitCosts, exits: Sequence[int], max_pending: int, start: Mapping[str, Any] | None = None
    ) -> None:
        self._costs = costs
        self._places = {layers: i for i, layers in enumerate(exits)}
        self._longest = max(1, max_pending)
        self.estimator = _estimator(len(exits), self._longest, start)
        self._idle = 0
        self.begin()

    def begin(self) -> None:
        """See `ExitRule`."""
        self._spent = 0.0  # all that this cycle has cost and will cost, but for the way of the newest token
        self._expected = 1.0
        self._survival = 1.0
        self._guesses: list[tuple[float, int]] = []
        self._chance = 0.0
        self._layers = 0
        self._seen = (0.0, 0)

    def looks(self, layers: int, promise: float | None) -> bool:
        """See `ExitRule`. A head is left alone where the probe says that what it would guess does not pay."""
        looks = promise is None or self._idle >= _TRY_AGAIN or self._pays(layers, promise)
        self._spent += self._costs.head if looks else 0.0
        return looks

    def exits(self, layers: int, certainty: float) -> bool:
        """See `ExitRule`."""
        place = self._places[layers] * self._longest + min(len(self._guesses), self._longest - 1)
        chance = float(self.estimator.predict([certainty], place))
        self._chance, self._layers, self._seen = chance, layers, (certainty, place)
        again = self._idle >= _TRY_AGAIN and not self._guesses and place // self._longest == len(self._places) - 1
        return self._pays(layers, chance) or again

    def waits(self) -> None:
        """See `ExitRule`."""
        self._survival *= self._chance
        self._expected += self._survival
        self._spent += self._layers
        self._guesses.append(self._seen)

    def judged(self, labels: Sequence[float]) -> None:
        """See `ExitRule`."""
        self._idle = 0 if self._guesses else self._idle + 1
        for (certainty, place), label in zip(self._guesses, labels, strict=False):
            self.estimator.observe([[certainty]], [place], [min(1.0, max(0.0, label))])
        if self.estimator.pending >= _REFIT_EVERY:
            self.estimator.refit()

    def _pays(self, layers: int, chance: float) -> bool:
        # Going on: what was spent, the newest token's own way to the top, the readout there. Waiting: its way so far, and
        # its successor's whole way.
        on = self._spent + self._costs.layers + self._costs.readout
        return (self._expected + self._survival * chance) / (on + layers) > self._expected / on


def _estimator(exits: int, longest: int, start: Mapping[str, Any] | None) -> LogisticEstimator:
    """One intercept for every exit and number of waiting guesses, those of an exit alike at first."""
    made = LogisticEstimator(EstimatorConfig(positions=exits * longest))
    if start is None:
        return made
    try:
        stored = LogisticEstimator.from_state(start)
    except OptionError as error:
        raise HeadsError(f"the calibration stored with the heads is malformed ({error}); train them anew") from error
    if len(stored.intercepts) != exits or len(stored.slopes) != 1:
        raise HeadsError(
            f"the calibration stored with the heads is for {len(stored.intercepts)} exits, but they have {exits}; train "
            "the heads anew"
        )
    made.slopes[:] = stored.slopes
    made.intercepts[:] = stored.intercepts.repeat(longest)
    return made
