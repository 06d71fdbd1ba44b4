"""Two result files side by side, after saying what they do not have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from viasd.errors import OptionError

# Settings without which two speeds have nothing to do with each other.
_DECISIVE = ("pair", "target", "dataset", "prompts", "chat", "max_new_tokens", "temperature", "ignore_eos")


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """What two summaries were measured on: differences that forbid a comparison, and those to keep in mind.

    The latter are what a comparison may be about: versions, dtype, device, threads, how the methods were configured.
    """
    a, b = one["settings"], other["settings"]
    decisive, rest = [], []
    for key in sorted({*a, *b}):
        if a.get(key) == b.get(key):
            continue
        if key == "methods":
            rest += _method_differences(a[key], b[key])
        elif key == "prompts" and a.get("dataset") == b.get("dataset"):
            decisive.append("a different choice of prompts (--limit)")
        else:
            (decisive if key in _DECISIVE else rest).append(f"{key}: {a.get(key)} and {b.get(key)}")
    machines = [s["provenance"]["gpu"] or s["provenance"]["cpu"] for s in (one, other)]
    if machines[0] != machines[1]:
        rest.append(f"machine: {machines[0]} and {machines[1]}")
    return decisive, rest


def _method_differences(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[str]:
    a, b = ({m["name"]: m for m in methods} for methods in (one, other))
    lines = [f"method {name} is configured differently" for name in a.keys() & b.keys() if a[name] != b[name]]
    lines += [f"method {name} is only in the {which}" for which, name in _only(a, b)]
    return sorted(lines)


def _only(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [("first", name) for name in a.keys() - b.keys()] + [("second", name) for name in b.keys() - a.keys()]


def check_comparable(decisive: list[str], *, force: bool) -> None:
    """Refuses to compare what was measured on different things, unless `force`.

    Raises:
        OptionError: Saying what differs.
    """
    if decisive and not force:
        raise OptionError(
            f"these were measured on different things: {'; '.join(decisive)}. --force compares them all the same"
        )


def comparison(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """Per common method: tok/s of both, the second's over the first's, and both ratios to plain."""
    found: dict[str, dict[str, float | None]] = {}
    for name, a in one["methods"].items():
        b = other["methods"].get(name)
        if b is None:
            continue
        speeds = a["tokens_per_second"], b["tokens_per_second"]
        found[name] = {
            "first": speeds[0],
            "second": speeds[1],
            "second_over_first": speeds[1] / speeds[0] if speeds[0] and speeds[1] else None,
            "first_ratio_to_plain": a["ratio_to_plain"],
            "second_ratio_to_plain": b["ratio_to_plain"],
        }
    return found


def comparison_rows(found: Mapping[str, Mapping[str, float | None]]) -> list[list[str]]:
    """Head and rows of a table."""
    head = ["method", "tok/s, first", "tok/s, second", "second/first", "x plain, first", "x plain, second"]
    return [head, *([name, *("-" if v is None else f"{v:.2f}" for v in row.values())] for name, row in found.items())]
