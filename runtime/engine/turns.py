"""The order in which an engine answers the work of a step."""

from __future__ import annotations

from dataclasses import dataclass

from viasd.runtime.passes import Admission, DraftPass, FullPass, SlimPass, Work


@dataclass(frozen=True)
class Turn:
    """Work that is answered together.

    Attributes:
        kind: Its class.
        verifier: Of an admission: where the block is going.
    """

    kind: type
    verifier: str = ""

    def covers(self, work: Work) -> bool:
        """Whether it is answered now."""
        return isinstance(work, self.kind) and (not isinstance(work, Admission) or work.verifier == self.verifier)


# In this order every kind finds all requests that will want it before the full pass.
TURNS = (
    Turn(DraftPass),
    Turn(Admission, "slim"),
    Turn(SlimPass),
    Turn(Admission, "full"),
    Turn(FullPass),
)
