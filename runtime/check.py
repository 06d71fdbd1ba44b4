"""Compares an answer with plain greedy decoding, and says of a difference whether it is a near-tie or a bug."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
    return compare_tokens(pair, prompt_ids, result.token_ids, sampling, lossless=result.lossless)


def compare_tokens(
    pair: Pair, prompt_ids: Sequence[int], tokens: Sequence[int], sampling: SamplingConfig, *, lossless: bool
) -> Comparison:
    """The same for an answer of anybody's, given as its tokens.

    Raises:
        OptionError: If the answer was sampled.
    """
    if not sampling.greedy:
        raise OptionError(
            "comparing with plain decoding needs temperature 0; a sampled answer has no single right text"
        )
    first: tuple[int, int, int, float, bool] | None = None
    disagreed = 0
    for index, (token, row) in enumerate(_along(pair, prompt_ids, tokens, sampling)):
        greedy = int(row.argmax())
        if greedy == token:
            continue
        disagreed += 1
        if first is None:
            gap = float(row[greedy] - row[token])
            scale = abs(float(row[greedy]))
            units = _UNITS.get(pair.target.dtype, 3.0)
            near = gap <= units * torch.finfo(pair.target.dtype).eps * scale
            first = (index, token, greedy, gap, near)
    return Comparison(len(tokens), disagreed, lossless, *(first or ()))


def mean_log_q(pair: Pair, prompt_ids: Sequence[int], tokens: Sequence[int], sampling: SamplingConfig) -> float:
    """Mean log-probability of an answer's tokens under q (after the request's processors, before temperature), in nats."""
    total = 0.0
    for token, row in _along(pair, prompt_ids, tokens, sampling):
        total += float(torch.log_softmax(row, dim=-1)[token])
    return total / len(tokens)


def _along(
    pair: Pair, prompt_ids: Sequence[int], answer: Sequence[int], sampling: SamplingConfig
) -> Iterator[tuple[int, Tensor]]:
    """Each token of an answer, and the full verifier's processed logits ``[V]`` before it."""
    target, sampler = TieredTarget(pair.target, None, Counters()), Sampler(sampling)
    tokens = list(prompt_ids)
    with torch.inference_mode():
        # In the very passes of plain decoding: another split of the prompt would round its keys differently.
        target.prefill(tokens[:-1])
    for token in answer:
        with torch.inference_mode():
            row = sampler.ahead(tokens).next(target.full(tokens, 1)[0])
        yield token, row
        tokens.append(token)
        target.settle(tokens)
