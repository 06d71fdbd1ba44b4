"""What a session promises around the decoding itself: the guard's start, honest seconds, one answer, clear failures."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

import pytest
import torch

import viasd
from viasd.confident import ConfidentConfig
from viasd.errors import LoadError, MaskError, OptionError
from viasd.mask import LayerMask, ModelIdentity
from viasd.runtime.api import make_config
from viasd.runtime.config import SELF_SKIP
from viasd.runtime.gates import Thresholds
from viasd.runtime.guard import FEATURES, Guard, GuardConfig
from viasd.runtime.session import Session
from viasd.testing import byte_tokenizer, tiny_model

PROMPT = "hello hello world, hello"
VIA = {"strategy": "cascade", "mode": "via", "tiers": "3", "ignore_eos": True}


@pytest.fixture(scope="module")
def pair() -> viasd.Pair:
    return viasd.make_pair(tiny_model("llama"), byte_tokenizer(), name="tiny-lookup:8")


def searched(pair: viasd.Pair, /, **changes: Any) -> LayerMask:
    """A mask as a search writes it, with coefficients for the guard that vouch for everything."""
    certain = Guard().estimator
    certain.intercepts[:] = 8.0
    mask = LayerMask(
        LayerMask.even(8, 0.25).keep,
        pair=pair.name,
        target=ModelIdentity.of(pair.target, pair.target_id),
        details={"guard": certain.state()},
    )
    return dataclasses.replace(mask, **changes)


def test_the_masks_coefficients_start_the_guard_they_were_fitted_for(pair: viasd.Pair) -> None:
    result = viasd.generate(pair, PROMPT, mask=searched(pair), max_new_tokens=20, audit=0.0, **VIA)
    assert result.stats.unseen > 0
    assert not any("starts without" in note for note in result.notes)


def test_they_start_the_guard_of_a_mask_that_is_read_out_as_it_was_scored(pair: viasd.Pair) -> None:
    mask = searched(pair)
    mask = dataclasses.replace(mask, details={**mask.details, "readout": ConfidentConfig("last-m1").as_json()})
    result = viasd.generate(pair, PROMPT, mask=mask, max_new_tokens=20, audit=0.0, **VIA)
    assert result.readouts.slim is not None
    assert not any("starts without" in note for note in result.notes)


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"pair": "other-lookup:8"}, {}),
        ({}, {"temperature": 1.0}),
        ({}, {"thresholds": Thresholds(0.8, 0.2)}),
        ({"target": "other weights"}, {}),
        ({}, {"readout": "trough"}),
        ({}, {"readout": "trough", "readout_tier": "slim", "readout_unscored": True}),
    ],
)
def test_for_anything_else_the_guard_starts_cold_and_says_so(
    pair: viasd.Pair, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    if "target" in changes:
        changes = {"target": dataclasses.replace(ModelIdentity.of(pair.target, pair.target_id), weights="0" * 16)}
    result = viasd.generate(
        pair, PROMPT, mask=searched(pair, **changes), max_new_tokens=20, audit=0.0, seed=1, **VIA, **options
    )
    assert result.stats.unseen == 0
    assert any("starts without the mask's coefficients" in note for note in result.notes)


def test_a_self_drafter_that_skips_another_share_is_not_the_one_they_were_fitted_for() -> None:
    own = viasd.make_pair(tiny_model("llama"), byte_tokenizer(), drafter="self", name="tiny-self:8")
    for share, cold in ((SELF_SKIP, False), (0.3, True)):
        result = viasd.generate(own, PROMPT, mask=searched(own), max_new_tokens=8, self_skip=share, **VIA)
        assert any("starts without the mask's coefficients" in note for note in result.notes) == cold


def test_coefficients_of_another_kind_are_refused() -> None:
    from viasd.estimator import EstimatorConfig, LogisticEstimator

    state = LogisticEstimator(EstimatorConfig(slopes=(0.5,))).state()
    with pytest.raises(MaskError, match=f"has 1 coefficients, but this version uses {len(FEATURES)}"):
        Guard(start=state)


def test_a_budget_beside_a_guard_that_has_another_is_an_error(pair: viasd.Pair) -> None:
    guard = Guard(GuardConfig(max_disagreement=0.02))
    with pytest.raises(OptionError, match="contradicts the guard"):
        viasd.generate(pair, PROMPT, mask="even:0.25", guard=guard, max_disagreement=0.2, **VIA)


def test_the_readers_own_time_is_not_counted(pair: viasd.Pair) -> None:
    answer = viasd.stream(pair, PROMPT, mask=None, strategy="plain", max_new_tokens=5, ignore_eos=True)
    for _ in answer:
        time.sleep(0.1)
    assert answer.result.stats.seconds < 0.4  # five tokens of a tiny model; the reader slept for half a second
    assert answer.result.stats.check() == []


def test_a_session_makes_one_answer(pair: viasd.Pair) -> None:
    session = Session(pair, [5, 6, 7], make_config({"max_new_tokens": 3}))
    list(session)
    with pytest.raises(OptionError, match="one answer"):
        list(session)


def test_running_out_of_memory_is_one_clear_error(pair: viasd.Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(type(pair.target), "readout", full)
    with pytest.raises(LoadError, match="out of memory on cpu after 0 tokens"):
        viasd.generate(pair, PROMPT, mask=None)


def test_a_self_drafter_that_skips_no_more_than_the_slim_verifier_is_named() -> None:
    pair = viasd.make_pair(tiny_model("llama"), byte_tokenizer(), drafter="self")
    options = {"strategy": "cascade", "mode": "lossless", "tiers": "3", "max_new_tokens": 4}
    same = viasd.generate(pair, PROMPT, mask="even:0.5", self_skip=0.5, **options)
    assert any("skips no more layers than the slim verifier" in note for note in same.notes)
    more = viasd.generate(pair, PROMPT, mask="even:0.25", self_skip=0.5, **options)
    assert not any("skips no more layers" in note for note in more.notes)


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_two_threads_on_one_model_do_not_disturb_each_other(family: str) -> None:
    model = tiny_model(family)
    before = model.config._attn_implementation
    pair = viasd.make_pair(model, byte_tokenizer())
    expected = viasd.generate(pair, PROMPT, mask=None, max_new_tokens=40, ignore_eos=True).token_ids
    found: list[list[int]] = []

    def work() -> None:
        for _ in range(3):
            found.append(viasd.generate(pair, PROMPT, mask=None, max_new_tokens=40, ignore_eos=True).token_ids)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 9
    assert model.config._attn_implementation == before
