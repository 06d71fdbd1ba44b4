"""`viasd-fit stitches`: stitches a mask's gaps. Nothing here imports torch until it is needed."""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from viasd.errors import OptionError
from viasd.runtime.command import INTERRUPTED, check_writable, complain
from viasd.runtime.display import Screen, clean, print_json
from viasd.runtime.models import add_model_options, check_models, load_models

if TYPE_CHECKING:
    from viasd.search.fit.stitching import StitchConfig

_NAME = "viasd-fit stitches"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command; those that were not given are None."""
    add_model_options(parser)
    fit = parser.add_argument_group("closed form")
    fit.add_argument("--mask", metavar="MASK", required=True, help="mask file, name of a shipped one, or even:RATIO")
    fit.add_argument(
        "--corpus", metavar="FILE", required=True, help="what viasd-fit corpus wrote, or an .npz of the kind"
    )
    fit.add_argument("--tokens", type=int, metavar="N", help="answer tokens to fit on, at most (default 50000)")
    fit.add_argument("--ridge", type=float, metavar="X", help="penalty, as a share of each feature's variance (0.01)")
    fit.add_argument("--rank", type=int, metavar="N", help="rank of the stitches (default: whole matrices)")
    fit.add_argument("--gamma", type=int, metavar="N", help="drafted tokens per block (default 5)")
    tune = parser.add_argument_group("fine-tuning by KL(full || slim)")
    tune.add_argument("--steps", type=int, metavar="N", help="optimizer steps (default 0: the closed form alone)")
    tune.add_argument(
        "--adapters", type=int, metavar="N", help="rank of adapters before other kept layers (16; 0: none)"
    )
    tune.add_argument("--minutes", type=float, metavar="X", help="stop after so long; the same command goes on")
    tune.add_argument("--batch", type=int, metavar="N", help="tokens a step (default 1024)")
    tune.add_argument("--lr", type=float, metavar="X", help="largest learning rate (default 0.0001)")
    tune.add_argument("--seed", type=int, metavar="N", help="of everything random (default 0)")
    out = parser.add_argument_group("output")
    out.add_argument(
        "--exam", type=int, metavar="N", help="answer tokens kept back to judge on, at most (default 8192)"
    )
    out.add_argument("--output", metavar="FILE.json", required=True, help="the mask file; its stitches lie beside it")
    out.add_argument("--plot", metavar="FILE.png", help="draw the trust curve (needs viasd[plot])")
    out.add_argument("--work", metavar="FOLDER", help="where unfinished work is kept (default: the cache folder)")
    out.add_argument("--json", action="store_true", default=None, help="one JSON object on standard output")
    out.add_argument("--quiet", action="store_true", default=None, help="no notes and no progress")
    out.add_argument("--no-color", action="store_true", default=None, help="no colours")


def run(args: argparse.Namespace) -> int:
    """Fits, judges and writes; what was interrupted goes on with the same command.

    Raises:
        ViasdError: If options contradict each other, the corpus is unfit, or the fit fails.
    """
    _check(args)
    config = _config(args)
    screen = Screen(quiet=bool(args.quiet), color=not args.no_color)
    if args.plot is not None:
        from viasd.runtime.figures import require_matplotlib

        require_matplotlib()
    with contextlib.redirect_stdout(sys.stderr):
        pair = load_models(args, screen.note)
        from viasd.mask import LayerMask
        from viasd.search.fit.corpus import load_corpus
        from viasd.search.fit.judging import exam_of, judged
        from viasd.search.fit.progress import FitProgress
        from viasd.search.fit.stitching import stitch_mask
        from viasd.shipped import resolve_mask

        mask = resolve_mask(args.mask, pair.target.n_layers, pair.name)
        if mask is None:
            raise OptionError(f"expected --mask to name a mask, but there is none by '{args.mask}' for {pair.name}")
        mask = replace(mask, stitches=None)
        if (warning := mask.check(pair.target, pair.target_id)) is not None:
            screen.note(warning)
        corpus = load_corpus(args.corpus, pair.tokenizer)
        halves = exam_of(corpus, config, pair.target.context_length)
        work = None if args.work is None else Path(args.work)
        with FitProgress(screen) as progress:
            made = stitch_mask(pair, mask, corpus, config, work, progress.tell)
            if made.training is not None and made.training.ended == "interrupted":
                done = made.training
                complain(
                    _NAME, f"interrupted after {done.step} of {done.of} steps; the same command goes on from there"
                )
                return INTERRUPTED
            progress.tell("judging on conversations kept back", 0, 1, {})
            best = replace(judged(pair, mask, corpus, halves, config.gamma, made), name=Path(args.output).stem)
        best.save(args.output)
        best = LayerMask.load(args.output)  # as it can be used from now on
        if args.plot is not None:
            from viasd.search.plot import plot_trust

            plot_trust(best.details["trust"], best.name, args.plot)
    if args.json:
        print_json(best.to_json(), screen)
    else:
        from viasd.search.report import mask_lines

        lines = mask_lines(best, unicode=screen.out.encoding.lower().startswith("utf"))
        screen.out.file.write(clean("\n".join(lines)) + "\n")
    screen.note(f"written to {args.output}; viasd-run --mask {args.output} --tiers 3 uses it")
    return 0


def _check(args: argparse.Namespace) -> None:
    check_models(args)
    for name in ("output", "plot"):
        if (value := getattr(args, name)) is not None:
            check_writable(name, value)
    if args.steps in (None, 0):
        for name in ("adapters", "minutes", "batch", "lr"):
            if getattr(args, name) is not None:
                raise OptionError(f"--{name} is about fine-tuning, which needs --steps N; add it or leave --{name} out")
    if args.compile:
        raise OptionError(
            "--compile speeds up decoding, not fitting; leave it out (viasd-run --compile uses stitches too)"
        )


def _config(args: argparse.Namespace) -> StitchConfig:
    from viasd.search.fit.stitching import StitchConfig

    given = {f.name: value for f in fields(StitchConfig) if (value := getattr(args, f.name, None)) is not None}
    return StitchConfig(**given)
