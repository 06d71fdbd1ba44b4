"""Budgets, edges, cost tables and controllers of Adaptive Verification, with numbers one can check by hand."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from features import feature_pair
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import pair_of

from viasd.errors import OptionError
from viasd.featuremodel import FeatureModel
from viasd.mask import LayerMask
from viasd.runtime.adaptive import costs as costs_module
from viasd.runtime.adaptive.budget import allocate, best_budget, best_first, in_order, pooled, survivals
from viasd.runtime.adaptive.costs import BatchCosts, batch_costs, monotone, sizes
from viasd.runtime.adaptive.edges import REFIT_OBSERVATIONS, REFIT_STEPS, Edge, Outcome
from viasd.runtime.adaptive.history import History
from viasd.runtime.adaptive.reliability import Adaptive, Reliability
from viasd.runtime.adaptive.three_tiers import CascadeVerification
from viasd.runtime.adaptive.two_edges import above, best_budgets, pending
from viasd.runtime.adaptive.verification import AdaptiveConfig, AdaptiveVerification, Offer
from viasd.shortlist import ShortReadout

chances = st.lists(st.sampled_from([0.0, 0.3, 0.5, 0.5, 0.9, 1.0]), max_size=4)


# --- budget -----------------------------------------------------------------------------------------------------------


def test_survivals_are_running_products_and_distrust_what_is_no_chance() -> None:
    assert survivals([0.5, 0.8, 1.5, math.nan, 0.9]) == pytest.approx([0.5, 0.4, 0.4, 0.0, 0.0])
    assert survivals([]) == []


@settings(deadline=None)
@given(st.lists(chances, min_size=1, max_size=4), st.integers(0, 16))
def test_the_best_of_all_tokens_are_always_prefixes(drafts: list[list[float]], budget: int) -> None:
    curves = [survivals(draft) for draft in drafts]
    lengths = allocate(curves, budget)
    keyed = sorted((-s, j, r) for r, curve in enumerate(curves) for j, s in enumerate(curve))[:budget]
    assert {(r, j) for r, n in enumerate(lengths) for j in range(n)} == {(r, j) for _, j, r in keyed}


def test_ties_go_to_the_earlier_position_then_to_the_earlier_sequence() -> None:
    assert allocate([[0.5, 0.5, 0.5], [0.5, 0.5]], 3) == [2, 1]
    assert allocate([[1.0, 1.0], [1.0, 1.0]], 1) == [1, 0]


def test_a_token_behind_is_not_looked_at_before_the_one_in_front_was_admitted() -> None:
    class Watched(list[float]):
        def __getitem__(self, index: Any) -> Any:
            looked.append(index)
            return super().__getitem__(index)

    looked: list[int] = []
    walk = best_first([Watched([0.9, 0.8, 0.7])])
    assert next(walk) == (0, 0.9)
    assert looked == [0]
    next(walk)
    assert looked == [0, 1]


def test_the_best_budget_is_the_best_of_all() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        gains = sorted(rng.random(8).tolist(), reverse=True)
        seconds = np.cumsum(rng.random(9) + 0.05)
        rates = [(2 + sum(gains[:b])) / seconds[b] for b in range(9)]
        assert best_budget(gains, 2, lambda b, s=seconds: s[int(b)]) == int(np.argmax(rates))


def test_nothing_is_admitted_where_verifying_is_steep_and_all_where_it_is_flat() -> None:
    gains = [0.9, 0.7, 0.2, 0.01]
    assert best_budget(gains, 1, lambda b: 1 + b) == 0
    assert best_budget(gains, 1, lambda _b: 1.0) == 4
    assert best_budget([], 1, lambda _b: 1.0) == 0


def test_ties_go_to_the_smaller_budget() -> None:
    assert best_budget([1.0, 1.0, 1.0], 1, lambda b: 1 + b) == 0
    assert best_budget([0.1] * 3, 0.3, lambda b: 3 + b) == 0  # equal but for rounding
    assert best_budget([0.5, 0.5, 0.0], 1, lambda b: 1.0) == 2
    assert best_budget([0.5], 1, lambda b: 1 + 0.4 * b, margin=1.1) == 0


def test_in_order_stops_at_the_first_token_that_does_not_pay() -> None:
    # Alone the second token does not pay, with the third it would: it is not looked at.
    seconds = {0: 1.0, 1: 1.1, 2: 2.0, 3: 2.01}
    drafts = [[0.9, 0.8, 0.79]]
    assert in_order(drafts, 1, lambda b: seconds[int(b)]) == [1]
    assert in_order(drafts, 1, lambda _b: 1.0) == [3]
    assert in_order(drafts, 1, lambda b: 1 + b) == [0]
    assert in_order([[0.9, 0.1], [0.8, 0.7]], 2, lambda b: 1 + 0.2 * b) == [1, 2]


def test_a_typical_step_is_the_mean_of_earlier_curves() -> None:
    assert pooled([[[0.9, 0.5]], [[0.8]]]) == pytest.approx([0.9, 0.8, 0.5])
    # Two drafts of one sequence count half each: the best token of both steps, then the second best.
    assert pooled([[[0.9, 0.5], [0.7, 0.1]]]) == pytest.approx([0.8, 0.3])
    assert sum(pooled([[[0.9], [0.7, 0.1]], [[0.6]], [[]]])) == pytest.approx((0.9 + 0.8) / 2 + 0.6)
    assert pooled([]) == []


# --- edges ------------------------------------------------------------------------------------------------------------


def observed(outcome: Outcome) -> list[tuple[float, int, float]]:
    """(feature, position, label) of everything an edge takes from an outcome."""
    found: list[tuple[float, int, float]] = []
    edge = Edge("drafter->full", 4)

    class Recorder:
        slopes, intercepts, pending = edge.estimator.slopes, edge.estimator.intercepts, 0
        predict = edge.estimator.predict

        def observe(self, f: Any, k: Any, y: Any) -> None:
            found.extend(zip(f[:, 0].tolist(), k.tolist(), y.tolist(), strict=True))

    edge._estimator = Recorder()  # type: ignore[assignment]
    edge.observe([outcome])
    assert isinstance(edge.estimator, Recorder)  # is told now
    return found


FEATURES = [3.0, 2.0, 1.0, 0.5, -1.0]


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        # All kept; the first refused one too; nothing behind it; nothing that was trimmed.
        (Outcome(FEATURES, 3, 3), [(3.0, 0, 1.0), (2.0, 1, 1.0), (1.0, 2, 1.0)]),
        (Outcome(FEATURES, 4, 2), [(3.0, 0, 1.0), (2.0, 1, 1.0), (1.0, 2, 0.0)]),
        (Outcome(FEATURES, 2, 0), [(3.0, 0, 0.0)]),
        (Outcome(FEATURES, 0, 0), []),
        # Places beyond the longest block count as its last.
        (Outcome(FEATURES, 5, 5), [(3.0, 0, 1.0), (2.0, 1, 1.0), (1.0, 2, 1.0), (0.5, 3, 1.0), (-1.0, 3, 1.0)]),
        # Soft labels of the judged tokens alone.
        (Outcome(FEATURES, 3, 1, overlaps=[0.9, 0.4, 0.8]), [(3.0, 0, 0.9), (2.0, 1, 0.4)]),
        (Outcome(FEATURES, 3, 3, lossy=True), []),
        (Outcome(FEATURES, 3, 3, processed=True), []),
    ],
)
def test_what_is_observed_of_a_block(outcome: Outcome, expected: list[tuple[float, int, float]]) -> None:
    assert observed(outcome) == expected


def test_nothing_observed_nothing_changed() -> None:
    edge = Edge("drafter->slim", 3)
    before = edge.state()
    edge.observe([Outcome([1.0], 0, 0)])
    edge.observe([Outcome([1.0, 2.0], 2, 1, lossy=True)])
    for _ in range(2 * REFIT_STEPS):
        edge.step()
    assert edge.state() == before


def test_refits_after_so_many_steps_or_observations() -> None:
    slow, fast = Edge("drafter->full", 2), Edge("drafter->full", 2)
    slow.observe([Outcome([2.0, 1.0], 2, 0)])
    for _ in range(REFIT_STEPS - 1):
        slow.step()
    assert slow.estimator.pending == 1
    slow.step()
    assert slow.estimator.pending == 0
    refits = []
    for _ in range(3 * REFIT_OBSERVATIONS // 2):
        fast.observe([Outcome([2.0, 1.0], 2, 2)])
        fast.step()
        if not fast.estimator.pending:
            refits.append(fast.estimator.observations)
    assert refits == [50, 100, 200, 400, 600]  # the first ones sooner
    assert fast.chances([2.0])[0] > 0.7


def test_one_confidently_wrong_draft_does_not_end_admission() -> None:
    edge = Edge("drafter->full", 2)
    edge.observe([Outcome([20.0, 20.0], 2, 0)])
    for _ in range(REFIT_STEPS):
        edge.step()
    assert edge.chances([3.0])[0] > 0.3


def test_steps_are_counted_anew_after_a_refit() -> None:
    edge = Edge("drafter->full", 2)
    for turn in range(2):
        edge.observe([Outcome([2.0, 1.0], 2, 0)])
        for _ in range(REFIT_STEPS - 1):
            edge.step()
        assert edge.estimator.pending == 1, turn
        edge.step()
        assert edge.estimator.pending == 0


def test_a_single_place_is_the_same_as_in_a_block() -> None:
    edge = Edge("drafter->full", 3)
    edge.estimator.intercepts[:] = [0.1, 0.2, 0.3]
    features = [*FEATURES, -40.0, 40.0]
    assert [edge.chance(f, k) for k, f in enumerate(features)] == pytest.approx(edge.chances(features), rel=1e-12)
    assert math.isnan(edge.chance(math.nan, 0))


def test_an_edge_is_saved_and_loaded() -> None:
    edge = Edge("slim->full", 3)
    for i in range(60):
        edge.observe([Outcome([1.0, 0.0, 2.0], 3, i % 4)])
        edge.step()
    coefficients = edge.coefficients
    again = Edge.from_state(json.loads(json.dumps(edge.state())))
    assert again.name == "slim->full"
    assert again.coefficients != coefficients == edge.coefficients  # what is pending goes into what is saved
    edge.estimator.refit()
    assert again.chances([1.0, 0.5, 0.2]) == edge.chances([1.0, 0.5, 0.2])
    assert again.chances([1.0])[0] != Edge("slim->full", 3).chances([1.0])[0]
    assert edge.chances([]) == []
    for broken in ({}, {"edge": "slim->full"}, {"edge": "up", "estimator": edge.state()["estimator"]}, None):
        with pytest.raises(OptionError):
            Edge.from_state(broken)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="one slope"):
        Edge.from_state({"edge": "slim->full", "estimator": guard_state()})


def test_places_that_nobody_saw_are_believed_to_be_like_the_one_before() -> None:
    edge = Edge("drafter->full", 4)
    for _ in range(400):
        edge.observe([Outcome([0.0, 0.0], 2, 2)])  # all kept, and never a third token
        edge.step()
    one, two, three, four = edge.chances([0.0] * 4)
    assert min(one, two) > 0.7
    assert two == three == four
    for _ in range(400):
        edge.observe([Outcome([0.0, 0.0, 0.0], 3, 2)])
        edge.step()
    assert edge.chance(0.0, 2) < 0.3 < 0.7 < edge.chance(0.0, 1)
    stored = edge.state()
    assert Edge.from_state(stored).state() == stored
    older = {key: value for key, value in stored.items() if key != "observed"}
    assert Edge.from_state(older).coefficients == Edge.from_state(stored).coefficients
    for wrong in ([1.0], [-1.0] * 4, "no", [None] * 4):
        with pytest.raises(OptionError):
            Edge.from_state({**stored, "observed": wrong})


def guard_state() -> Any:
    from viasd.runtime.guard import new_estimator

    return new_estimator().state()


def test_reliability_adds_up() -> None:
    one, two = Reliability(), Reliability()
    one.add(0.95, True)
    one.add(1.0, False)
    two.add(0.05, False)
    one.merge(two)
    assert one.judged == [1, *[0] * 8, 2]
    assert one.kept == [0] * 9 + [1]
    assert one.error == pytest.approx((0.95 + 0.05) / 3)
    assert one.as_json()["ece"] == one.error
    assert Reliability().error == 0


def test_predictions_are_counted_beside_what_became_of_them() -> None:
    edge, counts = Edge("drafter->full", 4), Reliability()
    edge.score([(Outcome([math.nan, 6.0, -8.0, 1.0], 4, 2), counts)])
    assert sum(counts.judged) == 2  # the row of NaN predicts nothing, the token behind the refused one was not judged
    assert counts.kept[9] == 1
    assert counts.kept[0] == 0
    assert sum(counts.predicted) == pytest.approx(sum(edge.chances([0.0, 6.0, -8.0])[1:]))


def test_counts_of_several_generations_add_up() -> None:
    one, two = Adaptive(8, 5, 1), Adaptive(2, 2)
    one.of("drafter->full").add(0.5, True)
    two.of("drafter->full").add(0.5, False)
    two.of("slim->full").add(0.9, True)
    two.coefficients["drafter->full"] = [0.4, 0.1]
    one.merge(two)
    said = json.loads(json.dumps(one.as_json()))
    assert (said["offered"], said["admitted"], said["withheld"]) == (10, 7, 1)
    assert said["admitted_share"] == 0.7
    assert said["reliability"]["drafter->full"]["judged"][5] == 2
    assert said["reliability"]["slim->full"]["kept"][9] == 1
    assert said["coefficients"] == {"drafter->full": [0.4, 0.1]}
    assert Adaptive().as_json()["admitted_share"] == 0


# --- two edges --------------------------------------------------------------------------------------------------------


def test_pending_places_behind_a_draft() -> None:
    places = pending([0.8, 0.4], [0.9, 0.5, 0.5])
    assert np.array(places) == pytest.approx(np.array([(0.9, 1.0), (0.45, 0.8), (0.225, 0.4)]))
    assert pending([], [0.9]) == []


def brute_budgets(drafts: Any, kept: Any, base: float, seconds: Any) -> float:
    """The best rate of all budgets and all sets of places that are prefixes."""
    best = base / seconds(0, base)
    order = [r for r, _ in best_first(drafts)]
    for b in range(1, len(order) + 1):
        lengths = [order[:b].count(r) for r in range(len(drafts))]
        fed = sum(n + 1 for n in lengths if n)
        places = [pending(d[:n], k) for n, d, k in zip(lengths, drafts, kept, strict=True)]
        for cut in itertools.product(*(range(len(p) + 1) for p in places)):
            taken = [place for n, p in zip(cut, places, strict=True) for place in p[:n]]
            expected = base + sum(s * e for s, e in taken)
            best = max(best, expected / seconds(fed, base + sum(e for _, e in taken)))
    return best


def test_budgets_of_three_tiers_are_the_best_ones() -> None:
    rng = np.random.default_rng(3)
    for _ in range(30):
        drafts = [survivals(rng.uniform(0.2, 1.0, 3).tolist()) for _ in range(2)]
        kept = [rng.uniform(0.3, 1.0, 4).tolist() for _ in range(2)]
        slope = rng.uniform(0.05, 0.6)

        def seconds(slim: float, full: float, slope: float = slope) -> float:
            return 0.1 + 0.3 * slope * slim + 1 + slope * full

        found = best_budgets(drafts, kept, 2, seconds)
        lengths = allocate(drafts, found.slim)
        places = [pending(d[:n], k) for n, d, k in zip(lengths, drafts, kept, strict=True)]
        taken = [place for p in places for place in p[: above(found.floor, [s for s, _ in p])]]
        fed = sum(n + 1 for n in lengths if n)
        rate = (2 + sum(s * e for s, e in taken)) / seconds(fed, 2 + sum(e for _, e in taken))
        assert rate == pytest.approx(brute_budgets(drafts, kept, 2, seconds), rel=1e-9)


def test_no_budget_where_nothing_pays() -> None:
    found = best_budgets([[0.9]], [[0.9, 0.9]], 1, lambda slim, full: slim + full)
    assert found.slim == 0
    assert found.floor == math.inf


def test_floors() -> None:
    assert above(0.5, [0.9, 0.5, 0.4, 0.6]) == 2
    assert above(0.0, [0.1, 0.0]) == 2
    assert above(math.inf, [1.0]) == 0
    assert above(0.5, []) == 0


# --- controllers ------------------------------------------------------------------------------------------------------


def table(seconds: Any, sequences: int = 2, gamma: int = 4, drafter: float = 0.0) -> BatchCosts:
    full = {n: float(seconds(n)) for n in range(1, sequences * (gamma + 1) + 1)}
    return BatchCosts(sequences, 8, full, {n: 0.3 * s for n, s in full.items()}, {1: drafter} if drafter else {})


FLAT, STEEP = table(lambda n: 1.0), table(lambda n: n)
CONFIDENT, DOUBTFUL = [6.0, 5.0, 5.0, 5.0], [0.5, -2.0, -3.0, -4.0]


def controller(costs: BatchCosts | None, **config: Any) -> AdaptiveVerification:
    made = AdaptiveVerification(Edge("drafter->full", 4), 4, lambda _n: costs, AdaptiveConfig(**config))
    made.begin([0, 1])
    first = made.admit([Offer(0, CONFIDENT), Offer(1, DOUBTFUL)])
    assert first == [4, 4]  # optimistic: nothing is known of them yet
    made.begin([0, 1])
    return made


@pytest.mark.parametrize("policy", ["auto", "stale", "in-order"])
@pytest.mark.parametrize("greedy", [True, False])
def test_without_a_table_nothing_is_trimmed(policy: str, greedy: bool) -> None:
    made = controller(None, policy=policy)
    assert made.admit([Offer(0, CONFIDENT, greedy), Offer(1, DOUBTFUL, greedy)]) == [4, 4]


@pytest.mark.parametrize("policy", ["auto", "stale", "in-order"])
@pytest.mark.parametrize("greedy", [True, False])
def test_all_where_verifying_is_flat_and_none_where_it_is_steep(policy: str, greedy: bool) -> None:
    offers = [Offer(0, CONFIDENT, greedy), Offer(1, DOUBTFUL, greedy)]
    assert controller(FLAT, policy=policy).admit(offers) == [4, 4]
    assert controller(STEEP, policy=policy).admit(offers) == [0, 0]
    between = controller(table(lambda n: 1 + 0.1 * n), policy=policy).admit(offers)
    assert between[0] == 4
    assert between[1] < 4


def test_drafting_that_is_paid_already_makes_verifying_look_cheaper() -> None:
    offers = [Offer(0, CONFIDENT, greedy=True), Offer(1, DOUBTFUL, greedy=True)]
    free = controller(table(lambda n: 0.4 + 0.4 * n), policy="in-order").admit(offers)
    paid = controller(table(lambda n: 0.4 + 0.4 * n, drafter=2.0), policy="in-order").admit(offers)
    assert sum(paid) > sum(free)


def test_a_stale_budget_is_that_of_earlier_steps_spent_by_the_current_ones() -> None:
    made = controller(table(lambda n: 1 + 0.1 * n), policy="stale")
    known = sum(made.admit([Offer(0, CONFIDENT), Offer(1, DOUBTFUL)]))
    made.begin([0, 1])
    # Both drafts look good now, but the budget does not know yet; it goes to the better one first.
    assert sum(made.admit([Offer(0, CONFIDENT), Offer(1, [f + 1 for f in CONFIDENT])])) == known
    greedy = controller(table(lambda n: 1 + 0.1 * n))
    assert sum(greedy.admit([Offer(0, CONFIDENT, True), Offer(1, CONFIDENT, True)])) == 8


def test_what_a_step_sees_is_used_from_the_next_one_on() -> None:
    made = controller(table(lambda n: 1 + 0.1 * n), policy="stale", window=1)
    one = made.admit([Offer(0, DOUBTFUL), Offer(1, DOUBTFUL)])
    two = made.admit([Offer(0, DOUBTFUL), Offer(1, DOUBTFUL)])  # the same step: asked twice, answered alike
    assert one == two
    made.begin([0, 1])
    assert sum(made.admit([Offer(0, DOUBTFUL), Offer(1, DOUBTFUL)])) < sum(one)


def test_a_new_sequence_is_held_against_what_is_typical_of_the_others() -> None:
    made = controller(STEEP)
    made.leave(1)
    made.begin([0, 1])
    assert made.admit([Offer(0, DOUBTFUL), Offer(1, DOUBTFUL)]) == [0, 0]
    # A stale budget counts a new sequence as one more like the others: it has its share.
    made = controller(table(lambda n: 1 + 0.1 * n), policy="stale")
    alone = made.admit([Offer(0, CONFIDENT), Offer(1, DOUBTFUL)])
    made.begin([0, 1, 2])
    assert sum(made.admit([Offer(0, CONFIDENT), Offer(1, DOUBTFUL), Offer(2, CONFIDENT)])) > sum(alone)


def test_what_is_typical_is_the_mean_of_the_last_drafts_also_of_those_gone() -> None:
    history = History(1)
    assert history.expected(0) == [[]]
    history.note(0, [0.8, 0.6])
    history.note(1, [0.4])
    assert history.typical == []  # not before the step is over
    history.publish()
    history.forget(0)
    assert history.expected(0) == [pytest.approx([0.6, 0.6])]
    assert history.expected(1) == [[0.4]]


def test_after_long_with_nothing_admitted_one_whole_draft_is() -> None:
    made = controller(STEEP, restart=3, policy="in-order")
    turns = []
    for _ in range(12):
        turns.append(made.admit([Offer(0, DOUBTFUL), Offer(1, DOUBTFUL)]))
        made.begin([0, 1])
    # (The pass is paid for then, and a token of the other draft may come along.)
    assert [max(t) == 4 for t in turns] == [False, False, False, True] * 3
    assert all(sum(t) == 0 for t in turns if max(t) < 4)
    assert turns[3].index(4) != turns[7].index(4)  # not always the same one's
    assert made._restart.count == 3


def test_what_is_in_the_pass_anyway_counts() -> None:
    # From the ninth token on the pass is dear. Others in it, of a prompt say, leave less room for drafts.
    costs = BatchCosts(64, 8, {1: 1.0, 8: 1.0, 9: 9.0, 64: 60.0}, {}, {})
    offers = [Offer(0, CONFIDENT, greedy=True), Offer(1, DOUBTFUL, greedy=True)]
    assert sum(controller(costs).admit(offers)) == 6
    assert sum(controller(costs).admit(offers, others=6)) == 2


def test_what_is_verified_whole_counts_in_the_pass() -> None:
    # Four tokens of the draft that a restart chose fill the pass up to where it gets dear.
    costs = BatchCosts(64, 8, {1: 1.0, 6: 1.0, 7: 9.0, 64: 60.0}, {}, {})
    made = controller(costs, restart=1)
    made.begin([0, 1])  # nothing was admitted
    chosen = made.admit([Offer(0, CONFIDENT, True), Offer(1, CONFIDENT, True)])
    assert sorted(chosen) == [0, 4]


def test_one_sequence_that_samples_makes_the_budget_stale() -> None:
    made = controller(table(lambda n: 1 + 0.1 * n))
    for _ in range(5):
        made.admit([Offer(0, DOUBTFUL, True), Offer(1, DOUBTFUL, False)])
        made.begin([0, 1])
    assert sum(made.admit([Offer(0, CONFIDENT, True), Offer(1, CONFIDENT, False)])) < 4


def test_labels_are_soft_in_small_batches() -> None:
    made = controller(FLAT, soft_below=4)
    assert made.soft(4)
    assert not made.soft(5)


def test_policies_are_checked() -> None:
    for wrong in ({"policy": "current"}, {"window": 0}, {"restart": 0}, {"soft_below": -1}):
        with pytest.raises(OptionError):
            AdaptiveConfig(**wrong)  # type: ignore[arg-type]


def cascade(costs: BatchCosts | None, greedy: bool = False) -> CascadeVerification:
    made = CascadeVerification(Edge("drafter->slim", 4), Edge("slim->full", 5), 4, lambda _n: costs)
    made.begin([0, 1])
    assert made.admit_to_slim([Offer(0, CONFIDENT), Offer(1, DOUBTFUL)]) == [4, 4]
    assert made.admit_to_full([Offer(0, [*CONFIDENT, 5.0]), Offer(1, DOUBTFUL[:2])]) == [5, 2]
    made.begin([0, 1], greedy=greedy)
    return made


@pytest.mark.parametrize("greedy", [True, False])
def test_three_tiers_without_a_table_flat_and_steep(greedy: bool) -> None:
    drafts = [Offer(0, CONFIDENT, greedy), Offer(1, DOUBTFUL, greedy)]
    waiting = [Offer(0, [*CONFIDENT, 5.0], greedy), Offer(1, DOUBTFUL[:2], greedy)]
    for costs, slim, full in ((None, [4, 4], [5, 2]), (FLAT, [4, 4], [5, 2])):
        made = cascade(costs, greedy)
        assert made.admit_to_slim(drafts) == slim
        assert made.admit_to_full(waiting) == full
    assert cascade(STEEP, greedy).admit_to_slim(drafts) == [0, 0]
    made = cascade(table(lambda n: 1 + 0.1 * n), greedy)
    assert made.admit_to_slim(drafts)[0] == 4
    sent = made.admit_to_full(waiting)
    assert sent[0] >= 4
    assert sent[1] < 2


def test_a_new_sequence_of_three_tiers_is_sent_as_the_others_are() -> None:
    made = cascade(STEEP)
    made.begin([1, 7])
    assert made.admit_to_slim([Offer(1, DOUBTFUL), Offer(7, DOUBTFUL)]) == [0, 0]
    made = cascade(FLAT)
    made.begin([1, 7])
    assert made.admit_to_slim([Offer(1, DOUBTFUL), Offer(7, DOUBTFUL)])[1] > 2
    assert made.admit_to_full([Offer(7, DOUBTFUL)])[0] > 2
    fresh = CascadeVerification(Edge("drafter->slim", 4), Edge("slim->full", 5), 4, lambda _n: STEEP)
    fresh.begin([0, 1])
    assert fresh.admit_to_slim([Offer(0, DOUBTFUL), Offer(1, DOUBTFUL)]) == [4, 4]  # nothing is known of any


def test_the_plan_of_a_step_does_not_change_while_its_tokens_are_drawn() -> None:
    made, asked = cascade(table(lambda n: 1 + 0.1 * n)), [Offer(0, CONFIDENT), Offer(1, DOUBTFUL)]
    first = made.admit_to_slim(asked)
    # A second block of one sequence in the same round; the floor is the one it was.
    made.admit_to_slim([Offer(1, CONFIDENT)])
    other = cascade(table(lambda n: 1 + 0.1 * n))
    assert other.admit_to_slim(asked) == first
    waiting = [Offer(0, [*CONFIDENT, 0.3]), Offer(1, [1.0, 0.4, 0.0, -0.5, -1.0])]
    assert made.admit_to_full(waiting) == other.admit_to_full(waiting)


def test_drafting_that_is_paid_already_makes_both_verifiers_look_cheaper() -> None:
    drafts = [Offer(0, CONFIDENT, greedy=True), Offer(1, DOUBTFUL, greedy=True)]
    free = cascade(table(lambda n: 0.4 + 0.4 * n), True).admit_to_slim(drafts)
    paid = cascade(table(lambda n: 0.4 + 0.4 * n, drafter=2.0), True).admit_to_slim(drafts)
    assert sum(paid) > sum(free)


def test_edges_of_three_tiers_learn_apart() -> None:
    made = cascade(FLAT)
    for _ in range(REFIT_OBSERVATIONS):
        made.slim.observe([Outcome(CONFIDENT, 4, 0)])
        made.full.observe([Outcome(CONFIDENT, 4, 4)])
        made.begin([0, 1])
    assert made.slim.chances([2.0])[0] < 0.5 < made.full.chances([2.0])[0]


# --- costs ------------------------------------------------------------------------------------------------------------


def test_tables_never_fall_and_grow_beyond_their_end() -> None:
    assert list(monotone({4: 1.0, 1: 2.0, 8: 3.0}).items()) == [(1, 1.0), (4, 1.0), (8, 3.0)]
    costs = BatchCosts(2, 8, {2: 1.0, 10: 3.0}, {}, {1: 0.5, 2: 0.6})
    assert costs.full_seconds(6) == 2.0
    assert costs.full_seconds(20) == 6.0
    assert costs.slim_seconds(0) == 0.0
    assert costs.draft_seconds(0) == 0.0
    assert costs.draft_seconds(2) == 0.6


def test_whether_trimming_can_pay() -> None:
    assert not FLAT.can_pay(2, 4)
    assert STEEP.can_pay(2, 4)
    assert not table(lambda n: 1 + 0.001 * n).can_pay(2, 4)


def test_sizes_reach_from_one_token_to_whole_drafts() -> None:
    assert sizes(1, 4) == [1, 2, 4, 5]
    assert sizes(8, 8)[-3:] == [48, 64, 72]
    assert sizes(64, 15)[-1] == 512  # beyond it passes are taken to be bound by arithmetic
    assert all(found == sorted(set(found)) for found in (sizes(n, g) for n in (1, 3, 32) for g in (1, 8)))


@pytest.mark.parametrize("drafter", ["model", "self", "lookup"])
def test_passes_of_a_batch_are_measured_once_and_kept(
    drafter: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_of("llama", drafter)
    monkeypatch.setenv("VIASD_CACHE", str(tmp_path))
    monkeypatch.setattr(costs_module, "_PATIENCE", 0.0)
    pair.measured.clear()
    layers = pair.target.n_layers
    route, own = LayerMask.even(layers, 0.3).route, LayerMask.even(layers, 0.5).route if drafter == "self" else None
    made = batch_costs(pair, route, 3, 20, 2, own)
    assert made.sequences == 4
    assert set(made.full) == set(made.slim) == set(sizes(4, 2))
    assert bool(made.drafter) == (drafter != "lookup")
    assert all(s > 0 for s in made.full.values())
    assert list(made.full.values()) == sorted(made.full.values())
    assert batch_costs(pair, route, 4, 100, 2, own) is made
    pair.measured.clear()
    monkeypatch.setattr(costs_module, "_measure", lambda *_: pytest.fail("measured again"))
    assert batch_costs(pair, route, 4, 100, 2, own) == made
    pair.measured.clear()
    monkeypatch.setattr(costs_module, "_TIMED", costs_module._TIMED + 1)
    monkeypatch.setattr(costs_module, "_measure", lambda *_: FLAT)
    assert batch_costs(pair, route, 4, 100, 2, own) == FLAT  # a table of what was timed before is not believed
    pair.measured.clear()


def test_measuring_leaves_no_gradient_and_no_state_behind() -> None:
    pair = pair_of("gemma2", "same")
    table = costs_module._measure(pair, None, None, 2, 16, 1)
    assert table.slim == {}
    assert all(not p.requires_grad or p.grad is None for p in pair.target.model.parameters())
    assert torch.is_grad_enabled()


def test_a_drafter_of_states_is_timed_in_passes_that_carry_one_entry_of_each_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together, read, sizes_run, rows_read = FeatureModel.together, ShortReadout.last, set(), set()

    def ran(self: FeatureModel, parts: Any) -> Any:
        sizes_run.add(tuple(len(part.following) for part in parts))
        return together(self, parts)

    def last(self: ShortReadout, hidden: Any, rows: Any) -> Any:
        rows_read.add(tuple(rows))
        return read(self, hidden, rows)

    monkeypatch.setattr(FeatureModel, "together", ran)
    monkeypatch.setattr(ShortReadout, "last", last)
    made = costs_module._measure(feature_pair(), None, None, 8, 16, 2)
    assert sizes_run == rows_read == {(1,) * n for n in (1, 2, 4, 8)}
    assert set(made.drafter) == {1, 2, 4, 8}
    assert 0 < made.draft_seconds(1) <= made.draft_seconds(8)


def test_layers_of_the_target_are_measured_on_the_target_where_the_pair_has_a_drafter_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair, passes = pair_of("llama", "model"), costs_module.through
    run: list[Any] = []

    def seen(model: Any, route: Any, lines: Any) -> Any:
        run.append((model, route))
        return passes(model, route, lines)

    monkeypatch.setattr(costs_module, "through", seen)
    own = LayerMask.even(pair.target.n_layers, 0.5).route
    made = costs_module._measure(pair, None, own, 2, 16, 1)
    assert set(made.drafter) == {1, 2}
    assert {id(model) for model, _ in run} == {id(pair.target)}
    assert own in [route for _, route in run]
