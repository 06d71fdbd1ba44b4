"""When drafts stop: limits, what they are made of, trials, and how fast that is where every chance and cost is known."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from simulated import EASY, GAMMA, HARD, Batch, costs, fixed, new_policy, warmed

from viasd.runtime.adaptive import verification
from viasd.runtime.adaptive.budget import survivals
from viasd.runtime.adaptive.costs import BatchCosts, StepCosts
from viasd.runtime.adaptive.edges import Edge
from viasd.runtime.adaptive.recent import RecentDrafts
from viasd.runtime.adaptive.stopping import Limit, best_limit
from viasd.runtime.adaptive.trials import Trials, regret
from viasd.runtime.adaptive.verification import AdaptiveConfig, AdaptiveVerification, Offer


def step_costs(sequences: int, draft: float, base: float, slope: float, places: int = 4) -> StepCosts:
    return StepCosts(draft * np.arange(sequences + 1), base + slope * np.arange(sequences * places + 1))


# --- limits -----------------------------------------------------------------------------------------------------------


def test_a_limit_asks_for_rows_and_lets_draw() -> None:
    limit = Limit(2, 0.5)
    assert limit.asks(1.0, 0.1, 0)  # the first row is the only way to learn anything
    assert limit.asks(0.8, 0.7, 1)
    assert not limit.asks(0.8, 0.6, 1)
    assert not limit.asks(1.0, 1.0, 2)
    assert limit.draws(0.5)
    assert not limit.draws(0.49)
    assert not limit.draws(math.nan)
    assert not Limit(0).asks(1.0, 1.0, 0)


def drafted(draft: list[float], usual: list[float], limit: Limit) -> tuple[int, int]:
    """(rows asked for, tokens drawn) of one draft, straight from the rule."""
    reached = 1.0
    for place, survival in enumerate(draft):
        if not limit.asks(reached, usual[place], place):
            return place, place
        if not limit.draws(survival):
            return place + 1, place
        reached = survival
    return len(draft), len(draft)


def rate(chances: np.ndarray, usual: list[float], limit: Limit, made: StepCosts) -> float:
    n, drafts = made.sequences, [survivals(row) for row in chances.tolist()]
    found = [drafted(draft, usual, limit) for draft in drafts]
    rows = [sum(r > place for r, _ in found) * n / len(drafts) for place in range(chances.shape[1])]
    expected = n + n / len(drafts) * sum(sum(d[:m]) for d, (_, m) in zip(drafts, found, strict=True))
    seconds = sum(float(made.drafting(r)) for r in rows)
    return expected / (seconds + float(made.verifying(n / len(drafts) * sum(m for _, m in found))))


def test_the_limit_is_the_best_of_all() -> None:
    rng = np.random.default_rng(5)
    lengths = set()
    for _ in range(60):
        chances = rng.uniform(0.2, 1.0, [3, 4])
        usual = rng.uniform(0.4, 0.9, 4)
        made = step_costs(3, rng.uniform(0.01, 0.3), 1.0, rng.uniform(0.01, 0.4))
        found = best_limit(chances, usual, made)
        floors = [0.0, *{s for row in chances.tolist() for s in survivals(row)}]
        every = [Limit(places, floor) for places in range(1, 5) for floor in floors]
        assert found.rate == pytest.approx(max(rate(chances, usual.tolist(), limit, made) for limit in every))
        assert found.rate == pytest.approx(rate(chances, usual.tolist(), found.limit, made))
        assert found.plain == pytest.approx(3.0)
        assert found.pays(1.0) == (found.rate > 3.0)
        lengths.add(found.limit.places if found.pays(1.0) else 0)
    assert {0, 1} < lengths


def test_what_a_limit_promises_counts_rows_and_tokens_of_all_sequences() -> None:
    # Both drafts draw the first token, one the second too; the other's second row was asked for in vain.
    chances = np.array([[0.9, 0.9], [0.9, 0.1]])
    found = best_limit(chances, np.array([0.9, 0.9]), step_costs(4, 0.01, 1.0, 0.05, 2))
    assert found.limit.places == 2
    assert 0.09 < found.limit.floor <= 0.81
    # Two rows are asked for of each, six tokens are drawn and verified beside the four that come anyway.
    assert found.rate == pytest.approx((4 + 4 * 0.9 + 2 * 0.81) / (0.08 + 1.3))


def test_no_row_is_counted_behind_one_that_is_not_asked_for() -> None:
    # Only the first draft's second row is asked for: 1.0 x 0.3 reaches 0.28, 0.9 x 0.3 does not.
    chances = np.array([[1.0, 1.0, 1.0], [0.9, 0.95, 0.95], [0.28, 0.0, 0.0]])
    found = best_limit(chances, np.array([0.9, 0.3, 0.95]), step_costs(3, 0.3, 1.0, 0.1, 3))
    assert found.limit == Limit(3, pytest.approx(0.28))
    assert found.rate == pytest.approx((3 + 4.18) / (1 + 5 * 0.3 + 5 * 0.1))


def test_of_equal_limits_the_shortest_with_the_highest_floor_is_taken() -> None:
    found = best_limit(np.array([[0.8, 0.0, 0.0]]), np.full(3, 0.5), step_costs(1, 0.0, 1.0, 0.0, 3))
    assert found.limit == Limit(1, pytest.approx(0.8))


def test_a_row_like_the_one_that_a_floor_is_of_reaches_it() -> None:
    edge = Edge("drafter->full", 3)
    edge.estimator.slopes[:] = 0.37
    edge.estimator.intercepts[:] = [-0.2, 0.11, 0.3]
    rng = np.random.default_rng(2)
    for features in (*rng.normal(1.0, 2.0, [200, 3]), [40.0, 40.0, 40.0]):
        recent = RecentDrafts()
        recent.note(list(features), edge)
        # Only whole drafts are worth it, so the limit is made for this one.
        found = best_limit(recent.chances(edge, np.full(3, 0.5)), np.full(3, 1.0), step_costs(1, 0.0, 1.0, 0.0, 3))
        reached = 1.0
        for place, feature in enumerate(features):
            reached *= edge.chance(feature, place)
            assert place >= found.limit.places or found.limit.draws(reached)


def test_chances_of_nothing_and_of_nan_stop_everything() -> None:
    found = best_limit(np.array([[np.nan, 0.9], [0.0, 0.9]]), np.full(2, 0.5), step_costs(2, 0.1, 1.0, 0.1, 2))
    assert not found.pays(1.0)


def test_costs_of_a_step_are_those_of_the_table() -> None:
    table = costs(lambda n: 1 + 0.1 * n, lambda n: 0.2 + 0.01 * n, 4)
    made = table.step(4, 2)
    assert made.sequences == 4
    assert made.drafting(np.array([0.0, 0.5, 1.0, 4.0])) == pytest.approx([0.0, 0.105, 0.21, 0.24])
    assert made.verifying(np.array([0.0, 2.5, 8.0])) == pytest.approx([1.4, 1.65, 2.2])


# --- what they are made of --------------------------------------------------------------------------------------------


def test_chances_are_counted_anew_by_what_is_known_now() -> None:
    edge, recent = Edge("drafter->full", 4), RecentDrafts()
    recent.note([2.0, 1.0], edge)
    recent.note([0.0], edge)
    recent.note([], edge)  # nothing was asked for: nothing is known
    assert len(recent) == 2
    usual = recent.usual(edge, 3)
    one, two, three = edge.chance(2.0, 0), edge.chance(1.0, 1), edge.chance(0.0, 0)
    assert usual[0] == pytest.approx((one + three + 2 * 0.5) / 4)
    # A row counts by how likely the token before it was kept, as far as was known then.
    assert usual[1] == pytest.approx((one * two + 2 * usual[0]) / (one + 2))
    assert usual[2] == pytest.approx(usual[1])
    assert recent.chances(edge, usual) == pytest.approx(np.array([[one, two, usual[2]], [three, usual[1], usual[2]]]))
    edge.estimator.intercepts[:] = 2.0
    assert recent.usual(edge, 1)[0] > usual[0] + 0.1


def test_drafts_fade_with_time_but_some_stay() -> None:
    edge, recent = Edge("drafter->full", 4), RecentDrafts()
    for _ in range(100):
        recent.note([1.0], edge)
    assert len(recent) == 100
    for _ in range(500):
        recent.step()
    assert len(recent) == 8
    for _ in range(300):
        recent.note([2.0], edge)
    assert len(recent) == 128
    assert json.loads(json.dumps(recent.state())) == [[2.0]] * 64


def test_a_row_of_nan_says_nothing() -> None:
    edge, recent = Edge("drafter->full", 4), RecentDrafts()
    recent.note([math.nan], edge)
    assert recent.usual(edge, 2) == pytest.approx([0.5, 0.5])
    assert recent.chances(edge, np.array([0.5])) == pytest.approx(np.array([[0.5]]))


# --- trials -----------------------------------------------------------------------------------------------------------


def trials_of(steps: int, current: Limit, made: StepCosts, rate: float) -> list[tuple[int, int, Limit]]:
    """(step, sequence, limit) of every trial."""
    trials, found = Trials(), []
    for step in range(steps):
        trials.begin([3, 5, 7], current, Limit(2, 0.4), 4, np.full(4, 0.5), made, rate)
        if trials.chosen is not None:
            found.append((step, trials.chosen, trials.limit))
    assert trials.count == len(found)
    return found


def test_trials_take_turns_and_most_are_as_short_as_may_pay() -> None:
    made = step_costs(3, 0.05, 1.0, 0.05)
    found = trials_of(400, Limit(0), made, 3.0)
    assert [sequence for _, sequence, _ in found][:4] == [3, 5, 7, 3]
    assert [limit for _, _, limit in found][:5] == [Limit(2), Limit(2), Limit(2), Limit(4), Limit(2)]
    assert {limit for _, _, limit in trials_of(400, Limit(2, 0.4), made, 3.0)} == {Limit(4)}
    assert trials_of(400, Limit(4), made, 3.0) == []  # nothing is cut


@pytest.mark.parametrize("draft", [0.001, 0.05, 0.5])
def test_trials_cost_at_most_a_hundredth(draft: float) -> None:
    made = step_costs(3, draft, 1.0, 0.3)
    found = trials_of(2000, Limit(0), made, 3.0)
    cost = sum(regret(limit.places, np.full(4, 0.5), made, 3.0) for _, _, limit in found)
    assert 0.008 * 2000 * 1.0 < cost <= 0.01 * 2000 * 1.0 + 1e-9
    assert min(b - a for (a, *_), (b, *_) in pairwise(found)) >= 8


def test_trials_that_cost_nothing_are_eight_steps_apart() -> None:
    found = trials_of(40, Limit(0), step_costs(3, 0.0, 1.0, 0.0), 3.0)
    assert [step for step, *_ in found] == [7, 15, 23, 31, 39]


def test_what_a_trial_costs_is_less_what_it_brings() -> None:
    made = step_costs(2, 0.1, 1.0, 0.1)
    assert regret(2, np.array([0.5, 0.5]), made, 2.0) == pytest.approx(2 * 0.1 + 2 * 0.1 - 0.75 / 2)
    assert regret(2, np.array([0.9, 0.9]), made, 2.0) == 0.0
    # Where drafts of one token, of chance 0.9, are the best: 3.8 tokens in 1.4 seconds.
    best = best_limit(np.array([[0.9, 0.1]]), np.array([0.9, 0.1]), made)
    assert best.limit.places == 1
    assert regret(1, np.array([0.9]), step_costs(1, 0.1, 1.0, 0.1), 1.9 / 1.2) == pytest.approx(0.0, abs=1e-12)
    assert regret(2, np.array([0.9, 0.1]), made, best.rate) > regret(1, np.array([0.9]), made, best.rate)


# --- the policy -------------------------------------------------------------------------------------------------------


def policy_of(table: BatchCosts | None, **config: Any) -> AdaptiveVerification:
    return AdaptiveVerification(Edge("drafter->full", 16), GAMMA, lambda _n: table, AdaptiveConfig(**config))


def test_before_anything_is_known_as_much_is_drafted_as_could_pay() -> None:
    cheap, dear = (costs(lambda n: 1 + 0.02 * n, lambda n, d=d: d, 4) for d in (0.01, 30.0))
    for table, least, most in ((cheap, GAMMA - 2, GAMMA), (dear, 0, 0)):
        made = policy_of(table)
        made.begin([0, 1, 2, 3])
        assert made.stops_drafting
        assert least <= made.limit(0).places <= most
        assert made.limit(0).floor == 0


def test_a_new_sequence_is_drafted_as_the_others_usually_are() -> None:
    made = policy_of(costs(lambda n: 0.2 + 0.2 * n, lambda n: 0.1 * n, 4))
    for _ in range(20):
        made.drafted([-3.0, -3.0])
    made.begin([0, 1, 99])
    assert made.limit(99) == made.limit(0) == Limit(0)


def test_without_a_table_or_with_another_policy_whole_blocks_are_drafted() -> None:
    table = costs(lambda n: 0.2 + 0.2 * n, lambda n: 0.1 * n, 4)
    for made in (policy_of(None), policy_of(table, policy="stale"), policy_of(table, policy="in-order")):
        for _ in range(20):
            made.drafted([-3.0, -3.0])
        made.begin([0, 1])
        assert not made.stops_drafting
        assert made.limit(0) == Limit(GAMMA)


@pytest.mark.parametrize("greedy", [True, False])
def test_whatever_was_drafted_is_verified(greedy: bool) -> None:
    made, doubtful = policy_of(costs(lambda n: 0.2 + 0.2 * n, lambda n: 0.1 * n, 4)), [-3.0] * GAMMA
    for _ in range(20):
        made.drafted(doubtful)
    sent = []
    for _ in range(2000):
        made.begin([0, 1])
        found = next((s for s in (0, 1) if made.limit(s).places), None)
        if found is not None:
            n = made.limit(found).places
            sent.append(n)
            assert made.admit([Offer(found, doubtful[:n], greedy)]) == [n]
    assert max(sent) == GAMMA
    assert min(sent) < GAMMA


def test_while_little_was_observed_drafts_may_promise_less_and_are_drawn() -> None:
    table = costs(lambda n: 1 + 0.1 * n, lambda n: 0.2, 2)
    rate = best_limit(np.full([1, GAMMA], 0.3), np.full(GAMMA, 0.3), table.step(2, GAMMA))
    assert 0.85 < rate.rate / rate.plain < 1
    made = policy_of(table)
    made.edge.estimator.slopes[:] = 1.0
    made.edge.estimator.intercepts[:] = 0.0
    for _ in range(40):
        made.drafted([math.log(0.3 / 0.7)] * GAMMA)
    made.begin([0, 1])
    assert made.limit(0) == Limit(1)
    for _ in range(400):
        made.edge.estimator.observe([[math.log(0.3 / 0.7)]] * 10, [0] * 10, [1.0] * 3 + [0.0] * 7)
        made.begin([0, 1])
    assert made.edge.estimator.observations == 4000
    assert made.limit(-1) == Limit(0)


def test_a_change_is_noticed() -> None:
    batch = Batch(costs(lambda n: 1 + 0.02 * n, lambda n: 0.25 + 0.02 * n, 8), [HARD], 8)
    policy = policy_of(batch.table)
    for kind, steps, pays in ((HARD, 200, False), (EASY, 400, True), (HARD, 200, False)):
        batch.kinds = [kind]
        batch.adaptive(policy, steps)
        assert bool(policy.limit(-1).places) == pays


PROFILES = {
    "steep passes": (lambda n: 0.3 + 0.045 * n, lambda n: 0.05 + 0.006 * n),
    "drafts in turn": (lambda n: 0.3 + 0.045 * n, lambda n: 0.02 * n),
    "passes in steps": (lambda n: 0.5 + 0.35 * math.ceil(n / 16), lambda n: 0.05 + 0.006 * n),
    "flat passes": (lambda n: 1 + 0.0005 * n + 0.004 * max(0, n - 64), lambda n: 0.08 + 0.0005 * n),
    "drafts nearly free": (lambda n: 1 + 0.01 * n, lambda n: 0.01 + 0.0001 * n),
    "nothing pays": (lambda n: 0.2 + 0.2 * n, lambda n: 0.1 * n),
}


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("sequences", [1, 8])
@pytest.mark.parametrize("kinds", [[EASY], [HARD], [EASY, HARD]], ids=["easy", "hard", "mixed"])
def test_no_block_of_fixed_length_is_faster_plain_decoding_included(profile: str, sequences: int, kinds: Any) -> None:
    full, draft = PROFILES[profile]
    table = costs(full, draft, sequences)
    batch = Batch(table, kinds, sequences, greedy=sequences == 1)
    found = warmed(batch, new_policy(table), 1600 // sequences)
    best = max(fixed(batch, gamma) for gamma in range(GAMMA + 1))
    assert found >= 0.97 * best


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("kind", [EASY, HARD], ids=["easy", "hard"])
def test_one_sequence_alone_is_no_slower_than_one_that_chooses_its_lengths_itself(profile: str, kind: Any) -> None:
    table = costs(*PROFILES[profile], 1)
    found = warmed(Batch(table, [kind], 1, seed=3), new_policy(table), 1000)
    assert found >= 0.97 * Batch(table, [kind], 1, seed=3).paced(2000)


def test_hard_and_easy_rows_are_told_apart() -> None:
    batch = Batch(costs(*PROFILES["drafts nearly free"], 8), [EASY, HARD], 8, seed=2)
    found = warmed(batch, new_policy(batch.table), 300)
    assert found > 1.05 * max(fixed(batch, gamma) for gamma in range(GAMMA + 1))


def test_a_limit_is_made_anew_only_where_something_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(verification, "best_limit", lambda *a, **o: made.append(1) or best_limit(*a, **o))
    policy = new_policy(costs(lambda n: 1 + 0.01 * n, lambda n: 0.05, 4))
    for _ in range(20):
        policy.drafted([3.0, 3.0])
    for _ in range(2):
        policy.begin([1, 2])
    made.clear()
    for _ in range(40):
        policy.begin([1, 2])
    assert not made
    for times in (1, 2):
        policy.drafted([3.0, 3.0])
        for _ in range(40):
            policy.begin([1, 2])
        assert len(made) == times
    policy.begin([1])
    assert len(made) == 3
