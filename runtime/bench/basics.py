"""The figures every claim of speed starts from, measured in one process: ``python -m viasd.runtime.bench.basics``.

Everything is interleaved, warmed up, repeated, and reported as a median with its spread. A ratio below 1 is printed as
"slower". Sections: plain decoding against transformers, overhead of the loop, cost of a pass by number of tokens, prompt
lookup against transformers' own, memory, batches inside transformers' `generate`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache

from viasd.attention import Segment
from viasd.draws import Draws, SeededDraws
from viasd.errors import OptionError
from viasd.load import load_pair
from viasd.loading import LoadConfig
from viasd.mask import LayerMask
from viasd.pair import Pair
from viasd.rows import Rows
from viasd.runtime.api import generate
from viasd.runtime.bench.inside import batches_inside
from viasd.runtime.bench.timing import interleaved, spread
from viasd.runtime.command import run_command
from viasd.runtime.drafters import Draft, PasslessDrafter
from viasd.runtime.gates import RatioGate, Thresholds
from viasd.runtime.metrics import Counters
from viasd.runtime.session import Ending, rounds
from viasd.runtime.strategies import ChainedCascade, GatedCascade, Plain, SpeculativeDecoding, Strategy, Workbench
from viasd.sampling import Ahead, Sampler, SamplingConfig

_QUESTION = "Write a short story about a dog who learns to read."
SECTIONS = ("plain", "overhead", "passes", "lookup", "memory", "hf-batch")
_PASSES = (1, 2, 5, 8)  # tokens


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the chosen sections and prints one JSON object a section on stdout."""
    parser = argparse.ArgumentParser(prog="python -m viasd.runtime.bench.basics", description=__doc__)
    parser.add_argument("--pair", default="smollm2-lookup:135m")
    parser.add_argument("--weights", default="auto", choices=("auto", "hub", "packaged"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--section", action="append", choices=SECTIONS, help="default: all")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dataset", help="JSON lines with 'category' and 'turns', for the section lookup")
    parser.add_argument("--category", action="append", help="default: summarization and rag")
    parser.add_argument("--limit", type=int, default=8, help="prompts per category")
    args = parser.parse_args(argv)
    return run_command("basics", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    chosen = args.section or [s for s in SECTIONS if s != "lookup" or args.dataset]
    if "lookup" in chosen and not args.dataset:
        raise OptionError("section lookup needs --dataset FILE (JSON lines with 'category' and 'turns')")
    config = LoadConfig(weights=args.weights, dtype=args.dtype, device=args.device)
    pair = load_pair(args.pair, config=config, say=lambda line: print(line, file=sys.stderr))
    run = {
        "plain": lambda: plain_against_generate(pair, args.repeats, args.tokens),
        "overhead": lambda: loop_overhead(pair.target.vocabulary, args.repeats),
        "passes": lambda: pass_costs(pair, args.repeats),
        "lookup": lambda: lookup_against_transformers(
            pair,
            _dataset(args.dataset, args.category or ["summarization", "rag"], args.limit),
            args.repeats,
            args.tokens,
        ),
        "memory": lambda: memory(pair),
        "hf-batch": lambda: batches_inside(pair, args.repeats, args.tokens),
    }
    for name in chosen:
        print(json.dumps({"section": name, "dtype": pair.dtype, "threads": torch.get_num_threads(), **run[name]()}))
        sys.stdout.flush()
    return 0


def plain_against_generate(pair: Pair, repeats: int, tokens: int) -> dict[str, Any]:
    """Tokens/s of strategies plain and sd and of transformers' greedy `generate`, with the same model object."""
    ids = pair.encode([{"role": "user", "content": _QUESTION}] if pair.is_chat else _QUESTION)
    times = interleaved(
        {
            "generate": lambda: _transformers(pair, ids, tokens),
            "plain": lambda: generate(pair, ids, mask=None, strategy="plain", max_new_tokens=tokens, ignore_eos=True),
            "sd": lambda: generate(pair, ids, mask=None, strategy="sd", max_new_tokens=tokens, ignore_eos=True),
        },
        repeats,
    )
    speed = {name: [tokens / t for t in taken] for name, taken in times.items()}
    return {
        "tokens_per_second": {name: spread(values) for name, values in speed.items()},
        **_ratio("plain over generate", median(times["generate"]) / median(times["plain"])),
        "sd over plain": round(median(times["plain"]) / median(times["sd"]), 3),
        "question": _QUESTION,
    }


def loop_overhead(vocabulary: int, repeats: int, n_rounds: int = 200) -> dict[str, Any]:
    """Milliseconds per round of each strategy when every model costs nothing (its rows lie ready)."""
    ready = _Ready(torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(0)))
    report = {}
    for name in ("plain", "sd", "chain", "via"):
        taken = []
        for repeat in range(repeats + 1):
            counters = Counters()
            sampler = Sampler(SamplingConfig())
            bench = Workbench(ready, sampler, SeededDraws(0), counters)
            strategies: dict[str, Strategy] = {
                "plain": Plain(bench),
                "sd": SpeculativeDecoding(bench, ready, gamma=5),
                "chain": ChainedCascade(bench, ready, gamma=5),
                "via": GatedCascade(bench, ready, RatioGate(Thresholds()), gamma=5, audit=0.0),
            }
            start = time.perf_counter()
            steps = rounds(strategies[name], ready, ready, sampler, [1, 2, 3], Ending(10**9, frozenset()))
            with torch.inference_mode():
                for _, _ in zip(range(n_rounds), steps, strict=False):
                    pass
            if repeat:
                taken.append((time.perf_counter() - start) / n_rounds * 1e3)
        report[name] = spread(taken)
    return {"ms_per_round": report, "note": "gamma 5; the argmax over the vocabulary of every row is included"}


class _Ready(PasslessDrafter):
    """A target and a drafter that cost nothing: every row lies ready, and half of each block is accepted."""

    name = "ready"

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits
        best: list[int] = logits.argmax(dim=-1).tolist()
        tokens = [*best[:2], *((t + 1) % logits.shape[1] for t in best[2:5])]
        self._draft = Draft(tokens, Rows.one_hot(tokens), [1.0] * len(tokens))

    def full(self, tokens: Sequence[int], rows: int) -> torch.Tensor:
        return self._logits[:rows]

    slim = full

    def settle(self, tokens: Sequence[int]) -> None:
        pass

    rewind = settle

    def propose(self, tokens: Sequence[int], limit: int, ahead: Ahead, draws: Draws) -> Draft:
        return self._draft


def pass_costs(pair: Pair, repeats: int, context: int = 128, skip: float = 0.45) -> dict[str, Any]:
    """Milliseconds of a full and of a slim pass by number of tokens, beside the model's own forward over its own cache."""
    model = pair.target
    hf: Any = model.model
    mask = LayerMask.even(model.n_layers, skip)
    kv = model.new_kv()
    ids = [5 + i % 50 for i in range(context + 8)]
    routes = {"full": tuple(range(model.n_layers)), "slim": mask.route.layers}

    def run(layers: Sequence[int], n: int) -> None:
        step = model.step([Segment(kv, context, n)])
        hidden, _ = model.run(model.embed(ids[context : context + n]), layers, step)
        model.readout(hidden).argmax(dim=-1).tolist()

    cache = DynamicCache()

    def theirs(n: int) -> None:
        row = torch.tensor([ids[context : context + n]], device=model.device)
        hf(row, past_key_values=cache, use_cache=True).logits[0].argmax(dim=-1).tolist()
        cache.crop(-n)

    with torch.inference_mode():
        model.run(model.embed(ids[:context]), routes["full"], model.step([Segment(kv, 0, context)]))
        hf(torch.tensor([ids[:context]], device=model.device), past_key_values=cache, use_cache=True, logits_to_keep=1)
        jobs = {f"{name} {n}": partial(run, layers, n) for name, layers in routes.items() for n in _PASSES}
        times = interleaved(jobs | {f"transformers {n}": partial(theirs, n) for n in _PASSES}, max(repeats, 15))
    middle = {name: median(taken) for name, taken in times.items()}
    return {
        "context": context,
        "skip": skip,
        "ms": {name: spread([t * 1e3 for t in taken]) for name, taken in times.items()},
        "relative_to_full_1": {name: round(taken / middle["full 1"], 3) for name, taken in middle.items()},
        "full over transformers": {n: round(middle[f"full {n}"] / middle[f"transformers {n}"], 3) for n in _PASSES},
    }


def lookup_against_transformers(
    pair: Pair, prompts: list[tuple[str, str]], repeats: int, tokens: int
) -> dict[str, Any]:
    """Strategy sd with prompt lookup against transformers' prompt lookup: same model, prompts, draft length, greedy."""
    gamma = 5
    totals: dict[str, dict[str, float]] = {}
    for category, text in prompts:
        ids = pair.encode([{"role": "user", "content": text}] if pair.is_chat else text)
        produced: dict[str, int] = {}

        def own(strategy: str, ids: list[int] = ids, produced: dict[str, int] = produced) -> None:
            result = generate(pair, ids, mask=None, strategy=strategy, gamma=gamma, max_new_tokens=tokens)
            produced[f"viasd {strategy}"] = len(result.token_ids)

        def theirs(extra: dict[str, Any], name: str, ids: list[int] = ids, produced: dict[str, int] = produced) -> None:
            produced[name] = _transformers(pair, ids, tokens, stop=True, **extra)

        times = interleaved(
            {
                "viasd sd": lambda: own("sd"),
                "viasd plain": lambda: own("plain"),
                "generate": lambda: theirs({}, "generate"),
                "generate lookup": lambda: theirs({"prompt_lookup_num_tokens": gamma}, "generate lookup"),
            },
            repeats,
        )
        for name, taken in times.items():
            entry = totals.setdefault(category, {})
            entry[f"{name} seconds"] = entry.get(f"{name} seconds", 0.0) + median(taken)
            entry[f"{name} tokens"] = entry.get(f"{name} tokens", 0.0) + produced[name]
        print(f"{category}: {len(ids)} prompt tokens done", file=sys.stderr)
    names = ("viasd sd", "viasd plain", "generate", "generate lookup")
    report = {
        category: {name: round(entry[f"{name} tokens"] / entry[f"{name} seconds"], 2) for name in names}
        for category, entry in totals.items()
    }
    seconds = {name: sum(entry[f"{name} seconds"] for entry in totals.values()) for name in names}
    produced_all = {name: sum(entry[f"{name} tokens"] for entry in totals.values()) for name in names}
    overall = {name: produced_all[name] / seconds[name] for name in names}
    return {
        "tokens_per_second": report,
        "overall": {name: round(value, 2) for name, value in overall.items()},
        **_ratio("sd over transformers' prompt lookup", overall["viasd sd"] / overall["generate lookup"]),
        "sd over plain": round(overall["viasd sd"] / overall["viasd plain"], 3),
        "prompts": len(prompts),
        "note": "prefill included; medians per prompt, summed",
    }


def memory(pair: Pair) -> dict[str, Any]:
    """Bytes of the weights however many tiers run, and of a cache: one set of weights serves them all."""
    model = pair.target
    report: dict[str, Any] = {"weights_bytes": model.weight_bytes}
    for strategy, mask in (("plain", None), ("sd", None), ("cascade", LayerMask.even(model.n_layers, 0.45))):
        options: dict[str, Any] = {"tiers": "3", "mode": "lossless"} if strategy == "cascade" else {}
        generate(pair, "Once upon a time", mask=mask, strategy=strategy, max_new_tokens=16, ignore_eos=True, **options)
        report[f"weights_bytes_after_{strategy}"] = model.weight_bytes
    kv = model.new_kv()
    with torch.inference_mode():
        model.run(model.embed([5] * 200), range(model.n_layers), model.step([Segment(kv, 0, 200)]))
    report["kv_bytes_200_tokens"] = kv.nbytes()
    report["kv_per_tier"] = "one cache per target; slim verifier and self drafter write into it"
    return report


def _transformers(pair: Pair, ids: list[int], tokens: int, stop: bool = False, **extra: Any) -> int:
    model: Any = pair.target.model
    row = torch.tensor([ids], device=pair.target.device)
    ends = {} if stop else {"eos_token_id": None}
    with torch.inference_mode():
        out = model.generate(
            row,
            attention_mask=torch.ones_like(row),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=pair.tokenizer.pad_token_id or 0,
            **ends,
            **extra,
        )
    return int(out.shape[1] - row.shape[1])


def _dataset(path: str, categories: Sequence[str], limit: int) -> list[tuple[str, str]]:
    """The first `limit` prompts of each category."""
    taken: dict[str, int] = dict.fromkeys(categories, 0)
    prompts: list[tuple[str, str]] = []
    for category, text in _read(path):
        if taken.get(category, limit) < limit:
            taken[category] += 1
            prompts.append((category, text))
    if not prompts:
        raise OptionError(f"'{path}' has no prompts of category {', '.join(categories)}")
    return prompts


def _read(path: str) -> Iterator[tuple[str, str]]:
    try:
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            yield entry["category"], entry["turns"][0]
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise OptionError(f"can't read dataset '{path}': {error}") from error


def _ratio(name: str, value: float) -> dict[str, Any]:
    return {name: round(value, 3), "verdict": f"{value:.2f}x, {'faster' if value > 1 else 'SLOWER'}"}


if __name__ == "__main__":
    sys.exit(main())
