from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from viasd.errors import FitError
from viasd.search.fit.ridge import Moments

N, D = 200, 7


def toy(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features of very different scale and mean, and what they should become."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64)
    x = (
        x @ torch.randn(D, D, generator=generator, dtype=torch.float64) * torch.logspace(-2, 2, D)
        + torch.arange(D) * 50
    )
    y = (
        x
        + x @ torch.randn(D, D, generator=generator, dtype=torch.float64) * 0.1
        + torch.randn(N, D, generator=generator)
    )
    return x, y


def moments(x: Tensor, y: Tensor) -> Moments:
    found = Moments(D)
    for rows in (slice(0, 1), slice(1, 90), slice(90, 90), slice(90, N)):  # in pieces, one of them empty
        found.add(x[rows], y[rows])
    assert found.rows == N
    return found


def by_lstsq(x: Tensor, y: Tensor, ridge: float) -> tuple[np.ndarray, np.ndarray]:
    """The same map by numpy: the penalty as further rows, the shift as a column that they do not touch."""
    spread = x.numpy().std(axis=0)
    rows = np.vstack(
        [np.column_stack([x.numpy(), np.ones(N)]), np.column_stack([np.diag((N * ridge) ** 0.5 * spread), np.zeros(D)])]
    )
    wanted = np.vstack([(y - x).numpy(), np.zeros((D, D))])
    solution = np.linalg.lstsq(rows, wanted, rcond=None)[0]
    return solution[:D], solution[D]


@pytest.mark.parametrize("ridge", [0.0, 0.01, 1.0])
def test_the_map_is_that_of_least_squares(ridge: float) -> None:
    x, y = toy()
    weight, shift = moments(x, y).solve(ridge)
    expected, expected_shift = by_lstsq(x, y, ridge)
    np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(shift.numpy(), expected_shift, rtol=1e-6, atol=1e-6)


def test_a_large_penalty_leaves_the_shift_alone() -> None:
    x, y = toy()
    weight, shift = moments(x, y).solve(1e9)
    assert weight.abs().max() < 1e-6
    torch.testing.assert_close(shift, (y - x).mean(dim=0), atol=1e-3, rtol=1e-3)


def test_a_low_rank_is_the_best_one_of_that_rank() -> None:
    x, y = toy()
    found = moments(x, y)
    whole, _ = found.solve(0.0)
    centred, wanted = x - x.mean(dim=0), (y - x) - (y - x).mean(dim=0)
    errors = []
    for rank in (1, 2, 4, D):
        weight, shift = found.solve(0.0, rank)
        assert int(torch.linalg.matrix_rank(weight, rtol=1e-8)) == rank
        # Eckart and Young: no map of this rank predicts better than the truncated predictions of the whole one.
        left, scale, right = torch.linalg.svd(centred @ whole, full_matrices=False)
        best = (wanted - left[:, :rank] * scale[:rank] @ right[:rank]).square().sum()
        errors.append(float((y - x - x @ weight - shift).square().sum()))
        assert errors[-1] == pytest.approx(float(best), rel=1e-6)
    assert errors == sorted(errors, reverse=True)
    torch.testing.assert_close(found.solve(0.0, D)[0], whole)


def test_a_feature_that_never_varies_says_nothing() -> None:
    x, y = toy()
    x[:, 3] = 1234.5
    weight, _ = moments(x, y).solve(0.01)
    assert torch.equal(weight[3], torch.zeros(D, dtype=torch.float64))
    assert weight[2].abs().max() > 0


def test_a_singular_system_is_refused() -> None:
    x, y = toy()
    x[:, 3] = x[:, 2] + x[:, 4]
    with pytest.raises(FitError, match=r"singular.*raise the ridge, which is 0"):
        moments(x, y).solve(0.0)
    moments(x, y).solve(0.01)
    few = Moments(D)
    few.add(x[:4], y[:4])
    with pytest.raises(FitError, match="4 tokens don't determine"):
        few.solve(0.0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_a_number_is_refused(bad: float) -> None:
    for which in (0, 1):
        pair = toy()
        pair[which][5, 2] = bad
        with pytest.raises(FitError, match="NaN or infinity"):
            moments(*pair).solve(0.01)
    with pytest.raises(FitError, match="at least one row"):
        Moments(D).solve(0.01)
