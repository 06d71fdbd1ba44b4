"""The target as two verifiers over one set of weights and one cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from viasd.attention import Segment
from viasd.errors import OptionError
from viasd.layered import LayeredModel
from viasd.routes import Route
from viasd.runtime.metrics import Counters

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
    """Adds the time spent inside to one tier's seconds. It can be used again and again, but not within itself.

    Args:
        seconds: Seconds by tier.
        tier: The tier.
        device: Accelerator that is waited for at the end; None waits for none.
    """

    def __init__(self, seconds: dict[str, float], tier: str, device: torch.device | None) -> None:
        self._seconds = seconds
        self._tier = tier
        waits = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}
        self._wait: Callable[[], None] | None = None if device is None else waits.get(device.type)
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._wait is not None:
            self._wait()
        self._seconds[self._tier] += time.perf_counter() - self._start


class TieredTarget:
    """One sequence in one target: the full path, and the slim path over the same weights, embedding, head and cache.

    Args:
        model: The target.
        route: Layers the slim path runs, or None where there is no slim tier.
        counters: Where calls, tokens fed and seconds are added up.

    Attributes:
        on_states: Receives the first position and the hidden states ``[1, n, d]`` behind the last layer of every full pass,
            where somebody wants them (a feature drafter).
    """

    def __init__(self, model: LayeredModel, route: Route | None, counters: Counters) -> None:
        self.model = model
        self.route = route
        self.kv = model.new_kv()
        self.counters = counters
        self.on_states: Callable[[int, Tensor], None] | None = None

    def prefill(self, tokens: Sequence[int]) -> None:
        """Runs the full path over a prompt in pieces, without reading out any of it."""
        with self._timed("prefill"):
            for start in range(self.kv.full_len, len(tokens), PREFILL_CHUNK):
                self._run_full(tokens[: start + PREFILL_CHUNK])

    def full(self, tokens: Sequence[int], rows: int) -> Tensor:
        """See `Target`. Starts at the full watermark and writes over whatever the slim path left above it."""
        self.counters.full_calls += 1
        with self._timed("full"):
            return self.model.readout(self._run_full(tokens)[:, -rows:])

    def slim(self, tokens: Sequence[int], rows: int) -> Tensor:
        """See `Target`. Reads the full path's keys below the full watermark and its own above it."""
        if self.route is None:
            raise OptionError("a slim verifier needs a mask, but none was given; use --mask even:0.45 or a mask file")
        self.counters.slim_calls += 1
        with self._timed("slim"):
            kv, start = self.kv, self.kv.slim_len
            resumed = self.route.resumes_at
            step = self.model.step([Segment(kv, start, len(tokens) - start)])
            self.counters.slim_tokens_fed += len(tokens) - start
            hidden, captured = self.model.run(
                self.model.embed(tokens[start:]),
                self.route.layers,
                step,
                capture=(resumed,),
                parts=self.route.parts,
                stitches=self.route.stitches,
            )
            kv.boundary = _joined(kv.boundary, captured[resumed])
            kv.slim_len = len(tokens)
            return (self.route.readout or self.model.readout)(hidden[:, -rows:])

    def settle(self, tokens: Sequence[int]) -> None:
        """See `Target`."""
        self.kv.roll_back(len(tokens) - 1)

    def _run_full(self, tokens: Sequence[int]) -> Tensor:
        """Hidden states ``[1, n, d]`` after the last layer for the positions the full path had not run."""
        kv, model, end = self.kv, self.model, len(tokens)
        kv.roll_back(end)
        start = kv.full_len
        everything = range(model.n_layers)
        step = model.step([Segment(kv, kv.full_len, end - kv.full_len)])
        self.counters.full_tokens_fed += end - kv.full_len
        if kv.boundary is None:
            hidden, _ = model.run(model.embed(tokens[kv.full_len :]), everything, step)
        else:
            # The slim path has computed the layers before the first gap for its positions; only newer ones need them.
            assert self.route is not None
            gap, hidden = self.route.first_gap, kv.boundary
            if end > kv.slim_len:
                newer = model.step([Segment(kv, kv.slim_len, end - kv.slim_len)])
                extra, _ = model.run(model.embed(tokens[kv.slim_len :]), everything[:gap], newer)
                hidden = _joined(hidden, extra)
            hidden, _ = model.run(hidden, everything[gap:], step)
        kv.full_len = kv.slim_len = end
        kv.boundary = None
        if self.on_states is not None:
            self.on_states(start, hidden)
        return hidden

    def _timed(self, tier: str) -> Stopwatch:
        return Stopwatch(self.counters.seconds_by_tier, tier, self.model.device)


def _joined(before: Tensor | None, after: Tensor) -> Tensor:
    return after if before is None else torch.cat([before, after], dim=1)
