"""Stitches within a search: of its best masks, the one that is best with stitches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from viasd.errors import FitError, OptionError
from viasd.identity import ModelIdentity
from viasd.pair import Pair
from viasd.search.calibration import Passage
from viasd.search.config import SearchConfig
from viasd.search.fit.corpus import load_corpus
from viasd.search.fit.ridge import RIDGE
from viasd.search.fit.stitching import TOKENS, passages_of
from viasd.search.fit.sweep import fit_stitches
from viasd.search.objective import Figures, Objective, rank, sound
from viasd.search.proposals import Mask, SearchSpace, mask_text
from viasd.stitches import Stitches

#: How many of the best masks are stitched.
CANDIDATES = 4
OWN = "calibration"  # the searching half itself


@dataclass(frozen=True)
class Choice:
    """The mask that is best with stitches.

    Attributes:
        mask: The mask.
        stitches: Its stitches.
        figures: With them, on the searching half.
        tried: Every candidate in words of a mask file: flags, its figures without and with stitches.
    """

    mask: Mask
    stitches: Stitches
    figures: Figures
    tried: tuple[dict[str, Any], ...]


def stitching_text(pair: Pair, source: str, search: Sequence[Passage]) -> tuple[str, list[Passage]]:
    """Name and passages of the text to fit on: a corpus, or the searching half (`OWN`).

    Raises:
        FitError: If the corpus can't be read or is of another tokenizer, or there is too little text.
    """
    width = pair.target.embed([0]).shape[-1]
    if source == OWN:
        if (tokens := sum(p.scored for p in search)) < width:
            raise FitError(
                f"--stitch fits affine maps of width {width} on the searching half, which has {tokens} tokens; give at "
                f"least {width} by --tau (and a --calibration file, or more --prompts), or a corpus: --stitch FILE"
            )
        return OWN, list(search)
    corpus = load_corpus(source, pair.tokenizer)
    learn, _ = corpus.split()
    return f"corpus {corpus.hash}", passages_of(corpus, learn, TOKENS, pair.target.context_length)


def best_stitched(
    pair: Pair,
    config: SearchConfig,
    space: SearchSpace,
    known: dict[Mask, Figures],
    objective: Objective,
    text: tuple[str, Sequence[Passage]],
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> Choice:
    """Fits stitches to the best masks of a search, and ranks them anew with these on the searching half.

    Args:
        pair: The pair.
        config: The search.
        space: The masks searched.
        known: Figures of every mask evaluated whole, without stitches.
        objective: Of the searching half.
        text: See `stitching_text`.
        tell: Receives (candidates done, candidates).

    Raises:
        OptionError: If no candidate gives figures that are numbers.
        FitError: If the text does not determine the maps.
    """
    name, passages = text
    candidates = sorted(known, key=lambda m: rank(known[m], objective.name))[:CANDIDATES]
    target = ModelIdentity.of(pair.target, pair.target_id)
    tried: list[dict[str, Any]] = []
    best: tuple[Mask, Stitches, Figures] | None = None
    for done, mask in enumerate(candidates):
        tell(done, len(candidates))
        route = space.route(mask)
        maps, _ = fit_stitches(pair.target, route, passages, block=config.gamma + 1)
        details = {
            "corpus": name,
            "tokens": sum(p.scored for p in passages),
            "block": config.gamma + 1,
            "ridge": RIDGE,
            "dtype": pair.dtype,
        }
        stitches = Stitches(maps, target, route.keep, details)
        figures = objective.evaluate(replace(route, stitches=maps)).figures
        if not sound(figures):
            continue
        tried.append({"keep": mask_text(mask), "without": known[mask], "with": figures})
        if best is None or rank(figures, objective.name) < rank(best[2], objective.name):
            best = (mask, stitches, figures)
    tell(len(candidates), len(candidates))
    if best is None:
        raise OptionError("with stitches none of the best masks gives numbers; leave out --stitch")
    return Choice(*best, tuple(tried))
