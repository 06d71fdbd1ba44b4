"""`viasd-bench`: measure strategies against plain decoding and against transformers, from the command line."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from viasd.errors import OptionError
from viasd.files import write_atomically
from viasd.runtime.bench.compare import check_comparable, comparison, comparison_rows, differences
from viasd.runtime.bench.dataset import load_dataset
from viasd.runtime.bench.options import PROG, config_from_args, parse_args
from viasd.runtime.bench.records import ResultFile, read_summary
from viasd.runtime.bench.report import definitions, fitted, markdown_report, markdown_table, remarks, tables
from viasd.runtime.command import INTERRUPTED, complain, run_command
from viasd.runtime.display import Screen, clean, print_json
from viasd.runtime.models import load_models

if TYPE_CHECKING:
    from viasd.runtime.bench.run import Bench

FAILED = 1


def main(argv: list[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: Arguments; None takes those of the process.

    Returns:
        Exit code: 0; 1 if a method failed on a prompt or a lossless output differed by more than rounding; 2 after an error
        (one line on standard error), 130 after Ctrl-C, 141 when the reader went away.
    """
    return run_command(
        PROG, lambda: _main(sys.argv[1:] if argv is None else argv), "interrupted before the first prompt was measured"
    )


def _main(argv: list[str]) -> int:
    args = parse_args(argv)
    return _compare(args) if args.command == "compare" else _bench(args, argv)


def _bench(args: argparse.Namespace, argv: Sequence[str]) -> int:
    config = config_from_args(args)
    dataset = load_dataset(args.dataset, args.limit)
    screen = Screen(quiet=bool(args.quiet), color=not args.no_color)
    if args.plot is not None:
        from viasd.runtime.figures import require_matplotlib

        require_matplotlib()
    # Whatever libraries print must not end up in the output.
    with contextlib.redirect_stdout(sys.stderr):
        pair = load_models(args, screen.note)
        from viasd.runtime.bench.grid import make_grid
        from viasd.runtime.bench.provenance import environment
        from viasd.runtime.bench.run import Bench
        from viasd.runtime.prompting import wants_chat

        chat = wants_chat(pair, args.chat, None, base=bool(args.base))
        bench = Bench(pair, config, make_grid(pair, config), dataset, chat)
        for note in bench.grid.notes:
            screen.note(note)
        results = ResultFile(args.output, bench.settings(environment(pair)), list(bench.grid.methods))
        _tell_resumed(results, bench, screen)
        try:
            bench.run(results, lambda done, of, item: screen.note(f"prompt {done + 1} of {of}: {item.task} {item.id}"))
            summary = results.summary or _summarised(bench, results, argv)
        except KeyboardInterrupt:
            return _interrupted(results, bench, args.output)
    _deliver(summary, args, screen)
    return FAILED if _went_wrong(summary) else 0


def _tell_resumed(results: ResultFile, bench: Bench, screen: Screen) -> None:
    done, of = sum(results.has(item) for item in bench.dataset.items), len(bench.dataset.items)
    if results.mended:
        screen.note("the result file ended in the middle of a prompt; that prompt is measured anew")
    if done:
        screen.note(f"{done} of {of} prompts were measured before" + ("" if done == of else "; going on from there"))
        if done < of and any(m.spec.options["decoding"].get("mode") == "via" for m in bench.grid.own):
            screen.note("guards of via mode have forgotten what those prompts taught them")


def _summarised(bench: Bench, results: ResultFile, argv: Sequence[str]) -> dict[str, Any]:
    from viasd.runtime.bench.provenance import peak_memory, provenance
    from viasd.runtime.bench.summary import summarise

    peak = peak_memory(bench.pair)  # before the costs are measured, which take memory of their own
    summary = summarise(bench, results, provenance(bench.pair, bench.grid.masks, argv), peak)
    results.finish(summary)
    return summary


def _interrupted(results: ResultFile, bench: Bench, output: str | None) -> int:
    done, of = sum(results.has(item) for item in bench.dataset.items), len(bench.dataset.items)
    kept = f"they are in {output}, and the same command goes on" if output else "without --output they are lost"
    complain(PROG, f"interrupted after {done} of {of} prompts; {kept}")
    return INTERRUPTED


def _deliver(summary: dict[str, Any], args: argparse.Namespace, screen: Screen) -> None:
    if args.markdown is not None:
        write_atomically(Path(args.markdown), markdown_report(summary), OptionError)
    if args.plot is not None:
        from viasd.runtime.bench.plot import plot_summary

        plot_summary(summary, args.plot)
    if args.json:
        print_json(summary, screen)
        return
    if not screen.out.is_terminal:
        _print(markdown_report(summary), screen)
        return
    for title, rows in tables(summary):
        _show_table(rows, title, screen)
    for line in remarks(summary):
        screen.out.print(clean(line), markup=False, style="bold" if "SLOWER" in line or "BUG" in line else None)
    screen.out.print()
    for line in definitions(summary):
        screen.out.print(clean(line), markup=False, style="dim")


def _went_wrong(summary: dict[str, Any]) -> bool:
    failed = any(figures["failed"] for figures in summary["methods"].values())
    return failed or bool((summary.get("check") or {}).get("bugs"))


def _compare(args: argparse.Namespace) -> int:
    one, other = (read_summary(path) for path in args.files)
    decisive, rest = differences(one, other)
    check_comparable(decisive, force=args.force)
    found, screen = comparison(one, other), Screen()
    if args.json:
        print_json({"differences": [*decisive, *rest], "methods": found}, screen)
        return 0
    for line in (*decisive, *rest):
        screen.say(f"differs: {line}")
    if not found:
        raise OptionError("the two files have no method in common")
    rows = comparison_rows(found)
    if screen.out.is_terminal:
        _show_table(rows, "", screen)
    else:
        _print(markdown_table(rows) + "\n", screen)
    return 0


def _show_table(rows: Sequence[Sequence[str]], title: str, screen: Screen) -> None:
    from rich.table import Table
    from rich.text import Text

    for i, part in enumerate(fitted(rows, screen.out.width)):
        table = Table(title=None if i else title, title_justify="left")
        for j, head in enumerate(part[0]):
            table.add_column(Text(head), justify="right" if j else "left", overflow="fold")
        for row in part[1:]:
            table.add_row(*(Text(clean(cell)) for cell in row))
        screen.out.print(table)


def _print(text: str, screen: Screen) -> None:
    screen.out.file.write(clean(text))
    screen.out.file.flush()


if __name__ == "__main__":
    sys.exit(main())
