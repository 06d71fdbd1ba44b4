"""One row of a transformers request: its stopping criteria, its streamer, its scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import EosTokenCriteria, StoppingCriteriaList

from viasd.heads import LightHeads
from viasd.mask import LayerMask
from viasd.pair import Pair
from viasd.runtime.config import GenerationConfig
from viasd.runtime.guard import Guard
from viasd.runtime.hf.prepared import PreparedSampler
from viasd.runtime.result import Result
from viasd.runtime.rounds import shortened
from viasd.runtime.session import Session
from viasd.runtime.strategies import Emission


@dataclass(frozen=True)
class Wanted:
    """What a request wants of every row.

    Attributes:
        criteria: The prepared stopping criteria.
        streamer: Is shown every token, or None.
        scores: Whether processed scores are returned (and shown to the criteria).
        logits: Whether raw logits are returned.
    """

    criteria: StoppingCriteriaList
    streamer: Any | None
    scores: bool
    logits: bool


class Answer(NamedTuple):
    """What became of a row.

    Attributes:
        ids: The row and its answer, ``[1, m]``.
        scores: A row ``[V]`` per token of the answer, where wanted; else empty.
        logits: Likewise.
        result: How it came about.
    """

    ids: Tensor
    scores: list[Tensor]
    logits: list[Tensor]
    result: Result


def end_tokens(criteria: Sequence[Any]) -> frozenset[int]:
    """The end-of-sequence tokens that the stopping criteria know."""
    found = [c.eos_token_id for c in criteria if type(c) is EosTokenCriteria]
    return frozenset(int(i) for ids in found for i in ids)


class RowSession(Session):
    """The answer of one row, ended where transformers' own loop would have ended it.

    Alone it is made by `run`. Whoever makes it otherwise closes it by `done`.

    Args:
        pair: The pair.
        ids: The row with its padding, ``[1, n]``, where transformers has it.
        padding: Number of padding tokens in front.
        config: What to do; `max_new_tokens` is the row's room.
        wanted: What the request wants.
        sampler: The request's processors.
        mask: Layers of the slim verifier, or None.
        heads: Light heads, or None.
        guard: See `Session`.
        name: See `Session`.
    """

    def __init__(
        self,
        pair: Pair,
        ids: Tensor,
        padding: int,
        config: GenerationConfig,
        wanted: Wanted,
        sampler: PreparedSampler,
        *,
        mask: LayerMask | None,
        heads: LightHeads | None,
        guard: Guard | None,
        name: str | None = None,
    ) -> None:
        prompt = ids[0, padding:].tolist()
        super().__init__(pair, prompt, config, mask=mask, heads=heads, guard=guard, sampler=sampler, name=name)
        self.ending = replace(self.ending, keep=self._take)
        self._ids = ids
        self._scores: list[Tensor] = []
        self._logits: list[Tensor] = []
        self._wanted = wanted
        self._prepared = sampler
        self._length = ids.shape[1] + config.max_new_tokens

    def run(self) -> Answer:
        """Decodes to the end, alone."""
        try:
            for _ in self:
                pass
        finally:
            self.close()
        return self.done()

    def done(self) -> Answer:
        """What became of it, now that it has ended."""
        self.close()
        assert self.result is not None
        return Answer(self._ids, self._scores, self._logits, self.result)

    def close(self) -> None:
        """Takes no more tokens; else a circle would keep the row's cache in memory."""
        self.ending = replace(self.ending, keep=None)

    def _take(self, emission: Emission) -> tuple[int, bool]:
        """Shows each token to the processors, the criteria and the streamer, as if it had been decoded alone."""
        # What others are shown are ordinary tensors, as they would be in transformers' own loop.
        with torch.inference_mode(mode=False), torch.no_grad():
            taken, ended = self._shown(emission)
        self._text.keep(shortened(emission, taken))
        return taken, ended

    def _shown(self, emission: Emission) -> tuple[int, bool]:
        wanted, place = self._wanted, self._ids.device
        for i, token in enumerate(emission.tokens):
            if wanted.logits or wanted.scores or self._prepared.keeps_state:
                raw = emission.logits[i : i + 1].to(place, copy=True)
                if wanted.logits:
                    self._logits.append(raw[0])
                if wanted.scores or self._prepared.keeps_state:
                    scores = self._prepared.shown(self._ids, raw)
                    self._scores += [scores[0]] if wanted.scores else []
            chosen = torch.tensor([token], device=place)
            self._ids = torch.cat([self._ids, chosen[None]], dim=1)
            ended = bool(
                wanted.criteria(self._ids, tuple(s[None] for s in self._scores) if wanted.scores else None).all()
            )
            if wanted.streamer is not None:
                wanted.streamer.put(chosen.cpu())
            if ended:
                known = token in self.pair.eos_ids or self._ids.shape[1] == self._length
                return i + 1, not known  # of these ends the session knows the reason
        return len(emission.tokens), False
