"""A readout over some words only: every other has probability 0, which is a law like any other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import torch
from torch import Tensor

from viasd.estimator import logit_of_max
from viasd.layered import LayeredModel
from viasd.rows import likeliest

#: Logit of a word off the list: its probability is 0, yet a law is left where processors ban all others.
UNKNOWN = -1e4
_SURE = 0.99  # from this probability on, fp32 says too little of what it lacks to 1


class ShortReadout:
    """Hidden states ``[1, n, d]`` -> raw logits ``[n, V]`` by a model's own norm and head, -1e4 off the shortlist.

    Args:
        model: Whose head is read, cut to the shortlist once.
        words: Token ids ``[m]``, ascending.
    """

    def __init__(self, model: LayeredModel, words: Tensor) -> None:
        self._model = model
        self._words = words.to(model.device)
        self._read = model.short_readout(self._words)

    def __call__(self, hidden: Tensor) -> Tensor:
        """See `viasd.routes.Readout`."""
        return _spread(self._read(hidden, False), self._words, self._model.vocabulary)

    def last(self, hidden: Sequence[Tensor], rows: Sequence[int]) -> list[ShortRows]:
        """The rows of several sequences that must not notice each other, read together.

        Args:
            hidden: States ``[1, n, d]`` of each sequence.
            rows: Rows wanted of each, at its last positions.
        """
        wanted = [states[:, states.shape[1] - n :] for states, n in zip(hidden, rows, strict=True)]
        known = self._read(wanted[0] if len(wanted) == 1 else torch.cat(wanted, dim=1), True)
        table = ShortTable(known, self._words.to(known.device), self._model.vocabulary)
        ends = torch.tensor(rows).cumsum(0).tolist()
        return [ShortRows(table, end - n, end) for end, n in zip(ends, rows, strict=True)]


class ShortTable:
    """Raw logits of a pass over some words.

    Args:
        known: ``[n, m]``, fp32.
        words: The token id of every column ``[m]``, ascending; None where they are all words there are.
        vocabulary: Words there are.
    """

    def __init__(self, known: Tensor, words: Tensor | None, vocabulary: int) -> None:
        self.known = known
        self.words = words
        self.vocabulary = vocabulary
        self._certainty: dict[float, list[float]] = {}

    @cached_property
    def probs(self) -> Tensor:
        """Softmax of the rows, ``[n, m]``."""
        return torch.softmax(self.known, dim=-1)

    @cached_property
    def best(self) -> list[tuple[int, int, float]]:
        """Of every row: the column that is largest (of several the first), its token id, and its probability.

        Found for all rows at once and fetched together, however many sequences they belong to.
        """
        on_cpu = self.known.device.type == "cpu"  # elsewhere all is left there until it is fetched
        columns = (torch.tensor(likeliest(self.known)) if on_cpu else self.known.argmax(dim=-1))[:, None]
        tokens = columns if self.words is None else self.words[columns]
        # Ids are far below 2^24, so fp32 holds them exactly.
        found = torch.cat((columns.float(), tokens.float(), self.probs.gather(1, columns)), dim=1)
        return [(int(c), int(t), p) for c, t, p in found.tolist()]

    def certainty(self, temperature: float) -> list[float]:
        """Logit of the largest probability of every row, for all of them at once; see `viasd.estimator.logit_of_max`."""
        if temperature not in self._certainty:
            self._certainty[temperature] = logit_of_max(self.known, temperature).tolist()
        return self._certainty[temperature]


@dataclass(frozen=True, slots=True)
class ShortRow:
    """Raw logits of one position over some words.

    Attributes:
        table: Those of the whole pass.
        index: Its row there.
    """

    table: ShortTable
    index: int

    @classmethod
    def of(cls, logits: Tensor) -> ShortRow:
        """A row ``[V]`` over all words."""
        return cls(ShortTable(logits[None], None, logits.shape[0]), 0)

    @property
    def known(self) -> Tensor:
        """Logits of the words it knows, ``[m]``."""
        return self.table.known[self.index]

    @property
    def probs(self) -> Tensor:
        """Their probabilities, ``[m]``."""
        return self.table.probs[self.index]

    @property
    def best(self) -> tuple[int, int, float]:
        """The column that is largest, its token id, and its probability."""
        return self.table.best[self.index]

    def certainty(self, temperature: float) -> float:
        """Logit of the largest probability; see `viasd.estimator.logit_of_max`."""
        if temperature in (0.0, 1.0) and (p := self.best[2]) < _SURE:  # which is known already
            return math.log(p / (1 - p))
        return self.table.certainty(temperature)[self.index]

    def token(self, column: int) -> int:
        """The token id of a column."""
        return column if self.table.words is None else int(self.table.words[column])

    def chance(self, token: int) -> Tensor:
        """Probability of a token id, of no dimensions; 0 where it does not know that word."""
        words = self.table.words
        if words is None:
            return self.probs[token]
        place = int(torch.searchsorted(words, token))
        known = place < len(words) and int(words[place]) == token
        return self.probs[place] if known else self.probs.new_zeros(())

    @property
    def dense(self) -> Tensor:
        """Raw logits of all words, ``[V]``."""
        return self.known if self.table.words is None else self.spread(self.known[None], UNKNOWN)[0]

    def spread(self, known: Tensor, rest: float) -> Tensor:
        """Values ``[n, m]`` of the words it knows -> ``[n, V]``, with `rest` in all other places."""
        return known if self.table.words is None else _spread(known, self.table.words, self.table.vocabulary, rest)


@dataclass(frozen=True, slots=True)
class ShortRows(Sequence[ShortRow]):
    """The rows of one sequence in a pass, ``start`` to ``end`` of its table."""

    table: ShortTable
    start: int
    end: int

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.table.known.device

    @property
    def dense(self) -> Tensor:
        """Raw logits of all words, ``[n, V]``."""
        known, words = self.table.known[self.start : self.end], self.table.words
        return known if words is None else _spread(known, words, self.table.vocabulary)

    def __len__(self) -> int:
        return self.end - self.start

    def __iter__(self) -> Iterator[ShortRow]:
        return (ShortRow(self.table, index) for index in range(self.start, self.end))

    @overload
    def __getitem__(self, index: int) -> ShortRow: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ShortRow]: ...
    def __getitem__(self, index: int | slice) -> ShortRow | Sequence[ShortRow]:
        chosen = range(self.start, self.end)[index]
        if isinstance(chosen, int):
            return ShortRow(self.table, chosen)
        return [ShortRow(self.table, each) for each in chosen]


class DenseLater(Sequence[Tensor]):
    """Raw logits ``[V]`` of some positions, written out where somebody asks for one.

    Args:
        rows: The rows.
    """

    def __init__(self, rows: Sequence[ShortRow]) -> None:
        self._rows = rows

    @property
    def known(self) -> list[Tensor]:
        """The same over the words that are known alone, ``[m]`` each: as sure of its best word, and cheaper."""
        return [row.known for row in self._rows]

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> DenseLater: ...
    def __getitem__(self, index: int | slice) -> Tensor | DenseLater:
        return DenseLater(self._rows[index]) if isinstance(index, slice) else self._rows[index].dense


def _spread(known: Tensor, words: Tensor, vocabulary: int, rest: float = UNKNOWN) -> Tensor:
    whole = known.new_full((known.shape[0], vocabulary), rest)
    return whole.index_copy_(1, words.to(known.device), known)
