"""Exact joint laws of several sequences whose drafts are trimmed together, by enumeration over toy tables."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from laws import Table

from viasd.estimator import logit_of_max
from viasd.runtime.adaptive.verification import Offer

Prefix = tuple[int, ...]
Block = tuple[Prefix, float]  # tokens of a sequence and their probability


class Toy:
    """One sequence: laws p, q' and q after every prefix, and everything a round may do to it.

    Args:
        p: Drafter's raw logits.
        q: Full verifier's.
        slim: Slim verifier's, for three tiers.
        vocabulary: Tokens.
        stop: Nothing is drafted behind this token, so that drafts have all lengths; None for whole ones.
    """

    def __init__(
        self, p: Table, q: Table, slim: Table | None = None, vocabulary: int = 2, stop: int | None = None
    ) -> None:
        self.vocabulary = vocabulary
        self.stop = stop
        self._tables = {"p": p, "q": q, "slim": slim or q}
        self.completed = cache(self._completed)
        self.row = cache(self._row)
        self.feature = cache(self._feature)
        self.drafts = cache(self._drafts)

    def _row(self, law: str, prefix: Prefix) -> tuple[float, ...]:
        return tuple(self._tables[law](prefix).double().softmax(-1).tolist())

    def _feature(self, law: str, prefix: Prefix) -> float:
        return float(logit_of_max(torch.as_tensor(self._tables[law](prefix))))

    def _completed(self, prefix: Prefix, length: int) -> np.ndarray:
        """Law of `prefix` gone on with draws from q to `length` tokens, as a vector over all such sequences."""
        if len(prefix) >= length:
            vector = np.zeros(self.vocabulary**length)
            index = 0
            for token in prefix[:length]:
                index = index * self.vocabulary + token
            vector[index] = 1.0
            return vector
        row = self.row("q", prefix)
        return sum(row[x] * self.completed((*prefix, x), length) for x in range(self.vocabulary))

    def _drafts(self, prefix: Prefix, n: int) -> list[Block]:
        """Every draft of n tokens (fewer where it stops) and its probability."""
        if n == 0:
            return [((), 1.0)]
        found: list[Block] = []
        for x, weight in enumerate(self.row("p", prefix)):
            rest = [((), 1.0)] if x == self.stop else self.drafts((*prefix, x), n - 1)
            found += [((x, *tokens), weight * w) for tokens, w in rest]
        return found

    def judged(
        self, prefix: Prefix, block: Prefix, proposal: str, verifier: str
    ) -> Iterator[tuple[Prefix, int, float]]:
        """(tokens that leave a verifier, how many of the block it kept, probability)."""
        weight = 1.0
        for i, x in enumerate(block):
            at = (*prefix, *block[:i])
            p, q = self.row(proposal, at), self.row(verifier, at)
            kept = min(1.0, q[x] / p[x])
            rest = [max(0.0, b - a) for a, b in zip(p, q, strict=True)]
            total = sum(rest)
            if kept < 1 and total > 0:
                for y, r in enumerate(rest):
                    if r > 0:
                        yield (*block[:i], y), i, weight * (1 - kept) * r / total
            weight *= kept
        for y, b in enumerate(self.row(verifier, (*prefix, *block))):
            yield (*block, y), len(block), weight * b


def features(toy: Toy, law: str, prefix: Prefix, block: Prefix) -> list[float]:
    """Features of the rows behind a block's tokens."""
    return [toy.feature(law, (*prefix, *block[:i])) for i in range(len(block))]


def own_features(toy: Toy, law: str, prefix: Prefix, block: Prefix) -> list[float]:
    """What must not be looked at: logits of the drawn tokens' own probabilities."""
    chances = [toy.row(law, (*prefix, *block[:i]))[x] for i, x in enumerate(block)]
    return [math.log(c / (1 - c)) for c in chances]


def offers(
    toys: list[Toy], law: str, prefixes: list[Prefix], blocks: list[Prefix], read: Any = features
) -> list[Offer]:
    return [Offer(r, read(t, law, prefixes[r], blocks[r])) for r, t in enumerate(toys)]


def joint_error(laws: np.ndarray, toys: list[Toy], start: list[Prefix], length: int) -> float:
    """Largest distance of a joint law from independent draws of the targets."""
    expected = _outer([toy.completed(s, length) for toy, s in zip(toys, start, strict=True)])
    assert abs(laws.sum() - 1) < 1e-9
    return float(np.abs(laws - expected).max())


def two_tier_law(
    toys: list[Toy], make: Callable[[], Any], *, gamma: int, length: int, steps: int = 2, seen: set[Any] | None = None
) -> np.ndarray:
    """Joint law of the first `length` tokens of all sequences after some steps of drafting, trimming and judging.

    What the steps leave open is drawn from q: a step is sound if that gives q's law.

    Args:
        toys: The sequences.
        make: A policy: ``begin()``, ``admit(offers)`` -> lengths, ``judged(sequence, features, admitted, accepted)``, and
            perhaps ``read``, what it looks at instead of `features`.
        gamma: Length of every draft.
        length: Tokens that are looked at.
        steps: Steps.
        seen: Receives every tuple of admitted lengths.
    """
    return _two_tiers(toys, make(), [() for _ in toys], gamma, length, steps, set() if seen is None else seen)


def _two_tiers(
    toys: list[Toy], policy: Any, prefixes: list[Prefix], gamma: int, length: int, steps: int, seen: set[Any]
) -> np.ndarray:
    total = np.zeros([toy.vocabulary**length for toy in toys])
    for drafted in itertools.product(*(toy.drafts(s, gamma) for toy, s in zip(toys, prefixes, strict=True))):
        weight = float(np.prod([w for _, w in drafted]))
        blocks = [tokens for tokens, _ in drafted]
        now = copy.deepcopy(policy)
        now.begin()
        lengths = now.admit(offers(toys, "p", prefixes, blocks, getattr(policy, "read", features)))
        seen.add(tuple(lengths))
        outcomes = [
            list(toy.judged(s, block[:n], "p", "q"))
            for toy, s, block, n in zip(toys, prefixes, blocks, lengths, strict=True)
        ]
        if steps == 1:
            parts = [
                sum(w * toy.completed((*s, *tokens), length) for tokens, _, w in outcome)
                for toy, s, outcome in zip(toys, prefixes, outcomes, strict=True)
            ]
            total += weight * _outer(parts)
            continue
        for combination in itertools.product(*outcomes):
            chance = float(np.prod([w for _, _, w in combination]))
            if chance == 0:
                continue
            then = copy.deepcopy(now)
            for r, (_, accepted, _) in enumerate(combination):
                then.judged(r, features(toys[r], "p", prefixes[r], blocks[r]), lengths[r], accepted)
            after = [(*s, *tokens) for s, (tokens, _, _) in zip(prefixes, combination, strict=True)]
            total += weight * chance * _two_tiers(toys, then, after, gamma, length, steps - 1, seen)
    return total


def three_tier_law(
    toys: list[Toy], policy: Any, *, gamma: int, length: int, seen: set[Any] | None = None
) -> np.ndarray:
    """The same of one step with a slim verifier in between; `policy` has ``begin``, ``admit_to_slim``, ``admit_to_full``."""
    seen = set() if seen is None else seen
    prefixes: list[Prefix] = [() for _ in toys]
    total = np.zeros([toy.vocabulary**length for toy in toys])
    for drafted in itertools.product(*(toy.drafts((), gamma) for toy in toys)):
        weight = float(np.prod([w for _, w in drafted]))
        blocks = [tokens for tokens, _ in drafted]
        first = copy.deepcopy(policy)
        first.begin(range(len(toys)))
        sent = first.admit_to_slim(offers(toys, "p", prefixes, blocks))
        slim = [
            list(toy.judged((), block[:n], "p", "slim")) if n else [((), 0, 1.0)]
            for toy, block, n in zip(toys, blocks, sent, strict=True)
        ]
        for combination in itertools.product(*slim):
            chance = weight * float(np.prod([w for _, _, w in combination]))
            if chance == 0:
                continue
            pending = [tokens for tokens, _, _ in combination]
            second = copy.deepcopy(first)
            offered = [o for o in offers(toys, "slim", prefixes, pending) if len(o.features)]
            lengths = dict.fromkeys(range(len(toys)), 0)
            answered = second.admit_to_full(offered)
            lengths |= {o.sequence: n for o, n in zip(offered, answered, strict=True)}
            seen.add((tuple(sent), tuple(lengths.values())))
            parts = [
                sum(
                    w * toy.completed(tokens, length)
                    for tokens, _, w in toy.judged((), pending[r][: lengths[r]], "slim", "q")
                )
                for r, toy in enumerate(toys)
            ]
            total += chance * _outer(parts)
    return total


def _outer(vectors: list[np.ndarray]) -> np.ndarray:
    total = np.ones(())
    for vector in vectors:
        total = np.multiply.outer(total, vector)
    return total
