from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import pair_of, prompt_ids

from viasd.routes import Route
from viasd.search.calibration import Passage
from viasd.search.scorer import Scorer
from viasd.search.trust import BUDGETS, alone, passing, trust_curve, trust_lines

ROUTE = Route.of([1, 1, 0, 1, 1, 1, 1, 1])


def brute(scores: np.ndarray, agrees: np.ndarray, budget: float) -> int:
    """Every threshold tried."""
    best = 0
    for threshold in set(scores.tolist()):
        passed = scores >= threshold
        if (agrees[passed] == 0).mean() <= budget:
            best = max(best, int(passed.sum()))
    return best


@pytest.mark.parametrize("budget", [0.0, 0.05, 0.2, 0.5, 1.0])
def test_the_longest_beginning_within_the_budget_passes(budget: float) -> None:
    generator = np.random.default_rng(3)
    for n in (1, 2, 40, 300):
        scores = generator.integers(0, 12, n) / 10.0  # many are equal: no order of theirs may be chosen by their labels
        agrees = (generator.random(n) < 0.3 + scores / 2).astype(float)
        assert passing(scores, agrees, budget) == brute(scores, agrees, budget)
    assert passing(np.array([0.9, 0.8]), np.array([0.0, 1.0]), 0.4) == 0
    assert passing(np.array([0.5, 0.5]), np.array([1.0, 0.0]), 0.4) == 0
    assert passing(np.array([]), np.array([]), 0.4) == 0


def passages(texts: tuple[str, ...]) -> list[Passage]:
    return [Passage(tuple(prompt_ids(text)), 2) for text in texts]


def test_the_curve_is_of_what_the_slim_verifier_says_on_the_second_text() -> None:
    model = pair_of("qwen3").target
    search = Scorer(
        model, passages(("hello hello world, " * 9, "one two three one " * 7, "again and again " * 6)), block=4
    )
    report = Scorer(model, passages(("world hello, three two one " * 6,)), block=4)
    curve = trust_curve(search, report, ROUTE)
    score = report.score(ROUTE)
    assert curve.tokens == report.tokens
    assert curve.agreed == round(score.agreement * score.tokens)
    assert 0 < curve.agreed < curve.tokens
    seen = alone(report, ROUTE)
    with torch.inference_mode():
        top = torch.cat([b.logits.softmax(-1).amax(-1) for b in report.blocks(ROUTE)]).numpy()
    assert curve.by_max == tuple(passing(top, seen.labels, b) for b in BUDGETS)
    assert curve.by_guard is not None
    assert list(curve.by_guard) == sorted(curve.by_guard)
    assert set(seen.positions.tolist()) == {0, 1, 2, 3}
    said = curve.as_json()
    assert said["max"] == [round(n / curve.tokens, 4) for n in curve.by_max]
    lines = trust_lines({"raw": said})
    assert len(lines) == 3
    assert "guard's estimator" in lines[1]
    assert lines[2].split()[-1] == f"{said['max'][-1]:.3f}"


def test_too_little_text_leaves_the_guard_out() -> None:
    scorer = Scorer(pair_of("qwen3").target, passages(("hello hello world",)), block=4)
    curve = trust_curve(scorer, scorer, ROUTE)
    assert curve.by_guard is None
    assert [line.strip().split(",")[0] for line in trust_lines({"raw": curve.as_json()})[1:]] == ["raw"]
    assert trust_lines({}) == []
