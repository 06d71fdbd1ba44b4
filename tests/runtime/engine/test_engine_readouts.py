"""Confident readouts in the batch engine: each request has its own, and reads out as it would alone."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from engines import alone, same, told, watched
from tiny import pair_of, prompt_ids, tokenizer

import viasd
import viasd.runtime.target as target_module
from viasd import Engine
from viasd.kernels import build
from viasd.testing import perturbed, tiny_model

MASK = "even:0.25"
ANY: dict[str, Any] = {"readout": "trough", "backtrack_layers": -1}
CASCADE: dict[str, Any] = {"strategy": "cascade", "tiers": "3"}
CHAIN = {**CASCADE, "mode": "lossless"}
# Sequences of one pass with readouts of every kind, and without.
KINDS: list[dict[str, Any]] = [
    {"strategy": "plain", **ANY},
    {"strategy": "plain"},
    {"strategy": "sd", **ANY, "readout_p": 0.5},
    {**CHAIN, "slim_rounds": 2, **ANY},
    {**CHAIN, **ANY, "readout_tier": "both", "backtrack_layers": 5},
    {**CHAIN, "readout": "trough-m1", "readout_tier": "slim", "backtrack_layers": 2},
    {**CHAIN},
    {"strategy": "sd", "readout": "last-m2", "readout_p": 0.7},
    {**CASCADE, "mode": "via", "gate": "ratio", **ANY, "readout": "trough-m1", "readout_tier": "both"},
    {"strategy": "slim", **ANY, "readout_tier": "slim"},
    {"strategy": "self-sd", **ANY},
    {"strategy": "plain", "readout": "trough", "readout_p": 0.0},
]


def requests(n: int, **options: Any) -> list[dict[str, Any]]:
    return [
        {
            "prompt": prompt_ids(f"{'once upon a time ' * (i % 3)}number {i}"),
            "seed": 40 + i,
            "max_new_tokens": 12 + 5 * (i % 4),
            **KINDS[i % len(KINDS)],
            **options,
        }
        for i in range(n)
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_every_request_reads_out_as_it_does_alone(family: str, temperature: float) -> None:
    pair = pair_of(family, "model", noise=0.05)
    todo = requests(len(KINDS), temperature=temperature, ignore_eos=True)
    engine = Engine(pair, mask=MASK, concurrency=7, prompt_budget=20, chunk=9)
    numbers = [engine.add(**request) for request in todo]
    events = list(engine.stream())
    texts = told(events)
    layers: dict[int, list[int | None]] = {}
    for event in events:
        assert len(event.selected_layers) in (0, len(event.token_ids))
        layers.setdefault(event.request, []).extend(event.selected_layers)
    for number, request in zip(numbers, todo, strict=True):
        result = engine.results[number]
        assert same(result, alone(pair, request, MASK)), request
        assert texts[number] == (result.text, result.token_ids)
        assert layers[number] == result.selected_layers
    moved = [engine.results[number].stats.readout.moved for number in numbers]
    assert sum(count > 0 for count in moved) >= 6  # else this would say little


def test_every_line_of_the_log_names_its_request(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(pair_of("llama", "lookup"), mask=None)
    for i, name in enumerate((None, "mine", None)):
        prompt, options = prompt_ids(f"prompt {i}"), {"strategy": "plain", "ignore_eos": True, **ANY}
        engine.add(prompt, name=name, max_new_tokens=6 + 3 * i, readout_log=3, **options)
    with caplog.at_level(logging.INFO, logger="viasd.readout"):
        for _ in engine.stream():
            pass
    told = [record.getMessage().partition(": readout of the full verifier: step ") for record in caplog.records]
    assert [(name, rest.split(",")[0]) for name, _, rest in told if name == "mine"] == [("mine", n) for n in "369"]
    assert sorted(name for name, _, _ in told) == ["mine"] * 3 + ["request 0"] * 2 + ["request 2"] * 4


def test_the_head_is_read_for_all_sequences_together(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_of("llama", "lookup")
    engine = Engine(pair, mask=None)
    for i in range(6):
        engine.add(prompt_ids(f"prompt {i}"), strategy="plain", ignore_eos=True, max_new_tokens=4, **(ANY if i else {}))
    engine.step()  # the prompts
    calls: list[int] = []
    own = type(pair.target).readout

    def readout(self: Any, hidden: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        calls.append(hidden.shape[1])
        return own(self, hidden, *rest, **more)

    monkeypatch.setattr(type(pair.target), "readout", readout)
    with watched(monkeypatch) as seen:
        engine.step()
    assert seen.full == [(6, 0)]
    assert calls[0] == 6 + 5  # the last layer of all and the one before it of those that want it
    assert len(calls) <= 7  # a call for each depth at most, not for each sequence
    assert calls[1:] == sorted(calls[1:], reverse=True)


def test_a_readout_that_fails_for_one_sequence_is_run_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_of("llama", "lookup")
    own, spoilt = target_module.read_together, 43

    def failing(model: Any, unread: Any, **more: Any) -> Any:
        if any(part.readout is not None and part.readout._coins._seed == spoilt for part in unread):
            raise RuntimeError("no entropy today")
        return own(model, unread, **more)

    todo = [
        {"prompt": prompt_ids(f"x{i}"), "strategy": "plain", "seed": 40 + i, "max_new_tokens": 6, **ANY}
        for i in range(5)
    ]
    expected = [alone(pair, request, None) for request in todo]
    monkeypatch.setattr(target_module, "read_together", failing)
    engine = Engine(pair, mask=None)
    numbers = [engine.add(**request) for request in todo]
    for _ in engine.stream():
        pass
    for i, (number, want) in enumerate(zip(numbers, expected, strict=True)):
        result = engine.results[number]
        if i == 3:
            assert result.error == "RuntimeError: no entropy today"
        else:
            assert same(result, want)


@pytest.mark.skipif(build.why_missing() is not None, reason=f"no kernels: {build.why_missing()}")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_with_the_cpu_kernels_not_a_bit_differs(dtype: torch.dtype) -> None:
    # Near-ties are everywhere in such flat rows, of tokens as of entropies: a bit of difference would show.
    model = tiny_model("qwen3", dtype=dtype, scale=0.4)
    pair = viasd.make_pair(model, tokenizer(), drafter=perturbed(model, 0.05), layers="native")
    assert pair.target.form == "native"
    todo = [
        {**request, "prompt": [5 + (7 * i + k) % 250 for k in range((5, 33, 64, 120)[i % 4])], "max_new_tokens": 10}
        for i, request in enumerate(requests(3 * len(KINDS), ignore_eos=True))
    ]
    engine = Engine(pair, mask=MASK, concurrency=len(todo))  # more rows than one call of the kernels takes
    numbers = [engine.add(**request) for request in todo]
    for _ in engine.stream():
        pass
    for number, request in zip(numbers, todo, strict=True):
        assert same(engine.results[number], alone(pair, request, MASK)), request


def test_a_lossless_answer_in_a_batch_is_that_of_plain_decoding() -> None:
    pair = pair_of("llama", "model", noise=0.05)
    request = {"prompt": prompt_ids(), "max_new_tokens": 24, "ignore_eos": True, **ANY}
    engine = Engine(pair, mask=MASK)
    kinds: list[dict[str, Any]] = [{"strategy": "plain"}, {"strategy": "sd"}, CHAIN, {**CHAIN, "readout_tier": "both"}]
    numbers = [engine.add(**request, **kind) for kind in kinds]
    for _ in engine.stream():
        pass
    expected, *others = (engine.results[number] for number in numbers)
    assert len(set(expected.selected_layers)) > 1
    assert expected.token_ids == viasd.generate(pair, mask=None, strategy="plain", **request).token_ids
    for result in others:
        assert (result.token_ids, result.selected_layers) == (expected.token_ids, expected.selected_layers)
