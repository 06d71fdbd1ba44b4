"""Budgets of three tiers: how many drafted tokens go to the slim verifier, and which of its survivors to the full one.

The slim verifier keeps a prefix of a draft and adds a token of its own: the **pending** tokens. With n tokens sent there are
places 1 ... n + 1; place j exists if the slim verifier keeps the j - 1 tokens before it (survival ``S_{j-1}`` of the
drafter's edge), and its token is emitted if the full verifier keeps it and all before it. Its **combined survival** is the
product of both; where it is known to exist, the second factor alone is left.

**What is lossless.** How many tokens the slim verifier judges of a draft depends on other sequences' tokens, and theirs on
this one's. A pending token is often one of these drafted tokens. If pending tokens of several sequences then competed for a
budget, one could be dropped because of what it is, by way of another sequence (a budget fixed beforehand does not help:
`tests/runtime/test_adaptive_laws.py` shows the wrong law). So pending tokens are held against a **floor** of earlier steps,
each sequence for itself: its survival is known before the token is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from viasd.runtime.adaptive.budget import Survivals, best_first, survivals

_CANDIDATES = 32  # budgets of the slim verifier that are tried: between neighbours the rate hardly changes


@dataclass(frozen=True)
class Budgets:
    """What one step sends to its verifiers.

    Attributes:
        slim: Drafted tokens sent to the slim verifier, over all sequences.
        floor: Least survival at the full verifier with which a pending token is sent there; infinite sends none.
    """

    slim: int
    floor: float


def pending(drafted: Sequence[float], kept_by_full: Sequence[float]) -> list[tuple[float, float]]:
    """(survival at the full verifier, chance to exist) of every pending place behind a draft.

    Args:
        drafted: Survivals ``S_1 ... S_n`` of the tokens sent to the slim verifier; without any there is no slim pass and
            nothing is pending.
        kept_by_full: Chances that the full verifier keeps the token at each place when it kept those before it, at least
            ``n + 1``.
    """
    if not drafted:
        return []
    exists = [1.0, *drafted]
    return list(zip(survivals(kept_by_full[: len(exists)]), exists, strict=True))


def best_budgets(
    drafts: Survivals,
    kept_by_full: Sequence[Sequence[float]],
    base: float,
    seconds: Callable[[float, float], float],
) -> Budgets:
    """The budgets with the best ratio of expected emitted tokens to seconds, the smallest on ties.

    A place costs the full verifier as many tokens as its chance to exist and yields its combined survival, so places are
    taken by the ratio of both, the survival at the full verifier.

    Args:
        drafts: Survivals of each sequence's draft at the slim verifier.
        kept_by_full: For each sequence the full verifier's chances at the pending places, one more than its draft is long.
        base: Tokens that the step yields without any draft: one a sequence.
        seconds: (tokens of the slim pass, expected tokens of the full pass) -> seconds of the step, drafting included. 0
            tokens are no pass.
    """
    order = [r for r, _ in best_first(drafts)]
    stride = max(1, len(order) // _CANDIDATES)
    lengths = [0] * len(drafts)
    best, rate = Budgets(0, math.inf), base / seconds(0, base)
    for b, r in enumerate(order, start=1):
        lengths[r] += 1
        if b % stride and b != len(order):
            continue
        fed = sum(n + 1 for n in lengths if n)
        places = sorted(
            (
                place
                for n, draft, chances in zip(lengths, drafts, kept_by_full, strict=True)
                for place in pending(draft[:n], chances)
            ),
            reverse=True,
        )
        expected, tokens = base, base
        for survival, exists in places:
            expected, tokens = expected + survival * exists, tokens + exists
            if expected / seconds(fed, tokens) > rate * (1 + 1e-12):
                best, rate = Budgets(b, survival), expected / seconds(fed, tokens)
    return best


def above(floor: float, reached: Sequence[float]) -> int:
    """How many pending tokens, from the first on, have at least this survival."""
    return next((i for i, survival in enumerate(reached) if not survival >= floor), len(reached))
