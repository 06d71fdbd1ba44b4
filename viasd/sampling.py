"""From raw logits to processed rows: the request's logits processors and warpers, identical in every tier."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from viasd.errors import OptionError, ProcessorError
from viasd.rows import Row, Rows, likeliest

Processor = Callable[[Tensor, Tensor], Tensor]


_COLDEST = 1e-6  # below it logits divided by the temperature overflow; the draw would be greedy anyway


@dataclass(frozen=True)
class SamplingConfig:
    """How tokens are chosen from a row.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: Keep the k most probable tokens; 0 keeps all.
        top_p: Keep the smallest set of tokens with at least this mass; 1 keeps all.
        min_p: Keep tokens with at least this share of the largest probability; 0 keeps all.
        repetition_penalty: As in transformers; 1 is none.

    Raises:
        OptionError: If a value is out of range or not a number.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        fine = self.temperature == 0 or _COLDEST <= self.temperature < math.inf
        _require("temperature", self.temperature, fine, f"0 (greedy) or at least {_COLDEST:g}")
        _require("top_k", self.top_k, self.top_k >= 0 and int(self.top_k) == self.top_k, "a whole number, at least 0")
        _require("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1")
        _require("min_p", self.min_p, 0 <= self.min_p < 1, "at least 0 and below 1")
        _require("repetition_penalty", self.repetition_penalty, 0 < self.repetition_penalty < math.inf, "above 0")

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0

    def warpers(self) -> LogitsProcessorList:
        """Transformers' own warpers, in the order in which `generate` applies them."""
        warpers: list[Any] = []
        if not self.greedy:
            if self.temperature != 1:
                warpers.append(TemperatureLogitsWarper(float(self.temperature)))
            if self.top_k:
                warpers.append(TopKLogitsWarper(top_k=int(self.top_k)))
            if self.top_p < 1:
                warpers.append(TopPLogitsWarper(top_p=float(self.top_p)))
            if self.min_p > 0:
                warpers.append(MinPLogitsWarper(min_p=float(self.min_p)))
        return LogitsProcessorList(warpers)


def _require(name: str, value: float, good: bool, expected: str) -> None:
    if not good:
        raise OptionError(f"{name} must be {expected}, but got {value}")


class Sampler:
    """Turns logits into laws for one request.

    Processors of the user may keep a state. They are evaluated on copies while tokens are only proposed, and the user's
    own objects are called exactly once for every committed token, in order (`commit`), as plain decoding would.

    Args:
        config: How tokens are chosen.
        processors: The user's logits processors (called as ``f(ids [1, n], logits [1, V])``), applied after the
            repetition penalty and before the warpers, as transformers does.
    """

    def __init__(self, config: SamplingConfig, processors: Sequence[Processor] = ()) -> None:
        self.config = config
        self.greedy = config.greedy
        own: list[Processor] = []
        if config.repetition_penalty != 1:
            own.append(RepetitionPenaltyLogitsProcessor(penalty=float(config.repetition_penalty)))
        self._stateless = own
        self._user = list(processors)
        self._warpers = config.warpers()
        self._check_copies()

    @property
    def has_processors(self) -> bool:
        """Whether rows depend on the prefix through processors."""
        return bool(self._stateless or self._user)

    def ahead(self, prefix: Sequence[int]) -> Ahead:
        """An evaluation of rows beyond `prefix` that leaves the user's processors as they are."""
        return Ahead(self, prefix, [copy.deepcopy(p) for p in self._user])

    def commit(self, prefix: Sequence[int], tokens: Sequence[int], logits: Tensor | None) -> None:
        """Shows the user's processors the rows ``[n, V]`` behind n committed tokens, each exactly once."""
        if not self._user or not tokens:
            return
        if logits is None or logits.shape[0] < len(tokens):
            raise ProcessorError("internal: committed tokens came without the rows they were chosen from")
        ids = torch.tensor([[*prefix, *tokens]], device=logits.device)
        for i in range(len(tokens)):
            row = logits[i : i + 1].clone()
            for processor in (*self._stateless, *self._user):
                row = processor(ids[:, : len(prefix) + i], row)

    def law(self, logits: Tensor) -> Rows:
        """Processed logits ``[n, V]`` -> laws (no processors, only the warpers)."""
        if self.greedy:
            return Rows(tokens=tuple(likeliest(logits)))
        # Warpers look at the logits alone; transformers still wants ids of a matching batch.
        warped = self._warpers(logits.new_zeros((logits.shape[0], 1), dtype=torch.long), logits)
        return Rows(probs=torch.softmax(warped, dim=-1))

    def _check_copies(self) -> None:
        for processor in self._user:
            try:
                copy.deepcopy(processor)
            except Exception as error:
                name = getattr(processor, "__name__", type(processor).__name__)
                raise ProcessorError(
                    f"logits processor '{name}' can't be copied ({error}); drafted tokens are evaluated ahead on copies, "
                    "so make it deep-copyable or use --strategy plain"
                ) from error


class Ahead:
    """Processors evaluated along a tentative continuation of a prefix."""

    def __init__(self, sampler: Sampler, prefix: Sequence[int], user: list[Processor]) -> None:
        self._sampler = sampler
        self._chain = [*sampler._stateless, *user]
        self._ids = list(prefix) if self._chain else []

    @property
    def plain(self) -> bool:
        """Whether there are no processors, so that a law may be made of the logits of some words alone."""
        return not self._chain

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self._sampler.greedy

    def next(self, logits: Tensor) -> Tensor:
        """Raw logits ``[V]`` of the next position -> logits after the processors, before the warpers."""
        if not self._chain:
            return logits
        row = logits[None].clone()
        ids = torch.tensor([self._ids], device=logits.device)
        for processor in self._chain:
            row = processor(ids, row)
        return row[0]

    def fork(self) -> Ahead:
        """An evaluation that goes its own way from here."""
        twin = copy.copy(self)
        twin._chain = [copy.deepcopy(p) for p in self._chain]
        twin._ids = list(self._ids)
        return twin

    def push(self, token: int) -> None:
        """The tentative continuation goes on with `token`."""
        if self._chain:
            self._ids.append(token)

    def row(self, logits: Tensor) -> Row:
        """Raw logits ``[V]`` of the next position -> its law."""
        return self._sampler.law(self.next(logits)[None])[0]

    def block(self, logits: Tensor, tokens: Sequence[int]) -> Tensor:
        """Raw logits ``[n, V]`` along `tokens` (at least ``n - 1`` of them) -> processed logits ``[n, V]``."""
        if not self._chain:
            return logits
        rows = []
        for i in range(logits.shape[0]):
            rows.append(self.next(logits[i]))
            if i < len(tokens):
                self.push(tokens[i])
        return torch.stack(rows) if rows else logits
