"""The confident readout at work: from the hidden states of the last layers to logits and the layer each row came from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

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
        layers: Layer of the model after which each was read out, n of them; empty for a sequence without a readout.
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
        """Reads out n positions of one sequence that follow each other; see `Unread` and `read_together`."""
        return read_together(self._model, [Unread(self, last, captured, start)])[0]

    def chosen_by_coin(self, start: int, n: int) -> list[int]:
        """Which of n rows from position `start` on are chosen by the method; the others are the last layer's."""
        return [row for row in range(n) if self._coins[start + row]] if self.capture else []

    def settled_depth(self) -> int | None:
        """The depth that a row is read out at where no entropies have to be compared for it."""
        if self._fixed is not None:
            return self._fixed
        return None if self.window.steps else self.shifted(0)

    def shifted(self, valley: int) -> int:
        """The depth that a row with this valley is read out at."""
        return self.config.shifted(valley, self.window.candidates)

    def candidates(self, last: Tensor, captured: Mapping[int, Tensor]) -> list[Tensor]:
        """States ``[1, n, d]`` by depth, as they are read out."""
        before = [self._entering(layer, captured[layer]).to(last.device) for layer in self.capture]
        return [last, *before]

    def _entering(self, layer: int, state: Tensor) -> Tensor:
        return self._stitches[layer](state) if layer in self._stitches else state


class Unread(NamedTuple):
    """One sequence's rows of a pass, before they are read out.

    Attributes:
        readout: Chooses them; None takes the last layer's.
        last: Hidden states ``[1, n, d]`` after the path's last layer, before the final norm.
        captured: Inputs ``[1, n, d]`` of the layers that the readout captures, likewise; others are ignored.
        start: Position of the first of them in the sequence.
    """

    readout: ConfidentReadout | None
    last: Tensor
    captured: Mapping[int, Tensor]
    start: int


def read_together(model: LayeredModel, unread: Sequence[Unread], *, steady: bool = False) -> list[Chosen]:
    """Reads out rows of sequences that went through one path of a model together, each by its own readout.

    Every depth is read out for all sequences in one call (the last two in one even), and none for a row of which it decides
    nothing. What a sequence gets does not depend on the others.

    Args:
        model: The model.
        unread: The rows of each sequence, at least one in all.
        steady: See `LayeredModel.readout`.
    """
    reading = _Reading(model, unread, steady)
    owners = [part.readout for part in unread for _ in range(part.last.shape[1])]
    depths, margins = [0] * len(owners), [math.inf] * len(owners)
    descending: list[int] = []
    for part, first in zip(unread, reading.firsts, strict=True):
        readout = part.readout
        if readout is None:
            continue
        rows = [first + row for row in readout.chosen_by_coin(part.start, part.last.shape[1])]
        if (depth := readout.settled_depth()) is None:
            descending += rows
        else:
            for row in rows:
                depths[row] = depth
    steps = [readout.window.steps for row in descending if (readout := owners[row]) is not None]
    if descending:
        sure: dict[int, list[int]] = {}
        for row, depth in enumerate(depths):
            sure.setdefault(depth, []).append(row)
        sure[1] = sorted([*sure.get(1, ()), *descending])
        reading.together(sure)
    valleys, found = descend(reading.entropies, descending, steps)
    for row, valley, margin in zip(descending, valleys, found, strict=True):
        owner = owners[row]
        assert owner is not None
        depths[row], margins[row] = owner.shifted(valley), margin
    logits = reading.gathered(depths)
    lengths = [part.last.shape[1] for part in unread]
    chosen: list[Chosen] = []
    for part, first, n, own, read in zip(
        unread, reading.firsts, lengths, _split(logits, lengths), reading.read, strict=True
    ):
        path, here = () if part.readout is None else part.readout.layers, depths[first : first + n]
        chosen.append(Chosen(own, [path[-1 - d] for d in here] if path else [], here, margins[first : first + n], read))
    return chosen


def _split(logits: Tensor, lengths: Sequence[int]) -> Sequence[Tensor]:
    return [logits] if len(lengths) == 1 else logits.split(list(lengths))


class _Reading:
    """The rows of one call, numbered through its sequences, read out by depth when they are first asked for.

    Args:
        model: The model.
        unread: The rows of each sequence.
        steady: See `LayeredModel.readout`.

    Attributes:
        firsts: Number of each sequence's first row.
        read: Rows of each sequence that went through the head.
    """

    def __init__(self, model: LayeredModel, unread: Sequence[Unread], steady: bool) -> None:
        self._readout: Callable[[Tensor], Tensor] = partial(model.readout, steady=True) if steady else model.readout
        self._most = None if steady else _TOGETHER
        self._states = [
            [last] if readout is None else readout.candidates(last, captured) for readout, last, captured, _ in unread
        ]
        self._places = [(i, row) for i, part in enumerate(unread) for row in range(part.last.shape[1])]
        lengths = [part.last.shape[1] for part in unread]
        self.firsts = [sum(lengths[:i]) for i in range(len(lengths))]
        self._found: dict[int, list[tuple[list[int], Tensor]]] = {}  # rows and their logits, by depth
        self.read = [0] * len(unread)

    def together(self, wanted: Mapping[int, list[int]]) -> None:
        """Reads out rows at several depths in one call, so that the head is read once, if they are not too many."""
        total = sum(len(rows) for rows in wanted.values())
        if self._most is not None and total > self._most:
            return
        states = torch.cat([self._gather(depth, rows) for depth, rows in wanted.items()], dim=1)
        parts = self._readout(states).split([len(rows) for rows in wanted.values()])
        for (depth, rows), logits in zip(wanted.items(), parts, strict=True):
            self._found[depth] = [(rows, logits)]

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
            return self.logits(depths[0], range(len(depths)))
        parts = {depth: self.logits(depth, rows) for depth, rows in wanted.items()}
        whole = torch.empty_like(parts[depths[0]][:1].expand(len(depths), -1), memory_format=torch.contiguous_format)
        for depth, rows in wanted.items():
            whole[rows] = parts[depth]
        return whole

    def logits(self, depth: int, rows: Sequence[int]) -> Tensor:
        """Raw logits of some rows at one depth, ``[n, V]``."""
        found, wanted = self._found.setdefault(depth, []), list(rows)
        known = {row for held, _ in found for row in held}
        if missing := [row for row in wanted if row not in known]:
            found.append((missing, self._readout(self._gather(depth, missing))))
        for held, logits in found:
            if held == wanted:
                return logits
        single = {row: logits[i] for held, logits in found for i, row in enumerate(held)}
        return torch.stack([single[row] for row in wanted])

    def _gather(self, depth: int, rows: Sequence[int]) -> Tensor:
        """States ``[1, m, d]`` of some rows (ascending) at one depth; counts them as read."""
        by_sequence: dict[int, list[int]] = {}
        for row in rows:
            sequence, place = self._places[row]
            by_sequence.setdefault(sequence, []).append(place)
        parts = []
        for sequence, places in by_sequence.items():
            self.read[sequence] += len(places)
            state = self._states[sequence][depth]
            parts.append(state if len(places) == state.shape[1] else state[:, places])
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
