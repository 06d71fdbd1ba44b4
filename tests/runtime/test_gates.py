from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from viasd.errors import OptionError
from viasd.estimator import EstimatorConfig, LogisticEstimator
from viasd.rows import Rows
from viasd.runtime.drafters import Draft
from viasd.runtime.gates import Decision, RatioGate, Thresholds, log_ratios
from viasd.runtime.guard import FEATURES, Guard, GuardConfig, GuardedGate, block_features

A, B, C = Decision.ACCEPT, Decision.REWRITE, Decision.ESCALATE


@pytest.mark.parametrize(("accept", "escalate"), [(0.5, 0.5), (0.3, 0.6), (1.1, 0.5), (0.5, -0.1), (math.nan, 0.5)])
def test_thresholds_out_of_order_are_refused(accept: float, escalate: float) -> None:
    with pytest.raises(OptionError, match=r"0 <= theta_esc < theta_acc <= 1, but got theta_esc .* and theta_acc"):
        Thresholds(accept, escalate)


def test_the_papers_alphas_in_either_order() -> None:
    assert Thresholds.from_alphas(0.5, 0.3) == Thresholds.from_alphas(0.3, 0.5) == Thresholds(0.7, 0.5) == Thresholds()
    assert Thresholds.from_alphas(0.6, 0.4) == Thresholds(0.6, 0.4)
    with pytest.raises(OptionError):
        Thresholds.from_alphas(0.4, 0.4)


@pytest.mark.parametrize(
    ("ratio", "decision"), [(1, A), (0.7, A), (0.6999, B), (0.5, B), (0.4999, C), (0, C), (math.nan, C)]
)
def test_decisions_at_the_thresholds(ratio: float, decision: Decision) -> None:
    assert Thresholds().decide(ratio) is decision


def rows(*probabilities: list[float]) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def draft(tokens: list[int], confidence: float = 0.5, logits: torch.Tensor | None = None) -> Draft:
    raw = [] if logits is None else list(logits)
    return Draft(tokens, Rows.one_hot(tokens), [confidence] * len(tokens), raw)


SLIM = rows([0.5, 0.4, 0.2], [0.5, 0.3, 0.2], [0.6, 0.2, 0.1])


def test_the_ratio_is_taken_against_the_rows_largest_probability() -> None:
    assert log_ratios(SLIM, [1, 0, 2]) == pytest.approx([math.log(0.8), 0, math.log(1 / 6)])
    assert RatioGate(Thresholds()).judge(SLIM, draft([1, 1, 1])) == [A, B, C]
    assert RatioGate(Thresholds()).judge(SLIM, draft([0, 0, 0])) == [A, A, A]


def test_sets_agree_with_decisions_for_every_token() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        logits = torch.randn(6, 50, generator=generator, dtype=dtype)
        logits[0, 1] = -torch.inf
        gates: list[Any] = [RatioGate(Thresholds(0.6, 0.2)), RatioGate(Thresholds(1.0, 0.0)), guarded(0.4, TRAINED)]
        for gate in gates:
            for position in range(6):
                accept, rewrite = gate.sets(logits, draft([0] * 6, logits=logits), position)
                assert not (accept & rewrite).any()
                for token in range(50):
                    block = [0] * position + [token]
                    decision = gate.judge(logits[: position + 1], draft(block, logits=logits))[position]
                    assert (decision is A, decision is B) == (bool(accept[token]), bool(rewrite[token]))


# --- the guard --------------------------------------------------------------------------------------------------------


def trained(slopes: tuple[float, ...], intercept: float = 0.0) -> dict[str, Any]:
    return LogisticEstimator(EstimatorConfig(slopes=slopes, intercept=intercept, nonnegative_slopes=False)).state()


TRAINED = trained((2.0, 1.0, 0.3, 0.0, 0.0, 0.0, 0.0, 0.5), 0.3)
SURE = trained((0.0,) * 8, 8.0)


def guarded(budget: float, start: Any = None, **config: Any) -> GuardedGate:
    return GuardedGate(Thresholds(), Guard(GuardConfig(max_disagreement=budget, **config), start))


def test_nothing_passes_before_enough_was_seen() -> None:
    gate = guarded(0.99, min_observations=6)
    block = draft([0, 0, 0])
    for observed in range(0, 6, 3):
        assert gate.guard.estimator.observations == observed
        assert not gate.guard.ready
        assert gate.judge(SLIM, block) == [C, C, C]
        assert not any(bool(s.any()) for s in gate.sets(SLIM, block, 0))
        gate.learn(SLIM, block, [0, 0, 0], [1.0, 1.0, 1.0])
    assert gate.guard.ready
    assert gate.judge(SLIM, block) == [A, A, A]


def test_what_is_heard_of_rounds_that_go_on_at_once_counts_only_behind_them() -> None:
    gate = guarded(0.99, min_observations=6)
    block = draft([0, 0, 0])
    with gate.guard.unchanging():
        for _ in range(3):
            gate.learn(SLIM, block, [0, 0, 0], [1.0, 1.0, 1.0])
        assert gate.judge(SLIM, block) == [C, C, C]
        assert not any(bool(s.any()) for s in gate.sets(SLIM, block, 0))
    assert gate.guard.estimator.observations == 9
    assert gate.judge(SLIM, block) == [A, A, A]
    at_once = guarded(0.99, min_observations=6)
    for _ in range(3):
        at_once.learn(SLIM, block, [0, 0, 0], [1.0, 1.0, 1.0])
    assert at_once.guard.estimator.state() == gate.guard.estimator.state()


def test_coefficients_of_a_search_count_as_seen() -> None:
    assert guarded(0.02, SURE).judge(SLIM, draft([1, 1, 1])) == [A, B, C]
    with pytest.raises(OptionError, match="estimator state"):
        guarded(0.02, {"slopes": [1.0]})


def test_the_guard_only_ever_makes_the_gate_stricter() -> None:
    generator = torch.Generator().manual_seed(3)
    plain = RatioGate(Thresholds())
    changed = 0
    for _ in range(20):
        slim = torch.randn(5, 20, generator=generator) * 2
        block = draft(slim.argsort(dim=-1)[:, -2].tolist(), logits=slim)
        for before, after in zip(plain.judge(slim, block), guarded(0.4, TRAINED).judge(slim, block), strict=True):
            assert after in (before, C)
            changed += after is not before
    assert changed > 0


def test_a_budget_of_zero_passes_nothing_even_where_the_prediction_rounds_to_one() -> None:
    certain = trained((4.0,) * 8, 8.0)
    sharp = torch.tensor([[60.0, 0.0, 0.0]])
    features = block_features(sharp, draft([0], 0.9999), [0])
    assert (
        Guard(GuardConfig(), {**certain, "slopes": [0, 4.0, 4.0, 4.0, 0, 0, 0, 0]}).agreement(features, [0])[0] == 1.0
    )
    gate = guarded(0.0, {**certain, "slopes": [0, 4.0, 4.0, 4.0, 0, 0, 0, 0]})
    assert gate.judge(sharp, draft([0], 0.9999)) == [C]
    assert not any(bool(s.any()) for s in gate.sets(sharp, draft([0], 0.9999), 0))


def test_the_guard_learns_which_rows_to_trust() -> None:
    # q agrees where q' is sure, and disagrees where it is not.
    gate = guarded(0.1)
    generator = torch.Generator().manual_seed(5)
    for _ in range(300):
        sure = bool(torch.rand((), generator=generator) < 0.5)
        row = torch.tensor([[6.0 if sure else 0.3, 0.0, -1.0]]) + 0.1 * torch.randn(1, 3, generator=generator)
        gate.learn(row, draft([0]), [0], [1.0 if sure else 0.0])
    assert gate.judge(torch.tensor([[6.0, 0.0, -1.0]]), draft([0])) == [A]
    assert gate.judge(torch.tensor([[0.3, 0.0, -1.0]]), draft([0])) == [C]


def test_the_guard_unlearns() -> None:
    gate = guarded(0.2)
    row = torch.tensor([[5.0, 0.0, -1.0]])
    for _ in range(150):
        gate.learn(row, draft([0]), [0], [1.0])
    assert gate.judge(row, draft([0])) == [A]
    for _ in range(600):
        gate.learn(row, draft([0]), [0], [0.0])
    assert gate.judge(row, draft([0])) == [C]


@pytest.mark.parametrize("value", [-0.01, 1.0, math.nan])
def test_budgets_out_of_range_are_refused(value: float) -> None:
    with pytest.raises(OptionError, match="max_disagreement must be at least 0 and below 1"):
        GuardConfig(max_disagreement=value)


def test_features_by_hand() -> None:
    p = rows([0.5, 0.25, 0.25])
    found = dict(zip(FEATURES, block_features(SLIM[:1], draft([1], logits=p), [1])[0], strict=True))
    slim = torch.tensor([0.5, 0.4, 0.2], dtype=torch.float64) / 1.1
    entropy = -float((slim * slim.log()).sum())
    assert found["log_r"] == pytest.approx(math.log(0.8), abs=1e-5)
    assert found["logit_max_slim"] == pytest.approx(math.log(0.5 / 0.6), abs=1e-5)
    assert found["logit_p"] == pytest.approx(math.log(1 / 3), abs=1e-5)
    assert (found["is_argmax"], found["rewritten"]) == (0, 0)
    assert found["entropy_slim"] == pytest.approx(entropy, abs=1e-5)
    assert found["entropy_p"] == pytest.approx(1.5 * math.log(2), abs=1e-5)
    assert found["kl_p_slim"] == pytest.approx(float((p.exp() * (p - slim.log())).sum()), abs=1e-5)


def test_features_of_a_rewrite_do_not_depend_on_what_was_drawn() -> None:
    one, two = (block_features(SLIM[:1], draft([2], logits=SLIM), [drawn])[0] for drawn in (0, 1))
    assert np.array_equal(one, two)
    found = dict(zip(FEATURES, one, strict=True))
    assert (found["rewritten"], found["is_argmax"], found["log_r"]) == (1, 1, 0)


def test_features_stay_finite_with_banned_tokens_and_point_masses() -> None:
    slim = torch.tensor([[0.0, -torch.inf, 1.0], [-torch.inf, 2.0, -torch.inf]])
    for logits in (None, torch.tensor([[0.0, 1.0, -torch.inf], [5.0, 0.0, 0.0]])):
        for confidence in (0.0, 1.0):
            features = block_features(slim, draft([1, 1], confidence, logits), [1, 1])
            assert np.isfinite(features).all()
            assert np.abs(features).max() <= 10 + 1e-6
