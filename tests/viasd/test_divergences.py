import warnings

import numpy as np
import pytest
import torch

from viasd import divergences
from viasd.divergences import (
    accept_mass,
    expected_tokens,
    kl,
    predicted_seconds_cascade,
    predicted_seconds_sd,
    rejection_rate,
    stage_cost,
    stage_figures,
    total_variation,
)
from viasd.errors import OptionError


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(0)
    p, q = (3 * torch.randn(64, 40, generator=generator, dtype=torch.float64) for _ in range(2))
    return p, q, torch.softmax(p, -1).numpy(), torch.softmax(q, -1).numpy()


def direct_cost(p, q, alpha, beta):
    first = (p * np.maximum(0, np.log(1 - alpha) + np.log(p) - np.log(q))).sum(-1)
    return first, (q * np.maximum(0, np.log(beta) + np.log(p) - np.log(q))).sum(-1)


@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 0.5), (0.3, 0.9), (0.9, 0.2)])
def test_stage_cost_is_the_formula(rows, alpha, beta):
    log_p, log_q, p, q = rows
    first, second = direct_cost(p, q, alpha, beta)
    assert second.max() > 0.01
    assert stage_cost(log_p, log_q, alpha, beta).numpy() == pytest.approx(first + second)


def test_distances_are_their_formulas(rows):
    log_p, log_q, p, q = rows
    assert total_variation(log_p, log_q).numpy() == pytest.approx(np.abs(p - q).sum(-1) / 2)
    assert kl(log_p, log_q).numpy() == pytest.approx((p * np.log(p / q)).sum(-1))
    assert accept_mass(log_p, log_q).numpy() == pytest.approx(np.minimum(p, q).sum(-1))
    for alpha in (0.0, 0.3, 0.9):
        expected = np.maximum(0, p - q / (1 - alpha)).sum(-1)
        assert rejection_rate(log_p, log_q, alpha).numpy() == pytest.approx(expected)
    assert torch.allclose(rejection_rate(log_p, log_q), 1 - accept_mass(log_p, log_q))


def test_logits_and_log_probabilities_give_the_same(rows):
    log_p, log_q, _, _ = rows
    normalised = stage_cost(log_p.log_softmax(-1), log_q.log_softmax(-1))
    assert torch.allclose(stage_cost(log_p, log_q), normalised)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.8])
def test_stage_cost_bounds_the_lossy_rejection_rate(rows, alpha):
    log_p, log_q, p, q = rows
    rejection = rejection_rate(log_p, log_q, alpha).numpy()
    assert (direct_cost(p, q, alpha, 1 - alpha)[0] >= rejection - 1e-12).all()
    assert (stage_cost(log_p, log_q, alpha, 1 - alpha).numpy() >= rejection - 1e-12).all()


def test_zero_cost_does_not_mean_equal_but_kl_tells():
    p, q = torch.tensor([[0.55, 0.45]]).log(), torch.tensor([[0.45, 0.55]]).log()
    assert stage_cost(p, q).item() == 0.0
    assert kl(p, q).item() > 0.01
    assert kl(q, q).item() == 0.0


def test_banned_tokens_cost_much_but_not_infinitely():
    inf = float("inf")
    p, q = torch.tensor([[0.0, -inf]]), torch.tensor([[-inf, 0.0]])
    assert stage_cost(p, q).item() == pytest.approx(50 + np.log(0.5), rel=1e-5)
    assert kl(p, q).item() == pytest.approx(50, rel=1e-5)
    assert total_variation(p, q).item() == pytest.approx(1)
    assert accept_mass(p, q).item() == pytest.approx(0, abs=1e-12)


def test_rows_are_read_in_chunks_and_bf16_is_promoted(rows, monkeypatch):
    log_p, log_q, _, _ = rows
    whole = stage_cost(log_p.bfloat16(), log_q.bfloat16())
    widest = []
    plain = divergences._log_softmax
    monkeypatch.setattr(divergences, "_CHUNK_ELEMENTS", 3 * 40)
    monkeypatch.setattr(divergences, "_log_softmax", lambda x: widest.append(len(x)) or plain(x))
    chunked = stage_cost(log_p.bfloat16(), log_q.bfloat16())
    assert max(widest) == 3
    assert whole.dtype == torch.float32
    assert torch.allclose(chunked, whole)
    assert torch.allclose(whole, stage_cost(log_p.bfloat16().double(), log_q.bfloat16().double()).float(), atol=1e-5)
    assert stage_cost(log_p[:0], log_q[:0]).shape == (0,)


def test_options_out_of_range_are_refused_and_doubtful_ones_warned_about(rows):
    log_p, log_q, _, _ = rows
    for alpha, beta in ((0.0, 0.5), (1.1, 0.5), (0.5, 0.0), (0.5, 1.1), (float("nan"), 0.5)):
        with pytest.raises(OptionError):
            stage_cost(log_p, log_q, alpha, beta)
    for alpha in (-0.1, 1.0):
        with pytest.raises(OptionError):
            rejection_rate(log_p, log_q, alpha)
    with pytest.warns(UserWarning, match="1 - alpha <= beta"):
        stage_cost(log_p, log_q, 0.5, 0.4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opposite = torch.tensor([[0.0, -60.0]]), torch.tensor([[-60.0, 0.0]])
        assert stage_cost(*opposite, 1.0, 0.1).item() == pytest.approx(0, abs=1e-6)
    with pytest.raises(ValueError, match=r"\[N, V\]"):
        kl(log_p, log_q[:, :-1])


def test_expected_tokens_is_the_closed_form_with_its_limits():
    assert expected_tokens(0.3, 5) == pytest.approx((1 - 0.7**6) / 0.3)
    assert expected_tokens(0.0, 5) == 6
    assert expected_tokens(1e-17, 5) == 6
    assert expected_tokens(1.0, 5) == 1
    assert expected_tokens(0.4, 0) == 1
    for rejection, gamma in ((-0.1, 5), (1.1, 5), (0.5, -1)):
        with pytest.raises(OptionError):
            expected_tokens(rejection, gamma)


def test_predicted_seconds_by_hand():
    # R = 0.5, gamma = 2: E = 1.75.
    assert predicted_seconds_sd(0.5, 2, 1.0, 5.0) == pytest.approx(7 / 1.75)
    assert predicted_seconds_cascade(0.5, 2, 1.0, 3.0, 0.25, 4.0) == pytest.approx(6 / 1.75)
    with pytest.raises(OptionError):
        predicted_seconds_cascade(0.5, 2, 1.0, 3.0, 1.25, 4.0)


@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 0.5), (0.3, 0.9), (1.0, 0.4)])
def test_figures_in_one_reading_are_the_three_functions(alpha: float, beta: float) -> None:
    generator = torch.Generator().manual_seed(3)
    p, q = torch.randn(7, 33, generator=generator) * 3, torch.randn(7, 33, generator=generator) * 3
    p[2, 5] = -torch.inf  # a banned token
    figures = stage_figures(p, q, alpha, beta)
    separate = [stage_cost(p, q, alpha, beta), kl(p, q), total_variation(p, q)]
    torch.testing.assert_close(figures, torch.stack(separate, dim=-1), rtol=1e-5, atol=1e-6)
