from __future__ import annotations

import pytest
import torch

from viasd.draws import SeededDraws
from viasd.rows import Row
from viasd.testing import EnumeratingDraws


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Upper tail probability of Pearson's statistic (exact through the incomplete gamma function)."""
    expected = probabilities / probabilities.sum() * counts.sum()
    kept = expected > 0
    statistic = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    freedom = int(kept.sum()) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), statistic.double() / 2))


@pytest.mark.parametrize("kind", ["token", "draft"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_hundred_thousand_draws_follow_the_row(kind: str, dtype: torch.dtype) -> None:
    probabilities = torch.tensor([0.0, 0.02, 0.3, 0.0, 0.08, 0.55, 0.05, 0.0], dtype=dtype)
    draws = SeededDraws(7)
    draw = getattr(draws, kind)
    row = Row(probs=probabilities)
    counts = torch.bincount(torch.tensor([draw(row) for _ in range(100_000)]), minlength=8)
    assert counts[[0, 3, 7]].tolist() == [0, 0, 0]
    assert chi_square(counts, probabilities) > 1e-4


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
def test_extreme_numbers_never_give_a_token_without_mass(u: float, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = SeededDraws(0)
    monkeypatch.setattr(draws._token, "random", lambda: u)
    row = Row(probs=torch.tensor([0.0, 0.0, 0.5, 0.0, 0.5, 0.0, 0.0]))
    assert draws.token(row) in (2, 4)
    # A row whose rounded sum is below 1.
    assert draws.token(Row(probs=torch.tensor([0.0, 0.3333, 0.3333, 0.3333, 0.0]))) in (1, 2, 3)


def test_accepting_happens_with_the_stated_probability() -> None:
    draws = SeededDraws(3)
    n = sum(draws.accept(0.3) for _ in range(20_000))
    assert abs(n / 20_000 - 0.3) < 0.015
    assert all(draws.accept(1.0) for _ in range(1000))
    assert not any(draws.accept(0.0) for _ in range(1000))


@pytest.mark.parametrize("disturb", ["token", "draft", "accept", "audit"])
def test_streams_do_not_shift_each_other(disturb: str) -> None:
    row = Row(probs=torch.full((50,), 0.02))

    def numbers(disturbed: bool) -> dict[str, list[object]]:
        draws = SeededDraws(11)
        out: dict[str, list[object]] = {"token": [], "draft": [], "accept": [], "audit": []}
        for i in range(40):
            for name, values in out.items():
                argument = row if name in ("token", "draft") else 0.5
                values.append(getattr(draws, name)(argument))
                if disturbed and name == disturb and i % 3 == 0:
                    getattr(draws, name)(argument)
        return out

    calm, disturbed = numbers(False), numbers(True)
    assert calm[disturb] != disturbed[disturb]
    for name in calm.keys() - {disturb}:
        assert calm[name] == disturbed[name]


def test_a_point_mass_and_a_certain_test_use_up_a_number_as_well() -> None:
    row = Row(probs=torch.full((50,), 0.02))
    a, b = SeededDraws(5), SeededDraws(5)
    a.token(Row(token=3))
    b.token(row)
    a.accept(1.0)
    b.accept(0.5)
    assert [a.token(row) for _ in range(10)] == [b.token(row) for _ in range(10)]
    assert [a.accept(0.5) for _ in range(10)] == [b.accept(0.5) for _ in range(10)]


def test_streams_of_one_seed_differ_and_seeds_differ() -> None:
    # Each stream's numbers as "below one half or not".
    row = Row(probs=torch.tensor([0.5, 0.5]))

    def coins(seed: int) -> set[tuple[bool, ...]]:
        draws = SeededDraws(seed)
        return {
            tuple(draws.token(row) == 0 for _ in range(64)),
            tuple(draws.draft(row) == 0 for _ in range(64)),
            tuple(draws.accept(0.5) for _ in range(64)),
            tuple(draws.audit(0.5) for _ in range(64)),
        }

    assert len(coins(1) | coins(2)) == 8


def test_enumeration_visits_every_path_once_with_its_probability() -> None:
    row = Row(probs=torch.tensor([0.5, 0.0, 0.3, 0.2], dtype=torch.float64))
    law: dict[tuple[int, bool, int], float] = {}
    for draws in EnumeratingDraws().paths():
        first = draws.token(row)
        accepted = draws.accept(0.25) if first else draws.accept(1.0)
        key = (first, accepted, draws.draft(row))
        assert key not in law
        law[key] = draws.weight
    assert sum(law.values()) == pytest.approx(1, abs=1e-15)
    assert law[(2, True, 3)] == pytest.approx(0.3 * 0.25 * 0.2)
    assert len(law) == 3 + 2 * 2 * 3
