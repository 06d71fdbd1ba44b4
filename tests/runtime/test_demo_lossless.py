"""Lossless decoding of the demo target, in fp32, is transformers' own greedy text, token for token."""

from __future__ import annotations

import pytest
import torch

import viasd
from viasd import masks
from viasd.loading import LoadConfig

pytestmark = pytest.mark.weights


@pytest.mark.parametrize("drafter", ["lookup", "self", "tiny", "lookup+tiny"])
def test_three_tiers_of_the_demo_target_give_its_greedy_text(drafter: str) -> None:
    config = LoadConfig(weights="packaged", device="cpu", dtype="float32", quiet=True)
    pair = viasd.load_pair(f"smollm2-{drafter}:135m", config=config)
    ids = pair.encode([{"role": "user", "content": "Repeat: red apples, green pears, red apples, green pears."}])
    with torch.inference_mode():
        row = torch.tensor([ids])
        whole = pair.target.model.generate(
            row, attention_mask=torch.ones_like(row), max_new_tokens=24, do_sample=False, pad_token_id=2
        )
    expected = whole[0, len(ids) :].tolist()
    shipped = [name for name in masks.names() if name.startswith("smollm2-135m.")]
    for mask in (None, "even:0", "even:0.45", "even:0.6", *shipped):
        options = {} if mask is None else {"strategy": "cascade", "mode": "lossless", "tiers": "3"}
        result = viasd.generate(pair, ids, mask=mask, max_new_tokens=24, **options)
        assert result.token_ids == expected, mask
        assert result.lossless


def test_the_shipped_drafter_is_worth_asking() -> None:
    pair = viasd.load_pair("smollm2-tiny:135m", config=LoadConfig(weights="packaged", device="cpu", quiet=True))
    kept = judged = 0
    for question in ("How many apples are three times four apples?", "Write a short letter to a friend about rain."):
        options = {"strategy": "sd", "gamma": 3, "draft_length": "fixed", "max_new_tokens": 48}
        stats = viasd.generate(pair, [{"role": "user", "content": question}], mask=None, **options).stats
        kept, judged = kept + stats.kept, judged + stats.gated
    assert kept / judged > 0.25
