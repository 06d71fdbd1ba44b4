"""One search from beginning to end: text, study, controls, the reporting half, and the mask with all that was learnt."""

from __future__ import annotations

import os
import random
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import optuna
from optuna.trial import TrialState

from viasd.errors import OptionError
from viasd.files import cache_folder
from viasd.mask import LayerMask, ModelIdentity
from viasd.pair import Pair
from viasd.search.calibration import Calibration, Passage, file_calibration, self_calibration
from viasd.search.config import SearchConfig, name_of_study
from viasd.search.findings import Findings, details_of, scorer_of
from viasd.search.outcome import Figures, SearchOutcome, Timing, figures_of, importance_of, trace_of, trial_figures
from viasd.search.proposals import DimrSampler, Mask, SearchSpace, mask_in, mask_text
from viasd.search.storage import open_storage, storage_errors
from viasd.search.study import Progress, Search, open_study

_TEXT = "calibration"
_CONTROL = "control:"


@dataclass(frozen=True)
class Stage:
    """Told while a search runs.

    Attributes:
        name: ``calibration`` (counts tokens), ``search`` or ``controls`` (count masks), ``report``.
        done: How many so far.
        of: How many in all.
        progress: In ``search``, what the study says.
    """

    name: str
    done: int
    of: int
    progress: Progress | None = None


Tell = Callable[[Stage], None]


def search_mask(pair: Pair, config: SearchConfig, tell: Tell = lambda stage: None) -> SearchOutcome:
    """Searches for the layers of a pair's target that a slim verifier may skip.

    Args:
        pair: The pair.
        config: What to do.
        tell: Receives a `Stage` now and then.

    Returns:
        The best mask and what was learnt. After Ctrl-C the best so far; everything that was evaluated stays in the study.

    Raises:
        OptionError: If the ratio leaves no layer, the text is too short, or the study is another's or can't be kept.
        KeyboardInterrupt: If Ctrl-C came before the first mask was scored.
    """
    with warnings.catch_warnings():
        # Said once, by the command; not once a chunk.
        warnings.filterwarnings("ignore", message="stage_cost expects")
        return _search_mask(pair, config, tell)


def _search_mask(pair: Pair, config: SearchConfig, tell: Tell) -> SearchOutcome:
    started = time.perf_counter()
    space = _space(pair, config)
    sampler = DimrSampler(space, config.trials)
    text = None if config.calibration == "self" else file_calibration(pair, config.calibration, config.tau)
    setup = _setup(pair, config, space, text)
    name = config.study or name_of_study(pair.name, setup)
    url = config.storage or f"journal://{cache_folder() / 'searches' / name}.log"
    with storage_errors(url):
        study = open_study(open_storage(url), name, setup, sampler)
        text = text or _own_text(study, pair, config, tell)
    scorer = scorer_of(pair, config, text.search)
    search = Search(study, sampler, scorer, config.trials, lambda p: tell(Stage("search", p.done, p.trials, p)))
    masks = list(islice(space.random_masks("controls"), config.n_controls))
    interrupted, layers, groups = False, (0, 0), 0
    with storage_errors(url):
        try:
            search.run()
            layers, groups = (scorer.layers_run, scorer.layers_saved), scorer.groups_run
            _score_controls(search, masks, tell)
        except KeyboardInterrupt:
            interrupted = True
        best = search.best()
        trials = search.finished()
        controls = _known(search, masks)
    if best is None:
        raise KeyboardInterrupt
    known = {m: trial_figures(t) for t in trials if t.state == TrialState.COMPLETE and (m := mask_in(t)) is not None}
    route = space.route(best[0])
    target = ModelIdentity.of(pair.target, pair.target_id)
    mask = LayerMask(route.keep, name, pair.name, target, partial=route.partial)
    findings = Findings(space, best[0], known[best[0]], known.get(space.even()), controls, len(masks))
    tell(Stage("report", 0, 1))
    details = details_of(pair, config, text, scorer, mask, findings, len(trials), interrupted=interrupted)
    timing = Timing(
        seconds=time.perf_counter() - started,
        proposals=search.proposal_seconds,
        scoring=search.scoring_seconds,
        scored=search.scored,
        reused=layers[1] / sum(layers) if sum(layers) else 0.0,
        pruned=1 - groups / (search.scored * scorer.groups) if search.scored and groups else 0.0,
    )
    return SearchOutcome(
        mask=replace(mask, details=details),
        study=name,
        storage=url,
        interrupted=details["interrupted"],
        trials=len(trials),
        wanted=search.trials,
        pruned=sum(t.state == TrialState.PRUNED for t in trials),
        trace=trace_of(trials),
        importance=importance_of(trials, controls, space.n_units),
        timing=timing,
    )


def _space(pair: Pair, config: SearchConfig) -> SearchSpace:
    if config.sublayers and not pair.target.runs_parts:
        raise OptionError(
            f"attention and MLP of {pair.target_id} can't be run separately (its family is not written out); leave out "
            "--sublayers"
        )
    n_layers = pair.target.n_layers
    units = n_layers * (2 if config.sublayers else 1)
    n_skip = round(config.skip * units)
    return SearchSpace(n_layers, n_skip, config.keep_prefix, config.theta, config.refine, config.seed, config.sublayers)


def _setup(pair: Pair, config: SearchConfig, space: SearchSpace, text: Calibration | None) -> dict[str, Any]:
    """Everything that decides which masks are tried and what they cost."""
    # Text of the target's own is made once a study and kept there: two machines may round it differently.
    own = {"name": "self", "prompts": config.prompts}
    calibration = own if text is None else {"name": text.name, "hash": text.hash}
    return {
        "target": asdict(ModelIdentity.of(pair.target, pair.target_id)),
        "dtype": pair.dtype,
        "layers": space.n_layers,
        "n_skip": space.n_skip,
        "sublayers": space.sublayers,
        "keep_prefix": space.keep_prefix,
        "theta": space.theta,
        "refine": space.refine,
        "seed": space.seed,
        "block": config.gamma + 1,
        "alpha": config.alpha,
        "beta": config.beta,
        "tau": config.tau,
        "kv": "private" if config.private_kv else "shared",
        "calibration": calibration,
    }


def _own_text(study: optuna.Study, pair: Pair, config: SearchConfig, tell: Tell) -> Calibration:
    """The target's own answers: those that the study has, or new ones, which it keeps."""
    if _TEXT not in study.user_attrs:
        made = self_calibration(pair, config.tau, config.prompts, lambda done, of: tell(Stage("calibration", done, of)))
        if _TEXT not in study.user_attrs:  # another worker may have been faster
            halves = {"search": made.search, "report": made.report}
            study.set_user_attr(
                _TEXT, {k: [{"tokens": p.tokens, "first": p.first} for p in half] for k, half in halves.items()}
            )
    kept = study.user_attrs[_TEXT]
    search, report = (
        tuple(Passage(tuple(p["tokens"]), p["first"]) for p in kept[half]) for half in ("search", "report")
    )
    return Calibration("self", search, report)


def _score_controls(search: Search, masks: Sequence[Mask], tell: Tell) -> None:
    """Scores random masks on all of the searching half; what is known is not scored again. The study keeps the figures."""
    order = list(masks)
    # Several workers begin at different ends.
    random.Random(os.getpid()).shuffle(order)
    for mask in order:
        known = _known(search, masks)
        tell(Stage("controls", len(known), len(masks)))
        if mask not in known:
            score = search.scorer.score(search.sampler.space.route(mask))
            search.study.set_user_attr(_CONTROL + mask_text(mask), figures_of(score))


def _known(search: Search, masks: Sequence[Mask]) -> dict[Mask, Figures]:
    """Figures of those of the masks that have been scored whole, as controls or in the search itself."""
    attrs = search.study.user_attrs
    tried = {mask_in(t): t for t in search.finished() if t.state == TrialState.COMPLETE}
    known: dict[Mask, Figures] = {}
    for mask in masks:
        if (stored := attrs.get(_CONTROL + mask_text(mask))) is not None:
            known[mask] = dict(stored)
        elif mask in tried:
            known[mask] = trial_figures(tried[mask])
    return known
