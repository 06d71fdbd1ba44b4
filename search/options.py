"""The options of `viasd-search` and its two readers of mask files. Nothing here imports torch."""

from __future__ import annotations

import argparse
from dataclasses import fields

import viasd
from viasd.confident import METHODS
from viasd.runtime.command import check_writable
from viasd.runtime.models import Parser, add_model_options, check_models
from viasd.runtime.readout_options import add_readout_options
from viasd.search.config import OBJECTIVES, SKIP_RATIO, TAU, TRIALS, SearchConfig

PROG = "viasd-search"
_EPILOG = f"""\
also:
  {PROG} show MASK        draw a mask file and its figures
  {PROG} compare A B      two mask files side by side
  {PROG} pick FRONT (--skipped N | --number N) --output FILE
                                  another mask of a pareto front, as a file
  {PROG} export MASK --output DIR
                                  its slim verifier as a model of its own, for other tools to draft with

cost is R(q' || q) of the slim verifier q' against the full verifier q, per token of text that the target wrote itself,
run in blocks of gamma + 1 as decoding does. A study can be continued, by the same command, after any interruption, and by
several processes at once: all of them together evaluate exactly --trials distinct masks."""


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parses and checks; ``command`` is ``search``, ``show``, ``compare`` or ``pick``.

    Raises:
        OptionError: If an option is malformed, or options contradict each other.
        PairError: If the pair is not registered.
    """
    if argv and argv[0] in _READERS:
        args = _reader(argv[0]).parse_args(argv[1:])
        if argv[0] == "pick":
            check_writable("output", args.output)
        return args
    args = build_parser().parse_args(argv)
    check_models(args)
    for name in ("output", "plot"):
        if (value := getattr(args, name)) is not None:
            check_writable(name, value)
    return args


def build_parser() -> argparse.ArgumentParser:
    """The parser of a search. Every option that was not given is None."""
    parser = Parser(
        prog=PROG,
        allow_abbrev=False,
        description="Find the layers of a target that a slim verifier may skip, and write them as a mask file.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command="search")
    add_model_options(parser)
    search = parser.add_argument_group("search")
    search.add_argument("--skip", type=float, metavar="X", help=f"share of the layers to skip (default {SKIP_RATIO})")
    search.add_argument(
        "--skip-range", type=_range, metavar="LO:HI", help="search masks of all sizes between two shares, e.g. 0.1:0.5"
    )
    search.add_argument(
        "--objective",
        choices=OBJECTIVES,
        help="cost: R alone (default for one ratio); time: predicted seconds per token (default for a range); pareto: all "
        "masks that are best for their speed",
    )
    search.add_argument("--trials", type=int, metavar="N", help=f"distinct masks to evaluate (default {TRIALS})")
    search.add_argument(
        "--sublayers", action="store_true", default=None, help="skip attention and MLP of a layer separately"
    )
    search.add_argument("--theta", type=int, metavar="N", help="every N-th proposal is Bayesian (default 10)")
    search.add_argument("--refine", type=float, metavar="X", help="share of the others one swap from the best (0.8)")
    search.add_argument(
        "--stitch",
        nargs="?",
        const="calibration",
        metavar="CORPUS",
        help="fit affine maps across the gaps of the best masks and take the one that is best with them: on a corpus of "
        "viasd-fit corpus, or else on the searching half",
    )
    search.add_argument("--keep-prefix", type=int, metavar="N", help="keep the first N layers (default 1)")
    search.add_argument("--seed", type=int, metavar="N", help="of every random choice (default 0)")
    search.add_argument("--controls", type=int, metavar="N", help="random masks to compare with (default: --trials)")
    cost = parser.add_argument_group("cost")
    cost.add_argument("--alpha", type=float, metavar="X", help="of the cost R (default 0.5)")
    cost.add_argument("--beta", type=float, metavar="X", help="of the cost R (default 0.5)")
    cost.add_argument("--gamma", type=int, metavar="N", help="drafted tokens per block (default 5)")
    cost.add_argument("--tau", type=int, metavar="N", help=f"scored tokens per half of the text (default {TAU})")
    cost.add_argument("--prompts", type=int, metavar="N", help="built-in questions to use at most, an even number")
    cost.add_argument(
        "--calibration", metavar="FILE", help="JSON lines or text; self (default) lets the target answer questions"
    )
    cost.add_argument(
        "--private-kv",
        action="store_true",
        default=None,
        help="score with a cache of the slim path's own, for comparison (decoding shares the full path's)",
    )
    cost.add_argument(
        "--heads",
        metavar="SPEC",
        help="also report the layers before each of these light heads as a slim verifier: a file of viasd-fit heads, or "
        "lens:E,E,...",
    )
    add_readout_options(cost, METHODS)
    where = parser.add_argument_group("study and output")
    where.add_argument(
        "--storage", metavar="URL", help="journal:///path/file.log or any Optuna URL (default: a file in the cache)"
    )
    where.add_argument("--study", metavar="NAME", help="name of the study (default: made of pair and settings)")
    where.add_argument("--output", metavar="FILE", help="the mask file (default: TARGET.skipN.json in this folder)")
    where.add_argument("--plot", metavar="FILE.png", help="also draw a figure (needs viasd[plot])")
    where.add_argument("--json", action="store_true", default=None, help="one JSON object on standard output")
    where.add_argument("--quiet", action="store_true", default=None, help="no notes and no progress")
    where.add_argument("--no-color", action="store_true", default=None, help="no colours")
    parser.add_argument("--version", action="version", version=f"{PROG} {viasd.__version__}")
    return parser


def config_from_args(args: argparse.Namespace) -> SearchConfig:
    """The search's configuration; what was not given keeps its default.

    Raises:
        OptionError: If a value is out of range.
    """
    given = {f.name: value for f in fields(SearchConfig) if (value := getattr(args, f.name, None)) is not None}
    return SearchConfig(**given)


def _range(text: str) -> tuple[float, float]:
    low, _, high = text.partition(":")
    try:
        return float(low), float(high)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected LO:HI, such as 0.1:0.5, but got '{text}'") from error


_READERS = {
    "show": "Draw a mask file and its figures.",
    "compare": "Two mask files side by side.",
    "pick": "Write another mask of a pareto front as a mask file.",
}


def _reader(command: str) -> argparse.ArgumentParser:
    parser = Parser(prog=f"{PROG} {command}", allow_abbrev=False, description=_READERS[command])
    parser.set_defaults(command=command)
    parser.add_argument(
        "masks", nargs=2 if command == "compare" else 1, metavar="MASK", help="mask file, or the name of a shipped one"
    )
    if command == "pick":
        wanted = parser.add_mutually_exclusive_group(required=True)
        wanted.add_argument("--skipped", type=float, metavar="N", help="skipped layers of the wanted mask")
        wanted.add_argument("--number", type=int, metavar="N", help="its number in the list that show prints")
        parser.add_argument("--output", metavar="FILE", required=True, help="the mask file to write")
    else:
        parser.add_argument("--json", action="store_true", default=None, help="one JSON object on standard output")
    return parser
