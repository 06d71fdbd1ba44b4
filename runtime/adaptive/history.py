"""What earlier steps of a batch saw, and when one draft is verified whole because none has been for long."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


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
