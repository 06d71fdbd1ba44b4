"""What stitches are worth: a slim verifier without, with, and with fine-tuned ones, on conversations kept back."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import transformers

import viasd
from viasd.errors import FitError
from viasd.layered import LayeredModel
from viasd.mask import LayerMask
from viasd.pair import Pair
from viasd.routes import Route
from viasd.runtime.bench.costs import pass_seconds
from viasd.runtime.readouts import recorded, scored_with
from viasd.search.calibration import Calibration, Passage
from viasd.search.fit.corpus import Corpus
from viasd.search.fit.stitching import StitchConfig, Stitched, halves_of, passages_of
from viasd.search.objective import sound
from viasd.search.scorer import Score, Scorer
from viasd.search.trust import trust_curve
from viasd.search.verdicts import guard_of, tier_of

RAW, CLOSED, TUNED = "raw", "stitched", "tuned"
_LEAST = 64  # scored tokens of a half below which figures say nothing


def exam_of(corpus: Corpus, config: StitchConfig, context: int) -> tuple[list[Passage], list[Passage]]:
    """Conversations kept back, in the half that the guard's estimator is fitted on and the half that figures are of.

    Raises:
        FitError: If there is too little of them.
    """
    _, held = corpus.split()
    halves = halves_of(passages_of(corpus, held, config.exam, context))
    if (least := min(sum(p.scored for p in half) for half in halves)) < _LEAST:
        raise FitError(
            f"expected at least {2 * _LEAST} answer tokens kept back to judge on, but a half of what the corpus keeps has "
            f"{least}; let viasd-fit corpus write more (--conversations)"
        )
    return halves


def judged(
    pair: Pair,
    mask: LayerMask,
    corpus: Corpus,
    halves: tuple[Sequence[Passage], Sequence[Passage]],
    gamma: int,
    made: Stitched,
) -> LayerMask:
    """The stitched mask with everything that its file says.

    Args:
        pair: The pair.
        mask: The mask without stitches.
        corpus: The corpus they were fitted on.
        halves: See `exam_of`.
        gamma: Drafted tokens a block.
        made: The stitches.

    Raises:
        FitError: If the slim path gives anything but numbers.
    """
    readout = scored_with(mask)  # a mask keeps the readout that it was searched with
    search, report = (Scorer(pair.target, half, block=gamma + 1, readout=readout) for half in halves)
    bare = replace(mask, stitches=None)
    masks = {RAW: bare, CLOSED: replace(bare, stitches=made.closed)}
    if made.best is not made.closed:
        masks[TUNED] = replace(bare, stitches=made.best)
    best = replace(list(masks.values())[-1], pair=pair.name, target=made.best.target)
    scores = {name: report.score(one.route) for name, one in masks.items()}
    own = figures_of(scores[list(masks)[-1]])
    if not sound(own):
        raise FitError("the stitched slim path gives NaN or infinity on the text kept back; raise the ridge")
    text = Calibration(f"corpus {corpus.hash}", tuple(halves[0]), tuple(halves[1]))
    details = {
        **own,
        "report": own,
        "search": figures_of(search.score(best.route)),
        "report_tokens": report.tokens,
        "variants": variants(pair, masks, scores, gamma),
        "trust": {name: trust_curve(search, report, one.route).as_json() for name, one in masks.items()},
        "stitched_from": mask.name,
        "alpha": report.alpha,
        "beta": report.beta,
        "gamma": gamma,
        "kv": "shared",
        "dtype": pair.dtype,
        "calibration": {"name": text.name, "hash": text.hash},
        "tier": tier_of(pair, gamma, best, readout),
        **recorded(readout),
        **guard_of(pair, gamma, search, report, best),
        "versions": {
            "viasd": viasd.__version__,
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
        },
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    return replace(best, details=details)


def figures_of(score: Score) -> dict[str, float]:
    """A score in the words of a mask file."""
    return {"cost": score.cost, "kl": score.kl, "tv": score.tv, "agreement": score.agreement}


def variants(
    pair: Pair, masks: Mapping[str, LayerMask], scores: Mapping[str, Score], gamma: int
) -> dict[str, dict[str, float]]:
    """Figures and costs of each kind of slim verifier.

    Returns:
        By name: figures; ``parameters``, numbers that a slim pass reads (readout included) as a share of those of a full
        one; ``seconds``, the median of a slim pass over a block on this machine, and ``full_seconds`` that of a full one.
    """
    seconds = pass_seconds(pair, masks, [gamma])
    full = seconds["full"][gamma + 1]
    return {
        name: {
            **figures_of(scores[name]),
            "accept_mass": scores[name].accept_mass,
            "parameters": parameter_share(pair.target, mask.route),
            "seconds": seconds["slim" if len(masks) == 1 else f"slim/{name}"][gamma + 1],
            "full_seconds": full,
        }
        for name, mask in masks.items()
    }


def parameter_share(model: LayeredModel, route: Route) -> float:
    """Numbers that a slim pass reads, stitches and readout included, as a share of those that a full one reads."""
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in model.layers]
    head = sum(p.numel() for p in model.model.get_output_embeddings().parameters())  # type: ignore[operator]
    own = sum(stitch.parameters for stitch in (route.stitches or {}).values())
    return (sum(sizes[i] for i in route.layers) + head + own) / (sum(sizes) + head)
