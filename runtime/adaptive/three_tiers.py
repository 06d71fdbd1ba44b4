"""Adaptive Verification of three tiers: how much of a draft goes to the slim verifier, how much of what is pending on.

Budget and floor of a step are made of earlier steps' survivals, so that neither a drafted nor a pending token is dropped
because of what it is; see `viasd.runtime.adaptive.two_edges`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

from viasd.runtime.adaptive.budget import Survivals, allocate, best_budget, survivals
from viasd.runtime.adaptive.costs import BatchCosts
from viasd.runtime.adaptive.edges import Edge
from viasd.runtime.adaptive.history import History, Restart
from viasd.runtime.adaptive.two_edges import Budgets, above, best_budgets
from viasd.runtime.adaptive.verification import AdaptiveConfig, Offer, Tables

_UNKNOWN = 0.5  # chance that the full verifier keeps a pending token, before any was seen


class CascadeVerification:
    """Which drafted tokens go to the slim verifier, and which pending ones to the full.

    Where all sequences are greedy the survivals of the current step are used as soon as they are known.

    Args:
        slim: Chances that the slim verifier keeps drafted tokens.
        full: Chances that the full verifier keeps pending ones.
        gamma: Longest drafted block; may be changed between two steps.
        tables: Number of sequences of a step -> costs of its passes, or None where there are none.
        config: Policy; ``in-order`` is for two tiers.
    """

    def __init__(
        self, slim: Edge, full: Edge, gamma: int, tables: Tables, config: AdaptiveConfig | None = None
    ) -> None:
        self.config = config or AdaptiveConfig()
        self.slim, self.full = slim, full
        self.gamma = gamma
        self._tables = tables
        self._drafts, self._pending = History(1), History(1)
        self._restart = Restart(self.config.restart)
        self._plan = Budgets(0, math.inf)
        self._sequences = self._new = 0
        self._greedy = False
        self._costs: BatchCosts | None = None
        self._spent = 0.0  # seconds of the current step before its full pass

    def begin(self, sequences: Sequence[int], *, greedy: bool = False) -> None:
        """A step begins: what the last one saw may be used from now on.

        Args:
            sequences: Those that take part in it, whether they will draft or not.
            greedy: Whether all of them are.
        """
        self._greedy = greedy
        self._sequences = len(sequences)
        self._costs = self._tables(len(sequences)) if sequences else None
        for edge in (self.slim, self.full):
            edge.step()
        for history in (self._drafts, self._pending):
            history.publish()
        known = sequences if self._drafts.typical else []
        self._restart.begin(known)
        self._new = len(sequences) - len(known)
        if self._costs is not None:
            # Before anything is drawn: how many tokens there are to verify must not tell what they are.
            self._plan = self._planned(
                # (A mean of drafts of several lengths may rise.)
                {s: list(accumulate(self._drafts.expected(s)[-1], min)) for s in known},
                self._costs,
            )

    def admit_to_slim(self, offers: Sequence[Offer]) -> list[int]:
        """Length of the prefix of every draft that the slim verifier judges.

        Args:
            offers: The drafts of one step.
        """
        drafts = [survivals(self.slim.chances(offer.features)) for offer in offers]
        costs = self._costs
        if costs is None:
            lengths = [len(draft) for draft in drafts]
        else:
            lengths = self._lengths(offers, drafts, costs)
            fed = sum(m + 1 for m in lengths if m)
            self._spent = costs.draft_seconds(len(offers)) * self.gamma + costs.slim_seconds(fed)
        for offer, draft in zip(offers, drafts, strict=True):
            self._drafts.note(offer.sequence, draft)
        self._restart.admitted(sum(lengths))
        return lengths

    def admit_to_full(self, offers: Sequence[Offer], others: int | None = None) -> list[int]:
        """Length of the prefix of every sequence's pending tokens that the full verifier judges.

        Args:
            offers: The pending tokens of one step; their features are of the slim verifier's rows.
            others: Tokens that are in the full pass anyway; None for one of every sequence of the step.
        """
        fed = self._sequences if others is None else others
        chances = [self.full.chances(offer.features) for offer in offers]
        tokens = [survivals(c) for c in chances]
        costs = self._costs
        for offer, c in zip(offers, chances, strict=True):
            self._pending.note(offer.sequence, c)
        if costs is None:
            return [len(pending) for pending in tokens]
        if self._greedy:
            gains = sorted((s for pending in tokens for s in pending), reverse=True)
            return allocate(
                tokens, best_budget(gains, self._sequences, lambda b: self._spent + costs.full_seconds(fed + b))
            )
        return [
            above(0.0 if self._whole(offer.sequence) else self._plan.floor, pending)
            for offer, pending in zip(offers, tokens, strict=True)
        ]

    def leave(self, sequence: int) -> None:
        """Forgets a sequence that has ended."""
        self._drafts.forget(sequence)
        self._pending.forget(sequence)

    def _lengths(self, offers: Sequence[Offer], drafts: Survivals, costs: BatchCosts) -> list[int]:
        whole = [self._whole(offer.sequence) for offer in offers]
        if self._greedy:
            known = {o.sequence: draft for o, draft, w in zip(offers, drafts, whole, strict=True) if not w}
            self._plan = self._planned(known, costs)
        chosen = iter(allocate([draft for draft, w in zip(drafts, whole, strict=True) if not w], self._plan.slim))
        return [len(draft) if w else next(chosen) for draft, w in zip(drafts, whole, strict=True)]

    def _planned(self, drafts: Mapping[int, Sequence[float]], costs: BatchCosts) -> Budgets:
        chances = [self._chances(s, len(draft) + 1) for s, draft in drafts.items()]
        drafting = costs.draft_seconds(self._sequences) * self.gamma
        new = self._new * (self.gamma + 1)  # tokens of sequences that are verified whole, at most

        def seconds(slim: float, full: float) -> float:
            return drafting + costs.slim_seconds(slim + new) + costs.full_seconds(full + new)

        return best_budgets(list(drafts.values()), chances, self._sequences, seconds)

    def _whole(self, sequence: int) -> bool:
        """Whether everything of a sequence is verified: nothing is known yet of any, or a restart chose it."""
        return not self._drafts.typical or sequence == self._restart.chosen

    def _chances(self, sequence: int, places: int) -> list[float]:
        """The full verifier's chances at a sequence's last pending places; where none was pending, their mean.

        Of a new sequence, those that are typical.
        """
        seen = [c for chances in self._pending.expected(sequence) for c in chances][:places]
        mean = sum(seen) / len(seen) if seen else _UNKNOWN
        return [*seen, *[mean] * (places - len(seen))]
