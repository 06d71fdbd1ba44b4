from __future__ import annotations

from typing import Any

import pytest
from tiny import pair_of

from viasd.errors import OptionError
from viasd.runtime.api import make_config
from viasd.runtime.config import DecodingConfig, GenerationConfig, Plan, plan, thresholds_of
from viasd.runtime.gates import Thresholds

VIA = {"strategy": "cascade", "mode": "via"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"strategy": "fast"},
            "strategy must be one of auto, plain, sd, cascade, adadecode, lossy, .*, but got 'fast'",
        ),
        ({"mode": "lossy"}, "mode must be one of"),
        ({"tiers": "4"}, "tiers must be one of auto, 2, 3, but got '4'"),
        ({"gate": "none"}, "gate must be one of guarded, ratio"),
        ({"gamma": 0}, "gamma must be at least 1, but got 0"),
        ({"slim_rounds": 0}, "slim_rounds must be at least 1"),
        ({"draft_min_prob": 1.1}, "draft_min_prob must be at least 0 and at most 1"),
        ({"draft_min_prob": float("nan")}, "draft_min_prob must be"),
        ({"self_skip": 1.0}, "self_skip must be at least 0 and below 1"),
        ({**VIA, "audit": 1.5}, "audit must be at least 0 and at most 1"),
        ({**VIA, "max_disagreement": 1.0}, "max_disagreement must be at least 0 and below 1"),
        ({"mode": "bounded", "alpha": 0.0}, "alpha must be above 0 and below 1, but got 0; alpha 0 is --mode lossless"),
        ({"mode": "bounded", "alpha": 1.0}, "alpha must be above 0"),
        ({"strategy": "sd", "mode": "via"}, "mode via needs three tiers, but strategy is sd"),
        ({"strategy": "plain", "mode": "via"}, "mode via needs three tiers, but strategy is plain"),
        ({"strategy": "plain", "mode": "bounded"}, "plain decoding is always lossless"),
        ({"strategy": "sd", "tiers": "3"}, "three tiers contradict strategy sd"),
        ({"strategy": "plain", "tiers": "3"}, "three tiers contradict strategy plain"),
        ({"strategy": "plain", "tiers": "2"}, "two tiers contradict strategy plain"),
        ({"mode": "via", "tiers": "2"}, "mode via needs the slim tier"),
        ({"alpha": 0.2}, "alpha only means something in bounded mode"),
        ({"mode": "lossless", "alpha": 0.2}, "alpha only means something in bounded mode"),
        ({"strategy": "sd", "gate": "ratio"}, "gate only means something in via mode"),
        ({"strategy": "sd", "thresholds": Thresholds()}, "thresholds only means something in via mode"),
        ({"mode": "lossless", "audit": 0.1}, "audit only means something in via mode"),
        ({"mode": "bounded", "recheck": False}, "recheck only means something in via mode"),
        ({"strategy": "cascade", "mode": "lossless", "max_disagreement": 0.0}, "max_disagreement only means something"),
        ({"tiers": "2", "gate": "ratio"}, "gate only means something in via mode"),
        ({**VIA, "gate": "ratio", "max_disagreement": 0.1}, "--gate ratio switches the guard off"),
        ({"strategy": "sd", "slim_rounds": 2}, "slim_rounds only means something"),
        ({"slim_rounds": 2}, "slim_rounds only means something"),
        ({**VIA, "slim_rounds": 2}, "slim_rounds only means something"),
        (
            {"strategy": "cascade", "mode": "lossless", "tiers": "2", "slim_rounds": 2},
            "slim_rounds only means something",
        ),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"speed": 9}, "unknown option 'speed'; known are .*strategy"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make_config(options)


@pytest.mark.parametrize(
    ("options", "has_mask", "expected"),
    [
        ({}, True, ("cascade", "via")),
        ({}, False, ("sd", "lossless")),
        ({"mode": "lossless"}, True, ("cascade", "lossless")),
        ({"mode": "lossless"}, False, ("sd", "lossless")),
        ({"mode": "bounded"}, True, ("cascade", "bounded")),
        ({"mode": "bounded"}, False, ("sd", "bounded")),
        ({"tiers": "2"}, True, ("sd", "lossless")),
        ({"tiers": "2", "mode": "bounded"}, True, ("sd", "bounded")),
        ({"tiers": "3"}, True, ("cascade", "via")),
        ({"strategy": "plain"}, True, ("plain", "lossless")),
        ({"strategy": "sd"}, True, ("sd", "lossless")),
        ({"strategy": "cascade"}, True, ("cascade", "via")),
        ({"strategy": "cascade", "tiers": "2"}, True, ("sd", "lossless")),
    ],
)
def test_what_is_left_open_is_settled(options: dict[str, Any], has_mask: bool, expected: tuple[str, str]) -> None:
    settled = plan(DecodingConfig(**options), has_mask=has_mask)
    assert (settled.strategy, settled.mode) == expected
    assert settled.lossless == (expected[1] == "lossless")
    assert ("no mask" in settled.reason) == (not has_mask)


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "cascade"},
        {"mode": "via"},
        {"tiers": "3"},
        {"gate": "ratio"},
        {"thresholds": Thresholds()},
        {"recheck": True},
        {"mode": "lossless", "slim_rounds": 2},
    ],
)
def test_asking_for_the_slim_verifier_without_a_mask_is_an_error(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=r"slim.*add --mask even:0.45"):
        plan(DecodingConfig(**options), has_mask=False)


def test_lossless_is_only_said_of_lossless_plans() -> None:
    assert Plan("cascade", "lossless").lossless
    assert not Plan("cascade", "via").lossless
    assert not Plan("sd", "bounded").lossless


def test_options_reach_their_place() -> None:
    config = make_config({"gamma": 3, "temperature": 0.5, "stop": "x", "seed": 4, "thresholds": Thresholds(0.9, 0.1)})
    assert (config.decoding.gamma, config.sampling.temperature, config.stop, config.seed) == (3, 0.5, ("x",), 4)
    assert thresholds_of(config.decoding) == Thresholds(0.9, 0.1)
    assert thresholds_of(DecodingConfig()) == Thresholds(0.7, 0.5)
    assert make_config({"stop": ["a", "b"]}).stop == ("a", "b")
    assert make_config({}) == GenerationConfig()


def test_a_config_and_single_options_exclude_each_other() -> None:
    import viasd

    with pytest.raises(OptionError, match=r"either config or single options.*'gamma'"):
        viasd.generate(pair_of("llama"), [5], mask=None, config=GenerationConfig(), gamma=3)


def test_bad_prompts_are_refused() -> None:
    import viasd
    from viasd.errors import ContextLengthError

    for prompt, message in (
        ([], "the prompt is empty"),
        ("", "the prompt is empty"),
        ("a\ud800", "the prompt must be Unicode text, but it has '.ud800', half of a pair of surrogates"),
        ([5, 300], "prompt ids must be in 0..299, but one is 300"),
        ([5, -1], "but one is -1"),
        ([[5, 6], [7, [8]]], "prompt 1 of 2: a prompt must be text, chat messages, or one sequence of token ids"),
        ([5, "x"], "one sequence of token ids"),
        ([{"role": "user"}], "must each have 'role' and 'content'"),
    ):
        with pytest.raises(OptionError, match=message):
            viasd.generate(pair_of("llama"), prompt, mask=None)
    with pytest.raises(ContextLengthError, match=r"has 512 tokens, but .* takes 512 in all"):
        viasd.generate(pair_of("llama"), [5] * 512, mask=None)


def test_an_answer_ends_at_the_context_length() -> None:
    import viasd

    for strategy in ("plain", "sd"):
        result = viasd.generate(pair_of("llama"), [5] * 500, mask=None, strategy=strategy, ignore_eos=True)
        assert len(result.token_ids) == 12
        assert result.finish_reason == "length"
        assert any("limited to 12 tokens" in note for note in result.notes)


def test_the_note_on_a_missing_mask_names_the_mode_that_was_asked_for() -> None:
    assert "two tiers, bounded (" in plan(DecodingConfig(mode="bounded"), has_mask=False).reason
    assert "two tiers, lossless (" in plan(DecodingConfig(), has_mask=False).reason
