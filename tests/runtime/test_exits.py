"""Exit rules as functions of numbers."""

from __future__ import annotations

import math

import pytest

from viasd.errors import HeadsError
from viasd.estimator import EstimatorConfig, LogisticEstimator
from viasd.runtime.exits import CalibratedExits, ExitCosts, FixedExits

COSTS = ExitCosts(layers=30, head=0.5, readout=2.0)


def state(intercept: float, exits: int = 2, slope: float = 1.0) -> dict[str, object]:
    return LogisticEstimator(EstimatorConfig(slopes=(slope,), intercept=intercept, positions=exits)).state()


@pytest.mark.parametrize(("threshold", "above", "below"), [(0.75, 0.751, 0.749), (0.0, 0.001, -1.0), (0.5, 0.6, 0.5)])
def test_a_fixed_threshold_is_exceeded_or_not(threshold: float, above: float, below: float) -> None:
    rule = FixedExits(threshold)
    assert rule.exits(7, math.log(above / (1 - above)))
    if below > 0:
        assert not rule.exits(7, math.log(below / (1 - below)))


def test_nothing_is_sure_enough_for_a_threshold_of_one() -> None:
    assert not FixedExits(1.0).exits(7, 40.0)
    assert not FixedExits(1.0).looks(7, None)
    assert FixedExits(0.999).exits(7, 40.0)


@pytest.mark.parametrize(
    ("chance", "layers", "exits"), [(0.3, 7, True), (0.2, 7, False), (0.8, 22, True), (0.6, 22, False)]
)
def test_the_first_guess_pays_where_its_chance_is_above_its_share_of_the_way(
    chance: float, layers: int, exits: bool
) -> None:
    # c / e > 1 / (L + readout): above 0.22 behind layer 7 and 0.69 behind layer 22.
    rule = CalibratedExits(COSTS, (7, 22), 5, state(0.0))
    rule.begin()
    assert rule.exits(layers, math.log(chance / (1 - chance))) == exits


def test_a_later_guess_must_make_up_for_those_that_may_fail() -> None:
    rule = CalibratedExits(COSTS, (7, 22), 5, state(0.0))
    half = math.log(0.4 / 0.6)
    rule.begin()
    taken = 0
    while rule.exits(7, half) and taken < 5:
        rule.waits()
        taken += 1
    assert 0 < taken < 5  # each guess survives with 0.4 of the chance of the one before


def test_the_probe_spares_the_head_where_it_promises_too_little() -> None:
    rule = CalibratedExits(COSTS, (7, 22), 5, state(0.0))
    rule.begin()
    assert rule.looks(22, 0.9)
    assert not rule.looks(22, 0.3)
    assert rule.looks(22, None)


def test_what_became_of_guesses_changes_the_rule() -> None:
    trusting = CalibratedExits(COSTS, (7, 22), 5, state(0.0))
    for label, expected in ((1.0, True), (0.0, False)):
        rule = CalibratedExits(COSTS, (7, 22), 5, state(0.0))
        for _ in range(160):
            rule.begin()
            rule.exits(22, 0.8)
            rule.waits()
            rule.judged([label])
        rule.begin()
        assert rule.exits(22, 0.8) == expected
    trusting.begin()
    assert not trusting.exits(22, 0.7)  # 0.67 would not do untaught


def test_a_rule_that_never_exits_tries_again_at_the_last_exit() -> None:
    rule = CalibratedExits(COSTS, (7, 22), 5, state(-8.0))
    for _ in range(24):
        rule.begin()
        assert not rule.exits(22, 0.0)
        rule.judged([])
    rule.begin()
    assert rule.looks(22, 0.0)
    assert not rule.exits(7, 0.0)
    assert rule.exits(22, 0.0)
    rule.waits()
    rule.judged([0.0])
    rule.begin()
    assert not rule.exits(22, 0.0)


def test_a_stored_calibration_of_other_exits_is_refused() -> None:
    with pytest.raises(HeadsError, match="3 exits"):
        CalibratedExits(COSTS, (7, 22), 5, state(0.0, exits=3))
    with pytest.raises(HeadsError, match="malformed"):
        CalibratedExits(COSTS, (7, 22), 5, {"slopes": [1.0]})
