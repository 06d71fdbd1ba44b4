"""Counts of Adaptive Verification: what was left out, and predicted against observed acceptance."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BINS = 10


@dataclass(slots=True)
class Reliability:
    """Predicted against observed acceptance, by tenths of the prediction; sums, so that counts of several runs add up.

    Attributes:
        judged: Tokens judged.
        predicted: Sum of their predicted chances.
        kept: How many of them were kept.
    """

    judged: list[int] = field(default_factory=lambda: [0] * BINS)
    predicted: list[float] = field(default_factory=lambda: [0.0] * BINS)
    kept: list[int] = field(default_factory=lambda: [0] * BINS)

    def add(self, chance: float, kept: bool) -> None:
        """One judged token."""
        which = min(int(chance * BINS), BINS - 1)
        self.judged[which] += 1
        self.predicted[which] += chance
        self.kept[which] += kept

    def merge(self, other: Reliability) -> None:
        """Adds the counts of another run."""
        for i in range(BINS):
            self.judged[i] += other.judged[i]
            self.predicted[i] += other.predicted[i]
            self.kept[i] += other.kept[i]

    @property
    def error(self) -> float:
        """Expected calibration error; 0 where nothing was judged."""
        gaps = (abs(p - k) for p, k in zip(self.predicted, self.kept, strict=True))
        return sum(gaps) / max(1, sum(self.judged))

    def as_json(self) -> dict[str, Any]:
        """The sums and the error."""
        return {
            "judged": list(self.judged),
            "predicted": list(self.predicted),
            "kept": list(self.kept),
            "ece": self.error,
        }


@dataclass(slots=True)
class Adaptive:
    """What Adaptive Verification did; all empty without it.

    Attributes:
        offered: Drafted tokens that waited to be sent to a verifier.
        admitted: Those of them that were.
        withheld: Tokens the slim verifier let through that were not sent to the full one.
        reliability: By edge.
        coefficients: By edge, the slope and the intercepts that were last used.
    """

    offered: int = 0
    admitted: int = 0
    withheld: int = 0
    reliability: dict[str, Reliability] = field(default_factory=dict)
    coefficients: dict[str, list[float]] = field(default_factory=dict)

    def of(self, edge: str) -> Reliability:
        """The counts of one edge."""
        return self.reliability.setdefault(edge, Reliability())

    def merge(self, other: Adaptive) -> None:
        """Adds the counts of another generation; of coefficients the later ones stay."""
        self.offered += other.offered
        self.admitted += other.admitted
        self.withheld += other.withheld
        for edge, counts in other.reliability.items():
            self.of(edge).merge(counts)
        self.coefficients.update(other.coefficients)

    def as_json(self) -> dict[str, Any]:
        """The counts as a JSON object."""
        return {
            "offered": self.offered,
            "admitted": self.admitted,
            "admitted_share": self.admitted / self.offered if self.offered else 0.0,
            "withheld": self.withheld,
            "reliability": {edge: counts.as_json() for edge, counts in self.reliability.items()},
            "coefficients": {edge: list(values) for edge, values in self.coefficients.items()},
        }
