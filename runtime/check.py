"""Compares an answer with plain greedy decoding, and says of a difference whether it is a near-tie or a bug."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from viasd.errors import OptionError
from viasd.pair import Pair
from viasd.runtime.metrics import Counters
from viasd.runtime.result import Result
from viasd.runtime.target import TieredTarget
from viasd.sampling import Sampler, SamplingConfig

# A pass over several tokens sums in another order than one over a single token. Differences of this many units of the
# dtype's precision at the size of the winning logit are rounding; fp32 errors grow over far more of their small units.
_UNITS = {torch.bfloat16: 3.0, torch.float16: 3.0, torch.float32: 200.0}


@dataclass(frozen=True)
class Comparison:
    """Where an answer differs from what the full verifier says along it, one token a pass.

    Attributes:
        compared: Tokens compared.
        disagreed: Tokens that are not the full verifier's argmax after the answer's own prefix (0: equal to plain
            greedy decoding). For a lossy answer this is its exact disagreement.
        lossless: Whether the answer claimed to be lossless.
        index: Position in the answer of the first difference, or None.
        token: The answer's token there.
        greedy: Plain decoding's token there.
        gap: Difference of the two logits in a fresh single-token pass.
        near_tie: Whether that is within rounding of the dtype. A difference that is not is a bug.
    """

    compared: int
    disagreed: int
    lossless: bool
    index: int | None = None
    token: int | None = None
    greedy: int | None = None
    gap: float | None = None
    near_tie: bool | None = None

    @property
    def equal(self) -> bool:
        """Whether the answer is plain greedy decoding's."""
        return self.disagreed == 0

    def sentence(self) -> str:
        """The comparison in words."""
        if self.equal:
            return f"check: all {self.compared} tokens equal plain greedy decoding"
        if not self.lossless:
            return f"check: the full verifier would have said otherwise at {self.disagreed} of {self.compared} tokens"
        kind = "a near-tie, within rounding" if self.near_tie else "NOT a near-tie: please report this as a bug"
        return (
            f"check: differs from plain greedy decoding at token {self.index}: {self.token} instead of {self.greedy}, "
            f"whose logits are {self.gap:.3g} apart ({kind})"
        )

    def as_json(self) -> dict[str, Any]:
        """The comparison as a JSON object."""
        return {
            "equal": self.equal,
            "compared": self.compared,
            "disagreed": self.disagreed,
            "index": self.index,
            "token": self.token,
            "greedy": self.greedy,
            "gap": self.gap,
            "near_tie": self.near_tie,
        }


def compare_with_plain(pair: Pair, prompt_ids: Sequence[int], result: Result, sampling: SamplingConfig) -> Comparison:
    """Runs the full verifier along an answer, one token a pass, as plain decoding would.

    Args:
        pair: The pair that made the answer.
        prompt_ids: Its prompt.
        result: The answer.
        sampling: Its sampling configuration; temperature 0.

    Raises:
        OptionError: If the answer was sampled: two samples need not be equal.
    """
    if not sampling.greedy:
        raise OptionError(
            "comparing with plain decoding needs temperature 0; a sampled answer has no single right text"
        )
    target, sampler = TieredTarget(pair.target, None, Counters()), Sampler(sampling)
    tokens = list(prompt_ids)
    first: tuple[int, int, int, float, bool] | None = None
    disagreed = 0
    with torch.inference_mode():
        for index, token in enumerate(result.token_ids):
            row = sampler.ahead(tokens).next(target.full(tokens, 1)[0])
            greedy = int(row.argmax())
            if greedy != token:
                disagreed += 1
                if first is None:
                    gap = float(row[greedy] - row[token])
                    scale = abs(float(row[greedy]))
                    units = _UNITS.get(pair.target.dtype, 3.0)
                    near = gap <= units * torch.finfo(pair.target.dtype).eps * scale
                    first = (index, token, greedy, gap, near)
            tokens.append(token)
            target.settle(tokens)
    return Comparison(len(result.token_ids), disagreed, result.lossless, *(first or ()))
