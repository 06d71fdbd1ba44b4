"""What can be read off a drafter's row, before a token is drawn from it or (unlawfully) after, to predict its fate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from viasd.estimator import LOGIT_LIMIT, Array, EstimatorConfig, logit_of_max
from viasd.runtime.adaptive.edges import MEMORY

#: What is kept of every drafted token; the nine features are functions of these four.
MEASURED = ("logit_max", "margin", "entropy", "log_p_token")
_TINY = 1e-300
# Features of other scales than a logit's need other limits than the shipped estimator's.
_WIDE = EstimatorConfig(slope_cap=60.0, intercept_cap=60.0, memory=MEMORY)
_SHIPPED = EstimatorConfig(memory=MEMORY)


@dataclass(frozen=True)
class Feature:
    """One predictor.

    Attributes:
        name: For tables.
        of: Columns of `MEASURED` -> values ``[n]``, larger where a token is likelier to be kept.
        lossless: Whether it may choose what is verified: it doesn't look at the drawn token.
        fitted: Whether coefficients are learnt; otherwise its values are taken for probabilities.
        config: Start values and limits of its estimator.
    """

    name: str
    of: Callable[[Mapping[str, Array]], Array]
    lossless: bool = True
    fitted: bool = True
    config: EstimatorConfig = _WIDE


def _log_max(m: Mapping[str, Array]) -> Array:
    return -np.logaddexp(0.0, -m["logit_max"])


def _max(m: Mapping[str, Array]) -> Array:
    return np.exp(_log_max(m))


def _log_log(m: Mapping[str, Array]) -> Array:
    return -np.log(np.maximum(-_log_max(m), _TINY)).clip(-LOGIT_LIMIT, LOGIT_LIMIT)


def _logit_token(m: Mapping[str, Array]) -> Array:
    # Where the token is the largest one, the exact logit of the largest is its own.
    log_p = np.minimum(m["log_p_token"], 0.0)
    logit = log_p - np.log(np.maximum(-np.expm1(log_p), _TINY))
    return np.minimum(logit, m["logit_max"]).clip(-LOGIT_LIMIT, LOGIT_LIMIT)


SHIPPED = "logit q_max"
RAW = "raw q_max (nothing fitted)"
FEATURES = (
    Feature(SHIPPED, lambda m: m["logit_max"], config=_SHIPPED),
    Feature("log q_max", _log_max),
    Feature("-log(-log q_max)", _log_log),
    Feature("top-2 margin", lambda m: m["margin"]),
    Feature("entropy", lambda m: -m["entropy"]),
    Feature("q_max", _max),
    Feature(RAW, _max, fitted=False),
    Feature("log q(drawn token)", lambda m: m["log_p_token"], lossless=False),
    Feature("logit q(drawn token)", _logit_token, lossless=False),
)
#: What the post measured on 4.5 million labelled drafts: AUC, log-loss, ECE.
POST = {
    SHIPPED: (0.8336, 0.4284, 0.0100),
    RAW: (0.8259, 0.4880, 0.0736),
    "entropy": (0.8321, 0.4577, 0.0638),
}
#: The same of a trained confidence head, which there is none of here.
POST_HEAD = (0.8191, 0.4449, 0.0052)


def measure_rows(logits: Tensor, tokens: Sequence[int], temperature: float) -> dict[str, Array]:
    """The columns `MEASURED` of drafted tokens.

    Args:
        logits: Raw logits ``[n, V]`` of the drafter.
        tokens: The n tokens drawn there.
        temperature: Of the request; 0 reads the rows at temperature 1.

    Returns:
        Name -> ``[n]`` float64.
    """
    z = logits.double() / (temperature or 1.0)
    log_p = torch.log_softmax(z, dim=-1)
    best = z.topk(min(2, z.shape[-1]), dim=-1).values
    index = torch.as_tensor(list(tokens), device=z.device)
    found = {
        "logit_max": logit_of_max(logits, temperature),
        "margin": (best[:, 0] - best[:, -1]).clamp_max(LOGIT_LIMIT),
        "entropy": -(log_p.exp() * log_p).nan_to_num(0.0).sum(dim=-1),
        "log_p_token": log_p.gather(1, index[:, None])[:, 0],
    }
    return {name: found[name].double().cpu().numpy() for name in MEASURED}
