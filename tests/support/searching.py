"""A scorer of numbers and a worker process, for tests of the study that need no model."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import torch

from viasd.routes import Route
from viasd.search.objective import Evaluation
from viasd.search.proposals import DimrSampler, SearchSpace
from viasd.search.scorer import Score
from viasd.search.storage import open_storage
from viasd.search.study import Progress, Search, open_study

SPACE = SearchSpace(16, 6)


class NumberObjective:
    """The cost of skipping layer l is ``7 l mod 5``; nothing else matters."""

    name = "cost"

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.seen: list[tuple[bool, ...]] = []

    def evaluate(self, route: Route, report: Callable[[int, float], None]) -> Evaluation:
        self.seen.append(route.keep)
        time.sleep(self.seconds)
        cost = float(sum((7 * i) % 5 for i, keep in enumerate(route.keep) if not keep))
        report(0, cost)
        figures = {"cost": cost, "kl": 0.0, "tv": 0.0, "agreement": 0.0}
        return Evaluation(figures, Score(cost, 0.0, 0.0, 0.0, 1, torch.zeros(1), torch.zeros(1)))

    def values(self, figures: dict[str, float]) -> list[float]:
        return [figures["cost"]]


def search(
    url: str | None,
    trials: int,
    name: str = "s",
    space: SearchSpace = SPACE,
    seconds: float = 0.0,
    setup: dict[str, Any] | None = None,
    tell: Callable[[Progress], None] = lambda progress: None,
) -> Search:
    sampler = DimrSampler(space, trials)
    storage = optuna.storages.InMemoryStorage() if url is None else open_storage(url)
    study = open_study(storage, name, {"of": "test"} if setup is None else setup, sampler)
    objective: Any = NumberObjective(seconds)
    return Search(study, sampler, objective, trials, tell)


def worker(url: str, trials: int, seconds: float, name: str = "s") -> subprocess.Popen[bytes]:
    """Another process that works on a study."""
    arguments = repr((url, trials, name, SPACE, seconds)).replace("SearchSpace", "searching.SearchSpace")
    code = f"import searching; searching.search(*{arguments}).run()"
    return subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parent)
