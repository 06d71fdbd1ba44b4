"""How far q' may be believed: the share of tokens whose argmax may stand for q's, by the disagreement one puts up with.

Tokens are ordered by how sure somebody is of them; a budget of 2 % lets pass the longest beginning of that order in which
at most 2 % are not what q would have said. Two orders are compared: by max q' alone, and by the guard's estimator (the
class, the features and the fit that decoding uses, without a drafter: the slim verifier's own argmax is the token judged),
fitted on one half of the text and tried on the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from viasd.estimator import Array
from viasd.routes import Route
from viasd.rows import Rows
from viasd.runtime.drafters.base import Draft
from viasd.runtime.guard import FEATURES, block_features, new_estimator
from viasd.search import guardfit
from viasd.search.guardfit import Observations
from viasd.search.scorer import Scorer

BUDGETS = (0.01, 0.02, 0.05, 0.1)
_MAX = FEATURES.index("logit_max_slim")


@dataclass(frozen=True)
class TrustCurve:
    """Tokens that may pass, by budget.

    Attributes:
        tokens: Tokens judged.
        agreed: Of these, those that q would have said too.
        budgets: Shares of disagreement put up with.
        by_guard: Tokens that the guard's estimator lets pass within each budget; None where there was too little text to
            fit it on.
        by_max: The same by the largest probability of q' alone.
    """

    tokens: int
    agreed: int
    budgets: tuple[float, ...]
    by_guard: tuple[int, ...] | None
    by_max: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        """For mask files and ``--json``: counts, and the shares they make."""

        def shares(counts: Sequence[int] | None) -> list[float] | None:
            return None if counts is None else [round(n / self.tokens, 4) for n in counts]

        return {
            "tokens": self.tokens,
            "agreed": self.agreed,
            "budgets": list(self.budgets),
            "guard": shares(self.by_guard),
            "max": shares(self.by_max),
        }


def passing(scores: Array, agrees: Array, budget: float) -> int:
    """Length of the longest beginning, by falling score, in which at most `budget` disagree; equal scores stay together.

    Args:
        scores: How sure somebody is of each token ``[n]``.
        agrees: 1 where q would have said the same ``[n]``.
        budget: In ``[0, 1]``.
    """
    order = np.argsort(-scores, kind="stable")
    wrong = np.cumsum(1 - agrees[order])
    lengths = np.arange(1, len(order) + 1)
    ends = np.append(scores[order][1:] != scores[order][:-1], True)
    fine = lengths[ends & (wrong <= budget * lengths)]
    return int(fine[-1]) if len(fine) else 0


def trust_curve(search: Scorer, report: Scorer, route: Route, budgets: Sequence[float] = BUDGETS) -> TrustCurve:
    """The curve of one route.

    Args:
        search: Holds the text that the guard's estimator is fitted on.
        report: Holds the text of the curve.
        route: Layers of the slim path.
        budgets: Shares of disagreement.
    """
    seen, other = alone(search, route), alone(report, route)
    by_guard: tuple[int, ...] | None = None
    if len(seen) >= guardfit.MIN_OBSERVATIONS:
        estimator = guardfit.fit(seen)
        predicted = estimator.predict(other.features, np.minimum(other.positions, len(estimator.intercepts) - 1))
        by_guard = tuple(passing(predicted, other.labels, b) for b in budgets)
    by_max = tuple(passing(other.features[:, _MAX], other.labels, b) for b in budgets)
    return TrustCurve(len(other), int(other.labels.sum()), tuple(budgets), by_guard, by_max)


def alone(scorer: Scorer, route: Route) -> Observations:
    """What a guard sees of the slim verifier where nobody drafts: its own argmax, as a certain proposal of that share."""
    features, positions, labels = [np.zeros((0, len(new_estimator().slopes)))], list[int](), list[float]()
    with torch.inference_mode():
        for block in scorer.blocks(route):
            top = torch.softmax(block.logits, dim=-1).max(dim=-1)
            tokens: list[int] = top.indices.tolist()
            draft = Draft(tokens, Rows.one_hot(tokens), top.values.tolist(), [])
            features.append(block_features(block.logits, draft, tokens))
            positions += range(len(tokens))
            labels += [float(b == t) for b, t in zip(block.best, tokens, strict=True)]
    return Observations(np.concatenate(features), np.array(positions), np.array(labels))


def trust_lines(curves: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A table of curves as they stand in files (`TrustCurve.as_json`), by what each is of."""
    if not curves:
        return []
    one = next(iter(curves.values()))
    titles = "".join(f"{f'{100 * b:g} %':>8}" for b in one["budgets"])
    lines = [f"share of {one['tokens']} tokens to be believed, by disagreement{'':<8}{titles}"]
    width = len(lines[0]) - len(titles)
    for name, curve in curves.items():
        for key, who in (("guard", "guard's estimator"), ("max", "max q' alone")):
            if curve[key] is not None:
                lines.append(f"{f'  {name}, {who}':<{width}}" + "".join(f"{share:>8.3f}" for share in curve[key]))
    return lines
