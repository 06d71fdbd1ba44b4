"""Figures of every command that draws one: matplotlib is there, and the file is whole or untouched."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import TYPE_CHECKING

from viasd.errors import OptionError
from viasd.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def require_matplotlib() -> None:
    """Checks that a figure can be drawn, before the work that it would show.

    Raises:
        OptionError: If matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise OptionError("--plot needs matplotlib, which is not installed: pip install viasd[plot]")


def save_figure(figure: Figure, path: str) -> None:
    """Writes a figure as PNG.

    Raises:
        OptionError: If the file can't be written.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_atomically(Path(path), buffer.getvalue(), OptionError)
