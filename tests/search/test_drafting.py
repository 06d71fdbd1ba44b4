"""Drafters along a text: the rows are those that decoding would see."""

from __future__ import annotations

import pytest
import torch
from features import answer, feature_file, feature_pair, states_of
from tiny import model_of, pair_of

from viasd.featuremodel import FeatureModel
from viasd.probe import load_layered
from viasd.runtime.drafters.along import has_states, readout_of, states_along


def test_a_feature_drafters_rows_are_those_of_the_first_token_of_a_block() -> None:
    tokens = list(answer("llama"))[:20]
    pair = feature_pair()
    assert has_states(pair)
    rows = readout_of(pair)(states_along(pair, tokens))
    runner = FeatureModel(feature_file(), load_layered(model_of("llama")))
    for end in (1, 5, 19):  # the row at position `end` has seen the tokens up to there
        hidden = runner.run(states_of("llama", tokens)[:, :end], tokens[1 : end + 1], runner.new_kv())
        torch.testing.assert_close(rows[end], runner.logits(hidden[:, -1:])[0], rtol=1e-3, atol=1e-3)


def test_a_long_text_goes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = list(answer("llama"))[:20]
    whole = states_along(feature_pair(), tokens)
    monkeypatch.setattr("viasd.runtime.drafters.along.PREFILL_CHUNK", 6)
    torch.testing.assert_close(states_along(feature_pair(), tokens), whole, rtol=1e-4, atol=1e-4)


def test_who_has_states() -> None:
    assert has_states(pair_of("llama", "model"))
    assert not has_states(pair_of("llama", "lookup"))
    assert not has_states(pair_of("llama", "self"))
