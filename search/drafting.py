"""The pair's drafter along a text that is already there: what it would say at every scored position."""

from __future__ import annotations

import torch
from torch import Tensor

from viasd.errors import OptionError
from viasd.pair import Pair
from viasd.routes import Route
from viasd.runtime.config import SELF_SKIP
from viasd.runtime.drafters import LookupDrafter
from viasd.runtime.drafters.along import has_states, readout_of, states_along
from viasd.runtime.metrics import Counters
from viasd.search.scorer import ROWS, Scorer

NOTHING = -1


class TeacherForced:
    """The drafter's tokens at temperature 0, on the text of one scorer.

    Args:
        pair: The pair.
        scorer: Holds the text.
    """

    def __init__(self, pair: Pair, scorer: Scorer) -> None:
        self._scorer = scorer
        self._fixed: Tensor | None = None
        if has_states(pair):
            self._fixed = _model_tokens(pair, scorer)
        elif pair.drafter_kind != "self":
            self._fixed = _lookup_tokens(scorer)

    def tokens(self, route: Route) -> Tensor:
        """A token ``[N]`` for every scored position, `NOTHING` where the drafter has none.

        Args:
            route: Layers of the slim verifier; the self drafter keeps some of them.
        """
        return self._scorer.answers(route.thinned(SELF_SKIP)) if self._fixed is None else self._fixed


def refuse_two_drafters(pair: Pair) -> None:
    """A search follows one drafter along its text.

    Raises:
        OptionError: If lookup is asked before another drafter.
    """
    if pair.lookup_first:
        raise OptionError(
            "a search follows one drafter along its text, but this one is two, lookup first; search with the drafter behind "
            "lookup+ alone, its masks serve both"
        )


def _model_tokens(pair: Pair, scorer: Scorer) -> Tensor:
    found = []
    readout = readout_of(pair)
    with torch.inference_mode():
        for text in scorer.texts:
            scored = states_along(pair, text.tokens)[:, text.start : text.start + text.length]
            found += [readout(chunk).argmax(dim=-1).cpu() for chunk in scored.split(ROWS, dim=1)]
    return torch.cat(found)


def _lookup_tokens(scorer: Scorer) -> Tensor:
    found: list[int] = []
    for text in scorer.texts:
        lookup = LookupDrafter(Counters())
        for end in range(text.start + 1, text.start + text.length + 1):
            token = lookup.next_token(text.tokens[:end])
            found.append(NOTHING if token is None else token)
    return torch.tensor(found)
