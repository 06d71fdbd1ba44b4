"""A wave of tokens through the target's layers: each waits at the exit where its successor was guessed, and goes on with it.

Tokens of a cycle enter one by one. The newest climbs from exit to exit; where a head guesses its successor well enough, it
waits there and the guess enters. Whoever climbs past waiting tokens takes them along, in one pass. So every layer's keys are
contiguous, and their number never grows with depth. At the top all are read out together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from viasd.attention import Segment, Step
from viasd.heads import ExitHead
from viasd.runtime.target import Stopwatch, TieredTarget
from viasd.shortlist import ShortRow


class Wave(Protocol):
    """What `viasd.runtime.strategies.adadecode` asks of the target. Tests put tables in its place.

    Attributes:
        exits: Layer counts after which there is a head, ascending.
        layers: Layers of the target.
    """

    exits: tuple[int, ...]
    layers: int

    def begin(self, tokens: Sequence[int]) -> None:
        """A new cycle after the committed `tokens`, of which the last has not been run."""
        ...

    def enter(self, token: int) -> None:
        """The next token begins to climb: first the last committed one, then each guess."""
        ...

    def climb(self, exits: bool) -> int:
        """Runs the newest token, and whoever waits on the way, to its next stop.

        Args:
            exits: Whether exits are stops for it; otherwise only places where others wait, and the top, are.

        Returns:
            Layers it has run now.
        """
        ...

    def promise(self) -> float | None:
        """Chance, before the head here is read, that it would guess the newest token's successor; None if nothing says."""
        ...

    def guess(self) -> ShortRow:
        """Raw logits of the head here, for the newest token's successor."""
        ...

    def wait(self) -> None:
        """The newest token waits here."""
        ...

    def top(self) -> Tensor:
        """Raw logits ``[n, V]`` of the full verifier at all n tokens of the cycle, which have run every layer."""
        ...


class LayerWave:
    """A `Wave` through a real target.

    Args:
        target: The sequence's target.
        heads: By exit.
    """

    def __init__(self, target: TieredTarget, heads: Mapping[int, ExitHead]) -> None:
        self.exits = tuple(sorted(heads))
        self.layers = target.model.n_layers
        self._target = target
        self._heads = heads
        self._waiting: dict[int, Tensor] = {}  # depth -> hidden states [1, k, d] of tokens that wait there
        self._hidden: Tensor | None = None  # of the newest token and those that climb with it
        self._depth = 0
        self._newest = -1  # its position
        self._step: Step | None = None  # of the tokens that climb, as long as none joins

    def begin(self, tokens: Sequence[int]) -> None:
        """See `Wave`."""
        self._target.kv.roll_back(len(tokens) - 1)
        self._waiting = {}
        self._newest = len(tokens) - 2

    def enter(self, token: int) -> None:
        """See `Wave`."""
        target = self._target
        self._newest += 1
        self._depth = 0
        self._step = None
        self._hidden = target.model.embed([token])
        target.counters.full_tokens_fed += 1

    def climb(self, exits: bool) -> int:
        """See `Wave`."""
        assert self._hidden is not None
        target = self._target
        stops = [d for d in (*self._waiting, *(self.exits if exits else ())) if d > self._depth]
        end = min(stops, default=self.layers)
        joined = self._waiting.pop(self._depth, None)
        hidden = self._hidden if joined is None else torch.cat([joined, self._hidden], dim=1)
        n = hidden.shape[1]
        with Stopwatch(target.counters.seconds_by_tier, "full", target.model.device):
            if self._step is None or joined is not None:
                self._step = target.model.step([Segment(target.kv, self._newest - n + 1, n)])
            self._hidden, _ = target.model.run(hidden, range(self._depth, end), self._step)
        target.counters.early.layer_passes += end - self._depth
        self._depth = end
        return end

    def promise(self) -> float | None:
        """See `Wave`."""
        assert self._hidden is not None
        return self._heads[self._depth].promise(self._hidden[:, -1:])

    def guess(self) -> ShortRow:
        """See `Wave`."""
        assert self._hidden is not None
        counters = self._target.counters
        counters.drafter_calls += 1
        counters.drafter_tokens_fed += 1
        with Stopwatch(counters.seconds_by_tier, "drafter", self._target.model.device):
            return self._heads[self._depth].row(self._hidden[:, -1:])

    def wait(self) -> None:
        """See `Wave`."""
        assert self._hidden is not None
        before = self._waiting.get(self._depth)
        self._waiting[self._depth] = self._hidden if before is None else torch.cat([before, self._hidden], dim=1)
        self._hidden = None

    def top(self) -> Tensor:
        """See `Wave`."""
        assert self._hidden is not None
        assert self._depth == self.layers
        target = self._target
        target.counters.full_calls += 1
        with Stopwatch(target.counters.seconds_by_tier, "full", target.model.device):
            logits = target.model.readout(self._hidden)
        target.kv.full_len = target.kv.slim_len = self._newest + 1
        self._hidden = None
        return logits
