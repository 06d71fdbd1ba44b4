"""Drafters of one target side by side: ``python -m viasd.runtime.bench.drafters --target T DRAFTER ...``.

What a drafter is worth depends on three things: how much of its text is kept, what a step of it costs, and how much more a
pass of the target costs for carrying its tokens along. The first is in the record that `viasd-fit drafter` left with it
(blocks at temperature 0 after prompts that were kept back); the others are measured here, each drafter's steps in turn with
the target's passes. From them follow tokens a round and seconds per token at the best block; nothing is decoded.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from viasd.errors import DrafterError, OptionError
from viasd.load import load_pair
from viasd.loading import LoadConfig
from viasd.pair import Pair
from viasd.runtime.adaptive.budget import survivals
from viasd.runtime.bench.costs import pass_seconds
from viasd.runtime.command import run_command
from viasd.standalone import read_record

_HEADINGS = (
    "drafter",
    "layers x width (inner)",
    "words",
    "read a step, M",
    "accept mass",
    "kept by place",
    "step / pass",
    "best block",
    "tokens a round",
    "to plain",
)


@dataclass(frozen=True)
class Price:
    """What decoding with a drafter comes to, by its best block of one token or more.

    Attributes:
        block: Tokens of that block.
        tokens: Expected tokens a round, the verifier's own included.
        seconds: Expected seconds per token.
        speed: Tokens per second as a multiple of plain decoding's; below 1 plain decoding is faster.
    """

    block: int
    tokens: float
    seconds: float
    speed: float


def priced(kept: Sequence[float], step: float, full: Sequence[float]) -> Price:
    """The best block of a drafter.

    A block of m tokens yields ``E(m) = 1 + a_1 + a_1 a_2 + ...`` tokens in ``m c_p + c_q(m + 1)`` seconds.

    Args:
        kept: Chance of each place of a block to be kept when all before it were, one or more.
        step: Seconds of one drafted token, c_p.
        full: Seconds of a pass of the target over 1, 2, ... ``len(kept) + 1`` tokens, c_q.
    """
    gains = survivals(list(kept))
    prices = []
    for block in range(1, len(gains) + 1):
        tokens = 1.0 + sum(gains[:block])
        seconds = (block * step + full[block]) / tokens
        prices.append(Price(block, tokens, seconds, full[0] / seconds))
    return min(prices, key=lambda price: price.seconds)


@dataclass(frozen=True)
class Drafter:
    """What is known of a drafter before it is timed.

    Attributes:
        drafter: Where it lies.
        kind: ``feature`` or ``standalone``.
        shape: Layers, width, and inner width of its MLPs.
        words: Tokens it can propose.
        read: Numbers that one step reads, its cut head included.
        accept_mass: sum min(p, q) of its first token at temperature 1, on text kept back.
        kept: Share kept of each place of a block, of blocks that reached it, at temperature 0.
    """

    drafter: str
    kind: str
    shape: tuple[int, int, int]
    words: int
    read: int
    accept_mass: float
    kept: tuple[float, ...]


@dataclass(frozen=True)
class Line(Drafter):
    """One drafter of the table.

    Attributes:
        step: Seconds of one step.
        share: The same as a share of the target's pass over one token.
        price: What follows.
    """

    step: float
    share: float
    price: Price


def known_of(name: str, pair: Pair) -> Drafter:
    """A pair's drafter, by its files.

    Args:
        name: What it is called.
        pair: With the drafter.

    Raises:
        DrafterError: If it has no record of what is kept.
    """
    shape, words, layers = _size(name, pair)
    record: Mapping[str, Any] = (read_record(name) or {}) if pair.feature is None else pair.feature.file.details
    try:
        kept = tuple(float(share) for share in record["decoded"]["by_place"])
        accept_mass = float(record["examined"]["steps"][0]["accept_mass"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DrafterError(
            f"expected a record of what is kept with drafter '{name}', but {error!r}; fit it anew (viasd-fit drafter)"
        ) from error
    kind = "standalone" if pair.feature is None else "feature"
    return Drafter(name, kind, shape, words, layers + words * shape[1], accept_mass, kept)


def lines_of(known: Sequence[Drafter], times: Sequence[Mapping[str, Mapping[int, float]]]) -> list[Line]:
    """The lines of a table.

    Args:
        known: The drafters.
        times: Of each, seconds as `viasd.runtime.bench.costs.pass_seconds` gives them. The target is the same for all, so
            its passes cost the median of what was measured beside each: else luck would decide between drafters.
    """
    lines = []
    for one, seconds in zip(known, times, strict=True):
        full = [
            median(other["full"][tokens] for other in times if tokens in other["full"])
            for tokens in range(1, len(one.kept) + 2)
        ]
        step = seconds["drafter"][1]
        lines.append(Line(**vars(one), step=step, share=step / full[0], price=priced(one.kept, step, full)))
    return lines


def _size(name: str, pair: Pair) -> tuple[tuple[int, int, int], int, int]:
    """Shape, words, and numbers of the layers alone."""
    if pair.feature is not None:
        file = pair.feature.file
        shape = (file.shape.depth, file.shape.width, file.shape.inner)
        return shape, len(file.shortlist), sum(weight.numel() for weight in file.weights.values())
    small = pair.drafter
    if small is None or pair.shortlist is None:
        raise DrafterError(f"expected a drafter that viasd-fit drafter made, but '{name}' is none")
    config = small.config
    layers = sum(weight.numel() for layer in small.layers for weight in layer.parameters())
    return (small.n_layers, int(config.hidden_size), int(config.intermediate_size)), len(pair.shortlist), layers


def table(lines: Sequence[Line]) -> str:
    """The lines as Markdown."""
    rows = [_HEADINGS, ("---",) * len(_HEADINGS)]
    for line in lines:
        depth, width, inner = line.shape
        rows.append(
            (
                line.kind,
                f"{depth} x {width} ({inner})",
                f"{line.words}",
                f"{line.read / 1e6:.1f}",
                f"{line.accept_mass:.3f}",
                " ".join(f"{share:.2f}" for share in line.kept),
                f"{line.share:.3f}",
                f"{line.price.block}",
                f"{line.price.tokens:.2f}",
                f"{line.price.speed:.2f}x",
            )
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table.

    Args:
        argv: Arguments; None takes those of the process.

    Returns:
        Exit code: 0, 2 after an error, 130 after Ctrl-C.
    """
    args = _parser().parse_args(argv)
    return run_command("drafters", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    if args.threads is not None:
        if args.threads < 1:
            raise OptionError(f"--threads must be at least 1, but got {args.threads}")
        torch.set_num_threads(args.threads)
    config = LoadConfig(weights=args.weights, dtype=args.dtype, device=args.device)
    known, times = [], []
    for name in args.drafters:
        pair = load_pair(target=args.target, drafter=name, config=config, say=lambda line: None)
        known.append(known_of(name, pair))
        times.append(pass_seconds(pair, {}, range(1, len(known[-1].kept) + 1)))
        print(f"{name}: measured", file=sys.stderr)
    lines = lines_of(known, times)
    if args.json:
        print(json.dumps([asdict(line) for line in lines]))
    else:
        print(table(lines))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m viasd.runtime.bench.drafters", description=__doc__)
    parser.add_argument("drafters", nargs="+", metavar="DRAFTER", help="files and folders of viasd-fit drafter")
    parser.add_argument("--target", required=True, metavar="REF", help="hub id, folder, or FAMILY:SIZE")
    parser.add_argument("--weights", default="auto", choices=("auto", "hub", "packaged"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads")
    parser.add_argument("--json", action="store_true", help="one JSON list on standard output")
    return parser


if __name__ == "__main__":
    sys.exit(main())
