"""Adaptive Verification of a batch: at every step, how much of each sequence's draft goes to the verifier.

See `viasd.runtime.adaptive.budget` for what is lossless: where any sequence samples, the budget comes from earlier steps
(*stale*), where all are greedy from the current one. Without measured costs everything is admitted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from viasd.errors import OptionError
from viasd.estimator import Array
from viasd.runtime.adaptive.budget import Survivals, allocate, best_budget, in_order, pooled, survivals
from viasd.runtime.adaptive.costs import BatchCosts
from viasd.runtime.adaptive.edges import Edge, Outcome

POLICIES = ("auto", "stale", "in-order")
_WINDOW = 4  # earlier drafts of a sequence that a stale budget is made from: one is too noisy in a small batch
_RESTART = (
    24  # steps without an admitted token after which one whole draft is: else nothing would ever be observed again
)
_SOFT_BELOW = 8  # sequences up to which chances of being kept are learnt from instead of outcomes

Tables = Callable[[int], BatchCosts | None]


@dataclass(frozen=True)
class AdaptiveConfig:
    """How tokens are admitted.

    Attributes:
        policy: ``stale`` (a budget of earlier steps, spent by current survivals), ``in-order`` (the best token, then the
            next, up to the first that does not pay), or ``auto``: the best budget of the current step where every sequence
            is greedy, else stale.
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


class History:
    """Survivals of each sequence's last drafts, readable from the step after the one that saw them.

    Args:
        window: How many of them.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._drafts: dict[int, deque[list[float]]] = {}
        self._fresh: list[tuple[int, list[float]]] = []

    def of(self, sequence: int) -> list[list[float]]:
        """A sequence's last drafts before the current step; none of a new one."""
        return list(self._drafts.get(sequence, ()))

    def note(self, sequence: int, draft: list[float]) -> None:
        """A draft of the current step."""
        self._fresh.append((sequence, draft))

    def publish(self) -> None:
        """The current step is over."""
        for sequence, draft in self._fresh:
            self._drafts.setdefault(sequence, deque(maxlen=self._window)).append(draft)
        self._fresh = []

    def forget(self, sequence: int) -> None:
        """A sequence has ended."""
        self._drafts.pop(sequence, None)
        self._fresh = [(s, draft) for s, draft in self._fresh if s != sequence]


class Restart:
    """Admits one whole draft where nothing has been admitted for long: else nothing would ever be observed again.

    Args:
        after: Steps in a row without an admitted token.
    """

    def __init__(self, after: int) -> None:
        self.count = 0
        self._after = after
        self._idle = 0

    def applied(self, drafts: Survivals, lengths: list[int]) -> list[int]:
        """The lengths as they are, or one whole draft alone; a counter decides whose."""
        if any(lengths) or not any(map(len, drafts)):
            self._idle = 0
            return lengths
        self._idle += 1
        if self._idle < self._after:
            return lengths
        self._idle = 0
        self.count += 1
        turn = self.count % len(drafts)
        chosen = next(r for r in (*range(turn, len(drafts)), *range(turn)) if len(drafts[r]))
        return [len(draft) if r == chosen else 0 for r, draft in enumerate(drafts)]


class AdaptiveVerification:
    """Two tiers: which drafted tokens go to the full verifier.

    Args:
        edge: Chances that the full verifier keeps them.
        gamma: Longest block.
        tables: Number of sequences of a step -> costs of its passes, or None where there are none.
        config: Policy.
    """

    def __init__(self, edge: Edge, gamma: int, tables: Tables, config: AdaptiveConfig | None = None) -> None:
        self.config = config or AdaptiveConfig()
        self.edge = edge
        self.offered = self.admitted = 0
        self._gamma = gamma
        self._tables = tables
        self._seen = History(self.config.window)
        self._restart = Restart(self.config.restart)

    @property
    def restarts(self) -> int:
        """How often a whole draft was admitted because nothing had been for long."""
        return self._restart.count

    def begin(self) -> None:
        """A step begins: what the last one saw may be used from now on."""
        self.edge.step()
        self._seen.publish()

    def admit(self, offers: Sequence[Offer], others: int = 0) -> list[int]:
        """Length of the prefix of every block that is verified.

        Args:
            offers: The blocks of one step, in the order of their sequences.
            others: Sequences of the step that offer nothing and are verified all the same.
        """
        drafts = [survivals(self.edge.chances(offer.features)) for offer in offers]
        costs = self._tables(len(offers) + others)
        if costs is None:
            lengths = [len(draft) for draft in drafts]
        else:
            lengths = self._restart.applied(drafts, self._lengths(offers, drafts, others, costs))
        for offer, draft in zip(offers, drafts, strict=True):
            self._seen.note(offer.sequence, draft)
        self.offered += sum(map(len, drafts))
        self.admitted += sum(lengths)
        return lengths

    def soft(self, sequences: int) -> bool:
        """Whether outcomes of a step of so many sequences should say the chances that tokens were kept with."""
        return sequences <= self.config.soft_below

    def judged(self, outcome: Outcome) -> None:
        """What became of a block that was admitted in part or whole."""
        self.edge.observe(outcome)

    def leave(self, sequence: int) -> None:
        """Forgets a sequence that has ended."""
        self._seen.forget(sequence)

    def state(self) -> dict[str, Any]:
        """What was learnt, ready for `json.dumps`."""
        return {"edges": [self.edge.state()]}

    def _lengths(self, offers: Sequence[Offer], drafts: Survivals, others: int, costs: BatchCosts) -> list[int]:
        # A sequence's first draft is verified whole: nothing is known of it yet.
        earlier = [self._seen.of(offer.sequence) for offer in offers]
        whole = [draft for draft, e in zip(drafts, earlier, strict=True) if not e]
        rest = [draft for draft, e in zip(drafts, earlier, strict=True) if e]
        n = len(offers) + others
        base = n + sum(map(sum, whole))
        drafting = costs.draft_seconds(len(offers)) * self._gamma
        fed = n + sum(map(len, whole))

        def seconds(budget: float) -> float:
            return drafting + costs.full_seconds(fed + budget)

        if self.config.policy == "in-order":
            chosen = in_order(rest, base, seconds)
        elif self.config.policy == "auto" and all(offer.greedy for offer in offers):
            gains = sorted((s for draft in rest for s in draft), reverse=True)
            chosen = allocate(rest, best_budget(gains, base, seconds))
        else:
            chosen = allocate(rest, best_budget(pooled([e for e in earlier if e]), base, seconds))
        found = iter(chosen)
        return [next(found) if e else len(draft) for draft, e in zip(drafts, earlier, strict=True)]
