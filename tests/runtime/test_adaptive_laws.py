"""Joint output laws of trimmed verification, exact: what is legal has the targets' law, what is not is caught."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from batchlaws import Toy, features, joint_error, own_features, three_tier_law, two_tier_law
from laws import random_table

from viasd.runtime.adaptive import edges
from viasd.runtime.adaptive.budget import allocate, best_budget, survivals
from viasd.runtime.adaptive.costs import BatchCosts
from viasd.runtime.adaptive.edges import Edge, Outcome
from viasd.runtime.adaptive.three_tiers import CascadeVerification
from viasd.runtime.adaptive.two_edges import above
from viasd.runtime.adaptive.verification import AdaptiveConfig, AdaptiveVerification, Offer

EXACT = 1e-12
# One token more is dear and a second one nearly free, so that a budget of the current step looks ahead.
FULL = {2: 1.0, 3: 1.38, 4: 1.42, 5: 1.75, 6: 1.8, 8: 2.4}
DEAR = {2: 1.0, 3: 1.45, 4: 1.5, 5: 1.95, 6: 2.0, 8: 2.6}
COSTS, DEAR_COSTS = (BatchCosts(2, 8, f, {n: 0.1 * s for n, s in f.items()}, {}) for f in (FULL, DEAR))


def toys(seed: int = 1, vocabulary: int = 2, spread: float = 2.5, stop: int | None = None) -> list[Toy]:
    """Two sequences whose laws p, q' and q are related and change with every token."""
    found = []
    for r in range(2):
        q, a, b = (random_table(100 * seed + 10 * r + i, vocabulary, s) for i, s in ((0, spread), (1, 1.5), (2, 0.8)))
        found.append(Toy(lambda x, q=q, a=a: q(x) + a(x), q, lambda x, q=q, b=b: q(x) + b(x), vocabulary, stop))
    return found


class TwoTiers:
    """The controller as the enumeration asks for it, warmed by a step that saw both sequences."""

    def __init__(self, config: AdaptiveConfig, gamma: int, warm: bool = True, costs: BatchCosts | None = COSTS) -> None:
        self.inner = AdaptiveVerification(Edge("drafter->full", gamma), gamma, lambda _n: costs, config)
        if warm:
            self.inner.begin([0, 1])
            self.inner.admit([Offer(0, [2.0] * gamma), Offer(1, [1.0] * gamma)])

    def begin(self) -> None:
        self.inner.begin([0, 1])

    def admit(self, offers: list[Offer]) -> list[int]:
        return self.inner.admit(offers)

    def judged(self, sequence: int, features: list[float], admitted: int, accepted: int) -> None:
        self.inner.edge.observe([Outcome(features, admitted, accepted)])


POLICIES = {
    "stale": AdaptiveConfig("stale"),
    "stale of one step": AdaptiveConfig("stale", window=1),
    "auto, which is stale": AdaptiveConfig(),
    "in order": AdaptiveConfig("in-order"),
    "restarted": AdaptiveConfig("stale", restart=1),
}


@pytest.mark.parametrize("name", POLICIES)
def test_legal_policies_have_exactly_the_targets_joint_law(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edges, "REFIT_OBSERVATIONS", 1)  # what is learnt in one step tells in the next
    seen: set[Any] = set()
    for seed in (2, 4):
        found = toys(seed)
        law = two_tier_law(found, lambda: TwoTiers(POLICIES[name], 2), gamma=2, length=4, steps=2, seen=seen)
        assert joint_error(law, found, [(), ()], 4) < EXACT
    assert len(seen) >= 3  # it did trim, in several ways


@pytest.mark.parametrize("name", ["stale", "in order"])
def test_longer_drafts_and_a_new_sequence_are_exact(name: str) -> None:
    found, seen = toys(3), set()
    warm = TwoTiers(POLICIES[name], 3)
    law = two_tier_law(found, lambda: warm, gamma=3, length=4, steps=1, seen=seen)
    assert joint_error(law, found, [(), ()], 4) < EXACT
    fresh = two_tier_law(found, lambda: TwoTiers(POLICIES[name], 2, warm=False), gamma=2, length=4, steps=2)
    assert joint_error(fresh, found, [(), ()], 4) < EXACT
    wide = toys(4, vocabulary=3)
    law = two_tier_law(wide, lambda: TwoTiers(POLICIES[name], 2), gamma=2, length=3, steps=1)
    assert joint_error(law, wide, [(), ()], 3) < EXACT


@pytest.mark.parametrize("name", POLICIES)
def test_drafts_that_end_at_a_token_are_exact(name: str) -> None:
    # How long a draft is tells which tokens it holds; no decision may hang on that.
    drafting = BatchCosts(2, 8, FULL, {}, {1: 0.15, 2: 0.2})
    for seed in range(1, 7):
        found = toys(seed, stop=1)
        for costs in (COSTS, DEAR_COSTS, drafting):
            config = replace(
                POLICIES[name], policy="stale" if POLICIES[name].policy == "auto" else POLICIES[name].policy
            )
            law = two_tier_law(found, lambda c=costs, k=config: TwoTiers(k, 3, costs=c), gamma=3, length=4, steps=1)
            assert joint_error(law, found, [(), ()], 4) < EXACT


def test_allocating_a_fixed_budget_is_exact_whatever_it_is() -> None:
    class Fixed(TwoTiers):
        budget = 0

        def admit(self, offers: list[Offer]) -> list[int]:
            return allocate([survivals(self.inner.edge.chances(o.features)) for o in offers], self.budget)

    for budget in range(7):
        found, seen = toys(4), set()
        policy = Fixed(AdaptiveConfig(), 3)
        policy.budget = budget
        law = two_tier_law(found, lambda p=policy: p, gamma=3, length=4, steps=1, seen=seen)
        assert joint_error(law, found, [(), ()], 4) < EXACT
        assert {sum(lengths) for lengths in seen} == {budget}
        assert budget in (0, 1, 6) or len(seen) > 1  # the best first token is known beforehand


class Biased(TwoTiers):
    """Does one of the forbidden things."""

    what = ""
    cuts: tuple[float, ...] = ()

    @property
    def read(self) -> Any:
        return own_features if self.what == "the drawn token's own probability" else features

    def admit(self, offers: list[Offer]) -> list[int]:
        drafts = [survivals(self.inner.edge.chances(o.features)) for o in offers]
        if self.what == "a budget of the current survivals":
            gains = sorted((s for d in drafts for s in d), reverse=True)
            return allocate(drafts, best_budget(gains, 2, lambda b: DEAR_COSTS.full_seconds(2 + b)))
        if self.what == "the token behind decides":
            return [2 if d[1] > 0.45 else 0 for d in drafts]
        if self.what == "the drawn token's own probability":
            return allocate(drafts, 2)
        # Each by the other one's second token: one way round that would be fine.
        second = [o.features[1] > cut for o, cut in zip(offers, self.cuts, strict=True)]
        return [0 if there else 2 for there in second[::-1]]


@pytest.mark.parametrize(
    "what",
    [
        "a budget of the current survivals",
        "the token behind decides",
        "the drawn token's own probability",
        "each by the other's second token",
    ],
)
def test_illegal_policies_are_caught(what: str) -> None:
    worst = 0.0
    for seed in range(1, 7):
        found = toys(seed)
        policy = Biased(AdaptiveConfig(), 2)
        policy.what = what
        policy.cuts = tuple((toy.feature("p", (0,)) + toy.feature("p", (1,))) / 2 for toy in found)
        law = two_tier_law(found, lambda p=policy: p, gamma=2, length=3, steps=1)
        worst = max(worst, joint_error(law, found, [(), ()], 3))
    assert worst > 1e-3


def cascade(kind: type[CascadeVerification] = CascadeVerification, costs: BatchCosts = COSTS) -> CascadeVerification:
    made = kind(Edge("drafter->slim", 2), Edge("slim->full", 3), 2, lambda _n: costs)
    made.begin([0, 1])
    made.admit_to_slim([Offer(0, [3.0, 1.0]), Offer(1, [1.0, 0.0])])
    made.admit_to_full([Offer(0, [2.0, 1.0, 1.0]), Offer(1, [1.5, 0.5])])
    return made


def test_three_tiers_have_exactly_the_targets_joint_law() -> None:
    trimmed = set()
    for seed in (1, 3, 4, 10):
        for costs in (COSTS, DEAR_COSTS):
            found, seen = toys(seed), set()
            law = three_tier_law(found, cascade(costs=costs), gamma=2, length=4, seen=seen)
            assert joint_error(law, found, [(), ()], 4) < EXACT
            trimmed |= seen
    assert len({sent for sent, _ in trimmed}) >= 2
    assert len({full for _, full in trimmed}) >= 4


def test_three_tiers_are_exact_where_drafts_end_at_a_token() -> None:
    drafting = BatchCosts(2, 8, FULL, {n: 0.1 * s for n, s in FULL.items()}, {1: 0.15, 2: 0.2})
    for seed in range(1, 7):
        found = toys(seed, stop=1)
        for costs in (COSTS, DEAR_COSTS, drafting):
            law = three_tier_law(found, cascade(costs=costs), gamma=2, length=4)
            assert joint_error(law, found, [(), ()], 4) < EXACT


class FixedCascade(CascadeVerification):
    """A budget for the slim verifier, and a floor or a budget for the full one."""

    slim_budget, full_budget, floor = 0, None, 0.0

    def admit_to_slim(self, offers: Any) -> list[int]:
        return allocate([survivals(self.slim.chances(o.features)) for o in offers], self.slim_budget)

    def admit_to_full(self, offers: Any, others: int | None = None) -> list[int]:
        pending = [survivals(self.full.chances(o.features)) for o in offers]
        if self.full_budget is None:
            return [above(self.floor, p) for p in pending]
        return allocate(pending, self.full_budget)


def fixed_error(seed: int, **fixed: Any) -> float:
    policy = FixedCascade(Edge("drafter->slim", 2), Edge("slim->full", 3), 2, lambda _n: None)
    for name, value in fixed.items():
        setattr(policy, name, value)
    found = toys(seed)
    return joint_error(three_tier_law(found, policy, gamma=2, length=4), found, [(), ()], 4)


def test_a_budget_and_a_floor_fixed_beforehand_are_exact_whatever_they_are() -> None:
    for budget in range(1, 5):
        for floor in (0.2, 0.4, 0.5, 0.6, 0.8):
            assert fixed_error(4, slim_budget=budget, floor=floor) < EXACT


def test_two_fixed_budgets_one_behind_the_other_are_caught() -> None:
    # A drafted token decides how much of the other sequence is judged, and so against what it competes itself.
    assert max(fixed_error(seed, slim_budget=2, full_budget=full) for seed in (1, 2, 4) for full in (1, 2)) > 1e-3


class CurrentPending(CascadeVerification):
    """Chooses how many pending tokens to send by what is pending."""

    def admit_to_full(self, offers: Any, others: int | None = None) -> list[int]:
        self._greedy = True
        return super().admit_to_full(offers, others)


def test_a_budget_of_what_is_pending_is_caught() -> None:
    laws = ((toys(seed), cascade(CurrentPending, DEAR_COSTS)) for seed in (1, 8, 12))
    errors = [
        joint_error(three_tier_law(found, policy, gamma=2, length=4), found, [(), ()], 4) for found, policy in laws
    ]
    assert max(errors) > 1e-3


def test_the_enumeration_itself_is_exact() -> None:
    found = toys(6)
    law = two_tier_law(found, lambda: TwoTiers(AdaptiveConfig(), 2, costs=None), gamma=2, length=4, steps=2)
    assert joint_error(law, found, [(), ()], 4) < EXACT
    assert np.isclose(found[0].completed((), 2).sum(), 1)
