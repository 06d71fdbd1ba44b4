"""A drafter that is a model of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from viasd.attention import Segment
from viasd.draws import Draws
from viasd.layered import LayeredModel
from viasd.runtime.drafters.base import Draft, SteppedDrafter
from viasd.runtime.drafters.stepwise import draft_stepwise
from viasd.runtime.metrics import Counters
from viasd.runtime.passes import Steps, timed
from viasd.runtime.target import PREFILL_CHUNK, Stopwatch
from viasd.sampling import Ahead


class ModelDrafter(SteppedDrafter):
    """Drafts with a small model that shares the target's tokenizer.

    Args:
        model: The drafter, its vocabulary cut to what both tokenizers share.
        counters: Where calls, tokens fed and seconds are added up.
        min_confidence: See `draft_stepwise`.
        stop_tokens: See `draft_stepwise`.
        readout: Hidden states ``[1, n, d]`` -> raw logits ``[n, V]`` in the place of the model's own, where only some words
            are wanted.
    """

    def __init__(
        self,
        model: LayeredModel,
        counters: Counters,
        *,
        min_confidence: float = 0.0,
        stop_tokens: frozenset[int] = frozenset(),
        readout: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.name = "model"
        self._readout = readout or model.readout
        self.model = model
        self.kv = model.new_kv()
        self._counters = counters
        # A pass is not waited for: drawing from its rows does that, within the same tier's time.
        self._watch = Stopwatch(counters.seconds_by_tier, "drafter", None)
        self._min_confidence = min_confidence
        self._stop_tokens = stop_tokens

    def drafting(self, tokens: Sequence[int], limit: int, ahead: Ahead, draws: Draws) -> Steps[Draft]:
        """See `Drafter`. Beyond its own context, which may be shorter than the target's, it proposes nothing."""
        steps = draft_stepwise(
            self,
            tokens[self.kv.full_len :],
            min(limit, self.model.context_length - len(tokens)),
            ahead,
            draws,
            min_confidence=self._min_confidence,
            stop_tokens=self._stop_tokens,
        )
        return timed(steps, self._watch)

    def rewind(self, tokens: Sequence[int]) -> None:
        """See `Drafter`."""
        self.kv.roll_back(len(tokens) - 1)

    settle = rewind

    @property
    def context_length(self) -> int:
        """See `BlockDrafter`."""
        return self.model.context_length

    def begin(self, tokens: Sequence[int]) -> int:
        """See `BlockDrafter`."""
        return self.kv.full_len

    def keep(self, length: int) -> None:
        """See `BlockDrafter`."""
        self.kv.roll_back(length)

    def rows(self, tokens: Sequence[int], n: int) -> Tensor:
        """See `BlockDrafter`. A prompt goes in pieces."""
        self._counters.drafter_calls += 1
        self._counters.drafter_tokens_fed += len(tokens)
        with self._watch:
            done = 0
            while len(tokens) - done > max(PREFILL_CHUNK, n):
                self._run(tokens[done : done + PREFILL_CHUNK])
                done += PREFILL_CHUNK
            return self._readout(self._run(tokens[done:])[:, -n:])

    def _run(self, tokens: Sequence[int]) -> Tensor:
        kv, model = self.kv, self.model
        step = model.step([Segment(kv, kv.full_len, len(tokens))])
        hidden, _ = model.run(model.embed(tokens), range(model.n_layers), step)
        kv.full_len = kv.slim_len = kv.full_len + len(tokens)
        return hidden
