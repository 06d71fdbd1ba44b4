"""`python -m viasd.runtime.bench.acceptance`: label drafts of a pair, and score what predicts their acceptance."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from viasd.errors import OptionError
from viasd.files import write_atomically
from viasd.runtime.bench.dataset import Dataset, load_dataset
from viasd.runtime.command import check_writable, complain, run_command
from viasd.runtime.display import Screen
from viasd.runtime.models import Parser, add_model_options, check_models, load_models

if TYPE_CHECKING:
    from viasd.mask import LayerMask
    from viasd.pair import Pair
    from viasd.runtime.bench.acceptance.drafts import DraftFile

PROG = "python -m viasd.runtime.bench.acceptance"
DRAFTS, GAMMA, MAX_NEW_TOKENS, TEMPERATURES = 50_000, 8, 128, "0,1"
_SAVE_SECONDS = 30.0


def main(argv: list[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: Arguments; None takes those of the process.

    Returns:
        Exit code: 0, 2 after an error (one line on standard error), 130 after Ctrl-C.
    """
    chosen = sys.argv[1:] if argv is None else argv
    return run_command(
        PROG, lambda: _main(chosen), "interrupted; the same command goes on where --output was written last"
    )


def build_parser() -> argparse.ArgumentParser:
    """The parser. Every option that was not given is None."""
    parser = Parser(
        prog=PROG,
        allow_abbrev=False,
        description="Decode with two tiers, note for every judged draft what the drafter's row looked like and whether the "
        "token was kept, and score what predicts that.",
    )
    add_model_options(parser)
    what = parser.add_argument_group("what to measure")
    what.add_argument("--mask", metavar="SPEC", help="draft with the target by this mask instead of the pair's drafter")
    what.add_argument("--dataset", metavar="FILE", help="as for viasd-bench (default: built-in prompts)")
    what.add_argument("--limit", type=int, metavar="N", help="prompts per task (default: all)")
    what.add_argument("--drafts", type=int, metavar="N", default=DRAFTS, help=f"labelled drafts (default {DRAFTS})")
    what.add_argument("--gamma", type=int, metavar="N", default=GAMMA, help=f"block length (default {GAMMA})")
    what.add_argument(
        "--max-new-tokens", type=int, metavar="N", default=MAX_NEW_TOKENS, help=f"(default {MAX_NEW_TOKENS})"
    )
    what.add_argument(
        "--temperatures", metavar="LIST", default=TEMPERATURES, help=f"answers take turns (default {TEMPERATURES})"
    )
    what.add_argument("--seed", type=int, metavar="N", default=0, help="(default 0)")
    what.add_argument("--ignore-eos", action="store_true", help="go on past end-of-sequence tokens")
    what.add_argument("--chat", action=argparse.BooleanOptionalAction, help="use the chat template (default: if any)")
    what.add_argument(
        "--labels", choices=("kept", "overlap"), default="kept", help="what estimators learn from (default kept)"
    )
    how = parser.add_argument_group("what to do with it")
    how.add_argument(
        "--output", metavar="FILE.npz", required=True, help="the drafts; the same command continues the file"
    )
    how.add_argument("--json", metavar="FILE", help="also write every figure as JSON")
    how.add_argument("--markdown", metavar="FILE", help="also write the report as Markdown")
    how.add_argument("--plot", metavar="FILE.png", help="also draw a figure (needs viasd[plot])")
    how.add_argument("--quiet", action="store_true", default=None, help="no notes and no progress")
    how.add_argument("--no-color", action="store_true", default=None, help="no colours")
    return parser


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    args = build_parser().parse_args(argv)
    drafter = check_models(args)
    if drafter == "lookup" and args.mask is None:
        raise OptionError("prompt lookup has no rows to look at; use a drafter model, self, or add --mask")
    for name in ("drafts", "gamma", "max_new_tokens", "limit"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise OptionError(f"--{name.replace('_', '-')} must be at least 1, but got {value}")
    for name in ("output", "json", "markdown", "plot"):
        if (value := getattr(args, name)) is not None:
            check_writable(name, value)
    try:
        args.temperatures = [float(part) for part in args.temperatures.split(",")]
    except ValueError as error:
        raise OptionError(f"--temperatures takes numbers separated by commas, but got '{args.temperatures}'") from error
    if min(args.temperatures) < 0:
        raise OptionError(f"--temperatures must be at least 0, but got {min(args.temperatures):g}")
    return args


def _main(argv: Sequence[str]) -> int:
    args = _parsed(argv)
    dataset = load_dataset(args.dataset, args.limit)
    screen = Screen(quiet=bool(args.quiet), color=not args.no_color)
    if args.plot is not None:
        from viasd.runtime.figures import require_matplotlib

        require_matplotlib()
    with contextlib.redirect_stdout(sys.stderr):
        pair = load_models(args, screen.note)
        summary = _measure(pair, dataset, args, argv, screen)
    from viasd.runtime.bench.acceptance.report import markdown, plot

    report = markdown(summary)
    if args.json is not None:
        write_atomically(Path(args.json), json.dumps(summary, indent=1, allow_nan=False) + "\n", OptionError)
    if args.markdown is not None:
        write_atomically(Path(args.markdown), report, OptionError)
    if args.plot is not None:
        plot(summary, args.plot)
    screen.out.file.write(report)
    return 0


def _measure(
    pair: Pair, dataset: Dataset, args: argparse.Namespace, argv: Sequence[str], screen: Screen
) -> dict[str, Any]:
    """Drafts until there are enough, then every figure."""
    from viasd.runtime.bench.acceptance.drafts import DraftFile
    from viasd.runtime.bench.acceptance.scoring import score
    from viasd.runtime.bench.provenance import environment, provenance
    from viasd.shipped import resolve_mask

    mask = None if args.mask is None else resolve_mask(args.mask, pair.target.n_layers, pair.name)
    if args.mask is not None and mask is None:
        raise OptionError(f"--mask {args.mask} names no mask for {pair.target_id}; use even:RATIO or a file")
    if mask is not None:
        mask.check(pair.target, pair.target_id)
    settings = {
        **environment(pair),
        "pair": pair.name,
        "drafter": pair.drafter_kind if mask is None else f"self by mask {mask.name}",
        "mask": None if mask is None else mask.digest,
        "dataset": dataset.name,
        "sha256": dataset.sha256,
        **{n: getattr(args, n) for n in ("limit", "gamma", "max_new_tokens", "temperatures", "seed", "ignore_eos")},
        "chat": _chat(pair, args),
    }
    found = DraftFile(args.output, settings)
    if found.done:
        screen.note(f"{len(found)} drafts of {found.done} answers were there before")
    _fill(found, pair, dataset, mask, args, screen)
    return {
        "settings": settings,
        "provenance": {**provenance(pair, {}, argv), "command": f"{PROG} {shlex.join(argv)}"},
        "answers": found.done,
        "scores": score(found.columns, args.labels),
    }


def _chat(pair: Pair, args: argparse.Namespace) -> bool:
    from viasd.runtime.prompting import wants_chat

    return wants_chat(pair, args.chat, None, base=bool(args.base))


def _fill(
    found: DraftFile, pair: Pair, dataset: Dataset, mask: LayerMask | None, args: argparse.Namespace, screen: Screen
) -> None:
    from viasd.runtime.bench.acceptance.drafts import labelled_drafts, requests

    prompts = list(_prompts(pair, dataset, _chat(pair, args), args.max_new_tokens, screen))
    saved = time.monotonic()
    try:
        for request in requests(prompts, args.temperatures, args.seed):
            if len(found) >= args.drafts:
                break
            if request.number < found.done:
                continue
            found.add(
                labelled_drafts(
                    pair,
                    request,
                    gamma=args.gamma,
                    max_new_tokens=args.max_new_tokens,
                    mask=mask,
                    ignore_eos=args.ignore_eos,
                )
            )
            if time.monotonic() - saved > _SAVE_SECONDS:
                found.save()
                saved = time.monotonic()
                if not args.quiet:
                    screen.say(f"{len(found)} of {args.drafts} drafts, {found.done} answers")
    finally:
        found.save()
    if len(found) < args.drafts:
        complain(
            PROG, f"only {len(found)} of {args.drafts} drafts: greedy answers to these prompts would repeat themselves"
        )
    if not len(found):
        raise OptionError("no draft was judged: every answer ended at once; give prompts with longer answers")


def _prompts(pair: Pair, dataset: Dataset, chat: bool, room: int, screen: Screen) -> Iterator[list[int]]:
    """Prompts as tokens; those that leave no room for an answer are left out."""
    for item in dataset.items:
        ids = list(pair.encode([{"role": "user", "content": item.text}] if chat else item.text))
        if len(ids) + room <= pair.target.context_length:
            yield ids
        else:
            screen.note(f"prompt {item.id} is too long for the target and left out")


if __name__ == "__main__":
    sys.exit(main())
