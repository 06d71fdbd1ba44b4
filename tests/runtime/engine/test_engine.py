from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from engines import alone, same, told, watched
from tiny import EVERY, hf_greedy, model_of, pair_of, prompt_ids, tokenizer

import viasd
from viasd import Engine
from viasd.errors import CapacityError, ContextLengthError, OptionError
from viasd.kernels import build
from viasd.runtime.engine import AdmitAll
from viasd.runtime.engine.memory import bytes_per_position, worst_bytes
from viasd.runtime.target import TieredTarget
from viasd.testing import perturbed, tiny_model

MASK = "even:0.25"
LONG = prompt_ids("a long prompt that goes on and on; " * 9)  # 315 tokens


def requests(n: int, **options: Any) -> list[dict[str, Any]]:
    """Requests of every strategy in turn, of different prompts and lengths."""
    kinds = [{k: v for k, v in kind.items() if k != "mask"} for kind in EVERY.values()]
    return [
        {
            "prompt": prompt_ids(f"{'once upon a time ' * (i % 3)}number {i}"),
            "seed": 100 + i,
            "max_new_tokens": 9 + 7 * (i % 5),
            **kinds[i % len(kinds)],
            **options,
        }
        for i in range(n)
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("drafter", ["lookup", "model", "self"])
def test_answers_are_those_of_requests_alone_whenever_they_join(drafter: str, temperature: float) -> None:
    pair = pair_of("llama", drafter)
    todo = requests(2 * len(EVERY), temperature=temperature)
    engine = Engine(pair, mask=MASK, concurrency=5, prompt_budget=20, chunk=9)
    numbers: list[int] = []
    events: list[Any] = []
    while len(numbers) < len(todo) or engine.busy:
        joining = 3 if len(numbers) % 4 == 0 else 1  # they join one, or three, in any round
        for request in todo[len(numbers) : len(numbers) + joining]:
            numbers.append(engine.add(**request))
        events += engine.step()
    texts = told(events)
    for number, request in zip(numbers, todo, strict=True):
        result = engine.results[number]
        assert same(result, alone(pair, request, MASK)), request
        assert texts[number] == (result.text, result.token_ids)
    assert engine.budget.reserved == 0


@pytest.mark.parametrize("family", ["gemma2", "qwen2", "phi3"])
def test_every_family_across_a_sliding_window(family: str) -> None:
    pair = pair_of(family, "model")
    todo = requests(len(EVERY), max_new_tokens=30, ignore_eos=True)
    engine = Engine(pair, mask=MASK)
    numbers = [engine.add(**request) for request in todo]
    for _ in engine.stream():
        pass
    for number, request in zip(numbers, todo, strict=True):
        assert same(engine.results[number], alone(pair, request, MASK))
    plain = engine.results[numbers[0]]
    assert plain.token_ids == hf_greedy(model_of(family), todo[0]["prompt"], 30)


BASELINES = [
    {"strategy": "lossy", "alpha": 0.4},
    {"strategy": "chow", "alpha": 0.3},
    {"strategy": "opt", "alpha": 0.3},
    {"strategy": "token-v2", "alpha": 0.3},
    {"strategy": "vertical"},
    {"strategy": "horizontal"},
    {"strategy": "self-sd"},
    {"strategy": "slim"},
]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_literatures_strategies_in_a_batch(temperature: float) -> None:
    pair = pair_of("llama", "model")
    todo = [
        {"prompt": prompt_ids(f"text {i}"), "seed": i, "temperature": temperature, "max_new_tokens": 20, **kind}
        for i, kind in enumerate(BASELINES)
    ]
    engine = Engine(pair, mask=MASK)
    numbers = [engine.add(**request) for request in todo]
    for _ in engine.stream():
        pass
    for number, request in zip(numbers, todo, strict=True):
        assert same(engine.results[number], alone(pair, request, MASK)), request


def test_passes_are_packed_and_the_full_one_comes_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_of("llama", "model")
    kinds = [{"strategy": "plain"}, {"strategy": "sd", "draft_length": "fixed"}, dict(EVERY["chain2"]), EVERY["via0"]]
    engine = Engine(pair, mask=MASK)
    for i, kind in enumerate(kinds * 2):
        options = {k: v for k, v in kind.items() if k not in ("mask", "gamma")}
        engine.add(prompt_ids(f"prompt {i}"), ignore_eos=True, max_new_tokens=12, gamma=3, **options)
    engine.step()  # the prompts
    with watched(monkeypatch) as seen:
        engine.step()
    assert len(seen.full) == 1
    assert seen.full[0][0] == 8  # the guard that knows nothing yet asks for the full verifier too
    assert seen.draft[0] == 6
    assert max(seen.slim) == 4


def test_a_prompt_rides_along_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_of("llama", "lookup", max_position_embeddings=1024)
    engine = Engine(pair, mask=None, chunk=32, prompt_budget=64)
    first = engine.add(prompt_ids("short"), strategy="plain", ignore_eos=True, max_new_tokens=30)
    engine.step()
    with watched(monkeypatch) as seen:
        others = [engine.add(LONG, strategy="plain", ignore_eos=True, max_new_tokens=4) for _ in range(3)]
        spoken = 0
        while first not in engine.results:
            spoken += sum(event.request == first and bool(event.token_ids) for event in engine.step())
    assert spoken == 30  # a token in every step, whatever the others' prompts
    assert all(sequences >= 1 for sequences, _ in seen.full)
    assert max(tokens for _, tokens in seen.full) == 64
    for _ in engine.stream():
        pass
    expected = alone(pair, {"prompt": LONG, "strategy": "plain", "ignore_eos": True, "max_new_tokens": 4}, None)
    assert [engine.results[n].token_ids for n in others] == [expected.token_ids] * 3


def test_a_drafters_prompt_goes_in_pieces_too(monkeypatch: pytest.MonkeyPatch) -> None:
    import viasd.runtime.drafters.line as drafters

    pair = pair_of("llama", "model")
    request = {"prompt": LONG, "strategy": "sd", "draft_length": "fixed", "temperature": 0.8, "seed": 4}
    monkeypatch.setattr(drafters, "prefill_chunk", lambda device: 40)
    expected = alone(pair, request, None)
    longest: list[int] = []
    through = drafters.through

    def watch(model: Any, route: Any, lines: Any) -> Any:
        longest.append(max(len(line.tokens) for line in lines))
        return through(model, route, lines)

    monkeypatch.setattr(drafters, "through", watch)
    engine = Engine(pair, mask=None)
    number = engine.add(**request)
    for _ in engine.stream():
        pass
    assert max(longest) == 40
    assert same(engine.results[number], expected)


def test_eos_stops_and_limits_are_each_requests_own() -> None:
    pair = pair_of("llama", "model")
    plain = alone(pair, {"prompt": prompt_ids(), "strategy": "plain", "ignore_eos": True, "max_new_tokens": 40}, None)
    stop = plain.text[40:43]
    ends = [{"stop": stop}, {"stop": ()}, {"max_new_tokens": 7}, {"max_new_tokens": 1}]
    todo = [
        {"prompt": prompt_ids(), "ignore_eos": True, "max_new_tokens": 40, "seed": 3, "strategy": strategy, **end}
        for end in ends
        for strategy in ("plain", "sd", "cascade")
    ]
    engine = Engine(pair, mask=MASK)
    numbers = [engine.add(**request) for request in todo]
    for _ in engine.stream():
        pass
    for number, request in zip(numbers, todo, strict=True):
        assert same(engine.results[number], alone(pair, request, MASK))
    assert {engine.results[n].finish_reason for n in numbers} == {"stop", "length"}
    ended = viasd.make_pair(model_of("llama"), tokenizer())
    object.__setattr__(ended, "eos_ids", frozenset({plain.token_ids[6]}))
    engine = Engine(ended, mask=None)
    number = engine.add(prompt_ids(), strategy="plain")
    for _ in engine.stream():
        pass
    assert engine.results[number].finish_reason == "eos"
    assert len(engine.results[number].token_ids) <= 7


class Spell:
    """A stateful processor: allows one letter after the other."""

    def __init__(self, word: str) -> None:
        self._ids = prompt_ids(word)
        self.calls = 0

    def __call__(self, ids: Any, logits: torch.Tensor) -> torch.Tensor:
        only = torch.full_like(logits, -torch.inf)
        only[:, self._ids[self.calls % len(self._ids)]] = 0
        self.calls += 1
        return only


class Failing:
    """A processor that raises at some call."""

    def __init__(self, after: int, error: type[Exception] = ValueError) -> None:
        self._left, self._error = after, error

    def __call__(self, ids: Any, logits: torch.Tensor) -> torch.Tensor:
        self._left -= 1
        if self._left < 0:
            raise self._error("no more")
        return logits


def test_processors_are_each_requests_own() -> None:
    pair = pair_of("llama", "model")
    spells = {word: Spell(word) for word in ("abc", "xyz")}
    engine = Engine(pair, mask=None)
    numbers = {
        word: engine.add(prompt_ids(), processors=[spell], max_new_tokens=9, strategy=strategy, ignore_eos=True)
        for (word, spell), strategy in zip(spells.items(), ("sd", "plain"), strict=True)
    }
    for _ in engine.stream():
        pass
    for word, number in numbers.items():
        assert engine.results[number].text == word * 3
        assert spells[word].calls == 9  # every committed token once


@pytest.mark.parametrize("after", [0, 3, 10])
@pytest.mark.parametrize("strategy", ["plain", "sd", "cascade"])
def test_an_error_in_one_request_is_that_requests_alone(strategy: str, after: int) -> None:
    pair = pair_of("llama", "model")
    todo = requests(6)
    engine = Engine(pair, mask=MASK)
    numbers = [engine.add(**request) for request in todo]
    bad = engine.add(prompt_ids(), processors=[Failing(after)], strategy=strategy, max_new_tokens=60, ignore_eos=True)
    for _ in engine.stream():
        pass
    failed = engine.results[bad]
    assert (failed.finish_reason, failed.error) == ("error", "ValueError: no more")
    assert "in __call__" in engine.tracebacks[bad]
    assert failed.stats.check() == []
    assert failed.stats.emitted == len(failed.token_ids)
    if strategy == "plain":
        assert len(failed.token_ids) == after  # rows ahead are shown to copies
    for number, request in zip(numbers, todo, strict=True):
        assert same(engine.results[number], alone(pair, request, MASK))
    assert engine.budget.reserved == 0


def test_without_isolation_an_exception_leaves_the_engine_as_it_is() -> None:
    pair = pair_of("llama", "model")
    engine = Engine(pair, mask=MASK, isolated=False)
    numbers = [engine.add(**request) for request in requests(3, ignore_eos=True)]
    numbers.append(engine.add(prompt_ids(), processors=[Failing(4)], max_new_tokens=60, ignore_eos=True))
    with pytest.raises(ValueError, match="no more") as raised:
        for _ in engine.stream():
            pass
    assert raised.traceback[-1].name == "__call__"
    assert (engine.busy, engine.budget.reserved) == (True, 0)  # it has yet to tell of these ends
    assert {event.request for event in engine.step()} == set(numbers)
    assert {engine.results[n].finish_reason for n in numbers} <= {"interrupted", "length"}


def test_a_pass_that_fails_for_one_sequence_is_run_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_of("llama", "model")
    todo = requests(8)
    engine = Engine(pair, mask=MASK)
    numbers = [engine.add(**request) for request in todo]
    poisoned = engine.add(prompt_ids("poison"), strategy="plain", ignore_eos=True, max_new_tokens=20)
    engine.step()
    cache = weakref.ref(next(r.answer.target.kv for r in engine._running if r.number == poisoned))
    original = type(pair.target).readout

    def readout(self: Any, hidden: Any, *rest: Any, **options: Any) -> Any:
        if readout_of.get("poison") and any(segment.kv is cache() for segment in readout_of["step"].segments):
            raise torch.OutOfMemoryError("out of memory")
        return original(self, hidden, *rest, **options)

    readout_of: dict[str, Any] = {}
    step = type(pair.target).step

    def remembered(self: Any, segments: Any) -> Any:
        readout_of["step"] = step(self, segments)
        return readout_of["step"]

    monkeypatch.setattr(type(pair.target), "step", remembered)
    monkeypatch.setattr(type(pair.target), "readout", readout)
    readout_of["poison"] = True
    gc.disable()
    try:
        while poisoned not in engine.results:
            engine.step()
        readout_of.clear()
        assert cache() is None  # what went wrong holds no memory
    finally:
        gc.enable()
    for _ in engine.stream():
        pass
    monkeypatch.undo()
    assert engine.results[poisoned].finish_reason == "error"
    assert "out of memory on cpu" in str(engine.results[poisoned].error)
    for number, request in zip(numbers, todo, strict=True):
        assert same(engine.results[number], alone(pair, request, MASK))


def test_cancelling_frees_memory_at_once() -> None:
    pair = pair_of("llama", "model")
    engine = Engine(pair, mask=MASK)
    numbers = [engine.add(**request, ignore_eos=True) for request in requests(6)]
    for _ in range(3):
        engine.step()
    caches = {
        r.number: [weakref.ref(r.answer.target.kv), weakref.ref(r.answer.drafter.kv)]  # type: ignore[union-attr]
        for r in engine._running
        if r.answer.drafter is not None
    }
    assert len(caches) >= 4
    reserved = engine.budget.reserved
    gc.disable()
    try:
        for number, held in caches.items():
            result = engine.cancel(number)
            assert result.finish_reason == "interrupted"
            assert all(ref() is None for ref in held)
    finally:
        gc.enable()
    assert engine.budget.reserved < reserved
    events = engine.step()
    assert {e.request for e in events if e.result is not None} >= set(caches)
    for _ in engine.stream():
        pass
    for number in numbers:
        result, whole = engine.results[number], alone(pair, {**requests(6)[number], "ignore_eos": True}, MASK)
        assert whole.token_ids[: len(result.token_ids)] == result.token_ids
        assert engine.cancel(number) is result  # it stays as it is
    with pytest.raises(OptionError, match="there is no request 99"):
        engine.cancel(99)


def test_a_request_that_waits_can_be_cancelled() -> None:
    engine = Engine(pair_of("llama"), mask=None, concurrency=1)
    first, second = (engine.add(prompt_ids(), max_new_tokens=3, ignore_eos=True) for _ in range(2))
    engine.step()
    assert (engine.running, engine.waiting) == ([first], [second])
    result = engine.cancel(second)
    assert (result.finish_reason, result.token_ids) == ("interrupted", [])
    assert {e.request for e in engine.stream() if e.result is not None} == {first, second}


def test_memory_is_promised_before_a_request_runs() -> None:
    pair = pair_of("llama", "model")
    probe = Engine(pair, mask=None)
    probe.add(prompt_ids(), max_new_tokens=30, strategy="sd")
    each = probe._waiting[0].needed
    one = bytes_per_position(pair.target) * 256
    assert 2 * one <= each <= 2 * one * 1.1  # target and drafter, and a buffer that grows
    engine = Engine(pair, mask=None, kv_budget=2 * each)
    numbers = [engine.add(prompt_ids(f"{i}"), max_new_tokens=30, strategy="sd", ignore_eos=True) for i in range(5)]
    order: list[int] = []
    while engine.busy:
        order += [e.request for e in engine.step() if e.result is not None]
        assert len(engine.running) <= 2
        held = sum(r.answer.target.kv.nbytes() + r.answer.drafter.kv.nbytes() for r in engine._running)  # type: ignore[union-attr]
        assert held <= engine.budget.reserved <= engine.budget.total
    assert sorted(order) == numbers
    assert engine.budget.reserved == 0


def test_a_cache_never_needs_more_than_was_promised() -> None:
    pair = pair_of("llama", "self", max_position_embeddings=2048)
    engine = Engine(pair, mask=MASK)
    for room in (100, 180, 300):
        number = engine.add(prompt_ids("x" * 80), max_new_tokens=room, ignore_eos=True, strategy="cascade", gamma=9)
        needed = engine._waiting[0].needed
        held = 0
        while engine.busy:
            held = max([held, *(r.answer.target.kv.nbytes() for r in engine._running)])
            engine.step()
        assert len(engine.results[number].token_ids) == room
        assert 0.4 * needed < held <= needed


def test_what_could_never_fit_is_refused_with_numbers() -> None:
    engine = Engine(pair_of("llama"), mask=None, kv_budget=300_000)
    engine.add(prompt_ids(), max_new_tokens=20)
    with pytest.raises(
        CapacityError, match=r"can need .* MB for the keys and values of \d+ positions, but kv_budget is"
    ):
        engine.add(LONG, max_new_tokens=150)


def test_nobody_overtakes() -> None:
    pair = pair_of("llama")
    small, large = ({"prompt": prompt_ids(), "max_new_tokens": n, "ignore_eos": True} for n in (5, 400))
    probe = Engine(pair, mask=None)
    probe.add(**large)
    engine = Engine(pair, mask=None, kv_budget=worst_bytes(probe._waiting[0].answer))
    first, second, third = engine.add(**small), engine.add(**large), engine.add(**small)
    ended = [e.request for e in engine.stream() if e.result is not None]
    assert ended == [first, second, third]


def test_ctrl_c_keeps_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_of("llama", "model")
    engine = Engine(pair, mask=MASK)
    numbers = [engine.add(**request) for request in requests(8, ignore_eos=True)]
    for _ in range(4):
        engine.step()
    full = TieredTarget.settle

    def interrupted(self: Any, tokens: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TieredTarget, "settle", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.setattr(TieredTarget, "settle", full)
    assert sorted(engine.results) == numbers
    for number, request in zip(numbers, requests(8, ignore_eos=True), strict=True):
        got = engine.results[number].token_ids
        assert alone(pair, request, MASK).token_ids[: len(got)] == got
    assert engine.budget.reserved == 0


def test_times_are_each_requests_own() -> None:
    pair = pair_of("llama", "model")
    engine = Engine(pair, mask=MASK)
    for request in requests(9, ignore_eos=True, max_new_tokens=20):
        engine.add(**request)
    import time

    started = time.perf_counter()
    for _ in engine.stream():
        pass
    wall = time.perf_counter() - started
    results = engine.results.values()
    assert sum(r.stats.seconds for r in results) < wall
    assert sum(r.stats.seconds for r in results) > 0.5 * wall
    assert all(r.stats.seconds_by_tier["full"] > 0 for r in results)


class Few(AdmitAll):
    """Admits at most so many tokens, and remembers what it hears."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.asked: list[tuple[str, int, int]] = []
        self.heard: list[Any] = []
        self.over: list[int] = []

    def admit(self, blocks: Any, others: int) -> list[int]:
        self.asked.append((blocks[0].admission.verifier, len(blocks), others))
        assert len({block.admission.verifier for block in blocks}) == 1
        return [min(self.most, len(block.admission.tokens)) for block in blocks]

    def judged(self, request: int, answer: Any, verdict: Any) -> None:
        self.heard.append((request, verdict))

    def ended(self, request: int) -> None:
        self.over.append(request)


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_policy_answers_all_blocks_of_a_step_together(most: int) -> None:
    pair = pair_of("llama", "model")
    policy = Few(most)
    engine = Engine(pair, mask=MASK, policy=policy)
    todo = [
        {"prompt": prompt_ids(f"text {i}"), "max_new_tokens": 15, "ignore_eos": True, "gamma": 4, **kind}
        for i, kind in enumerate(
            [{"strategy": "sd", "draft_length": "fixed"}, {"strategy": "cascade", "mode": "lossless", "tiers": "3"}] * 2
        )
    ]
    numbers = [engine.add(**request) for request in todo]
    engine.step()
    engine.step()
    assert policy.asked[0] == ("slim", 2, 2)
    assert policy.asked[1] == ("full", 4 if most else 2, 4)
    assert len(policy.asked) == 2
    for _ in engine.stream():
        pass
    for number, request in zip(numbers, todo, strict=True):
        # At temperature 0 the answer is the target's own whatever is admitted.
        assert engine.results[number].token_ids == alone(pair, request, MASK).token_ids
        assert engine.results[number].stats.check() == []
    assert sorted(policy.over) == numbers
    assert bool(policy.heard) == (most > 0)
    for request, verdict in policy.heard:
        assert 0 <= verdict.kept <= len(verdict.tokens) <= most
        assert verdict.exact
        assert request in numbers


def test_what_a_batch_can_not_do_is_refused_in_a_sentence() -> None:
    engine = Engine(pair_of("llama"), mask=None)
    with pytest.raises(OptionError, match="in a wave of its own, which other sequences can't share"):
        engine.add("x", strategy="adadecode")
    with pytest.raises(OptionError, match="unknown option 'gama'"):
        engine.add("x", gama=3)
    with pytest.raises(OptionError, match="the prompt is empty"):
        engine.add("")
    with pytest.raises(ContextLengthError):
        engine.add([5] * 600)
    with pytest.raises(OptionError, match="concurrency must be at least 1"):
        Engine(pair_of("llama"), mask=None, concurrency=0)
    with pytest.raises(OptionError, match="needs a mask"):
        engine.add("x", strategy="cascade")
    assert not engine.busy


@pytest.mark.skipif(build.why_missing() is not None, reason=f"no kernels: {build.why_missing()}")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_with_the_cpu_kernels_a_batch_says_bit_for_bit_what_each_says_alone(
    dtype: torch.dtype, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Near-ties are everywhere in such flat rows: a bit of difference would show.
    model = tiny_model("qwen3", dtype=dtype, scale=0.4)
    pair = viasd.make_pair(model, tokenizer(), drafter=perturbed(model, 0.05), layers="native")
    assert pair.target.form == "native"
    lengths = (5, 33, 64, 200, 31, 90, 12, 300)
    todo = [
        {**request, "prompt": [5 + (7 * i + k) % 250 for k in range(lengths[i % len(lengths)])], "max_new_tokens": 24}
        for i, request in enumerate(requests(14, temperature=temperature, ignore_eos=True))
    ]
    engine = Engine(pair, mask=MASK)
    numbers = [engine.add(**request) for request in todo]
    for _ in engine.stream():
        pass
    for number, request in zip(numbers, todo, strict=True):
        assert same(engine.results[number], alone(pair, request, MASK)), request
