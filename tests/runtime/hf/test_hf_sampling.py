"""Sampled answers inside transformers have its law, whatever warps it, and follow torch's seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from inside import inputs
from tiny import model_of, tokenizer
from transformers import LogitsProcessorList, WatermarkingConfig

import viasd
from viasd.runtime.hf.prepared import PreparedSampler, of_row
from viasd.testing import perturbed, tiny_model

WARPED: dict[str, dict[str, Any]] = {
    "plain": {"top_k": 0},
    "penalty": {"repetition_penalty": 4.0, "top_k": 0},
    "temperature": {"temperature": 0.6, "top_k": 0},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8, "top_k": 0},
    "min_p": {"min_p": 0.1, "top_k": 0},
    "top_h": {"top_h": 0.5, "top_k": 0},
    "typical": {"typical_p": 0.7, "top_k": 0},
    "epsilon": {"epsilon_cutoff": 0.02, "top_k": 0},
    "eta": {"eta_cutoff": 0.02, "top_k": 0},
    "all": {
        **{"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.95, "epsilon_cutoff": 1e-3},
        **{"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "renormalize_logits": True, "suppress_tokens": [9]},
    },
    "watermark": {"watermarking_config": WatermarkingConfig(bias=3.0, context_width=1), "temperature": 0.7},
}


class Caught(Exception):
    """Carries what transformers has prepared."""


def prepared(model: Any, request: dict[str, Any], **settings: Any) -> LogitsProcessorList:
    def catch(model: Any, input_ids: Any, logits_processor: Any, **_: Any) -> None:
        raise Caught(logits_processor)

    with pytest.raises(Caught) as caught:
        model.generate(**request, do_sample=True, max_new_tokens=9, custom_generate=catch, **settings)
    return caught.value.args[0]


@pytest.mark.parametrize("name", sorted(WARPED))
def test_the_law_is_that_of_the_prepared_processors(name: str) -> None:
    model = model_of("llama")
    request = inputs(("hello hello world, hello", "hi there, hi"))
    found = prepared(model, request, **WARPED[name])
    ids = request["input_ids"]
    logits = torch.randn(2, 4, 300, generator=torch.Generator().manual_seed(0)) * 3
    drawn = [7, 70, 7]
    for row, spare in enumerate((0, 12)):
        assert int(ids.shape[1] - request["attention_mask"][row].sum()) == spare
        mine = of_row(found, row, 2, 1)
        sampler = PreparedSampler(mine, greedy=False, lead=ids[row, :spare].tolist(), device=ids.device)
        laws = sampler.law(sampler.ahead(ids[row, spare:].tolist()).block(logits[row], drawn))
        for i in range(4):
            so_far = torch.cat([ids, torch.tensor([drawn[:i]] * 2, dtype=torch.long)], dim=1)
            expected = found(so_far, logits[:, i].clone()).softmax(-1)[row]
            torch.testing.assert_close(laws[i].probs, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "own",
    [
        {},
        {"viasd_mask": "even:0.3", "assistant_model": "self"},
        {"assistant_model": "perturbed", "viasd_gamma": 3},
        {"viasd_strategy": "plain"},
    ],
)
def test_what_is_drawn_has_that_law(own: dict[str, Any]) -> None:
    """Frequencies of two-token answers against their exact probabilities (chi-square)."""
    model = tiny_model("llama", vocab_size=6, num_hidden_layers=4, scale=1.5)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    if own.get("assistant_model") == "perturbed":
        own = {**own, "assistant_model": perturbed(model, 0.5)}
    ids = torch.tensor([[3, 4, 5, 3, 4]])
    rows = 1200
    settings = {"temperature": 0.9, "top_k": 4, "repetition_penalty": 1.2}
    expected = torch.zeros(6, 6, dtype=torch.double)
    found = prepared(model, {"input_ids": ids}, **settings)
    with torch.no_grad():
        first = found(ids, model(ids).logits[:, -1].float()).softmax(-1)[0].double()
        for token in range(6):
            longer = torch.cat([ids, torch.tensor([[token]])], dim=1)
            expected[token] = first[token] * found(longer, model(longer).logits[:, -1].float()).softmax(-1)[0].double()
    torch.manual_seed(11)
    out = viasd.hf.generate(model, ids, do_sample=True, max_new_tokens=2, num_return_sequences=rows, **settings, **own)
    counts = torch.zeros(6, 6, dtype=torch.double)
    for a, b in out[:, -2:].tolist():
        counts[a, b] += 1
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi = ((counts - rows * expected)[possible].square() / (rows * expected[possible])).sum()
    freedom = int(possible.sum()) - 1
    assert chi < freedom + 4 * (2 * freedom) ** 0.5, "four standard deviations"


def test_a_drafter_that_knows_none_of_the_words_allowed() -> None:
    model, drafter = tiny_model("llama", vocab_size=320), tiny_model("llama", seed=3, num_hidden_layers=2)
    out = viasd.hf.generate(
        model,
        **inputs(),
        max_new_tokens=12,
        do_sample=True,
        assistant_model=drafter,
        suppress_tokens=list(range(300)),
        tokenizer=tokenizer(),
        assistant_tokenizer=tokenizer(),
        return_dict_in_generate=True,
        eos_token_id=None,
    )
    answer = out.sequences[0, -12:].tolist()
    assert set(answer) <= set(range(300, 320))
    assert len(set(answer)) > 3
    assert out.viasd[0].stats.drafted > out.viasd[0].stats.accepted > 0


def test_torchs_seed_decides() -> None:
    model = model_of("llama")
    options = {"do_sample": True, "max_new_tokens": 25, "num_return_sequences": 3, "custom_generate": viasd.hf.generate}
    torch.manual_seed(5)
    first = model.generate(**inputs(), **options)
    other = model.generate(**inputs(), **options)
    torch.manual_seed(5)
    again = model.generate(**inputs(), **options)
    assert torch.equal(first, again)
    assert first.shape != other.shape or not torch.equal(first, other)
    assert len({tuple(row) for row in first.tolist()}) == 3


def test_greedy_decoding_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()
    model_of("llama").generate(**inputs(), max_new_tokens=9, custom_generate=viasd.hf.generate, viasd_mask="even:0.3")
    assert torch.equal(before, torch.get_rng_state())
