"""What a search minimises: the cost R alone, predicted seconds per token, or cost and slim pass together."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from viasd.mask import LayerMask
from viasd.pair import Pair
from viasd.routes import ATTENTION, Route
from viasd.runtime.config import DecodingConfig
from viasd.runtime.gates import Thresholds
from viasd.runtime.tiers import time_passes
from viasd.search.config import COST, PARETO, TIME
from viasd.search.drafting import TeacherForced
from viasd.search.scorer import Score, Scorer
from viasd.search.walk import Heard, PassTimes, walk

SECONDS = "seconds_per_token"
SLIM = "slim_share"
_BASIC = ("cost", "kl", "tv", "agreement")
#: What each objective minimises, in the order of a trial's values.
VALUES = {COST: ("cost",), TIME: (SECONDS,), PARETO: ("cost", SLIM)}

Figures = dict[str, float]
Report = Callable[[int, float], None]


@dataclass(frozen=True)
class Evaluation:
    """One mask on one text.

    Attributes:
        figures: Means by name: ``cost``, ``kl``, ``tv``, ``agreement``; with pass times also predicted `SECONDS` per token
            and `SLIM`, a slim pass over a block as a share of a full one.
        score: The score they are from.
    """

    figures: Figures
    score: Score


def rank(figures: Figures, objective: str) -> tuple[float, float]:
    """Order of masks when one has to be chosen: by cost, ties by KL; by predicted time, ties by cost."""
    return (figures["cost"], figures["kl"]) if objective == COST else (figures[SECONDS], figures["cost"])


def sound(figures: Figures) -> bool:
    """Whether all figures are numbers: half precision may overflow where some layer is missing."""
    return all(map(math.isfinite, figures.values()))


class Objective:
    """Turns scores into the values of a trial, on the text of one scorer.

    Args:
        name: ``cost``, ``time`` or ``pareto``.
        pair: The pair.
        scorer: Scores masks on the text.
        gamma: Drafted tokens a block.
        times: What passes cost; None where only the cost R counts.
    """

    def __init__(self, name: str, pair: Pair, scorer: Scorer, gamma: int, times: PassTimes | None) -> None:
        self.name = name
        self.scorer = scorer
        self._gamma = gamma
        self._times = times
        self._drafter = None if times is None else TeacherForced(pair, scorer)
        self._full = scorer.best.tolist()

    def evaluate(self, route: Route, report: Report = lambda group, value: None) -> Evaluation:
        """Scores one route.

        Args:
            route: Layers of the slim verifier.
            report: Receives a group's number and the objective's first value on the text so far; may raise to stop early.
        """
        drafted = None if self._drafter is None else self._drafter.tokens(route)
        said = [] if drafted is None else drafted.tolist()

        def partial(group: int, score: Score) -> None:
            report(group, self.values(self._figures(route, score, said))[0])

        score = self.scorer.score(route, partial, drafted)
        return Evaluation(self._figures(route, score, said), score)

    def values(self, figures: Figures) -> list[float]:
        """Values of a trial, all to be minimised."""
        return [figures[name] for name in VALUES[self.name]]

    def two_tiers(self, route: Route) -> Figures:
        """Predicted seconds per token without this route's slim verifier: ``plain``, and ``sd`` with the drafter alone."""
        assert self._times is not None
        assert self._drafter is not None
        said = self._drafter.tokens(route).tolist()
        heard = Heard(said, [0.0] * len(said), said, self._full, [t.length for t in self.scorer.texts])
        return {"plain": self._times.plain, "sd": self._times.two_tiers(walk(heard, self._gamma, None))}

    def _figures(self, route: Route, score: Score, said: list[int]) -> Figures:
        figures = {name: float(getattr(score, name)) for name in _BASIC}
        if self._times is None:
            return figures
        lengths: list[int] = []
        for text in self.scorer.texts:  # of the groups scored so far
            if sum(lengths) == score.tokens:
                break
            lengths.append(text.length)
        assert score.ratio is not None
        heard = Heard(said, score.ratio.tolist(), score.best.tolist(), self._full, lengths)
        seconds = self._times.cascade(walk(heard, self._gamma, Thresholds()), route)
        return {**figures, SECONDS: seconds, SLIM: self._times.slim(route) / self._times.full}


def measure_passes(pair: Pair, context: int, gamma: int) -> PassTimes:
    """Measures what every pass costs on this machine: of all routes at once, since layers of a kind cost the same.

    Args:
        pair: The pair.
        context: Tokens before the passes.
        gamma: Drafted tokens a block.
    """
    n, config = pair.target.n_layers, DecodingConfig(gamma=gamma)
    inner = range(1, n - 1)
    usual = time_passes(pair, LayerMask.even(n, 0.45).route, context, config)
    ends = Route(tuple(i not in inner for i in range(n)))
    two = time_passes(pair, ends, context, config)["slim"]
    # Differences of measured times, on a machine that may be busy with something else: none is below nothing.
    layer = max(0.0, usual["full"] - two) / len(inner)
    attention = layer / 2
    if pair.target.runs_parts:
        halves = Route(ends.keep, tuple((i, ATTENTION) for i in inner))
        attention = (time_passes(pair, halves, context, config)["slim"] - two) / len(inner)
        attention = min(max(0.0, attention), layer)
    token = max(0.0, usual["full"] - usual["plain"]) / gamma
    return PassTimes(
        usual["plain"], usual["full"], usual["drafter"], layer, attention, max(0.0, two - 2 * layer), token
    )
