"""One request of an engine: where it stands, and what it waits for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from viasd.runtime.answer import Answer
from viasd.runtime.metrics import Counters
from viasd.runtime.passes import Steps, Work
from viasd.runtime.result import Result
from viasd.runtime.strategies import Emission


class EngineEvent(NamedTuple):
    """A piece of one of the answers.

    Attributes:
        request: Whose it is.
        text: Text delta; empty while a character is incomplete or a stop string may be beginning.
        token_ids: The tokens it covers.
        tier: Where the last of them came from; empty where there is none.
        stats: The running counts.
        result: The whole answer, in a request's last event.
        selected_layers: Of these tokens; see `Result`.
    """

    request: int
    text: str
    token_ids: list[int]
    tier: str
    stats: Counters
    result: Result | None = None
    selected_layers: Sequence[int | None] = ()


class Request:
    """A request that has not ended.

    Args:
        number: Its number.
        answer: Its answer in the making.
        needed: Bytes of keys and values it can need.

    Attributes:
        work: What its round waits for; None while no round is under way.
        outcome: What its last round came to, until it is taken.
    """

    def __init__(self, number: int, answer: Answer, needed: int) -> None:
        self.number = number
        self.answer = answer
        self.needed = needed
        self.work: Work | None = None
        self.outcome: tuple[Emission, str | None] | None = None
        self._steps: Steps[tuple[Emission, str | None]] | None = None
        self._warm = answer.drafter is None or len(answer.prompt) == 1

    @property
    def piece(self) -> int:
        """Tokens of the next piece of its prompt; 0 where all of it has been run."""
        done, end = self.answer.target.kv.full_len, len(self.answer.prompt) - 1
        return min(self.answer.target.chunk, end - done) if self._steps is None and done < end else 0

    @property
    def ready(self) -> bool:
        """Whether the prompt has been run, as far as it is not the first round's."""
        return self._warm and not self.piece

    def warm_up(self) -> None:
        """Runs a piece of the prompt through the drafter, where it is too long for the first round."""
        answer = self.answer
        if not self._warm:
            assert answer.drafter is not None
            started = time.perf_counter()
            self._warm = not answer.drafter.warm(answer.prompt, answer.config.decoding.gamma + 1)
            answer.spent(time.perf_counter() - started)

    def begin_round(self) -> None:
        """Starts a round; the first one on the committed prompt."""
        answer = self.answer
        if self._steps is None and answer.drafter is not None:
            started = time.perf_counter()
            answer.drafter.settle(answer.tokens)
            answer.spent(time.perf_counter() - started)
        self._steps = answer.round()
        self.advance(None)

    def advance(self, reply: Any) -> None:
        """Goes on with what it waited for, to the next piece of work or the end of the round."""
        assert self._steps is not None
        started = time.perf_counter()
        try:
            self.work = self._steps.send(reply)
        except StopIteration as end:
            self.work, self.outcome = None, end.value
        finally:
            self.answer.spent(time.perf_counter() - started)

    def drop(self) -> None:
        """Forgets the round that is under way."""
        if self._steps is not None:
            self._steps.close()
        self._steps = self.work = self.outcome = None

    def charge(self, tier: str, seconds: float) -> None:
        """Its share of a pass that it was part of."""
        self.answer.counters.seconds_by_tier[tier] += seconds
        self.answer.spent(seconds)
