"""A readout over some words only: every other has probability 0, which is a law like any other."""

from __future__ import annotations

from torch import Tensor

from viasd.layered import LayeredModel

#: Logit of a word off the list: its probability is 0, yet a law is left where processors ban all others.
UNKNOWN = -1e4


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
        known = self._model.readout(hidden, self._head)
        whole = known.new_full((known.shape[0], self._model.vocabulary), UNKNOWN)
        return whole.index_copy_(1, self._words.to(known.device), known)
