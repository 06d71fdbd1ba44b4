"""From records to the summary: sums first, ratios at the end, and only over prompts that both sides answered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from viasd.divergences import predicted_seconds_sd
from viasd.runtime.bench.costs import measure
from viasd.runtime.bench.records import Record, ResultFile
from viasd.runtime.bench.run import YARDSTICK, Bench
from viasd.runtime.costs import interpolated
from viasd.runtime.metrics import Counters

PEER_YARDSTICK = "generate"
_COUNTS = (
    *("emitted", "rounds", "drafted", "accepted", "gated", "kept", "rewrites", "unseen", "escalated_rounds"),
    *("drafter_calls", "slim_calls", "full_calls"),
)


def figures_by_method(records: Sequence[Record], methods: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The figures of every method over some records (one task's, or all)."""
    by_method: dict[str, dict[str, Record]] = {name: {} for name in methods}
    failed: dict[str, int] = dict.fromkeys(by_method, 0)
    for record in records:
        if "error" in record:
            failed[record["method"]] += 1
        else:
            by_method[record["method"]][record["prompt"]] = record
    found = {}
    for name, own in by_method.items():
        found[name] = {
            "prompts": len(own),
            "failed": failed[name],
            **_speed(list(own.values())),
            "ratio_to_plain": _ratio(own, by_method.get(YARDSTICK, {})),
            "ratio_to_generate": _ratio(own, by_method.get(PEER_YARDSTICK, {})),
            **_counted(list(own.values())),
            **_lossy(list(own.values())),
        }
    return found


def _speed(records: Sequence[Record]) -> dict[str, Any]:
    if not records:
        return {"tokens": 0, "seconds": 0.0, "tokens_per_second": None, "spread": None}
    tokens, seconds = sum(r["tokens"] for r in records), sum(r["seconds"] for r in records)
    repeats = [sum(column) for column in zip(*(r["seconds_all"] for r in records), strict=True)]
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        # Of whole passes over the prompts: slowest and fastest repeat.
        "spread": [tokens / max(repeats), tokens / min(repeats)],
    }


def _ratio(own: Mapping[str, Record], other: Mapping[str, Record]) -> float | None:
    """Tokens per second over the other's, on the prompts that both answered."""
    both = sorted(own.keys() & other.keys())
    if not both:
        return None
    one, two = (_speed([side[prompt] for prompt in both])["tokens_per_second"] for side in (own, other))
    return float(one / two) if two else None


def _counted(records: Sequence[Record]) -> dict[str, Any]:
    """Ratios of counts; a peer says only how often it ran the target."""
    calls, tokens = sum(r["target_calls"] for r in records), sum(r["tokens"] for r in records)
    figures: dict[str, Any] = {"full_calls_per_token": calls / tokens if tokens else None}
    if not records or "counts" not in records[0]:
        return figures
    counters = merged(records)
    parts = {part: sum(r["time"][part] for r in records) for part in records[0]["time"]}
    whole = sum(parts.values())
    figures |= {
        "block_efficiency": counters.block_efficiency,
        "rejection_rate": counters.rejection_rate if counters.gated else None,
        "slim_calls_per_token": counters.slim_calls_per_token,
        "escalation_rate": counters.escalation_rate,
        "tier_share": counters.tier_share,
        "time_share": {part: seconds / whole for part, seconds in parts.items()} if whole else None,
        "decoding_tokens_per_second": tokens / (whole - parts["prefill"]) if whole > parts["prefill"] else None,
        "counts": {name: getattr(counters, name) for name in _COUNTS} | {"by_tier": dict(counters.by_tier)},
    }
    early = [r["counts"]["early"] for r in records]
    if passes := sum(e["layer_passes"] for e in early):
        exits: dict[str, int] = {}
        for layers, count in (entry for e in early for entry in e["exits"].items()):
            exits[layers] = exits.get(layers, 0) + count
        figures |= {"layers_per_token": passes / tokens, "exits": exits}
    audited = [r["counts"]["audit"] for r in records]
    if any(a["blocks"] for a in audited):
        figures["audit"] = {key: sum(a[key] for a in audited) for key in ("blocks", "tokens", "disagreed")}
    return figures


def merged(records: Iterable[Record]) -> Counters:
    """The counts of several records as one."""
    total = Counters()
    for record in records:
        counts = record["counts"]
        one = Counters(**{name: counts[name] for name in _COUNTS}, by_tier=dict(counts["by_tier"]))
        total.merge(one)
    return total


def _lossy(records: Sequence[Record]) -> dict[str, Any]:
    distances = [(r["lossy"], r["tokens"]) for r in records if "lossy" in r]
    if not distances:
        return {}
    tokens = sum(n for _, n in distances)
    figures: dict[str, Any] = {"mean_log_q": sum(d["mean_log_q"] * n for d, n in distances) / tokens}
    compared = sum(d.get("compared", 0) for d, _ in distances)
    # Only at temperature 0 has q one token of its own to disagree with.
    figures["disagreement"] = sum(d["disagreed"] for d, _ in distances) / compared if compared else None
    plain = sum(d.get("plain", 0) for d, _ in distances)
    figures["as_plain"] = sum(d.get("as_plain", 0) for d, _ in distances) / plain if plain else None
    return figures


def check_summary(records: Sequence[Record]) -> dict[str, Any] | None:
    """Outputs compared with plain decoding: ours, and apart from them the peers'. None where nothing was compared."""
    ours = [r for r in records if "check" in r and r["kind"] != "peer"]
    peers = [r for r in records if "check" in r and r["kind"] == "peer"]
    if not ours and not peers:
        return None
    return {**_mismatches(ours), "peers": _mismatches(peers)}


def _mismatches(records: Sequence[Record]) -> dict[str, Any]:
    wrong = [r for r in records if not r["check"]["equal"]]
    kinds = [r["check"]["kind"] for r in wrong]
    return {
        "compared": len(records),
        "mismatches": len(wrong),
        "near_ties": kinds.count("near-tie"),
        "bugs": kinds.count("bug"),
        "first": [{"method": r["method"], "prompt": r["prompt"], **r["check"]} for r in wrong[:5]],
    }


def predictions(
    figures: Mapping[str, Mapping[str, Any]], costs: Mapping[str, Mapping[int, float]], records: Sequence[Record]
) -> dict[str, dict[str, float]]:
    """Predicted against measured speed of strict `sd`, decoding only: ``(gamma c_p + c_q) / E(R)`` seconds a token.

    gamma is the mean number of drafted tokens a round (a drafter may have nothing to say), c_q the measured pass over
    gamma + 1 tokens, c_p the measured seconds of a drafted token, R the measured rejection rate.
    """
    found = {}
    for name, row in figures.items():
        own = [r for r in records if r["method"] == name and "error" not in r]
        if not own or not own[0]["lossless"] or name.split("/")[0] != "sd" or not row.get("decoding_tokens_per_second"):
            continue
        counts = row["counts"]
        gamma = counts["drafted"] / counts["rounds"]
        drafting = sum(r["time"]["draft"] for r in own)
        c_p = drafting / counts["drafted"] if counts["drafted"] else 0.0
        seconds = predicted_seconds_sd(row["rejection_rate"] or 0.0, gamma, c_p, interpolated(costs["full"], gamma + 1))
        found[name] = {
            "predicted_tokens_per_second": 1 / seconds,
            "measured_tokens_per_second": row["decoding_tokens_per_second"],
            "mean_drafted": gamma,
        }
    return found


def best_strict_sd(figures: Mapping[str, Mapping[str, Any]], lossless: Iterable[str]) -> str | None:
    """Name of the fastest strict `sd` among the methods."""
    known = {
        name: figures[name]["tokens_per_second"]
        for name in lossless
        if name.split("/")[0] == "sd" and figures[name]["tokens_per_second"]
    }
    return max(known, key=known.__getitem__) if known else None


def summarise(
    bench: Bench, results: ResultFile, provenance: Mapping[str, Any], peak: Mapping[str, int | None]
) -> dict[str, Any]:
    """The last line of a result file; measures the costs of passes on the way."""
    methods, records = list(bench.grid.methods), results.records
    figures = figures_by_method(records, methods)
    measured = measure(bench.pair, bench.grid.masks, bench.config.gammas)
    plain, bandwidth = figures[YARDSTICK].get("decoding_tokens_per_second"), measured["bandwidth"]
    bandwidth["plain_share"] = plain / bandwidth["limit_tokens_per_second"] if plain else None
    costs = {name: {int(n): s for n, s in row.items()} for name, row in measured["costs"]["seconds"].items()}
    summary = {
        "methods": figures,
        "tasks": {
            task: {"prompts": len({r["prompt"] for r in part}), "methods": figures_by_method(part, methods)}
            for task, part in _by_task(records).items()
        },
        "prompts": len({r["prompt"] for r in records}),
        **measured,
        "predictions": predictions(figures, costs, records),
        "peak_memory": dict(peak),
        "check": check_summary(records),
        "dataset": {"name": bench.dataset.name, "sha256": bench.dataset.sha256},
        "settings": results.settings,
        "provenance": dict(provenance),
    }
    if bench.config.baselines:
        strict = [m.spec.name for m in bench.grid.own if m.spec.lossless]
        summary["best_strict_sd"] = best_strict_sd(figures, strict)
    return summary


def _by_task(records: Sequence[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record["task"], []).append(record)
    return found
