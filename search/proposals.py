"""Which mask to try next: even-spaced, random, Bayesian, or one step away from the best; never the same one twice.

Paper (arXiv 2606.12243, DIMR): step o is a Bayesian proposal where o is a multiple of theta, otherwise a random mask. Ours:
o = 0 is the even-spaced mask, and of the other steps a share refines the best mask so far by one swap. In a range of skip
ratios every mask has its own number of skipped units: one more dimension of the Bayesian model, drawn first for a random
mask, and one step from a good mask may also skip one unit more or fewer.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from viasd.errors import OptionError
from viasd.routes import ATTENTION, MLP, Route

Mask = tuple[int, ...]  # one entry a layer, or two (attention, MLP) where halves are searched: 1 keeps, 0 skips

MASK_ATTR = "mask"
FIGURES = "figures"
_SKIPPED = "skipped"
_NEAR = 0.5  # share of refinements that move a gap
_GAPPED = 0.7  # share of the random masks that are drawn with few gaps

_Step = tuple[int | None, int | None]  # a skipped unit that is kept, a kept one that is skipped


@dataclass(frozen=True)
class SearchSpace:
    """The masks that are searched: of one size or a range of sizes, first and last layer and a prefix always kept.

    Attributes:
        n_layers: Layers of the target.
        n_skip: Units every mask skips (layers, or halves of layers), or the fewest where `most` is given.
        keep_prefix: Layers kept at the beginning, at least 1.
        theta: Every theta-th proposal is Bayesian.
        refine: Share of the other proposals that are one swap away from the best mask so far.
        seed: Seed of every random choice.
        sublayers: Whether attention and MLP of a layer are units of their own.
        most: The most units a mask skips, in a range of sizes; None for masks of one size.

    Raises:
        OptionError: If so many layers can't be skipped, or a value is out of range.
    """

    n_layers: int
    n_skip: int
    keep_prefix: int = 1
    theta: int = 10
    refine: float = 0.8
    seed: int = 0
    sublayers: bool = False
    most: int | None = None

    def __post_init__(self) -> None:
        if self.keep_prefix < 1:
            raise OptionError(
                f"keep-prefix must be at least 1 (the first layer is always kept), but got {self.keep_prefix}"
            )
        if self.theta < 1:
            raise OptionError(f"theta must be at least 1, but got {self.theta}")
        if not 0 <= self.refine <= 1:
            raise OptionError(f"refine must be between 0 and 1, but got {self.refine:g}")
        for n in (self.n_skip, self.sizes[-1] if self.sizes else self.n_skip):
            if not 1 <= n <= len(self.units):
                what = "half layers" if self.sublayers else "layers"
                raise OptionError(
                    f"a mask that skips {n} of {self.n_units} {what} is not possible: the last and the first "
                    f"{self.keep_prefix} are kept, so 1 to {len(self.units)} can be skipped"
                )
        if not self.sizes:
            raise OptionError(f"the range of sizes is empty: {self.n_skip} to {self.most} skipped units")

    @property
    def units(self) -> range:
        """Units that may be skipped: layers, or halves (``2 l`` attention, ``2 l + 1`` MLP)."""
        scale = 2 if self.sublayers else 1
        return range(scale * self.keep_prefix, scale * (self.n_layers - 1))

    @property
    def sizes(self) -> range:
        """How many units a mask may skip."""
        return range(self.n_skip, (self.n_skip if self.most is None else self.most) + 1)

    @property
    def n_units(self) -> int:
        """Length of a mask."""
        return self.n_layers * (2 if self.sublayers else 1)

    def route(self, mask: Mask) -> Route:
        """The route that a mask describes."""
        if not self.sublayers:
            return Route.of(mask)
        halves = list(zip(mask[::2], mask[1::2], strict=True))
        partial = tuple((i, ATTENTION if a else MLP) for i, (a, m) in enumerate(halves) if a != m)
        return Route(tuple(bool(a and m) for a, m in halves), partial)

    @property
    def size(self) -> int:
        """Number of different masks."""
        return sum(math.comb(len(self.units), n) for n in self.sizes)

    def even(self, n_skip: int | None = None) -> Mask:
        """Skips spread evenly over the layers; of half layers whole ones, and one attention where the number is odd.

        Args:
            n_skip: How many; None for the middle of the sizes.
        """
        n = self.sizes[len(self.sizes) // 2] if n_skip is None else n_skip
        if not self.sublayers:
            return self.mask_of(_spread(self.units, n))
        layers = _spread(range(self.keep_prefix, self.n_layers - 1), n // 2)
        skipped = {2 * layer + half for layer in layers for half in (0, 1)}
        if n % 2:
            skipped.add(next(u for u in self.units if u not in skipped))
        return self.mask_of(skipped)

    def mask_of(self, skipped: set[int]) -> Mask:
        """The mask that skips exactly these units."""
        return tuple(int(i not in skipped) for i in range(self.n_units))

    def neighbours(self, mask: Mask, rng: random.Random) -> Iterator[Mask]:
        """All masks one step away, in random order: one unit swapped, or one more or fewer skipped where sizes allow.

        Kinds of steps take turns at random, or the few masks of other sizes would hardly ever be tried. Steps that move,
        widen or narrow a gap are preferred to those that open a new one or cut one in two: a gap of several layers does
        less harm than as many single ones (measured on SmolLM2 at 13 of 30 layers with 0.7 of the refinements of this
        kind: the best of 150 masks cost 8 and 26 % less, two seeds). Half of them, or scattered redundancy is missed.
        """
        kept = [u for u in self.units if mask[u]]
        skipped = {u for u in self.units if not mask[u]}
        swaps: list[_Step] = [(s, k) for s in sorted(skipped) for k in kept]
        fewer: list[_Step] = [(s, None) for s in sorted(skipped)] if len(skipped) - 1 in self.sizes else []
        more: list[_Step] = [(None, k) for k in kept] if len(skipped) + 1 in self.sizes else []
        kinds: list[tuple[list[_Step], list[_Step]]] = []
        for steps in (swaps, fewer, more):
            rng.shuffle(steps)
            near = [step for step in steps if _moves_a_gap(mask, *step)]
            kinds.append((near, [step for step in steps if not _moves_a_gap(mask, *step)]))
        while any(near or far for near, far in kinds):
            near, far = rng.choice([kind for kind in kinds if kind[0] or kind[1]])
            keep, skip = (near if near and (not far or rng.random() < _NEAR) else far).pop()
            changed = skipped - {keep}
            yield self.mask_of(changed if skip is None else changed | {skip})

    def random_masks(self, stream: str, gaps: float = 0.0) -> Iterator[Mask]:
        """All different masks but the even-spaced one, in an order that depends on the arguments and the seed alone.

        Args:
            stream: Name of the order.
            gaps: Share of masks that are drawn with few gaps; the others are drawn evenly from all masks.
        """
        rng = random.Random(f"{self.seed}:{stream}")
        seen = {self.even()}
        while len(seen) < self.size:
            n = self.sizes[0] if len(self.sizes) == 1 else rng.choice(self.sizes)
            mask = self._gapped(n, rng) if rng.random() < gaps else self.mask_of(set(rng.sample(self.units, n)))
            if mask not in seen:
                seen.add(mask)
                yield mask

    def _gapped(self, n_skip: int, rng: random.Random) -> Mask:
        """A random mask with few gaps: their number drawn first, then their lengths and those of what lies between."""
        n_keep = len(self.units) - n_skip
        n_gaps = rng.randint(1, min(n_skip, n_keep + 1, max(1, n_skip // 2)))
        gaps = [1 + more for more in _composition(n_skip - n_gaps, n_gaps, rng)]
        between = [more + (0 < i < n_gaps) for i, more in enumerate(_composition(n_keep - n_gaps + 1, n_gaps + 1, rng))]
        skipped: set[int] = set()
        at = self.units[0]
        for before, gap in zip(between, gaps, strict=False):
            skipped.update(range(at + before, at + before + gap))
            at += before + gap
        return self.mask_of(skipped)

    def kind(self, step: int) -> str:
        """What step o proposes: ``even``, ``bayes``, ``refine`` or ``random``."""
        if step == 0:
            return "even"
        if step % self.theta == 0:
            return "bayes"
        if step < self.theta:
            return "random"  # nothing worth refining yet
        # An exact share in every stretch, whatever the number of trials.
        return "refine" if int((step + 1) * self.refine) > int(step * self.refine) else "random"


def _composition(total: int, parts: int, rng: random.Random) -> list[int]:
    """A number as a sum of `parts` numbers of at least 0, every way equally likely."""
    bars = sorted(rng.sample(range(total + parts - 1), parts - 1))
    return [b - a - 1 for a, b in pairwise([-1, *bars, total + parts - 1])]


def _moves_a_gap(mask: Mask, keep: int | None, skip: int | None) -> bool:
    """Whether keeping one skipped unit and skipping one kept unit leaves no gap cut in two and opens none."""
    cuts = keep is not None and not mask[keep - 1] and not mask[keep + 1]
    opens = skip is not None and all(mask[u] or u == keep for u in (skip - 1, skip + 1))
    return not cuts and not opens


def _spread(units: range, n: int) -> set[int]:
    return {units[int((i + 0.5) * len(units) / n)] for i in range(n)}


class DimrSampler(BaseSampler):
    """Optuna sampler of masks. Set `step` before every proposal.

    A mask is a point of ``[0, 1]^units``: the units with the largest values are skipped, so every point is a mask of the
    right size and Optuna's own TPE can model the points. TPE sees each evaluated mask as its canonical point (0.75 skipped,
    0.25 kept), in a study in memory; the shared study holds the mask alone.

    Args:
        space: The masks.
        trials: Number of steps of the whole search; their random masks are reserved for them, so that no other
            proposal takes one.
        objectives: Values of a trial, all minimised; with more than one, refinement starts from any mask of the front.
    """

    def __init__(self, space: SearchSpace, trials: int, objectives: int = 1) -> None:
        self.space = space
        self.objectives = objectives
        self.step = 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            # No constant liar: it would write to a trial that does not exist yet, and no mask is tried twice anyway.
            self._tpe = TPESampler(multivariate=True, seed=space.seed, n_startup_trials=1, constant_liar=False)
        self._points: optuna.Study | None = None
        self._seen: set[int] = set()  # numbers of the trials in it
        self._random = list(islice(space.random_masks("search", _GAPPED), trials))
        self._reserved = {self._random[o] for o in range(len(self._random)) if space.kind(o) == "random"}

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """See `dimensions`."""
        return self.dimensions()

    def dimensions(self) -> dict[str, BaseDistribution]:
        """One dimension per unit, and the number of skipped ones where it is free; all sampled together."""
        found: dict[str, BaseDistribution] = {name_of(unit): FloatDistribution(0.0, 1.0) for unit in self.space.units}
        if len(self.space.sizes) > 1:
            found[_SKIPPED] = IntDistribution(self.space.sizes[0], self.space.sizes[-1])
        return found

    def propose(self, study: optuna.Study) -> Mask:
        """The mask for `step`."""
        fresh = optuna.trial.create_trial(state=TrialState.RUNNING)
        return self.mask(self.sample_relative(study, fresh, self.dimensions()))

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The canonical point of the mask for `step`."""
        trials = study.get_trials(deepcopy=False)
        known = {m for m in (mask_in(t) for t in trials if t.state != TrialState.FAIL) if m is not None}
        return self.point(self._propose(study, trial, search_space, trials, known))

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Never needed: all dimensions are sampled together."""
        raise OptionError(f"unexpected search dimension '{param_name}'; the study belongs to another search")

    def point(self, mask: Mask) -> dict[str, float | int]:
        """The canonical point of a mask."""
        point = {name_of(unit): 0.25 if mask[unit] else 0.75 for unit in self.space.units}
        return point if len(self.space.sizes) == 1 else {**point, _SKIPPED: mask.count(0)}

    def mask(self, params: Mapping[str, float]) -> Mask:
        """The mask of a point: the units with the largest values are skipped (ties go to the earlier layer)."""
        order = sorted(self.space.units, key=lambda unit: (-params[name_of(unit)], unit))
        return self.space.mask_of(set(order[: int(params.get(_SKIPPED, self.space.n_skip))]))

    def _propose(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        dimensions: dict[str, BaseDistribution],
        trials: Sequence[FrozenTrial],
        known: set[Mask],
    ) -> Mask:
        kind = self.space.kind(self.step)
        rng = random.Random(f"{self.space.seed}:step:{self.step}:{len(known)}")
        if kind == "even" and self.space.even() not in known:
            return self.space.even()
        if kind == "random" and self.step < len(self._random) and self._random[self.step] not in known:
            return self._random[self.step]
        done = [t for t in trials if t.state == TrialState.COMPLETE]
        if not done:
            return self._unseen(self.space.even(), known, rng)
        if kind == "refine":
            start = mask_in(rng.choice(front_of(done)))
            return self._unseen(start or self.space.even(), known, rng)
        # Optuna orders pruned trials by one value.
        modelled = done_or_pruned(trials) if self.objectives == 1 else done
        point = self._tpe.sample_relative(self._modelled(modelled), trial, dimensions)
        proposal = self.mask(point or self.point(self.space.even()))
        return proposal if self._free(proposal, known) else self._unseen(proposal, known, rng)

    def _modelled(self, trials: Sequence[FrozenTrial]) -> optuna.Study:
        """A study in memory that holds every evaluated mask as a point."""
        if self._points is None:
            self._points = optuna.create_study(directions=["minimize"] * self.objectives)
        for trial in sorted(trials, key=lambda t: t.number):
            mask = mask_in(trial)
            if mask is None or trial.number in self._seen:
                continue
            self._seen.add(trial.number)
            self._points.add_trial(
                optuna.trial.create_trial(
                    state=trial.state,
                    values=trial.values,
                    params=self.point(mask),
                    distributions=self.dimensions(),
                    intermediate_values=trial.intermediate_values,
                )
            )
        return self._points

    def _free(self, mask: Mask, known: set[Mask]) -> bool:
        return mask not in known and mask not in self._reserved and mask != self.space.even()

    def _unseen(self, start: Mask, known: set[Mask], rng: random.Random) -> Mask:
        """A free mask one step from `start`; where all of those are taken, any."""
        step = next((m for m in self.space.neighbours(start, rng) if self._free(m, known)), None)
        if step is not None:
            return step

        # The neighbourhood is used up (a small space): any mask that is left, reserved ones only where nothing else is.
        # Lazily: of a large space nobody can list every mask.
        def every() -> Iterator[Mask]:
            yield start
            yield from self.space.random_masks("fallback")

        free = next((m for m in every() if self._free(m, known)), None)
        left = free or next((m for m in chain([self.space.even()], every()) if m not in known), None)
        if left is None:
            raise OptionError(f"all {self.space.size} masks of this size have been tried; ask for fewer trials")
        return left


def done_or_pruned(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """The trials whose mask has been evaluated."""
    return [t for t in trials if t.state in (TrialState.COMPLETE, TrialState.PRUNED)]


def front_of(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """The completed trials that no other one is at least as good as in every value (of equal ones that of less KL).

    With one value a trial that is the best one alone.
    """
    front: list[FrozenTrial] = []
    # Whatever is as good or better comes earlier; of equal cost (R is 0 where laws are merely close) the one of less KL.
    for trial in sorted(trials, key=lambda t: (t.values, t.user_attrs.get(FIGURES, {}).get("kl", 0.0), t.number)):
        if not any(all(a <= b for a, b in zip(other.values, trial.values, strict=True)) for other in front):
            front.append(trial)
    return front


def name_of(unit: int) -> str:
    """Name of a unit's dimension in the study."""
    return f"unit_{unit:03d}"


def mask_in(trial: FrozenTrial) -> Mask | None:
    """The mask a trial evaluated (or is evaluating), or None before it has said."""
    text = trial.user_attrs.get(MASK_ATTR)
    return None if text is None else tuple(int(c) for c in text)


def mask_text(mask: Mask) -> str:
    """A mask as a string of 0 and 1."""
    return "".join(map(str, mask))
