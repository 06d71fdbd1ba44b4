"""A benchmark in words: a table per task and overall, what each column means, and whatever is slower than plain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A column of the tables.

    Attributes:
        title: Its head.
        means: Its definition, printed below.
        cell: Its text for one method's figures.
    """

    title: str
    means: str
    cell: Callable[[Figures], str]


def _number(name: str, digits: int = 2, suffix: str = "") -> Callable[[Figures], str]:
    return lambda f: "-" if f.get(name) is None else f"{f[name]:.{digits}f}{suffix}"


def _share(name: str, digits: int = 0) -> Callable[[Figures], str]:
    return lambda f: "-" if f.get(name) is None else f"{f[name]:.{digits}%}"


def _shares(name: str, parts: Sequence[str]) -> Callable[[Figures], str]:
    return lambda f: "-" if not f.get(name) else " / ".join(f"{f[name][part] * 100:.0f}" for part in parts)


def _spread(f: Figures) -> str:
    return "-" if f["spread"] is None else f"{f['spread'][0]:.1f} to {f['spread'][1]:.1f}"


COLUMNS = (
    Column(
        "tok/s",
        "emitted tokens per second of wall time, prefill included: all tokens over the sum of each prompt's median time",
        _number("tokens_per_second", 1),
    ),
    Column("spread", "the same for the slowest and the fastest repeat", _spread),
    Column(
        "x plain",
        "tok/s over that of our plain decoding in this run, on the prompts that both answered",
        _number("ratio_to_plain"),
    ),
    Column(
        "x generate", "tok/s over that of transformers' `generate` in this run, likewise", _number("ratio_to_generate")
    ),
    Column(
        "emitted/round",
        "block efficiency: tokens in the output per draft-and-verify round, the verifier's own (bonus or correction) token "
        "counted; plain decoding has 1",
        _number("block_efficiency"),
    ),
    Column(
        "rejected",
        "rejection rate: 1 - kept / judged drafted tokens; a rewrite or an escalation that changes the token is a "
        "rejection; the bonus token is in neither count, nor are drafted tokens that nobody judged",
        _share("rejection_rate"),
    ),
    Column(
        "q/token",
        "forward passes of the target per emitted token, without the prompt's own; plain decoding has 1 (of a peer all are "
        "counted: its prefill gives its first token)",
        _number("full_calls_per_token"),
    ),
    Column("q'/token", "forward passes of the slim verifier per emitted token", _number("slim_calls_per_token")),
    Column(
        "tokens d/s/f %",
        "emitted tokens by the tier they were drawn from: drafter, slim verifier, full verifier",
        _shares("tier_share", ("drafter", "slim", "full")),
    ),
    Column(
        "time d/s/f/p/l %",
        "wall time in drafting, slim passes, full passes, prefill, and the loop itself",
        _shares("time_share", ("draft", "slim", "full", "prefill", "loop")),
    ),
)
_LOSSY = (
    Column(
        "disagree",
        "(lossy methods, temperature 0) tokens that are not the target's own choice after the output so far, exactly: the "
        "target was run over the output",
        _share("disagreement", 1),
    ),
    Column(
        "as plain",
        "(lossy methods, temperature 0) tokens of plain decoding's output that are in the same place here; behind a "
        "first difference two texts go their own ways",
        _share("as_plain", 1),
    ),
    Column(
        "log q",
        "(lossy methods) mean log-probability of the output's tokens under the target",
        _number("mean_log_q", 3),
    ),
)


def columns_of(methods: Mapping[str, Figures]) -> tuple[Column, ...]:
    """The columns that these methods have something to say in."""
    return (*COLUMNS, *_LOSSY) if any("mean_log_q" in f for f in methods.values()) else COLUMNS


def rows_of(methods: Mapping[str, Figures], columns: Sequence[Column]) -> list[list[str]]:
    """Head and rows of a table."""
    return [
        ["method", *(c.title for c in columns)],
        *([name, *(c.cell(f) for c in columns)] for name, f in methods.items()),
    ]


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a Markdown table whose columns line up."""
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in escaped) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in escaped]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def fitted(rows: Sequence[Sequence[str]], width: int) -> list[list[list[str]]]:
    """Rows as one table, or as several of fewer columns, each beginning with the first, where the terminal is narrower.

    Args:
        rows: Head and rows.
        width: Characters of a line.
    """
    frame = 3  # a border and a blank on either side
    sizes = [max(len(row[i]) for row in rows) + frame for i in range(len(rows[0]))]
    parts: list[list[int]] = [[0]]
    for i in range(1, len(sizes)):
        if len(parts[-1]) > 1 and sum(sizes[j] for j in parts[-1]) + sizes[i] + 1 > width:
            parts.append([0])
        parts[-1].append(i)
    return [[[row[i] for i in part] for row in rows] for part in parts]


def tables(summary: Figures) -> list[tuple[str, list[list[str]]]]:
    """(title, rows) of every task, where there are several, and of all together."""
    columns, tasks = columns_of(summary["methods"]), summary["tasks"]
    found = [
        (f"{task} ({_prompts(part['prompts'])})", rows_of(part["methods"], columns))
        for task, part in (tasks.items() if len(tasks) > 1 else ())
    ]
    title = "all tasks" if len(tasks) > 1 else next(iter(tasks), "no task")
    return [*found, (f"{title} ({_prompts(summary['prompts'])})", rows_of(summary["methods"], columns))]


def _prompts(n: int) -> str:
    return f"{n} prompt{'' if n == 1 else 's'}"


def definitions(summary: Figures) -> list[str]:
    """One line a column."""
    return [f"{c.title}: {c.means}" for c in columns_of(summary["methods"])]


def remarks(summary: Figures) -> list[str]:
    """What a person should know, in sentences: slower methods first."""
    return [
        *slower_lines(summary),
        *_failure_lines(summary),
        *_check_lines(summary),
        *_exit_lines(summary),
        *_cost_lines(summary),
        *_prediction_lines(summary),
        *_baseline_lines(summary),
    ]


def slower_lines(summary: Figures) -> list[str]:
    """Every method that is slower than plain decoding, overall or on some tasks."""
    lines = []
    for name, figures in summary["methods"].items():
        ratio = figures["ratio_to_plain"]
        if name == "plain" or ratio is None:
            continue
        tasks = {
            task: part["methods"][name]["ratio_to_plain"]
            for task, part in summary["tasks"].items()
            if (part["methods"][name]["ratio_to_plain"] or 1.0) < 1
        }
        where = ", ".join(f"{task} {value:.2f}x" for task, value in tasks.items())
        if ratio < 1:
            lines.append(f"{name} is SLOWER than plain decoding: {ratio:.2f}x overall ({where})")
        elif tasks:
            lines.append(f"{name} is slower than plain decoding on some tasks: {where}")
    return lines


def _exit_lines(summary: Figures) -> list[str]:
    """Early exits of each method that has them, by task where there are several."""
    return [
        f"{name}: {figures['layers_per_token']:.1f} layers/token, exits "
        + (
            ", ".join(f"{layers}: {n}" for layers, n in sorted(figures["exits"].items(), key=lambda e: int(e[0])))
            or "none"
        )
        + "".join(
            f"; {task} {part['methods'][name]['layers_per_token']:.1f}"
            for task, part in summary["tasks"].items()
            if len(summary["tasks"]) > 1 and "layers_per_token" in part["methods"][name]
        )
        for name, figures in summary["methods"].items()
        if "layers_per_token" in figures
    ]


def _failure_lines(summary: Figures) -> list[str]:
    return [
        f"{name} FAILED on {f['failed']} of {f['failed'] + f['prompts']} prompts; they are in none of its figures"
        for name, f in summary["methods"].items()
        if f["failed"]
    ]


def _check_lines(summary: Figures) -> list[str]:
    check = summary.get("check")
    if check is None:
        return []
    lines = []
    for who, found in (("lossless outputs of ours", check), ("outputs of transformers' other methods", check["peers"])):
        if not found["compared"]:
            continue
        text = f"check: {found['compared']} {who} compared with plain greedy decoding, {found['mismatches']} differ"
        if found["mismatches"]:
            first = found["first"][0]
            gap = f", logits {first['gap']:.3g} apart" if first.get("gap") is not None else ""
            text += (
                f" ({found['near_ties']} near-ties within rounding, {found['bugs']} NOT near-ties; first: "
                f"{first['method']} on prompt {first['prompt']} at token {first['index']}{gap})"
            )
        lines.append(text)
    if check["bugs"]:
        lines.append("A lossless output that differs by more than rounding is a BUG: please report it")
    return lines


def _cost_lines(summary: Figures) -> list[str]:
    costs, bandwidth = summary["costs"], summary["bandwidth"]
    lines = []
    for name, row in costs["relative"].items():
        seconds = costs["seconds"][name]
        cells = ", ".join(f"{n}: {seconds[n] * 1e3:.1f} ms ({value:.2f}x)" for n, value in row.items())
        lines.append(f"cost of a {name} pass by tokens, cost(m) / cost(1) in brackets: {cells}")
    limit = bandwidth["limit_tokens_per_second"]
    reached = bandwidth.get("plain_share")
    lines.append(
        f"memory limit: {bandwidth['bytes_per_token'] / 1e6:.1f} MB of weights a token at "
        f"{bandwidth['bytes_per_second'] / 1e9:.1f} GB/s read make at most {limit:.1f} tok/s"
        + ("" if reached is None else f"; plain decoding reaches {reached:.0%} of it (prefill left out)")
    )
    peak = summary["peak_memory"]
    held = [f"{peak[key] / 1e6:.0f} MB {what}" for key, what in _PEAKS if peak[key] is not None]
    return [*lines, f"peak memory: {', '.join(held) or 'not known'}"]


_PEAKS = (("process_bytes", "of the process, all methods together"), ("gpu_bytes", "allocated on the GPU"))


def _prediction_lines(summary: Figures) -> list[str]:
    return [
        f"{name}: {p['predicted_tokens_per_second']:.1f} tok/s predicted from costs and rejection rate, "
        f"{p['measured_tokens_per_second']:.1f} measured (both without prefill; {p['mean_drafted']:.1f} drafted a round)"
        for name, p in summary["predictions"].items()
    ]


def _baseline_lines(summary: Figures) -> list[str]:
    best = summary.get("best_strict_sd")
    if best is None:
        return []
    return [
        f"strict speculative decoding is fastest as {best}: {summary['methods'][best]['tokens_per_second']:.1f} tok/s"
    ]


def markdown_report(summary: Figures) -> str:
    """The whole report as Markdown."""
    where = summary["provenance"]
    lines = [
        f"# viasd-bench: {where['pair']}",
        "",
        f"{where['date']}, {where['gpu'] or where['cpu']}, {where['threads']} threads, {where['dtype']}; "
        f"data set {summary['dataset']['name']}, at most {summary['settings']['max_new_tokens']} tokens, temperature "
        f"{summary['settings']['temperature']:g}, {summary['settings']['repeats']} repeats",
        "",
        f"    {where['command']}",
        "",
    ]
    for title, rows in tables(summary):
        lines += [f"## {title}", "", markdown_table(rows), ""]
    lines += [f"- {line}" for line in remarks(summary)]
    lines += [
        "",
        "## What the columns mean",
        "",
        *(f"- **{c.title}**: {c.means}" for c in columns_of(summary["methods"])),
    ]
    return "\n".join(lines) + "\n"
