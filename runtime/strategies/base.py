"""What a strategy is: one round of drafting and verifying, as tokens with the tier each came from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from viasd.draws import Draws
from viasd.runtime.metrics import Counters
from viasd.runtime.passes import FullPass, Steps, drive
from viasd.runtime.target import Target
from viasd.sampling import Sampler


@dataclass(frozen=True)
class Emission:
    """The outcome of a round, before it is cut at the end of the answer.

    Attributes:
        tokens: At least one token.
        tiers: Where each came from: ``drafter``, ``slim`` or ``full``.
        logits: Raw rows ``[n, V]`` each was finally decided by (for stateful logits processors).
        drafted: For each token, whether it is the one the drafter proposed there.
        unseen: How many of them, from the first on, the full verifier has not tested (`via` mode).
    """

    tokens: list[int]
    tiers: list[str]
    logits: Tensor
    drafted: list[bool]
    unseen: int = 0


class Strategy(Protocol):
    """Decodes one sequence, round by round. It reads committed tokens and never changes them."""

    def round(self, tokens: Sequence[int], room: int) -> Emission:
        """One round after `tokens`, of which at most `room` tokens are still wanted (at least 1)."""
        ...

    def steps(self, tokens: Sequence[int], room: int) -> Steps[Emission]:
        """The passes of such a round, whose outcome it returns."""
        ...


class SteppedStrategy(ABC):
    """A strategy written as a generator of passes, so that those of many sequences can be packed."""

    @abstractmethod
    def steps(self, tokens: Sequence[int], room: int) -> Steps[Emission]:
        """See `Strategy`."""

    def round(self, tokens: Sequence[int], room: int) -> Emission:
        """See `Strategy`. Every pass runs alone."""
        return drive(self.steps(tokens, room))


class SolitaryStrategy(ABC):
    """A strategy that runs its passes itself: none of them can be shared."""

    @abstractmethod
    def round(self, tokens: Sequence[int], room: int) -> Emission:
        """See `Strategy`."""

    def steps(self, tokens: Sequence[int], room: int) -> Steps[Emission]:
        """See `Strategy`."""
        yield from ()
        return self.round(tokens, room)


@dataclass(frozen=True)
class Workbench:
    """What every strategy of one request works with."""

    target: Target
    sampler: Sampler
    draws: Draws
    counters: Counters


def full_step(bench: Workbench, tokens: Sequence[int]) -> Steps[Emission]:
    """One token from the full verifier: plain decoding."""
    logits = yield FullPass(bench.target, tokens, 1)
    token = bench.draws.token(bench.sampler.ahead(tokens).row(logits[0]))
    return Emission([token], ["full"], logits, [False])
