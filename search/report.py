"""What a search found, in words and a table; also what `show` and `compare` print of mask files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from viasd.mask import LayerMask
from viasd.runtime.display import mask_cells, mask_strip
from viasd.runtime.readouts import scored_with
from viasd.search.config import COST
from viasd.search.front import front_masks, skipped_layers
from viasd.search.objective import SECONDS, SLIM
from viasd.search.outcome import SearchOutcome
from viasd.search.trust import trust_lines

_NAMED_LAYERS = 4
_WIDTH = 24


def outcome_report(outcome: SearchOutcome, *, unicode: bool = True) -> str:
    """The report of a search."""
    lines = [f"{outcome.trials} of {outcome.wanted} masks that skip {skipped_words(outcome)} evaluated"]
    if outcome.pruned:
        lines[0] += f" ({outcome.pruned} given up early)"
    if outcome.interrupted:
        lines[0] += "; interrupted, the best so far"
    lines += mask_lines(outcome.mask, unicode=unicode)
    if (text := importance_line(outcome.importance, sublayers=outcome.sublayers)) is not None:
        lines.append(text)
    timing = outcome.timing
    if timing.masks_per_minute is not None:
        lines += [
            f"time: {timing.seconds:.0f} s in all, {timing.masks_per_minute:.1f} masks/minute, "
            f"{timing.proposal_share:.1%} of the search in proposals",
            f"saved: {timing.reused:.0%} of the layer passes (layers before the first skip are not run again), "
            f"{timing.pruned:.0%} of the text (masks given up early)",
        ]
    return "\n".join(lines)


def skipped_words(outcome: SearchOutcome) -> str:
    """How much every mask of a search skips."""
    mask, n = outcome.mask, len(outcome.mask.keep)
    skipped = n - sum(mask.keep)
    if (ratios := mask.details.get("skip_range")) is not None:
        return f"{ratios[0]:g} to {ratios[1]:g} of {n} layers"
    return (
        f"{2 * skipped - len(mask.partial)} of {2 * n} half layers" if outcome.sublayers else f"{skipped} of {n} layers"
    )


def mask_lines(mask: LayerMask, *, unicode: bool = True) -> list[str]:
    """A mask file in lines: strip, table of figures, verdicts; only what the file has."""
    lines = [mask_strip(mask.keep, mask.name, partial=dict(mask.partial), unicode=unicode)]
    details = mask.details
    if mask.target is not None:
        lines.append(f"target {mask.target.id}" + (f", searched for pair {mask.pair}" if mask.pair else ""))
    if "search" in details or "controls" in details:
        lines += ["", *_table(details), ""]
        lines.append(random_verdict(details))
    if (readout := scored_with(mask)) is not None:
        lines.append(f"slim verifier read out as a {readout.describe()}")
    if mask.stitches is not None:
        lines.append(stitch_line(mask))
    if (stitched := details.get("stitched")) is not None:
        lines += stitched_lines(stitched)
    if (variants := details.get("variants")) is not None:
        lines += ["", *variant_lines(variants), ""]
    lines += front_lines(mask, unicode=unicode)
    lines += prefix_lines(details)
    if (two := details.get("two_tiers")) is not None:
        lines.append(
            "predicted on the text, ms/token: three tiers with a guard that is always right "
            f"{_milli(details.get(SECONDS))}, two tiers {_milli(two.get('sd'))}, plain {_milli(two.get('plain'))}"
        )
    if (tier := details.get("tier")) is not None:
        lines += tier_lines(tier)
    if (guard := details.get("guard_reliability")) is not None:
        lines.append(guard_line(guard))
    elif details.get("tier") is not None:
        lines.append("guard: the drafter proposed too little on the text for start values; it will learn from nothing")
    return [*lines, *trust_lines(details.get("trust") or {})]


def random_verdict(details: Mapping[str, Any]) -> str:
    """Whether the search was better than chance, in words."""
    controls = details.get("controls") or {}
    n = controls.get("random_masks", 0)
    beats, margin = details.get("beats_random"), controls.get("margin")
    if beats is None:
        return "no verdict on chance: the random masks to compare with were not all scored"
    by = "" if margin is None else f" (by {abs(margin['mean']):.4f} a token, standard error {margin['error']:.4f})"
    if beats:
        sure = margin is None or margin["mean"] > 2 * margin["error"]
        doubt = "" if sure else "; the difference is within chance of the text"
        return f"on text it did not see, the mask beats the best of {n} random masks{by}{doubt}"
    if margin is not None and margin["mean"] == 0:
        return f"NOT BETTER THAN CHANCE: the best of {n} random masks is just as good, or the very same"
    better = "costs less" if details.get("objective", COST) == COST else "is predicted to be as fast or faster"
    return f"NOT BETTER THAN CHANCE: on text the search did not see, the best of {n} random masks {better}{by}"


def stitch_line(mask: LayerMask) -> str:
    """Where a mask has stitches, and of what rank."""
    assert mask.stitches is not None
    ranks = ", ".join(f"{i}" if r is None else f"{i} (rank {r})" for i, r in mask.stitches.ranks.items())
    return f"stitched before layers {ranks}: {mask.stitches.parameters / 1e6:.2f} M numbers"


def stitched_lines(found: Mapping[str, Any]) -> list[str]:
    """What stitches did to the best masks of a search, and to the one that was taken."""
    lines = [f"the {len(found['tried'])} best masks, by their own figures, stitched (searching half):"]
    for one in found["tried"]:
        lines.append(
            f"  {one['keep']}  cost {_number(one['without']['cost'])} -> {_number(one['with']['cost'])}  "
            f"agree {_number(one['without']['agreement'])} -> {_number(one['with']['agreement'])}"
        )
    report = found["report"]
    return [
        *lines,
        f"with stitches, reporting half: cost {_number(report['cost'])}  KL {_number(report['kl'])}  "
        f"agree {_number(report['agreement'])}",
    ]


def variant_lines(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Slim verifiers of one mask without, with, and with fine-tuned stitches (`viasd.search.fit.judging.variants`)."""
    titles = ("agree", "accept mass", "KL", "cost", "weights read", "ms/block")
    lines = [f"{'slim verifier':<16}" + "".join(f"{title:>14}" for title in titles)]
    for name, one in found.items():
        cells = [_number(one[key]) for key in ("agreement", "accept_mass", "kl", "cost", "parameters")]
        lines.append(f"{name:<16}" + "".join(f"{cell:>14}" for cell in [*cells, _milli(one["seconds"])]))
    full = next(iter(found.values()))["full_seconds"]
    return [*lines, f"{'full verifier':<16}" + " " * 56 + f"{_number(1.0):>14}{_milli(full):>14}"]


def front_lines(mask: LayerMask, *, unicode: bool = True) -> list[str]:
    """The masks of a front, one a line."""
    masks = front_masks(mask)
    if not masks:
        return []
    lines = ["", "front (cost against the time of a slim pass), reporting half:"]
    for number, one in enumerate(masks, 1):
        figures = one.details
        lines.append(
            f"{number:>3} [{mask_cells(one.keep, dict(one.partial), unicode=unicode)}] skips {skipped_layers(one):>4g}  "
            f"slim pass {_number(figures.get(SLIM))} of a full one  cost {_number(figures.get('cost'))}  "
            f"agree {_number(figures.get('agreement'))}  {_milli(figures.get(SECONDS))} ms/token"
            + ("  <- this file" if one.route == mask.route else "")
        )
    return [*lines, ""]


def prefix_lines(details: Mapping[str, Any]) -> list[str]:
    """The layers before each light head as slim verifiers, best first, beside the mask."""
    prefixes = details.get("prefixes")
    if not prefixes:
        return []
    rows = [("this mask", details, None if details.get("tv") is None else 1 - details["tv"])]
    rows += [(f"prefix:{p['layers']} of {prefixes['of']}", p, p["accept_mass"]) for p in prefixes["found"]]
    rows.sort(key=lambda row: row[1].get("cost", float("inf")))
    return [
        f"slim verifiers, best first (a prefix ends in a head of {prefixes['heads']}; escalating costs it no layer twice):",
        *(
            f"  {name:22} cost {_number(figures.get('cost'))}  agree {_number(figures.get('agreement'))}  accept mass "
            f"{_number(mass)}"
            for name, figures, mass in rows
        ),
        "",
    ]


def _milli(seconds: Any) -> str:
    return f"{1e3 * seconds:.1f}" if isinstance(seconds, int | float) else "?"


def tier_lines(tier: Mapping[str, Any]) -> list[str]:
    """Delta, predicted speed and what to do."""
    delta, per_token = tier.get("delta"), tier.get("per_token") or {}
    said = "unknown, the drafter proposed nothing" if delta is None else f"{delta:+.3f}"
    times = ", ".join(
        f"{name} {'?' if per_token.get(key) is None else format(per_token[key] * 1e3, '.1f')}"
        for name, key in (("plain", "plain"), ("two tiers", "sd"), ("three tiers", "cascade"))
    )
    return [
        f"tiers: Delta {said} (positive: the slim tier shortens the path); predicted ms/token on this machine: {times}",
        f"recommendation: {recommendation(tier)}",
    ]


def recommendation(tier: Mapping[str, Any]) -> str:
    """What to do with this mask as a middle tier, in plain words."""
    delta, per_token = tier.get("delta"), tier.get("per_token") or {}
    plain, sd, cascade = (per_token.get(name) for name in ("plain", "sd", "cascade"))
    if tier.get("pays"):
        text = "keep the slim tier"
        if sd is not None and cascade:
            text += f": {sd / cascade:.2f} times as fast as two tiers by prediction"
        return text
    if delta is None:
        reason = "the drafter proposed nothing on the text, so a slim tier has nothing to judge"
    elif delta <= 0:
        reason = "it does not shorten the path from the drafter to the target, so there is nothing to gain"
    else:
        reason = "it shortens the path, but it is not cheap enough to save time"
    if plain is not None and sd is not None and sd > plain:
        reason += "; by prediction even two tiers are slower than plain decoding here"
    return f"leave the slim tier out: {reason}"


def guard_line(found: Mapping[str, Any]) -> str:
    """How far the guard's start values hold on the reporting half."""
    auc = "-" if found["auc"] is None else f"{found['auc']:.2f}"
    fate = "" if found["stored"] else "; that is beyond its budget, so they are left out and it learns from nothing"
    return (
        f"guard: start values on {found['n']} tokens not fitted on: calibration error {found['ece']:.3f}, log-loss "
        f"{found['log_loss']:.3f}, AUC {auc}; of {found['passed']} that would skip the full verifier it would have said "
        f"{found['passed_disagreed']} otherwise{fate}"
    )


def importance_line(importance: Sequence[float | None], *, sublayers: bool = False) -> str | None:
    """The layers that are dearest and cheapest to skip."""
    known = sorted(((v, _unit(i, sublayers)) for i, v in enumerate(importance) if v is not None), reverse=True)
    if not known:
        return None
    n = min(_NAMED_LAYERS, len(known) // 2 or 1)
    dearest = ", ".join(f"{i} ({v:+.3f})" for v, i in known[:n])
    cheapest = ", ".join(f"{i} ({v:+.3f})" for v, i in reversed(known[-n:]))
    return f"layers (mean cost where skipped minus where kept): dearest {dearest}; cheapest {cheapest}"


def _unit(index: int, sublayers: bool) -> str:
    return f"{index // 2} {'MLP' if index % 2 else 'attention'}" if sublayers else str(index)


def compare_lines(one: LayerMask, other: LayerMask, *, unicode: bool = True) -> list[str]:
    """Two masks side by side."""
    lines = [mask_strip(m.keep, m.name, partial=dict(m.partial), unicode=unicode) for m in (one, other)]
    skipped = [set(range(len(m.keep))) - set(m.route.layers) for m in (one, other)]
    both = skipped[0] & skipped[1]
    lines.append(
        f"skipped by both: {_numbers(both)} ({len(both)}); only by the first: {_numbers(skipped[0] - skipped[1])}; "
        f"only by the second: {_numbers(skipped[1] - skipped[0])}"
    )
    lines.append(f"{'':{_WIDTH}}{'first':>12}{'second':>12}")
    rows = [(name, one.details.get(name), other.details.get(name)) for name in ("cost", "kl", "tv", "agreement")]
    rows += [
        (f"{name} ({half} half)", _inner(one, half, name), _inner(other, half, name))
        for half in ("search", "report")
        for name in ("cost", "agreement")
    ]
    rows.append(("Delta", _inner(one, "tier", "delta"), _inner(other, "tier", "delta")))
    lines += [f"{name:{_WIDTH}}{_number(a):>12}{_number(b):>12}" for name, a, b in rows if (a, b) != (None, None)]
    texts = [m.details.get("calibration") for m in (one, other)]
    if texts[0] != texts[1]:
        lines.append("the two were scored on different text, so their figures can't be compared one to one")
    return lines


def _inner(mask: LayerMask, part: str, name: str) -> Any:
    inner = mask.details.get(part)
    return inner.get(name) if isinstance(inner, Mapping) else None


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else "-"


def _numbers(layers: set[int]) -> str:
    return " ".join(map(str, sorted(layers))) or "none"


def _table(details: Mapping[str, Any]) -> list[str]:
    """Best, even-spaced and random masks on both halves."""
    controls = details.get("controls") or {}
    n = controls.get("random_masks", 0)
    rows = [("best found", details)]
    rows += [("even-spaced", controls["even"])] if controls.get("even") else []
    rows += [(f"best of {n} random", controls["random_best"])] if controls.get("random_best") else []
    rows += [(f"median of {n} random", controls["random_median"])] if controls.get("random_median") else []
    titles = ["cost", "KL", "agree"] + (["ms/token"] if SECONDS in details else [])
    width = 10 * len(titles)
    lines = [
        f"{'':{_WIDTH}}{'searching half':^{width}}{'reporting half':^{width}}",
        f"{'':{_WIDTH}}" + _cells(titles) * 2,
    ]
    for name, halves in rows:
        cells = [_figures(halves.get(half), timed=SECONDS in details) for half in ("search", "report")]
        lines.append(f"{name:{_WIDTH}}{cells[0]}{cells[1]}".rstrip())
    return lines


def _figures(figures: Mapping[str, Any] | None, *, timed: bool) -> str:
    known = figures or {}
    values = [_number(known.get(n)) for n in ("cost", "kl", "agreement")]
    return _cells([*values, _milli(known.get(SECONDS))] if timed else values)


def _cells(values: Sequence[str]) -> str:
    return "".join(f"{v:>10}" for v in values)
