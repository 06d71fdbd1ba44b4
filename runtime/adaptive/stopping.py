"""When to stop drafting, for drafters that cost a pass a token: a floor under the survival of a token that is still drawn.

A token is drawn only if its survival, known from the row before it is drawn, reaches the floor, and beyond the first place
a row is asked for only if the token before it and the place's usual chance promise as much. Everything that was drawn is
verified. The floor is made of earlier steps, and each draft is held against it alone, so the outputs' laws are untouched
(policy (b) of the specification: in order, up to the first token that does not pay).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from viasd.runtime.adaptive.budget import Survivals

_FORGET = 0.99
_CANDIDATES = 64  # floors that are tried


class UsualChances:
    """Mean chance at every place of a block, fading: what a place promises whose row nobody has seen yet.

    Args:
        positions: Longest block.
    """

    def __init__(self, positions: int) -> None:
        self._sums = [0.5] * positions  # one draft's worth of "even"
        self._weights = [1.0] * positions

    def note(self, chances: Sequence[float]) -> None:
        """Chances of a draft, from its first place on."""
        for place, chance in enumerate(chances[: len(self._sums)]):
            if chance == chance:
                self._sums[place] = _FORGET * self._sums[place] + chance
                self._weights[place] = _FORGET * self._weights[place] + 1

    def at(self, place: int) -> float:
        """Of one place; beyond the longest block its last one's."""
        place = min(place, len(self._sums) - 1)
        return self._sums[place] / self._weights[place]

    def extended(self, draft: Sequence[float], length: int) -> list[float]:
        """Survivals of a draft that was stopped, gone on with to a length."""
        found = list(draft)
        while len(found) < length:
            found.append((found[-1] if found else 1.0) * self.at(len(found)))
        return found


def asks(floor: float, usual: UsualChances, reached: float, place: int) -> bool:
    """Whether the row of a place is worth a pass.

    Args:
        floor: The floor; an infinite one asks for nothing.
        usual: Chances by place.
        reached: Survival of the token before.
        place: 0 for the first.
    """
    return floor < math.inf if place == 0 else reached * usual.at(place) >= floor


def best_floor(
    drafts: Survivals,
    usual: UsualChances,
    base: float,
    drafting: Callable[[float], float],
    verifying: Callable[[float], float],
    weight: float = 1.0,
) -> float:
    """The floor with the best ratio of expected tokens to seconds, the largest on ties; infinite where drafting never pays.

    Args:
        drafts: Survivals of whole blocks, of one or several earlier steps.
        usual: Chances by place, which decide whether a row is asked for.
        base: Tokens that a step yields without any draft: one a sequence.
        drafting: Sequences -> seconds of one drafted token for each of them; 0 for none.
        verifying: Drafted tokens -> seconds of the verifier's pass over them and the step's sequences.
        weight: Of a draft in a step: 1 over the number of steps that `drafts` are of.
    """
    levels = sorted({s for draft in drafts for s in draft}, reverse=True)
    stride = max(1, len(levels) // _CANDIDATES)
    best, rate = math.inf, base / verifying(0)
    for floor in levels[stride - 1 :: stride]:
        rows: dict[int, float] = {}
        expected, tokens = base, 0.0
        for draft in drafts:
            reached = 1.0
            for place, survival in enumerate(draft):
                if not asks(floor, usual, reached, place):
                    break
                rows[place] = rows.get(place, 0.0) + weight
                if survival < floor:
                    break
                reached, expected, tokens = survival, expected + weight * survival, tokens + weight
        seconds = sum(drafting(n) for n in rows.values()) + verifying(tokens)
        if expected / seconds > rate * (1 + 1e-12):
            best, rate = floor, expected / seconds
    return best
