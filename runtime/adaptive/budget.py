"""How many drafted tokens are worth verifying, and which: pure functions of chances and seconds.

Every sequence of a step has a draft. The chance that its j-th token is kept when those before it were is ``c_j``; its
**survival** is ``S_j = c_1 ... c_j``. Verifying the B tokens of largest survival yields ``E(B) = N + sum of these S`` tokens
in ``seconds(B)``. Survivals of one sequence never rise, so the B largest are a prefix of every draft.

**What is lossless.** A row is known before the token is drawn from it, so ``S_j`` depends on the tokens before the j-th
alone. Admitting the B largest is the same as admitting one token at a time, always the best of the next ones, B times: each
decision is made before the admitted token's value is looked at, and values of tokens that were not admitted are never
looked at. So with B fixed beforehand (`allocate` with a budget of earlier steps: *stale*), or with a rule that stops by the
tokens admitted so far (`in_order`), every output has exactly the target's law, and outputs are independent. `best_budget` of
the current survivals is something else: whether a token is admitted may depend on the survivals behind it, that is, on its
own value. It is for greedy targets, whose output is the same whatever is admitted, and for planning the next step.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

Survivals = Sequence[Sequence[float]]
Seconds = Callable[[float], float]
_TIE = 1e-12  # relative: what differs by less than this is rounding


def survivals(chances: Sequence[float]) -> list[float]:
    """Chances that the first j tokens of a draft are all kept, j = 1 ...; a chance that is no number counts as 0."""
    sound = (0.0 if math.isnan(c) else min(1.0, max(0.0, c)) for c in chances)
    return list(accumulate(sound, lambda s, c: s * c))


def best_first(drafts: Survivals) -> Iterator[tuple[int, float]]:
    """(sequence, survival) of every drafted token by key (-survival, position, sequence), each read when it is reached.

    The survival behind a token is not looked at before that token was yielded.
    """
    queue = [(-s[0], 0, r) for r, s in enumerate(drafts) if len(s)]
    heapq.heapify(queue)
    while queue:
        negative, position, r = queue[0]
        yield r, -negative
        if position + 1 < len(drafts[r]):
            heapq.heapreplace(queue, (-drafts[r][position + 1], position + 1, r))
        else:
            heapq.heappop(queue)


def allocate(drafts: Survivals, budget: int) -> list[int]:
    """Tokens of each draft among the `budget` of largest survival, by key (-survival, position, sequence).

    Args:
        drafts: Survivals of each sequence's draft, never rising.
        budget: Tokens in all; what exceeds the drafts is left over.

    Returns:
        Length of the admitted prefix of each draft.
    """
    lengths = [0] * len(drafts)
    if budget > 0:
        for taken, (r, _) in enumerate(best_first(drafts), start=1):
            lengths[r] += 1
            if taken >= budget:
                break
    return lengths


def best_budget(gains: Sequence[float], base: float, seconds: Seconds, margin: float = 1.0) -> int:
    """``argmax (base + gains[0] + ... + gains[B-1]) / seconds(B)``, the smallest B on ties.

    Args:
        gains: What each further token adds to the expected yield, largest first.
        base: Tokens that the step yields without any (one a sequence).
        seconds: Seconds of the step with B tokens more than its sequences; above 0.
        margin: How many times the rate without any tokens a budget must promise, at least 1.
    """
    best, rate = 0, margin * base / seconds(0)
    expected = base
    for b, gain in enumerate(gains, start=1):
        expected += gain
        if expected / seconds(b) > rate * (1 + _TIE):
            best, rate = b, expected / seconds(b)
    return best


def in_order(drafts: Survivals, base: float, seconds: Seconds) -> list[int]:
    """Admits the tokens of largest survival one by one and stops at the first that does not pay.

    A token pays if it raises ``E(B) / seconds(B)``.

    Args:
        drafts: Survivals of each sequence's draft.
        base: Tokens that the step yields without any.
        seconds: Seconds of the step with B tokens more than its sequences.

    Returns:
        Length of the admitted prefix of each draft.
    """
    lengths = [0] * len(drafts)
    expected = base
    for b, (r, survival) in enumerate(best_first(drafts), start=1):
        if not (expected + survival) / seconds(b) > expected / seconds(b - 1) * (1 + _TIE):
            break
        expected += survival
        lengths[r] += 1
    return lengths


def pooled(steps: Sequence[Survivals]) -> list[float]:
    """What a typical step's tokens add, largest first: the mean of the earlier steps' own curves.

    Args:
        steps: For each sequence, the survivals of its last drafts (one or more).

    Returns:
        As many gains as a step has tokens: the b-th is the mean of what lies between the (b-1)-th and the b-th token of the
        drafts laid together, each counting 1 / (drafts of its sequence).
    """
    weighted = sorted(((s, 1 / len(drafts)) for drafts in steps for draft in drafts for s in draft), reverse=True)
    gains: list[float] = []
    gain, room = 0.0, 1.0
    for survival, weight in weighted:
        while weight > 0:
            taken = min(weight, room)
            gain, room, weight = gain + taken * survival, room - taken, weight - taken
            if room < _TIE:
                gains.append(gain)
                gain, room = 0.0, 1.0
            if weight < _TIE:
                break
    if room < 1 - 1e-9:
        gains.append(gain)
    return gains
