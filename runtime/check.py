"""Compares an answer with plain greedy decoding, and says of a difference whether it is a near-tie or a bug."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from viasd.errors import OptionError
from viasd.pair import Pair
from viasd.runtime.metrics import Counters
from viasd.runtime.readouts import FULL
from viasd.runtime.result import Result
from viasd.runtime.target import Choice, TieredTarget
from viasd.sampling import Sampler, SamplingConfig
from viasd.selecting import ConfidentReadout

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
        near_tie: Whether that is within rounding of the dtype, or, with a confident readout, the entropies are that chose
            another layer. A difference that is not is a bug.
        readout: The full verifier's, in words, where it is not the model's own.
    """

    compared: int
    disagreed: int
    lossless: bool
    index: int | None = None
    token: int | None = None
    greedy: int | None = None
    gap: float | None = None
    near_tie: bool | None = None
    readout: str | None = None

    @property
    def equal(self) -> bool:
        """Whether the answer is plain greedy decoding's."""
        return self.disagreed == 0

    def sentence(self) -> str:
        """The comparison in words."""
        plain = f"plain greedy decoding{'' if self.readout is None else f' with the {self.readout}'}"
        if self.equal:
            return f"check: all {self.compared} tokens equal {plain}"
        if not self.lossless:
            return f"check: the full verifier would have said otherwise at {self.disagreed} of {self.compared} tokens"
        kind = "a near-tie, within rounding" if self.near_tie else "NOT a near-tie: please report this as a bug"
        return (
            f"check: differs from {plain} at token {self.index}: {self.token} instead of {self.greedy}, "
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
            "readout": self.readout,
        }


def compare_with_plain(pair: Pair, prompt_ids: Sequence[int], result: Result, sampling: SamplingConfig) -> Comparison:
    """Runs the full verifier along an answer, one token a pass, as plain decoding would.

    Args:
        pair: The pair that made the answer.
        prompt_ids: Its prompt.
        result: The answer. Its target is what it is compared with: its seed and the full verifier's readout count.
        sampling: Its sampling configuration; temperature 0.

    Raises:
        OptionError: If the answer was sampled: two samples need not be equal.
    """
    readout, _ = replace(result.readouts, slim=None).bind(pair, None, result.seed)
    return compare_tokens(
        pair,
        prompt_ids,
        result.token_ids,
        sampling,
        lossless=result.lossless,
        readout=readout,
        layers=result.selected_layers if readout is not None else (),
    )


def compare_tokens(
    pair: Pair,
    prompt_ids: Sequence[int],
    tokens: Sequence[int],
    sampling: SamplingConfig,
    *,
    lossless: bool,
    readout: ConfidentReadout | None = None,
    layers: Sequence[int | None] = (),
) -> Comparison:
    """The same for an answer of anybody's, given as its tokens.

    Args:
        pair: See `compare_with_plain`.
        prompt_ids: Likewise.
        tokens: The answer.
        sampling: Likewise.
        lossless: Whether it claims to be.
        readout: Of the full verifier; None is the model's own.
        layers: Where the answer's own rows were read out, if it says so.

    Raises:
        OptionError: If the answer was sampled.
    """
    if not sampling.greedy:
        raise OptionError(
            "comparing with plain decoding needs temperature 0; a sampled answer has no single right text"
        )
    first: tuple[int, int, int, float, bool] | None = None
    disagreed = 0
    for index, (token, row, choice) in enumerate(_along(pair, prompt_ids, tokens, sampling, readout)):
        greedy = int(row.argmax())
        if greedy == token:
            continue
        disagreed += 1
        if first is None:
            gap = float(row[greedy] - row[token])
            rounding = _UNITS.get(pair.target.dtype, 3.0) * torch.finfo(pair.target.dtype).eps * abs(float(row[greedy]))
            # Where two entropies are that close, the other pass may have taken another layer, and with it any other row.
            other = choice is not None and index < len(layers) and layers[index] not in (None, choice.layer)
            near = gap <= rounding or (other and choice is not None and choice.margin <= rounding)
            first = (index, token, greedy, gap, near)
    words = None if readout is None else readout.config.describe()
    return replace(Comparison(len(tokens), disagreed, lossless, *(first or ())), readout=words)


def mean_log_q(pair: Pair, prompt_ids: Sequence[int], tokens: Sequence[int], sampling: SamplingConfig) -> float:
    """Mean log-probability of an answer's tokens under q (after the request's processors, before temperature), in nats."""
    total = 0.0
    for token, row, _ in _along(pair, prompt_ids, tokens, sampling):
        total += float(torch.log_softmax(row, dim=-1)[token])
    return total / len(tokens)


def _along(
    pair: Pair,
    prompt_ids: Sequence[int],
    answer: Sequence[int],
    sampling: SamplingConfig,
    readout: ConfidentReadout | None = None,
) -> Iterator[tuple[int, Tensor, Choice | None]]:
    """Each token of an answer, the full verifier's processed logits ``[V]`` before it, and where these were read out."""
    target = TieredTarget(pair.target, None, Counters(), full_readout=readout)
    sampler = Sampler(sampling)
    tokens = list(prompt_ids)
    with torch.inference_mode():
        # In the very passes of plain decoding: another split of the prompt would round its keys differently.
        target.prefill(tokens[:-1])
    for token in answer:
        with torch.inference_mode():
            row = sampler.ahead(tokens).next(target.full(tokens, 1)[0])
        yield token, row, target.choices[FULL].get(len(tokens) - 1)
        tokens.append(token)
        target.settle(tokens)
