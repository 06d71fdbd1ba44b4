"""Drafters that are a line of tokens through a model, whose passes those of other sequences can share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from viasd.draws import Draws
from viasd.layered import LayeredModel
from viasd.routes import Route
from viasd.runtime.drafters.base import Draft, DraftStop, SteppedDrafter
from viasd.runtime.drafters.stepwise import draft_stepwise
from viasd.runtime.metrics import Counters
from viasd.runtime.packed import Line, read_out, through
from viasd.runtime.passes import Steps, timed
from viasd.runtime.target import Stopwatch, prefill_chunk
from viasd.sampling import Ahead
from viasd.shortlist import ShortReadout, ShortRows


class ModelLine(SteppedDrafter):
    """A drafter that is a line of tokens through a model, or through some layers of one.

    Args:
        name: Its name.
        model: The model.
        route: Layers its tokens run through, None for all of them.
        counters: Where calls, tokens fed and seconds are added up.
        readout: In the place of the route's or the model's own, where only some words are wanted.
        min_confidence: See `draft_stepwise`.
        stop_tokens: See `draft_stepwise`.

    Attributes:
        watch: Counts time as the drafter's. It does not wait for a pass: drawing from its rows does that.
        stop: Decides when a draft is long enough; None leaves that to the block's length.
    """

    def __init__(
        self,
        name: str,
        model: LayeredModel,
        route: Route | None,
        counters: Counters,
        *,
        readout: ShortReadout | None = None,
        min_confidence: float = 0.0,
        stop_tokens: frozenset[int] = frozenset(),
    ) -> None:
        self.name = name
        self.model = model
        self.route = route
        self.counters = counters
        self.readout = readout
        self.watch = Stopwatch(counters.seconds_by_tier, "drafter", None)
        self.stop: DraftStop | None = None
        self._min_confidence = min_confidence
        self._stop_tokens = stop_tokens

    @property
    def context_length(self) -> int:
        """See `BlockDrafter`."""
        return self.model.context_length

    @abstractmethod
    def begin(self, tokens: Sequence[int]) -> int:
        """See `BlockDrafter`."""

    @abstractmethod
    def keep(self, length: int) -> None:
        """See `BlockDrafter`."""

    @abstractmethod
    def line(self, tokens: Sequence[int]) -> Line:
        """Where the next tokens go."""

    @abstractmethod
    def ran(self, n: int) -> None:
        """So many more tokens have been run."""

    def drafting(self, tokens: Sequence[int], limit: int, ahead: Ahead, draws: Draws) -> Steps[Draft]:
        """See `Drafter`. Beyond its own context, which may be shorter than the target's, it proposes nothing."""
        steps = draft_stepwise(
            self,
            tokens[self.begin(tokens) :],
            min(limit, self.context_length - len(tokens)),
            ahead,
            draws,
            min_confidence=self._min_confidence,
            stop_tokens=self._stop_tokens,
            stop=self.stop,
        )
        return timed(steps, self.watch)

    def catch_up(self, tokens: Sequence[int], keep: int, pieces: int | None = None) -> Sequence[int]:
        """Runs what is too long for one pass, piece by piece.

        Args:
            tokens: What is to be run.
            keep: At least so many are left for a pass of their own.
            pieces: Most pieces; None runs all.

        Returns:
            What is left of `tokens`.
        """
        chunk = prefill_chunk(self.model.device)
        while len(tokens) > chunk and len(tokens) - chunk >= keep and pieces != 0:
            with self.watch:
                piece, tokens = tokens[:chunk], tokens[chunk:]
                through(self.model, self.route, [self.line(piece)])
                self.ran(chunk)
                self.counters.drafter_tokens_fed += chunk
            pieces = None if pieces is None else pieces - 1
        return tokens

    def rows(self, tokens: Sequence[int], n: int) -> Tensor | ShortRows:
        """See `viasd.runtime.passes.RowSource`."""
        left = self.catch_up(tokens, n)
        with self.watch:
            return run_drafts([(self, left, n)])[0]


def run_drafts(wanted: Sequence[tuple[ModelLine, Sequence[int], int]]) -> list[Tensor] | list[ShortRows]:
    """One pass for drafters of one model and route: for each its tokens and how many rows are wanted at the last of them.

    Returns:
        Raw logits ``[rows, V]`` of each, or those of a shortlist's words.
    """
    first, rows = wanted[0][0], [rows for _, _, rows in wanted]
    hidden, _ = through(first.model, first.route, [drafter.line(tokens) for drafter, tokens, _ in wanted])
    logits: list[Tensor] | list[ShortRows]
    logits = first.readout.last(hidden, rows) if first.readout else read_out(first.model, first.route, hidden, rows)
    for drafter, tokens, _ in wanted:
        drafter.ran(len(tokens))
        drafter.counters.drafter_calls += 1
        drafter.counters.drafter_tokens_fed += len(tokens)
    return logits
