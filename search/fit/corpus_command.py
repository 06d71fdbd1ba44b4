"""`viasd-fit corpus`: let a target write conversations. Nothing here imports torch before it is needed."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from viasd.errors import OptionError
from viasd.runtime.command import check_writable
from viasd.runtime.display import Screen, print_json
from viasd.runtime.models import add_model_options, check_models, load_models

TEMPERATURES = (0.0, 0.3, 0.6, 1.0)


def add_options(parser: argparse.ArgumentParser) -> None:
    """See `viasd.search.fit.cli.Command`."""
    add_model_options(parser)
    what = parser.add_argument_group("corpus")
    what.add_argument(
        "--conversations", type=int, metavar="N", default=2000, help="conversations in all (default 2000)"
    )
    what.add_argument(
        "--temperatures",
        type=_temperatures,
        metavar="T,T,...",
        default=TEMPERATURES,
        help=f"of the answers, in turn (default {','.join(f'{t:g}' for t in TEMPERATURES)})",
    )
    what.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        default=192,
        help="of an answer; a question has a third (default 192)",
    )
    what.add_argument("--batch", type=int, metavar="N", default=16, help="conversations written at once (default 16)")
    what.add_argument("--prompts", metavar="FILE", help="questions, one a line, instead of the target's own")
    what.add_argument("--seed", type=int, metavar="N", default=0, help="of every random choice (default 0)")
    where = parser.add_argument_group("output")
    where.add_argument("--output", metavar="FILE", required=True, help="the corpus, a .safetensors file")
    where.add_argument("--json", action="store_true", help="one JSON object on standard output")
    where.add_argument("--quiet", action="store_true", help="no notes and no progress")


def run(args: argparse.Namespace) -> int:
    """See `viasd.search.fit.cli.Command`."""
    check_models(args)
    check_writable("output", args.output)
    from viasd.search.fit.writing import WritingConfig, read_questions, write_corpus

    config = WritingConfig(args.conversations, args.temperatures, args.max_new_tokens, args.batch, args.seed)
    screen = Screen(quiet=args.quiet)
    # Whatever libraries print must not end up in the output.
    with contextlib.redirect_stdout(sys.stderr):
        from viasd.search.fit.progress import FitProgress

        questions = None if args.prompts is None else read_questions(args.prompts)
        pair = load_models(args, screen.note)
        with FitProgress(screen) as progress:
            corpus = write_corpus(
                pair,
                config,
                Path(args.output),
                questions,
                lambda done, of: progress.tell("conversations", done, of, {}),
            )
    said = {
        "output": args.output,
        "conversations": len(corpus),
        "tokens": corpus.tokens.shape[0],
        "answer_tokens": corpus.answer_tokens,
    }
    if args.json:
        print_json(said, screen)
    else:
        print(
            f"{said['conversations']} conversations, {said['tokens']} tokens, {said['answer_tokens']} of them answers"
        )
    screen.note(f"corpus written to {args.output}")
    return 0


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise OptionError(f"--temperatures must be numbers with commas between, but got '{text}'") from error
    return values
