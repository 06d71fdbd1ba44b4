"""What the last drafts of all requests were like: the evidence that a limit of drafting is made of."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import islice

import numpy as np

from viasd.estimator import Array
from viasd.runtime.adaptive.edges import Edge

_DRAFTS = 128
_STEPS = 256  # after which a draft is forgotten, as long as enough are left
_LEAST = 8
_PLACE = 64  # rows of one place that are remembered, however long ago
_PRIOR, _PRIOR_ROWS = 0.5, 2.0  # what is believed of a place that nobody has seen, and as how many rows that counts


class RecentDrafts:
    """Features of the last drafts, up to the row at which each stopped.

    Chances are computed anew from them whenever they are asked for, by what is known then. Two memories: whole drafts, which
    fade with time; and rows by place, since drafts that are cut short say nothing of the places behind.

    Attributes:
        noted: Drafts that were seen.
    """

    def __init__(self) -> None:
        self._drafts: deque[tuple[int, list[float]]] = deque(maxlen=_DRAFTS)
        self._rows: list[deque[tuple[float, float]]] = []  # feature, and survival of the token before
        self._step = 0
        self.noted = 0

    def __len__(self) -> int:
        return len(self._drafts)

    def step(self) -> None:
        """A step begins."""
        self._step += 1
        while len(self._drafts) > _LEAST and self._drafts[0][0] < self._step - _STEPS:
            self._drafts.popleft()

    def note(self, features: Sequence[float], edge: Edge) -> None:
        """A draft of the step before: logit of the largest probability of every row that was asked for."""
        if not len(features):
            return
        reached = 1.0
        self.noted += 1
        self._drafts.append((self._step, list(features)))
        for place, feature in enumerate(features):
            if place == len(self._rows):
                self._rows.append(deque(maxlen=_PLACE))
            if math.isfinite(feature):
                self._rows[place].append((feature, reached))
                reached *= edge.chance(feature, place)

    def usual(self, edge: Edge, places: int) -> Array:
        """Mean chance of each place, ``[places]``, given that all before it are kept; an unseen one's is that before it.

        Drafts count by how likely that is: where the tokens before are sure, the next one is surer too.
        """
        found = np.empty(places)
        before = _PRIOR
        for place in range(places):
            rows = self._rows[place] if place < len(self._rows) else ()
            features, reached = np.array(rows).reshape(-1, 2).T
            chances = edge.chances_at(features, place)
            before = float((reached @ chances + _PRIOR_ROWS * before) / (reached.sum() + _PRIOR_ROWS))
            found[place] = before
        return found

    def chances(self, edge: Edge, usual: Array) -> Array:
        """Chances of every draft at every place, ``[len(self), len(usual)]``; where it did not get to, what is usual."""
        places = len(usual)
        features = np.full((len(self._drafts), places), np.nan)
        for row, (_, draft) in zip(features, self._drafts, strict=True):
            row[: len(draft)] = draft[:places]
        found = np.empty_like(features)
        for place in range(places):
            found[:, place] = edge.chances_at(features[:, place], place)
        return np.where(np.isnan(found), usual, found)

    def state(self) -> list[list[float]]:
        """The last drafts, ready for `json.dumps`; those with a row of NaN, which JSON has no word for, are left out."""
        last = islice(self._drafts, max(0, len(self._drafts) - _PLACE), None)
        return [list(draft) for _, draft in last if all(map(math.isfinite, draft))]
