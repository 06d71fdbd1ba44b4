"""Feature drafters of tiny targets, random or taught a little, and pairs with them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from tiny import model_of, prompt_ids, tokenizer

import viasd
from viasd.feature import FeatureDrafterFile, FeatureShape
from viasd.identity import ModelIdentity
from viasd.probe import load_layered
from viasd.search.fit.featuretraining import FeatureStack


@cache
def feature_file(family: str = "llama", depth: int = 1, words: int = 300, **shape: Any) -> FeatureDrafterFile:
    """A drafter that learnt a greedy answer of the tiny model by heart, so that it is often right there."""
    model = load_layered(model_of(family, **shape))
    shortlist = torch.arange(0, 300, 300 // words)
    stack = FeatureStack(model, FeatureShape.of(model, depth), shortlist, steps=2, seed=3)
    ids = answer(family, **shape)
    row = torch.tensor([ids])
    hidden = states_of(family, ids, **shape)
    with torch.no_grad():
        target = model_of(family, **shape)(row).logits[0].softmax(-1)
    optimizer = torch.optim.Adam(stack.parameters(), lr=3e-3)
    for _ in range(50):
        loss = torch.zeros(())
        for step, output in enumerate(stack.outputs(hidden, row)):
            logp = torch.log_softmax(stack.rows(output[0, step:]), dim=-1)
            loss = loss - (target[1 + step :, shortlist] * logp).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return FeatureDrafterFile(stack.shape, stack.weights(), shortlist, ModelIdentity.of(model, "tiny"), "taught")


@cache
def answer(family: str, n: int = 60, **shape: Any) -> tuple[int, ...]:
    """Prompt of the tests and what the tiny model says to it greedily."""
    row = torch.tensor([prompt_ids()])
    out = model_of(family, **shape).generate(
        row, attention_mask=torch.ones_like(row), max_new_tokens=n, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return tuple(int(i) for i in out[0])


def feature_pair(family: str = "llama", *, lookup_first: bool = False, depth: int = 1, **shape: Any) -> viasd.Pair:
    file = feature_file(family, depth, **shape)
    return viasd.make_pair(model_of(family, **shape), tokenizer(), drafter=file, lookup_first=lookup_first)


def states_of(family: str, tokens: Sequence[int], **shape: Any) -> torch.Tensor:
    """Hidden states ``[1, L, d]`` behind the last layer of transformers' own forward, as its final norm receives them."""
    model, seen = model_of(family, **shape), []
    handle = model.model.norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach()))
    try:
        with torch.no_grad():
            model(torch.tensor([list(tokens)]))
    finally:
        handle.remove()
    found: torch.Tensor = seen[0]
    return found
