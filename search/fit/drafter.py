"""`viasd-fit drafter`: trains a small drafter for a target. Nothing here imports torch until it is needed."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from typing import Any

from viasd.errors import OptionError
from viasd.pairs import DEFAULT_PAIR, parse_pair
from viasd.runtime.command import INTERRUPTED, complain
from viasd.runtime.display import Screen, print_json
from viasd.runtime.models import add_model_options, check_models, given_options, load_models, option

KINDS = ("feature", "standalone")
SHORTLIST = 8192
BATCH = 2048
LEARNING_RATE = 1e-3
PASSES = 4
AHEAD = 3
WIDTH = 256
DEPTH = {"feature": 1, "standalone": 3}
_NAME = "viasd-fit drafter"
# Options that say where things are and how they are shown, not what is made.
_SURROUNDINGS = {"output", "work", "json", "quiet", "no_color", "corpus", "threads", "minutes"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """See `viasd.search.fit.cli.Command`; options that were not given are None."""
    add_model_options(parser)
    fit = parser.add_argument_group("drafter")
    fit.add_argument(
        "--kind",
        choices=KINDS,
        required=True,
        help="feature: a layer over the target's last hidden states, for this target alone; standalone: a small model",
    )
    fit.add_argument(
        "--corpus",
        metavar="FILE",
        nargs="+",
        required=True,
        help="what viasd-fit corpus wrote, or .npz files of the kind; of each the last twentieth is for judging only",
    )
    fit.add_argument(
        "--max-temperature",
        type=float,
        metavar="X",
        help="only conversations drawn at most at this temperature (default all)",
    )
    fit.add_argument("--depth", type=int, metavar="N", help="decoder layers (default 1; standalone 3)")
    fit.add_argument("--width", type=int, metavar="N", help=f"standalone: width of the model (default {WIDTH})")
    fit.add_argument(
        "--inner", type=int, metavar="N", help="width of the MLPs (default: the target's; standalone: 8/3 of --width)"
    )
    fit.add_argument(
        "--shortlist", type=int, metavar="N", help=f"the corpus's most frequent tokens to draft (default {SHORTLIST})"
    )
    fit.add_argument(
        "--ahead", type=int, metavar="N", help=f"feature: steps on its own results that are trained (default {AHEAD})"
    )
    fit.add_argument(
        "--accept-weight",
        type=float,
        metavar="X",
        help="of the acceptance loss 1 - sum min(p, q) beside KL (default 1)",
    )
    fit.add_argument("--passes", type=float, metavar="X", help=f"times over the corpus (default {PASSES})")
    fit.add_argument("--steps", type=int, metavar="N", help="optimizer steps, instead of --passes")
    fit.add_argument("--minutes", type=float, metavar="X", help="stop after so long; the same command goes on")
    fit.add_argument("--batch", type=int, metavar="N", help=f"tokens a step (default {BATCH})")
    fit.add_argument("--lr", type=float, metavar="X", help=f"largest learning rate (default {LEARNING_RATE:g})")
    fit.add_argument("--seed", type=int, metavar="N", help="of weights and order (default 0)")
    out = parser.add_argument_group("output")
    out.add_argument(
        "--output",
        metavar="PATH",
        required=True,
        help="feature: a safetensors file; standalone: a folder as transformers reads it",
    )
    out.add_argument("--work", metavar="FOLDER", help="for checkpoints and hidden states (default: the cache folder)")
    out.add_argument("--json", action="store_true", default=None, help="one JSON object on standard output")
    out.add_argument("--quiet", action="store_true", default=None, help="no notes and no progress")
    out.add_argument("--no-color", action="store_true", default=None, help="no colours")


def run(args: argparse.Namespace) -> int:
    """Trains, examines and writes a drafter; an interrupted training goes on with the same command.

    Raises:
        ViasdError: If options contradict each other, a corpus is unfit, or the training fails.
    """
    _check(args)
    screen = Screen(quiet=bool(args.quiet), color=not args.no_color)
    with contextlib.redirect_stdout(sys.stderr):
        from viasd.search.fit.drafterfit import FitSettings, fit_drafter

        settings = FitSettings(
            kind=args.kind,
            depth=DEPTH[args.kind] if args.depth is None else args.depth,
            width=WIDTH if args.width is None else args.width,
            inner=args.inner,
            shortlist=SHORTLIST if args.shortlist is None else args.shortlist,
            ahead=1 if args.kind == "standalone" else AHEAD if args.ahead is None else args.ahead,
            max_temperature=args.max_temperature,
            accept_weight=1.0 if args.accept_weight is None else args.accept_weight,
            passes=PASSES if args.passes is None else args.passes,
            steps=args.steps,
            minutes=args.minutes,
            batch=BATCH if args.batch is None else args.batch,
            lr=LEARNING_RATE if args.lr is None else args.lr,
            seed=args.seed or 0,
        )
        pair = load_models(args, screen.note)
        report, training = fit_drafter(pair, settings, args.corpus, args.output, args.work, _said(args), screen)
    if report is None:
        complain(_NAME, f"interrupted after {training.step} of {training.of} steps; the same command goes on")
        return INTERRUPTED
    if args.json:
        print_json(report, screen)
    else:
        screen.out.out("\n".join(lines(report)), highlight=False)
    spec = parse_pair(args.pair or DEFAULT_PAIR, base=bool(args.base))
    target = args.target or f"{spec.family}:{spec.target}"
    screen.note(f"written to {args.output}; viasd-run --target {target} --drafter {args.output} uses it")
    return 0


def lines(report: dict[str, Any]) -> list[str]:
    """What a drafter is worth, on text it did not learn from."""
    taught, decoded = report["examined"], report["decoded"]
    said = [f"{taught['tokens']} tokens of conversations kept back, by steps ahead:"]
    said += [
        f"  step {k}: accepted mass {step['accept_mass']:.3f}, same word {step['agreement']:.3f}, KL {step['kl']:.3f}"
        for k, step in enumerate(taught["steps"], 1)
    ]
    places = ", ".join(f"{share:.2f}" for share in decoded["by_place"])
    said.append(
        f"decoding {decoded['prompts']} held-out prompts at temperature 0, {decoded['gamma']} tokens a block: "
        f"{decoded['acceptance']:.3f} of the judged tokens kept (by place {places}), "
        f"{decoded['emitted_per_round']:.2f} tokens a round"
    )
    return said


def _said(args: argparse.Namespace) -> dict[str, Any]:
    """The options that make the drafter what it is, for its record: files by their names alone."""
    said = {name: getattr(args, name) for name in sorted(given_options(args) - _SURROUNDINGS)}
    return {**said, "corpus": [os.path.basename(path) for path in args.corpus]}


def _check(args: argparse.Namespace) -> None:
    check_models(args)
    for name, least in (
        *(("depth", 1), ("width", 16), ("inner", 1), ("shortlist", 2)),
        *(("ahead", 1), ("steps", 1), ("batch", 16)),
    ):
        value = getattr(args, name)
        if value is not None and value < least:
            raise OptionError(f"--{name} must be at least {least}, but got {value}")
    if args.passes is not None and not args.passes > 0:
        raise OptionError(f"--passes must be above 0, but got {args.passes:g}")
    if args.accept_weight is not None and not 0 <= args.accept_weight < float("inf"):
        raise OptionError(f"--accept-weight must be at least 0, but got {args.accept_weight:g}")
    if args.passes is not None and args.steps is not None:
        raise OptionError("--passes and --steps contradict each other: both say how long to train; leave one out")
    for name, kind in (("width", "standalone"), ("ahead", "feature")):
        if getattr(args, name) is not None and args.kind != kind:
            raise OptionError(f"{option(name)} is for --kind {kind}, but the kind is {args.kind}; leave it out")
    if args.kind == "standalone" and args.width is not None and args.width % 16:
        raise OptionError(f"--width must be a multiple of 16, but got {args.width}")
    if args.quantization is not None:
        raise OptionError("--quantization: a drafter is trained on the weights as they are; leave it out")
    if args.kind == "feature" and os.path.isdir(args.output):
        raise OptionError(f"--output of a feature drafter is a file, but '{args.output}' is a folder")
    if args.kind == "standalone" and os.path.isfile(args.output):
        raise OptionError(f"--output of a standalone drafter is a folder, but '{args.output}' is a file")
