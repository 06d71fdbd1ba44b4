from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import viasd
from viasd.errors import OptionError
from viasd.runtime.check import compare_with_plain
from viasd.sampling import SamplingConfig
from viasd.testing import byte_tokenizer, tiny_model


@pytest.fixture(scope="module")
def pair() -> viasd.Pair:
    return viasd.make_pair(tiny_model("llama"), byte_tokenizer())


def answer(pair: viasd.Pair, **options: object) -> viasd.Result:
    return viasd.generate(pair, "hello hello", max_new_tokens=20, ignore_eos=True, mask=None, **options)


def test_a_lossless_answer_equals_plain_decoding(pair: viasd.Pair) -> None:
    found = compare_with_plain(pair, pair.encode("hello hello"), answer(pair), SamplingConfig())
    assert (found.equal, found.compared, found.index) == (True, 20, None)
    assert "all 20 tokens equal" in found.sentence()


def test_a_penalty_is_part_of_what_is_right(pair: viasd.Pair) -> None:
    result = answer(pair, repetition_penalty=1.3)
    prompt = pair.encode("hello hello")
    assert compare_with_plain(pair, prompt, result, SamplingConfig(repetition_penalty=1.3)).equal
    assert not compare_with_plain(pair, prompt, result, SamplingConfig()).equal


def test_a_wrong_token_is_named_with_its_gap_and_called_a_bug(pair: viasd.Pair) -> None:
    result = answer(pair)
    prompt = pair.encode("hello hello")
    with torch.inference_mode():
        logits = pair.target.model(torch.tensor([[*prompt, *result.token_ids[:7]]])).logits[0, -1].float()
    row = torch.log_softmax(logits, dim=-1)
    worst = int(row.argmin())
    wrong = dataclasses.replace(result, token_ids=[*result.token_ids[:7], worst])
    found = compare_with_plain(pair, prompt, wrong, SamplingConfig())
    assert (found.index, found.token, found.greedy, found.near_tie) == (7, worst, result.token_ids[7], False)
    assert found.gap == pytest.approx(float(row.max() - row.min()), rel=1e-4)
    assert "NOT a near-tie" in found.sentence()


def test_a_near_tie_is_told_from_a_bug(pair: viasd.Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    result = answer(pair)
    prompt = pair.encode("hello hello")
    other = (result.token_ids[0] + 1) % pair.target.vocabulary
    readout: Any = type(pair.target).readout

    def tied(self: object, hidden: torch.Tensor, **options: bool) -> torch.Tensor:
        logits = readout(self, hidden, **options)
        logits[:, other] = logits.amax(dim=-1) - 1e-6
        return logits

    monkeypatch.setattr(type(pair.target), "readout", tied)
    found = compare_with_plain(pair, prompt, dataclasses.replace(result, token_ids=[other]), SamplingConfig())
    assert (found.near_tie, found.equal) == (True, False)
    assert "near-tie, within rounding" in found.sentence()


def test_of_a_lossy_answer_the_exact_disagreement_is_counted(pair: viasd.Pair) -> None:
    result = answer(pair)
    prompt = pair.encode("hello hello")
    flipped = [t if i % 5 else (t + 1) % pair.target.vocabulary for i, t in enumerate(result.token_ids)]
    lossy = dataclasses.replace(result, token_ids=flipped, lossless=False)
    expected, tokens = 0, list(prompt)
    for token in flipped:
        with torch.inference_mode():
            expected += int(pair.target.model(torch.tensor([tokens])).logits[0, -1].argmax()) != token
        tokens.append(token)
    found = compare_with_plain(pair, prompt, lossy, SamplingConfig())
    assert found.disagreed == expected > 0
    assert f"at {expected} of 20 tokens" in found.sentence()


def test_sampled_answers_are_not_compared(pair: viasd.Pair) -> None:
    with pytest.raises(OptionError, match="temperature 0"):
        compare_with_plain(pair, [1], answer(pair), SamplingConfig(temperature=1.0))
