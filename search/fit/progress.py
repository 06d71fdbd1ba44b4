"""Progress of `viasd-fit` on standard error: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from viasd.runtime.display import Screen
from viasd.search.fit.training import Training

_LINE_SECONDS = 10.0


class FitProgress:
    """Shows the stages of a command. Use it as a context.

    Args:
        screen: Where; a quiet one shows nothing.
    """

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._bar: Progress | None = None
        if screen.err.is_terminal and not screen.quiet:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, TextColumn("{task.fields[figures]}"), console=screen.err, transient=True)
        self._tasks: dict[str, TaskID] = {}
        self._told = 0.0

    def __enter__(self) -> FitProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def tell(self, stage: str, done: int, of: int, figures: Mapping[str, float]) -> None:
        """Shows how far a stage is, and figures of it."""
        if self._screen.quiet:
            return
        said = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
        if self._bar is not None:
            if stage not in self._tasks:
                self._tasks[stage] = self._bar.add_task(stage, total=of, figures=said)
            self._bar.update(self._tasks[stage], completed=done, total=of, figures=said)
        elif time.monotonic() - self._told >= _LINE_SECONDS or done == of:
            self._told = time.monotonic()
            self._screen.say(f"{stage}: {done} of {of}" + (f"; {said}" if said else ""))

    def training(self, training: Training) -> None:
        """Shows how far a training is; see `viasd.search.fit.training.train`."""
        self.tell("training", training.step, training.of, {"loss": training.loss, **training.metrics})
