"""Adaptive Verification of a batch: at every step, how much of each sequence's draft goes to the verifier.

See `viasd.runtime.adaptive.budget` for what is lossless: where any sequence samples, the budget comes from earlier steps
(*stale*), where all are greedy from the current one. Where drafting costs passes, drafts stop at a floor
(`viasd.runtime.adaptive.stopping`), also of earlier steps. Without measured costs everything is drafted and admitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from viasd.errors import OptionError
from viasd.estimator import Array
from viasd.runtime.adaptive.budget import Survivals, allocate, best_budget, in_order, pooled, survivals
from viasd.runtime.adaptive.costs import BatchCosts
from viasd.runtime.adaptive.edges import Edge
from viasd.runtime.adaptive.history import History, Restart
from viasd.runtime.adaptive.stopping import UsualChances, best_floor

POLICIES = ("auto", "stale", "in-order")
_WINDOW = 4  # earlier drafts of a sequence that a stale budget is made from: one is too noisy in a small batch
_RESTART = 24
_SOFT_BELOW = 8  # sequences up to which chances of being kept are learnt from instead of outcomes
_FLOOR_DRAFTS = 64  # drafts that a floor is made from: more cost time and tell little

Tables = Callable[[int], BatchCosts | None]


@dataclass(frozen=True)
class AdaptiveConfig:
    """How tokens are drafted and admitted.

    Attributes:
        policy: ``stale`` (a budget of earlier steps, spent by current survivals), ``in-order`` (the best token, then the
            next, up to the first that does not pay), or ``auto``: the best budget of the current step where every sequence
            is greedy, else stale; and where drafting costs passes, drafts stop at a floor, and what was drafted is
            admitted.
        window: Earlier drafts of a sequence that a stale budget looks at.
        restart: Steps without any admitted token after which one whole draft is admitted.
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
    """

    def __init__(self, edge: Edge, gamma: int, tables: Tables, config: AdaptiveConfig | None = None) -> None:
        self.config = config or AdaptiveConfig()
        self.edge = edge
        self.usual = UsualChances(len(edge.estimator.intercepts))
        self.gamma = gamma
        self._tables = tables
        self._seen = History(self.config.window)
        self._restart = Restart(self.config.restart)
        self._floor = 0.0
        self._sequences = 0
        self._costs: BatchCosts | None = None

    def begin(self, sequences: Sequence[int]) -> None:
        """A step begins: what the last one saw may be used from now on.

        Args:
            sequences: Those that take part in it, whether they will draft or not.
        """
        self.edge.step()
        self._seen.publish()
        self._sequences = len(sequences)
        self._costs = self._tables(len(sequences)) if sequences else None
        self._restart.begin([s for s in sequences if self._seen.of(s)])
        self._floor = self._best_floor(sequences) if self.stops_drafting else 0.0

    @property
    def stops_drafting(self) -> bool:
        """Whether drafts stop at a floor in this step."""
        return self.config.policy == "auto" and self._costs is not None and bool(self._costs.drafter)

    def floor(self, sequence: int) -> float:
        """Survival that a token of this sequence must reach to be drafted; infinite where nothing is drafted."""
        return self._floor if self._seen.of(sequence) and sequence != self._restart.chosen else 0.0

    def stopped(self, sequence: int, reached: Sequence[float]) -> None:
        """What was seen of a sequence's draft of this step, the survival at which it stopped included."""
        self.usual.note([b / a if a else 0.0 for a, b in zip((1.0, *reached), reached, strict=False)])
        self._seen.note(sequence, self.usual.extended(reached, self.gamma))

    def admit(self, offers: Sequence[Offer], others: int | None = None) -> list[int]:
        """Length of the prefix of every block that is verified.

        Args:
            offers: The blocks of one step, in the order of their sequences.
            others: Tokens that are in the verifier's pass anyway; None for one of every sequence of the step.
        """
        drafts = [survivals(self.edge.chances(offer.features)) for offer in offers]
        costs = self._costs
        if costs is None:
            lengths = [len(draft) for draft in drafts]
        else:
            lengths = self._lengths(offers, drafts, self._sequences if others is None else others, costs)
        self._restart.admitted(sum(lengths))
        if not self.stops_drafting:
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
        # Verified whole: a sequence of which nothing is known yet, and the one that a restart chose.
        whole = [not self._seen.of(offer.sequence) or offer.sequence == self._restart.chosen for offer in offers]
        if self.stops_drafting and not greedy:
            return [len(draft) for draft in drafts]
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
            earlier = [self._seen.of(offer.sequence) for offer, w in zip(offers, whole, strict=True) if not w]
            chosen = allocate(rest, best_budget(pooled(earlier), base, seconds))
        found = iter(chosen)
        return [len(draft) if w else next(found) for draft, w in zip(drafts, whole, strict=True)]

    def _best_floor(self, sequences: Sequence[int]) -> float:
        costs = self._costs
        assert costs is not None
        known = [drafts for s in sequences if (drafts := self._seen.of(s))]
        if not known:
            return 0.0
        window = max(1, min(self.config.window, _FLOOR_DRAFTS // len(known)))
        drafts = [draft for earlier in known for draft in earlier[-window:]]
        n = len(known)
        return best_floor(
            drafts, self.usual, n, costs.draft_seconds, lambda b: costs.full_seconds(n + b), weight=n / len(drafts)
        )
