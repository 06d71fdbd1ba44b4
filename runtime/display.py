"""What a person sees: text coloured by the tier that produced it, a legend, notes, a status line, tables.

Answers go to standard output and everything else to standard error. Text of a model or a file is never read as markup,
and on a terminal its control characters are dropped.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from viasd.pairs import DEFAULT_PAIR, PairSpec
from viasd.runtime.names import EXITING, MASKED

if TYPE_CHECKING:
    from viasd.mask import LayerMask
    from viasd.runtime.api import Stream
    from viasd.runtime.metrics import Counters
    from viasd.runtime.result import Result

# Background of a token that was read out this many layers before the last one, or more.
SHADES = {1: "on grey23", 2: "on grey35", 4: "on grey46", 8: "on grey58"}
STYLES = {"drafter": "green", "slim": "yellow", "full": "cyan"}
_NAMES = {"drafter": "drafter", "slim": "slim verifier", "full": "full verifier"}
_CELLS, _PLAIN_CELLS = ("■", "·", "▀", "▄"), ("#", ".", "a", "m")


def clean(text: str) -> str:
    """`text` without control characters (escape sequences lose their ESC), except line breaks and tabs."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


class Screen:
    """Standard output for answers, standard error for the rest.

    Args:
        quiet: Show no notes, legend or status lines.
        color: Use colours where the stream is a terminal.
    """

    def __init__(self, *, quiet: bool = False, color: bool = True) -> None:
        colors = "auto" if color else None
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # a terminal that can't show a character still shows the rest
        # The streams of this moment: code that runs later may redirect sys.stdout.
        self.out = Console(file=sys.stdout, color_system=colors, highlight=False)  # type: ignore[arg-type]
        self.err = Console(file=sys.stderr, color_system=colors, highlight=False)  # type: ignore[arg-type]
        self.quiet = quiet
        self._legend_shown = False
        self._shades_shown = False
        self._told: set[str] = set()

    @property
    def colored(self) -> bool:
        """Whether answers are coloured."""
        return self.out.is_terminal and self.out.color_system is not None

    def say(self, line: str, style: str = "") -> None:
        """One line for the person, quiet or not."""
        self.err.out(clean(line), style=style or None, highlight=False)

    def note(self, line: str) -> None:
        """One line that a person may want to know; a repeated one is shown once."""
        if not self.quiet and line not in self._told:
            self._told.add(line)
            self.say(" ".join(line.split()), style="dim")

    def piece(self, text: str, tier: str, depth: int = 0) -> None:
        """A part of an answer, as it comes.

        Args:
            text: The text.
            tier: Where it came from.
            depth: Layers between where it was read out and the last one.
        """
        if not text:
            return
        if self.out.is_terminal:
            text = clean(text)
            style = f"{STYLES.get(tier, '')} {shade(depth, greys=self.out.color_system != 'standard')}".strip()
            self.out.out(text, style=style or None, end="", highlight=False)
        else:
            self.out.file.write(text)
        self.out.file.flush()

    def end(self) -> None:
        """The end of an answer: one line break, whatever the text ended with."""
        self.out.file.write("\n")
        self.out.file.flush()

    def legend(self) -> None:
        """Which colour is which tier, the first time only."""
        if self.quiet or self._legend_shown or not self.colored:
            return
        self._legend_shown = True
        line = Text("colours: ", style="dim")
        for tier, style in STYLES.items():
            line.append(f"■ {_NAMES[tier]}  ", style=style)
        self.err.print(line, soft_wrap=True)

    def shades(self) -> None:
        """Which shade is which layer of a confident readout, the first time only."""
        if self.quiet or self._shades_shown or not self.colored:
            return
        self._shades_shown = True
        line = Text("shades: layers before the last, where a token was read out ", style="dim")
        greys = self.out.color_system != "standard"
        for depth in SHADES if greys else [1]:
            more = "+" if depth == max(SHADES) or not greys else ""
            line.append(f" {depth}{more} ", style=shade(depth, greys=greys))
        self.err.print(line, soft_wrap=True)

    def mask(self, mask: LayerMask, *, always: bool = False) -> None:
        """The layers a slim verifier keeps, as a strip of cells; once, unless `always`."""
        strip = mask_strip(
            mask.keep, mask.name, partial=dict(mask.partial), unicode=self.err.encoding.lower().startswith("utf")
        )
        if always:
            self.say(strip)
        else:
            self.note(strip)

    def status(self, result: Result) -> None:
        """What an answer cost, and what it may have lost or what else its target was: the latter even when quiet."""
        if not self.quiet:
            self.say(status_line(result), style="dim")
        if not result.lossless or result.readouts.full is not None:
            self.say(result.loss, style="dim")


def play(answer: Stream, screen: Screen, *, show: bool = True) -> Result | None:
    """Shows an answer as it is made.

    Args:
        answer: Just started.
        screen: Where.
        show: Show the text; False leaves standard output alone.

    Returns:
        The result, ``interrupted`` if Ctrl-C ended it; None if that came before anything was done.
    """
    session = answer.session
    for line in session.notes:
        screen.note(line)
    if session.plan.strategy in MASKED and session.mask is not None:
        screen.mask(session.mask)
    shown, tier = 0, "full"
    if show:
        screen.legend()
        if session.readouts.key:
            screen.shades()
    last = session.pair.target.n_layers - 1
    try:
        for event in answer:
            if show:
                moved = [last - layer for layer in event.selected_layers if layer is not None]
                screen.piece(event.text, event.tier, max(moved, default=0))
            shown, tier = shown + len(event.text), event.tier
    except KeyboardInterrupt:
        answer.close()
    result = session.result
    if show and result is not None:
        screen.piece(result.text[shown:], tier)
        screen.end()
    return result


def status_line(result: Result) -> str:
    """One line: speed, acceptance, calls per token, and shares by tier."""
    stats = result.stats
    speed = f"{stats.seconds:.1f} s ({result.finish_reason}), {stats.tokens_per_second:.1f} tok/s"
    early = f" | {exits(stats)}" if result.strategy in EXITING else ""
    early += f" | {moves(stats)}" if result.readouts.key else ""
    return (
        f"{stats.emitted} tokens, {speed} | {counts(stats)} | {shares(stats)}{early} | {result.strategy} {result.mode}"
    )


def counts(stats: Counters) -> str:
    """Acceptance and calls, as ratios; see `viasd.runtime.options.DEFINITIONS`."""
    accepted = stats.accepted / stats.rounds if stats.rounds else 0.0
    return (
        f"{accepted:.2f} accepted, {stats.block_efficiency:.2f} emitted/round | "
        f"q' {stats.slim_calls_per_token:.2f}, q {stats.full_calls_per_token:.2f} calls/token"
    )


def exits(stats: Counters) -> str:
    """Early exits: where, how many were refused, how many waited together, and what a token cost in layers."""
    early = stats.early
    where = ", ".join(f"{layers}: {count}" for layers, count in sorted(early.exits.items())) or "none"
    cycles = sum(early.pending.values())
    pending = sum(early.exits.values()) / cycles if cycles else 0.0
    return (
        f"exits ({where}), {sum(early.refused.values())} refused, {pending:.2f} pending/cycle, "
        f"{stats.layers_per_token:.1f} layers/token"
    )


def moves(stats: Counters) -> str:
    """What confident readouts did: how many tokens they moved, how far, and what was read for it."""
    moved = stats.readout
    read = moved.read / moved.rows if moved.rows else 0.0
    return (
        f"{moved.moved} of {moved.tokens} moved, {moved.mean_depth:.2f} layers back on average and {moved.deepest} at most, "
        f"{read:.2f} rows read/row"
    )


def shade(depth: int, *, greys: bool = True) -> str:
    """Style of text that was read out so many layers before the last; 16 colours have no greys to tell apart."""
    if not greys:
        return "underline" if depth else ""
    return next((style for least, style in reversed(SHADES.items()) if depth >= least), "")


def shares(stats: Counters) -> str:
    """Share of the tokens by tier."""
    return ", ".join(f"{tier} {share:.0%}" for tier, share in stats.tier_share.items())


def mask_strip(
    keep: Sequence[bool], name: str, *, partial: Mapping[int, str] | None = None, unicode: bool = True
) -> str:
    """A mask as a strip of cells: kept and skipped, and layers of which only attention or only the MLP runs.

    Args:
        keep: One flag a layer.
        name: Name of the mask.
        partial: Half that runs, by layer, of layers that run in part.
        unicode: Whether the stream can show more than ASCII.
    """
    _, _, attention, mlp = _CELLS if unicode else _PLAIN_CELLS
    halves = partial or {}
    also = f" and half of {len(halves)}" if halves else ""
    legend = f"; {attention} attention only, {mlp} MLP only" if halves else ""
    cells = mask_cells(keep, halves, unicode=unicode)
    return f"slim verifier [{cells}] runs {sum(keep)}{also} of {len(keep)} layers ({name}{legend})"


def mask_cells(keep: Sequence[bool], partial: Mapping[int, str], *, unicode: bool = True) -> str:
    """One cell a layer: kept, skipped, attention only or MLP only."""
    kept, skipped, attention, mlp = _CELLS if unicode else _PLAIN_CELLS
    return "".join(
        kept if k else {"attention": attention, "mlp": mlp}.get(partial.get(i, ""), skipped) for i, k in enumerate(keep)
    )


def show_pairs(pairs: Sequence[PairSpec], screen: Screen) -> None:
    """All pairs: a table on a terminal, else one pair a line with tabs between the columns."""
    if not screen.out.is_terminal:
        for pair in pairs:
            screen.out.file.write(f"{pair.name}\t{pair.drafter_ref or pair.drafter}\t{pair.target_ref}\n")
        return
    table = Table("pair", "drafter", "target")
    for i, pair in enumerate(pairs):
        last = i + 1 == len(pairs) or pairs[i + 1].family != pair.family
        name = f"{pair.name} (default)" if pair.name == DEFAULT_PAIR else pair.name
        table.add_row(name, pair.drafter_ref or pair.drafter, pair.target_ref, end_section=last)
    screen.out.print(table)


def print_json(value: object, screen: Screen) -> None:
    """One strict JSON object on one line of standard output."""
    stream = screen.out.file
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(encoding="utf-8")
    stream.write(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n")
    stream.flush()
