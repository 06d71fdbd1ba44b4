"""The guard of `via` mode: a token skips the full verifier only if q is predicted to agree with it.

Fixed thresholds on q' give no bound relative to q. The guard adds one that is learnt online: an estimator of
P(q agrees), fed by audits (and by every block that q had to look at anyway), must exceed ``1 - max_disagreement``. Before
it has seen enough it lets nothing pass, and decoding is lossless.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from viasd.errors import MaskError, OptionError
from viasd.estimator import Array, EstimatorConfig, LogisticEstimator, logit_of_max
from viasd.runtime.drafters.base import Draft
from viasd.runtime.gates import Decision, RatioGate, Thresholds

FEATURES = ("log_r", "logit_max_slim", "logit_p", "is_argmax", "entropy_slim", "entropy_p", "kl_p_slim", "rewritten")
# Slopes at the start: only that a token q' likes better, and likes for sure, is likelier to be right.
_START_SLOPES = (0.2, 0.3, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0)
_START_INTERCEPT = 0.0
_POSITIONS = 8
_REFIT_EVERY = 32
_MIN_OBSERVATIONS = 96
_LOG_FLOOR = -10.0
_LOGIT_LIMIT = 10.0


@dataclass(frozen=True)
class GuardConfig:
    """How much disagreement a guard lets pass.

    Attributes:
        max_disagreement: Largest predicted probability, per token, that q would have said something else; in ``[0, 1)``.
        min_observations: Judged tokens before anything may skip the full verifier.
        refit_every: Observations between two refits.
    """

    max_disagreement: float = 0.02
    min_observations: int = _MIN_OBSERVATIONS
    refit_every: int = _REFIT_EVERY

    def __post_init__(self) -> None:
        if not 0 <= self.max_disagreement < 1:
            raise OptionError(f"max_disagreement must be at least 0 and below 1, but got {self.max_disagreement:g}")


def new_estimator() -> LogisticEstimator:
    """An estimator of P(q agrees) that has seen nothing."""
    return LogisticEstimator(
        EstimatorConfig(
            slopes=_START_SLOPES, intercept=_START_INTERCEPT, positions=_POSITIONS, nonnegative_slopes=False
        )
    )


class Guard:
    """Learns when q agrees. One guard may serve many answers of one pair (a chat); a fresh one is made per call.

    Args:
        config: Limits.
        start: Coefficients stored by a search in the mask file (`LogisticEstimator.state`), or None. They count as
            `min_observations`, since the search saw q's rows itself.
    """

    def __init__(self, config: GuardConfig | None = None, start: Mapping[str, Any] | None = None) -> None:
        self.config = config or GuardConfig()
        self._seeded = start is not None
        self._held: list[tuple[Array, Sequence[int], Sequence[float]]] | None = None
        self.estimator = LogisticEstimator.from_state(start) if start is not None else new_estimator()
        if len(self.estimator.slopes) != len(FEATURES):
            raise MaskError(
                f"the mask's guard has {len(self.estimator.slopes)} coefficients, but this version uses {len(FEATURES)}; "
                "search the mask anew, or remove its 'guard' entry"
            )

    @property
    def ready(self) -> bool:
        """Whether enough has been seen for tokens to skip q."""
        return self._seeded or self.estimator.observations >= self.config.min_observations

    def agreement(self, features: Array, positions: Sequence[int] | Array) -> Array:
        """Predicted P(q agrees) for features ``[n, F]`` at block positions ``[n]``; all 0 until ready."""
        capped = np.minimum(np.asarray(positions, dtype=np.int64), len(self.estimator.intercepts) - 1)
        if not self.ready:
            return np.zeros(len(features))
        return self.estimator.predict(features, capped)

    def passes(self, features: Array, positions: Sequence[int] | Array) -> npt.NDArray[np.bool_]:
        """Which of n tokens may skip q, boolean ``[n]``."""
        # Strictly above, so that a budget of 0 passes nothing even where the prediction rounds to 1.
        enough: npt.NDArray[np.bool_] = self.agreement(features, positions) > 1 - self.config.max_disagreement
        return enough

    def observe(self, features: Array, positions: Sequence[int], agreement: Sequence[float]) -> None:
        """Learns from judged tokens; refits from time to time."""
        if self._held is not None:
            self._held.append((features, positions, agreement))
            return
        capped = np.minimum(np.asarray(positions, dtype=np.int64), len(self.estimator.intercepts) - 1)
        self.estimator.observe(features, capped, np.clip(np.asarray(agreement, dtype=np.float64), 0.0, 1.0))
        if self.estimator.pending >= self.config.refit_every:
            self.estimator.refit()

    @contextmanager
    def unchanging(self) -> Iterator[None]:
        """Learns what it hears inside only at the end.

        For rounds of several answers that go on at once. A round asks what the gate does before the full verifier's pass
        and again behind it, when others have been heard, and has to be told the same.
        """
        self._held = []
        try:
            yield
        finally:
            held, self._held = self._held, None
            for each in held:
                self.observe(*each)


class GuardedGate:
    """Thresholds first, then the guard: what it does not vouch for is escalated, kept tokens and rewrites alike.

    Args:
        thresholds: The dual thresholds.
        guard: The guard.
    """

    def __init__(self, thresholds: Thresholds, guard: Guard) -> None:
        self._ratio = RatioGate(thresholds)
        self.guard = guard

    def judge(self, slim_logits: Tensor, draft: Draft) -> list[Decision]:
        """See `Gate`."""
        decisions = self._ratio.judge(slim_logits, draft)
        if not self.guard.ready:
            return [Decision.ESCALATE] * len(decisions)
        best: list[int] = slim_logits.argmax(dim=-1).tolist()
        shown = [b if d is Decision.REWRITE else t for d, t, b in zip(decisions, draft.tokens, best, strict=True)]
        passes = self.guard.passes(block_features(slim_logits, draft, shown), range(len(shown)))
        return [d if ok else Decision.ESCALATE for d, ok in zip(decisions, passes, strict=True)]

    def sets(self, slim_logits: Tensor, draft: Draft, position: int) -> tuple[Tensor, Tensor]:
        """See `Gate`."""
        accept, rewrite = self._ratio.sets(slim_logits, draft, position)
        if not self.guard.ready:
            return torch.zeros_like(accept), torch.zeros_like(rewrite)
        # Only members of A can be vouched for, and there are few of them (r is near 1).
        members: list[int] = accept.nonzero()[:, 0].tolist()
        accept = torch.zeros_like(accept)
        if members:
            features = _features(slim_logits, draft, [position] * len(members), members, rewritten=False)
            passes = self.guard.passes(features, [position] * len(members))
            accept[[m for m, ok in zip(members, passes, strict=True) if ok]] = True
        best = int(slim_logits[position].argmax())
        features = _features(slim_logits, draft, [position], [best], rewritten=True)
        if not self.guard.passes(features, [position])[0]:
            rewrite = torch.zeros_like(rewrite)
        return accept, rewrite

    def learn(self, slim_logits: Tensor, draft: Draft, tokens: list[int], agreement: list[float]) -> None:
        """See `Gate`."""
        if tokens:
            self.guard.observe(block_features(slim_logits, draft, tokens), range(len(tokens)), agreement)


def block_features(slim_logits: Tensor, draft: Draft, tokens: list[int]) -> Array:
    """Features ``[n, F]`` of the tokens standing at the first n positions of a block.

    A token that differs from the drafted one is a rewrite; it is described by q' preferring it, whichever token it is, so
    that a rewrite's features do not depend on the draw.
    """
    rewritten = np.array([t != d for t, d in zip(tokens, draft.tokens, strict=False)])
    positions = list(range(len(tokens)))
    shown = tokens
    if rewritten.any():
        best: list[int] = slim_logits.argmax(dim=-1).tolist()
        shown = [best[i] if rewritten[i] else t for i, t in enumerate(tokens)]
    features = _features(slim_logits, draft, positions, shown, rewritten=False)
    features[:, FEATURES.index("rewritten")] = rewritten
    return features


def _features(slim_logits: Tensor, draft: Draft, positions: list[int], tokens: list[int], *, rewritten: bool) -> Array:
    """Features ``[n, F]`` of arbitrary (position, token) pairs of a block; none of them looks at q."""
    used = sorted(set(positions))
    where = torch.as_tensor([used.index(p) for p in positions], device=slim_logits.device)
    index = torch.as_tensor(tokens, device=slim_logits.device)
    rows = slim_logits[used].float()
    log_slim = torch.log_softmax(rows, dim=-1)
    log_r = (log_slim[where, index] - log_slim.amax(dim=-1)[where]).clamp_min(_LOG_FLOOR)
    logit_max = logit_of_max(rows).clamp(-_LOGIT_LIMIT, _LOGIT_LIMIT)[where]
    entropy_slim = -(log_slim.exp() * log_slim).nan_to_num(0.0).sum(dim=-1)[where]
    is_argmax = (rows.argmax(dim=-1)[where] == index).float()
    if draft.logits:
        log_p = torch.log_softmax(torch.stack([draft.logits[p].to(rows.device) for p in used]).float(), dim=-1)
        p = log_p.exp()
        logit_p = torch.logit(p[where, index].double(), eps=math.exp(_LOG_FLOOR)).float()
        entropy_p = -(p * log_p).nan_to_num(0.0).sum(dim=-1)[where]
        kl = (p * (log_p - log_slim)).nan_to_num(0.0).sum(dim=-1).clamp(0, -_LOG_FLOOR)[where]
    else:
        # A point mass: its own share of the n-gram's occurrences stands for p, and KL(p || q') is -log q'.
        share = torch.tensor(
            [draft.confidence[p] if draft.tokens[p] == t else 0.0 for p, t in zip(positions, tokens, strict=True)],
            device=rows.device,
        )
        logit_p = torch.logit(share.double(), eps=math.exp(_LOG_FLOOR)).float()
        entropy_p = torch.zeros_like(logit_p)
        drafted = torch.as_tensor([draft.tokens[p] for p in positions], device=rows.device)
        kl = (-log_slim[where, drafted]).clamp(0, -_LOG_FLOOR)
    flag = torch.full_like(log_r, float(rewritten))
    stacked = torch.stack([log_r, logit_max, logit_p, is_argmax, entropy_slim, entropy_p, kl, flag], dim=-1)
    return stacked.double().cpu().numpy()
