"""A drafter whose own tokens are drafted by prompt lookup: the vertical cascade of CS Drafting (Chen et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from viasd.draws import Draws
from viasd.rows import Row, Rows
from viasd.runtime.drafters.base import Draft, Drafter, SteppedDrafter
from viasd.runtime.drafters.lookup import LookupDrafter
from viasd.runtime.judge import judge_block
from viasd.runtime.metrics import Counters
from viasd.runtime.passes import DraftPass, RowSource, Steps, timed
from viasd.runtime.target import Stopwatch
from viasd.sampling import Ahead, Sampler
from viasd.shortlist import ShortRows


class BlockDrafter(Drafter, RowSource, Protocol):
    """A drafter that is a model, and so can run several tokens in one pass."""

    @property
    def context_length(self) -> int:
        """Positions it was made for."""
        ...

    def begin(self, tokens: Sequence[int]) -> int:
        """Starts a block after `tokens`; returns how many of them have been run."""
        ...

    def keep(self, length: int) -> None:
        """Forgets all but the first `length` positions."""
        ...


class VerticalDrafter(SteppedDrafter):
    """Drafts by speculative decoding of its own: lookup proposes, the drafter model decides by the exact rule.

    What it proposes has the drafter model's law p, so whoever verifies it need not know.

    Args:
        model: The drafter.
        sampler: The request's sampler.
        counters: Where seconds are added up.
        stop_tokens: After one of these there is nothing left to draft.
    """

    def __init__(
        self, model: BlockDrafter, sampler: Sampler, counters: Counters, *, stop_tokens: frozenset[int] = frozenset()
    ) -> None:
        self.name = "vertical"
        self._model = model
        self._sampler = sampler
        self._counters = counters
        # Its seconds lie inside this drafter's own, so they are counted nowhere else.
        self._lookup = LookupDrafter(Counters(), stop_tokens=stop_tokens)
        self._stop_tokens = stop_tokens

    def drafting(self, tokens: Sequence[int], limit: int, ahead: Ahead, draws: Draws) -> Steps[Draft]:
        """See `Drafter`."""
        steps = self._steps(tokens, min(limit, self._model.context_length - len(tokens)), draws)
        return timed(steps, Stopwatch(self._counters.seconds_by_tier, "drafter", None))

    def warm(self, tokens: Sequence[int], keep: int) -> bool:
        """See `Drafter`."""
        return self._model.warm(tokens, keep)

    def rewind(self, tokens: Sequence[int]) -> None:
        """See `Drafter`."""
        self._model.rewind(tokens)

    def settle(self, tokens: Sequence[int]) -> None:
        """See `Drafter`."""
        self._model.settle(tokens)
        self._lookup.settle(tokens)

    def _steps(self, tokens: Sequence[int], limit: int, draws: Draws) -> Steps[Draft]:
        proposed: list[int] = []
        laws: list[Row] = []
        raw: list[Tensor] = []
        run = self._model.begin(tokens)
        while len(proposed) < limit and not self._stop_tokens.intersection(proposed):
            prefix = [*tokens, *proposed]
            # The drafter model adds a token of its own.
            room = limit - len(proposed) - 1
            guess = yield from self._lookup.drafting(prefix, room, self._sampler.ahead(prefix), draws)
            said = yield DraftPass(self._model, [*prefix, *guess.tokens][run:], len(guess.tokens) + 1)
            logits = said.dense if isinstance(said, ShortRows) else said
            ahead = self._sampler.ahead(tokens)
            if raw:
                ahead.block(torch.stack(raw), proposed)
            verdict, rows = judge_block(logits, guess.tokens, guess.rows, self._sampler, ahead, draws)
            n = verdict.accepted
            proposed += [*guess.tokens[:n], verdict.token]
            laws += [rows[i] for i in range(n + 1)]
            raw += list(logits[: n + 1])
            run = len(prefix) + n
            self._model.keep(run)
        if not proposed:
            return Draft()
        top = torch.softmax(torch.stack(raw), dim=-1)
        confidence: list[float] = top[torch.arange(len(proposed)), proposed].tolist()
        return Draft(proposed, Rows.joined(laws), confidence, raw)
