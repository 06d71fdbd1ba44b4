"""One figure of a search: cost trace, layer importance, strip of layers. Needs the `plot` extra."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from viasd.routes import PARTS
from viasd.runtime.figures import require_matplotlib, save_figure
from viasd.search.config import TIME
from viasd.search.objective import SECONDS, SLIM
from viasd.search.outcome import SearchOutcome
from viasd.search.report import skipped_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_KEPT, _SKIPPED, _GREY = "#1f6f8b", "#e6e6e6", "#9a9a9a"


def unit_flags(outcome: SearchOutcome) -> list[bool]:
    """Whether each unit (layer, or half layer) runs."""
    keep, parts = outcome.mask.keep, dict(outcome.mask.partial)
    if not outcome.sublayers:
        return list(keep)
    return [kept or parts.get(i) == half for i, kept in enumerate(keep) for half in PARTS]


def plot_outcome(outcome: SearchOutcome, path: str) -> None:
    """Draws a search into a PNG file.

    Args:
        outcome: What to draw.
        path: File to write.

    Raises:
        OptionError: If matplotlib is missing, or the file can't be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    details = outcome.mask.details
    trust: Mapping[str, Mapping[str, Any]] = details.get("trust") or {}
    figure = Figure(figsize=(9, 10 if trust else 7), layout="constrained")
    ratios = [3, 2.4, 0.5] + ([3] if trust else [])
    trace, importance, strip, *last = figure.subplots(len(ratios), 1, height_ratios=ratios)
    keep = unit_flags(outcome)
    figure.suptitle(f"{outcome.mask.pair}: {skipped_words(outcome)} skipped")

    (_draw_front if details["front"] else _draw_trace)(trace, outcome)

    values = [0.0 if v is None else v for v in outcome.importance]
    colors = [_KEPT if k else _GREY for k in keep]
    importance.bar(range(len(values)), values, color=colors)
    importance.axhline(0, color="black", linewidth=0.8)
    importance.set(ylabel="mean cost\nskipped - kept", xlim=(-0.6, len(values) - 0.4))

    strip.bar(range(len(values)), [1] * len(values), color=[_KEPT if k else _SKIPPED for k in keep], width=0.9)
    unit = "half layer (attention, MLP in turn; " if outcome.sublayers else "layer ("
    strip.set(yticks=[], xlabel=f"{unit}dark: run by the slim verifier)", xlim=(-0.6, len(values) - 0.4), ylim=(0, 1))
    for side in strip.spines.values():
        side.set_visible(False)

    for axes in last:
        _draw_trust(axes, trust)
    save_figure(figure, path)


def plot_trust(curves: Mapping[str, Mapping[str, Any]], title: str, path: str) -> None:
    """Draws trust curves (`viasd.search.trust.TrustCurve.as_json`, by what each is of) into a PNG file.

    Raises:
        OptionError: If matplotlib is missing, or the file can't be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    _draw_trust(axes, curves)
    axes.set(title=title)
    save_figure(figure, path)


def _draw_trust(axes: Axes, curves: Mapping[str, Mapping[str, Any]]) -> None:
    """Tokens that may be believed, by disagreement."""
    for number, (name, curve) in enumerate(curves.items()):
        budgets = [100 * budget for budget in curve["budgets"]]
        for key, who, style in (("guard", "guard's estimator", "o-"), ("max", "max q' alone", "s--")):
            if curve[key] is not None:
                axes.plot(budgets, curve[key], style, color=f"C{number}", label=f"{name}, {who}")
    axes.set(xlabel="disagreement put up with, %", ylabel="share of tokens believed", xlim=(0, None), ylim=(0, 1))
    axes.legend(fontsize="small", loc="upper left")


def _draw_trace(axes: Axes, outcome: SearchOutcome) -> None:
    """The objective by step."""
    timed = outcome.mask.details["objective"] == TIME
    scale, name = (1e3, SECONDS) if timed else (1.0, "cost")
    values = [None if value is None else scale * value for value in outcome.trace]
    whole = [(step, value) for step, value in enumerate(values) if value is not None]
    axes.plot(*zip(*whole, strict=True), ".", color=_GREY, label="evaluated mask")
    running = accumulate((math.inf if v is None else v for v in values), min)
    axes.step(range(len(values)), list(running), where="post", color=_KEPT, label="best so far")
    controls = outcome.mask.details.get("controls") or {}
    for key, label, style in (
        ("even", "even-spaced", ":"),
        ("random_best", "best random mask", "--"),
        ("random_median", "median random mask", "-."),
    ):
        figures = (controls.get(key) or {}).get("search")
        if figures is not None:
            axes.axhline(scale * figures[name], linestyle=style, color="black", linewidth=1, label=label)
    axes.set(xlabel="step", ylabel=f"{'predicted ms/token' if timed else 'cost'} (searching half)")
    axes.legend(fontsize="small", loc="upper right")


def _draw_front(axes: Axes, outcome: SearchOutcome) -> None:
    """Cost against the time of a slim pass."""
    axes.plot(*zip(*outcome.points, strict=True), ".", color=_GREY, label="evaluated mask")
    front = [entry["search"] for entry in outcome.mask.details["front"]]
    axes.plot([f[SLIM] for f in front], [f["cost"] for f in front], "o-", color=_KEPT, label="front")
    own = outcome.mask.details["search"]
    axes.plot([own[SLIM]], [own["cost"]], "D", color="black", label="least predicted time")
    axes.set(xlabel="slim pass, share of a full one", ylabel="cost (searching half)")
    axes.legend(fontsize="small", loc="upper right")
