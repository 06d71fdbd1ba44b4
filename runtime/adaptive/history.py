"""What earlier steps of a batch saw, and when one draft is verified whole because none has been for long."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

_TYPICAL = 16  # drafts that what is typical is the mean of


class History:
    """Survivals (or chances) of each sequence's last drafts, readable from the step after the one that saw them.

    Args:
        window: How many of them.

    Attributes:
        typical: Mean of the last drafts of all sequences, that are gone too; empty while there was none.
    """

    def __init__(self, window: int) -> None:
        self.typical: list[float] = []
        self._window = window
        self._drafts: dict[int, deque[list[float]]] = {}
        self._latest: deque[list[float]] = deque(maxlen=_TYPICAL)
        self._fresh: list[tuple[int, list[float]]] = []

    def of(self, sequence: int) -> list[list[float]]:
        """A sequence's last drafts before the current step; none of a new one."""
        return list(self._drafts.get(sequence, ()))

    def expected(self, sequence: int) -> list[list[float]]:
        """The same; of a new one what is typical."""
        return self.of(sequence) or [self.typical]

    def note(self, sequence: int, draft: list[float]) -> None:
        """A draft of the current step."""
        self._fresh.append((sequence, draft))

    def publish(self) -> None:
        """The current step is over."""
        for sequence, draft in self._fresh:
            self._drafts.setdefault(sequence, deque(maxlen=self._window)).append(draft)
            self._latest.append(draft)
        if self._fresh:
            self.typical = mean_by_place(self._latest)
        self._fresh = []

    def forget(self, sequence: int) -> None:
        """A sequence has ended."""
        self._drafts.pop(sequence, None)
        self._fresh = [(s, draft) for s, draft in self._fresh if s != sequence]


def mean_by_place(drafts: Collection[Sequence[float]]) -> list[float]:
    """Mean at each place of the drafts that got there."""
    longest = max(map(len, drafts), default=0)
    places = ([draft[place] for draft in drafts if place < len(draft)] for place in range(longest))
    return [sum(place) / len(place) for place in places]


class Restart:
    """Chooses one sequence whose draft is verified whole where nothing has been admitted for long.

    Else nothing would ever be observed again. A counter decides, not what was drafted.

    Args:
        after: Steps in a row without an admitted token.

    Attributes:
        chosen: The sequence of this step, None in most.
        count: How often there was one.
    """

    def __init__(self, after: int) -> None:
        self.chosen: int | None = None
        self.count = 0
        self._after = after
        self._idle = 0
        self._admitted = 1

    def begin(self, sequences: Sequence[int]) -> None:
        """A step begins, with these sequences to choose from."""
        self._idle = 0 if self._admitted else self._idle + 1
        self._admitted = 0
        self.chosen = None
        if self._idle >= self._after and sequences:
            self.chosen = sequences[self.count % len(sequences)]
            self.count += 1
            self._idle = 0

    def admitted(self, tokens: int) -> None:
        """So many tokens of this step were admitted."""
        self._admitted += tokens
