"""A drafter over the target's own hidden states: one small layer that says what the target is about to think."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from viasd.draws import Draws
from viasd.featuremodel import Entries, FeatureModel
from viasd.runtime.drafters.base import Draft, DraftStop, SteppedDrafter
from viasd.runtime.drafters.stepwise import draft_stepwise
from viasd.runtime.metrics import Counters
from viasd.runtime.passes import Steps, timed
from viasd.runtime.target import PREFILL_CHUNK, Stopwatch, TieredTarget
from viasd.sampling import Ahead
from viasd.shortlist import ShortRows


class FeatureDrafter(SteppedDrafter):
    """Drafts with a feature drafter (`viasd.feature`): by the full verifier's states where it has run, by its own beyond.

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
        model: The drafter on its target.
        stop: See `ModelLine`.
        watch: See `ModelLine`.
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
        self.model = model
        self._counters = counters
        # A pass is not waited for: drawing from its rows does that, within the same tier's time.
        self.watch = Stopwatch(counters.seconds_by_tier, "drafter", None)
        self._min_confidence = min_confidence
        self._stop_tokens = stop_tokens
        self._kv = model.new_kv()
        self._exact = 0  # entries made of the verifier's states
        self._states: list[Tensor] = []  # of the positions from there on, in order
        self._known = 0  # positions of which the verifier's state has been handed over, those of entries included
        self._made: Tensor | None = None  # results of the last exact entries, [1, n, d]
        self._last: Tensor | None = None  # result that the next token of a block goes by; None at its beginning
        self._length = 0  # entries of the cache behind which that result is
        target.on_states = self._receive

    def drafting(self, tokens: Sequence[int], limit: int, ahead: Ahead, draws: Draws) -> Steps[Draft]:
        """See `Drafter`. After a single token, which has no state before it, it has nothing to say."""
        limit = min(limit, self.model.file.shape.context - len(tokens))
        self._last = None
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
        return timed(steps, self.watch)

    def warm(self, tokens: Sequence[int], keep: int) -> bool:
        """See `Drafter`. A prompt's states come with the target's passes, and are run before the first draft."""
        return False

    def rewind(self, tokens: Sequence[int]) -> None:
        """See `Drafter`. A state belongs to its prefix, so those of tokens that are gone go too."""
        self._shrink(len(tokens) - 1)

    settle = rewind

    def _can_speak(self, tokens: Sequence[int]) -> bool:
        return len(tokens) > 1 and (bool(self._states) or self._made is not None)

    def _receive(self, start: int, hidden: Tensor) -> None:
        """States ``[1, n, d]`` of the positions from `start` on."""
        self._shrink(start)
        if start == self._known:
            if self._states:  # nobody has drafted from these yet, and it may be long until somebody does
                self._states[-1] = _own(self._states[-1])
            self._states.append(hidden)
            self._known += hidden.shape[1]

    def _shrink(self, length: int) -> None:
        """Keeps states and entries of the first `length` positions."""
        self._kv.roll_back(min(self._exact, length))
        if length < self._exact:
            # Results older than the last pass are gone; without any it is silent until states come in.
            kept = 0 if self._made is None else self._made.shape[1] - (self._exact - length)
            self._made = self._made[:, :kept] if self._made is not None and kept > 0 else None
            self._known = self._exact = max(length, 0)
            self._states = []
            return
        # From the end, since a request that drafts nothing for a while has many.
        while self._known > length:
            last = self._states.pop()
            before = self._known - last.shape[1]
            if before < length:
                self._states.append(last[:, : length - before])
            self._known = max(before, length)

    def rows(self, tokens: Sequence[int], n: int) -> ShortRows:
        """See `RowSource`: one row, after the whole prefix at the beginning of a block, after one more token later on."""
        with self.watch:
            return run_features([(self, tokens, n)])[0]

    def due(self, tokens: Sequence[int]) -> int:
        """Entries that the pass for these tokens has to run."""
        return len(tokens) if self._last is not None else len(tokens) - 1 - self._exact

    def entries(self, tokens: Sequence[int]) -> Generator[Entries, Tensor, Tensor]:
        """What is to be run for a row, part after part, each answered with its results: ``[1, n, d]``.

        Nothing is lost if it is given up on the way: asked again, it begins anew.

        Returns:
            The result that the row is read from, ``[1, 1, d]``.
        """
        if self._last is not None:
            self._kv.roll_back(self._length)
            return (yield from self._part(self._last, tokens))
        # Exact entries in few passes, then one by one where the verifier has not been.
        kv = self._kv
        kv.roll_back(self._exact)
        if self._states:
            states = self._states[0] if len(self._states) == 1 else torch.cat(self._states, dim=1)
            states = states[:, : len(tokens) - 1 - self._exact]
            made = None
            for part in states.split(PREFILL_CHUNK, dim=1):
                first = kv.full_len + 1
                made = yield from self._part(part, tokens[first : first + part.shape[1]])
            self._made, self._exact, self._known, self._states = made, kv.full_len, kv.full_len, []
        assert self._made is not None  # see _can_speak
        hidden = self._made[:, -1:]
        for token in tokens[self._exact + 1 :]:
            hidden = yield from self._part(hidden, [token])
        return hidden[:, -1:]

    def spoke(self, last: Tensor, passes: int, entries: int) -> None:
        """A row was read from this result, after so many passes over so many entries."""
        self._last, self._length = last, self._kv.full_len
        self._counters.drafter_calls += passes
        self._counters.drafter_tokens_fed += entries

    def _part(self, states: Tensor, following: Sequence[int]) -> Generator[Entries, Tensor, Tensor]:
        kv = self._kv
        made = yield Entries(states, following, kv)
        kv.full_len = kv.slim_len = kv.full_len + len(following)
        return made


def run_features(wanted: Sequence[tuple[FeatureDrafter, Sequence[int], int]]) -> list[ShortRows]:
    """Rows of drafters of one model, in one pass and one readout; in more passes where one's entries build on each other.

    Args:
        wanted: For each drafter its tokens (`FeatureDrafter.rows`) and how many rows, which is one.
    """
    model = wanted[0][0].model
    asked = [drafter.entries(tokens) for drafter, tokens, _ in wanted]
    passes, entries = [0] * len(wanted), [0] * len(wanted)
    last: dict[int, Tensor] = {}
    replies: dict[int, Tensor | None] = dict.fromkeys(range(len(wanted)))
    while replies:
        parts: dict[int, Entries] = {}
        for index, reply in replies.items():
            try:
                # A generator that has just begun takes None alone.
                parts[index] = next(asked[index]) if reply is None else asked[index].send(reply)
            except StopIteration as end:
                last[index] = end.value
        made = model.together(list(parts.values())) if parts else []
        replies = dict(zip(parts, made, strict=True))
        for index, part in parts.items():
            passes[index] += 1
            entries[index] += len(part.following)
    rows = model.logits.last([last[index] for index in range(len(wanted))], [n for _, _, n in wanted])
    for index, (drafter, _, _) in enumerate(wanted):
        drafter.spoke(last[index], passes[index], entries[index])
    return rows


def _own(states: Tensor) -> Tensor:
    """The same states, without those of other sequences that lie in memory beside them."""
    return states if states.untyped_storage().nbytes() == states.nbytes else states.clone()
