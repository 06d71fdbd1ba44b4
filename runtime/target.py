"""The target as two verifiers over one set of weights and one cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from viasd.attention import Segment
from viasd.errors import OptionError
from viasd.layered import LayeredModel
from viasd.routes import Route
from viasd.runtime.metrics import Counters
from viasd.runtime.readouts import FULL, SLIM, ReadoutLog
from viasd.selecting import Chosen, ConfidentReadout

# A prompt is run in pieces of this many tokens, so that activations stay small however long it is.
PREFILL_CHUNK = 1024


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
    """Adds the time spent inside to one tier's seconds, waiting for the accelerator where there is one."""

    def __init__(self, seconds: dict[str, float], tier: str, device: torch.device) -> None:
        self._seconds = seconds
        self._tier = tier
        self._wait: Callable[[], None] | None = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(
            device.type
        )
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._wait is not None:
            self._wait()
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
        full_readout: Chooses the rows of the full path; None takes the last layer's.
        slim_readout: The same of the slim path.
        log_every: Passes from one line of the readouts' log to the next; None logs nothing.

    Attributes:
        choices: By tier (``full``, ``slim``) and position, where its row was read out; empty for a tier without a readout
            of its own. After `settle` these are the rows that committed tokens were decided by.
    """

    def __init__(
        self,
        model: LayeredModel,
        route: Route | None,
        counters: Counters,
        *,
        full_readout: ConfidentReadout | None = None,
        slim_readout: ConfidentReadout | None = None,
        log_every: int | None = None,
    ) -> None:
        self.model = model
        self.route = route
        self.kv = model.new_kv()
        self.counters = counters
        self.choices: dict[str, dict[int, Choice]] = {FULL: {}, SLIM: {}}
        self._readouts = {FULL: full_readout, SLIM: slim_readout}
        self._logs = {} if log_every is None else {tier: ReadoutLog(log_every, tier) for tier in self._readouts}
        # Of the states that the full readout looks at, those that lie in the shared prefix: the slim path computes them, and
        # a full pass that goes on from the boundary does not.
        shared = () if route is None or full_readout is None else full_readout.capture
        self._shared = tuple(i for i in shared if route is not None and i < route.first_gap)

    def prefill(self, tokens: Sequence[int]) -> None:
        """Runs the full path over a prompt in pieces, without reading out any of it."""
        with self._timed("prefill"):
            for start in range(self.kv.full_len, len(tokens), PREFILL_CHUNK):
                self._run_full(tokens[: start + PREFILL_CHUNK])

    def full(self, tokens: Sequence[int], rows: int) -> Tensor:
        """See `Target`. Starts at the full watermark and writes over whatever the slim path left above it."""
        self.counters.full_calls += 1
        with self._timed("full"):
            readout = self._readouts[FULL]
            hidden, captured = self._run_full(tokens, () if readout is None else readout.capture)
            return self._read_out(FULL, hidden, captured, len(tokens), rows, self.model.readout)

    def slim(self, tokens: Sequence[int], rows: int) -> Tensor:
        """See `Target`. Reads the full path's keys below the full watermark and its own above it."""
        if self.route is None:
            raise OptionError("a slim verifier needs a mask, but none was given; use --mask even:0.45 or a mask file")
        self.counters.slim_calls += 1
        with self._timed("slim"):
            kv, start = self.kv, self.kv.slim_len
            resumed, readout = self.route.resumes_at, self._readouts[SLIM]
            step = self.model.step([Segment(kv, start, len(tokens) - start)])
            self.counters.slim_tokens_fed += len(tokens) - start
            hidden, captured = self.model.run(
                self.model.embed(tokens[start:]),
                self.route.layers,
                step,
                capture=(resumed, *self._shared, *(() if readout is None else readout.capture)),
                parts=self.route.parts,
                stitches=self.route.stitches,
            )
            kv.boundary = _joined(kv.boundary, _beside(captured[resumed], [captured[i] for i in self._shared]))
            kv.slim_len = len(tokens)
            own = self.route.readout or self.model.readout
            return self._read_out(SLIM, hidden, captured, len(tokens), rows, own)

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

    def _read_out(
        self,
        tier: str,
        hidden: Tensor,
        captured: Mapping[int, Tensor],
        end: int,
        rows: int,
        last: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Raw logits ``[rows, V]`` of the last positions of a pass that ended at `end`."""
        readout = self._readouts[tier]
        if readout is None:
            return last(hidden[:, -rows:])
        seen = {i: captured[i][:, -rows:] for i in readout.capture}
        chosen = readout(hidden[:, -rows:], seen, end - rows)
        self._note(tier, readout, chosen, end - rows)
        return chosen.logits

    def _note(self, tier: str, readout: ConfidentReadout, chosen: Chosen, start: int) -> None:
        found = zip(chosen.layers, chosen.depths, chosen.margins, strict=True)
        self.choices[tier].update((start + i, Choice(*choice)) for i, choice in enumerate(found))
        self.counters.readout.rows += len(chosen.layers)
        self.counters.readout.read += chosen.read
        if tier in self._logs:
            self._logs[tier].add(readout, chosen)

    def _run_full(self, tokens: Sequence[int], capture: Sequence[int] = ()) -> tuple[Tensor, dict[int, Tensor]]:
        """Hidden states ``[1, n, d]`` after the last layer of the positions the full path had not run, and captured ones."""
        kv, model, end = self.kv, self.model, len(tokens)
        kv.roll_back(end)
        everything = range(model.n_layers)
        step = model.step([Segment(kv, kv.full_len, end - kv.full_len)])
        self.counters.full_tokens_fed += end - kv.full_len
        if kv.boundary is None:
            hidden, captured = model.run(model.embed(tokens[kv.full_len :]), everything, step, capture)
        else:
            # The slim path has computed the layers before the first gap for its positions; only newer ones need them.
            assert self.route is not None
            gap = self.route.first_gap
            hidden, *shared = kv.boundary.chunk(1 + len(self._shared), dim=2)
            if end > kv.slim_len:
                newer = model.step([Segment(kv, kv.slim_len, end - kv.slim_len)])
                extra, also = model.run(model.embed(tokens[kv.slim_len :]), everything[:gap], newer, self._shared)
                hidden = _joined(hidden, extra)
                shared = [_joined(own, also[i]) for i, own in zip(self._shared, shared, strict=True)]
            hidden, captured = model.run(hidden, everything[gap:], step, capture)
            captured |= zip(self._shared, shared, strict=True)
        kv.full_len = kv.slim_len = end
        kv.boundary = None
        return hidden, captured

    def _timed(self, tier: str) -> Stopwatch:
        return Stopwatch(self.counters.seconds_by_tier, tier, self.model.device)


def _joined(before: Tensor | None, after: Tensor) -> Tensor:
    return after if before is None else torch.cat([before, after.to(before.device)], dim=1)


def _beside(state: Tensor, others: Sequence[Tensor]) -> Tensor:
    """States of the same positions side by side, ``[1, n, k d]``: rolled back as one."""
    return torch.cat([state, *(other.to(state.device) for other in others)], dim=2) if others else state
