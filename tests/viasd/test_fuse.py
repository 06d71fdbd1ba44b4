from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import model_of
from torch import Tensor

from viasd.attention import Segment
from viasd.errors import OptionError, UnsupportedModelError
from viasd.fuse import fuse
from viasd.layered import LayeredModel
from viasd.lean import linear_groups
from viasd.pair import make_pair
from viasd.probe import load_layered
from viasd.products import Dense, SideBySide, dense, padded
from viasd.routes import ATTENTION, MLP
from viasd.testing import byte_tokenizer, tiny_model

WRITTEN_OUT = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"]
IDS = [(7 + 31 * i) % 300 for i in range(30)]


@torch.no_grad()
def own_logits(model: Any) -> Tensor:
    return model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0]


@torch.inference_mode()
def our_logits(model: LayeredModel, layers: list[int] | None = None, parts: Any = None) -> Tensor:
    kv, rows = model.new_kv(), []
    for start, end in ((0, 13), (13, 14), (14, 30)):
        step = model.step([Segment(kv, start, end - start)])
        out, _ = model.run(model.embed(IDS[start:end]), layers or range(model.n_layers), step, parts=parts)
        rows.append(model.readout(out))
    return torch.cat(rows)


@pytest.mark.parametrize("family", WRITTEN_OUT)
def test_fusing_changes_nothing_that_the_model_shows(family: str) -> None:
    model = copy.deepcopy(model_of(family))
    before, logits = copy.deepcopy(model.state_dict()), own_logits(model)
    fuse(model.model.layers)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert torch.equal(own_logits(model), logits)
    for layer in model.model.layers:
        assert all(isinstance(dense(group), Dense) for group in linear_groups(layer))


def test_there_is_one_copy_of_the_weights() -> None:
    model = tiny_model("qwen2")
    fuse(model.model.layers)
    attention = model.model.layers[0].self_attn
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    assert len({part.weight.untyped_storage().data_ptr() for part in parts}) == 1
    assert parts[0].weight.untyped_storage().nbytes() == sum(part.weight.nbytes for part in parts)
    pointers = [p.data_ptr() for p in model.parameters()]
    fuse(model.model.layers)  # a second time, nothing moves
    assert [p.data_ptr() for p in model.parameters()] == pointers
    with torch.no_grad():
        attention.k_proj.weight.mul_(2)  # the product sees what is written into the parameter
        rows = torch.randn(3, 32)
        whole = torch.cat([part(rows) for part in parts], dim=-1)
    torch.testing.assert_close(dense(parts)(rows), whole)


@pytest.mark.parametrize("family", WRITTEN_OUT)
def test_fused_layers_equal_the_models_own_forward(family: str) -> None:
    model = load_layered(copy.deepcopy(model_of(family)), layers="fused")
    torch.testing.assert_close(our_logits(model), own_logits(model.model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_halves_of_a_fused_layer_equal_halves_of_an_unfused_one(family: str) -> None:
    fused = load_layered(copy.deepcopy(model_of(family)), layers="fused")
    plain = load_layered(model_of(family))
    parts = {2: ATTENTION, 4: MLP}
    torch.testing.assert_close(our_logits(fused, None, parts), our_logits(plain, None, parts), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", WRITTEN_OUT)
def test_fused_bfloat16_passes_the_probe(family: str) -> None:
    load_layered(tiny_model(family, dtype=torch.bfloat16, scale=1.0), layers="fused")


@pytest.mark.parametrize("tied", [True, False])
def test_a_fused_model_can_be_saved_and_loaded(tied: bool, tmp_path: Path) -> None:
    model = tiny_model("qwen2", tie_word_embeddings=tied)
    load_layered(model, layers="fused")
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in again.state_dict().items())
    assert torch.equal(own_logits(again), own_logits(model))
    weights = sum(p.nbytes for p in model.parameters())
    assert sum(f.stat().st_size for f in tmp_path.glob("*.safetensors")) < weights * 1.1 + 20_000


def test_a_pair_of_the_users_own_models_is_left_as_it_is_unless_asked() -> None:
    model = tiny_model("llama")
    pointers = [p.data_ptr() for p in model.parameters()]
    make_pair(model, byte_tokenizer())
    assert [p.data_ptr() for p in model.parameters()] == pointers
    make_pair(model, byte_tokenizer(), layers="fused")
    assert [p.data_ptr() for p in model.parameters()] != pointers


def test_fused_is_refused_where_a_layer_can_not_be_written_out() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"Phi3ForCausalLM: layer 0 can't be fused: Phi3DecoderLayer is not"
    ):
        load_layered(model_of("phi3"), layers="fused")
    model = tiny_model("llama")
    model.model.layers[3].mlp.up_proj.register_forward_hook(lambda *_: None)
    before = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(UnsupportedModelError, match=r"layer 3 can't be fused: a hook is on it .*--layers auto"):
        load_layered(model, layers="fused")
    assert [p.data_ptr() for p in model.parameters()] == before
    load_layered(model)  # with auto, that layer runs through its module
    with pytest.raises(OptionError, match="layers must be one of auto, hf, fused, native, but got 'fast'"):
        load_layered(model, layers="fast")


def test_hf_layers_run_through_their_modules() -> None:
    model = tiny_model("llama")
    seen: list[int] = []
    layered = LayeredModel(model, layers="hf")
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda *_, index=index: seen.append(index))
    our_logits(layered)
    assert seen == [*range(8)] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_equals_its_modules_and_no_row_depends_on_the_others(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    modules = [torch.nn.Linear(64, n, bias=bias, dtype=dtype) for n in (48, 16, 32)]
    rows = torch.randn(40, 64, dtype=dtype)
    with torch.no_grad():
        whole = torch.cat([module(rows) for module in modules], dim=-1)
        product = dense(modules)
        assert isinstance(product, SideBySide)
        for n in (1, 2, 3, 5, 8, 17, 40):
            found = product(padded(rows[:n], product))[:n]
            torch.testing.assert_close(found, whole[:n], rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
            if dtype == torch.bfloat16:
                assert torch.equal(found, product(rows)[:n])
