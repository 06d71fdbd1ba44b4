"""Our CPU kernels: the numbers of transformers' own forward, and rows that do not depend on their neighbours."""

from __future__ import annotations

import copy
import ctypes
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from viasd.attention import Segment, visible
from viasd.errors import UnsupportedModelError
from viasd.heads import LightHeads
from viasd.kernels import build, native
from viasd.kernels.matrices import MOST_TOKENS, NativeInt4, multiplied
from viasd.kernels.native import NativeLayer, run_layers
from viasd.layered import LayeredModel
from viasd.lean import LayerProducts, LeanLayer, linear_groups
from viasd.mask import LayerMask
from viasd.pair import make_pair
from viasd.probe import load_layered
from viasd.products import Matrix
from viasd.quantized import int4_codes, int8_codes
from viasd.runtime.api import generate
from viasd.testing import byte_tokenizer, tiny_model

needs_kernels = pytest.mark.skipif(build.why_missing() is not None, reason=f"no kernels: {build.why_missing()}")
NATIVE = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3")
IDS = [(7 + 13 * i) % 300 for i in range(70)]
# Widths that fill tiles, vectors, and neither; heads of 64 values, of more and of fewer.
SHAPES = (
    {},
    {"hidden_size": 40, "intermediate_size": 72},
    {"hidden_size": 48, "head_dim": 64, "num_attention_heads": 6},
    {"head_dim": 80, "num_key_value_heads": 1},
)


def model_of(family: str, *, dtype: torch.dtype = torch.float32, **shape: Any) -> Any:
    """A tiny model whose norms all differ, as those of a trained one do."""
    if family in ("gemma2",):
        shape = {"attn_logit_softcapping": 0.5, **shape}
    model = tiny_model(family, dtype=dtype, num_hidden_layers=4, **shape)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(0.4 * torch.randn(weight.shape, generator=generator).to(dtype))
    return model


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Lets the kernels be looked for again, with a cache folder of its own."""

    def _anew(cache: Path) -> None:
        monkeypatch.setenv("VIASD_CACHE", str(cache))
        monkeypatch.setattr(build, "_found", None)

    return _anew


def rows(model: LayeredModel, pieces: list[int], layers=None, parts=None) -> torch.Tensor:
    kv, start, out = model.new_kv(), 0, []
    with torch.inference_mode():
        for n in pieces:
            step = model.step([Segment(kv, start, n)])
            hidden, _ = model.run(
                model.embed(IDS[start : start + n]), layers or range(model.n_layers), step, parts=parts
            )
            out.append(model.readout(hidden, steady=True))
            start += n
    return torch.cat(out)


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", NATIVE)
def test_logits_are_those_of_the_models_own_forward(family: str, shape: dict[str, int]) -> None:
    hf = model_of(family, **shape)
    model = load_layered(hf, layers="native")
    assert model.form == "native"
    with torch.inference_mode():
        expected = hf(torch.tensor([IDS])).logits[0]
    # Blocks of every size up to the largest, crossing a window of 8 where there is one.
    got = rows(model, [MOST_TOKENS, 1, 2, 3, 4, 5, 6, 7, 10])
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", NATIVE)
def test_a_row_is_the_same_bits_whatever_travels_with_it(family, shape, dtype, threads) -> None:
    model = load_layered(model_of(family, dtype=dtype, **shape), layers="native")
    alone = rows(model, [1] * len(IDS))
    whole = [[len(IDS)]] if model._most > MOST_TOKENS else []  # where the kernels multiply many rows too
    for count in (1, 2, 3):
        threads(count)
        for pieces in ([10, 1, 5, MOST_TOKENS, 7, 2, 3, 10], [20, 17, 3, 30], *whole):
            assert torch.equal(rows(model, pieces), alone), (count, pieces)


class Exact:
    """A product summed in fp64 and rounded once: what every order of summing comes near to."""

    least_rows, tensors, matrices = 1, (), ()

    def __init__(self, modules: list[Any]) -> None:
        self.modules = modules

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        parts = []
        for module in self.modules:
            out = rows.double() @ module.weight.double().t()
            parts.append(out if module.bias is None else out + module.bias.double())
        return torch.cat(parts, dim=-1).to(rows.dtype)


class ExactPass:
    """Attention of a sequence from its beginning, likewise."""

    def attended(self, _: int, query, keys, values, scale, window, softcap) -> torch.Tensor:
        n, groups = query.shape[2], query.shape[1] // keys.shape[0]
        keys, values = (t.double().repeat_interleave(groups, dim=0) for t in (keys, values))
        scores = query[0].double() @ keys.transpose(1, 2) * scale
        if softcap is not None:
            scores = (scores / softcap).tanh() * softcap
        places = torch.arange(n)
        scores = scores.masked_fill(~visible(places[:, None], places[None], window), -torch.inf)
        return (scores.softmax(dim=-1) @ values).to(query.dtype).transpose(0, 1)[None]


@needs_kernels
@pytest.mark.parametrize("family", NATIVE)
def test_values_are_rounded_where_transformers_rounds_them(family: str) -> None:
    hf = model_of(family, dtype=torch.bfloat16, head_dim=64)
    model = load_layered(hf, layers="native")
    alike = []
    with torch.inference_mode():
        for index, layer in enumerate(hf.model.layers):
            step = model.step([Segment(model.new_kv(), 0, 20)])
            hidden = model.embed(IDS[:20])
            out, _ = model.run(hidden, (index,), step)
            exact = LeanLayer(layer, LayerProducts(*(Exact(group) for group in linear_groups(layer))))
            rotation = model._rotations.rotation(step, model.layer_types[index], hidden.device)
            alike.append((out == exact(hidden, rotation, ExactPass())).float().mean())
    # Sums in fp32 round otherwise now and then; a rounding left out or added changes far more.
    assert torch.stack(alike).mean() > 0.99, f"{family} {torch.stack(alike).mean()}"


@needs_kernels
@pytest.mark.parametrize("family", NATIVE)
def test_logits_are_rounded_where_transformers_rounds_them(family: str) -> None:
    hf = model_of(family, dtype=torch.bfloat16)
    with torch.inference_mode():
        hidden = 3 * torch.randn(1, 20, 32, generator=torch.Generator().manual_seed(3)).bfloat16()
        logits = Exact([hf.lm_head])(hf.model.norm(hidden[0]))
        if cap := getattr(hf.config, "final_logit_softcapping", None):
            logits = torch.tanh(logits / cap) * cap
        assert torch.equal(load_layered(hf, layers="native").readout(hidden), logits.float())


@needs_kernels
def test_sequences_packed_into_one_pass_are_as_alone() -> None:
    model = load_layered(tiny_model("gemma3", dtype=torch.bfloat16), layers="native")
    alone = rows(model, [12])
    caches = [model.new_kv(), model.new_kv()]
    with torch.inference_mode():
        first = model.step([Segment(caches[0], 0, 5)])
        model.run(model.embed(IDS[:5]), range(model.n_layers), first)
        both = model.step([Segment(caches[1], 0, 12), Segment(caches[0], 5, 7)])
        hidden, _ = model.run(model.embed(IDS[:12] + IDS[5:12]), range(model.n_layers), both)
        packed = model.readout(hidden)
    assert torch.equal(packed[:12], alone)
    assert torch.equal(packed[12:], alone[5:])


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows_a_call", [7, native._MOST_ROWS])
def test_a_sequence_is_the_same_bits_whatever_shares_its_pass(rows_a_call, shape, dtype, threads, monkeypatch) -> None:
    monkeypatch.setattr(native, "_MOST_ROWS", rows_a_call)
    model = load_layered(model_of("gemma3", dtype=dtype, **shape), layers="native")
    long = MOST_TOKENS + 9
    # Prompts too long for the kernels lie between blocks of all sizes, which together are more than one may have alone.
    lengths = [1, 6, long, MOST_TOKENS, 2, long, long, 9, 17, 1]
    starts = [0, 5, 0, 20, 33, 3, 0, 11, 0, 40]

    def ran(chosen: list[int]) -> list[torch.Tensor]:
        caches = []
        for index in chosen:
            kv = model.new_kv()
            if starts[index]:
                step = model.step([Segment(kv, 0, starts[index])])
                model.run(model.embed(IDS[: starts[index]]), range(model.n_layers), step)
            caches.append(kv)
        step = model.step(
            [Segment(kv, starts[index], lengths[index]) for kv, index in zip(caches, chosen, strict=True)]
        )
        ids = [t for index in chosen for t in (IDS * 2)[starts[index] : starts[index] + lengths[index]]]
        hidden, _ = model.run(model.embed(ids), range(model.n_layers), step)
        read = [rows[:, -3:] for rows in hidden.split([lengths[index] for index in chosen], dim=1)]
        logits = model.readout(torch.cat(read * 4, dim=1), steady=True)
        return list(logits.split([rows.shape[1] for rows in read] * 4))[: len(chosen)]

    with torch.inference_mode():
        for count in (1, 3):
            threads(count)
            alone = [ran([index])[0] for index in range(len(lengths))]
            for order in ([*range(len(lengths))], [9, 2, 5, 0], [3, 8, 7, 1, 4]):
                for index, together in zip(order, ran(order), strict=True):
                    assert torch.equal(together, alone[index]), (count, order, index)


@needs_kernels
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_token_that_is_no_number_spoils_itself_and_what_follows_but_nothing_before(family: str) -> None:
    model = load_layered(tiny_model(family, head_dim=64), layers="native")
    with torch.inference_mode():
        hidden = model.embed(IDS[:9])
        hidden[0, 5] = torch.nan

        def logits(n: int) -> torch.Tensor:
            return model.run(hidden[:, :n], (0, 1), model.step([Segment(model.new_kv(), 0, n)]))[0][0]

        assert torch.equal(logits(9)[:5], logits(5))
        assert logits(9)[5:].isnan().any(dim=-1).all()


@needs_kernels
@pytest.mark.parametrize("most", [MOST_TOKENS, sys.maxsize])
def test_a_prompt_is_run_by_whom_its_length_and_this_machine_say(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_layered(model_of("llama", dtype=torch.bfloat16), layers="native")
    for layer in model._lean:
        monkeypatch.setattr(layer, "most", most)
    by_torch: list[int] = []
    for layer in model._lean:
        monkeypatch.setattr(layer.lean, "_mlp", lambda rows, own=layer.lean._mlp: by_torch.append(1) or own(rows))
    rows(model, [MOST_TOKENS, 1])
    assert not by_torch
    rows(model, [MOST_TOKENS + 1])
    assert len(by_torch) == (0 if most > MOST_TOKENS else model.n_layers)


@needs_kernels
def test_several_python_threads_may_decode_at_once() -> None:
    model = load_layered(tiny_model("qwen3", dtype=torch.bfloat16), layers="native")
    alone = rows(model, [20, 5, 1, 7])
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: rows(model, [20, 5, 1, 7]), range(12)))
    assert all(torch.equal(one, alone) for one in found)


@needs_kernels
@pytest.mark.parametrize("parts", [None, {3: "attention"}, {3: "mlp"}])
def test_skipped_layers_and_halves_are_as_written_out(parts) -> None:
    hf = tiny_model("gemma2")
    layers = (0, 1, 3, 6, 7)
    torch.testing.assert_close(
        rows(load_layered(hf, layers="native"), [9, 4], layers, parts),
        rows(load_layered(hf, layers="fused"), [9, 4], layers, parts),
        atol=2e-5,
        rtol=2e-5,
    )


@needs_kernels
@pytest.mark.parametrize("strategy", ["sd", "cascade"])
@pytest.mark.parametrize("family", NATIVE)
def test_lossless_decoding_is_plain_decoding_in_bf16_too(family: str, strategy: str) -> None:
    pair = make_pair(tiny_model(family, dtype=torch.bfloat16), byte_tokenizer(), drafter="self", layers="native")
    mask = LayerMask.even(pair.target.n_layers, 0.4)
    options = {"max_new_tokens": 60, "ignore_eos": True}
    plain = generate(pair, IDS[:10], mask=None, strategy="plain", **options)
    tiers = {"tiers": "3", "mode": "lossless"} if strategy == "cascade" else {}
    for gamma in (1, 4, 9):
        other = generate(
            pair, IDS[:10], mask=mask if tiers else None, strategy=strategy, gamma=gamma, **options, **tiers
        )
        assert other.token_ids == plain.token_ids


@needs_kernels
@pytest.mark.parametrize("family", NATIVE)
def test_exits_inside_the_target_change_no_token_in_bf16_either(family: str) -> None:
    pair = make_pair(tiny_model(family, dtype=torch.bfloat16), byte_tokenizer(), layers="native")
    options = {"max_new_tokens": 60, "ignore_eos": True}
    plain = generate(pair, IDS[:10], strategy="plain", **options)
    exiting = {"strategy": "adadecode", "heads": "lens:2,5,7", "exit_threshold": 0.0, **options}
    for pending in (1, 5, 20):
        other = generate(pair, IDS[:10], max_pending=pending, **exiting)
        assert other.token_ids == plain.token_ids
        assert max(other.stats.early.pending) == pending  # so tokens did travel in company


@needs_kernels
def test_layers_between_two_exits_run_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[int]] = []

    def counted(layers: list[NativeLayer], *rest: Any) -> torch.Tensor:
        calls.append([layer.lean.index for layer in layers])
        return run_layers(layers, *rest)

    pair = make_pair(tiny_model("llama"), byte_tokenizer(), layers="native")
    monkeypatch.setattr("viasd.layered.run_layers", counted)
    options = {"max_new_tokens": 6, "ignore_eos": True, "strategy": "adadecode", "heads": "lens:2,5"}
    generate(pair, IDS[:10], exit_threshold=1.0, **options)
    whole = list(range(8))
    # The prompt; five tokens that may wait; one behind which there is no room for a guess.
    assert calls == [whole, *([[0, 1], [2, 3, 4], [5, 6, 7]] * 5), whole]
    calls.clear()
    generate(pair, IDS[:10], max_pending=0, **options)
    assert calls == [whole] * 7


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("words", [None, torch.arange(1, 300, 2)])
@pytest.mark.parametrize("family", ["llama", "gemma2"])  # the second changes its logits after the head
def test_a_head_inside_the_target_says_the_same_bits_of_a_row_whatever_travels_with_it(family, words, dtype) -> None:
    model = load_layered(model_of(family, dtype=dtype, hidden_size=96), layers="native")
    turns = torch.randn(1, 96, 96, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        states, _ = model.run(model.embed(IDS), range(2), model.step([Segment(model.new_kv(), 0, len(IDS))]))
        for transforms in (turns, None):
            head = LightHeads((2,), transforms, words).bind(model)[2]
            alone = torch.cat([head(states[:, i : i + 1]) for i in range(MOST_TOKENS)])
            assert torch.equal(head(states[:, :MOST_TOKENS]), alone)
            assert torch.equal(head(states[:, 3:8]), alone[3:8])


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["dense", "int8", "int4"])
@pytest.mark.parametrize("size", [5, 8, 75])
def test_products_are_those_of_the_weights_that_codes_stand_for(size: int, kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weight, x = torch.randn(size, 96).to(dtype), torch.randn(17, 96).to(dtype)
    bias = torch.randn(size).to(dtype)
    library = build.load()
    if kind == "int8":
        codes, scale = int8_codes(weight)
        matrix, weight = Matrix("int8", codes, scale, bias=bias), codes.double() * scale.double()[:, None]
        run = partial(multiplied, matrix=matrix, kernels=library)
    elif kind == "int4":
        groups = int4_codes(weight)
        product = NativeInt4(groups.codes, groups.scale, groups.zero, bias, library)
        weight, run = groups.weights(), product
        coarse = dtype == torch.bfloat16
        torch.testing.assert_close(product.weights(), weight.to(dtype), atol=1e-6, rtol=1e-2 if coarse else 1e-6)
        many = product(torch.cat([x, x]))[:17]
        torch.testing.assert_close(many.float(), product(x).float(), atol=0.3 if coarse else 1e-4, rtol=0)
    else:
        run = partial(multiplied, matrix=Matrix("dense", weight, bias=bias), kernels=library)
    got = run(x)
    expected = x.double() @ weight.double().t() + bias.double()
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=5e-3 if dtype.itemsize == 2 else 1e-5)
    assert got.shape == (17, size)
    for n in (1, 2, 3, 4, 5, 6, 7, 8, 15, 16):
        assert torch.equal(run(x[:n]), got[:n])


@needs_kernels
def test_passes_that_are_differentiated_run_through_torch() -> None:
    model = load_layered(tiny_model("llama"), layers="native")
    hidden = model.embed(IDS[:4]).detach().requires_grad_()
    out, _ = model.run(hidden, range(model.n_layers), model.step([Segment(model.new_kv(), 0, 4)]))
    out.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.abs().sum() > 0


@needs_kernels
def test_only_what_the_kernels_know_runs_by_them() -> None:
    with pytest.raises(UnsupportedModelError, match="Phi3"):
        load_layered(tiny_model("phi3"), layers="native")
    assert load_layered(tiny_model("phi3")).form == "hf"
    half = load_layered(tiny_model("llama", dtype=torch.float16))
    assert not any(isinstance(layer, NativeLayer) for layer in half._lean)
    assert load_layered(tiny_model("llama"), layers="fused").form == "dense"


def test_without_a_compiler_everything_runs_and_native_says_why(
    anew: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    anew(tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler-here")
    assert "no-such-compiler-here" in (build.why_missing() or "")
    assert load_layered(tiny_model("llama")).form == "sidebyside"
    with pytest.raises(UnsupportedModelError, match="no-such-compiler-here"):
        load_layered(tiny_model("llama"), layers="native")


def test_a_failing_compiler_is_reported_in_a_line(
    anew: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "cc"
    script.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "boom: no such flag" >&2\nexit 1\n')
    script.chmod(0o755)
    anew(tmp_path)
    monkeypatch.setenv("CXX", str(script))
    assert "boom: no such flag" in (build.why_missing() or "")
    assert not list((tmp_path / "kernels").glob("*.so"))


@needs_kernels
def test_a_library_is_built_once_and_a_damaged_one_anew(anew: Callable[[Path], None], tmp_path: Path) -> None:
    told: list[str] = []
    for _ in range(2):
        anew(tmp_path)
        build.load(told.append)
    assert len(told) == 1
    (made,) = (tmp_path / "kernels").glob("*.so")
    whole = made.read_bytes()
    made.unlink()  # this process has it open
    made.write_bytes(whole[:1000])
    anew(tmp_path)
    build.load(told.append)
    assert len(told) == 2
    assert len(made.read_bytes()) == len(whole)


@needs_kernels
def test_a_cache_that_can_not_be_written_is_no_reason_to_be_slow(anew: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    anew(tmp_path / "file")
    assert build.why_missing() is None
    assert load_layered(tiny_model("llama")).form == "native"


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_layers_in_one_call_are_the_same_bits_as_one_by_one(family: str, dtype: torch.dtype, threads) -> None:
    model = load_layered(model_of(family, dtype=dtype), layers="native")

    def states(apart: list[int]) -> torch.Tensor:
        kv = model.new_kv()
        outs = []
        for start, n in ((0, 17), (17, 1), (18, 6)):
            step = model.step([Segment(kv, start, n)])
            hidden, captured = model.run(model.embed(IDS[start : start + n]), range(4), step, capture=apart)
            assert sorted(captured) == sorted(apart)
            outs.append(hidden)
        return torch.cat(outs, dim=1)

    with torch.inference_mode():
        for count in (1, 2, 3):
            threads(count)
            together = states([])
            assert torch.equal(states([0, 1, 2, 3]), together)
            assert torch.equal(states([2]), together)


@needs_kernels
def test_layers_of_different_shapes_run_in_one_call(threads) -> None:
    """What a thread reads of one layer must not lie where another already writes of the next."""
    shapes = ({}, {"num_attention_heads": 8, "num_key_value_heads": 4}, {"intermediate_size": 320}, {"head_dim": 80})
    models = [load_layered(model_of("llama", **shape), layers="native") for shape in shapes]
    made = [model._native[index] for index, model in enumerate(models)]
    kvs, shared = [model.new_kv() for model in models], models[0].new_kv()
    threads(4)
    with torch.inference_mode():
        for start, n in ((0, 30), (30, 1), (31, 20)):
            entered = models[0].embed(IDS[start : start + n])
            turned = [
                model._rotations.rotation(model.step([Segment(kv, start, n)]), model.layer_types[0], model.device)
                for model, kv in zip(models, kvs, strict=True)
            ]
            expected = entered
            for layer, rotation, kv in zip(made, turned, kvs, strict=True):
                expected = layer(expected, rotation, models[0].step([Segment(kv, start, n)]))
            for _ in range(20):
                step = models[0].step([Segment(shared, start, n)])
                assert torch.equal(run_layers(made, entered, turned, step), expected)


class SideBySide:
    """Matrices of any kinds as one product."""

    least_rows = 1

    def __init__(self, matrices: list[Matrix], kernels: ctypes.CDLL) -> None:
        self.matrices, self._kernels = matrices, kernels
        self.tensors = [t for matrix in matrices for t in matrix[1:] if t is not None]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([multiplied(rows, matrix, self._kernels) for matrix in self.matrices], dim=1)


@needs_kernels
@pytest.mark.parametrize("coded", [(0,), (1,), (2,), (0, 2)])
def test_matrices_of_different_kinds_share_a_product(coded: tuple[int, ...]) -> None:
    library = build.load()
    model = load_layered(model_of("llama", dtype=torch.bfloat16, hidden_size=64), layers="native")
    lean = model._native[0].lean
    parts = list(lean.products.qkv.matrices)
    codes = [int4_codes(part.weight.float()) for part in parts]
    made = [
        NativeInt4(c.codes, c.scale.bfloat16(), c.zero.bfloat16(), None, library) if i in coded else None
        for i, c in enumerate(codes)
    ]
    mixed = [part if m is None else m.matrices[0] for part, m in zip(parts, made, strict=True)]
    plain = [part if m is None else Matrix("dense", m.weights()) for part, m in zip(parts, made, strict=True)]
    said = []
    for matrices in (mixed, plain):
        layer = copy.copy(lean)
        layer.products = lean.products._replace(qkv=SideBySide(matrices, library))
        native = NativeLayer(layer, library)
        with torch.inference_mode():
            for pieces in ([20], [1] * 20):
                cache, start, out = model.new_kv(), 0, []
                for n in pieces:
                    step = model.step([Segment(cache, start, n)])
                    rotation = model._rotations.rotation(step, model.layer_types[0], model.device)
                    out.append(native(model.embed(IDS[start : start + n]), rotation, step))
                    start += n
                said.append(torch.cat(out, dim=1))
    assert torch.equal(said[0], said[1])
    torch.testing.assert_close(said[0], said[2], atol=0.05, rtol=0.05)
