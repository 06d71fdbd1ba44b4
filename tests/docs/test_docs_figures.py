"""The figures that lie in docs/figures are those that the script there draws, and are sound SVG files."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from docpages import ROOT

FOLDER = ROOT / "docs" / "figures"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("draw_figures", FOLDER / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_figures_are_what_the_script_writes(script: Any, tmp_path: Path) -> None:
    written = script.write(tmp_path)
    assert {path.name for path in written} == {path.name for path in FOLDER.glob("*.svg")}
    for path in written:
        assert path.read_text(encoding="utf-8") == (FOLDER / path.name).read_text(encoding="utf-8"), path.name


def test_every_figure_is_shown_with_its_title(script: Any) -> None:
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    for name, draw in script.FIGURES.items():
        title = ElementTree.fromstring(draw().svg()).findtext("{http://www.w3.org/2000/svg}title")
        assert f"![{title}](figures/{name}.svg)" in page


def _brightness(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("screen", [0, 1], ids=["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(script: Any, screen: int) -> None:
    """At 4.5 to 1, on the card for all text and on every filled box for the marks in it."""
    colours = {name: pair[screen] for name, pair in script.COLOURS.items()}
    behind = {"ink": ("card", "drafter", "slim", "full", "refused"), "faint": ("card",)}
    for text, fills in behind.items():
        for fill in fills:
            one, other = sorted((_brightness(colours[text]), _brightness(colours[fill])))
            assert (other + 0.05) / (one + 0.05) >= 4.5, (text, fill)


def test_every_colour_that_a_figure_uses_is_defined(script: Any) -> None:
    for draw in script.FIGURES.values():
        text = draw().svg()
        used = {*re.findall(r"var\(--(\w+)\)", text), *re.findall(r'class="(\w+)"', text)}
        assert used <= set(script.COLOURS)
