"""What confident readouts did, as counts that can be added up."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(slots=True)
class Moves:
    """What confident readouts did (`viasd.confident`); all 0 without one.

    Attributes:
        tokens: Emitted tokens whose row one of them chose: the full verifier's, or else the slim verifier's.
        moved: Those of them that were not read out from the last layer.
        depth: Layers between where they were read out and the last one, summed.
        deepest: The most of these layers.
        rows: Rows chosen, those of refused tokens included.
        read: Rows that went through the head for them; as many as `rows` without a readout.
    """

    tokens: int = 0
    moved: int = 0
    depth: int = 0
    deepest: int = 0
    rows: int = 0
    read: int = 0

    @property
    def mean_depth(self) -> float:
        """Mean depth of a token."""
        return self.depth / self.tokens if self.tokens else 0.0

    @property
    def moved_share(self) -> float:
        """Share of the tokens that were moved."""
        return self.moved / self.tokens if self.tokens else 0.0

    def emitted(self, depth: int) -> None:
        """A token was emitted whose row is from so many layers before the last."""
        self.tokens += 1
        self.moved += depth > 0
        self.depth += depth
        self.deepest = max(self.deepest, depth)

    def merge(self, other: Moves) -> None:
        """Add the counts of another generation to these."""
        for name in ("tokens", "moved", "depth", "rows", "read"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.deepest = max(self.deepest, other.deepest)

    def as_json(self) -> dict[str, Any]:
        """The counts as a JSON object."""
        counts = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**counts, "mean_depth": self.mean_depth, "moved_share": self.moved_share}
