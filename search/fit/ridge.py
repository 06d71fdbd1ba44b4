"""Ridge regression from sums: an affine map fitted in closed form, whole or of low rank."""

from __future__ import annotations

import torch
from torch import Tensor

from viasd.errors import FitError

#: Penalty on the map, as a share of each feature's own variance: the same whatever scale a feature has.
RIDGE = 1e-2
# Least reciprocal condition (by 1-norm, of the scaled system) that fp64 can be trusted with.
_LEAST_CONDITION = 1e-12


class Moments:
    """Sums over rows x ``[d]`` and what they should become, y ``[d]``; kept in fp64.

    Attributes:
        rows: Rows added so far.
    """

    def __init__(self, width: int, device: torch.device | str = "cpu") -> None:
        self.rows = 0
        self._x = torch.zeros(width, dtype=torch.float64, device=device)
        self._step = torch.zeros_like(self._x)
        self._xx = torch.zeros(width, width, dtype=torch.float64, device=device)
        self._xstep = torch.zeros_like(self._xx)
        self._origin: Tensor | None = None

    def add(self, x: Tensor, y: Tensor) -> None:
        """Adds rows ``[n, d]`` and ``[n, d]``, of any float dtype."""
        if not len(x):
            return
        wide, step = x.double(), y.double() - x.double()
        # Around a first guess of the mean, so that a large constant feature does not eat the digits of its variance.
        if self._origin is None:
            self._origin = wide.mean(dim=0)
        wide = wide - self._origin
        self.rows += len(x)
        self._x += wide.sum(dim=0)
        self._step += step.sum(dim=0)
        self._xx += wide.T @ wide
        self._xstep += wide.T @ step

    def solve(self, ridge: float, rank: int | None = None) -> tuple[Tensor, Tensor]:
        """The map ``y ~ x + x A + b`` with least ``sum |y - x - x A - b|^2 + n ridge sum_j var_j |A_j|^2``.

        Nothing to do is A = 0: a large penalty leaves only the shift b, which is not penalised. With a rank, the product of
        two thin matrices that is nearest to that map in what it predicts (reduced-rank regression, Izenman 1975, with the
        penalty counted as further rows).

        Args:
            ridge: At least 0.
            rank: Largest rank of A, at least 1; None leaves it whole.

        Returns:
            A ``[d, d]`` and b ``[d]`` in fp64.

        Raises:
            FitError: If there are no rows, they hold NaN or infinity, or the system is singular.
        """
        if not self.rows or self._origin is None:
            raise FitError("an affine map needs at least one row to be fitted on, but got none")
        n = self.rows
        mean, mean_step = self._x / n, self._step / n
        covariance = self._xx / n - mean[:, None] * mean
        cross = self._xstep / n - mean[:, None] * mean_step
        if not (torch.isfinite(covariance).all() and torch.isfinite(cross).all()):
            raise FitError(
                "the hidden states to fit on hold NaN or infinity; run the target in float32 or bfloat16, and check it"
            )
        spread = covariance.diagonal().clamp_min(0).sqrt()
        # A feature that never varies can't say anything: any penalty keeps its row at 0.
        spread = torch.where(spread > 1e-9 * spread.max().clamp_min(1e-300), spread, torch.inf)
        system = covariance / spread[:, None] / spread
        system.diagonal()[spread.isinf()] = 1.0
        system.diagonal().add_(ridge)
        factor, failed = torch.linalg.cholesky_ex(system)
        inverse = torch.cholesky_inverse(factor)
        condition = 1 / (torch.linalg.matrix_norm(system, 1) * torch.linalg.matrix_norm(inverse, 1))
        if failed or not condition > _LEAST_CONDITION:
            raise FitError(
                f"the hidden states of {n} tokens don't determine an affine map of width {len(mean)} (the system is "
                f"singular); give more text or raise the ridge, which is {ridge:g}"
            )
        scaled = torch.cholesky_solve(cross / spread[:, None], factor)
        if rank is not None and rank < len(mean):
            # In the metric of the system, A's largest right directions are those of A^T S A.
            directions = torch.linalg.eigh(scaled.T @ (system @ scaled)).eigenvectors[:, -rank:]
            scaled = scaled @ directions @ directions.T
        weight = scaled / spread[:, None]
        return weight, mean_step - (mean + self._origin) @ weight
