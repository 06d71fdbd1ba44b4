"""`viasd-fit heads`: trains light heads for a target's exits. Nothing here imports torch until it is needed."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from viasd.errors import OptionError
from viasd.files import cache_folder
from viasd.runtime.command import INTERRUPTED, complain
from viasd.runtime.display import Screen, print_json
from viasd.runtime.models import add_model_options, check_models, load_models

if TYPE_CHECKING:
    from viasd.heads import LightHeads
    from viasd.pair import Pair
    from viasd.search.fit.corpus import Corpus
    from viasd.search.fit.training import Training

SHORTLIST = 8192
BATCH = 1536
LEARNING_RATE = 3e-3
EXAM_TOKENS = 20_000
_NAME = "viasd-fit heads"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command; those that were not given are None."""
    add_model_options(parser)
    fit = parser.add_argument_group("heads")
    fit.add_argument(
        "--corpus", metavar="FILE", required=True, help="what viasd-fit corpus wrote, or an .npz of the kind"
    )
    fit.add_argument(
        "--exits", metavar="E,E,...", help="layers run before each head (default: a quarter, a half, three quarters)"
    )
    fit.add_argument(
        "--shortlist", type=int, metavar="N", help=f"the corpus's most frequent tokens to know (default {SHORTLIST})"
    )
    fit.add_argument("--steps", type=int, metavar="N", help="optimizer steps (default: once over the corpus)")
    fit.add_argument("--minutes", type=float, metavar="X", help="stop after so long; the same command goes on")
    fit.add_argument("--batch", type=int, metavar="N", help=f"tokens a step (default {BATCH})")
    fit.add_argument("--lr", type=float, metavar="X", help=f"largest learning rate (default {LEARNING_RATE:g})")
    fit.add_argument("--seed", type=int, metavar="N", help="of the order of the text (default 0)")
    out = parser.add_argument_group("output")
    out.add_argument("--output", metavar="FILE", required=True, help="the heads, a safetensors file")
    out.add_argument("--work", metavar="FOLDER", help="where checkpoints are kept (default: the cache folder)")
    out.add_argument("--json", action="store_true", default=None, help="one JSON object on standard output")
    out.add_argument("--quiet", action="store_true", default=None, help="no notes and no progress")
    out.add_argument("--no-color", action="store_true", default=None, help="no colours")


def run(args: argparse.Namespace) -> int:
    """Trains, examines and writes heads; an interrupted training goes on with the same command.

    Raises:
        ViasdError: If options contradict each other, the corpus is unfit, or the training fails.
    """
    _check(args)
    screen = Screen(quiet=bool(args.quiet), color=not args.no_color)
    with contextlib.redirect_stdout(sys.stderr):
        pair = load_models(args, screen.note)
        heads, training = fit(pair, args, screen)
    if heads is None:
        complain(_NAME, f"interrupted after {training.step} of {training.of} steps; the same command goes on")
        return INTERRUPTED
    heads.save(args.output)
    report = {"output": args.output, "exits": list(heads.exits), **heads.details}
    if args.json:
        print_json(report, screen)
    else:
        screen.out.out("\n".join(lines(heads)), highlight=False)
    screen.note(f"written to {args.output}; viasd-run --strategy adadecode --heads {args.output} uses it")
    return 0


def fit(pair: Pair, args: argparse.Namespace, screen: Screen) -> tuple[LightHeads | None, Training]:
    """Heads for a pair's target, None where Ctrl-C ended the training; and how far that got."""
    import torch

    import viasd
    from viasd.heads import LightHeads, parse_exits
    from viasd.mask import ModelIdentity
    from viasd.search.fit.corpus import load_corpus
    from viasd.search.fit.headtraining import HeadStack, examine, shortlist_of
    from viasd.search.fit.progress import FitProgress
    from viasd.search.fit.training import TrainingConfig, train

    model = pair.target
    n = model.n_layers
    exits = tuple(sorted({max(1, n * k // 4) for k in (1, 2, 3)})) if args.exits is None else parse_exits(args.exits)
    corpus = load_corpus(args.corpus, pair.tokenizer)
    learn, held = corpus.split()
    limit = model.context_length
    shortlist = shortlist_of(
        corpus, learn, min(SHORTLIST if args.shortlist is None else args.shortlist, model.vocabulary)
    )
    identity = ModelIdentity.of(model, pair.target_id)
    LightHeads(exits, shortlist=shortlist).check(model, pair.target_id)  # before anything is trained
    for parameter in model.model.parameters():
        parameter.requires_grad_(False)
    stack = HeadStack(model, exits, shortlist)
    seed, budget = args.seed or 0, args.batch or BATCH
    batches = corpus.batches(learn, budget, seed=seed, max_length=limit)
    config = TrainingConfig(
        steps=args.steps or len(batches),
        lr=LEARNING_RATE if args.lr is None else args.lr,
        weight_decay=0.0,  # T starts at the identity, and 0 is no better a place to be drawn to
        seed=seed,
        minutes=args.minutes,
    )
    said = [asdict(identity), corpus.hash, exits, len(shortlist), seed, budget, pair.dtype]
    digest = hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]
    folder = Path(args.work) if args.work else cache_folder() / "fits" / f"heads-{digest}"

    def loss(step: int) -> tuple[torch.Tensor, dict[str, float]]:
        lesson = stack.lesson(batches[step % len(batches)])
        if lesson is None:
            return stack.transforms.sum() * 0.0, {}
        kl, probe = stack(lesson)
        return kl.sum() + probe.sum(), {f"KL {e}": v for e, v in zip(exits, kl.tolist(), strict=True)}

    with FitProgress(screen) as progress:
        training = train(stack, loss, config, folder, digest, progress.training)
    if training.ended == "interrupted":
        return None, training
    examined = examine(stack, _some(corpus, held, budget, limit))
    details = {
        "corpus": {"hash": corpus.hash, "conversations": len(corpus), "answer_tokens": corpus.answer_tokens},
        "training": {"steps": training.step, "of": training.of, "seconds": round(training.seconds), "lr": config.lr},
        "examined": {"tokens": examined.tokens, "exits": list(examined.figures)},
        "calibration": examined.calibration,
        "dtype": pair.dtype,
        "versions": {"viasd": viasd.__version__, "torch": str(torch.__version__)},
    }
    heads = LightHeads(
        exits,
        stack.transforms.detach().to(torch.bfloat16),
        shortlist,
        stack.probes.detach().to(torch.float32),
        identity,
        Path(args.output).name.removesuffix(".safetensors"),
        details,
    )
    return heads, training


def lines(heads: LightHeads) -> list[str]:
    """What heads are worth, as a table: one exit a line, on conversations they did not learn from."""
    examined = heads.details["examined"]
    names = list(examined["exits"][0])
    rows = [
        ["exit", *names],
        *([str(e), *(f"{f[n]:.3f}" for n in names)] for e, f in zip(heads.exits, examined["exits"], strict=True)),
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [f"{examined['tokens']} tokens of conversations kept back:", *table]


def _some(corpus: Corpus, numbers: Sequence[int], budget: int, limit: int) -> list[Any]:
    """Batches of about `EXAM_TOKENS` tokens."""
    chosen, tokens = [], 0
    for number in numbers:
        if tokens >= EXAM_TOKENS:
            break
        chosen.append(number)
        tokens += min(limit, len(corpus.conversation(number)))
    return corpus.batches(chosen, budget, max_length=limit)


def _check(args: argparse.Namespace) -> None:
    check_models(args)
    for name, least in (("shortlist", 2), ("steps", 1), ("batch", 16)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise OptionError(f"--{name} must be at least {least}, but got {value}")
    if args.quantization is not None:
        raise OptionError("--quantization: heads are trained on the weights as they are; leave it out")
