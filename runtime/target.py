"""The target as two verifiers over one set of weights and one cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from viasd.errors import OptionError
from viasd.hardware import wait_for
from viasd.layered import LayeredModel
from viasd.routes import Route
from viasd.runtime.metrics import Counters
from viasd.runtime.packed import Share, States, full_done, full_states, read_out, slim_done, slim_states
from viasd.runtime.readouts import FULL, SLIM, ReadoutLog
from viasd.selecting import Chosen, ConfidentReadout, Unread, read_together

# A prompt is run in pieces of this many tokens, so that activations stay small however long it is.
PREFILL_CHUNK = 1024
_CPU_CHUNK = 256  # computes as fast there, and stalls others less where sequences share passes


def prefill_chunk(device: torch.device) -> int:
    """Tokens of a prompt that are run at a time."""
    return min(PREFILL_CHUNK, _CPU_CHUNK) if device.type == "cpu" else PREFILL_CHUNK


class Target(Protocol):
    """What a strategy asks of a target: rows of the full verifier q and of the slim verifier q'.

    Tests put tables in its place.
    """

    def full(self, tokens: Sequence[int], rows: int) -> Tensor:
        """Raw logits ``[rows, V]`` of q at the last `rows` positions of `tokens`: row i predicts what follows it."""
        ...

    def slim(self, tokens: Sequence[int], rows: int) -> Tensor:
        """The same of q'."""
        ...

    def settle(self, tokens: Sequence[int]) -> None:
        """Rolls back to the committed tokens (the last of which has not been run)."""
        ...


class Stopwatch(AbstractContextManager[None]):
    """Adds the time spent inside to one tier's seconds. It can be used again and again, but not within itself.

    Args:
        seconds: Seconds by tier.
        tier: The tier.
        device: Accelerator that is waited for at the end; None waits for none.
    """

    def __init__(self, seconds: dict[str, float], tier: str, device: torch.device | None) -> None:
        self._seconds = seconds
        self._tier = tier
        self._device = device
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._device is not None:
            wait_for(self._device)
        self._seconds[self._tier] += time.perf_counter() - self._start


class Choice(NamedTuple):
    """Where a row was read out; see `viasd.selecting.Chosen`."""

    layer: int
    depth: int
    margin: float


class TieredTarget:
    """One sequence in one target: the full path, and the slim path over the same weights, embedding, head and cache.

    Args:
        model: The target.
        route: Layers the slim path runs, or None where there is no slim tier.
        counters: Where calls, tokens fed and seconds are added up.
        chunk: Tokens of a prompt that are run at a time; None is what suits the device.
        full_readout: Chooses the rows of the full path; None takes the last layer's.
        slim_readout: The same of the slim path.
        log_every: Passes from one line of the readouts' log to the next; None logs nothing.
        name: See `ReadoutLog`.

    Attributes:
        choices: By tier (``full``, ``slim``) and position, where its row was read out; empty for a tier without a readout
            of its own. After `settle` these are the rows that committed tokens were decided by.
        on_states: Receives the first position and the hidden states ``[1, n, d]`` behind the last layer of every full pass,
            where somebody wants them (a feature drafter).
    """

    def __init__(
        self,
        model: LayeredModel,
        route: Route | None,
        counters: Counters,
        chunk: int | None = None,
        *,
        full_readout: ConfidentReadout | None = None,
        slim_readout: ConfidentReadout | None = None,
        log_every: int | None = None,
        name: str | None = None,
    ) -> None:
        self.model = model
        self.route = route
        self.kv = model.new_kv()
        self.counters = counters
        self.chunk = chunk or prefill_chunk(model.device)
        self.readouts = {FULL: full_readout, SLIM: slim_readout}
        self.choices: dict[str, dict[int, Choice]] = {FULL: {}, SLIM: {}}
        self._logs = {} if log_every is None else {tier: ReadoutLog(log_every, tier, name) for tier in self.readouts}
        # Of the states that the full readout looks at, those that lie in the shared prefix: the slim path computes them, and
        # a full pass that goes on from the boundary does not.
        shared = () if route is None or full_readout is None else full_readout.capture
        self._beside = tuple(i for i in shared if route is not None and i < route.first_gap)
        self.on_states: Callable[[int, Tensor], None] | None = None

    def prefill(self, tokens: Sequence[int]) -> None:
        """Runs the full path over a prompt in pieces, without reading out any of it."""
        while self.kv.full_len < len(tokens):
            with self._timed("prefill"):
                run_full([Wanted(self, self.next_piece(tokens), 0)])

    def next_piece(self, tokens: Sequence[int]) -> Sequence[int]:
        """A prompt up to where its next piece ends."""
        return tokens[: self.kv.full_len + self.chunk]

    def full(self, tokens: Sequence[int], rows: int) -> Tensor:
        """See `Target`. Starts at the full watermark and writes over whatever the slim path left above it."""
        with self._timed("full"):
            return run_full([Wanted(self, tokens, rows)])[0]

    def slim(self, tokens: Sequence[int], rows: int) -> Tensor:
        """See `Target`. Reads the full path's keys below the full watermark and its own above it."""
        with self._timed("slim"):
            return run_slim([Wanted(self, tokens, rows)])[0]

    def settle(self, tokens: Sequence[int]) -> None:
        """See `Target`."""
        end = len(tokens) - 1
        self.kv.roll_back(end)
        for choices in self.choices.values():
            while choices and next(reversed(choices)) >= end:  # they were made in order
                choices.popitem()

    def chosen(self, tier: str, first: int, tokens: int) -> list[Choice | None]:
        """Where the rows were read out that decided so many tokens from position `first` on; None where there was none."""
        choices = self.choices[tier]
        return [choices.get(first + i - 1) for i in range(tokens)]

    def share(self, tier: str, tokens: Sequence[int], rows: int) -> Share:
        """What it has in a pass of a tier; a piece of a prompt (no rows) captures nothing."""
        readout = self.readouts[tier]
        return Share(self.kv, tokens, () if readout is None or not rows else readout.capture, self._beside)

    def note(self, tier: str, chosen: Chosen, start: int) -> None:
        """Takes down where rows from position `start` on were read out."""
        readout = self.readouts[tier]
        if readout is None or not chosen.layers:
            return
        found = zip(chosen.layers, chosen.depths, chosen.margins, strict=True)
        self.choices[tier].update((start + i, Choice(*choice)) for i, choice in enumerate(found))
        self.counters.readout.rows += len(chosen.layers)
        self.counters.readout.read += chosen.read
        if tier in self._logs:
            self._logs[tier].add(readout, chosen)

    def _timed(self, tier: str) -> Stopwatch:
        return Stopwatch(self.counters.seconds_by_tier, tier, self.model.device)


class Wanted(NamedTuple):
    """What one sequence wants of a pass.

    Attributes:
        target: The sequence's target.
        tokens: Its tokens up to the end of the pass.
        rows: Rows wanted, at the last positions; 0 for a piece of a prompt, which is not counted as a call.
    """

    target: TieredTarget
    tokens: Sequence[int]
    rows: int


def run_full(wanted: Sequence[Wanted]) -> list[Tensor]:
    """One pass of the full verifier for sequences of one model, those with a slim tier of one route.

    Returns:
        Raw logits ``[rows, V]`` of each.
    """
    model = wanted[0].target.model
    route = next((target.route for target, _, _ in wanted if target.route is not None), None)
    shares = [target.share(FULL, tokens, rows) for target, tokens, rows in wanted]
    starts = [min(target.kv.full_len, len(tokens)) for target, tokens, _ in wanted]
    fed = [len(tokens) - start for (_, tokens, _), start in zip(wanted, starts, strict=True)]
    ended = full_states(model, route, shares)
    logits, choices = _read(FULL, None, wanted, ended)
    full_done(shares)
    for (target, _, rows), n in zip(wanted, fed, strict=True):
        target.counters.full_calls += rows > 0
        target.counters.full_tokens_fed += n
    if choices:
        _note(FULL, wanted, choices)
    for (target, _, _), start, states in zip(wanted, starts, ended, strict=True):
        if target.on_states is not None:
            target.on_states(start, states.hidden)
    return logits


def run_slim(wanted: Sequence[Wanted]) -> list[Tensor]:
    """The same of the slim verifier, for sequences of one model and route."""
    first = wanted[0].target
    if first.route is None:
        raise OptionError("a slim verifier needs a mask, but none was given; use --mask even:0.45 or a mask file")
    shares = [target.share(SLIM, tokens, rows) for target, tokens, rows in wanted]
    fed = [len(tokens) - target.kv.slim_len for target, tokens, _ in wanted]
    ended, boundaries = slim_states(first.model, first.route, shares)
    logits, choices = _read(SLIM, first.route, wanted, ended)
    slim_done(shares, boundaries)
    for (target, _, _), n in zip(wanted, fed, strict=True):
        target.counters.slim_calls += 1
        target.counters.slim_tokens_fed += n
    if choices:
        _note(SLIM, wanted, choices)
    return logits


def _read(
    tier: str, route: Route | None, wanted: Sequence[Wanted], ended: Sequence[States]
) -> tuple[list[Tensor], list[Chosen]]:
    """Raw logits ``[rows, V]`` of each sequence, and where they were read out if any sequence has a readout of its own."""
    model, rows = wanted[0].target.model, [rows for _, _, rows in wanted]
    readouts = [target.readouts[tier] if n else None for target, _, n in wanted]
    if all(readout is None for readout in readouts):
        return read_out(model, route, [states.hidden for states in ended], rows), []
    unread = [
        Unread(readout, _last(states.hidden, n), {i: _last(h, n) for i, h in states.captured.items()}, len(tokens) - n)
        for readout, (_, tokens, n), states in zip(readouts, wanted, ended, strict=True)
    ]
    chosen = read_together(model, unread, steady=True)
    return [rows.logits for rows in chosen], chosen


def _note(tier: str, wanted: Sequence[Wanted], choices: Sequence[Chosen]) -> None:
    for (target, tokens, rows), chosen in zip(wanted, choices, strict=True):
        target.note(tier, chosen, len(tokens) - rows)


def _last(states: Tensor, rows: int) -> Tensor:
    return states[:, states.shape[1] - rows :]
