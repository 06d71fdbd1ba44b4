"""The confident readout at work: from the hidden states of the last layers to logits and the layer each row came from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from viasd.confident import Coins, ConfidentConfig, descend
from viasd.layered import LayeredModel

# As many rows as the kernels read out in one call, where a row does not depend on its neighbours; see `viasd.kernels`.
_TOGETHER = 32


@dataclass(frozen=True)
class Chosen:
    """Rows that were chosen.

    Attributes:
        logits: Raw logits ``[n, V]``, fp32.
        layers: Layer of the model after which each was read out, n of them.
        depths: Layers of the path between that and its last one.
        margins: See `viasd.confident.descend`; infinity where no entropies were compared.
        read: Rows that went through the head for them.
    """

    logits: Tensor
    layers: list[int]
    depths: list[int]
    margins: list[float]
    read: int


def entropy(logits: Tensor) -> Tensor:
    """Entropy ``[n]``, in nats, of the laws that raw logits ``[n, V]`` stand for; computed in fp32.

    A row's entropy does not depend on how many rows there are: a single one is summed as one of two, since torch would
    otherwise split the sum among its threads.
    """
    rows = logits.float()
    rows = rows.expand(2, -1) if rows.shape[0] == 1 else rows
    return torch.special.entr(torch.softmax(rows, dim=-1)).sum(dim=-1)[: logits.shape[0]]


class ConfidentReadout:
    """Chooses rows in one path through a model.

    Args:
        model: The model.
        config: How rows are chosen.
        layers: Indices of the layers that the path runs, ascending; the candidates are the last of them.
        seed: Of the request, for `p`.
        stitches: Of the path: what a state goes through before the layer of that index, and here before it is read out. (The
            last layer's is taken to be stitched already.)

    Raises:
        OptionError: If a fixed method names a layer outside the window.

    Attributes:
        capture: Layers whose input has to be captured (`LayeredModel.run`): what leaves the candidates but the last.
    """

    def __init__(
        self,
        model: LayeredModel,
        config: ConfidentConfig,
        layers: Sequence[int],
        seed: int = 0,
        stitches: Mapping[int, Callable[[Tensor], Tensor]] | None = None,
    ) -> None:
        self.config = config
        self.layers = tuple(layers)
        self.window = config.window(len(self.layers))
        self._model = model
        self._stitches = stitches or {}
        self._coins = Coins(seed, config.p)
        self._fixed = None if config.fixed is None else config.fixed_depth(self.layers, model.n_layers)
        deepest = self.window.candidates - 1 if self._fixed is None else self._fixed
        idle = config.idle(len(self.layers))
        self.capture = () if idle else tuple(reversed(self.layers[len(self.layers) - deepest :]))

    def __call__(self, last: Tensor, captured: Mapping[int, Tensor], start: int) -> Chosen:
        """Reads out n positions that follow each other.

        Args:
            last: Hidden states ``[1, n, d]`` after the path's last layer, before the final norm.
            captured: Inputs ``[1, n, d]`` of the layers in `capture`, likewise.
            start: Position of the first of them in the sequence.
        """
        n = last.shape[1]
        rows = [row for row in range(n) if self._coins[start + row]] if self.capture else []
        reading = _Reading(self._model, last, [self._entering(layer, captured[layer]) for layer in self.capture])
        depths, margins = [0] * n, [math.inf] * n
        if self._fixed is not None:
            chosen = [self._fixed] * len(rows)
        else:
            if rows and self.window.steps:
                reading.together(rows)
            valleys, found = descend(reading.entropies, rows, self.window.steps)
            chosen = [self.config.shifted(valley, self.window.candidates) for valley in valleys]
            for row, margin in zip(rows, found, strict=True):
                margins[row] = margin
        for row, depth in zip(rows, chosen, strict=True):
            depths[row] = depth
        logits = reading.gathered(depths)
        return Chosen(logits, [self.layers[-1 - depth] for depth in depths], depths, margins, reading.read)

    def _entering(self, layer: int, state: Tensor) -> Tensor:
        return self._stitches[layer](state) if layer in self._stitches else state


class _Reading:
    """The rows of one call, by depth, read out when they are first asked for.

    Args:
        model: The model.
        last: Hidden states ``[1, n, d]`` after the last layer.
        before: The same after the layers before it, deepest first.
    """

    def __init__(self, model: LayeredModel, last: Tensor, before: Sequence[Tensor]) -> None:
        self._model = model
        self._states = [last, *(state.to(last.device) for state in before)]
        self._n = last.shape[1]
        self._found: dict[int, list[tuple[list[int], Tensor]]] = {}  # rows and their logits, by depth
        self.read = 0

    def together(self, rows: Sequence[int]) -> None:
        """Reads out the last layer for all rows and the one before it for some, in one call: the head is read once."""
        if self._n + len(rows) > _TOGETHER:
            return
        logits = self._readout(torch.cat([self._states[0], self._states[1][:, self._index(rows)]], dim=1))
        self._found[0] = [(list(range(self._n)), logits[: self._n])]
        self._found[1] = [(list(rows), logits[self._n :])]

    def entropies(self, depth: int, rows: Sequence[int]) -> list[float]:
        """See `viasd.confident.EntropyAt`."""
        found: list[float] = entropy(self.logits(depth, rows)).tolist()
        return found

    def gathered(self, depths: Sequence[int]) -> Tensor:
        """Row i of depth ``depths[i]``, ``[n, V]``: the last layer's very tensor where nothing moves."""
        wanted: dict[int, list[int]] = {}
        for row, depth in enumerate(depths):
            wanted.setdefault(depth, []).append(row)
        if len(wanted) == 1:
            return self.logits(depths[0], range(self._n))
        parts = {depth: self.logits(depth, rows) for depth, rows in wanted.items()}
        whole = torch.empty_like(parts[depths[0]][:1].expand(self._n, -1), memory_format=torch.contiguous_format)
        for depth, rows in wanted.items():
            whole[rows] = parts[depth]
        return whole

    def logits(self, depth: int, rows: Sequence[int]) -> Tensor:
        """Raw logits of some rows at one depth, ``[n, V]``."""
        found, wanted = self._found.setdefault(depth, []), list(rows)
        known = {row for held, _ in found for row in held}
        if missing := [row for row in wanted if row not in known]:
            found.append((missing, self._readout(self._states[depth][:, self._index(missing)])))
        for held, logits in found:
            if held == wanted:
                return logits
        single = {row: logits[i] for held, logits in found for i, row in enumerate(held)}
        return torch.stack([single[row] for row in wanted])

    def _index(self, rows: Sequence[int]) -> slice | list[int]:
        return slice(None) if len(rows) == self._n else list(rows)

    def _readout(self, states: Tensor) -> Tensor:
        self.read += states.shape[1]
        return self._model.readout(states)
