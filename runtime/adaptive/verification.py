"""Adaptive Verification of a batch: at every step, how much of each sequence's draft goes to the verifier.

See `viasd.runtime.adaptive.budget` for what is lossless: where any sequence samples, the budget comes from earlier steps
(*stale*), where all are greedy from the current one. Where drafting costs passes, drafts stop at a limit
(`viasd.runtime.adaptive.stopping`), also of earlier steps, which may be that nothing is drafted; seldom trials notice where
that has changed. Without measured costs everything is drafted and admitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from viasd.errors import OptionError
from viasd.estimator import Array
from viasd.runtime.adaptive.budget import Survivals, allocate, best_budget, in_order, pooled, survivals
from viasd.runtime.adaptive.costs import BatchCosts, StepCosts
from viasd.runtime.adaptive.edges import Edge
from viasd.runtime.adaptive.history import History, Restart
from viasd.runtime.adaptive.recent import RecentDrafts
from viasd.runtime.adaptive.stopping import Choice, Limit, best_limit
from viasd.runtime.adaptive.trials import Trials

POLICIES = ("auto", "stale", "in-order")
_WINDOW = 4  # earlier drafts of a sequence that a stale budget is made from: one is too noisy in a small batch
_RESTART = 24
_SOFT_BELOW = 8  # sequences up to which chances of being kept are learnt from instead of outcomes
_ENOUGH = 8  # drafts before which the best is hoped of all: nothing is known yet
_HOPE = 0.9  # chance of every place
_PLAN_EVERY = 16  # steps for which a limit holds, wherever as many sequences run: making one takes a while
_MARGIN = 1.01  # plain decoding unless drafts promise this much more
# While little was observed drafts may promise less than that, for nothing would be learnt without any: at first so much
# less, and half as much after so many tokens.
_PATIENCE, _PATIENCE_OBSERVATIONS = 0.25, 50

Tables = Callable[[int], BatchCosts | None]


@dataclass(frozen=True)
class AdaptiveConfig:
    """How tokens are drafted and admitted.

    Attributes:
        policy: ``stale`` (a budget of earlier steps, spent by current survivals), ``in-order`` (the best token, then the
            next, up to the first that does not pay), or ``auto``: the best budget of the current step where every sequence
            is greedy, else stale; and where drafting costs passes, drafts stop at a limit, and what was drafted is
            admitted.
        window: Earlier drafts of a sequence that a stale budget looks at.
        restart: Steps without any admitted token after which one whole draft is admitted, where drafting is free.
        soft_below: Up to this many sequences soft labels are learnt from.
    """

    policy: str = "auto"
    window: int = _WINDOW
    restart: int = _RESTART
    soft_below: int = _SOFT_BELOW

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise OptionError(f"policy must be one of {', '.join(POLICIES)}, but got '{self.policy}'")
        if self.window < 1 or self.restart < 1 or self.soft_below < 0:
            raise OptionError(f"window and restart must be at least 1 and soft_below at least 0, but got {self}")


@dataclass(frozen=True)
class Offer:
    """A block that waits to be admitted.

    Attributes:
        sequence: Which sequence's, any integer that is its own.
        features: Logit of the largest probability of the row behind each token.
        greedy: Whether the sequence decodes at temperature 0.
    """

    sequence: int
    features: Sequence[float] | Array
    greedy: bool = False


class AdaptiveVerification:
    """Two tiers: which drafted tokens go to the full verifier.

    Args:
        edge: Chances that the full verifier keeps them.
        gamma: Longest block; may be changed between two steps.
        tables: Number of sequences of a step -> costs of its passes, or None where there are none.
        config: Policy.

    Attributes:
        recent: What the last drafts were like.
        usual: Chances that places usually have, of the current step.
    """

    def __init__(self, edge: Edge, gamma: int, tables: Tables, config: AdaptiveConfig | None = None) -> None:
        self.config = config or AdaptiveConfig()
        self.edge = edge
        self.gamma = gamma
        self.recent = RecentDrafts()
        self.usual = self.recent.usual(edge, gamma)
        self._tables = tables
        self._seen = History(self.config.window)
        self._restart = Restart(self.config.restart)
        self._trials = Trials()
        self._plans: dict[int, _Plan] = {}  # by sequences that run
        self._step = 0
        self._limit = Limit(gamma)
        self._sequences = 0
        self._costs: BatchCosts | None = None

    def begin(self, sequences: Sequence[int]) -> None:
        """A step begins: what the last one saw may be used from now on.

        Args:
            sequences: Those that take part in it, whether they will draft or not.
        """
        self._step += 1
        self.edge.step()
        self.recent.step()
        self._seen.publish()
        self._sequences = len(sequences)
        self._costs = self._tables(len(sequences)) if sequences else None
        self._trials.stop()
        self._limit = Limit(self.gamma)
        if not self.stops_drafting:
            self._restart.begin(sequences if self._seen.typical else [])
        else:
            plan = self._planned()
            self._limit = plan.limit
            best, rate = plan.choice.limit, max(plan.choice.rate, plan.choice.plain)
            self._trials.begin(sequences, plan.limit, best, self.gamma, self.usual, plan.costs, rate)

    @property
    def stops_drafting(self) -> bool:
        """Whether drafts stop at a limit in this step."""
        return self.config.policy == "auto" and self._costs is not None and bool(self._costs.drafter)

    def limit(self, sequence: int) -> Limit:
        """Up to where the draft of a sequence goes in this step."""
        return self._trials.limit if sequence == self._trials.chosen else self._limit

    def drafted(self, features: Sequence[float]) -> None:
        """What was seen of a draft of the step before: a feature of every row that was asked for."""
        self.recent.note(features, self.edge)

    def admit(self, offers: Sequence[Offer], others: int | None = None) -> list[int]:
        """Length of the prefix of every block that is verified.

        Args:
            offers: The blocks of one step, in the order of their sequences.
            others: Tokens that are in the verifier's pass anyway; None for one of every sequence of the step.
        """
        if self.stops_drafting:
            return [len(offer.features) for offer in offers]
        drafts = [survivals(self.edge.chances(offer.features)) for offer in offers]
        costs = self._costs
        if costs is None:
            lengths = [len(draft) for draft in drafts]
        else:
            lengths = self._lengths(offers, drafts, self._sequences if others is None else others, costs)
        self._restart.admitted(sum(lengths))
        for offer, draft in zip(offers, drafts, strict=True):
            self._seen.note(offer.sequence, draft)
        return lengths

    def soft(self, sequences: int) -> bool:
        """Whether outcomes of a step of so many sequences should say the chances that tokens were kept with."""
        return sequences <= self.config.soft_below

    def leave(self, sequence: int) -> None:
        """Forgets a sequence that has ended."""
        self._seen.forget(sequence)

    def _lengths(self, offers: Sequence[Offer], drafts: Survivals, others: int, costs: BatchCosts) -> list[int]:
        greedy = all(offer.greedy for offer in offers)
        # Verified whole: everything while nothing is known, and what is to show what it is worth.
        whole = [not self._seen.typical or offer.sequence == self._restart.chosen for offer in offers]
        rest = [draft for draft, w in zip(drafts, whole, strict=True) if not w]
        base = self._sequences + sum(sum(draft) for draft, w in zip(drafts, whole, strict=True) if w)
        fed = others + sum(len(draft) for draft, w in zip(drafts, whole, strict=True) if w)
        # As if all blocks were whole: how long they really are tells which tokens they hold.
        drafting = costs.draft_seconds(self._sequences) * self.gamma

        def seconds(budget: float) -> float:
            return drafting + costs.full_seconds(fed + budget)

        if self.config.policy == "in-order":
            chosen = in_order(rest, base, seconds)
        elif self.config.policy == "auto" and greedy:
            gains = sorted((s for draft in rest for s in draft), reverse=True)
            chosen = allocate(rest, best_budget(gains, base, seconds))
        else:
            earlier = [self._seen.expected(offer.sequence) for offer, w in zip(offers, whole, strict=True) if not w]
            chosen = allocate(rest, best_budget(pooled(earlier), base, seconds))
        found = iter(chosen)
        return [len(draft) if w else next(found) for draft, w in zip(drafts, whole, strict=True)]

    def _planned(self) -> _Plan:
        """The limit of this step: a few steps old at most, and of as many sequences."""
        assert self._costs is not None
        table, gamma = self._costs, self.gamma
        made = self._plans.get(self._sequences)
        fits = made is not None and made.table == table and made.gamma == gamma
        if made is None or not fits or self._outdated(made):
            costs = made.costs if made is not None and fits else table.step(self._sequences, gamma)
            if len(self.recent) < _ENOUGH:
                usual = np.full(gamma, _HOPE)
                chances = usual[None]
            else:
                usual = self.recent.usual(self.edge, gamma)
                chances = self.recent.chances(self.edge, usual)
            evidence = self._evidence()
            made = _Plan(table, gamma, self._step, evidence, costs, usual, *self._chosen(chances, usual, costs))
            self._plans[self._sequences] = made
        self.usual = made.usual
        return made

    def _outdated(self, plan: _Plan) -> bool:
        """Whether a plan is old, and something was seen since it was made."""
        old = self._step - plan.step >= _PLAN_EVERY or len(self.recent) < 2 * _ENOUGH
        return old and plan.evidence != self._evidence()

    def _evidence(self) -> tuple[float, ...]:
        return self.recent.noted, len(self.recent), self.edge.observations, *self.edge.coefficients

    def _chosen(self, chances: Array, usual: Array, costs: StepCosts) -> tuple[Choice, Limit]:
        """The best limit, and the one that is followed."""
        best = best_limit(chances, usual, costs)
        if best.pays(_MARGIN) and len(self.recent) >= _ENOUGH:
            return best, best.limit
        # To learn something tokens must be drawn, also those of which little is thought.
        even = best_limit(chances, usual, costs, floors=False)
        patience = _PATIENCE / (1 + self.edge.observations / _PATIENCE_OBSERVATIONS)
        return (even, even.limit) if even.pays(_MARGIN - patience) else (best, Limit(0))


@dataclass
class _Plan:
    """A limit, what it was made for, and when."""

    table: BatchCosts
    gamma: int
    step: int
    evidence: tuple[float, ...]
    costs: StepCosts
    usual: Array
    choice: Choice
    limit: Limit
