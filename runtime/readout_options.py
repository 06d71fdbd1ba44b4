"""The options of a confident readout, for every command that has one. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from viasd.runtime.readouts import READOUT_TIERS, READOUTS


def add_readout_options(group: Any, names: Sequence[str] = READOUTS) -> None:
    """Adds those that say from which of the last layers rows are read out; each is None when not given.

    Args:
        group: Of the parser.
        names: What ``--readout`` takes.
    """
    group.add_argument(
        "--readout",
        choices=names,
        metavar="NAME",
        help=f"which of the last layers a row is read out from, by its entropy: {', '.join(names)}",
    )
    group.add_argument(
        "--backtrack-layers",
        type=int,
        metavar="N",
        help="most layers a readout steps back (default 10; -1: any number)",
    )
    group.add_argument("--backtrack-ratio", type=float, metavar="X", help="the same as a share of the layers")
    group.add_argument(
        "--readout-compat", action="store_true", default=None, help="windows as the authors' code counts them"
    )


def add_readout_tiers(group: Any) -> None:
    """Adds those that only decoding knows."""
    group.add_argument(
        "--readout-tier",
        choices=READOUT_TIERS,
        help="whose readout: full (default; another target), slim (only a proposal) or both",
    )
    group.add_argument("--readout-p", type=float, metavar="X", help="share of the tokens read out this way (default 1)")
    group.add_argument(
        "--readout-unscored",
        action="store_true",
        default=None,
        help="use a mask in the slim verifier that was scored with another readout",
    )
    group.add_argument(
        "--readout-log", type=int, metavar="N", help="one line on standard error every N passes of an answer"
    )
