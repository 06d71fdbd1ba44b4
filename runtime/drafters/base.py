"""What a drafter is: it proposes a block after a prefix and says from which laws it drew."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from viasd.draws import Draws
from viasd.rows import Rows
from viasd.runtime.passes import Steps, drive
from viasd.sampling import Ahead
from viasd.shortlist import DenseLater, ShortRow


@dataclass(frozen=True)
class Draft:
    """A proposed block.

    Attributes:
        tokens: The tokens, g of them (none where the drafter has nothing to say).
        rows: The g laws they were drawn from.
        confidence: The drafter's own probability of each token, before temperature and filters.
        logits: Raw logits of each position (``[V]``), or none where the drafter has no model.
    """

    tokens: list[int] = field(default_factory=list)
    rows: Rows = field(default_factory=lambda: Rows(tokens=()))
    confidence: list[float] = field(default_factory=list)
    logits: Sequence[Tensor] = field(default_factory=list)

    @property
    def evidence(self) -> Sequence[Tensor]:
        """`logits`, but over the words alone that the drafter knows (``[V]``, or ``[m]`` of a shortlist)."""
        return self.logits.known if isinstance(self.logits, DenseLater) else self.logits

    def first(self, n: int) -> Draft:
        """The block's first n tokens."""
        if n == len(self.tokens):
            return self
        return Draft(self.tokens[:n], self.rows.first(n), self.confidence[:n], self.logits[:n])


class DraftStop(Protocol):
    """Decides before each token of a draft whether its row is worth a pass, and then whether a token is drawn from it."""

    def asks(self, place: int) -> bool:
        """Whether the row of this place is asked for; place 0 begins a draft."""
        ...

    def draws(self, row: ShortRow) -> bool:
        """Whether a token is drawn from this row; called once for every row that was asked for.

        Args:
            row: Raw logits over the words that the drafter knows.
        """
        ...


class Drafter(Protocol):
    """Proposes tokens.

    A drafter may stop early, but only *before* drawing a token: one that was drawn is always handed over, whatever its
    value, or the output's law would change.
    """

    name: str

    def propose(self, tokens: Sequence[int], limit: int, ahead: Ahead, draws: Draws) -> Draft:
        """Proposes at most `limit` tokens after `tokens`. `ahead` holds the request's processors at that prefix."""
        ...

    def drafting(self, tokens: Sequence[int], limit: int, ahead: Ahead, draws: Draws) -> Steps[Draft]:
        """The passes of such a proposal, which is what it returns."""
        ...

    def warm(self, tokens: Sequence[int], keep: int) -> bool:
        """Runs a piece of a prompt that is too long for the first pass, of at least `keep` tokens, after it.

        Returns:
            Whether there was such a piece; if so there may be more.
        """
        ...

    def rewind(self, tokens: Sequence[int]) -> None:
        """Rolls back to a prefix, part of which may be tentative still."""
        ...

    def settle(self, tokens: Sequence[int]) -> None:
        """Rolls back to the committed tokens; also called with the prompt before the first round."""
        ...


class SteppedDrafter(ABC):
    """A drafter written as a generator of passes, so that those of many sequences can be packed."""

    @abstractmethod
    def drafting(self, tokens: Sequence[int], limit: int, ahead: Ahead, draws: Draws) -> Steps[Draft]:
        """See `Drafter`."""

    def propose(self, tokens: Sequence[int], limit: int, ahead: Ahead, draws: Draws) -> Draft:
        """See `Drafter`. Every pass runs alone."""
        return drive(self.drafting(tokens, limit, ahead, draws))

    @abstractmethod
    def warm(self, tokens: Sequence[int], keep: int) -> bool:
        """See `Drafter`."""


class PasslessDrafter(ABC):
    """A drafter that has its proposal without a pass."""

    @abstractmethod
    def propose(self, tokens: Sequence[int], limit: int, ahead: Ahead, draws: Draws) -> Draft:
        """See `Drafter`."""

    def drafting(self, tokens: Sequence[int], limit: int, ahead: Ahead, draws: Draws) -> Steps[Draft]:
        """See `Drafter`."""
        yield from ()
        return self.propose(tokens, limit, ahead, draws)

    def warm(self, tokens: Sequence[int], keep: int) -> bool:
        """See `Drafter`."""
        return False
