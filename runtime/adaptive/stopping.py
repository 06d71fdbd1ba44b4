"""When to stop drafting, for drafters that cost passes: a floor under the survival of what is still drawn, and a length.

A token is drawn only if its survival, known from the row before it is drawn, reaches the floor, and beyond the first place
a row is asked for only if the token before it and the place's usual chance promise as much; and never more than so many.
A length of 0 is plain decoding. Everything that was drawn is verified. The limit is made of earlier steps, and each draft is
held against it alone, so the outputs' laws are untouched (decided before a token is drawn: policy (c) of `lossless.md`).

Why both: with a floor of 0 the lengths are the fixed blocks, so what is chosen is no worse than the best of these as far as
the chances are right; the floor then tells easy places from hard ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from viasd.estimator import Array
from viasd.runtime.adaptive.costs import StepCosts

_CANDIDATES = 24  # floors that are tried
_TIE = 1e-9


@dataclass(frozen=True)
class Limit:
    """Up to where drafts go.

    Attributes:
        places: Most tokens; 0 drafts nothing.
        floor: Least survival of a token that is drawn.
    """

    places: int
    floor: float = 0.0

    def asks(self, reached: float, usual: float, place: int) -> bool:
        """Whether the row of a place is worth a pass.

        Args:
            reached: Survival of the token before; 1 before the first.
            usual: What chance that place usually has.
            place: 0 for the first, whose row is the only way to learn anything of this draft.
        """
        return place < self.places and (place == 0 or reached * usual >= self.floor)

    def draws(self, survival: float) -> bool:
        """Whether a token of this survival is drawn; one of NaN is not."""
        return survival >= self.floor


@dataclass(frozen=True)
class Choice:
    """The best limit, and what it promises.

    Attributes:
        limit: The limit with the best rate of those that draft something.
        rate: Its expected tokens a second.
        plain: That of drafting nothing.
    """

    limit: Limit
    rate: float
    plain: float

    def pays(self, margin: float) -> bool:
        """Whether drafting promises so many times what plain decoding gives."""
        return self.rate > margin * self.plain


def best_limit(chances: Array, usual: Array, costs: StepCosts, *, floors: bool = True) -> Choice:
    """The limit with the best ratio of expected tokens to seconds; of equal ones the shortest with the highest floor.

    Args:
        chances: Of drafts of earlier steps at every place, given that the tokens before are kept, ``[D, K]``, D and K at
            least 1; where a draft did not get to, what is usual.
        usual: Chances that places usually have, ``[K]``; they decide whether a row is asked for.
        costs: Of a step.
        floors: Whether a limit may have a floor; without any its drafts are of one length.
    """
    n = costs.sequences
    chances = np.clip(np.nan_to_num(chances, nan=0.0), 0.0, 1.0)
    drafts = len(chances)
    survivals = np.asarray(chances.cumprod(axis=1), dtype=np.float64)
    before = np.hstack([np.ones((drafts, 1)), survivals[:, :-1]])
    promised = before * usual
    promised[:, 0] = math.inf
    tried = (_floors(survivals) if floors else np.zeros(1))[:, None, None]  # [F, 1, 1], falling
    reached = survivals >= tried
    wanted = promised >= tried
    drawn = np.logical_and.accumulate(reached & wanted, axis=2)  # [F, D, K]
    asked = wanted.copy()
    asked[:, :, 1:] &= drawn[:, :, :-1]
    weight = n / drafts
    rows = weight * asked.sum(axis=1)  # [F, K]
    tokens = np.cumsum(weight * drawn.sum(axis=1), axis=1)
    expected = n + np.cumsum(weight * (drawn * survivals).sum(axis=1), axis=1)
    drafting = np.cumsum(costs.drafting(rows), axis=1)
    rates = expected / (drafting + costs.verifying(tokens))
    best = rates.max()
    length, floor = np.argwhere(best * (1 - _TIE) <= rates.T)[0]
    return Choice(
        Limit(int(length) + 1, float(tried[floor, 0, 0])),
        float(rates[floor, length]),
        n / costs.nothing,
    )


def _floors(survivals: Array) -> Array:
    """Floors worth trying, falling, with 0 the last."""
    levels = np.unique(survivals)[::-1]
    stride = max(1, math.ceil(len(levels) / (_CANDIDATES - 1)))
    # A touch lower, for a row like the one that a level is of must reach it whatever rounding does.
    return np.append(levels[stride - 1 :: stride] * (1 - _TIE), 0.0)
