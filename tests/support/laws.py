"""Exact laws of toy decoders: every outcome of every draw is enumerated with its probability."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from viasd.runtime.metrics import Counters
from viasd.runtime.session import Ending, rounds
from viasd.runtime.strategies import Strategy, Workbench
from viasd.sampling import Sampler, SamplingConfig
from viasd.testing import EnumeratingDraws, TableTarget

Table = Callable[[tuple[int, ...]], Tensor]
Law = dict[tuple[int, ...], float]
PROMPT = (0,)


def random_table(seed: int, vocabulary: int = 3, spread: float = 1.5) -> Table:
    """Raw logits (float64) that depend on the whole prefix."""

    @cache
    def logits(prefix: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, prefix)) % 2**31)
        return torch.randn(vocabulary, generator=generator, dtype=torch.float64) * spread

    return logits


def constant_table(*probabilities: float) -> Table:
    """The same row after every prefix."""
    row = torch.tensor(probabilities, dtype=torch.float64).log()
    return lambda _prefix: row


def target_law(table: Table, length: int, config: SamplingConfig, vocabulary: int) -> Law:
    """Law of the next `length` tokens when they are drawn one by one from the processed rows of `table`."""
    sampler = Sampler(config)
    law: Law = {}
    for tokens in itertools.product(range(vocabulary), repeat=length):
        weight = 1.0
        for i, token in enumerate(tokens):
            prefix = (*PROMPT, *tokens[:i])
            weight *= sampler.ahead(prefix).row(table(prefix)).prob(token)
        law[tokens] = weight
    return law


def decoded_law(
    make: Callable[[Workbench], tuple[Strategy, Any]],
    target: TableTarget,
    length: int,
    config: SamplingConfig,
    *,
    spare: int = 2,
) -> Law:
    """Law of the first `length` tokens a strategy emits, with room for `spare` more (so that blocks are not cut short).

    `make` builds a fresh strategy and its drafter on a workbench, once per path.
    """
    law: Law = {}
    total = 0.0
    for draws in EnumeratingDraws().paths():
        sampler, counters, tokens = Sampler(config), Counters(), list(PROMPT)
        strategy, drafter = make(Workbench(target, sampler, draws, counters))
        room = Ending(length + spare, frozenset())
        for _ in rounds(strategy, target, drafter, sampler, tokens, room):
            if len(tokens) - len(PROMPT) >= length:
                break
        out = tuple(tokens[len(PROMPT) : len(PROMPT) + length])
        law[out] = law.get(out, 0.0) + draws.weight
        total += draws.weight
    assert abs(total - 1) < 1e-9
    return law


def largest_error(a: Law, b: Law) -> float:
    return max(abs(a.get(k, 0.0) - b.get(k, 0.0)) for k in {*a, *b})
