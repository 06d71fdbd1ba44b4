"""`viasd-search`: find the layers that a slim verifier may skip, from the command line."""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from viasd.errors import MaskError, OptionError, ViasdError
from viasd.runtime.command import INTERRUPTED, complain, run_command
from viasd.runtime.display import Screen, clean, print_json
from viasd.runtime.models import load_models
from viasd.search.config import SearchConfig, as_file_name
from viasd.search.options import PROG, check_writable, config_from_args, parse_args

if TYPE_CHECKING:
    from viasd.mask import LayerMask


def main(argv: list[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: Arguments; None takes those of the process.

    Returns:
        Exit code: 0, 2 after an error (one line on standard error), 130 after Ctrl-C, 141 when the reader went away.
    """
    return run_command(
        PROG,
        lambda: _main(sys.argv[1:] if argv is None else argv),
        "interrupted before the first mask was scored; nothing is written",
    )


def _main(argv: list[str]) -> int:
    if argv[:1] == ["export"]:
        from viasd.search.export import run

        return run(argv[1:])
    args = parse_args(argv)
    return _search(args) if args.command == "search" else _read(args)


def _search(args: argparse.Namespace) -> int:
    config = config_from_args(args)
    screen = Screen(quiet=bool(args.quiet), color=not args.no_color)
    if args.plot is not None:
        from viasd.runtime.figures import require_matplotlib

        require_matplotlib()
    if config.warning is not None:
        screen.note(config.warning)
    # Whatever libraries print must not end up in the output.
    with contextlib.redirect_stdout(sys.stderr):
        pair = load_models(args, screen.note)
        path = args.output or default_output(pair.target_id, config)
        check_writable("output", path)
        from viasd.search.display import Watch
        from viasd.search.run import search_mask

        with Watch(screen) as watch:
            outcome = search_mask(pair, config, watch.tell)
        outcome = replace(outcome, mask=replace(outcome.mask, name=Path(path).stem))
        try:
            outcome.mask.save(path)
        except ViasdError as error:
            raise OptionError(
                f"{error}; nothing is lost: the study keeps every score, and the same command with another --output "
                "writes the mask"
            ) from error
        if outcome.mask.stitches is not None:  # with the name of the file that they are in now
            from viasd.mask import LayerMask

            outcome = replace(outcome, mask=LayerMask.load(path))
        if args.plot is not None:
            from viasd.search.plot import plot_outcome

            plot_outcome(outcome, args.plot)
    if args.json:
        print_json(outcome.as_json(), screen)
    else:
        from viasd.search.report import outcome_report

        _print(outcome_report(outcome, unicode=_unicode(screen)), screen)
    screen.note(f"mask written to {path} (study {outcome.study})")
    if outcome.interrupted:
        complain(
            PROG,
            f"interrupted after {outcome.trials} of {outcome.wanted} masks; the best so far is in {path}, and the same "
            "command goes on",
        )
        return INTERRUPTED
    return 0


def default_output(target: str, config: SearchConfig) -> str:
    """Where the mask goes when nobody says: ``TARGET.skip45.json`` in this folder, by the percentage that was asked for."""
    low, high = (f"{100 * ratio:.4g}" for ratio in config.ratios)
    halves = "-sublayers" if config.sublayers else ""
    return f"{as_file_name(Path(target).name)}.skip{low}{'' if low == high else f'to{high}'}{halves}.json"


def _read(args: argparse.Namespace) -> int:
    """`show`, `compare` and `pick`."""
    from viasd.shipped import find_mask

    masks = [find_mask(name) for name in args.masks]
    screen = Screen()
    try:
        return _show(args, masks, screen)
    # Figures are read where they are printed; what is not what a search writes fails there.
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise MaskError(
            f"the figures of {' or '.join(repr(m.name) for m in masks)} are not of the kinds that a search writes "
            f"({type(error).__name__}: {error}); --json shows them as they are"
        ) from error


def _show(args: argparse.Namespace, masks: list[LayerMask], screen: Screen) -> int:
    from viasd.search.report import compare_lines, mask_lines

    if args.command == "pick":
        from viasd.search.front import picked

        one = picked(masks[0], skipped=args.skipped, number=args.number)
        replace(one, name=Path(args.output).stem).save(args.output)
        screen.note(f"mask written to {args.output}")
        return 0
    if args.command == "show":
        if args.json:
            print_json(masks[0].to_json(), screen)
        else:
            _print("\n".join(mask_lines(masks[0], unicode=_unicode(screen))), screen)
        return 0
    one, other = masks
    if len(one.keep) != len(other.keep):
        raise OptionError(
            f"the masks are for targets of {len(one.keep)} and {len(other.keep)} layers, which can't be compared"
        )
    if args.json:
        skipped = [set(range(len(m.keep))) - set(m.route.layers) for m in masks]
        print_json(
            {
                "skipped_by_both": sorted(skipped[0] & skipped[1]),
                "skipped_by_first": sorted(skipped[0] - skipped[1]),
                "skipped_by_second": sorted(skipped[1] - skipped[0]),
                "masks": [m.to_json() for m in masks],
            },
            screen,
        )
    else:
        _print("\n".join(compare_lines(one, other, unicode=_unicode(screen))), screen)
    return 0


def _unicode(screen: Screen) -> bool:
    return screen.out.encoding.lower().startswith("utf")


def _print(text: str, screen: Screen) -> None:
    screen.out.file.write(clean(text) + "\n")
    screen.out.file.flush()


if __name__ == "__main__":
    sys.exit(main())
