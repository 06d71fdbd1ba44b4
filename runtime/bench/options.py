"""The options of `viasd-bench` and of its comparison of two result files. Nothing here imports torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, TypeVar

import viasd
from viasd import masks
from viasd.errors import MaskError, OptionError
from viasd.runtime.bench.config import GAMMA, MAX_NEW_TOKENS, MODES, PEERS, REPEATS, BenchConfig
from viasd.runtime.command import check_writable, is_file
from viasd.runtime.models import Parser, add_model_options, check_models
from viasd.runtime.names import BASELINES

PROG = "viasd-bench"
_EPILOG = f"""\
also:
  {PROG} compare A B      two result files side by side

Every method runs on the same weights in the same process, on the same prompts, in turn and in rotating order, after a
warm-up. What is printed is a median with its spread, and what is slower than plain decoding is said to be.

Exit code 1: a method failed on a prompt, or a lossless output differs from plain decoding by more than rounding (--check).
literature strategies: {", ".join(BASELINES)}"""

_T = TypeVar("_T")


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parses and checks; ``command`` is ``bench`` or ``compare``.

    Raises:
        OptionError: If an option is malformed, or options contradict each other.
        PairError: If the pair is not registered.
    """
    if argv[:1] == ["compare"]:
        return _compare_parser().parse_args(argv[1:])
    args = build_parser().parse_args(argv)
    check_models(args)
    for name in ("output", "markdown", "plot"):
        if (value := getattr(args, name)) is not None:
            check_writable(name, value)
    if args.limit is not None and args.limit < 1:
        raise OptionError(f"--limit must be at least 1, but got {args.limit}")
    return args


def build_parser() -> argparse.ArgumentParser:
    """The parser of a benchmark. Every option that was not given is None."""
    parser = Parser(
        prog=PROG,
        allow_abbrev=False,
        description="Measure strategies against plain decoding and against transformers, in one process.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command="bench")
    add_model_options(parser)
    what = parser.add_argument_group("what to measure")
    what.add_argument("--strategies", metavar="LIST", help="comma-separated (default plain,sd,cascade)")
    what.add_argument("--peers", metavar="LIST", help=f"of transformers: {','.join(PEERS)} (default: all), or none")
    what.add_argument("--modes", metavar="LIST", help=f"of {','.join(MODES)} (default lossless)")
    what.add_argument(
        "--masks", metavar="LIST", help="auto, even:RATIO, prefix:E or files (default: shipped, else even:0.45)"
    )
    what.add_argument(
        "--heads", metavar="SPEC", help="light heads of adadecode and of masks prefix:E, as for viasd-run"
    )
    what.add_argument("--gammas", metavar="LIST", help=f"longest drafted blocks (default {GAMMA})")
    what.add_argument("--alpha", type=float, metavar="X", help="of bounded mode and of lossy strategies (0.1)")
    what.add_argument(
        "--baselines",
        action="store_true",
        default=None,
        help="add baselines matched to the lossy methods: strict sd at several gammas, lossy sd over alpha, sampling "
        "truncated at the same theta, the slim verifier alone, a random mask of the same size",
    )
    what.add_argument(
        "--unverified",
        action="store_true",
        default=None,
        help="also adadecode with its guesses taken untested (LOSSY): what its verification costs, and is worth",
    )
    on = parser.add_argument_group("on what")
    on.add_argument(
        "--dataset", metavar="FILE", help="JSON lines as Spec-Bench, GSM8K or HumanEval (default: built-in prompts)"
    )
    on.add_argument("--limit", type=int, metavar="N", help="prompts per task (default: all)")
    on.add_argument("--max-new-tokens", type=int, metavar="N", help=f"(default {MAX_NEW_TOKENS})")
    on.add_argument("--temperature", type=float, metavar="X", help="0 (default) is greedy")
    on.add_argument("--seed", type=int, metavar="N", help="(default 0)")
    on.add_argument("--ignore-eos", action="store_true", default=None, help="go on past end-of-sequence tokens")
    on.add_argument("--chat", action=argparse.BooleanOptionalAction, help="use the chat template (default: if any)")
    how = parser.add_argument_group("how, and what to do with it")
    how.add_argument("--repeats", type=int, metavar="N", help=f"timed runs a prompt and method (default {REPEATS})")
    how.add_argument("--warmup", type=int, metavar="N", help="untimed runs a method (default 1)")
    how.add_argument(
        "--check", action="store_true", default=None, help="compare outputs with plain greedy decoding, token by token"
    )
    how.add_argument("--output", metavar="FILE", help="JSON lines; the same command continues an interrupted file")
    how.add_argument("--markdown", metavar="FILE", help="also write the report as Markdown")
    how.add_argument("--plot", metavar="FILE.png", help="also draw a figure (needs viasd[plot])")
    how.add_argument(
        "--json", action="store_true", default=None, help="the summary, one JSON object, on standard output"
    )
    how.add_argument("--quiet", action="store_true", default=None, help="no notes and no progress")
    how.add_argument("--no-color", action="store_true", default=None, help="no colours")
    parser.add_argument("--version", action="version", version=f"{PROG} {viasd.__version__}")
    return parser


def config_from_args(args: argparse.Namespace) -> BenchConfig:
    """The configuration; what was not given keeps its default.

    Raises:
        OptionError: If a list is malformed, a name unknown, or a number out of range.
        MaskError: If a mask file is missing.
    """
    given: dict[str, Any] = {
        name: value
        for name in (
            *("alpha", "heads", "max_new_tokens", "temperature", "seed", "repeats", "warmup"),
            *("ignore_eos", "check", "baselines", "unverified"),
        )
        if (value := getattr(args, name)) is not None
    }
    for name in ("strategies", "peers", "modes", "masks"):
        if (value := getattr(args, name)) is not None:
            given[name] = () if name == "peers" and value == "none" else _list(name, value, str)
    for spec in given.get("masks", ()):
        if (
            spec not in ("auto", "none", *masks.names())
            and not spec.startswith(("even:", "prefix:"))
            and not is_file(spec)
        ):
            raise MaskError(
                f"no mask file at {spec!r}; --masks takes auto, none, even:RATIO, prefix:E, files or shipped masks' names"
            )
    if args.gammas is not None:
        given["gammas"] = _list("gammas", args.gammas, int)
    return BenchConfig(**given)


def _list(name: str, text: str, kind: Callable[[str], _T]) -> tuple[_T, ...]:
    """A comma-separated list without repetitions."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise OptionError(f"--{name} takes a comma-separated list, but got {text!r}")
    try:
        return tuple(dict.fromkeys(kind(part) for part in parts))
    except ValueError as error:
        raise OptionError(f"--{name} takes whole numbers separated by commas, but got {text!r}") from error


def _compare_parser() -> argparse.ArgumentParser:
    parser = Parser(prog=f"{PROG} compare", allow_abbrev=False, description="Two result files side by side.")
    parser.set_defaults(command="compare")
    parser.add_argument("files", nargs=2, metavar="FILE", help="result files of viasd-bench")
    parser.add_argument("--force", action="store_true", help="compare even what was measured on different things")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    return parser
