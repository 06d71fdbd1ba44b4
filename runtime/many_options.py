"""The options of `viasd-run` that are about many prompts at once. Nothing here imports torch."""

from __future__ import annotations

import argparse
from typing import Any

from viasd.errors import OptionError
from viasd.runtime.command import check_writable
from viasd.runtime.models import option
from viasd.runtime.names import EXITING, UNDRAFTED

#: Two options of which only one can be given, and why.
MANY_EXCLUSIVE = (
    ("prompts", "prompt", "the prompts are in the file"),
    ("prompts", "prompt_file", "the prompts are in the file"),
    ("prompts", "check", "one answer is checked at a time"),
    ("output", "json", "the file has JSON lines anyway"),
)


def add_many_options(group: Any) -> None:
    """Adds them to a group of the parser; each is None when not given."""
    group.add_argument(
        "--prompts",
        metavar="FILE",
        help='many prompts: JSON lines with "prompt" or "messages"; max_new_tokens, seed, stop and sampling options may be '
        "given per line, other keys are handed through",
    )
    group.add_argument("--concurrency", type=int, metavar="N", help="of --prompts: most answers at once (default 16)")
    group.add_argument(
        "--adaptive-verification",
        choices=("on", "off", "auto"),
        help="of --prompts: draft and verify as much as pays by measured costs, at most --gamma tokens; auto (default) "
        "where it can pay, and not for sampled answers with a seed",
    )
    group.add_argument(
        "--adaptive-state",
        metavar="FILE",
        help="of --prompts: what adaptive verification has learnt is read from there, and written there at the end",
    )
    group.add_argument(
        "--kv-budget",
        type=float,
        metavar="GB",
        help="of --prompts: memory for keys and values (default: half of the free)",
    )
    group.add_argument(
        "--output",
        metavar="FILE",
        help="of --prompts: JSON lines go there, and the same command goes on after a stop",
    )


def check_many(args: argparse.Namespace, given: set[str]) -> None:
    """Whether the options make sense together, and with ``--prompts``.

    Args:
        args: Parsed options of `viasd-run`.
        given: See `viasd.runtime.models.given_options`.

    Raises:
        OptionError: If they don't.
    """
    if args.prompts is None:
        for name in ("concurrency", "kv_budget", "output", "adaptive_verification", "adaptive_state"):
            if name in given:
                raise OptionError(f"{option(name)} is about many prompts; add --prompts FILE")
        return
    if args.strategy in EXITING:
        raise OptionError(
            f"--strategy {args.strategy} runs its tokens through the layers in a wave of its own, which other sequences "
            "can't share; it answers one --prompt at a time"
        )
    if args.concurrency is not None and args.concurrency < 1:
        raise OptionError(f"--concurrency must be at least 1, but got {args.concurrency}")
    if args.adaptive_verification == "on" and args.strategy in UNDRAFTED:
        raise OptionError(f"--adaptive-verification on is about drafts, but --strategy {args.strategy} drafts nothing")
    if args.adaptive_verification == "on" and args.mode == "via":
        raise OptionError(
            "--adaptive-verification on is about exact tests, but --mode via lets a gate decide; leave one out"
        )
    if args.adaptive_state is not None:
        if args.adaptive_verification == "off":
            raise OptionError("--adaptive-state is of adaptive verification, which is off; leave one out")
        check_writable("adaptive-state", args.adaptive_state)
    if args.kv_budget is not None and not args.kv_budget > 0:
        raise OptionError(f"--kv-budget must be above 0 GB, but got {args.kv_budget:g}")
    if args.output is not None:
        check_writable("output", args.output)
