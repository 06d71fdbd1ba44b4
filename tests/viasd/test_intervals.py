import math

import numpy as np
import pytest

from viasd.errors import OptionError
from viasd.intervals import clustered_interval


def wilson(mean, size, z=1.959963984540054):
    centre = (mean + z * z / (2 * size)) / (1 + z * z / size)
    half = z / (1 + z * z / size) * math.sqrt(mean * (1 - mean) / size + z * z / (4 * size * size))
    return centre - half, centre + half


def test_no_data_says_nothing():
    assert clustered_interval([], []) == (0.0, 1.0)
    assert clustered_interval([0, 0], [0, 0]) == (0.0, 1.0)


def test_blocks_of_one_token_are_plain_wilson():
    # 3 of 20 at 95 %: the textbook interval is 0.052 to 0.360.
    low, high = clustered_interval([1] * 20, [1] * 3 + [0] * 17)
    assert (low, high) == pytest.approx((0.0524, 0.3604), abs=1e-4)


def test_evenly_spread_disagreement_counts_tokens():
    assert clustered_interval([4] * 10, [1] * 10) == pytest.approx(wilson(0.25, 40))


def test_blocks_of_identical_tokens_count_blocks():
    low, high = clustered_interval([5] * 20, [5] * 6 + [0] * 14)
    assert (low, high) == pytest.approx(wilson(0.3, 20))


def test_design_effect_by_hand():
    # p = 3/12; between = 4/3 * (1.25^2 + 0.25^2 + 2 * 0.75^2) = 11/3; binomial = 12 * 3/16 = 9/4; effect = 44/27.
    assert clustered_interval([3] * 4, [2, 1, 0, 0]) == pytest.approx(wilson(0.25, 12 * 27 / 44))


def test_unknowable_variance_counts_blocks():
    low, high = clustered_interval([5] * 30, [0] * 30)
    assert low == 0.0
    assert high == pytest.approx(wilson(0.0, 30)[1])
    low, high = clustered_interval([5] * 30, [5] * 30)
    assert high == 1.0
    assert low == pytest.approx(wilson(1.0, 30)[0])
    assert clustered_interval([100], [30]) == pytest.approx(wilson(0.3, 1))


def test_empty_blocks_and_confidence():
    blocks = [3, 4, 2, 5], [1, 0, 2, 0.5]
    assert clustered_interval([*blocks[0], 0], [*blocks[1], 0]) == clustered_interval(*blocks)
    narrow, wide = clustered_interval(*blocks, confidence=0.5), clustered_interval(*blocks, confidence=0.99)
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_impossible_input_is_refused():
    for tokens, disagreement in (([2], [3]), ([2], [-1]), ([2, 2], [1]), ([0], [1]), ([2], [float("nan")])):
        with pytest.raises(ValueError, match=r"must be|zip"):
            clustered_interval(tokens, disagreement)
    for confidence in (0.0, 1.0, float("nan")):
        with pytest.raises(OptionError):
            clustered_interval([1], [0], confidence)


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("kind", ["independent", "identical", "mixed lengths"])
def test_coverage(rate, kind):
    rng = np.random.default_rng(7)
    covered = naive = 0
    trials = 1000
    for _ in range(trials):
        n = rng.integers(1, 10, 150) if kind == "mixed lengths" else np.full(150, 5)
        d = rng.binomial(n, rate) if kind == "independent" else n * (rng.random(150) < rate)
        low, high = clustered_interval(n.tolist(), d.tolist())
        covered += low <= rate <= high
        low, high = wilson(d.sum() / n.sum(), n.sum())
        naive += low <= rate <= high
    # Three standard errors of the simulation are 0.02; three disagreeing blocks of unequal lengths are promised less.
    assert covered / trials >= (0.89 if rate == 0.02 and kind == "mixed lengths" else 0.92)
    if kind != "independent":
        assert naive / trials < 0.85
