"""A route says which layers of the target a pass runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Route:
    """Kept layers of a target, in order.

    Attributes:
        keep: One flag a layer, True where the layer runs.
    """

    keep: tuple[bool, ...]

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
        """Indices of the layers that run."""
        return tuple(i for i, k in enumerate(self.keep) if k)

    @property
    def first_gap(self) -> int:
        """Layers before this index compute exactly what the full path computes (the shared prefix)."""
        return self.keep.index(False) if False in self.keep else len(self.keep)

    @property
    def resumes_at(self) -> int:
        """The first layer that runs after the first gap; its input is the state at the end of the shared prefix.

        The number of layers where nothing is skipped.
        """
        return next((i for i in self.layers if i > self.first_gap), len(self.keep))

    @property
    def skip_ratio(self) -> float:
        """Share of layers left out."""
        return 1 - sum(self.keep) / len(self.keep)

    def thinned(self, skip_ratio: float) -> Route:
        """A sub-route that skips `skip_ratio` of *all* layers, spread evenly over the layers this route keeps.

        First and last layer stay. A route that already skips more is returned as it is.
        """
        kept = self.layers
        target = max(2, len(self.keep) - round(skip_ratio * len(self.keep)))
        if target >= len(kept):
            return self
        chosen = {kept[round(i * (len(kept) - 1) / (target - 1))] for i in range(target)}
        return Route(tuple(i in chosen for i in range(len(self.keep))))
