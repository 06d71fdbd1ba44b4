"""Jobs timed in turn, and what is said of their times."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median


def interleaved(jobs: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of every job, run in turn `repeats` times after one warm-up each."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for repeat in range(repeats + 1):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            if repeat:
                times[name].append(time.perf_counter() - start)
    return times


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and largest of some figures."""
    return {"median": round(median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}
