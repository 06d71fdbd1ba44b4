"""A readout over some words only: every other has probability 0, which is a law like any other."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from viasd.layered import LayeredModel

# Logit of a word off the list: its probability is 0, yet a law is left where processors ban all others.
UNKNOWN = -1e4


class ShortRow(NamedTuple):
    """One row of logits over the words that are known.

    What is read off it costs less than off the whole row, which is several times as long and mostly one constant.

    Attributes:
        logits: ``[m]``.
        words: Token ids ``[m]``, ascending; None is the whole vocabulary.
        vocabulary: Words of a whole row.
    """

    logits: Tensor
    words: Tensor | None
    vocabulary: int

    def whole(self) -> Tensor:
        """Logits ``[vocabulary]``, `UNKNOWN` off the list."""
        return widened(self.logits[None], self.words, self.vocabulary)[0]

    def best(self) -> int:
        """The word of the highest logit, the lowest id on a tie."""
        place = int(self.logits.argmax())
        return place if self.words is None else int(self.words[place])


class ShortReadout:
    """Hidden states ``[1, n, d]`` -> raw logits ``[n, V]`` by a model's own norm and head, -1e4 off the shortlist.

    Args:
        model: Whose head is read, cut to the shortlist once.
        words: Token ids ``[m]``, ascending.
    """

    def __init__(self, model: LayeredModel, words: Tensor) -> None:
        self._model = model
        self._words = words.to(model.device)
        self._head = model.head_rows(self._words)

    def __call__(self, hidden: Tensor) -> Tensor:
        """See `viasd.routes.Readout`."""
        return widened(self._model.readout(hidden, self._head), self._words, self._model.vocabulary)


def widened(known: Tensor, words: Tensor | None, vocabulary: int) -> Tensor:
    """Logits ``[n, m]`` of some words -> ``[n, vocabulary]``, `UNKNOWN` for all others; as they are without a list."""
    if words is None:
        return known
    whole = known.new_full((known.shape[0], vocabulary), UNKNOWN)
    return whole.index_copy_(1, words.to(known.device), known)
