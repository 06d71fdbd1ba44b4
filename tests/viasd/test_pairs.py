from __future__ import annotations

import pytest

from viasd import drafters
from viasd.errors import PairError
from viasd.pairs import (
    CHECKPOINTS,
    DEFAULT_PAIR,
    DEFAULT_TARGET,
    MODEL_FREE_DRAFTERS,
    TINY,
    list_pairs,
    parse_pair,
    parse_target,
    split_drafter,
)


@pytest.mark.parametrize("base", [False, True])
def test_every_listed_pair_parses_to_itself(base: bool) -> None:
    pairs = list_pairs(base)
    assert len({pair.name for pair in pairs}) == len(pairs) > 80
    for pair in pairs:
        assert parse_pair(pair.name, base=base) == pair


def test_drafters_are_smaller_than_their_target_and_of_its_family() -> None:
    for pair in list_pairs():
        sizes = list(CHECKPOINTS[pair.family])
        if pair.drafter in (*MODEL_FREE_DRAFTERS, TINY):
            assert pair.drafter_ref is None
        else:
            assert sizes.index(pair.drafter) < sizes.index(pair.target)
            assert pair.drafter_ref == CHECKPOINTS[pair.family][pair.drafter][0]


def test_sizes_are_listed_in_ascending_order() -> None:
    for sizes in CHECKPOINTS.values():
        counts = [float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]] for size in sizes]
        assert counts == sorted(counts)


@pytest.mark.parametrize(
    ("name", "base", "drafter", "target"),
    [
        ("gemma2-2b:27b", False, "google/gemma-2-2b-it", "google/gemma-2-27b-it"),
        ("gemma3-270m:4b", True, "google/gemma-3-270m", "google/gemma-3-4b-pt"),
        ("llama3-1b:70b", False, "meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.3-70B-Instruct"),
        ("llama3-8b:70b", True, "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B"),
        ("qwen2.5-0.5b:72b", False, "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-72B-Instruct"),
        ("qwen3-0.6b:14b", True, "Qwen/Qwen3-0.6B-Base", "Qwen/Qwen3-14B-Base"),
        ("qwen3-lookup:32b", False, None, "Qwen/Qwen3-32B"),
        (" SmolLM2-135M:1.7B ", False, "HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-1.7B-Instruct"),
    ],
)
def test_names_resolve_to_hub_ids(name: str, base: bool, drafter: str | None, target: str) -> None:
    pair = parse_pair(name, base=base)
    assert (pair.drafter_ref, pair.target_ref, pair.base) == (drafter, target, base)


def test_the_default_pair_needs_no_drafter_model() -> None:
    assert parse_pair(DEFAULT_PAIR).drafter == "lookup"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gema2-2b:27b", "unknown family 'gema2'.*nearest: gemma2-2b:27b"),
        ("gemma2-2b:28b", "unknown size '28b'.*2b, 9b, 27b.*nearest: gemma2-2b:27b"),
        ("gemma2-lookup:self", "unknown size 'self'"),
        ("gemma2-27b:2b", "drafter must be smaller"),
        ("gemma2-2b:2b", "drafter must be smaller"),
        ("gemma2", "FAMILY-DRAFTER:TARGET"),
        ("gemma2-:27b", "FAMILY-DRAFTER:TARGET"),
        ("", "FAMILY-DRAFTER:TARGET"),
    ],
)
def test_bad_names_are_refused_with_the_reason_and_near_names(name: str, message: str) -> None:
    with pytest.raises(PairError, match=message) as caught:
        parse_pair(name)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_that_was_never_published_is_refused() -> None:
    with pytest.raises(PairError, match="no base checkpoints"):
        parse_pair("qwen3-lookup:32b", base=True)


def test_lookup_may_be_asked_before_any_other_drafter() -> None:
    pair = parse_pair("qwen2.5-lookup+0.5B:7b")
    assert (pair.name, pair.drafter, pair.lookup_first) == ("qwen2.5-lookup+0.5b:7b", "0.5b", True)
    assert pair.drafter_ref == parse_pair("qwen2.5-0.5b:7b").drafter_ref
    assert parse_pair("smollm2-lookup+self:135m").lookup_first
    for name in ("smollm2-lookup+lookup:135m", "smollm2-lookup+7b:135m", "smollm2-lookup+:135m"):
        with pytest.raises(PairError):
            parse_pair(name)
    assert split_drafter("lookup+a/b.safetensors") == (True, "a/b.safetensors")
    assert split_drafter("lookup") == (False, "lookup")


def test_a_target_may_be_named_alone() -> None:
    target = parse_target(" SmolLM2:1.7B ")
    assert target is not None
    assert target.target_ref == "HuggingFaceTB/SmolLM2-1.7B-Instruct"
    assert parse_target(DEFAULT_TARGET) == parse_pair(DEFAULT_PAIR)
    for other in ("smollm2", "smollm2:9b", "org/model", "C:\\models", ""):
        assert parse_target(other) is None


def test_every_shipped_drafter_is_listed() -> None:
    listed = {f"{pair.family}:{pair.target}" for pair in list_pairs() if pair.drafter == TINY}
    assert listed == set(drafters.names()) >= {DEFAULT_TARGET}
    assert all(drafters.file_of(name).is_file() for name in listed)


def test_shipped_drafters_are_pairs_of_their_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("viasd.pairs.names", lambda: ["qwen3:4b"])
    assert parse_pair("qwen3-tiny:4b").drafter == TINY
    assert drafters.file_of("qwen3:4b").name == "qwen3-4b.tiny.safetensors"
    assert parse_pair("qwen3-lookup+tiny:4b").lookup_first
    with pytest.raises(PairError):
        parse_pair("qwen3-tiny:4b", base=True)  # fitted to the instruct checkpoint
    with pytest.raises(PairError):
        parse_pair("qwen3-tiny:8b")
