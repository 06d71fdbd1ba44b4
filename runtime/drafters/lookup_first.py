"""A drafter that looks up first and asks a model where there is nothing to be found."""

from __future__ import annotations

from collections.abc import Sequence

from viasd.draws import Draws
from viasd.runtime.drafters.base import Draft, Drafter, SteppedDrafter
from viasd.runtime.drafters.lookup import LookupDrafter
from viasd.runtime.passes import Steps
from viasd.sampling import Ahead

#: Shortest n-gram that lookup is believed on without further knowledge: one word that occurred before says little.
SHORTEST = 2


class LookupFirstDrafter(SteppedDrafter):
    """Prompt lookup where the last words have occurred before, else a drafter model.

    Which of them is asked follows from the text before the block alone, so whatever is drawn is tested against the law it
    was drawn from.

    Args:
        lookup: Asked first.
        model: Asked where the other has nothing to say.

    Attributes:
        shortest: Least length of the n-gram that lookup is believed on.
        choice: Set by a pace that knows better for the next block: ``lookup`` or ``model``; None goes by `shortest`.
    """

    def __init__(self, lookup: LookupDrafter, model: Drafter, shortest: int = SHORTEST) -> None:
        self.name = f"lookup+{model.name}"
        self.lookup = lookup
        self.model = model
        self.shortest = shortest
        self.choice: str | None = None

    def drafting(self, tokens: Sequence[int], limit: int, ahead: Ahead, draws: Draws) -> Steps[Draft]:
        """See `Drafter`."""
        choice, self.choice = self.choice, None
        if choice == "lookup" or (choice is None and self.lookup.match(tokens) >= self.shortest):
            draft = self.lookup.propose(tokens, limit, ahead, draws)
            if draft.tokens:
                return draft
        return (yield from self.model.drafting(tokens, limit, ahead, draws))

    def warm(self, tokens: Sequence[int], keep: int) -> bool:
        """See `Drafter`."""
        return self.model.warm(tokens, keep)

    def rewind(self, tokens: Sequence[int]) -> None:
        """See `Drafter`."""
        self.lookup.rewind(tokens)
        self.model.rewind(tokens)

    def settle(self, tokens: Sequence[int]) -> None:
        """See `Drafter`."""
        self.lookup.settle(tokens)
        self.model.settle(tokens)
