"""Online logistic regression with one intercept per draft position: who of the drafted tokens will the verifier keep?

The same class serves Adaptive Verification (one feature, the logit of the drafter's largest probability) and the
guard of `via` mode (about eight features, the label is agreement with the full verifier).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from viasd.errors import OptionError

LOGIT_LIMIT = 40.0
_LABEL_SLACK = 1e-3  # a soft label is a sum over a vocabulary in fp32 and may pass 0 or 1 by its rounding

Array = NDArray[np.float64]


def logit_of_max(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Logit of the largest probability of each row, exact however close to 1 that probability is.

    `f = -log(max(S - 1, 0))` with `S = sum exp(z - max z)`, `z = logits / T`. `S - 1` is summed without the largest
    entry instead of subtracted, so it keeps its digits where `S` itself rounds to 1.

    Args:
        logits: `[..., V]`; fp64 is kept, any other dtype is computed in fp32. `-inf` marks banned tokens.
        temperature: The request's temperature, at least 0; 0 (greedy) reads the row at temperature 1.

    Returns:
        `[...]`, clamped to [-40, 40]; a one-hot row gives 40.
    """
    if temperature < 0:
        raise OptionError(f"temperature must be at least 0, but got {temperature}")
    z = logits if logits.dtype == torch.float64 else logits.float()
    largest, where = z.max(dim=-1, keepdim=True)
    rest = ((z - largest) / (temperature or 1.0)).exp_().scatter_(-1, where, 0.0).sum(dim=-1)
    return -rest.log_().clamp_(-LOGIT_LIMIT, LOGIT_LIMIT)


@dataclass(frozen=True)
class EstimatorConfig:
    """Shape, start values and safety limits of a `LogisticEstimator`. The defaults are those of Adaptive Verification.

    Attributes:
        slopes: Start values, one a feature (F).
        intercept: Start value of every intercept.
        positions: Number of draft positions (K), each with its own intercept.
        ridge: Added to the diagonal of the Newton system, above 0: an unobserved position stays solvable.
        shrink: A step from n observations is scaled by n / (n + shrink); at least 0.
        max_step: Largest change of a coefficient in one refit, and of the mean row's logit by the slopes, above 0.
            Without it one confidently wrong draft moves an intercept by -18 and nothing is admitted ever after.
        slope_cap: Largest |slope|.
        intercept_cap: Largest |intercept|.
        nonnegative_slopes: Refuse any step that would turn a slope negative.
        memory: Observations whose curvature a refit remembers, so that its step answers to new ones as if they were added
            to that many old ones: recursive estimation with forgetting. 0 takes each step by the new ones alone, which
            follows a few hundred of them wherever their noise leads.
    """

    slopes: tuple[float, ...] = (0.5,)
    intercept: float = -0.2
    positions: int = 8
    ridge: float = 1e-3
    shrink: float = 50.0
    max_step: float = 1.0
    slope_cap: float = 4.0
    intercept_cap: float = 8.0
    nonnegative_slopes: bool = True
    memory: float = 0.0

    def __post_init__(self) -> None:
        if not self.slopes or not all(math.isfinite(w) for w in self.slopes) or not math.isfinite(self.intercept):
            raise OptionError(f"start values must be finite, one slope or more, but got {self}")
        if self.nonnegative_slopes and min(self.slopes) < 0:
            raise OptionError(f"nonnegative_slopes needs slopes of 0 or above, but got {self.slopes}")
        if self.positions < 1 or not self.shrink >= 0:
            raise OptionError(f"positions must be >= 1 and shrink >= 0, but got {self.positions}, {self.shrink}")
        if not 0 <= self.memory < math.inf:
            raise OptionError(f"memory must be finite and at least 0, but got {self.memory}")
        if not all(limit > 0 for limit in (self.ridge, self.max_step, self.slope_cap, self.intercept_cap)):
            raise OptionError(f"ridge, max_step and the caps must be above 0, but got {self}")


@dataclass
class _Statistics:
    # Newton system of the observations since the last refit: Hessian blocks a, b, c, gradients g0, g1, weights n.
    a: Array  # [F, F]
    b: Array  # [F, K]
    c: Array  # [K]
    g0: Array  # [F]
    g1: Array  # [K]
    n: Array  # [K]
    count: int = 0  # rows, whatever their weight

    def remembered(self, past: _Statistics, memory: float) -> _Statistics:
        """Curvature and weights of these observations and those before, of which `memory` are kept; no gradients."""
        keep = memory / (memory + self.count)
        a, b, c, n = (
            (past.a + self.a) * keep,
            (past.b + self.b) * keep,
            (past.c + self.c) * keep,
            (past.n + self.n) * keep,
        )
        return _Statistics(a, b, c, np.zeros_like(self.g0), np.zeros_like(self.g1), n)


def _nothing(f: int, k: int) -> _Statistics:
    return _Statistics(np.zeros((f, f)), np.zeros((f, k)), np.zeros(k), np.zeros(f), np.zeros(k), np.zeros(k))


class LogisticEstimator:
    """P(y = 1) = sigmoid(w . f + b_k), learnt online by damped Newton steps on sufficient statistics.

    Attributes:
        config: The frozen configuration.
        slopes: `[F]` float64, the w.
        intercepts: `[K]` float64, the b_k.
    """

    def __init__(self, config: EstimatorConfig | None = None) -> None:
        self.config = config or EstimatorConfig()
        self.slopes: Array = np.array(self.config.slopes, dtype=np.float64)
        self.intercepts: Array = np.full(self.config.positions, self.config.intercept, dtype=np.float64)
        self._statistics = _nothing(len(self.slopes), len(self.intercepts))
        self._past = _nothing(len(self.slopes), len(self.intercepts))
        self._fitted = 0

    @property
    def observations(self) -> int:
        """Rows observed since the start, refitted or not."""
        return self._fitted + self._statistics.count

    @property
    def pending(self) -> int:
        """Rows observed since the last refit."""
        return self._statistics.count

    def predict(self, features: ArrayLike, position: ArrayLike) -> Array:
        """Probability of y = 1 under the current coefficients.

        Args:
            features: `[..., F]`. A NaN feature gives a NaN probability, which fails every `>=` test.
            position: `[...]` integers in 0..K-1.

        Returns `[...]` float64.
        """
        return self._probability(*self._inputs(features, position))

    def observe(self, features: ArrayLike, position: ArrayLike, label: ArrayLike, weight: ArrayLike = 1.0) -> None:
        """Add outcomes to the statistics, linearised at the current coefficients.

        Rows with a feature, label or weight that is not finite, and rows of weight 0, are left out.

        Args:
            features: `[..., F]`.
            position: `[...]` integers in 0..K-1.
            label: `[...]` in [0, 1]; soft labels (such as `sum_v min(p, q)`) are allowed.
            weight: `[...]` or a scalar, at least 0; weight 2 counts like the same row twice.

        Raises:
            ValueError: A label is outside [0, 1], a weight is negative, or a position or shape does not fit.
        """
        f, k = self._inputs(features, position)
        y = np.broadcast_to(np.asarray(label, dtype=np.float64), k.shape)
        u = np.broadcast_to(np.asarray(weight, dtype=np.float64), k.shape)
        usable = np.isfinite(f).all(axis=-1) & np.isfinite(y) & np.isfinite(u) & (u != 0)
        f, k, y, u = f[usable], k[usable], y[usable], u[usable]
        if y.size and (y.min() < -_LABEL_SLACK or y.max() > 1 + _LABEL_SLACK or u.min() < 0):
            raise ValueError("labels must be in [0, 1] and weights at least 0")
        c = self._probability(f, k)
        v = u * c * (1 - c)
        r = u * (np.clip(y, 0, 1) - c)
        s = self._statistics
        s.a += (f * v[:, None]).T @ f
        s.g0 += f.T @ r
        np.add.at(s.b.T, k, f * v[:, None])
        for total, row in ((s.c, v), (s.g1, r), (s.n, u)):
            np.add.at(total, k, row)
        s.count += len(k)

    def refit(self) -> bool:
        """Take one damped Newton step on what was observed since the last refit and forget all but its curvature.

        Solves the arrowhead system `[[A, B], [B^T, diag(C)]] [dw, db] = [g0, g1]` by its Schur complement:
        `dw = (A - B C^-1 B^T)^-1 (g0 - B C^-1 g1)`, `db = (g1 - B^T dw) / C`, the ridge being in A and C. `dw` is
        shrunk and bounded before `db` is derived from it, so that the intercepts answer to the slopes really used. With
        a `memory`, A, B and C include what is remembered of earlier observations; gradients are of the new ones alone,
        since those of the old ones have been followed.

        Returns whether anything had been observed.
        """
        s, config = self._statistics, self.config
        if s.count == 0:
            return False
        a, b, n = self._past.a + s.a, self._past.b + s.b, self._past.n + s.n
        c = self._past.c + s.c + config.ridge
        with np.errstate(all="ignore"):
            schur = a + config.ridge * np.eye(len(self.slopes)) - (b / c) @ b.T
            dw = np.zeros_like(self.slopes)
            with suppress(np.linalg.LinAlgError):
                dw = np.linalg.solve(schur, s.g0 - b @ (s.g1 / c)) * (n.sum() / (n.sum() + config.shrink))
            dw[~np.isfinite(dw) | (config.nonnegative_slopes & (self.slopes + dw < 0))] = 0.0
            # One factor for all slopes: clipping each alone would turn the step away from the Newton direction. Nor may they
            # shift the logit of the mean row further than an intercept may answer, or every refit would make it worse.
            shift = abs(float(b.sum(axis=1) @ dw)) / float(c.sum())
            dw *= min(1.0, config.max_step / max(float(np.abs(dw).max()), shift, 1e-300))
            slopes = np.clip(self.slopes + dw, -config.slope_cap, config.slope_cap)
            db = (s.g1 - b.T @ (slopes - self.slopes)) / c * (n / (n + config.shrink))
            db[~np.isfinite(db)] = 0.0
        intercepts = self.intercepts + np.clip(db, -config.max_step, config.max_step)
        self.slopes, self.intercepts = slopes, np.clip(intercepts, -config.intercept_cap, config.intercept_cap)
        self._fitted += s.count
        self._past = s.remembered(self._past, config.memory) if config.memory else self._past
        self._statistics = _nothing(len(self.slopes), len(self.intercepts))
        return True

    def state(self) -> dict[str, Any]:
        """Configuration, coefficients and count, ready for `json.dumps`; refit first, what is pending is not kept."""
        past = {name: getattr(self._past, name).tolist() for name in ("a", "b", "c", "n")}
        return {
            "config": {**asdict(self.config), "slopes": list(self.config.slopes)},
            "slopes": self.slopes.tolist(),
            "intercepts": self.intercepts.tolist(),
            "observations": self.observations,
            **({"remembered": past} if self.config.memory else {}),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> LogisticEstimator:
        """Rebuild an estimator from `state()`.

        Raises:
            OptionError: A key is missing or unknown, or a value has the wrong shape or is not finite.
        """
        try:
            estimator = cls(EstimatorConfig(**{**state["config"], "slopes": tuple(state["config"]["slopes"])}))
            estimator.slopes = _array_like(estimator.slopes, state["slopes"])
            estimator.intercepts = _array_like(estimator.intercepts, state["intercepts"])
            estimator._fitted = int(state["observations"])
            if estimator.config.memory:
                past, stored = estimator._past, state["remembered"]
                for name in ("a", "b", "c", "n"):
                    setattr(past, name, _array_like(getattr(past, name), stored[name]))
        except (KeyError, TypeError, ValueError) as error:
            raise OptionError(f"estimator state must be what LogisticEstimator.state() gives, but {error!r}") from error
        return estimator

    def copy(self) -> LogisticEstimator:
        """An independent estimator with the same coefficients and pending observations."""
        return copy.deepcopy(self)

    def _probability(self, f: Array, k: NDArray[np.intp]) -> Array:
        with np.errstate(invalid="ignore"):  # a NaN feature is answered by a NaN
            return np.exp(-np.logaddexp(0.0, -(f @ self.slopes + self.intercepts[k])))

    def _inputs(self, features: ArrayLike, position: ArrayLike) -> tuple[Array, NDArray[np.intp]]:
        f = np.asarray(features, dtype=np.float64)
        k = np.broadcast_to(np.asarray(position, dtype=np.intp), f.shape[:-1])
        if f.shape[-1:] != self.slopes.shape:
            raise ValueError(f"features must end in {len(self.slopes)} values, but got shape {f.shape}")
        if k.size and (k.min() < 0 or k.max() >= len(self.intercepts)):
            raise ValueError(f"position must be in 0..{len(self.intercepts) - 1}, but got {k.min()}..{k.max()}")
        return f, k


def _array_like(template: Array, values: Any) -> Array:
    array = np.array(values, dtype=np.float64)
    if array.shape != template.shape or not np.isfinite(array).all():
        raise ValueError(f"expected finite values of shape {template.shape}, got shape {array.shape}")
    return array
