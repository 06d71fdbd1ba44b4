"""Tokens per second by number of sequences: ``python -m viasd.runtime.bench.concurrency``.

For every method and concurrency an engine is kept full: whenever a request ends, the next prompt takes its place, with a
length drawn from one seed. What is measured begins when all places are taken and the first prompts have been run, and ends
after so many tokens; prompts that come in meanwhile are part of it, as in use, and the first requests are met somewhere on
their way, so that they don't all end at once. All have the same requests in the same order, so all do the same work. Methods
and concurrencies of a repeat are under way at once and take turns of a twentieth of it, so that a machine that grows slower
does so for all; memory must suffice for all of them, too. One JSON line a measurement goes to ``--output`` when its repeat
has ended; the same command goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from viasd.errors import OptionError
from viasd.files import why, write_atomically
from viasd.runtime.bench.dataset import Dataset, load_dataset
from viasd.runtime.bench.records import read_lines
from viasd.runtime.bench.report import markdown_table
from viasd.runtime.command import check_writable, complain, run_command
from viasd.runtime.models import Parser, add_model_options, check_models, load_models

if TYPE_CHECKING:
    from viasd.pair import Pair

PROG = "concurrency"
METHODS = ("plain", *(f"sd:gamma={gamma},draft_length=fixed" for gamma in (2, 4, 8)), "sd:gamma=8,adaptive=auto")
CONCURRENCIES = (1, 2, 4, 8, 16, 32)
_TURNS = 20  # each is many steps, and short beside the moods of a machine


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the measurements and prints a table on stdout."""
    return run_command(PROG, lambda: _main(argv), "interrupted; the repeats that had ended are kept")


def _main(argv: Sequence[str] | None) -> int:
    args = _parse(argv)
    dataset = load_dataset(args.dataset, args.limit)
    with contextlib.redirect_stdout(sys.stderr):
        pair = load_models(args, lambda line: complain(PROG, line))
        settings = _settings(pair, args, dataset)
        records = [] if args.output is None else _read(args.output, settings)
        for record in _measured(pair, args, dataset, records):
            record["settings"] = settings
            records.append(record)
            if args.output is not None:
                _append(args.output, record)
            complain(PROG, f"{record['method']} at {record['concurrency']}: {record['tokens_per_second']:.1f} tok/s")
    print(markdown_table(table(records)))
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog=f"python -m viasd.runtime.bench.{PROG}", description=__doc__, allow_abbrev=False)
    parser.set_defaults(quiet=None)
    add_model_options(parser)
    parser.add_argument("--mask", default="none", help="of methods with a slim verifier")
    parser.add_argument(
        "--method",
        action="append",
        metavar="NAME[:OPTION=VALUE,...]",
        help="a strategy with options of `viasd.generate`, and adaptive=on, off or auto (Adaptive Verification); may be "
        f"repeated (default: {' '.join(METHODS)})",
    )
    parser.add_argument("--concurrency", default=",".join(map(str, CONCURRENCIES)), metavar="N,N,...")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dataset", metavar="FILE", help="prompts, as for viasd-bench (default: built-in ones)")
    parser.add_argument("--limit", type=int, metavar="N", help="prompts per task")
    parser.add_argument("--tokens", default="32,128", metavar="LEAST,MOST", help="lengths of answers")
    parser.add_argument("--work", type=int, default=4000, metavar="TOKENS", help="emitted in every measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", metavar="FILE")
    args = parser.parse_args(argv)
    check_models(args)
    args.method = args.method or list(METHODS)
    args.concurrency = _numbers("concurrency", args.concurrency)
    args.tokens = _numbers("tokens", args.tokens)
    if len(args.tokens) != 2 or args.tokens[0] > args.tokens[1]:
        raise OptionError(f"--tokens takes the least and the most, such as 32,128, but got {args.tokens}")
    for name in ("work", "repeats"):
        if not getattr(args, name) > 0:
            raise OptionError(f"--{name} must be above 0, but got {getattr(args, name)}")
    for method in args.method:
        method_options(method)
    if args.output is not None:
        check_writable("output", args.output)
    return args


def _numbers(name: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise OptionError(f"--{name} takes whole numbers of at least 1, such as 1,8,32, but got '{text}'")
    return numbers


def method_options(method: str) -> dict[str, Any]:
    """The options of a method such as ``sd:gamma=5,draft_length=fixed``.

    Raises:
        OptionError: If it is malformed. What the options mean is for `viasd.runtime.requests.make_config` to say.
    """
    name, _, rest = method.partition(":")
    options: dict[str, Any] = {"strategy": name}
    for part in rest.split(",") if rest else ():
        key, equals, value = part.partition("=")
        if not (key and equals and value):
            raise OptionError(f"--method takes NAME:OPTION=VALUE,..., but got '{method}'")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    if options.get("tiers") is not None:
        options["tiers"] = str(options["tiers"])
    return options


def _settings(pair: Pair, args: argparse.Namespace, dataset: Dataset) -> dict[str, Any]:
    from viasd.runtime.bench.provenance import environment

    return {
        "pair": pair.name,
        **environment(pair),
        "mask": args.mask,
        "temperature": args.temperature,
        "dataset": dataset.sha256,
        "limit": args.limit,
        "tokens": args.tokens,
        "work": args.work,
        "seed": args.seed,
    }


def _read(path: str, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was measured before; a half-written last line is taken away."""
    if not Path(path).exists():
        return []
    records, whole = read_lines(path)
    if any(record.get("settings") != json.loads(json.dumps(settings)) for record in records):
        raise OptionError(f"'{path}' holds measurements of other settings; choose another --output, or remove the file")
    if whole != Path(path).stat().st_size:
        write_atomically(Path(path), "".join(json.dumps(record) + "\n" for record in records), OptionError)
    return records


def _append(path: str, record: Mapping[str, Any]) -> None:
    try:
        with open(path, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")
    except OSError as failure:
        raise OptionError(f"can't write '{path}': {why(failure)}; what was written before stays") from failure


def _measured(
    pair: Pair, args: argparse.Namespace, dataset: Dataset, before: Sequence[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    had = {(r["method"], r["concurrency"], r["repeat"]) for r in before}
    learnt: dict[str, Mapping[str, Any] | None] = {}  # coefficients need not be learnt anew in every repeat
    for repeat in range(args.repeats):
        lanes = {
            (method, concurrency): Lane(
                pair,
                {**method_options(method), "temperature": args.temperature},
                concurrency,
                [item.text for item in dataset.items],
                args.mask,
                tokens=(args.tokens[0], args.tokens[1]),
                seed=args.seed + repeat,
                state=learnt.get(method),
            )
            for concurrency, method in itertools.product(args.concurrency, args.method)
            if (method, concurrency, repeat) not in had
        }
        for (method, concurrency), found in zip(lanes, in_turns(list(lanes.values()), args.work), strict=True):
            learnt[method] = found.pop("learnt") or learnt.get(method)
            yield {"method": method, "concurrency": concurrency, "repeat": repeat, **found}


def in_turns(lanes: Sequence[Lane], work: int) -> list[dict[str, Any]]:
    """What every lane measured (`Lane.ended`) while it emitted so many tokens."""
    for lane in lanes:
        lane.warm_up()
    for turn in range(1, _TURNS + 1):
        for lane in lanes:
            lane.go_on(work * turn / _TURNS)
    return [lane.ended() for lane in lanes]


class Lane:
    """One method at one concurrency: an engine that is kept full.

    Args:
        pair: The pair.
        options: Of every request; ``adaptive`` among them is the engine's.
        concurrency: Requests that run at once.
        texts: Prompts, each once in an order of its own before any comes again.
        mask: Of the engine.
        tokens: Least and most tokens of an answer.
        seed: Of order and lengths, and of sampling where Adaptive Verification is off: what it steers follows from no seed,
            so in ``auto`` mode it leaves requests alone that name one.
        state: What Adaptive Verification has learnt before.

    """

    def __init__(
        self,
        pair: Pair,
        options: Mapping[str, Any],
        concurrency: int,
        texts: Sequence[str],
        mask: str | None = None,
        *,
        tokens: tuple[int, int],
        seed: int = 0,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        from viasd.runtime.engine import Engine

        self._options = dict(options)
        self._adaptive = self._options.pop("adaptive", "off")
        state = None if self._adaptive == "off" else state
        self._engine = Engine(pair, mask=mask, concurrency=concurrency, adaptive=self._adaptive, adaptive_state=state)
        self._chat, self._texts, self._tokens = pair.is_chat, texts, tokens
        self._seed, self._rng, self._first = seed, random.Random(seed), random.Random(f"{seed}:first")
        self._deck: list[str] = []
        self._added = self._emitted = self._steps = 0
        self._seconds = 0.0

    def warm_up(self) -> None:
        """Takes all places and runs their prompts; nothing of that is measured."""
        self._fill()
        spoken: set[int] = set()
        while len(spoken) < self._engine.concurrency:
            spoken |= {event.request for event in self._engine.step() if event.token_ids}
            self._fill()
        self._engine.results.clear()

    def go_on(self, tokens: float) -> None:
        """Steps until so many tokens have been emitted since the warm-up."""
        start = time.perf_counter()
        while self._emitted < tokens:
            self._emitted += sum(len(event.token_ids) for event in self._engine.step())
            self._steps += 1
            self._fill()
        self._seconds += time.perf_counter() - start

    def ended(self) -> dict[str, Any]:
        """Closes the engine.

        Returns:
            ``tokens_per_second``, and counts of what ended meanwhile: ``drafted``, ``gated``, ``kept``, ``rounds``,
            ``emitted``, ``adaptive``; and ``learnt``, for the next measurement.
        """
        from viasd.runtime.metrics import Counters

        total = Counters()
        for result in self._engine.results.values():
            total.merge(result.stats)
        self._engine.close()
        counts = {name: getattr(total, name) for name in ("drafted", "gated", "kept", "rounds", "emitted")}
        return {
            "tokens_per_second": self._emitted / self._seconds,
            "tokens": self._emitted,
            "seconds": self._seconds,
            "steps": self._steps,
            **counts,
            "adaptive": total.adaptive.as_json(),
            "learnt": self._engine.adaptive_state(),
        }

    def _fill(self) -> None:
        engine, rng = self._engine, self._rng
        while len(engine.running) + len(engine.waiting) < engine.concurrency:
            if not self._deck:
                self._deck = rng.sample(self._texts, len(self._texts))
            text = self._deck.pop()
            prompt: Any = [{"role": "user", "content": text}] if self._chat else text
            length = rng.randint(*self._tokens)
            if self._added < engine.concurrency:
                length = self._first.randint(1, length)
            sampling: dict[str, Any] = {"seed": self._seed + self._added} if self._adaptive == "off" else {}
            engine.add(prompt, max_new_tokens=length, ignore_eos=True, **sampling, **self._options)
            self._added += 1


def table(records: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Median tokens/s by method and concurrency; in brackets the ratio to the first method at the same concurrency."""
    concurrencies = sorted({r["concurrency"] for r in records})
    methods = list(dict.fromkeys(r["method"] for r in records))
    speeds: dict[tuple[str, int], float] = {}
    for method, concurrency in itertools.product(methods, concurrencies):
        found = [r["tokens_per_second"] for r in records if (r["method"], r["concurrency"]) == (method, concurrency)]
        if found:
            speeds[method, concurrency] = statistics.median(found)
    rows = [["tok/s by sequences", *map(str, concurrencies)]]
    for method in methods:
        row = [method]
        for concurrency in concurrencies:
            speed, first = speeds.get((method, concurrency)), speeds.get((methods[0], concurrency))
            shown = "" if speed is None else f"{speed:.1f}"
            row.append(shown if method == methods[0] or not (speed and first) else f"{shown} ({speed / first:.2f}x)")
        rows.append(row)
    one = min(concurrencies)
    for method in methods:
        base = speeds.get((method, one))
        if base:
            rows.append(
                [f"{method} over {one}"]
                + [f"{speeds[method, c] / base:.2f}x" if (method, c) in speeds else "" for c in concurrencies]
            )
    return rows


if __name__ == "__main__":
    sys.exit(main())
