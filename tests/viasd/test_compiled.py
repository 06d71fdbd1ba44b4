"""Passes as graphs of fixed shape: the same numbers as ordinary passes, and a bounded number of graphs.

The backends used here (`eager`, `aot_eager`, a counting one) need no C++ compiler: what is tested is tracing and shapes.
"""

from __future__ import annotations

import gc
import random
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from test_layered import assert_untouched, snapshot
from tiny import Counting, model_of
from torch import Tensor

from viasd.attention import Segment
from viasd.checkpoints import LoadConfig
from viasd.compiled import CompiledSteps
from viasd.errors import OptionError
from viasd.kv import SequenceKV
from viasd.layered import LayeredModel
from viasd.probe import load_layered
from viasd.routes import Route
from viasd.runtime.metrics import Counters
from viasd.runtime.target import TieredTarget
from viasd.testing import tiny_model

TOLERANCE = {"rtol": 5e-4, "atol": 5e-4}


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few tokens outgrow them."""
    monkeypatch.setattr("viasd.kv._FIRST_CAPACITY", 32)


@cache
def hf_model(family: str, layers: int = 2) -> Any:
    """Tracing takes a second for a few layers: no more of them than a test needs, every other one with a window."""
    types = {"layer_types": ["sliding_attention", "full_attention"]} if family == "gemma3" else {}
    return tiny_model(family, num_hidden_layers=layers, **types)


def both(family: str, backend: Any = None, n_layers: int = 2, **options: Any) -> tuple[LayeredModel, LayeredModel, Any]:
    """A model as ever and compiled, and the compiled one's backend."""
    hf, backend = hf_model(family, n_layers), backend or Counting()
    compiled = load_layered(hf)
    compiled.compile(backend=backend, **options)
    return load_layered(hf), compiled, backend


def steps_of(model: LayeredModel) -> CompiledSteps:
    assert model._compiled is not None
    return model._compiled


def ids_of(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300) for _ in range(n)]


def feed(model: LayeredModel, kv: SequenceKV, ids: list[int], start: int, **how: Any) -> Tensor:
    layers = how.pop("layers", range(model.n_layers))
    out, _ = model.run(model.embed(ids), layers, model.step([Segment(kv, start, len(ids))]), **how)
    return model.readout(out)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3"])
@torch._dynamo.config.patch(error_on_recompile=True)
@torch.inference_mode()
def test_blocks_of_any_length_equal_ordinary_passes_and_graphs_are_bounded(family: str) -> None:
    # 70 tokens: eight windows of 8 where there is one, and buffers of 32, 64 and 128.
    plain, compiled, backend = both(family, buckets=(1, 4))
    for seed in range(3):
        rng, ids = random.Random(seed), ids_of(70, seed)
        caches, position = (plain.new_kv(), compiled.new_kv()), 0
        while position < len(ids):
            n = 11 if position == 0 else rng.choice([1, 1, 2, 3, 4])
            block = ids[position : position + n]
            expected, got = (feed(m, kv, block, position) for m, kv in zip((plain, compiled), caches, strict=True))
            torch.testing.assert_close(got, expected, **TOLERANCE)
            position += n
    assert backend.compiled == steps_of(compiled).graphs == 2 * 3  # buckets and capacities, whatever the sequence


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@torch.inference_mode()
def test_traced_for_a_compiler_the_numbers_are_the_same(kernel: str) -> None:
    hf = hf_model("gemma3")
    compiled, ids = load_layered(hf, kernel=kernel), ids_of(40)
    compiled.compile(backend="aot_eager", buckets=(4,))
    kv = compiled.new_kv()
    feed(compiled, kv, ids[:20], 0)
    rows = torch.cat([feed(compiled, kv, ids[i : i + 3], i) for i in (20, 23)])
    torch.testing.assert_close(rows, hf(torch.tensor([ids[:26]])).logits[0, 20:], **TOLERANCE)
    assert steps_of(compiled).graphs == 1


ROUTES = {
    "a gap": Route.of([1, 0, 1, 1]),
    "the first layer skipped": Route.of([0, 1, 1, 1]),
    "half layers": Route((True, False, False, True), ((1, "mlp"), (2, "attention"))),
    "nothing skipped": Route.full(4),
}


@pytest.mark.parametrize(("family", "name"), [*(("llama", name) for name in ROUTES), ("gemma2", "a gap")])
@torch.inference_mode()
def test_every_tier_equals_its_ordinary_self_after_any_history(family: str, name: str) -> None:
    plain, compiled, backend = both(family, n_layers=4, buckets=(8,))
    for seed in range(2):
        rng = random.Random(f"{family}{name}{seed}")
        tokens = ids_of(9, seed)
        targets = [TieredTarget(m, ROUTES[name], Counters()) for m in (plain, compiled)]

        def same(tier: str, tokens: list[int], rows: int, targets: list[TieredTarget] = targets) -> None:
            expected, got = (getattr(target, tier)(tokens, rows) for target in targets)
            torch.testing.assert_close(got, expected, **TOLERANCE)

        for target in targets:
            target.prefill(tokens[:-1])
        while len(tokens) < 50:
            block = ids_of(rng.randrange(1, 5), rng.randrange(1000))
            match rng.choice(["slim", "full", "escalate", "refuse"]):
                case "slim":
                    same("slim", [*tokens, *block[:-1]], len(block))
                    tokens += block
                case "full":
                    same("full", tokens, 1)
                    tokens += block[:1]
                case "escalate":  # from the boundary for what the slim path ran, from the embedding for what is newer
                    same("slim", [*tokens, *block[:-1]], len(block))
                    same("full", [*tokens, *block], len(block) + 1)
                    tokens += block[: rng.randrange(1, len(block) + 1)]
                case "refuse":
                    same("slim", [*tokens, *block], len(block) + 1)
                    tokens.append(rng.randrange(300))
            for target in targets:
                target.settle(tokens)
            assert targets[0].kv.full_len == targets[1].kv.full_len
            assert targets[0].kv.slim_len == targets[1].kv.slim_len
    # Slim, full, full up to the gap and from the gap on; buffers of 32 and 64.
    assert 0 < backend.compiled == steps_of(compiled).graphs <= 4 * 2


@torch.inference_mode()
def test_a_result_outlives_the_next_pass() -> None:
    _, compiled, _ = both("llama", buckets=(2,))
    kv, ids = compiled.new_kv(), ids_of(12)
    feed(compiled, kv, ids[:8], 0)
    step = compiled.step([Segment(kv, 8, 2)])
    out, captured = compiled.run(compiled.embed(ids[8:10]), range(2), step, capture=(0, 1, 2, 7))
    kept = [out.clone(), *(captured[i].clone() for i in (0, 1, 2))]
    feed(compiled, kv, ids[10:], 10)
    assert all(torch.equal(a, b) for a, b in zip(kept, [out, captured[0], captured[1], captured[2]], strict=True))


@torch.inference_mode()
def test_a_sequence_gets_the_buffers_of_the_one_before() -> None:
    _, compiled, _ = both("llama", buckets=(1,))

    def places(n: int) -> dict[int, set[int]]:
        """Addresses of a sequence's buffers, by capacity."""
        kv, seen, ids = compiled.new_kv(), {}, ids_of(n)
        feed(compiled, kv, ids[:10], 0)
        for i in range(10, n):
            feed(compiled, kv, ids[i : i + 1], i)
            keys, values = kv._keys[1], kv._values[1]
            assert keys is not None
            assert values is not None
            seen[keys.shape[2]] = {keys.data_ptr(), values.data_ptr()}
        return seen

    first = places(40)
    gc.collect()
    assert sorted(first) == [32, 64]
    assert places(40) == first
    held = compiled.new_kv()  # two at a time share nothing
    feed(compiled, held, ids_of(10), 0)
    assert places(20)[32].isdisjoint({t.data_ptr() for t in (held._keys[1], held._values[1]) if t is not None})


@torch.inference_mode()
def test_what_has_no_fixed_shape_runs_as_ever() -> None:
    plain, compiled, backend = both("llama", buckets=(1, 4))
    caches, ids = (plain.new_kv(), compiled.new_kv()), ids_of(512)
    others = (plain.new_kv(), compiled.new_kv())

    def same(block: list[int], start: int) -> None:
        expected, got = (feed(m, kv, block, start) for m, kv in zip((plain, compiled), caches, strict=True))
        torch.testing.assert_close(got, expected, **TOLERANCE)

    same(ids[:2], 0)  # no buffers yet
    same(ids[2:10], 2)  # more than the largest bucket
    same(ids[10:509], 10)
    same(ids[509:511], 509)  # padded to four it would pass the end of the context
    packed = []
    for model, kv, other in zip((plain, compiled), caches, others, strict=True):
        step = model.step([Segment(kv, 511, 1), Segment(other, 0, 1)])
        packed.append(model.run(model.embed([ids[511], 5]), range(2), step)[0])
    torch.testing.assert_close(*packed, **TOLERANCE)
    assert backend.compiled == 0
    same(ids[511:], 511)  # the last position itself is a bucket of one
    assert backend.compiled == 1
    with torch.inference_mode(mode=False), torch.no_grad():
        kv = compiled.new_kv()
        feed(compiled, kv, ids[:8], 0)
        assert not feed(compiled, kv, ids[8:9], 8).is_inference()
    assert backend.compiled == 1


@torch.inference_mode()
def test_quantised_products_are_traced_too() -> None:
    for bits in ("int8", "int4"):
        plain, compiled = (
            load_layered(tiny_model("llama", num_hidden_layers=2), quantization=bits, layers="fused") for _ in range(2)
        )
        compiled.compile(backend="aot_eager", buckets=(2,))
        assert compiled.form == f"{bits}, compiled"
        caches, ids = (plain.new_kv(), compiled.new_kv()), ids_of(12)
        for start, end in ((0, 9), (9, 10), (10, 12)):
            expected, got = (
                feed(m, kv, ids[start:end], start) for m, kv in zip((plain, compiled), caches, strict=True)
            )
            torch.testing.assert_close(got, expected, **TOLERANCE)
        assert steps_of(compiled).graphs == 1
        assert steps_of(compiled).failure is None


@torch.inference_mode()
def test_where_torch_can_not_compile_there_is_one_warning_and_the_ordinary_pass() -> None:
    def broken(graph: Any, inputs: list[Any]) -> Any:
        raise ValueError("no compiler on this machine\nand a long tale")

    plain, compiled, _ = both("llama", broken, buckets=(1,))
    assert compiled.form == "sidebyside, compiled"
    caches, ids = (plain.new_kv(), compiled.new_kv()), ids_of(12)
    for model, kv in zip((plain, compiled), caches, strict=True):
        feed(model, kv, ids[:8], 0)
    with pytest.warns(UserWarning, match="running without --compile.*no compiler on this machine$"):
        got = feed(compiled, caches[1], ids[8:9], 8)
    torch.testing.assert_close(got, feed(plain, caches[0], ids[8:9], 8), **TOLERANCE)
    assert compiled.form == plain.form
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = feed(compiled, caches[1], ids[9:10], 9)
    torch.testing.assert_close(got, feed(plain, caches[0], ids[9:10], 9), **TOLERANCE)


@torch.inference_mode()
def test_an_exception_in_a_graph_is_passed_on_and_leaves_the_model_as_it_was() -> None:
    hf = tiny_model("gemma3", num_hidden_layers=2)
    before, failing = snapshot(hf), True

    def backend(graph: Any, inputs: list[Any]) -> Any:
        def run(*args: Any) -> Any:
            if failing:
                raise RuntimeError("out of memory")
            return graph(*args)

        return run

    compiled, ids = load_layered(hf), ids_of(12)
    compiled.compile(backend=backend, buckets=(2,))
    kv = compiled.new_kv()
    feed(compiled, kv, ids[:10], 0)
    with pytest.raises(RuntimeError, match="out of memory"):
        feed(compiled, kv, ids[10:], 10)
    assert_untouched(hf, before)
    failing = False
    expected = hf(torch.tensor([ids]), use_cache=False).logits[0, 10:]
    torch.testing.assert_close(feed(compiled, kv, ids[10:], 10), expected, **TOLERANCE)
    assert_untouched(hf, before)


@pytest.mark.parametrize(
    ("family", "layers", "reason"),
    [
        ("phi3", "auto", "layer 0 of Phi3ForCausalLM can't be: Phi3DecoderLayer is not one of the layers written out"),
        ("llama", "hf", "layer 0 of LlamaForCausalLM can't be: layers='hf'"),
    ],
)
def test_layers_that_are_not_written_out_are_refused(family: str, layers: str, reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        load_layered(model_of(family), layers=layers, compile=True)


@pytest.mark.parametrize("options", [{"layers": "hf"}, {"device_map": "auto"}, {"quantization": "bnb-4bit"}])
def test_contradictions_are_found_before_loading(options: dict[str, str]) -> None:
    with pytest.raises(OptionError, match="compile needs"):
        LoadConfig(compile=True, **options)  # type: ignore[arg-type]
