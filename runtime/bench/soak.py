"""Hundreds of random requests through one engine, each compared with itself alone: ``python -m viasd.runtime.bench.soak``.

Lengths, strategies, sampling, stop strings, ends, cancellations and the moments at which requests come are drawn from one
seed. Memory is watched on the way. Without ``--pair`` a tiny model of random weights stands in, which shows every fault of
the machinery in a minute or two.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from viasd.load import load_pair
from viasd.loading import LoadConfig
from viasd.pair import Pair, make_pair
from viasd.runtime.api import generate
from viasd.runtime.command import run_command
from viasd.runtime.engine import Engine
from viasd.runtime.result import Result
from viasd.testing import byte_tokenizer, perturbed, tiny_model

_KINDS: tuple[dict[str, Any], ...] = (
    {"strategy": "plain"},
    {"strategy": "sd"},
    {"strategy": "sd", "draft_length": "fixed"},
    {"strategy": "sd", "mode": "bounded", "alpha": 0.3},
    {"strategy": "cascade", "mode": "lossless", "tiers": "3", "slim_rounds": 2},
    {"strategy": "cascade", "mode": "bounded", "alpha": 0.3, "tiers": "3"},
    {"strategy": "cascade", "mode": "via", "tiers": "3"},
    {"strategy": "cascade", "mode": "via", "tiers": "3", "gate": "ratio", "audit": 0.3},
)
_SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 20, "repetition_penalty": 1.2},
    {"repetition_penalty": 1.3},
)


@dataclass
class Soaked:
    """What a soak found.

    Attributes:
        requests: Requests made.
        cancelled: Those that were cancelled on the way.
        tokens: Tokens emitted.
        different: Requests whose output is not that of the same request alone.
        failed: Requests that ended with an error.
        reserved: Bytes still promised at the end.
        caches: Bytes of the largest caches held at once, and of those at the end.
        resident: Resident bytes of the process: after a fifth of the requests, and at the end; 0 where not known.
    """

    requests: int = 0
    cancelled: int = 0
    tokens: int = 0
    different: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    reserved: int = 0
    caches: tuple[int, int] = (0, 0)
    resident: tuple[int, int] = (0, 0)

    @property
    def well(self) -> bool:
        """Whether every output was its own, nothing failed, and no memory stayed."""
        return not (self.different or self.failed or self.reserved or self.caches[1])


def requests(pair: Pair, n: int, seed: int, *, most: int = 60) -> list[dict[str, Any]]:
    """Random requests, as options of `Engine.add`; with ``cancel`` the number of tokens after which one is cancelled."""
    rng = random.Random(seed)
    found = []
    for number in range(n):
        length = rng.choice((1, 2, 7, 20, 40, 90, 200))
        ids = [rng.randrange(5, min(pair.target.vocabulary, 5000)) for _ in range(length)]
        if rng.random() < 0.4:  # text that repeats itself, for lookup
            ids = (ids[: max(1, length // 4)] * 5)[:length]
        found.append(
            {
                "prompt": ids,
                "seed": 1000 + number,
                "gamma": rng.choice((1, 3, 5, 8)),
                "max_new_tokens": rng.randint(1, most),
                "ignore_eos": rng.random() < 0.5,
                "stop": rng.choice(((), (), ("e",), ("an", "x"), (" the ",))),
                "cancel": rng.randint(0, most) if rng.random() < 0.15 else None,
                **rng.choice(_KINDS),
                **rng.choice(_SAMPLING),
            }
        )
        if found[-1]["strategy"] == "plain":
            found[-1].pop("gamma")
    return found


def soak(
    pair: Pair,
    mask: str,
    n: int,
    seed: int = 0,
    *,
    concurrency: int = 8,
    kv_budget: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Soaked:
    """Runs random requests through an engine, and each of them alone."""
    todo = requests(pair, n, seed)
    rng = random.Random(seed + 1)
    found, results = Soaked(requests=n), {}
    engine = Engine(pair, mask=mask, concurrency=concurrency, kv_budget=kv_budget, prompt_budget=64, chunk=64)
    asked, made = 0, [0] * n
    largest = early = 0
    while asked < n or engine.busy:
        for _ in range(rng.choice((0, 0, 1, 1, 2, 5))):
            if asked < n:
                options = {k: v for k, v in todo[asked].items() if k != "cancel"}
                engine.add(**options)
                asked += 1
        for event in engine.step():
            made[event.request] += len(event.token_ids)
            if event.result is not None:
                results[event.request] = engine.results.pop(event.request)
        for number in engine.running:
            after = todo[number]["cancel"]
            if after is not None and made[number] >= after:
                engine.cancel(number)
        largest = max(largest, _held(engine))
        if not early and len(results) >= n // 5:
            gc.collect()
            early = _resident()
    gc.collect()
    found.caches, found.resident, found.reserved = (
        (largest, _held(engine)),
        (early, _resident()),
        engine.budget.reserved,
    )
    say(f"{n} requests answered; each is now made alone")
    for number, result in sorted(results.items()):
        found.tokens += len(result.token_ids)
        found.cancelled += result.finish_reason == "interrupted"
        if result.error is not None or result.stats.check():
            found.failed.append(number)
        elif not _as_alone(pair, mask, todo[number], result):
            found.different.append(number)
    return found


def _as_alone(pair: Pair, mask: str, request: dict[str, Any], result: Result) -> bool:
    options = {k: v for k, v in request.items() if k not in ("prompt", "cancel")}
    masked = options["strategy"] == "cascade"
    alone = generate(pair, request["prompt"], mask=mask if masked else None, **options)
    if result.finish_reason == "interrupted":
        n = len(result.token_ids)
        return alone.token_ids[:n] == result.token_ids and alone.tiers[:n] == result.tiers
    return (alone.token_ids, alone.tiers, alone.text, alone.finish_reason) == (
        result.token_ids,
        result.tiers,
        result.text,
        result.finish_reason,
    )


def _held(engine: Engine) -> int:
    """Bytes of the caches of what runs."""
    answers = [request.answer for request in engine._running]
    drafters = [answer.drafter for answer in answers if answer.drafter is not None and answer.drafter.name == "model"]
    caches: list[Any] = [answer.target.kv for answer in answers] + [drafter.kv for drafter in drafters]  # type: ignore[attr-defined]
    return sum(kv.nbytes() for kv in caches)


def _resident() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a soak and prints one JSON object; exit code 1 if something was not well."""
    parser = argparse.ArgumentParser(prog="python -m viasd.runtime.bench.soak", description=__doc__)
    parser.add_argument("--pair", help="default: a tiny model of random weights and a perturbed copy as its drafter")
    parser.add_argument("--weights", default="auto", choices=("auto", "hub", "packaged"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--mask", default="even:0.25")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--kv-budget", type=int, help="bytes; small ones make requests wait")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    return run_command("soak", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    def say(line: str) -> None:
        print(line, file=sys.stderr)

    if args.pair is None:
        model = tiny_model()
        pair = make_pair(model, byte_tokenizer(), drafter=perturbed(model, 0.3), name="tiny")
    else:
        pair = load_pair(args.pair, config=LoadConfig(weights=args.weights, dtype=args.dtype), say=say)
    found = soak(
        pair,
        args.mask,
        args.requests,
        args.seed,
        concurrency=args.concurrency,
        kv_budget=args.kv_budget,
        say=say,
    )
    setting = {"pair": pair.name, "dtype": pair.dtype, "threads": torch.get_num_threads(), "seed": args.seed}
    print(json.dumps({**setting, "well": found.well, **vars(found)}))
    return 0 if found.well else 1


if __name__ == "__main__":
    sys.exit(main())
