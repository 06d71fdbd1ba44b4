"""One answer made alone: strategy rounds until an end is reached, as text deltas with their tier."""

from __future__ import annotations

from collections.abc import Iterator

from viasd.errors import OptionError
from viasd.runtime.answer import Answer, Event
from viasd.runtime.rounds import Ending, cut, rounds


class Session(Answer):
    """Iterates over the events of one answer; `result` holds the whole of it afterwards. Arguments as for `Answer`."""

    def __iter__(self) -> Iterator[Event]:
        # Inference mode is entered around each round and not around a yield: whoever holds the iterator keeps their own.
        if self.result is not None:
            raise OptionError("a session makes one answer, and this one has been made; start another")
        steps = rounds(self._strategy, self.target, self.drafter, self.sampler, self.tokens, self.ending)
        reason: str | None = None
        try:
            with self.working():
                self.target.prefill(self.tokens[:-1])
            while reason is None:
                with self.working():
                    emission, reason = next(steps)
                yield from self.take(emission)
            if (rest := self.rest()) is not None:
                yield rest
        finally:
            self.finish(reason or "interrupted")


__all__ = ["Ending", "Event", "Session", "cut", "rounds"]
