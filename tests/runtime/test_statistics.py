"""Above temperature 0, end to end: real (tiny) models, seeds, the whole API; the joint law of two tokens is the target's."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from tiny import LOSSLESS, pair_of

import viasd
from viasd.sampling import Sampler, SamplingConfig

VOCABULARY = 20
SHAPE: dict[str, Any] = {
    "scale": 30.0,
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "intermediate_size": 32,
}
PROMPT = [5, 9, 7, 5, 9, 7, 5, 9]
SAMPLES = 400


@cache
def exact_law(sampling: SamplingConfig) -> torch.Tensor:
    """Joint law ``[V, V]`` of the next two tokens, from the model's own forward."""
    model = pair_of("llama", **SHAPE).target.model
    sampler = Sampler(sampling)
    with torch.no_grad():
        first = model(input_ids=torch.tensor([PROMPT])).logits[0, -1]
        prompts = torch.tensor([[*PROMPT, x] for x in range(VOCABULARY)])
        second = model(input_ids=prompts).logits[:, -1]
    p1 = sampler.ahead(PROMPT).row(first).probs
    p2 = [sampler.ahead([*PROMPT, x]).row(second[x]).probs for x in range(VOCABULARY)]
    return p1[:, None].double() * torch.stack(p2).double()


def tail_probability(observed: Counter[tuple[int, int]], law: torch.Tensor) -> float:
    """Pearson's test; cells with fewer than five expected counts are pooled."""
    n = sum(observed.values())
    expected, counts, rest = [], [], [0.0, 0]
    for x in range(VOCABULARY):
        for y in range(VOCABULARY):
            e, c = float(law[x, y]) * n, observed[(x, y)]
            if e == 0:
                assert c == 0, f"({x}, {y}) has no mass"
            elif e < 5:
                rest[0] += e
                rest[1] += c
            else:
                expected.append(e)
                counts.append(c)
    if rest[0] > 1:
        expected.append(rest[0])
        counts.append(int(rest[1]))
    assert len(expected) > 10
    statistic = sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))
    half = torch.tensor([(len(expected) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sd-model": ("model", {"strategy": "sd", "draft_length": "fixed"}),
    "sd-lookup": ("lookup", {"strategy": "sd", "draft_length": "fixed"}),
    "sd-paced": ("lookup", {"strategy": "sd"}),
    "chain-model": ("model", {**LOSSLESS["chain2"], "mask": "even:0.5"}),
    "chain-self": ("self", {**LOSSLESS["chain"], "mask": "even:0.25"}),
    "via-audited": ("model", {**LOSSLESS["via-audited"], "mask": "even:0.5"}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_joint_law_of_two_tokens_is_the_targets(case: str) -> None:
    drafter, options = CASES[case]
    pair = pair_of("llama", drafter, **SHAPE)
    sampling: dict[str, Any] = {"temperature": 1.0} if case != "sd-model" else {"temperature": 1.4, "top_p": 0.9}
    observed: Counter[tuple[int, int]] = Counter()
    for seed in range(SAMPLES):
        # Four tokens are asked for, so that the first two may come out of the middle of a block.
        options = {"mask": None, "max_new_tokens": 4, **options, **sampling}
        result = viasd.generate(pair, PROMPT, seed=seed, ignore_eos=True, **options)
        observed[(result.token_ids[0], result.token_ids[1])] += 1
    assert tail_probability(observed, exact_law(SamplingConfig(**sampling))) > 1e-4


def test_a_wrong_law_is_noticed() -> None:
    wrong = exact_law(SamplingConfig(temperature=1.6))
    observed: Counter[tuple[int, int]] = Counter()
    pair = pair_of("llama", **SHAPE)
    for seed in range(SAMPLES):
        options: dict[str, Any] = {"mask": None, "max_new_tokens": 2, "strategy": "plain", "temperature": 1.0}
        result = viasd.generate(pair, PROMPT, seed=seed, ignore_eos=True, **options)
        observed[(result.token_ids[0], result.token_ids[1])] += 1
    assert tail_probability(observed, wrong) < 1e-4
