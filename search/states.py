"""Where a pass over scored positions ended, and the rows that are read out there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from viasd.selecting import ConfidentReadout


@dataclass(frozen=True)
class States:
    """Where a pass over scored positions ended.

    Attributes:
        final: Hidden states ``[1, N, d]`` after the route's last layer.
        captured: Those that the readout looks at, by the layer they enter.
        readout: Chooses rows; None takes `plain`.
        plain: Reads out the last of them.
    """

    final: Tensor
    captured: dict[int, Tensor]
    readout: ConfidentReadout | None
    plain: Callable[[Tensor], Tensor]

    @property
    def rows(self) -> int:
        """Positions."""
        return self.final.shape[1]

    def logits(self, start: int, rows: int) -> Tensor:
        """Raw logits ``[n, V]`` of up to so many positions from `start` on."""
        part = slice(start, start + rows)
        if self.readout is None:
            return self.plain(self.final[:, part])
        return self.readout(
            self.final[:, part], {i: self.captured[i][:, part] for i in self.readout.capture}, start
        ).logits
