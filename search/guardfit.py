"""The guard's start values: how q' and the drafter look where q agrees, fitted on the searching half of the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from viasd.draws import SeededDraws
from viasd.estimator import Array, LogisticEstimator
from viasd.pair import Pair
from viasd.routes import Route
from viasd.rows import Rows
from viasd.runtime.config import SELF_SKIP
from viasd.runtime.drafters import LookupDrafter
from viasd.runtime.drafters.base import Draft
from viasd.runtime.gates import Decision, RatioGate, Thresholds
from viasd.runtime.guard import GuardConfig, block_features, new_estimator
from viasd.runtime.metrics import Counters
from viasd.sampling import Sampler, SamplingConfig
from viasd.search.drafting import states
from viasd.search.scorer import Block, Scorer

MIN_OBSERVATIONS = 200
_PASSES = 20
_PULL = 5.0  # weight of the prior, in observations' worth of curvature
_BINS = 10


@dataclass(frozen=True)
class Observations:
    """What a guard would have seen on a text.

    Attributes:
        features: ``[n, F]``, see `viasd.runtime.guard.FEATURES`.
        positions: Position in the block ``[n]``.
        labels: 1 where q would have said the same token ``[n]``.
    """

    features: Array
    positions: Array
    labels: Array

    def __len__(self) -> int:
        return len(self.labels)


def observe(pair: Pair, scorer: Scorer, route: Route, gamma: int) -> Observations:
    """Lets the pair's drafter draft along the text (teacher-forced, temperature 0) and the slim path judge it.

    Args:
        pair: The pair.
        scorer: Holds the text and q's rows; its blocks are ``gamma + 1`` long.
        route: Layers of the slim path.
        gamma: Drafted tokens a block.
    """
    gate = RatioGate(Thresholds())
    features, positions, labels = [], [], []
    with torch.inference_mode():
        drafter = _TeacherForced(pair, scorer, route)
        for block in scorer.blocks(route):
            drafts = drafter.of(block)
            where = [i for i in sorted(drafts) if i < gamma]  # the last row of a block is the bonus token's
            if not where:
                continue
            draft = _joined([drafts[i] for i in where])
            slim = block.logits[where]
            decisions = gate.judge(slim, draft)
            best: list[int] = slim.argmax(dim=-1).tolist()
            shown = [b if d is Decision.REWRITE else t for d, t, b in zip(decisions, draft.tokens, best, strict=True)]
            features.append(block_features(slim, draft, shown))
            positions += where
            labels += [float(block.best[i] == t) for i, t in zip(where, shown, strict=True)]
    width = len(new_estimator().slopes)
    return Observations(
        np.concatenate(features) if features else np.zeros((0, width)), np.array(positions), np.array(labels)
    )


def fit(seen: Observations) -> LogisticEstimator:
    """An estimator fitted to observations: logistic regression with a prior, by Newton's method.

    A few hundred tokens can't bear eight free slopes: each (per standard deviation of its feature) is drawn to 0, and every
    position's intercept to a common one. The pull is doubled until all coefficients are within the estimator's own limits.
    """
    estimator = new_estimator()
    config = estimator.config
    mean, spread = seen.features.mean(axis=0), seen.features.std(axis=0)
    spread = np.where(spread > 1e-6, spread, np.inf)  # a feature that never varies gets no slope
    places = np.minimum(seen.positions, config.positions - 1).astype(np.int64)
    design = np.column_stack([(seen.features - mean) / spread, np.eye(config.positions)[places], np.ones(len(seen))])
    width, pull = len(mean), _PULL
    while True:
        solution = _newton(design, seen.labels, pull)
        slopes = solution[:width] / spread
        intercepts = solution[-1] + solution[width:-1] - float(slopes @ mean)
        if np.abs(slopes).max() <= config.slope_cap and np.abs(intercepts).max() <= config.intercept_cap:
            break
        pull *= 2
    return LogisticEstimator.from_state(
        {
            **estimator.state(),
            "slopes": slopes.tolist(),
            "intercepts": intercepts.tolist(),
            "observations": len(seen),
        }
    )


def _newton(design: Array, labels: Array, pull: float) -> Array:
    """Coefficients ``[C]`` that maximise the likelihood minus ``pull / 2`` times their squares, the last one free."""
    weight = np.full(design.shape[1], pull)
    weight[-1] = pull * 1e-3  # only so that it stays finite where all labels are equal
    solution = np.zeros(design.shape[1])

    def loss(at: Array) -> float:
        scores = design @ at
        return float(np.logaddexp(0.0, scores).sum() - labels @ scores + weight @ at**2 / 2)

    for _ in range(_PASSES):
        chance = np.exp(-np.logaddexp(0.0, -(design @ solution)))
        gradient = design.T @ (chance - labels) + weight * solution
        hessian = (design * (chance * (1 - chance))[:, None]).T @ design + np.diag(weight)
        step, size = np.linalg.solve(hessian, gradient), 1.0
        while size > 1e-4 and loss(solution - size * step) > loss(solution):
            size /= 2
        solution = solution - size * step
    return solution


def reliability(estimator: LogisticEstimator, seen: Observations) -> dict[str, Any]:
    """How well an estimator's probabilities hold on other text.

    Returns:
        ``n``; ``agreement`` (share of tokens that q would have said too); ``ece`` (mean distance of predicted from observed
        agreement over ten bins of equal width); ``log_loss`` in nats; ``auc`` (None where all labels are equal);
        ``passed`` and ``passed_disagreed``: tokens that would skip q under the default budget, and those of them that q
        would not have said.
    """
    places = np.minimum(seen.positions, len(estimator.intercepts) - 1).astype(np.int64)
    predicted = estimator.predict(seen.features, places)
    labels = seen.labels
    inside = np.clip(predicted, 1e-9, 1 - 1e-9)
    bins = np.minimum((predicted * _BINS).astype(int), _BINS - 1)
    gaps = [abs(float(predicted[bins == b].sum() - labels[bins == b].sum())) for b in range(_BINS)]
    passes = predicted > 1 - GuardConfig().max_disagreement
    return {
        "n": len(labels),
        "agreement": float(labels.mean()),
        "ece": sum(gaps) / len(labels),
        "log_loss": float(-(labels * np.log(inside) + (1 - labels) * np.log(1 - inside)).mean()),
        "auc": _auc(predicted, labels),
        "passed": int(passes.sum()),
        "passed_disagreed": int((passes & (labels == 0)).sum()),
    }


def _auc(scores: Array, labels: Array) -> float | None:
    """Probability that an agreeing token scores above a disagreeing one, ties counting half."""
    good, bad = scores[labels == 1], np.sort(scores[labels == 0])
    if not len(good) or not len(bad):
        return None
    below, up_to = np.searchsorted(bad, good, "left"), np.searchsorted(bad, good, "right")
    return float((below + up_to).mean() / 2 / len(bad))


class _TeacherForced:
    """The pair's drafter along a text: its token at each row of a block where it has one."""

    def __init__(self, pair: Pair, scorer: Scorer, route: Route) -> None:
        self._drafter = pair.drafter
        self._own = scorer.blocks(route.thinned(SELF_SKIP), own=True) if pair.drafter_kind == "self" else None
        self._tokens: tuple[int, ...] | None = None
        self._lookup = LookupDrafter(Counters())
        self._states: Tensor | None = None

    def of(self, block: Block) -> dict[int, Draft]:
        """Row -> draft of one token. Blocks come in order."""
        if self._own is not None:
            return dict(enumerate(_from_rows(next(self._own).logits)))
        if block.tokens is not self._tokens:
            self._tokens = block.tokens
            self._lookup = LookupDrafter(Counters())
            self._states = None if self._drafter is None else states(self._drafter, block.tokens)
        n = len(block.best)
        if self._drafter is not None and self._states is not None:
            rows = self._drafter.readout(self._states[:, block.start : block.start + n])
            return dict(enumerate(_from_rows(rows)))
        return _looked_up(self._lookup, block, n)


def _from_rows(logits: Tensor) -> list[Draft]:
    top = torch.softmax(logits, dim=-1).max(dim=-1)
    return [
        Draft([token], Rows.one_hot([token]), [share], [row])
        for token, share, row in zip(top.indices.tolist(), top.values.tolist(), logits, strict=True)
    ]


def _looked_up(lookup: LookupDrafter, block: Block, n: int) -> dict[int, Draft]:
    found = {}
    for i in range(n):
        prefix = list(block.tokens[: block.start + i + 1])
        lookup.settle(prefix)
        draft = lookup.propose(prefix, 1, Sampler(SamplingConfig()).ahead(prefix), SeededDraws(0))
        if draft.tokens:
            found[i] = draft
    return found


def _joined(drafts: list[Draft]) -> Draft:
    tokens = [d.tokens[0] for d in drafts]
    return Draft(
        tokens, Rows.one_hot(tokens), [d.confidence[0] for d in drafts], [d.logits[0] for d in drafts if d.logits]
    )
