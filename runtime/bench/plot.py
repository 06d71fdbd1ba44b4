"""One figure of a benchmark: speed by method, and for lossy methods speed against disagreement. Needs the `plot` extra."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from viasd.runtime.figures import require_matplotlib, save_figure

_OWN, _PEER, _BASELINE = "#1f6f8b", "#9a9a9a", "#d9a441"


def plot_summary(summary: Mapping[str, Any], path: str) -> None:
    """Draws a benchmark into a PNG file.

    Args:
        summary: What to draw.
        path: File to write.

    Raises:
        OptionError: If matplotlib is missing, or the file can't be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    kinds = {m["name"]: m["kind"] for m in summary["settings"]["methods"]}
    known = {name: f for name, f in summary["methods"].items() if f["tokens_per_second"] is not None}
    lossy = {name: f for name, f in known.items() if f.get("disagreement") is not None}
    figure = Figure(figsize=(9 if lossy else 7, 1.5 + 0.35 * len(known)), layout="constrained")
    panels = figure.subplots(1, 2 if lossy else 1, squeeze=False)[0]
    figure.suptitle(f"{summary['provenance']['pair']}, {summary['dataset']['name']}")

    colors = {"own": _OWN, "peer": _PEER, "baseline": _BASELINE}
    names, speeds = list(known), [f["tokens_per_second"] for f in known.values()]
    # A median may lie outside the spread of whole repeats by a hair.
    low = [max(0.0, s - f["spread"][0]) for s, f in zip(speeds, known.values(), strict=True)]
    high = [max(0.0, f["spread"][1] - s) for s, f in zip(speeds, known.values(), strict=True)]
    panels[0].barh(names, speeds, xerr=[low, high], color=[colors[kinds[n]] for n in names], capsize=2)
    panels[0].invert_yaxis()
    panels[0].set(xlabel="tokens/s (line: slowest to fastest repeat)")
    plain = known.get("plain")
    if plain is not None:
        panels[0].axvline(plain["tokens_per_second"], color="black", linewidth=0.8, linestyle="--")

    if lossy:
        for name, figures in lossy.items():
            point = (figures["disagreement"] * 100, figures["tokens_per_second"])
            panels[1].plot(*point, "o", color=colors[kinds[name]])
            panels[1].annotate(name, point, fontsize="x-small", xytext=(4, 2), textcoords="offset points")
        if plain is not None:
            panels[1].axhline(plain["tokens_per_second"], color="black", linewidth=0.8, linestyle="--", label="plain")
            panels[1].legend(fontsize="small")
        panels[1].set(xlabel="tokens that are not the target's choice, %", ylabel="tokens/s")

    save_figure(figure, path)
