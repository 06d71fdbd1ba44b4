from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from viasd.accept import acceptance, gated_law, residual, verify, verify_greedy
from viasd.rows import Row, Rows
from viasd.testing import EnumeratingDraws


def dense(*probabilities: float) -> Row:
    return Row(probs=torch.tensor(probabilities, dtype=torch.float64))


@st.composite
def laws(draw: st.DrawFn, size: int = 4) -> torch.Tensor:
    weights = draw(st.lists(st.sampled_from([0.0, 0.0, 0.1, 1.0, 2.0, 5.0]), min_size=size, max_size=size))
    row = torch.tensor(weights, dtype=torch.float64)
    return row / row.sum() if row.sum() > 0 else torch.full((size,), 1 / size, dtype=torch.float64)


def outcome(p: Row, q: Row, alpha: float = 0.0) -> torch.Tensor:
    """Law of the first token that comes out of one test of one drafted token."""
    vocabulary = len(q.probs if q.probs is not None else p.probs)  # type: ignore[arg-type]
    law = torch.zeros(vocabulary, dtype=torch.float64)
    for draws in EnumeratingDraws().paths():
        token = draws.draft(p)
        verdict = verify([token], Rows.joined([p]), Rows.joined([q, q]), draws, alpha)
        law[token if verdict.accepted else verdict.token] += draws.weight
    return law


@given(laws(), laws())
@settings(max_examples=100, deadline=None)
def test_a_tested_token_has_the_verifiers_law(p: torch.Tensor, q: torch.Tensor) -> None:
    assert torch.allclose(outcome(Row(probs=p), Row(probs=q)), q, atol=1e-12, rtol=0)


@given(laws(), st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_a_point_mass_proposal_gives_the_verifiers_law_too(q: torch.Tensor, token: int) -> None:
    assert torch.allclose(outcome(Row(token=token), Row(probs=q)), q, atol=1e-12, rtol=0)


@given(laws(), laws(), st.floats(0.01, 0.95))
@settings(max_examples=100, deadline=None)
def test_lossy_acceptance_stays_within_its_bounds(p: torch.Tensor, q: torch.Tensor, alpha: float) -> None:
    out = outcome(Row(probs=p), Row(probs=q), alpha)
    assert bool((out <= q / (1 - alpha) + 1e-12).all())
    assert float((out - q).abs().sum()) / 2 <= alpha + 1e-12


def test_lossy_acceptance_uses_its_whole_budget() -> None:
    # The bound of a half is reached: p on a token to which q gives a half is kept always.
    assert outcome(dense(1, 0), dense(0.5, 0.5), alpha=0.5).tolist() == [1, 0]
    assert outcome(dense(1, 0), dense(0.25, 0.75), alpha=0.5).tolist() == [0.5, 0.5]


@given(laws(), laws())
@settings(max_examples=50, deadline=None)
def test_acceptance_mass_is_one_minus_total_variation(p: torch.Tensor, q: torch.Tensor) -> None:
    mass = sum(float(p[x]) * acceptance(float(q[x]), float(p[x])) for x in range(4))
    assert mass == pytest.approx(1 - float((p - q).abs().sum()) / 2, abs=1e-12)


@pytest.mark.parametrize(
    ("q", "p", "alpha", "expected"),
    [(0.5, 0.5, 0, 1), (0.2, 0.8, 0, 0.25), (0, 0.3, 0, 0), (0.2, 0.8, 0.5, 0.5), (0.4, 0.8, 0.5, 1), (0, 0.1, 0.9, 0)],
)
def test_acceptance_by_hand(q: float, p: float, alpha: float, expected: float) -> None:
    assert acceptance(q, p, alpha) == pytest.approx(expected)


def test_the_residual_is_normalised_and_not_soft_maxed() -> None:
    rest = residual(dense(0.6, 0.3, 0.1), dense(0.2, 0.2, 0.6))
    assert rest.probs is not None
    assert rest.probs.tolist() == pytest.approx([0.8, 0.2, 0.0], abs=1e-12)


def test_the_residual_of_equal_laws_is_the_law() -> None:
    assert residual(dense(0.5, 0.5), dense(0.5, 0.5)).probs.tolist() == [0.5, 0.5]  # type: ignore[union-attr]
    assert residual(Row(token=1), Row(token=1)) == Row(token=1)
    assert residual(Row(token=1), Row(token=0)) == Row(token=1)


def test_the_residual_of_a_point_mass_leaves_that_token_out() -> None:
    rest = residual(dense(0.5, 0.25, 0.25), Row(token=0))
    assert rest.probs is not None
    assert rest.probs.tolist() == [0, 0.5, 0.5]


def test_a_block_is_tested_in_order_and_stops_at_the_first_refusal() -> None:
    p = Rows.joined([dense(1, 0)] * 3)
    q = Rows.joined([dense(1, 0), dense(0, 1), dense(1, 0), dense(0, 1)])
    verdict = verify([0, 0, 0], p, q, EnumeratingDraws())
    assert (verdict.accepted, verdict.token) == (1, 1)
    q = Rows.joined([dense(1, 0)] * 3 + [dense(0, 1)])
    verdict = verify([0, 0, 0], p, q, EnumeratingDraws())
    assert (verdict.accepted, verdict.token) == (3, 1)


def test_greedy_verification_takes_the_lowest_id_on_a_tie() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])
    assert verify_greedy([2], logits).accepted == 0
    assert verify_greedy([2], logits).token == 1
    assert verify_greedy([1], logits) == verify_greedy([1], logits, 0.0)
    assert (verify_greedy([1], logits).accepted, verify_greedy([1], logits).token) == (1, 0)


def test_greedy_verification_stops_at_the_first_difference() -> None:
    logits = torch.eye(4)[[1, 2, 3, 0]]
    for n_right in range(4):
        tokens = [1, 2, 3][:n_right] + [0, 0, 0][n_right:]
        verdict = verify_greedy(tokens, logits)
        assert (verdict.accepted, verdict.token) == (n_right, [1, 2, 3, 0][n_right])


def test_greedy_verification_with_alpha_keeps_what_is_near_the_best() -> None:
    row = torch.tensor([0.5, 0.3, 0.2]).log()
    logits = torch.stack([row, row])
    for alpha, kept in ((0.0, 0), (0.3, 0), (0.41, 1)):
        assert verify_greedy([1], logits, alpha).accepted == kept  # 0.3 / 0.5 = 0.6 >= 1 - alpha
    assert verify_greedy([2], logits, 0.59).accepted == 0
    assert verify_greedy([2], logits, 0.61).accepted == 1


def test_greedy_verification_with_alpha_never_keeps_a_banned_token() -> None:
    logits = torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])
    assert verify_greedy([1], logits, 0.999).accepted == 0


@given(laws(), laws(), st.lists(st.booleans(), min_size=4, max_size=4))
@settings(max_examples=100, deadline=None)
def test_the_gated_law_is_the_law_of_the_tentative_token(
    p: torch.Tensor, slim: torch.Tensor, rewrite: list[bool]
) -> None:
    expected = torch.zeros(4, dtype=torch.float64)
    for x in range(4):
        if rewrite[x]:
            expected += p[x] * slim
        else:
            expected[x] += p[x]
    m = gated_law(Row(probs=p), Row(probs=slim), torch.tensor(rewrite))
    assert m.probs is not None
    assert torch.allclose(m.probs, expected, atol=1e-12, rtol=0)
    assert float(m.probs.sum()) == pytest.approx(1, abs=1e-12)


def test_the_gated_law_of_a_point_mass() -> None:
    slim = dense(0.5, 0.5)
    assert gated_law(Row(token=0), slim, torch.tensor([True, False])) is slim
    assert gated_law(Row(token=0), slim, torch.tensor([False, True])) == Row(token=0)


def test_rows_of_both_kinds_read_the_same() -> None:
    rng = random.Random(0)
    tokens = [rng.randrange(5) for _ in range(4)]
    sharp = Rows.one_hot(tokens)
    full = Rows(probs=torch.nn.functional.one_hot(torch.tensor(tokens), 5).double())
    for asked in itertools.product(range(5), repeat=2):
        assert sharp.at(list(asked)) == full.at(list(asked))
    assert len(sharp) == len(full) == 4
    assert (
        [sharp[i].prob(t) for i, t in enumerate(tokens)] == [full[i].prob(t) for i, t in enumerate(tokens)] == [1] * 4
    )


def test_a_point_mass_has_no_mass_elsewhere() -> None:
    assert [Row(token=2).prob(x) for x in range(4)] == [0, 0, 1, 0]
    assert Row(token=2).dense(torch.zeros(4)).tolist() == [0, 0, 1, 0]


def test_joining_rows_of_both_kinds_makes_them_dense() -> None:
    joined = Rows.joined([Row(token=2), dense(0.5, 0.25, 0.25)])
    assert joined.probs is not None
    assert joined.probs.tolist() == [[0, 0, 1], [0.5, 0.25, 0.25]]
    assert Rows.joined([Row(token=2), Row(token=0)]).tokens == (2, 0)
    assert len(Rows.joined([])) == 0
