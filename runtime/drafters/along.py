"""A drafter model along a text that is already there: what it would say at every position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from viasd.attention import Segment
from viasd.layered import LayeredModel
from viasd.pair import Pair
from viasd.runtime.target import PREFILL_CHUNK
from viasd.shortlist import ShortReadout


def has_states(pair: Pair) -> bool:
    """Whether the pair's drafter (behind lookup, where that is asked first) has weights of its own."""
    return pair.drafter is not None or pair.feature is not None


def states_along(pair: Pair, tokens: Sequence[int]) -> Tensor:
    """Hidden states ``[1, n, d]`` of a drafter that `has_states`: the one at position i speaks of token i + 1.

    A feature drafter goes by the target's states, as it does for the first token of a block. At position 0 it has nothing to
    go by; zeros stand there.
    """
    if pair.feature is None:
        assert pair.drafter is not None  # it has states
        return states(pair.drafter, tokens)
    feature, kv = pair.feature, pair.feature.new_kv()
    seen = states(pair.target, tokens)
    made = [seen.new_zeros(1, 1, seen.shape[-1])]
    for part in seen[:, :-1].split(PREFILL_CHUNK, dim=1):
        first = kv.full_len + 1
        made.append(feature.run(part, tokens[first : first + part.shape[1]], kv))
    return torch.cat(made, dim=1)


def readout_of(pair: Pair) -> Callable[[Tensor], Tensor]:
    """From hidden states ``[1, n, d]`` of such a drafter to its raw logits ``[n, V]``."""
    short = short_readout_of(pair)
    if short is not None:
        return short
    assert pair.drafter is not None  # it has states
    return pair.drafter.readout


def short_readout_of(pair: Pair) -> ShortReadout | None:
    """The readout of a drafter that knows some words only, made once a pair; None for one that knows them all."""
    if pair.feature is not None:
        return pair.feature.logits
    if pair.shortlist is None:
        return None
    if "short readout" not in pair.measured:
        assert pair.drafter is not None  # the shortlist is one of its words
        pair.measured["short readout"] = ShortReadout(pair.drafter, pair.shortlist)
    made: ShortReadout = pair.measured["short readout"]
    return made


def drafter_step(pair: Pair, context: int) -> tuple[tuple[Callable[[], Any], ...], Callable[[], Any]]:
    """One step of a drafter that `has_states` after so many tokens (fewer where it takes fewer), readout included.

    Returns:
        What is done before the timed step each time, and the step.
    """
    token = next(iter(pair.eos_ids), 0)
    short = short_readout_of(pair)
    if pair.feature is not None:
        feature = pair.feature
        kv, width = feature.new_kv(), feature.file.shape.width
        state = torch.zeros(1, 1, width, dtype=pair.target.dtype, device=pair.target.device)
        before = max(1, min(context, feature.file.shape.context - 1))
        run: Callable[[], Tensor] = partial(feature.run, state, [token], kv)
    else:
        small = pair.drafter
        assert small is not None  # it has states
        kv = small.new_kv()
        before = max(1, min(context, small.context_length - 1))

        def run() -> Tensor:
            step = small.step([Segment(kv, kv.full_len, 1)])
            hidden, _ = small.run(small.embed([token]), range(small.n_layers), step)
            kv.full_len = kv.slim_len = kv.full_len + 1
            return hidden

    def step() -> Any:
        # Of a shortlist nothing but the best word is looked at while drafting greedily.
        return readout_of(pair)(run()) if short is None else short.last([run()], [1])[0][0].best

    run()
    kv.stretch(before)
    return (partial(kv.roll_back, before),), step


def states(model: LayeredModel, tokens: Sequence[int]) -> Tensor:
    """Hidden states ``[1, n, d]`` of a model after the last layer."""
    step = model.step([Segment(model.new_kv(), 0, len(tokens))])
    return model.run(model.embed(tokens), range(model.n_layers), step)[0]
