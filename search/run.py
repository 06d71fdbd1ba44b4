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
from optuna.trial import FrozenTrial, TrialState

from viasd.errors import OptionError
from viasd.files import cache_folder
from viasd.mask import LayerMask, ModelIdentity
from viasd.pair import Pair
from viasd.search.calibration import Calibration, Passage, file_calibration, self_calibration
from viasd.search.config import COST, PARETO, SearchConfig, name_of_study
from viasd.search.findings import Findings, details_of, scorer_of
from viasd.search.objective import SLIM, VALUES, Figures, Objective, measure_passes, sound
from viasd.search.outcome import SearchOutcome, Timing, importance_of, trace_of, trial_figures
from viasd.search.proposals import DimrSampler, Mask, SearchSpace, front_of, mask_in, mask_text
from viasd.search.stitched import Choice, best_stitched, stitching_text
from viasd.search.storage import open_storage, storage_errors
from viasd.search.study import Progress, Search, agreed, open_study
from viasd.search.walk import PassTimes
from viasd.shipped import resolve_heads

_CONTROL = "control:"


@dataclass(frozen=True)
class Stage:
    """Told while a search runs.

    Attributes:
        name: ``calibration`` (counts tokens), ``search``, ``controls`` or ``stitches`` (count masks), ``report``.
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
    if config.heads is not None:  # before anything is scored: the layers before them are reported at the end
        resolve_heads(config.heads, pair.name).check(pair.target, pair.target_id)
    if config.confident is not None and config.confident.fixed is not None:
        # Whatever a mask skips, the fixed layer must be in the window: least so where it keeps what lies at the end.
        n = space.n_layers
        kept = n - space.sizes[-1] // (2 if space.sublayers else 1)
        config.confident.fixed_depth([0, *range(n - kept + 1, n)], n)
    sampler = DimrSampler(space, config.trials, len(VALUES[config.goal]))
    text = None if config.calibration == "self" else file_calibration(pair, config.calibration, config.tau)
    setup = _setup(pair, config, space, text)
    name = config.study or name_of_study(pair.name, setup)
    url = config.storage or f"journal://{cache_folder() / 'searches' / name}.log"
    with storage_errors(url):
        study = open_study(open_storage(url), name, setup, sampler)
        text = text or _own_text(study, pair, config, tell)
        times = None if config.goal == COST else _pass_times(study, pair, config, text)
    stitching = None if config.stitch is None else stitching_text(pair, config.stitch, text.search)
    scorer = scorer_of(pair, config, text.search)
    objective = Objective(config.goal, pair, scorer, config.gamma, times)
    search = Search(study, sampler, objective, config.trials, lambda p: tell(Stage("search", p.done, p.trials, p)))
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
    wanted = len(masks) - sum(not sound(figures) for figures in controls.values())
    if best is None:
        raise KeyboardInterrupt
    known = {m: trial_figures(t) for t in trials if t.state == TrialState.COMPLETE and (m := mask_in(t)) is not None}
    choice: Choice | None = None
    if stitching is not None and not interrupted:
        try:
            choice = best_stitched(
                pair, config, space, known, objective, stitching, lambda done, of: tell(Stage("stitches", done, of))
            )
        except KeyboardInterrupt:
            interrupted = True
    chosen = best[0] if choice is None else choice.mask
    route = space.route(chosen)
    target = ModelIdentity.of(pair.target, pair.target_id)
    stitches = None if choice is None else choice.stitches
    mask = LayerMask(route.keep, name, pair.name, target, partial=route.partial, stitches=stitches)
    front = _front(trials) if config.goal == PARETO else ()
    controls = {m: figures for m, figures in controls.items() if sound(figures)}
    findings = Findings(space, config.goal, known, chosen, front, controls, wanted)
    tell(Stage("report", 0, 1))
    details = details_of(
        pair, config, text, objective, times, mask, findings, len(trials), choice, interrupted=interrupted
    )
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
        points=tuple((figures[SLIM], figures["cost"]) for figures in known.values() if SLIM in figures),
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
    fewest, most = (round(ratio * units) for ratio in config.ratios)
    return SearchSpace(
        n_layers, fewest, config.keep_prefix, config.theta, config.refine, config.seed, config.sublayers, most
    )


def _setup(pair: Pair, config: SearchConfig, space: SearchSpace, text: Calibration | None) -> dict[str, Any]:
    """Everything that decides which masks are tried and what they cost."""
    # Text of the target's own is made once a study and kept there: two machines may round it differently. So are times.
    own = {"name": "self", "prompts": config.prompts}
    calibration = own if text is None else {"name": text.name, "hash": text.hash}
    # The cost of a mask does not depend on the drafter; its predicted time does.
    small = pair.drafter
    drafter: Any = pair.drafter_kind if small is None else asdict(ModelIdentity.of(small, small.name))
    return {
        **({} if config.goal == COST else {"drafter": drafter}),
        "target": asdict(ModelIdentity.of(pair.target, pair.target_id)),
        "dtype": pair.dtype,
        "layers": space.n_layers,
        "skipped": [space.sizes[0], space.sizes[-1]],
        "objective": config.goal,
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
        **({} if config.confident is None else {"readout": config.confident.as_json()}),
        "calibration": calibration,
    }


def _own_text(study: optuna.Study, pair: Pair, config: SearchConfig, tell: Tell) -> Calibration:
    """The target's own answers: those that the study has, or new ones, which it keeps."""

    def write() -> dict[str, Any]:
        made = self_calibration(pair, config.tau, config.prompts, lambda done, of: tell(Stage("calibration", done, of)))
        halves = {"search": made.search, "report": made.report}
        return {k: [{"tokens": p.tokens, "first": p.first} for p in half] for k, half in halves.items()}

    kept = agreed(study, "calibration", write)
    search, report = (
        tuple(Passage(tuple(p["tokens"]), p["first"]) for p in kept[half]) for half in ("search", "report")
    )
    return Calibration("self", search, report)


def _pass_times(study: optuna.Study, pair: Pair, config: SearchConfig, text: Calibration) -> PassTimes:
    """What passes cost: measured by the study's first worker, and the same for all, or no two would agree on a mask."""
    longest = max(len(p.tokens) for p in text.search)
    return PassTimes.of(agreed(study, "times", lambda: measure_passes(pair, longest, config.gamma).as_json()))


def _front(trials: Sequence[FrozenTrial]) -> tuple[Mask, ...]:
    """Masks of the front, fewest skipped layers first."""
    front = front_of([t for t in trials if t.state == TrialState.COMPLETE])
    return tuple(m for t in sorted(front, key=lambda t: -t.values[1]) if (m := mask_in(t)) is not None)


def _score_controls(search: Search, masks: Sequence[Mask], tell: Tell) -> None:
    """Scores random masks on all of the searching half; what is known is not scored again. The study keeps the figures."""
    order = list(masks)
    # Several workers begin at different ends.
    random.Random(os.getpid()).shuffle(order)
    for mask in order:
        known = _known(search, masks)
        tell(Stage("controls", len(known), len(masks)))
        if mask not in known:
            figures = search.objective.evaluate(search.sampler.space.route(mask)).figures
            search.study.set_user_attr(_CONTROL + mask_text(mask), figures)


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
