"""A batch in which every chance and every cost is known: how fast a policy is beside blocks of a fixed length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from viasd.runtime.adaptive.budget import survivals
from viasd.runtime.adaptive.costs import BatchCosts, sizes
from viasd.runtime.adaptive.edges import Edge, Outcome
from viasd.runtime.adaptive.verification import AdaptiveVerification, Offer
from viasd.runtime.lengths import DraftLength, ModelPace

GAMMA = 8
EASY, HARD = (3.5, 2.0), (-1.5, 1.5)  # mean and spread of the rows' features
_SLOPE, _INTERCEPT = 0.53, 0.35  # of the chance that a token is kept, by the feature of its row
_LIFE = 40.0  # steps that a sequence lasts, in the mean


def chance(features: np.ndarray) -> np.ndarray:
    """The true chance that a token is kept when those before it are."""
    return 1 / (1 + np.exp(-(_SLOPE * features + _INTERCEPT)))


def costs(full: Callable[[int], float], draft: Callable[[int], float], sequences: int) -> BatchCosts:
    """A table of such costs."""
    steps = [n for n in (1, 2, 4, 8, 16, 32) if n <= sequences]
    return BatchCosts(sequences, 8, {n: full(n) for n in sizes(sequences, GAMMA)}, {}, {n: draft(n) for n in steps})


@dataclass
class Batch:
    """Sequences that come and go, each easy or hard; seconds and tokens are counted.

    Args:
        table: Costs.
        kinds: Of new sequences, in turn.
        sequences: How many there are at any time.
        greedy: Whether they decode at temperature 0, as far as the policy is told.
    """

    table: BatchCosts
    kinds: Sequence[tuple[float, float]]
    sequences: int
    greedy: bool = False
    seed: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    visits: Counter[tuple[float, float]] = field(default_factory=Counter)  # of sequences of a kind, one a step
    _running: dict[int, tuple[tuple[float, float], int]] = field(default_factory=dict)
    _next: int = 0

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)

    def adaptive(self, policy: AdaptiveVerification, steps: int) -> float:
        """Tokens a second under a policy."""
        seen: list[list[float]] = []
        for _ in range(steps):
            self._fill()
            n = self.sequences
            for each in seen:
                policy.drafted(each)
            seen = []
            policy.begin(list(self._running))
            rows = [0] * GAMMA
            drafts = {}
            for number in self._running:
                features = self._features(number)
                asked, drawn = self._draft(policy, number, features)
                seen.append(features[:asked].tolist())
                drafts[number] = (features, drawn)
                for place in range(asked):
                    rows[place] += 1
            offers = [Offer(number, f[:m].tolist(), self.greedy) for number, (f, m) in drafts.items() if m]
            lengths = dict(zip((o.sequence for o in offers), policy.admit(offers, n), strict=True))
            self.seconds += sum(self.table.draft_seconds(m) for m in rows if m)
            self.seconds += self.table.full_seconds(n + sum(lengths.values()))
            for number, (features, _) in drafts.items():
                m = lengths.get(number, 0)
                chances = chance(features[:m])
                if m:
                    kept = int((self._rng.random(m) < chances).cumprod().sum())
                    policy.edge.observe([Outcome(features[:m], m, kept)])
                # What is to be expected: the policy sees what happened, but luck is not its merit.
                self.visits[self._running[number][0]] += 1
                self.tokens += 1 + float(chances.cumprod().sum())
                self._age(number)
                if number not in self._running:
                    policy.leave(number)
        return self.tokens / self.seconds

    def paced(self, steps: int) -> float:
        """Tokens a second of one sequence at a time that chooses its lengths itself, as `sd` does outside an engine."""
        seconds = [self.table.full_seconds(m + 1) for m in range(GAMMA + 1)]
        paces: dict[int, ModelPace] = {}
        for _ in range(steps):
            self._fill()
            (number,) = self._running
            pace = paces.setdefault(number, ModelPace(DraftLength(GAMMA, self.table.draft_seconds(1), seconds)))
            m = pace.limit([], GAMMA)
            chances = chance(self._features(number)[:m])
            kept = int((self._rng.random(m) < chances).cumprod().sum())
            if m:
                pace.judged(kept, min(kept + 1, m))
            else:
                pace.passed([0])
            self.tokens += 1 + float(chances.cumprod().sum())
            self.seconds += m * self.table.draft_seconds(1) + seconds[m]
            self.visits[self._running[number][0]] += 1
            self._age(number)
        return self.tokens / self.seconds

    def _draft(self, policy: AdaptiveVerification, number: int, features: np.ndarray) -> tuple[int, int]:
        """(rows asked for, tokens drawn)."""
        reached, limit = 1.0, policy.limit(number)
        for place in range(GAMMA):
            if not limit.asks(reached, float(policy.usual[min(place, len(policy.usual) - 1)]), place):
                return place, place
            reached *= survivals([policy.edge.chance(float(features[place]), place)])[0]
            if not limit.draws(reached):
                return place + 1, place
        return GAMMA, GAMMA

    def _features(self, number: int) -> np.ndarray:
        (mean, spread), _ = self._running[number]
        return self._rng.normal(mean, spread, GAMMA)

    def _fill(self) -> None:
        while len(self._running) < self.sequences:
            kind = self.kinds[self._next % len(self.kinds)]
            self._running[self._next] = kind, int(self._rng.exponential(_LIFE)) + 5
            self._next += 1

    def _age(self, number: int) -> None:
        kind, left = self._running.pop(number)
        if left > 1:
            self._running[number] = kind, left - 1


def fixed(batch: Batch, gamma: int) -> float:
    """Expected tokens a second that blocks of one length would have had of the same sequences, 0 for plain decoding."""
    rng = np.random.default_rng(0)
    kept = 0.0
    for (mean, spread), visits in batch.visits.items():
        c = float(chance(rng.normal(mean, spread, 20000)).mean())
        kept += visits / batch.visits.total() * sum(c**place for place in range(1, gamma + 1))
    n, table = batch.sequences, batch.table
    return n * (1 + kept) / (gamma * table.draft_seconds(n) + table.full_seconds(n * (gamma + 1)))


def new_policy(table: BatchCosts) -> AdaptiveVerification:
    """The policy as an engine makes it."""
    return AdaptiveVerification(Edge("drafter->full", 16), GAMMA, lambda _n: table)


def warmed(batch: Batch, policy: AdaptiveVerification, steps: int, warm_up: int = 150) -> float:
    """Tokens a second of a policy after some steps that don't count."""
    batch.adaptive(policy, warm_up)
    batch.tokens = batch.seconds = 0.0
    batch.visits.clear()
    return batch.adaptive(policy, steps)
