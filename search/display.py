"""A search as it goes on: a live panel on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from viasd.runtime.display import Screen, mask_strip
from viasd.search.objective import SECONDS, Figures
from viasd.search.run import Stage

_LINE_SECONDS = 10.0
_TITLES = {
    "calibration": "writing calibration text (tokens)",
    "search": "searching (masks)",
    "stitches": "stitching the best masks",
    "controls": "random masks to compare with",
    "report": "scoring on text that the search did not see",
}


class Watch:
    """Shows the stages of a search on standard error. Use it as a context.

    Args:
        screen: Where; a quiet one shows nothing.
    """

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        console = screen.err
        self._live = (
            Live(console=console, transient=True, refresh_per_second=4)
            if console.is_terminal and not screen.quiet
            else None
        )
        self._stage = ""
        self._first = 0
        self._entered = 0.0
        self._told = 0.0
        self._unicode = console.encoding.lower().startswith("utf")
        self._panel: tuple[str, str] | None = None

    def __enter__(self) -> Watch:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def tell(self, stage: Stage) -> None:
        """Shows one stage."""
        if self._screen.quiet:
            return
        now = time.monotonic()
        if stage.name != self._stage:
            self._stage, self._first, self._entered, self._told = stage.name, stage.done, now, 0.0
        if stage.progress is not None:
            best = stage.progress
            baseline = "" if best.baseline is None else f"; even-spaced {_value(best.baseline)}"
            strip = mask_strip(best.route.keep, "best so far", partial=best.route.parts, unicode=self._unicode)
            self._panel = (f"best: {_value(best.best)}{baseline}", strip)
        if self._live is not None:
            self._live.update(self._drawn(stage, now))
        elif now - self._told >= _LINE_SECONDS or stage.done == stage.of:
            self._told = now
            tail = f"; {self._panel[0]}" if self._panel is not None and stage.name == "search" else ""
            self._screen.say(f"{self._headline(stage, now)}{tail}")

    def _headline(self, stage: Stage, now: float) -> str:
        if stage.name == "report":
            return _TITLES[stage.name]
        done = stage.done - self._first
        left = (now - self._entered) / done * (stage.of - stage.done) if done > 0 else None
        eta = "" if left is None or stage.done == stage.of else f", {_duration(left)} left"
        return f"{_TITLES[stage.name]}: {stage.done} of {stage.of}{eta}"

    def _drawn(self, stage: Stage, now: float) -> Group:
        parts: list[Text | ProgressBar] = [Text(self._headline(stage, now))]
        if stage.name != "report":
            parts.append(ProgressBar(total=stage.of, completed=stage.done, width=50))
        parts += [Text(line, style="dim" if i else "") for i, line in enumerate(self._panel or ())]
        return Group(*parts)


def _value(figures: Figures) -> str:
    predicted = f"{1e3 * figures[SECONDS]:.1f} ms/token, " if SECONDS in figures else ""
    return f"{predicted}cost {figures['cost']:.4f}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"
