"""Who decides how many tokens of each block are verified, and hears what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from viasd.runtime.answer import Answer
from viasd.runtime.passes import Admission, Judged


class Block(NamedTuple):
    """A block that asks to be verified.

    Attributes:
        request: Whose it is.
        answer: That request's answer in the making (its temperature, processors and mode).
        admission: The block.
    """

    request: int
    answer: Answer
    admission: Admission


class AdmissionPolicy(Protocol):
    """Decides for all blocks on their way to one verifier at once, once a step and verifier.

    In lossless and bounded mode above temperature 0 a decision must not depend on the tokens that it leaves out.
    """

    def begin(self, running: Sequence[tuple[int, Answer]]) -> None:
        """A step begins in which these requests, by number, decode one round each."""
        ...

    def admit(self, blocks: Sequence[Block], others: int) -> Sequence[int]:
        """How many tokens of each block, from the first on, are verified.

        Args:
            blocks: Blocks for the same verifier.
            others: Tokens that will be in the verifier's pass anyway: one for every sequence, and those of prompts.
        """
        ...

    def judged(self, request: int, answer: Answer, verdict: Judged) -> None:
        """What became of an admitted block."""
        ...

    def ended(self, request: int) -> None:
        """A request has ended, however it did."""
        ...


class AdmitAll:
    """Every drafted token is verified."""

    def begin(self, running: Sequence[tuple[int, Answer]]) -> None:
        """See `AdmissionPolicy`."""

    def admit(self, blocks: Sequence[Block], others: int) -> Sequence[int]:
        """See `AdmissionPolicy`."""
        return [len(block.admission.tokens) for block in blocks]

    def judged(self, request: int, answer: Answer, verdict: Judged) -> None:
        """See `AdmissionPolicy`."""

    def ended(self, request: int) -> None:
        """See `AdmissionPolicy`."""
