"""Passes of feature drafters, packed: each sequence has what it has alone, and a pass that fails spoils nobody else's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from engines import alone, same, watched
from features import feature_file, feature_pair
from tiny import LOSSLESS, model_of, prompt_ids, tokenizer

import viasd
from viasd.draws import SeededDraws
from viasd.featuremodel import Entries, FeatureModel
from viasd.kernels import build
from viasd.kernels.matrices import MOST_TOKENS
from viasd.probe import load_layered
from viasd.rows import Row
from viasd.runtime.drafters import FeatureDrafter
from viasd.runtime.drafters.stepwise import draft_stepwise
from viasd.runtime.engine import Engine
from viasd.runtime.passes import drive
from viasd.sampling import Sampler, SamplingConfig
from viasd.shortlist import ShortReadout, ShortRows, ShortTable
from viasd.testing import tiny_model

needs_kernels = pytest.mark.skipif(build.why_missing() is not None, reason=f"no kernels: {build.why_missing()}")
KINDS = ("sd", "chain2", "via-audited")


@pytest.fixture(autouse=True)
def cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIASD_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def threads() -> Any:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def ran(model: FeatureModel, lengths: Sequence[int], chosen: Sequence[int]) -> list[torch.Tensor]:
    """Results of some sequences, run together after a beginning of each sequence's own."""
    parts = []
    for index in chosen:
        kv, some = model.new_kv(), torch.Generator().manual_seed(index)
        states = torch.randn(1, index + 1 + lengths[index], 32, generator=some).to(model.model.dtype)
        ids = torch.randint(300, (states.shape[1],), generator=some).tolist()
        model.run(states[:, : index + 1], ids[: index + 1], kv)
        parts.append(Entries(states[:, index + 1 :], ids[index + 1 :], kv))
    before = [part.kv.full_len for part in parts]
    found = model.together(parts)
    assert [part.kv.full_len for part in parts] == before  # a pass that fails later can be run again
    return found


LENGTHS = [1, 3, MOST_TOKENS + 9, MOST_TOKENS, 2, MOST_TOKENS + 9, 1, 1, 20]
ORDERS = ([*range(len(LENGTHS))], [0, 4, 6, 7], [8, 3, 1], [7, 2, 0])


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("depth", [1, 2])
def test_with_the_cpu_kernels_a_sequence_has_the_bits_that_it_has_alone(
    depth: int, dtype: torch.dtype, threads: Any
) -> None:
    model = FeatureModel(feature_file(depth=depth), load_layered(tiny_model("llama", dtype=dtype), layers="native"))
    assert model.form == "native"
    with torch.inference_mode():
        for count in (1, 3):
            threads(count)
            single = [ran(model, LENGTHS, [index])[0] for index in range(len(LENGTHS))]
            for order in ORDERS:
                for index, together in zip(order, ran(model, LENGTHS, order), strict=True):
                    assert torch.equal(together, single[index]), (count, order, index)


def test_without_the_kernels_it_has_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("viasd.kernels.build.load", lambda: pytest.fail("the kernels"))
    monkeypatch.setattr("viasd.kernels.build.why_missing", lambda: "left out")
    model = FeatureModel(feature_file(), load_layered(model_of("llama"), layers="fused"))
    assert "native" not in model.form
    with torch.inference_mode():
        single = [ran(model, LENGTHS, [index])[0] for index in range(len(LENGTHS))]
        for index, together in zip(ORDERS[0], ran(model, LENGTHS, ORDERS[0]), strict=True):
            torch.testing.assert_close(together, single[index], rtol=1e-4, atol=1e-4)


class Elsewhere(torch.Tensor):
    """States on another device than the drafter's, as far as one can have that without one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.cat:
            raise RuntimeError("expected all tensors to be on the same device")
        found = super().__torch_function__(func, types, args, kwargs or {})
        return found.as_subclass(torch.Tensor) if func is torch.Tensor.to else found


def test_states_of_a_target_on_several_devices_are_fetched_before_they_are_packed() -> None:
    model = FeatureModel(feature_file(), load_layered(model_of("llama")))
    states = torch.randn(2, 1, 3, 32, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        single = [model.run(state, [7, 8, 9], model.new_kv()) for state in states]
        far = states[0].as_subclass(Elsewhere)
        packed = model.together([Entries(s, [7, 8, 9], model.new_kv()) for s in (far, states[1])])
    for one, other in zip(packed, single, strict=True):
        assert type(one) is torch.Tensor
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def todo(n: int, kinds: Sequence[str] = KINDS, **options: Any) -> list[dict[str, Any]]:
    return [
        {
            "prompt": prompt_ids(f"{'once upon a time ' * (i % 4)}number {i}"),
            "seed": 100 + i,
            "max_new_tokens": 12 + 5 * (i % 3),
            "ignore_eos": True,
            **{k: v for k, v in LOSSLESS[kinds[i % len(kinds)]].items() if k != "mask"},
            **options,
        }
        for i in range(n)
    ]


def done(engine: Engine, requests: Sequence[dict[str, Any]]) -> list[viasd.Result]:
    numbers = [engine.add(**request) for request in requests]
    for _ in engine.stream():
        pass
    return [engine.results[number] for number in numbers]


@needs_kernels
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("lookup_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_the_cpu_kernels_an_engine_says_bit_for_bit_what_each_says_alone(
    dtype: torch.dtype, lookup_first: bool, temperature: float
) -> None:
    # Near-ties are everywhere in such flat rows: a bit of difference would show.
    model = tiny_model("llama", dtype=dtype, scale=0.4)
    pair = viasd.make_pair(model, tokenizer(), drafter=feature_file(), lookup_first=lookup_first, layers="native")
    requests = todo(12, temperature=temperature)
    for request, result in zip(requests, done(Engine(pair, mask="even:0.25"), requests), strict=True):
        assert result.stats.drafted > 0
        assert same(result, alone(pair, request, "even:0.25")), request


@pytest.mark.parametrize("lookup_first", [False, True])
def test_one_pass_and_one_readout_carry_all_requests(lookup_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = feature_pair(lookup_first=lookup_first)
    engine = Engine(pair, mask=None)
    for i in range(6):
        # Nothing in these occurs twice, so there is nothing to look up.
        prompt = [5 + 40 * i + j for j in range(8)]
        engine.add(prompt, strategy="sd", draft_length="fixed", gamma=3, ignore_eos=True, max_new_tokens=9)
    engine.step()  # the prompts
    together, last, layers, read = FeatureModel.together, ShortReadout.last, [], []

    def ran(self: FeatureModel, parts: Any) -> Any:
        layers.append(len(parts))
        return together(self, parts)

    def rows(self: ShortReadout, hidden: Any, wanted: Any) -> Any:
        read.append(len(hidden))
        return last(self, hidden, wanted)

    monkeypatch.setattr(FeatureModel, "together", ran)
    monkeypatch.setattr(ShortReadout, "last", rows)
    with watched(monkeypatch) as seen:
        engine.step()
    assert seen.features == layers == read == [6, 6, 6]
    assert seen.full[0][0] == 6
    assert not seen.draft


def drafts(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], list[int]]:
    """What is drafted from now on, by the text before it."""
    seen: dict[tuple[int, ...], list[int]] = {}
    drafting = FeatureDrafter.drafting

    def watched(self: FeatureDrafter, tokens: Any, *rest: Any) -> Any:
        draft = yield from drafting(self, tokens, *rest)
        seen[tuple(tokens)] = draft.tokens
        return draft

    monkeypatch.setattr(FeatureDrafter, "drafting", watched)
    return seen


@pytest.mark.parametrize("where", ["together", "last"])
def test_a_pass_that_fails_for_several_is_run_again_for_each(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Rounds of fixed length, so that every draft can be compared; a wrong one would be refused, not seen in the text.
    pair, requests = feature_pair(), todo(7, ("sd", "chain2"))
    with monkeypatch.context() as patch:
        expected = drafts(patch)
        answers = [alone(pair, request, "even:0.25") for request in requests]
    engine = Engine(pair, mask="even:0.25")
    numbers = [engine.add(**request) for request in requests]
    owner: Any = FeatureModel if where == "together" else ShortReadout
    original, calls, failed = getattr(owner, where), [], []

    def failing(self: Any, first: Any, *rest: Any) -> Any:
        calls.append(len(first))
        if len(first) > 1 and len(calls) % 3 == 0:
            failed.append(len(first))
            raise RuntimeError("no room for several")
        return original(self, first, *rest)

    monkeypatch.setattr(owner, where, failing)
    found = drafts(monkeypatch)
    for _ in engine.stream():
        pass
    assert len(failed) > 3
    assert found == expected
    for number, answer in zip(numbers, answers, strict=True):
        assert engine.results[number].token_ids == answer.token_ids
        assert engine.results[number].error is None


def test_the_one_to_blame_ends_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, requests = feature_pair(), todo(5, ("sd",))
    engine = Engine(pair, mask=None)
    numbers = [engine.add(**request) for request in requests]
    engine.step()
    poisoned = engine._running[2].answer.drafter._kv  # type: ignore[union-attr]
    together = FeatureModel.together

    def failing(self: FeatureModel, parts: Any) -> Any:
        if any(part.kv is poisoned for part in parts):
            raise torch.OutOfMemoryError("out of memory")
        return together(self, parts)

    monkeypatch.setattr(FeatureModel, "together", failing)
    for _ in engine.stream():
        pass
    monkeypatch.undo()
    assert "out of memory on cpu" in str(engine.results[numbers[2]].error)
    for i in (0, 1, 3, 4):
        assert same(engine.results[numbers[i]], alone(pair, requests[i], None))


class Said:
    """Says the same rows of a shortlist again and again."""

    def __init__(self, known: torch.Tensor, words: torch.Tensor, *, dense: bool) -> None:
        self._table = ShortTable(known, words, 300)
        self._dense = dense
        self._next = 0

    def rows(self, tokens: Sequence[int], n: int) -> Any:
        rows = ShortRows(self._table, self._next, self._next + 1)
        self._next = (self._next + 1) % len(self._table.known)
        return rows.dense if self._dense else rows


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"repetition_penalty": 1.4}])
def test_drafting_from_a_shortlist_is_drafting_from_its_rows_written_out(
    options: dict[str, Any], temperature: float
) -> None:
    words = torch.arange(1, 300, 17)
    known = 2 * torch.randn(5, len(words), generator=torch.Generator().manual_seed(4))
    sampler = Sampler(SamplingConfig(temperature=temperature, **options))
    seen: list[Row] = []

    class Draws(SeededDraws):
        def draft(self, row: Row) -> int:
            seen.append(row)
            return super().draft(row)

    drafts = []
    for dense in (False, True):
        source = Said(known, words, dense=dense)
        steps = draft_stepwise(
            source, [5], 5, sampler.ahead([5, 9]), Draws(7), min_confidence=0.01, stop_tokens=frozenset(), least=1e-9
        )
        drafts.append(drive(steps))
    short, whole = drafts
    assert short.tokens == whole.tokens
    assert len(short.tokens) == 5
    assert short.confidence == pytest.approx(whole.confidence)
    assert short.rows.tokens == whole.rows.tokens
    if temperature:
        assert short.rows.probs is not None
        assert whole.rows.probs is not None
        torch.testing.assert_close(short.rows.probs, whole.rows.probs)
        # What is tested is what was drawn from, to the bit.
        for i, law in enumerate(seen[:5]):
            assert law.probs is not None
            drawn = law.probs if len(law.probs) == 300 else torch.zeros(300).index_copy(0, words, law.probs)
            assert torch.equal(short.rows.probs[i], drawn)
    assert all(torch.equal(a, b) for a, b in zip(short.logits, whole.logits, strict=True))
    assert [len(row) for row in short.evidence] == [len(words)] * 5


def test_states_that_nobody_drafts_from_keep_no_pass_of_others_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FeatureDrafter, "_can_speak", lambda self, tokens: False)
    options = {"strategy": "sd", "draft_length": "fixed", "ignore_eos": True}
    engine = Engine(feature_pair(), mask=None, concurrency=8)
    first = engine.add(prompt_ids()[:5], max_new_tokens=30, **options)
    for _ in range(20):
        engine.add(prompt_ids("once upon a time " * 3), max_new_tokens=3, **options)
    while first in (*engine.running, *engine.waiting):
        drafters = [r.answer.drafter for r in engine._running if r.number == first]
        engine.step()
    (drafter,) = drafters
    assert isinstance(drafter, FeatureDrafter)
    parts = drafter._states[:-1]  # the last one may still be drafted from in the next round
    assert sum(part.shape[1] for part in parts) > 25
    assert all(part.untyped_storage().nbytes() == part.nbytes for part in parts)
