"""Draws the figures of docs/how-it-works.md: ``python docs/figures/draw.py`` writes them beside this file.

Each is a card with a background of its own, light or dark as the reader's screen is, so that it is legible on both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import escape

# name -> (fill on a light card, fill on a dark card)
COLOURS = {
    "card": ("#ffffff", "#161b22"),
    "ink": ("#1f2328", "#e6edf3"),
    "faint": ("#59636e", "#9198a1"),
    "line": ("#d1d9e0", "#3d444d"),
    "drafter": ("#8fd19e", "#256b36"),
    "slim": ("#f2d06b", "#6f5810"),
    "full": ("#8ecbe0", "#1a5f78"),
    "refused": ("#f0a8a0", "#86362f"),
}
CELL = 26


class Drawing:
    """A figure in the making.

    Args:
        width: Of the card, in pixels.
        height: Likewise.
        title: What it shows, for those who can't see it.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self._width, self._height, self._title = width, height, title
        self._parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, fill: str, *, dashed: bool = False) -> None:
        """A rectangle; `fill` is a key of `COLOURS`, and ``none`` an empty one."""
        style = f'class="{fill}"' if fill != "none" else 'fill="none"'
        dash = ' stroke-dasharray="3 3"' if dashed else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" {style} stroke-width="1"{dash} '
            f'style="stroke:var(--line)"/>'
        )

    def text(self, x: float, y: float, words: str, *, anchor: str = "start", size: int = 13, fill: str = "ink") -> None:
        """One line of text with its baseline at y."""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" class="{fill}">{escape(words)}</text>'
        )

    def cell(self, x: float, y: float, fill: str, mark: str = "", *, dashed: bool = False) -> None:
        """A square cell with its upper left corner at (x, y), and a mark in it."""
        self.box(x, y, CELL, CELL, fill, dashed=dashed)
        if mark:
            self.text(x + CELL / 2, y + CELL / 2 + 5, mark, anchor="middle")

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """A line with a head at (x2, y2)."""
        self._parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke-width="1.5" '
            f'style="stroke:var(--faint)" marker-end="url(#head)"/>'
        )

    def rule(self, x1: float, y1: float, x2: float, y2: float, colour: str = "ink") -> None:
        """A plain line."""
        self._parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke-width="2" style="stroke:var(--{colour})"/>'
        )

    def svg(self) -> str:
        """The figure as the text of a file."""
        light, dark = ("; ".join(f"--{name}: {pair[i]}" for name, pair in COLOURS.items()) for i in (0, 1))
        classes = " ".join(f".{name} {{ fill: var(--{name}) }}" for name in COLOURS)
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{self._width}" height="{self._height}" '
                f'viewBox="0 0 {self._width} {self._height}" font-family="Helvetica, Arial, sans-serif" role="img">',
                f"<title>{escape(self._title)}</title>",
                f"<style>svg {{ {light} }} @media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }} {classes}</style>",
                '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
                '<path d="M0 0 L8 4 L0 8 z" class="faint"/></marker></defs>',
                f'<rect width="{self._width}" height="{self._height}" rx="8" class="card"/>',
                *self._parts,
                "</svg>",
                "",
            ]
        )


def tiers() -> Drawing:
    """One round of three tiers: a block of five tokens on its way."""
    words = ("the", "sky", "is", "red", "as")
    figure = Drawing(760, 340, "A block of five drafted tokens moves through slim and full verifier")
    left, step = 190, 64
    rows = (
        (30, "drafter", "proposes a block", ("drafter",) * 5),
        (120, "slim verifier", "one pass over the block", ("drafter", "drafter", "slim", "refused", "none")),
        (210, "full verifier", "one pass, where asked", ("drafter", "drafter", "slim", "full", "none")),
    )
    marks = (words, ("the", "sky", "was", "?", ""), ("the", "sky", "was", "blue", ""))
    notes = (
        "p: one law a token",
        "q': keep, rewrite, or ask",
        "q: settles what is open",
    )
    for (y, who, what, fills), line, note in zip(rows, marks, notes, strict=True):
        figure.text(20, y + 18, who, size=15)
        figure.text(20, y + 36, what, size=11, fill="faint")
        for i, (fill, mark) in enumerate(zip(fills, line, strict=True)):
            figure.box(left + i * step, y, step - 8, 34, fill, dashed=fill == "none")
            if mark:
                figure.text(left + i * step + (step - 8) / 2, y + 22, mark, anchor="middle")
        figure.text(left + 5 * step + 14, y + 22, note, size=12, fill="faint")
    for y in (66, 156):
        for i in range(4):
            figure.arrow(left + i * step + 28, y + 2, left + i * step + 28, y + 50)
    figure.text(left + 4 * step, 174, "dropped", size=11, fill="faint")
    for x, fill, label in (
        (20, "drafter", "kept as drafted"),
        (180, "slim", "rewritten by the slim verifier"),
        (410, "refused", "not judged there: escalated"),
        (610, "full", "the full verifier's"),
    ):
        figure.box(x, 292, 16, 16, fill)
        figure.text(x + 22, 305, label, size=12)
    return figure


def cache() -> Drawing:
    """The cache of one sequence, with its two watermarks."""
    figure = Drawing(760, 380, "Keys by layer and position; full_len and slim_len are two watermarks")
    left, top, layers, full, slim, rest = 150, 60, 8, 9, 5, 4
    skipped = (3, 4, 6)
    for row in range(layers):
        layer = layers - 1 - row
        y = top + row * (CELL + 2)
        figure.text(left - 12, y + 18, f"layer {layer}", anchor="end", size=11, fill="faint")
        for column in range(full + slim + rest):
            x = left + column * (CELL + 2)
            if column < full:
                figure.cell(x, y, "full")
            elif column < full + slim:
                figure.cell(x, y, "none" if layer in skipped else "slim", dashed=layer in skipped)
            else:
                figure.cell(x, y, "none", dashed=True)
    bottom = top + layers * (CELL + 2)
    for column, name in ((full, "full_len"), (full + slim, "slim_len")):
        x = left + column * (CELL + 2) - 1
        figure.rule(x, top - 14, x, bottom + 6)
        figure.text(x, top - 22, name, anchor="middle")
    boundary = top + (layers - 3) * (CELL + 2) - 1
    figure.rule(left + full * (CELL + 2), boundary, left + (full + slim) * (CELL + 2) - 2, boundary, "refused")
    figure.text(left + (full + slim) * (CELL + 2) + 8, boundary + 5, "boundary: kept states", size=12)
    figure.text(left, bottom + 26, "positions 0, 1, 2, ...", size=11, fill="faint")
    for x, fill, label in (
        (20, "full", "keys of the full path"),
        (200, "slim", "keys of the slim path, layers it runs"),
        (470, "none", "empty, or overwritten before it is read"),
    ):
        figure.box(x, bottom + 48, 16, 16, fill, dashed=fill == "none")
        figure.text(x + 22, bottom + 61, label, size=12)
    figure.text(20, 24, "an escalation starts at full_len, from the boundary", size=13, fill="faint")
    return figure


def wavefront() -> Drawing:
    """One cycle of AdaDecode: tokens wait at exits and climb on together."""
    figure = Drawing(760, 380, "Tokens wait at exits inside the target and run the other layers together")
    left, top, layers = 150, 50, 8
    exits = {2: "exit", 5: "exit"}
    # For each token of the cycle: passes (the number of the pass) by layer.
    passes = (
        (1, 1, 1, 3, 3, 3, 3, 3),
        (2, 2, 2, 3, 3, 3, 3, 3),
        (3, 3, 3, 3, 3, 3, 3, 3),
    )
    names = ("committed token", "1st guess", "2nd guess")
    fills = {1: "drafter", 2: "slim", 3: "full"}
    wide = 120
    for row in range(layers):
        layer = layers - 1 - row
        y = top + row * (CELL + 4)
        figure.text(left - 12, y + 18, f"layer {layer}", anchor="end", size=11, fill="faint")
        for column, token in enumerate(passes):
            number = token[layer]
            figure.box(left + column * (wide + 10), y, wide, CELL, fills[number])
            figure.text(left + column * (wide + 10) + wide / 2, y + 18, f"pass {number}", anchor="middle", size=12)
        if layer in exits:
            figure.rule(left - 6, y - 2, left + 3 * (wide + 10) - 4, y - 2, "refused")
            figure.text(left + 3 * (wide + 10) + 4, y + 3, f"exit after {layer + 1} layers: light head", size=12)
    bottom = top + layers * (CELL + 4)
    for column, name in enumerate(names):
        figure.text(left + column * (wide + 10) + wide / 2, bottom + 18, name, anchor="middle", size=12)
    figure.text(
        20,
        26,
        "pass 3 takes the two that wait at the lower exit along; at the top all are read out and tested",
        size=13,
        fill="faint",
    )
    for x, fill, label in (
        (20, "drafter", "1: climbs to the exit, guesses, waits"),
        (270, "slim", "2: the guess does the same"),
        (480, "full", "3: the second guess goes to the top"),
    ):
        figure.box(x, bottom + 44, 16, 16, fill)
        figure.text(x + 22, bottom + 57, label, size=12)
    return figure


FIGURES: dict[str, Callable[[], Drawing]] = {"tiers": tiers, "cache": cache, "wavefront": wavefront}


def write(folder: Path) -> list[Path]:
    """Writes every figure into a folder; returns the files."""
    paths = [folder / f"{name}.svg" for name in FIGURES]
    for path, draw in zip(paths, FIGURES.values(), strict=True):
        path.write_text(draw().svg(), encoding="utf-8")
    return paths


if __name__ == "__main__":
    for written in write(Path(__file__).parent):
        sys.stdout.write(f"{written.name}\n")
