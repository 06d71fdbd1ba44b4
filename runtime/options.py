"""The options of `viasd-run`: their parser, which of them contradict each other, and what they mean to `make_config`.

Nothing here imports torch, so that ``--help`` and every contradiction are answered at once.
"""

from __future__ import annotations

import argparse
from typing import Any

import viasd
from viasd import masks
from viasd.errors import HeadsError, MaskError, OptionError
from viasd.runtime.command import is_file
from viasd.runtime.many_options import MANY_EXCLUSIVE, add_many_options, check_many
from viasd.runtime.models import Parser, add_model_options, check_exclusive, check_models, given_options, option
from viasd.runtime.names import BASELINES, EXITING, MASKED, MODES, STRATEGIES, UNDRAFTED
from viasd.runtime.readout_options import add_readout_options, add_readout_tiers

PROG = "viasd-run"

DEFINITIONS = """\
what the status line counts:
  tok/s            emitted tokens per second of wall time, prefill included
  accepted/round   drafted tokens that are in the output, per draft-and-verify round; the token that a verifier adds to
                   a round (bonus or correction) is not counted
  emitted/round    tokens in the output per round, that token counted; plain decoding has 1
  q', q calls/token  forward passes of the slim and the full verifier per emitted token, the prompt's own left out;
                   plain decoding has 0 and 1
  shares           emitted tokens by the tier they were drawn from: drafter, slim verifier, full verifier
  exits, refused   (adadecode) guesses by the number of layers after which they were made, and those that the full verifier
                   refused
  pending          (adadecode) guesses per cycle that waited for it
  layers/token     (adadecode) passes through one layer per emitted token; plain decoding has the number of layers
  moved            (--readout) emitted tokens whose row is not the last layer's, how many layers before it they were read
                   out, and rows that went through the head for one row that was chosen
  disagreement     (lossy modes) of blocks that skipped the full verifier, some are checked by it all the same: the
                   summed number of tokens it would have said otherwise, with a 95 % interval per token"""

#: What `--preset paper` (arXiv 2606.12243) sets.
PAPER: dict[str, Any] = {
    "strategy": "cascade",
    "mode": "via",
    "tiers": "3",
    "gate": "ratio",
    "theta_acc": 0.7,
    "theta_esc": 0.5,
    "gamma": 5,
    "recheck": False,
}
PAPER_MEANS = (
    "preset paper: three tiers, fixed thresholds theta_acc 0.7 and theta_esc 0.5, gamma 5, no guard and no recheck; "
    "nothing bounds how far this output strays from the target's own"
)

# Fields of the decoding, sampling and generation configs that are options of the same name.
_DIRECT = (
    *("strategy", "mode", "tiers", "gate", "gamma", "alpha", "max_disagreement", "audit", "recheck", "slim_rounds"),
    *(
        "draft_length",
        "draft_min_prob",
        "self_skip",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "seed",
        "stop",
    ),
    *("max_new_tokens", "ignore_eos", "exit_rule", "exit_threshold", "max_pending", "verify"),
    *("readout", "readout_p", "readout_tier", "readout_compat", "readout_unscored", "readout_log"),
    *("backtrack_layers", "backtrack_ratio"),
)
_LISTING = {"list_pairs", "json", "base", "no_color", "quiet"}
# Two options of which only one can be given, and why.
_EXCLUSIVE = (
    ("prompt", "prompt_file", "there is one prompt"),
    ("theta_acc", "alpha1", "alphas are another way to give the thresholds"),
    ("theta_acc", "alpha2", "alphas are another way to give the thresholds"),
    ("theta_esc", "alpha1", "alphas are another way to give the thresholds"),
    ("theta_esc", "alpha2", "alphas are another way to give the thresholds"),
    ("preset", "alpha1", "the preset sets the thresholds"),
    ("preset", "alpha2", "the preset sets the thresholds"),
    ("preset", "lossless", "the preset is lossy"),
    ("preset", "max_disagreement", "the preset has no guard"),
    ("backtrack_layers", "backtrack_ratio", "they are two ways to give one window"),
    *MANY_EXCLUSIVE,
)


def build_parser() -> argparse.ArgumentParser:
    """The parser. Every option that was not given is None."""
    parser = Parser(
        prog=PROG,
        allow_abbrev=False,
        description="Generate text through drafter -> slim verifier -> full verifier. Chats when run at a terminal.",
        epilog=DEFINITIONS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def flag(group: Any, *names: str, text: str) -> None:
        group.add_argument(*names, action="store_true", default=None, help=text)

    models = add_model_options(parser)
    flag(models, "--list-pairs", text="show all pairs and stop; with --json as a list")

    decoding = parser.add_argument_group("decoding")
    decoding.add_argument(
        "--mask",
        metavar="SPEC",
        help="layers of the slim verifier: auto (default: a shipped one), none, even:RATIO, prefix:E (the first E layers "
        "and a light head, see --heads), a file or a shipped mask's name",
    )
    decoding.add_argument(
        "--heads",
        metavar="SPEC",
        help="light heads of adadecode and of prefix masks: auto (default: shipped ones), a file of viasd-fit heads, or "
        "lens:E,E,... (untrained ones behind so many layers)",
    )
    decoding.add_argument(
        "--strategy",
        choices=STRATEGIES,
        metavar="NAME",
        help=f"auto (default), plain, sd, cascade, adadecode; for comparison: {', '.join(BASELINES)}",
    )
    decoding.add_argument("--tiers", choices=("auto", "2", "3"), help="auto measures whether the slim verifier pays")
    decoding.add_argument("--mode", choices=MODES, help="(default via with a mask, else lossless)")
    flag(decoding, "--lossless", text="short for --mode lossless")
    decoding.add_argument("--preset", choices=("paper",), help="the paper's fixed thresholds without a guard")
    decoding.add_argument("--gate", choices=("guarded", "ratio"), help="of via mode (default guarded)")
    decoding.add_argument("--theta-acc", type=float, metavar="X", help="keep at or above it (default 0.7)")
    decoding.add_argument("--theta-esc", type=float, metavar="X", help="escalate below it (default 0.5)")
    decoding.add_argument("--alpha1", type=float, metavar="X", help="with --alpha2: theta_acc = 1 - the smaller")
    decoding.add_argument("--alpha2", type=float, metavar="X", help="and theta_esc = 1 - the larger")
    decoding.add_argument("--gamma", type=int, metavar="N", help="longest drafted block (default 5)")
    decoding.add_argument(
        "--draft-length",
        choices=("auto", "fixed"),
        help="auto (default): of at most gamma tokens as many as pay on this machine (strategy sd); fixed: always gamma",
    )
    decoding.add_argument(
        "--alpha", type=float, metavar="X", help="of bounded mode (total variation) and lossy strategies (0.1)"
    )
    decoding.add_argument("--max-disagreement", type=float, metavar="X", help="budget of the guard (default 0.02)")
    decoding.add_argument("--audit", type=float, metavar="X", help="share of unchecked blocks audited (default 0.05)")
    decoding.add_argument(
        "--recheck", action=argparse.BooleanOptionalAction, help="the full verifier tests gated tokens where it runs"
    )
    decoding.add_argument("--slim-rounds", type=int, metavar="N", help="slim blocks per full call (lossless, bounded)")
    decoding.add_argument("--draft-min-prob", type=float, metavar="X", help="the drafter stops where less sure")
    decoding.add_argument(
        "--exit-threshold",
        type=float,
        metavar="X",
        help="adadecode: exit where a head is surer than this (the paper: 0.75)",
    )
    decoding.add_argument(
        "--exit-rule",
        choices=("fixed", "auto"),
        help="adadecode: auto (default) exits where a guess should pay, fixed above --exit-threshold",
    )
    decoding.add_argument(
        "--max-pending", type=int, metavar="N", help="adadecode: most guesses that wait to be verified (default 5)"
    )
    decoding.add_argument(
        "--verify", choices=("on", "off"), help="adadecode: off takes guesses untested (an ablation; LOSSY)"
    )
    decoding.add_argument("--self-skip", type=float, metavar="X", help="layers that a self drafter skips (default 0.6)")

    add_readout_options(decoding)
    add_readout_tiers(decoding)

    sampling = parser.add_argument_group("sampling and length")
    sampling.add_argument("--temperature", type=float, metavar="X", help="0 (default) is greedy")
    sampling.add_argument("--top-k", type=int, metavar="N")
    sampling.add_argument("--top-p", type=float, metavar="X")
    sampling.add_argument("--min-p", type=float, metavar="X")
    sampling.add_argument("--repetition-penalty", type=float, metavar="X")
    sampling.add_argument("--seed", type=int, metavar="N")
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="ends the answer; may be repeated")
    sampling.add_argument("--max-new-tokens", type=int, metavar="N", help="(default 256)")
    flag(sampling, "--ignore-eos", text="go on past end-of-sequence tokens")

    text = parser.add_argument_group("prompt and output")
    text.add_argument("--prompt", metavar="TEXT", help="without any prompt: standard input, or a chat at a terminal")
    text.add_argument("--prompt-file", metavar="FILE", help="- is standard input; one line break at the end is dropped")
    add_many_options(text)
    text.add_argument("--system", metavar="TEXT", help="system message of the chat")
    text.add_argument(
        "--chat", action=argparse.BooleanOptionalAction, help="use the chat template (default: if there is one)"
    )
    flag(text, "--check", text="compare the answer with the full verifier, token by token (temperature 0, one answer)")
    flag(text, "--json", text="one JSON object on standard output; with --prompts one a line, in the prompts' order")
    flag(text, "--quiet", text="no notes, legend or status line; what a lossy answer may lose is said all the same")
    flag(text, "--no-color", text="no colours")
    parser.add_argument("--version", action="version", version=f"{PROG} {viasd.__version__}")
    return parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses and checks; defaults that depend on nothing else stay None.

    Raises:
        OptionError: If an option is malformed, or options contradict each other.
        PairError: If the pair is not registered.
        MaskError: If the mask can't be what was meant.
    """
    args = build_parser().parse_args(argv)
    given = given_options(args)
    if args.list_pairs:
        if rest := sorted(given - _LISTING):
            raise OptionError(f"--list-pairs only lists, so {option(rest[0])} means nothing with it")
        return args
    check_exclusive(_EXCLUSIVE, given)
    _check_preset(args, given)
    _check_self_skip(args, given, check_models(args))
    _check_mask(args, given)
    _check_heads(args, given)
    _check_decoding(args, given)
    _check_text(args)
    check_many(args, given)
    return args


def options_from_args(args: argparse.Namespace) -> dict[str, Any]:
    """The options for `viasd.runtime.api.make_config`; what was not given is left out."""
    from viasd.runtime.gates import THETA_ACC, THETA_ESC, Thresholds  # needs torch, see above

    values = dict(vars(args))
    if args.preset == "paper":
        values.update(PAPER)
    if args.lossless:
        values["mode"] = "lossless"
    options = {name: values[name] for name in _DIRECT if values[name] is not None}
    if args.alpha1 is not None or args.alpha2 is not None:
        options["thresholds"] = Thresholds.from_alphas(
            1 - THETA_ESC if args.alpha1 is None else args.alpha1, 1 - THETA_ACC if args.alpha2 is None else args.alpha2
        )
    elif values["theta_acc"] is not None or values["theta_esc"] is not None:
        accept, escalate = values["theta_acc"], values["theta_esc"]
        options["thresholds"] = Thresholds(
            THETA_ACC if accept is None else accept, THETA_ESC if escalate is None else escalate
        )
    return options


def check_mask_use(spec: str, strategy: str | None, tiers: str | None) -> None:
    """A mask that nothing would use is an error.

    Args:
        spec: What ``--mask`` was given.
        strategy: The strategy asked for.
        tiers: The tiers asked for.

    Raises:
        OptionError: If there is a mask but no slim verifier.
    """
    if spec in ("auto", "none"):
        return
    if strategy is not None and strategy not in MASKED:
        raise OptionError(f"a mask is for a slim verifier, which strategy {strategy} does not have; leave out the mask")
    if tiers == "2" and strategy in (None, "auto", "cascade"):
        raise OptionError("a mask is for a slim verifier, which two tiers do not have; leave out the mask")


def _check_preset(args: argparse.Namespace, given: set[str]) -> None:
    for name, value in PAPER.items() if args.preset == "paper" else ():
        if name in given and getattr(args, name) != value:
            shown = ("on" if value else "off") if isinstance(value, bool) else value
            raise OptionError(f"--preset paper sets {option(name)} itself, to {shown}; leave one out")
    if args.preset == "paper" and args.mask == "none":
        raise OptionError("--preset paper needs a slim verifier, but --mask none leaves it out")


def _check_self_skip(args: argparse.Namespace, given: set[str], drafter: str) -> None:
    if "self_skip" in given and drafter != "self":
        raise OptionError(f"--self-skip is for the self drafter, but the drafter is {drafter}")
    if "self_skip" in given and args.strategy == "self-sd":
        raise OptionError("--self-skip is for the self drafter, but --strategy self-sd drafts through the mask")


def _check_mask(args: argparse.Namespace, given: set[str]) -> None:
    if "mask" not in given:
        return
    check_mask_use(args.mask, args.strategy, args.tiers)
    kind, colon, ratio = args.mask.partition(":")
    if kind == "even" and colon:
        try:
            good = 0 <= float(ratio) < 1
        except ValueError:
            good = False
        if not good:
            raise MaskError(f"--mask even:RATIO takes a number from 0 to below 1, such as even:0.45, but got {ratio!r}")
    elif kind == "prefix" and colon:
        if not ratio.isdecimal() or int(ratio) < 1:
            raise MaskError(
                f"--mask prefix:E takes a number of layers of at least 1, such as prefix:15, but got {ratio!r}"
            )
    elif args.mask not in ("none", *masks.names()) and not is_file(args.mask):
        raise MaskError(
            f"no mask file at {args.mask!r}; --mask takes auto, none, even:RATIO, prefix:E, a file, or one of "
            f"{', '.join(masks.names()) or 'no shipped masks'}"
        )


def _check_heads(args: argparse.Namespace, given: set[str]) -> None:
    if args.heads is None:
        return
    if args.strategy not in EXITING and (args.mask in (None, "auto", "none") or args.mask.startswith("even:")):
        raise OptionError(
            "--heads is for --strategy adadecode or for --mask prefix:E; add one of them, or leave it out"
        )
    if args.heads != "auto" and not args.heads.startswith("lens:") and not is_file(args.heads):
        raise HeadsError(f"no file of light heads at {args.heads!r}; --heads takes auto, a file or lens:E,E,...")


def _check_decoding(args: argparse.Namespace, given: set[str]) -> None:
    if args.lossless and args.mode not in (None, "lossless"):
        raise OptionError(f"--lossless contradicts --mode {args.mode}; leave one out")
    if args.strategy in UNDRAFTED:
        for name in ("gamma", "draft_length", "draft_min_prob", "self_skip", "slim_rounds"):
            if name in given:
                raise OptionError(f"{option(name)} is about drafting, but --strategy {args.strategy} drafts nothing")
    if not args.temperature:
        for name in ("top_k", "top_p", "min_p"):
            if name in given:
                raise OptionError(f"{option(name)} only means something when sampling; add --temperature above 0")


def _check_text(args: argparse.Namespace) -> None:
    if args.check and args.temperature:
        raise OptionError("--check needs temperature 0: a sampled answer has no single right text; leave one out")
    if args.system is not None and args.chat is False:
        raise OptionError("--system is a message of a chat, but --no-chat leaves the chat template out")
    for name in ("prompt", "system", "stop"):
        for text in getattr(args, name) if name == "stop" and args.stop else [getattr(args, name)]:
            if text is None:
                continue
            if not text:
                raise OptionError(f"{option(name)} is empty; give it some text or leave it out")
            if any("\ud800" <= c <= "\udfff" for c in text):
                raise OptionError(f"{option(name)} is not valid UTF-8 text")
