"""What was measured on labelled drafts, as Markdown and as a figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from viasd.runtime.bench.acceptance.features import FEATURES, POST, POST_HEAD
from viasd.runtime.figures import require_matplotlib, save_figure

_LABELS = {"kept": "kept or not", "overlap": "the chance of being kept, sum over v of min(p, q)"}


def markdown(summary: Mapping[str, Any]) -> str:
    """The report; the post's figures stand beside ours where it gives them."""
    scores = summary["scores"]
    lines = [
        f"# Which drafted tokens are kept? {summary['provenance']['pair']}",
        "",
        f"{scores['drafts']} labelled drafts of `{summary['settings']['drafter']}` on {summary['settings']['dataset']}, "
        f"temperatures {', '.join(f'{t:g}' for t in summary['settings']['temperatures'])}, blocks of "
        f"{summary['settings']['gamma']}; {scores['kept']:.1%} were kept. Learnt online, every prediction before its label "
        f"was seen; labels: {_LABELS[scores['labels']]}.",
        "",
        "| predictor | AUC | log-loss | ECE | post: AUC | log-loss | ECE | |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for feature in FEATURES:
        f = scores["features"][feature.name]
        theirs = " | ".join(f"{x:.4f}" for x in POST[feature.name]) if feature.name in POST else "- | - | -"
        lawful = "" if feature.lossless else "not lossless: it looks at the drawn token"
        lines.append(
            f"| {feature.name} | {_figure(f['auc'])} | {f['log_loss']:.4f} | {f['ece']:.4f} | {theirs} | {lawful} |"
        )
    lines.append(f"| trained head | - | - | - | {' | '.join(f'{x:.4f}' for x in POST_HEAD)} | not measured here |")
    lines += ["", "| place in the block | drafts | predicted | kept |", "|--:|--:|--:|--:|"]
    lines += [
        f"| {r['position'] + 1} | {r['drafts']} | {r['predicted']:.3f} | {r['kept']:.3f} |"
        for r in scores["by_position"]
    ]
    lines += [
        "",
        "AUC: chance that a kept token has the higher prediction. ECE: mean distance of prediction and share kept over ten "
        "bins, weighted by drafts. The post (vLLM on Adaptive Verification, October 2026) measured 4.5 million drafts of "
        "other models.",
        "",
    ]
    return "\n".join(lines)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def plot(summary: Mapping[str, Any], path: str) -> None:
    """Draws predicted against observed acceptance, by prediction and by place, and the coefficients over time.

    Raises:
        OptionError: If matplotlib is missing, or the file can't be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    scores = summary["scores"]
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    figure.suptitle(f"{summary['provenance']['pair']}: {scores['drafts']} labelled drafts")

    bins = [b for b in scores["reliability"] if b["drafts"]]
    left.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle="--")
    sizes = [12 + 300 * b["drafts"] / scores["drafts"] for b in bins]
    left.scatter([b["predicted"] for b in bins], [b["kept"] for b in bins], s=sizes, color="#1f6f8b", alpha=0.8)
    left.set(xlabel="predicted chance of being kept", ylabel="share kept (area: drafts)", xlim=(0, 1), ylim=(0, 1))

    places = scores["by_position"]
    middle.plot([r["position"] + 1 for r in places], [r["kept"] for r in places], "o-", color="#1f6f8b", label="kept")
    middle.plot(
        [r["position"] + 1 for r in places], [r["predicted"] for r in places], "x--", color="#d9a441", label="predicted"
    )
    middle.set(xlabel="place in the block", ylabel="share, of those reached", ylim=(0, 1))
    middle.legend(fontsize="small")

    course = scores["coefficients"]
    if course:
        seen = [c["drafts"] for c in course]
        right.plot(seen, [c["slope"] for c in course], color="black", label="w")
        for k in range(len(course[0]["intercepts"])):
            right.plot(seen, [c["intercepts"][k] for c in course], linewidth=0.9, label=f"b{k}")
        right.legend(fontsize="x-small", ncols=2)
    right.set(xlabel="labelled drafts seen", ylabel="coefficient")
    save_figure(figure, path)
