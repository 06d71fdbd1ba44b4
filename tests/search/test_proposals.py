from __future__ import annotations

import itertools
import time

import pytest
from searching import search

from viasd.errors import OptionError
from viasd.search.proposals import DimrSampler, SearchSpace, mask_in


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
    known |= {space.mask_of({*skipped, k} - {s}) for k, s in itertools.product(kept, skipped)}
    import random

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
    best = search(None, 60)
    best.run()
    chance = search(None, 60, space=SearchSpace(16, 6, theta=1000, refine=0.0))
    chance.run()
    assert best.best()[1] < chance.best()[1]  # type: ignore[index]


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
