"""A drafter over the target's own hidden states: one small layer that says what the target is about to think."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from viasd.draws import Draws
from viasd.featuremodel import FeatureModel
from viasd.runtime.drafters.base import Draft, DraftStop, PasslessDrafter
from viasd.runtime.drafters.stepwise import draft_stepwise
from viasd.runtime.metrics import Counters
from viasd.runtime.passes import drive, timed
from viasd.runtime.target import PREFILL_CHUNK, Stopwatch, TieredTarget
from viasd.sampling import Ahead


class FeatureDrafter(PasslessDrafter):
    """Drafts with a feature drafter (`viasd.feature`): by the full verifier's states where it has run, by its own beyond.

    Its passes are so small beside the target's that they are run where they come up, whoever runs the target's.

    Entry i of its cache is made of the state at position i and the token after it. Entries that were made of the full
    verifier's states stay; those made of the drafter's own are made anew when the verifier's come in.

    Args:
        model: The drafter on its target.
        target: The sequence's target, which from now on hands over the states of every full pass.
        counters: Where calls, tokens fed and seconds are added up.
        min_confidence: See `draft_stepwise`.
        stop_tokens: See `draft_stepwise`.

    Attributes:
        least: See `draft_stepwise`; a pace that knows what a token costs sets it.
        stop: See `ModelLine`.
    """

    def __init__(
        self,
        model: FeatureModel,
        target: TieredTarget,
        counters: Counters,
        *,
        min_confidence: float = 0.0,
        stop_tokens: frozenset[int] = frozenset(),
    ) -> None:
        self.name = "feature"
        self.least = 0.0
        self.stop: DraftStop | None = None
        self._model = model
        self._counters = counters
        # A pass is not waited for: drawing from its rows does that, within the same tier's time.
        self._watch = Stopwatch(counters.seconds_by_tier, "drafter", None)
        self._min_confidence = min_confidence
        self._stop_tokens = stop_tokens
        self._kv = model.new_kv()
        self._exact = 0  # entries made of the verifier's states
        self._states: list[Tensor] = []  # of the positions from there on, in order
        self._made: Tensor | None = None  # results of the last exact entries, [1, n, d]
        self._last: Tensor | None = None  # result that the next token of a block goes by
        self._prefix: Sequence[int] = ()
        target.on_states = self._receive

    def propose(self, tokens: Sequence[int], limit: int, ahead: Ahead, draws: Draws) -> Draft:
        """See `Drafter`. After a single token, which has no state before it, it has nothing to say."""
        limit = min(limit, self._model.file.shape.context - len(tokens))
        self._prefix = tokens
        steps = draft_stepwise(
            self,
            tokens,
            limit if self._can_speak(tokens) else 0,
            ahead,
            draws,
            min_confidence=self._min_confidence,
            stop_tokens=self._stop_tokens,
            stop=self.stop,
            least=self.least,
        )
        return drive(timed(steps, self._watch))

    def rewind(self, tokens: Sequence[int]) -> None:
        """See `Drafter`. A state belongs to its prefix, so those of tokens that are gone go too."""
        self._shrink(len(tokens) - 1)

    settle = rewind

    @property
    def _known(self) -> int:
        """Positions of which the verifier's state has been handed over."""
        return self._exact + sum(part.shape[1] for part in self._states)

    def _can_speak(self, tokens: Sequence[int]) -> bool:
        return len(tokens) > 1 and (bool(self._states) or self._made is not None)

    def _receive(self, start: int, hidden: Tensor) -> None:
        """States ``[1, n, d]`` of the positions from `start` on."""
        self._shrink(start)
        if start == self._known:
            self._states.append(hidden)

    def _shrink(self, length: int) -> None:
        """Keeps states and entries of the first `length` positions."""
        self._kv.roll_back(min(self._exact, length))
        if length < self._exact:
            # Results older than the last pass are gone; without any it is silent until states come in.
            kept = 0 if self._made is None else self._made.shape[1] - (self._exact - length)
            self._made = self._made[:, :kept] if self._made is not None and kept > 0 else None
            self._exact, self._states = max(length, 0), []
            return
        left = length - self._exact
        kept_states: list[Tensor] = []
        for part in self._states:
            if left > 0:
                kept_states.append(part[:, :left])
            left -= part.shape[1]
        self._states = kept_states

    def rows(self, tokens: Sequence[int], n: int) -> Tensor:
        """See `RowSource`: one row, after the whole prefix at the beginning of a block, after one more token later on."""
        with self._watch:
            if tokens is self._prefix:
                hidden = self._caught_up()
            else:
                assert self._last is not None  # a block begins with its prefix
                hidden = self._ran(self._last, tokens)
            self._last = hidden[:, -1:]
            return self._model.logits(self._last)

    def _caught_up(self) -> Tensor:
        """Result at the end of the prefix: exact entries in one pass, one by one where the verifier has not been."""
        tokens, kv = self._prefix, self._kv
        kv.roll_back(self._exact)
        if self._states:
            states = self._states[0] if len(self._states) == 1 else torch.cat(self._states, dim=1)
            states = states[:, : len(tokens) - 1 - self._exact]
            for part in states.split(PREFILL_CHUNK, dim=1):
                first = kv.full_len + 1
                self._made = self._ran(part, tokens[first : first + part.shape[1]])
            self._exact, self._states = kv.full_len, []
        assert self._made is not None  # see _can_speak
        hidden = self._made[:, -1:]
        for token in tokens[self._exact + 1 :]:
            hidden = self._ran(hidden, [token])
        return hidden

    def _ran(self, states: Tensor, following: Sequence[int]) -> Tensor:
        self._counters.drafter_calls += 1
        self._counters.drafter_tokens_fed += len(following)
        return self._model.run(states, following, self._kv)
