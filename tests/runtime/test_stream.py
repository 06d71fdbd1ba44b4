from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import EVERY, generate, pair_of, prompt_ids, tokenizer, watch_writes

import viasd

OPTIONS: dict[str, Any] = {"mask": None, "seed": 3, "ignore_eos": True, "max_new_tokens": 24}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("strategy", EVERY)
def test_deltas_and_tokens_add_up_to_the_result(strategy: str, temperature: float) -> None:
    pair, ids = pair_of("llama", "model"), prompt_ids()
    answer = viasd.stream(pair, ids, **{**OPTIONS, "temperature": temperature, **EVERY[strategy]})
    events = list(answer)
    result = answer.result
    assert "".join(e.text for e in events) == result.text
    assert [t for e in events for t in e.token_ids] == result.token_ids
    assert result.text == tokenizer().decode(result.token_ids, skip_special_tokens=True)
    assert len(result.tiers) == len(result.token_ids) == result.stats.emitted == 24
    assert {t: result.tiers.count(t) for t in ("drafter", "slim", "full")} == result.stats.by_tier
    assert result.stats.check() == []
    position = 0
    for event in events:
        position += len(event.token_ids)
        assert event.tier == result.tiers[position - 1]
        assert event.stats is result.stats
    same = viasd.generate(pair, ids, **{**OPTIONS, "temperature": temperature, **EVERY[strategy]})
    assert (same.text, same.token_ids, same.tiers) == (result.text, result.token_ids, result.tiers)


def test_leaving_early_keeps_what_was_made() -> None:
    whole = generate(pair_of("llama"), prompt_ids(), **OPTIONS)
    for wanted in (1, 2, 4):
        answer = viasd.stream(pair_of("llama"), prompt_ids(), **OPTIONS)
        seen = [next(answer) for _ in range(wanted)]
        answer.close()
        result = answer.result
        assert result.finish_reason == "interrupted"
        assert result.token_ids == whole.token_ids[: len(result.token_ids)]
        assert result.text.startswith("".join(e.text for e in seen))
        assert result.stats.check() == []
        assert result.stats.emitted == len(result.token_ids) == len(result.tiers) < 24
        assert list(answer) == []


def test_breaking_out_of_the_loop_and_reading_the_result_ends_the_stream() -> None:
    answer = viasd.stream(pair_of("llama"), prompt_ids(), **OPTIONS)
    for _ in answer:
        break
    assert answer.result.finish_reason == "interrupted"
    assert answer.result is answer.result


def test_the_result_without_iterating_is_the_whole_answer() -> None:
    answer = viasd.stream(pair_of("llama"), prompt_ids(), **OPTIONS)
    assert answer.result.token_ids == generate(pair_of("llama"), prompt_ids(), **OPTIONS).token_ids
    assert answer.result.finish_reason == "length"


def test_an_exception_keeps_what_was_made_and_the_pair_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    for strategy, options in EVERY.items():
        pair = pair_of("llama", "model")
        model = pair.target.model
        state = {k: v.clone() for k, v in model.state_dict().items()}
        implementation = model.config._attn_implementation
        before = generate(pair, prompt_ids(), **{**OPTIONS, **options})
        calls = {"n": 0}

        def failing(*_: Any, calls: Any = calls) -> None:
            calls["n"] += 1
            if calls["n"] == 120:
                raise KeyboardInterrupt

        answer = viasd.stream(pair, prompt_ids(), **{**OPTIONS, **options})
        with monkeypatch.context() as patch:
            watch_writes(patch, failing)
            with pytest.raises(KeyboardInterrupt):
                list(answer)
        assert answer.result.finish_reason == "interrupted", strategy
        assert answer.result.token_ids == before.token_ids[: len(answer.result.token_ids)]
        assert model.config._attn_implementation == implementation
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
        assert generate(pair, prompt_ids(), **{**OPTIONS, **options}).token_ids == before.token_ids


def test_text_and_chat_prompts() -> None:
    pair = pair_of("llama")
    text = generate(pair, "hello", max_new_tokens=4)
    assert text.prompt_tokens == 5
    chat = generate(pair, [{"role": "user", "content": "hello"}], max_new_tokens=4)
    assert chat.prompt_tokens == 7
    assert generate(pair, torch.tensor([prompt_ids("hello")]), max_new_tokens=4).token_ids == text.token_ids


def test_a_result_is_valid_json() -> None:
    import json

    for options in EVERY.values():
        result = generate(pair_of("llama"), prompt_ids(), max_new_tokens=8, **options)
        data = json.loads(json.dumps(result.as_json(), allow_nan=False))
        assert data["token_ids"] == result.token_ids
        assert data["lossless"] == result.lossless
        assert sum(data["stats"]["by_tier"].values()) == data["stats"]["emitted"] == 8


def test_seeds_are_reported_and_repeat_the_answer() -> None:
    pair = pair_of("llama", "model")
    options = {**OPTIONS, "temperature": 1.0, "strategy": "sd"}
    free = viasd.generate(pair, prompt_ids(), **{**options, "seed": None})
    assert viasd.generate(pair, prompt_ids(), **{**options, "seed": free.seed}).token_ids == free.token_ids
    assert viasd.generate(pair, prompt_ids(), **{**options, "seed": free.seed + 1}).token_ids != free.token_ids
