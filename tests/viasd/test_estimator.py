import json

import numpy as np
import pytest

from viasd.errors import OptionError
from viasd.estimator import EstimatorConfig, LogisticEstimator


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def dense_newton(estimator, f, k, y):
    """One undamped step of ridge-regularised Newton on the full (F + K) design matrix."""
    design = np.concatenate([f, np.eye(len(estimator.intercepts))[k]], axis=1)
    c = sigmoid(design @ np.concatenate([estimator.slopes, estimator.intercepts]))
    hessian = (design * (c * (1 - c))[:, None]).T @ design + estimator.config.ridge * np.eye(design.shape[1])
    step = np.linalg.solve(hessian, design.T @ (y - c))
    return step[: f.shape[1]], step[f.shape[1] :]


def sample(rng, n, slopes, intercepts, first_refusal_ends=False):
    k_max = len(intercepts)
    if not first_refusal_ends:
        k = rng.integers(0, k_max, n)
        f = rng.normal(1.0, 1.5, (n, len(slopes)))
        return f, k, (rng.random(n) < sigmoid(f @ slopes + intercepts[k])).astype(float)
    f = rng.normal(1.5, 2.5, (n, k_max, len(slopes)))
    accepted = rng.random((n, k_max)) < sigmoid(f @ slopes + intercepts)
    observed = np.arange(k_max) <= np.cumprod(accepted, axis=1).sum(axis=1)[:, None]
    k = np.broadcast_to(np.arange(k_max), observed.shape)
    return f[observed], k[observed], accepted[observed].astype(float)


def auc(score, y):
    rank = np.empty(len(score))
    rank[np.argsort(score)] = np.arange(1, len(score) + 1)
    positives = y.sum()
    return (rank[y == 1].sum() - positives * (positives + 1) / 2) / (positives * (len(y) - positives))


def ece(p, y, bins=10):
    which = np.minimum((p * bins).astype(int), bins - 1)
    return sum(abs((p - y)[which == b].sum()) for b in range(bins)) / len(y)


@pytest.mark.parametrize("slopes", [(0.5,), (0.5, 0.1, 0.0, 0.3)])
def test_refit_is_the_dense_newton_step(slopes):
    config = EstimatorConfig(slopes=slopes, positions=5, shrink=0, max_step=100, nonnegative_slopes=False)
    estimator = LogisticEstimator(config)
    rng = np.random.default_rng(0)
    truth = np.array([0.8, -0.4, 0.3, 0.1])[: len(slopes)]
    f, k, y = sample(rng, 400, truth, np.array([0.6, 0.3, 0.0, -0.4, -0.9]))
    dw, db = dense_newton(estimator, f, k, y)
    for part in np.array_split(np.arange(400), 7):
        estimator.observe(f[part], k[part], y[part])
    assert estimator.refit()
    assert np.allclose(estimator.slopes - slopes, dw, atol=1e-10)
    assert np.allclose(estimator.intercepts - config.intercept, db, atol=1e-10)
    assert min(np.abs(dw).min(), np.abs(db).min()) > 0.01


def test_a_refit_with_memory_is_the_dense_step_with_what_is_remembered_as_its_prior():
    config = EstimatorConfig(positions=3, shrink=0, max_step=100, memory=500)
    estimator = LogisticEstimator(config)
    rng = np.random.default_rng(0)
    prior = np.zeros((4, 4))
    for _ in range(3):
        f, k, y = sample(rng, 300, np.array([0.8]), np.array([0.6, 0.0, -0.4]))
        design = np.concatenate([f, np.eye(3)[k]], axis=1)
        before = np.concatenate([estimator.slopes, estimator.intercepts])
        c = sigmoid(design @ before)
        prior = prior + (design * (c * (1 - c))[:, None]).T @ design
        step = np.linalg.solve(prior + config.ridge * np.eye(4), design.T @ (y - c))
        estimator.observe(f, k, y)
        estimator.refit()
        after = np.concatenate([estimator.slopes, estimator.intercepts])
        assert np.allclose(after - before, step, atol=1e-10)
        prior *= 500 / 800
        estimator = LogisticEstimator.from_state(json.loads(json.dumps(estimator.state())))


def test_memory_keeps_coefficients_still_and_lets_them_follow():
    intercepts = np.array([0.4, -0.4])
    away = {0.0: [], 1000.0: []}
    for memory, found in away.items():
        estimator = LogisticEstimator(EstimatorConfig(positions=2, memory=memory))
        rng = np.random.default_rng(8)
        for turn in range(120):
            slope = 0.8 if turn < 60 else 0.3  # the workload changes
            estimator.observe(*sample(rng, 200, np.array([slope]), intercepts))
            estimator.refit()
            found.append(abs(estimator.slopes[0] - slope))
    assert np.mean(away[1000.0][20:60]) < 0.6 * np.mean(away[0.0][20:60])
    assert np.mean(away[1000.0][90:]) < 0.8 * np.mean(away[0.0][90:]) < 0.1


def test_steps_are_shrunk_by_the_number_of_observations():
    estimator = LogisticEstimator(EstimatorConfig(positions=2, max_step=100, nonnegative_slopes=False))
    rng = np.random.default_rng(1)
    f, _, y = sample(rng, 40, np.array([0.7]), np.array([0.2]))
    k = np.repeat([0, 1], [30, 10])
    c = sigmoid(0.5 * f[:, 0] - 0.2)
    v, r = c * (1 - c), y - c
    dw = dense_newton(estimator, f, k, y)[0][0] * 40 / 90
    estimator.observe(f, k, y)
    estimator.refit()
    assert estimator.slopes[0] == pytest.approx(0.5 + dw)
    for position, n in ((0, 30), (1, 10)):
        at = k == position
        db = (r[at].sum() - (v * f[:, 0])[at].sum() * dw) / (v[at].sum() + 1e-3) * n / (n + 50)
        assert estimator.intercepts[position] == pytest.approx(-0.2 + db)


def test_coefficients_are_recovered_and_calibrated():
    slopes, intercepts = np.array([0.8]), np.array([0.6, 0.3, 0.0, -0.4, -0.9])
    estimator = LogisticEstimator(EstimatorConfig(positions=5))
    rng = np.random.default_rng(2)
    for _ in range(6):
        estimator.observe(*sample(rng, 4000, slopes, intercepts, first_refusal_ends=True))
        estimator.refit()
    assert estimator.slopes == pytest.approx(slopes, abs=0.05)
    assert estimator.intercepts == pytest.approx(intercepts, abs=0.2)
    f, k, y = sample(np.random.default_rng(9), 20000, slopes, intercepts, first_refusal_ends=True)
    fitted, unfitted = estimator.predict(f, k), LogisticEstimator(EstimatorConfig(positions=5)).predict(f, k)
    assert ece(fitted, y) < 0.01 < ece(unfitted, y)
    assert auc(fitted, y) > auc(unfitted, y) + 0.001


def test_eight_features_of_a_guard_are_recovered():
    slopes, intercepts = np.array([0.8, -0.5, 0.0, 0.3, 0.0, 0.2, -0.2, 0.1]), np.array([0.5, -0.5])
    estimator = LogisticEstimator(EstimatorConfig(slopes=(0.0,) * 8, positions=2, nonnegative_slopes=False))
    rng = np.random.default_rng(3)
    for _ in range(6):
        estimator.observe(*sample(rng, 20000, slopes, intercepts))
        estimator.refit()
    assert estimator.slopes == pytest.approx(slopes, abs=0.1)
    assert estimator.intercepts == pytest.approx(intercepts, abs=0.2)


def test_soft_labels_fit_the_same_coefficients_with_less_noise():
    slopes, intercepts = np.array([0.8]), np.array([0.4])
    hard, soft = (LogisticEstimator(EstimatorConfig(positions=1, shrink=0)) for _ in range(2))
    rng = np.random.default_rng(4)
    for _ in range(8):
        f, k, y = sample(rng, 150, slopes, intercepts)
        hard.observe(f, k, y)
        soft.observe(f, k, sigmoid(f @ slopes + intercepts[k]))
        hard.refit()
        soft.refit()
    assert soft.slopes[0] == pytest.approx(0.8, abs=1e-3)
    assert soft.intercepts[0] == pytest.approx(0.4, abs=1e-3)
    assert abs(hard.slopes[0] - 0.8) > 1e-2


def test_one_confidently_wrong_draft_does_not_run_away():
    estimator = LogisticEstimator(EstimatorConfig(positions=2))
    for _ in range(3):
        estimator.observe([[20.0]], [0], [0.0])
        estimator.refit()
    assert 0 <= estimator.slopes[0] <= 0.5
    assert -0.2 - 3 <= estimator.intercepts[0] < -0.2
    assert estimator.intercepts[1] == -0.2
    unguarded = LogisticEstimator(EstimatorConfig(positions=2, max_step=1e9, intercept_cap=1e9))
    unguarded.observe([[20.0]], [0], [0.0])
    unguarded.refit()
    assert unguarded.intercepts[0] < -18


def test_steps_and_coefficients_are_capped():
    config = EstimatorConfig(positions=2, shrink=0, slope_cap=1.8, intercept_cap=2.5)
    estimator = LogisticEstimator(config)
    f = np.array([[-0.5], [0.5]] * 200)
    for _ in range(10):
        before = estimator.slopes[0], estimator.intercepts[1]
        estimator.observe(f, 0, f[:, 0] > 0)
        estimator.observe(np.zeros((200, 1)), 1, 1.0)
        estimator.refit()
        assert abs(estimator.slopes[0] - before[0]) <= 1 + 1e-12
        assert abs(estimator.intercepts[1] - before[1]) <= 1 + 1e-12
    assert estimator.slopes[0] == 1.8
    assert estimator.intercepts[1] == 2.5


@pytest.mark.parametrize("nonnegative", [True, False])
def test_a_slope_turns_negative_only_where_that_is_allowed(nonnegative):
    estimator = LogisticEstimator(EstimatorConfig(positions=1, nonnegative_slopes=nonnegative))
    rng = np.random.default_rng(5)
    for _ in range(5):
        estimator.observe(*sample(rng, 500, np.array([-0.6]), np.array([0.0])))
        estimator.refit()
    assert (estimator.slopes[0] < 0) is not nonnegative


def test_nothing_observed_nothing_changed():
    estimator = LogisticEstimator(EstimatorConfig(positions=3))
    before = json.dumps(estimator.state())
    assert not estimator.refit()
    estimator.observe(np.zeros((0, 1)), [], [])
    estimator.observe([[1.0], [np.nan], [np.inf], [1.0]], [0, 1, 2, 0], [1.0, 1.0, 1.0, 1.0], weight=[0, 1, 1, np.nan])
    assert not estimator.refit()
    assert json.dumps(estimator.state()) == before
    estimator.observe([[1.0]], [1], [1.0])
    estimator.refit()
    assert estimator.intercepts[[0, 2]].tolist() == [-0.2, -0.2]
    assert estimator.intercepts[1] != -0.2


def test_statistics_are_forgotten_by_a_refit_and_counted():
    estimator = LogisticEstimator(EstimatorConfig(positions=3))
    estimator.observe([[[1.0], [2.0]], [[0.5], [0.1]]], [[0, 1], [0, 1]], [[1, 0], [1, 1]])
    assert (estimator.pending, estimator.observations) == (4, 4)
    estimator.refit()
    assert (estimator.pending, estimator.observations) == (0, 4)
    assert not estimator.refit()


def test_a_weight_of_two_is_the_row_twice():
    once, twice = (LogisticEstimator(EstimatorConfig(positions=1)) for _ in range(2))
    once.observe([[1.0], [0.3]], 0, [1.0, 0.0], weight=[2.0, 1.0])
    twice.observe([[1.0], [1.0], [0.3]], 0, [1.0, 1.0, 0.0])
    once.refit()
    twice.refit()
    assert once.predict([[0.7]], 0) == pytest.approx(twice.predict([[0.7]], 0), abs=1e-12)


def test_state_survives_json_and_copies_are_independent():
    config = EstimatorConfig(slopes=(0.5, 0.0), positions=4, nonnegative_slopes=False)
    estimator = LogisticEstimator(config)
    rng = np.random.default_rng(6)
    rows = sample(rng, 300, np.array([0.9, -0.2]), np.zeros(4))
    estimator.observe(*rows)
    estimator.refit()
    restored = LogisticEstimator.from_state(json.loads(json.dumps(estimator.state())))
    twin = estimator.copy()
    assert restored.config == config
    assert restored.observations == 300
    for other in (restored, twin):
        assert np.array_equal(other.predict(*rows[:2]), estimator.predict(*rows[:2]))
    before = estimator.predict(*rows[:2])
    twin.observe(*rows)
    twin.refit()
    assert estimator.pending == 0
    assert np.array_equal(estimator.predict(*rows[:2]), before)


@pytest.mark.parametrize("key", ["config", "slopes", "intercepts", "observations"])
@pytest.mark.parametrize("value", [None, [float("nan")] * 2, {"slopes": [0.5], "nonsense": 1}])
def test_a_broken_state_is_refused(key, value):
    state = LogisticEstimator(EstimatorConfig(positions=2)).state()
    for broken in ({**state, key: value}, {k: v for k, v in state.items() if k != key}):
        with pytest.raises(OptionError, match="estimator state"):
            LogisticEstimator.from_state(broken)


@pytest.mark.parametrize(
    "options",
    [
        {"slopes": ()},
        {"slopes": (-0.1,)},
        {"positions": 0},
        {"ridge": 0},
        {"shrink": -1},
        {"memory": -1},
        {"memory": float("inf")},
        {"max_step": float("nan")},
    ],
)
def test_bad_options_are_refused(options):
    with pytest.raises(OptionError):
        EstimatorConfig(**options)


def test_rows_that_do_not_fit_are_refused():
    estimator = LogisticEstimator(EstimatorConfig(positions=2))
    for features, position, label in (
        ([[1.0]], [2], [1]),
        ([[1.0]], [-1], [1]),
        ([[1.0, 2.0]], [0], [1]),
        ([[1.0]], [0], [1.5]),
    ):
        with pytest.raises(ValueError, match="must"):
            estimator.observe(features, position, label)
    assert estimator.pending == 0


def test_probabilities_stay_finite_at_the_ends():
    estimator = LogisticEstimator(EstimatorConfig(positions=1))
    assert estimator.predict([[1e9], [-1e9]], 0).tolist() == [1.0, 0.0]
    assert np.isnan(estimator.predict([[np.nan]], 0))[0]


@pytest.mark.parametrize("memory", [0.0, 1000.0])
@pytest.mark.parametrize("feature", [-12.0, -4.6, 0.0])
@pytest.mark.parametrize("rate", [0.05, 0.81])
def test_a_feature_that_hardly_varies_does_not_drive_the_coefficients_apart(
    feature: float, rate: float, memory: float
) -> None:
    rng = np.random.default_rng(1)
    estimator = LogisticEstimator(EstimatorConfig(positions=2, memory=memory))
    for refit in range(30):
        f = feature + 0.01 * rng.standard_normal((200, 1))
        estimator.observe(f, rng.integers(0, 2, 200), rng.random(200) < rate)
        estimator.refit()
        if refit >= 15:
            for place in (0, 1):
                assert estimator.predict([feature], place) == pytest.approx(rate, abs=0.25), (refit, place)
