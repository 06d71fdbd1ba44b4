"""Pieces of work that decoding asks for: what a strategy yields, so that many sequences can share a pass.

A strategy and a drafter are generators of such pieces. Alone, `drive` runs each piece where it comes up; an engine collects
those of many sequences, runs them packed and answers each.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor

from viasd.rows import Rows
from viasd.runtime.target import Target
from viasd.shortlist import ShortRows

T = TypeVar("T")


class RowSource(Protocol):
    """A drafter that is a model, as far as a pass is concerned."""

    def rows(self, tokens: Sequence[int], n: int) -> Tensor | ShortRows:
        """Runs `tokens`, which follow what has been run; returns the last n raw rows ``[n, V]``, or a shortlist's words."""
        ...


@dataclass(frozen=True, slots=True)
class VerifierPass:
    """One pass of a verifier; answered with raw logits ``[rows, V]``.

    Attributes:
        target: The sequence's target.
        tokens: Its tokens up to the end of the pass.
        rows: Rows wanted, at the last positions.
    """

    target: Target
    tokens: Sequence[int]
    rows: int


@dataclass(frozen=True, slots=True)
class FullPass(VerifierPass):
    """One pass of the full verifier (`Target.full`)."""

    def run(self) -> Tensor:
        """Runs it alone."""
        return self.target.full(self.tokens, self.rows)


@dataclass(frozen=True, slots=True)
class SlimPass(VerifierPass):
    """One pass of the slim verifier (`Target.slim`)."""

    def run(self) -> Tensor:
        """Runs it alone."""
        return self.target.slim(self.tokens, self.rows)


@dataclass(frozen=True, slots=True)
class DraftPass:
    """One pass of a drafter that is a model; answered with raw logits ``[rows, V]``, or with those of a shortlist's words.

    Attributes:
        drafter: Whose pass it is.
        tokens: The tokens to run, which follow what it has run.
        rows: Rows wanted, at the last of them.
    """

    drafter: RowSource
    tokens: Sequence[int]
    rows: int

    def run(self) -> Tensor | ShortRows:
        """Runs it alone."""
        return self.drafter.rows(self.tokens, self.rows)


@dataclass(frozen=True, slots=True)
class Admission:
    """A block on its way to a verifier; answered with how many of its tokens, from the first on, are to be verified.

    Whoever answers with fewer than all of them must see to it that the answer does not depend on the tokens left out, or
    the output's law changes (at temperature 0 any answer is fine). Tokens left out were drafted in vain.

    Attributes:
        proposer: Whose tokens they are: ``drafter`` or ``slim``.
        verifier: Where they are going: ``slim`` or ``full``.
        tokens: The n tokens.
        logits: The proposer's raw logits at each of them, over the words that it can propose (``[V]``, or ``[m]`` of a
            shortlist); none where the drafter has no model.
        confidence: The proposer's own probability of each of them, where it was asked for (a drafter's always is).
    """

    proposer: str
    verifier: str
    tokens: Sequence[int]
    logits: Sequence[Tensor] | Tensor
    confidence: Sequence[float] = ()

    def run(self) -> int:
        """Alone, all of them are verified."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Judged:
    """What became of an admitted block under the exact test; answered with nothing.

    Attributes:
        proposer: Whose tokens they were: ``drafter`` or ``slim``.
        verifier: Who judged them: ``slim`` or ``full``.
        tokens: The n admitted tokens.
        kept: How many of them stay. Of those behind the first refused one nothing is known.
        p: The n laws they were drawn from.
        q: The verifier's laws at the same positions, as far as they were judged; at temperature 0 point masses at what it
            says.
        exact: Whether the test was the exact one. Nothing should be learnt from a lossy one.
    """

    proposer: str
    verifier: str
    tokens: Sequence[int]
    kept: int
    p: Rows
    q: Rows
    exact: bool = True

    def run(self) -> None:
        """Alone, nobody wants to know."""


Pass = FullPass | SlimPass | DraftPass
Work = Pass | Admission | Judged
Steps = Generator[Work, Any, T]


def drive(steps: Steps[T]) -> T:
    """Runs a generator of work to its end, each piece alone and at once; returns what it returns."""
    answer: Any = None
    while True:
        try:
            work = steps.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result
        answer = work.run()


def timed(steps: Steps[T], watch: AbstractContextManager[None]) -> Steps[T]:
    """The same work, with `watch` running while `steps` does, but not while its work is waited for."""
    answer: Any = None
    while True:
        with watch:
            try:
                work = steps.send(answer)
            except StopIteration as end:
                result: T = end.value
                return result
        answer = yield work
