from __future__ import annotations

import numpy as np
import pytest
from tiny import pair_of, prompt_ids

from viasd.routes import Route
from viasd.runtime.guard import FEATURES, Guard, GuardConfig, new_estimator
from viasd.search.calibration import Passage
from viasd.search.guardfit import Observations, _auc, fit, observe, reliability
from viasd.search.scorer import Scorer

ROUTE = Route.of([1, 1, 0, 1, 0, 0, 1, 1])
PASSAGES = [Passage(tuple(prompt_ids(t)), 9) for t in ("hello hello world, hello again", "one two three one two three")]
GAMMA = 5


def drawn(n: int, seed: int, slope: float = 2.0) -> Observations:
    """Tokens that agree the more often the larger one feature is."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(n, len(FEATURES)))
    positions = rng.integers(0, GAMMA, n)
    chance = 1 / (1 + np.exp(-(slope * features[:, 0] + 1)))
    return Observations(features, positions, (rng.random(n) < chance).astype(float))


def test_a_fit_finds_what_decides_and_holds_on_other_text() -> None:
    estimator = fit(drawn(3000, 0))
    assert estimator.slopes[0] == pytest.approx(2, rel=0.2)
    assert np.abs(estimator.slopes[1:]).max() < 0.3
    assert estimator.intercepts[:GAMMA] == pytest.approx([1] * GAMMA, abs=0.4)
    # A position never seen gets the common intercept.
    assert estimator.intercepts[-1] == pytest.approx(1, abs=0.4)
    found = reliability(estimator, drawn(3000, 1))
    assert found["n"] == 3000
    assert found["ece"] < 0.04
    assert found["auc"] > 0.8
    assert found["passed_disagreed"] <= found["passed"] * 0.05
    assert estimator.observations == 3000


@pytest.mark.parametrize("labels", [0.0, 1.0])
def test_labels_that_are_all_equal_stay_finite_and_within_the_estimators_limits(labels: float) -> None:
    seen = drawn(250, 0)
    estimator = fit(Observations(seen.features, seen.positions, np.full(250, labels)))
    config = new_estimator().config
    assert np.abs(estimator.slopes).max() <= config.slope_cap
    assert np.abs(estimator.intercepts).max() <= config.intercept_cap
    assert reliability(estimator, Observations(seen.features, seen.positions, np.full(250, labels)))["auc"] is None


def test_separable_labels_do_not_run_away() -> None:
    seen = drawn(300, 0)
    estimator = fit(Observations(seen.features, seen.positions, (seen.features[:, 0] > 0).astype(float)))
    assert np.isfinite(estimator.slopes).all()
    assert 0 < estimator.slopes[0] <= new_estimator().config.slope_cap


def test_a_guard_starts_from_it() -> None:
    state = fit(drawn(500, 0)).state()
    guard = Guard(GuardConfig(), state)
    assert guard.ready
    assert guard.agreement(drawn(3, 2).features, [0, 1, 7]).min() > 0


def test_auc_counts_ties_half() -> None:
    assert _auc(np.array([0.1, 0.5, 0.5, 0.9]), np.array([0.0, 0.0, 1.0, 1.0])) == pytest.approx(3.5 / 4)


@pytest.mark.parametrize("drafter", ["lookup", "self", "model"])
def test_labels_are_what_the_full_verifier_says_of_the_drafters_tokens(drafter: str) -> None:
    pair = pair_of("llama", drafter)
    seen = observe(pair, Scorer(pair.target, PASSAGES, block=GAMMA + 1), ROUTE, GAMMA)
    assert seen.features.shape == (len(seen), len(FEATURES))
    assert np.isfinite(seen.features).all()
    assert set(seen.positions) <= set(range(GAMMA))
    if drafter != "lookup":  # one token at every position but the blocks' last ones
        assert len(seen) == sum(p.scored - p.scored // (GAMMA + 1) for p in PASSAGES)


def test_a_drafter_that_is_the_target_is_right_wherever_its_token_stands() -> None:
    pair = pair_of("llama", "same")
    seen = observe(pair, Scorer(pair.target, PASSAGES, block=GAMMA + 1), ROUTE, GAMMA)
    rewritten = seen.features[:, FEATURES.index("rewritten")] == 1
    assert seen.labels[~rewritten].min() == 1
    assert seen.labels[rewritten].sum() == 0
