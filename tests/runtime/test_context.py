"""Prompt, answer and the two models' contexts."""

from __future__ import annotations

import pytest

import viasd
from viasd.errors import ContextLengthError
from viasd.testing import byte_tokenizer, perturbed, tiny_model

PROMPT = [5 + i % 40 for i in range(30)]


def test_beyond_the_drafters_context_the_target_goes_on_alone() -> None:
    target = tiny_model("llama")
    drafter = perturbed(tiny_model("llama"), 0.05)
    drafter.config.max_position_embeddings = 40
    pair = viasd.make_pair(target, byte_tokenizer(), drafter=drafter)
    result = viasd.generate(pair, PROMPT, mask=None, draft_length="fixed", max_new_tokens=40, ignore_eos=True)
    plain = viasd.generate(pair, PROMPT, mask=None, strategy="plain", max_new_tokens=40, ignore_eos=True)
    assert result.token_ids == plain.token_ids
    # Positions 30..39 may be drafted, later ones not.
    assert "drafter" in result.tiers[:10]
    assert set(result.tiers[11:]) == {"full"}


def test_the_answer_ends_where_the_context_does_and_says_so() -> None:
    pair = viasd.make_pair(tiny_model("llama", max_position_embeddings=40), byte_tokenizer())
    result = viasd.generate(pair, PROMPT, mask=None, max_new_tokens=40, ignore_eos=True)
    assert len(result.token_ids) == 10
    assert result.finish_reason == "length"
    assert any("limited to 10 tokens" in note for note in result.notes)


def test_a_prompt_as_long_as_the_context_is_refused() -> None:
    pair = viasd.make_pair(tiny_model("llama", max_position_embeddings=30), byte_tokenizer())
    with pytest.raises(ContextLengthError, match=r"30 tokens.*takes 30"):
        viasd.generate(pair, PROMPT, mask=None)
