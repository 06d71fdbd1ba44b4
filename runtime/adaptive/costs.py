"""Seconds of passes that carry many sequences, by total tokens: measured, made monotone, kept on disk.

No table, no trimming: what a pass costs can't be guessed.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from viasd.estimator import Array
from viasd.featuremodel import Entries, FeatureModel
from viasd.hardware import cpu_name, wait_for
from viasd.layered import LayeredModel
from viasd.pair import Pair
from viasd.remember import remembered
from viasd.routes import Route
from viasd.runtime.costs import accelerator, interpolated, models_said
from viasd.runtime.drafters.along import short_readout_of
from viasd.runtime.packed import Line, read_out, through
from viasd.shortlist import ShortReadout

_CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)  # batches that tables are made for; the next larger one is used
_BUCKETS = (256, 1024, 4096)  # lengths of the text before the pass
_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # total tokens of the passes that are timed
_REPEATS = 5
_PATIENCE = 4.0  # seconds after which fewer repeats have to do
# Distinct caches that the sequences of a timed pass share: memory of many would be the table's largest cost.
_CACHES = 4
_LEAST_GAIN = 0.02
# Raised whenever another thing is timed: a table that an earlier version kept does not mean the same.
_TIMED = 3


@dataclass(frozen=True)
class BatchCosts:
    """Median seconds of packed passes.

    Attributes:
        sequences: Most sequences that they carry: passes of fewer tokens carry one of each, larger ones several.
        context: Tokens before them.
        full: Tokens of a pass -> seconds of the full verifier, never falling.
        slim: The same of the slim verifier; empty without one.
        drafter: Sequences that a step drafts for -> seconds of one drafted token each; empty where drafting is free.
    """

    sequences: int
    context: int
    full: dict[int, float]
    slim: dict[int, float]
    drafter: dict[int, float]

    def full_seconds(self, tokens: float) -> float:
        """Seconds of a full pass over so many tokens in all."""
        return _seconds(self.full, tokens)

    def slim_seconds(self, tokens: float) -> float:
        """The same of a slim pass; none is free."""
        return _seconds(self.slim, tokens) if tokens else 0.0

    def draft_seconds(self, sequences: float) -> float:
        """Seconds of one drafted token for so many sequences."""
        return _seconds(self.drafter, sequences) if self.drafter and sequences else 0.0

    def step(self, sequences: int, gamma: int) -> StepCosts:
        """What steps of so many sequences cost, with blocks of up to `gamma` tokens."""
        return StepCosts(
            np.array([self.draft_seconds(m) for m in range(sequences + 1)]),
            np.array([self.full_seconds(sequences + b) for b in range(sequences * gamma + 1)]),
        )

    def can_pay(self, sequences: int, gamma: int) -> bool:
        """Whether trimming could make a step of so many sequences at least 2 % cheaper, were every draft dropped."""
        least, most = self.full_seconds(sequences), self.full_seconds(sequences * (gamma + 1))
        return least < most * (1 - _LEAST_GAIN)

    def as_json(self) -> dict[str, Any]:
        """For files."""
        return {name: getattr(self, name) for name in ("sequences", "context", "full", "slim", "drafter")}


class StepCosts:
    """Seconds of a step's passes, looked up for many numbers at once: on straight lines between whole numbers.

    Args:
        drafting: Of one drafted token for 0, 1, ... n sequences, ``[n + 1]``.
        verifying: Of the full pass with 0, 1, ... drafted tokens, as many as there can be.

    Attributes:
        sequences: n.
        nothing: Seconds of a step that drafts nothing.
    """

    def __init__(self, drafting: Array, verifying: Array) -> None:
        self.sequences = len(drafting) - 1
        self.nothing = float(verifying[0])
        self._drafting = drafting
        self._verifying = verifying

    def drafting(self, sequences: float | Array) -> Array:
        """Of one drafted token for (a mean of) so many sequences."""
        return np.asarray(np.interp(sequences, np.arange(len(self._drafting)), self._drafting))

    def verifying(self, drafted: float | Array) -> Array:
        """Of the full pass over so many drafted tokens and one of every sequence."""
        return np.asarray(np.interp(drafted, np.arange(len(self._verifying)), self._verifying))


def monotone(seconds: Mapping[int, float]) -> dict[int, float]:
    """Never falling in the number of tokens: a pass is never dearer than a larger one, to which it could be padded.

    Of two sizes that contradict each other the smaller one is corrected: what disturbs a timing makes it longer.
    """
    sizes = sorted(seconds, reverse=True)
    return dict(reversed(list(zip(sizes, accumulate((seconds[s] for s in sizes), min), strict=True))))


def _seconds(known: Mapping[int, float], tokens: float) -> float:
    largest = max(known)
    # Beyond what was measured a pass is taken to be bound by its arithmetic.
    return known[largest] * tokens / largest if tokens > largest else interpolated(known, tokens)


def batch_costs(
    pair: Pair, route: Route | None, concurrency: int, context: int, gamma: int, drafter: Route | None = None
) -> BatchCosts:
    """The table of a batch: remembered, read from the cache folder, or measured and kept there.

    Args:
        pair: The pair.
        route: Layers of the slim verifier, or None.
        concurrency: Most sequences of a step; the next larger table is used.
        context: Tokens before a pass, likewise.
        gamma: Longest block.
        drafter: Layers of the self drafter, for that kind.
    """
    limit = pair.target.context_length - gamma - 2
    bucket = max(1, min(next((b for b in _BUCKETS if b >= context), _BUCKETS[-1]), limit))
    most = next((n for n in _CONCURRENCY if n >= concurrency), _CONCURRENCY[-1])
    key = ("batch costs", route, drafter, most, bucket, gamma, torch.get_num_threads())
    if key not in pair.measured:
        said = {
            "machine": [cpu_name(), os.cpu_count(), torch.get_num_threads(), accelerator(pair)],
            **models_said(pair),
            "routes": [None if r is None else r.key for r in (route, drafter)],
            "concurrency": most,
            "bucket": bucket,
            "sizes": sizes(most, gamma),
            "timed": _TIMED,
        }
        with torch.inference_mode():
            pair.measured[key] = remembered(
                "batch-costs",
                said,
                lambda: _measure(pair, route, drafter, most, bucket, gamma),
                BatchCosts.as_json,
                _parsed,
            )
    table: BatchCosts = pair.measured[key]
    return table


def sizes(concurrency: int, gamma: int) -> list[int]:
    """Total tokens of the passes that are timed for a batch."""
    largest = min(concurrency * (gamma + 1), _SIZES[-1])
    return [n for n in _SIZES if n < largest] + [largest]


def _parsed(data: Any) -> BatchCosts:
    tables = {name: {int(n): float(s) for n, s in data[name].items()} for name in ("full", "slim", "drafter")}
    return BatchCosts(int(data["sequences"]), int(data["context"]), **tables)


def _measure(
    pair: Pair, route: Route | None, drafter: Route | None, sequences: int, bucket: int, gamma: int
) -> BatchCosts:
    """Every pass in turn, several times over, so that a busy moment of the machine falls on all of them alike."""
    target = _Batch(pair.target, sequences, bucket)
    jobs: dict[tuple[str, int], Callable[[], object]] = {}
    for n in sizes(sequences, gamma):
        jobs["full", n] = target.job(n, None)
        if route is not None:
            jobs["slim", n] = target.job(n, route)
    steps = [n for n in _CONCURRENCY if n <= sequences]
    if drafter is not None:
        jobs |= {("drafter", n): target.job(n, drafter) for n in steps}
    elif pair.drafter is not None:
        batch = _Batch(pair.drafter, sequences, bucket, short_readout_of(pair))
        jobs |= {("drafter", n): batch.job(n, None) for n in steps}
    elif pair.feature is not None:
        jobs |= {("drafter", n): _feature_job(pair.feature, n, bucket) for n in steps}
    taken: dict[tuple[str, int], list[float]] = {key: [] for key in jobs}
    begun = time.perf_counter()
    for repeat in range(_REPEATS + 1):
        if repeat > 1 and time.perf_counter() - begun > _PATIENCE:
            break
        for key, job in jobs.items():
            wait_for(pair.target.device)
            start = time.perf_counter()
            job()
            wait_for(pair.target.device)
            if repeat:  # the first is a warm-up
                taken[key].append(time.perf_counter() - start)
    tables: dict[str, dict[int, float]] = {"full": {}, "slim": {}, "drafter": {}}
    for (name, n), seconds in taken.items():
        tables[name][n] = statistics.median(seconds)
    return BatchCosts(sequences, bucket, **{name: monotone(table) for name, table in tables.items()})


def _feature_job(feature: FeatureModel, sequences: int, bucket: int) -> Callable[[], object]:
    """One drafted token for each of some sequences."""
    width, model = feature.file.shape.width, feature.model
    state = torch.zeros(1, 1, width, dtype=model.dtype, device=model.device)
    caches = [feature.new_kv() for _ in range(min(sequences, _CACHES))]
    for kv in caches:
        feature.run(state, [0], kv)
        kv.stretch(max(1, min(bucket, feature.file.shape.context - 1)))
    entries = [Entries(state, [0], caches[i % len(caches)]) for i in range(sequences)]

    def run() -> object:
        return feature.logits.last(feature.together(entries), [1] * sequences)[0][0].best

    return run


class _Batch:
    """Caches of some sequences of one length, for passes that are only timed.

    Args:
        model: Whose passes they are.
        sequences: How many.
        bucket: Tokens before a pass.
        readout: In the place of the model's or a route's, None for theirs.
    """

    def __init__(
        self,
        model: LayeredModel,
        sequences: int,
        bucket: int,
        readout: ShortReadout | None = None,
    ) -> None:
        self._model, self._sequences, self._readout = model, sequences, readout
        self._start = min(bucket, model.context_length - 2)
        self._caches = [model.new_kv() for _ in range(min(sequences, _CACHES))]
        for kv in self._caches:
            through(model, None, [Line(kv, 0, [0])])
            kv.full_len = kv.slim_len = 1
            kv.stretch(self._start)

    def job(self, tokens: int, route: Route | None) -> Callable[[], object]:
        """A pass over so many tokens in all, spread over the sequences, read out at every one."""
        n = min(tokens, self._sequences)
        lengths = [tokens // n + (i < tokens % n) for i in range(n)]
        lines = [Line(self._caches[i % len(self._caches)], self._start, [0] * m) for i, m in enumerate(lengths)]

        def run() -> object:
            hidden, _ = through(self._model, route, lines)
            if self._readout is not None:
                return self._readout.last(hidden, lengths)[0][0].best
            return read_out(self._model, route, hidden, lengths)

        return run
