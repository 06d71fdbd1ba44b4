"""At temperature 0 the lossless strategies give, token for token, what transformers' own greedy generate gives."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
from tiny import LOSSLESS, TEXT, generate, hf_greedy, model_of, pair_of, prompt_ids, tokenizer, watch_writes

import viasd
from viasd.kv import SequenceKV
from viasd.runtime.costs import CostTable
from viasd.testing import FAMILIES, tiny_model

N = 40  # with the prompt of 24: eight windows of 8
DRAFTERS = ("lookup", "self", "model")


def reference(family: str, ids: list[int], n: int = N) -> list[int]:
    key = (family, tuple(ids))
    if key not in _REFERENCES:
        _REFERENCES[key] = hf_greedy(model_of(family), ids, N)
    return _REFERENCES[key][:n]


_REFERENCES: dict[Any, list[int]] = {}


@pytest.mark.parametrize(
    ("drafter", "strategy"),
    [(d, s) for d in DRAFTERS for s in LOSSLESS if d == "lookup" or s in ("sd", "chain2", "via-audited")],
)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_and_drafter(family: str, drafter: str, strategy: str) -> None:
    result = generate(pair_of(family, drafter), prompt_ids(), max_new_tokens=N, **LOSSLESS[strategy])
    assert result.token_ids == reference(family, prompt_ids())
    assert result.finish_reason == "length"
    assert result.lossless == (result.mode == "lossless")


@pytest.mark.parametrize("mask", ["even:0", "even:0.125", "even:0.25", "even:0.375", "even:0.5", "even:0.6"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_any_mask(drafter: str, mask: str) -> None:
    for strategy in ("chain2", "via-audited"):
        options = {**LOSSLESS[strategy], "mask": mask}
        result = generate(pair_of("gemma2", drafter), prompt_ids(), max_new_tokens=N, **options)
        assert result.token_ids == reference("gemma2", prompt_ids())
        assert result.stats.slim_calls > 0


@pytest.mark.parametrize("gamma", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("strategy", ["sd", "chain", "chain2", "via-audited"])
def test_any_gamma(strategy: str, gamma: int) -> None:
    for drafter in ("lookup", "model"):
        options = {**LOSSLESS[strategy], "gamma": gamma}
        result = generate(pair_of("gemma3", drafter, noise=0.05), prompt_ids(), max_new_tokens=N, **options)
        assert result.token_ids == reference("gemma3", prompt_ids())


@pytest.mark.parametrize("text", ["h", "hello w", "hello wo", TEXT * 3])
@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_prompts_shorter_and_longer_than_the_window(family: str, text: str) -> None:
    ids = prompt_ids(text)
    for drafter in ("lookup", "self"):
        for strategy in ("sd", "chain2"):
            result = generate(pair_of(family, drafter), ids, max_new_tokens=N, **LOSSLESS[strategy])
            assert result.token_ids == reference(family, ids)
            assert result.prompt_tokens == len(ids)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_both_attention_kernels(kernel: str) -> None:
    import viasd

    pair = viasd.make_pair(model_of("mistral"), tokenizer(), drafter="self", kernel=kernel)
    assert generate(pair, prompt_ids(), max_new_tokens=N, **LOSSLESS["sd"]).token_ids == reference(
        "mistral", prompt_ids()
    )


def test_a_long_prompt_is_prefilled_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("viasd.runtime.target.PREFILL_CHUNK", 7)
    for strategy in ("sd", "chain"):
        result = generate(pair_of("gemma2", "self"), prompt_ids(), max_new_tokens=N, **LOSSLESS[strategy])
        assert result.token_ids == reference("gemma2", prompt_ids())


@pytest.mark.parametrize("strategy", LOSSLESS)
def test_a_repetition_penalty(strategy: str) -> None:
    for family, drafter in (("llama", "lookup"), ("gemma2", "model"), ("llama", "self")):
        expected = hf_greedy(model_of(family), prompt_ids(), 30, repetition_penalty=1.3)
        options = {**LOSSLESS[strategy], "repetition_penalty": 1.3, "max_new_tokens": 30}
        assert generate(pair_of(family, drafter), prompt_ids(), **options).token_ids == expected
        assert expected != reference(family, prompt_ids(), 30)


# --- ends -------------------------------------------------------------------------------------------------------------

ENDING = ("plain", "sd", "chain2", "via0", "via-audited")


@pytest.mark.parametrize("strategy", ENDING)
@pytest.mark.parametrize("drafter", ["same", "lookup"])
def test_no_more_tokens_than_asked_for(strategy: str, drafter: str) -> None:
    for n in range(1, 9):
        result = generate(pair_of("llama", drafter), prompt_ids(), max_new_tokens=n, **LOSSLESS[strategy])
        assert result.token_ids == reference("llama", prompt_ids(), n)


@pytest.mark.parametrize("strategy", ENDING)
def test_nothing_is_run_beyond_the_end_of_the_answer(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[int] = []

    def watched(kv: SequenceKV, layer: int, start: int, tokens: int) -> None:
        ends.append(start + tokens)

    watch_writes(monkeypatch, watched)
    for n in range(1, 9):
        generate(pair_of("llama", "same"), prompt_ids(), max_new_tokens=n, **LOSSLESS[strategy])
        assert max(ends) <= len(prompt_ids()) + n
        ends.clear()


@pytest.mark.parametrize("strategy", ENDING)
@pytest.mark.parametrize("drafter", ["same", "lookup"])
def test_each_token_in_turn_declared_the_end(strategy: str, drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_of("llama", drafter)
    whole = reference("llama", prompt_ids(), 20)
    for token in dict.fromkeys(whole):
        monkeypatch.setitem(vars(pair), "eos_ids", frozenset({token}))
        options = {**LOSSLESS[strategy], "max_new_tokens": 20, "ignore_eos": False}
        result = generate(pair, prompt_ids(), **options)
        assert result.token_ids == whole[: whole.index(token) + 1]
        assert result.finish_reason == "eos"
        ignored = generate(pair, prompt_ids(), **{**options, "ignore_eos": True})
        assert (ignored.token_ids, ignored.finish_reason) == (whole, "length")


@pytest.mark.parametrize("strategy", ENDING)
def test_a_stop_string_may_end_anywhere(strategy: str) -> None:
    pair = pair_of("llama", "same")
    options = {**LOSSLESS[strategy], "max_new_tokens": 20}
    whole = generate(pair, prompt_ids(), **options)
    text = whole.text
    for start in range(len(text) - 1):
        stop = text[start : start + 2]
        if "\ufffd" in stop or text.find(stop) != start:
            continue
        result = generate(pair, prompt_ids(), stop=stop, **options)
        assert result.text == text[:start]
        assert result.finish_reason == "stop"
        assert result.token_ids == whole.token_ids[: len(result.token_ids)]
        assert stop in tokenizer().decode([*prompt_ids(), *result.token_ids])
        assert stop not in tokenizer().decode(result.token_ids[:-1])


# --- a drafter that is always right -----------------------------------------------------------------------------------

COMBINATIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 0.8, "min_p": 0.02},
    {"temperature": 0.8, "repetition_penalty": 1.3},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1},
]


@pytest.mark.parametrize("sampling", COMBINATIONS, ids=lambda o: "-".join(o))
def test_a_drafter_that_is_the_target_is_accepted_for_500_tokens(sampling: dict[str, Any]) -> None:
    pair = pair_of("llama", "same", num_hidden_layers=3, max_position_embeddings=600)
    result = generate(pair, prompt_ids(), strategy="sd", draft_length="fixed", max_new_tokens=500, **sampling)
    stats = result.stats
    assert (stats.accepted, stats.kept, stats.gated) == (stats.drafted,) * 3
    assert stats.rounds == 84  # 83 blocks of 5 and a bonus, and one of what is left
    assert stats.by_tier == {"drafter": 416, "slim": 0, "full": 84}


def test_a_slim_verifier_that_skips_nothing_is_accepted_too() -> None:
    pair = pair_of("llama", "same", num_hidden_layers=3, max_position_embeddings=600)
    options = {**LOSSLESS["chain"], "mask": "even:0", "temperature": 0.8, "max_new_tokens": 500}
    stats = generate(pair, prompt_ids(), **options).stats
    assert stats.accepted == stats.kept == stats.drafted
    assert stats.emitted == 500
    assert stats.rounds == -(-500 // 7)  # five drafted, one bonus of q', one of q


def test_two_hundred_prompts_do_not_wear_out_the_pair() -> None:
    pair = pair_of("gemma2", "same", num_hidden_layers=3)
    rng = random.Random(0)

    def caches() -> int:
        gc.collect()
        return sum(type(o) is SequenceKV for o in gc.get_objects())

    before = caches()
    for i in range(200):
        ids = [rng.randrange(3, 260) for _ in range(rng.randrange(1, 20))]
        stats = generate(pair, ids, **LOSSLESS["sd"], max_new_tokens=8, temperature=0.8, seed=i).stats
        assert stats.accepted == stats.drafted
    assert caches() == before


# --- what is fed ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_position_is_run_twice_without_need(drafter: str) -> None:
    pair, ids = pair_of("llama", drafter, noise=0.05), prompt_ids()
    for length in (1, 4):
        long = ids * length
        sd = generate(pair, long, **LOSSLESS["sd"], max_new_tokens=N).stats
        # A round runs the last committed token and the block, nothing else.
        assert sd.full_tokens_fed == len(long) - 1 + sd.rounds + sd.drafted
        chain = generate(pair, long, max_new_tokens=N, **LOSSLESS["chain"]).stats
        assert chain.full_tokens_fed <= len(long) - 1 + chain.rounds * (5 + 2)
        assert chain.slim_tokens_fed == chain.slim_calls + chain.drafted
        for stats in (sd, chain):
            first = len(long) if drafter == "model" else 0
            assert stats.drafter_tokens_fed <= first + 2 * stats.rounds + stats.drafted


def test_via_mode_feeds_the_full_verifier_each_position_once() -> None:
    options = {"strategy": "cascade", "mode": "via", "tiers": "3", "mask": "even:0.25", "gate": "ratio", "audit": 0.0}
    stats = generate(pair_of("llama", "model", noise=0.05), prompt_ids(), max_new_tokens=100, **options).stats
    assert stats.unseen > 0
    assert stats.full_tokens_fed <= len(prompt_ids()) - 1 + stats.emitted + 6 * stats.full_calls
    assert stats.slim_tokens_fed <= stats.emitted + 6 * stats.slim_calls


@pytest.mark.parametrize("strategy", [*LOSSLESS, "auto"])
def test_two_identical_calls_behave_identically(strategy: str) -> None:
    pair = pair_of("llama", "model")
    options = LOSSLESS.get(strategy, {"strategy": "auto"})
    for temperature in (0.0, 1.0):
        one, two = (
            generate(pair, prompt_ids(), max_new_tokens=20, temperature=temperature, **options) for _ in range(2)
        )
        assert one.token_ids == two.token_ids
        assert one.tiers == two.tiers
        times = {"seconds", "tokens_per_second", "seconds_by_tier"}
        assert {k: v for k, v in one.stats.as_json().items() if k not in times} == {
            k: v for k, v in two.stats.as_json().items() if k not in times
        }


def test_inference_leaves_the_callers_grad_mode_alone() -> None:
    from viasd import stream

    assert torch.is_grad_enabled()
    events = stream(pair_of("llama"), prompt_ids(), mask=None, max_new_tokens=4)
    next(events)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    events.close()


@pytest.mark.parametrize("drafter", ["lookup", "model", "same", "self"])
def test_blocks_are_as_long_as_they_pay_and_the_text_is_the_same(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt_ids("one two three one two three one two three one two")
    expected = hf_greedy(model_of("llama"), ids, N)
    stats = {}
    for name, full in (("free", {1: 1.0, 6: 1.0}), ("usual", {1: 1.0, 2: 1.25, 6: 1.4}), ("dear", {1: 1.0, 6: 7.0})):
        table = CostTable(128, full, {}, {}, 0.0 if drafter == "lookup" else 0.01)
        monkeypatch.setattr("viasd.runtime.assembly.cost_table", lambda *_, table=table: table)
        result = generate(pair_of("llama", drafter), ids, max_new_tokens=N, strategy="sd")
        assert result.token_ids == expected
        stats[name] = result.stats
    fixed = generate(pair_of("llama", drafter), ids, max_new_tokens=N, **LOSSLESS["sd"]).stats
    assert stats["dear"].drafted <= N // 24 + 1  # now and then one token, to see whether it pays by now
    assert stats["dear"].drafted < stats["free"].drafted <= fixed.drafted + 5
    assert stats["usual"].full_calls <= N


def test_a_draft_that_is_always_right_is_long_and_one_that_never_is_is_soon_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = CostTable(128, {1: 1.0, 2: 1.25, 6: 1.4}, {}, {}, 0.05)
    monkeypatch.setattr("viasd.runtime.assembly.cost_table", lambda *_: table)
    right = generate(pair_of("llama", "same"), prompt_ids(), max_new_tokens=100, strategy="sd").stats
    assert right.full_calls < 22
    stranger = viasd.make_pair(model_of("llama"), tokenizer(), drafter=tiny_model("llama", seed=9))
    wrong = generate(stranger, prompt_ids(), max_new_tokens=100, strategy="sd").stats
    assert wrong.kept <= 2
    assert 0 < wrong.drafted < 20
