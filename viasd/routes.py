"""A route says which layers of the target a pass runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from viasd.stitch import Stitch

ATTENTION = "attention"
MLP = "mlp"
PARTS = (ATTENTION, MLP)


class Readout(Protocol):
    """What turns the hidden state at a route's end into logits, in place of the model's own readout (`viasd.heads`).

    Attributes:
        key: Names its weights; readouts of one key are the same.
    """

    key: str

    def __call__(self, hidden: Tensor) -> Tensor:
        """Hidden states ``[1, n, d]`` -> raw logits ``[n, V]`` in fp32."""
        ...


@dataclass(frozen=True)
class Route:
    """Kept layers of a target, in order.

    Attributes:
        keep: One flag a layer, True where the whole layer runs.
        partial: Layers of which only one half runs, as (index, ``attention`` or ``mlp``); their `keep` is False.
        readout: Reads out what leaves the last of them; None is the model's own readout.
        stitches: What hidden states go through before the layer of that index (the number of layers: before the readout),
            all of them after the first gap; see `viasd.stitch`. Two routes are equal only if these are the same objects.
    """

    keep: tuple[bool, ...]
    partial: tuple[tuple[int, str], ...] = ()
    readout: Readout | None = None
    stitches: Mapping[int, Stitch] | None = field(default=None, hash=False, repr=False)

    @classmethod
    def full(cls, n_layers: int) -> Route:
        """Every layer."""
        return cls((True,) * n_layers)

    @classmethod
    def of(cls, flags: Iterable[int | bool]) -> Route:
        """From flags or zeros and ones."""
        return cls(tuple(bool(f) for f in flags))

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the layers that run, whole or in part."""
        return tuple(i for i, k in enumerate(self.keep) if k or i in self.parts)

    @property
    def whole_layers(self) -> tuple[int, ...]:
        """Indices of the layers that run whole."""
        return tuple(i for i, k in enumerate(self.keep) if k)

    @cached_property
    def parts(self) -> dict[int, str]:
        """The half that runs, by index, of layers that run in part."""
        return dict(self.partial)

    @property
    def first_gap(self) -> int:
        """Layers before this index compute exactly what the full path computes (the shared prefix)."""
        return self.keep.index(False) if False in self.keep else len(self.keep)

    @property
    def resumes_at(self) -> int:
        """The first layer that runs from the first gap on; its input is the state at the end of the shared prefix.

        (A layer that runs in part is a gap itself.) The number of layers where nothing is skipped.
        """
        return next((i for i in self.layers if i >= self.first_gap), len(self.keep))

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Runs of layers of which nothing runs, as (first skipped, next that runs)."""
        found, start = [], None
        running = set(self.layers)
        for index in range(len(self.keep) + 1):
            skipped = index < len(self.keep) and index not in running
            if skipped and start is None:
                start = index
            elif not skipped and start is not None:
                found.append((start, index))
                start = None
        return tuple(found)

    @property
    def skip_ratio(self) -> float:
        """Share of layers left out, a half layer counting half."""
        return 1 - (sum(self.keep) + len(self.partial) / 2) / len(self.keep)

    @property
    def key(self) -> list[Any]:
        """What tells its costs from those of every other route, as JSON can say it: of stitches their ranks alone."""
        ranks = sorted((i, stitch.rank or 0) for i, stitch in (self.stitches or {}).items())
        return [
            self.keep,
            self.partial,
            *([] if self.readout is None else [self.readout.key]),
            *([ranks] if ranks else []),
        ]

    def thinned(self, skip_ratio: float) -> Route:
        """A sub-route that skips `skip_ratio` of *all* layers, spread evenly over the layers this route keeps whole.

        First and last layer stay. A route that already skips more is returned as it is.
        """
        kept = self.whole_layers
        target = max(2, len(self.keep) - round(skip_ratio * len(self.keep)))
        if target >= len(kept):
            return replace(self, partial=())
        chosen = {kept[round(i * (len(kept) - 1) / (target - 1))] for i in range(target)}
        return replace(self, keep=tuple(i in chosen for i in range(len(self.keep))), partial=())
