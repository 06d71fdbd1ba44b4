from __future__ import annotations

import itertools
import random
import time
from statistics import fmean
from typing import Any

import optuna
import pytest
from searching import search

from viasd.errors import OptionError
from viasd.search.proposals import DimrSampler, SearchSpace, front_of, mask_in


def proposed(space: SearchSpace, trials: int, **options: object) -> list[tuple[int, ...]]:
    run = search(None, trials, space=space, **options)  # type: ignore[arg-type]
    run.run()
    ordered = sorted(run.finished(), key=lambda t: t.user_attrs["step"])
    return [m for m in map(mask_in, ordered) if m is not None]


@pytest.mark.parametrize("refine", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("theta", [1, 4, 100])
def test_masks_have_the_right_size_and_never_repeat(refine: float, theta: int) -> None:
    space = SearchSpace(16, 6, keep_prefix=2, theta=theta, refine=refine)
    masks = proposed(space, 40)
    assert len(masks) == len(set(masks)) == 40
    for mask in masks:
        assert mask.count(0) == 6
        assert mask[:2] == (1, 1)
        assert mask[-1] == 1
    assert masks[0] == space.even()


def test_a_small_space_is_tried_whole_and_no_more() -> None:
    space = SearchSpace(7, 2, theta=3)
    masks = proposed(space, 1000)
    assert len(set(masks)) == len(masks) == space.size == 10


def test_used_up_neighbourhoods_of_a_large_space_are_left_without_listing_all_masks() -> None:
    # 40 over 20 masks can't be listed; the best one's 4 neighbours are soon used up.
    space = SearchSpace(42, 20, theta=1000, refine=1.0)
    sampler = DimrSampler(space, 2)
    start = space.even()
    known = {start}
    kept, skipped = [u for u in space.units if start[u]], [u for u in space.units if not start[u]]
    swapped = {space.mask_of({*skipped, k} - {s}) for k, s in itertools.product(kept, skipped)}
    assert set(space.neighbours(start, random.Random(1))) == swapped
    known |= swapped
    before = time.monotonic()
    assert sampler._unseen(start, known, random.Random(0)) not in known
    assert time.monotonic() - before < 5


def test_the_same_seed_proposes_the_same_masks_and_another_one_others() -> None:
    first, again = (proposed(SearchSpace(16, 6, seed=3), 30) for _ in range(2))
    assert first == again
    assert proposed(SearchSpace(16, 6, seed=4), 30) != first


def test_kinds_follow_theta_and_the_exact_share_of_refinements() -> None:
    space = SearchSpace(16, 6, theta=10, refine=0.5)
    kinds = [space.kind(o) for o in range(200)]
    assert kinds[0] == "even"
    assert [o for o, k in enumerate(kinds) if k == "bayes"] == list(range(10, 200, 10))
    assert set(kinds[1:10]) == {"random"}
    assert 80 <= kinds.count("refine") <= 110
    assert "refine" not in [SearchSpace(16, 6, refine=0.0).kind(o) for o in range(200)]


def test_the_search_beats_random_masks_where_layers_differ() -> None:
    def best(**options: Any) -> float:
        found = []
        for seed in range(8):
            run = search(None, 60, space=SearchSpace(16, 6, seed=seed, **options))
            run.run()
            found.append(run.best()[1]["cost"])  # type: ignore[index]
        return fmean(found)

    assert best() < best(theta=1000, refine=0.0) - 0.5


def test_half_layers_become_routes() -> None:
    space = SearchSpace(4, 2, sublayers=True)
    route = space.route(space.mask_of({2, 5}))
    assert route.keep == (True, False, False, True)
    assert route.parts == {1: "mlp", 2: "attention"}
    assert len(proposed(space, 6)) == space.size == 6


@pytest.mark.parametrize("n_skip", [1, 2, 7, 12])
def test_the_even_baseline_of_half_layers_skips_whole_ones(n_skip: int) -> None:
    space = SearchSpace(8, n_skip, sublayers=True)
    mask = space.even()
    assert mask.count(0) == n_skip
    assert len(space.route(mask).parts) == n_skip % 2


@pytest.mark.parametrize("bad", [{"n_skip": 0}, {"n_skip": 15}, {"keep_prefix": 0}, {"theta": 0}, {"refine": 1.5}])
def test_impossible_spaces_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(OptionError, match=r"must be|not possible"):
        SearchSpace(**{"n_layers": 16, "n_skip": 6, **bad})  # type: ignore[arg-type]


def test_proposals_stay_cheap_with_many_units_and_trials(tmp_path: object) -> None:
    run = search(f"journal://{tmp_path}/s.log", 300, space=SearchSpace(47, 41, sublayers=True))
    assert len(run.sampler.space.units) == 90
    run.run()
    assert len(run.finished()) == 300
    assert run.proposal_seconds < 20  # no tight limit: a mask of such a model takes about a second to score


def test_a_range_tries_masks_of_all_its_sizes_and_never_another() -> None:
    space = SearchSpace(16, 2, most=7, theta=4)
    masks = proposed(space, 120)
    assert len(set(masks)) == 120
    assert {m.count(0) for m in masks} == set(range(2, 8))
    assert masks[0] == space.even() == space.even(5)
    assert proposed(SearchSpace(16, 2, most=7, theta=4), 120) == masks


def test_a_small_range_is_tried_whole() -> None:
    space = SearchSpace(6, 1, most=3, theta=3)
    assert space.size == 4 + 6 + 4
    assert len(set(proposed(space, 1000))) == 14


def test_neighbours_in_a_range_are_all_masks_one_step_away() -> None:
    space = SearchSpace(9, 2, most=4)
    mask = space.mask_of({2, 3, 6})
    found = list(space.neighbours(mask, random.Random(0)))
    assert len(found) == len(set(found)) == 3 * 4 + 3 + 4
    assert {m.count(0) for m in found} == {2, 3, 4}
    assert all(sum(a != b for a, b in zip(m, mask, strict=True)) <= 2 for m in found)
    # At the ends of the range nothing leaves it.
    assert {m.count(0) for m in space.neighbours(space.even(4), random.Random(0))} == {3, 4}


def test_refinements_prefer_to_move_a_gap() -> None:
    space = SearchSpace(30, 12)
    start = space.mask_of({*range(4, 10), *range(15, 21)})
    first = [next(space.neighbours(start, random.Random(seed))) for seed in range(200)]
    gaps = [sum(a > b for a, b in itertools.pairwise(m)) for m in first]
    assert 70 < sum(g <= 2 for g in gaps) < 150  # far fewer than half of the 216 swaps are such


def finished(number: int, *values: float) -> optuna.trial.FrozenTrial:
    trial = optuna.trial.create_trial(values=list(values))
    trial.number = number
    return trial


def test_the_front_is_what_nothing_else_is_as_good_as() -> None:
    values = [(3.0, 1.0), (1.0, 3.0), (2.0, 2.0), (3.0, 3.0), (2.0, 2.0), (1.0, 4.0)]
    assert [t.number for t in front_of([finished(i, *v) for i, v in enumerate(values)])] == [1, 2, 0]
    assert [t.number for t in front_of([finished(i, v) for i, v in enumerate([2.0, 1.0, 1.0])])] == [1]


@pytest.mark.parametrize("most", [1, 15])
def test_a_range_outside_the_layers_is_refused(most: int) -> None:
    with pytest.raises(OptionError, match="range of sizes is empty" if most == 1 else "skips 15 of 16 layers"):
        SearchSpace(16, 2, most=most)


@pytest.mark.parametrize(("n_layers", "n_skip"), [(30, 14), (30, 1), (9, 7), (6, 3)])
def test_masks_with_few_gaps_have_their_size_and_come_in_all_shapes(n_layers: int, n_skip: int) -> None:
    space = SearchSpace(n_layers, n_skip)
    rng = random.Random(0)
    masks = [space._gapped(n_skip, rng) for _ in range(300)]
    assert {m.count(0) for m in masks} == {n_skip}
    assert all(m[0] == m[-1] == 1 for m in masks)
    gaps = {sum(a > b for a, b in itertools.pairwise(m)) for m in masks}
    assert min(gaps) == 1
    assert max(gaps) == min(max(1, n_skip // 2), n_layers - 2 - n_skip + 1)
