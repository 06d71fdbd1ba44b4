from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, dequantize
from tiny_checkpoints import save_tiny
from torch import Tensor

from viasd.attention import Segment
from viasd.errors import OptionError, UnsupportedModelError
from viasd.gguf_codes import read_codes, unpack_q4_1
from viasd.layered import LayeredModel
from viasd.load import load_pair
from viasd.loading import LoadConfig
from viasd.pair import make_pair
from viasd.probe import load_layered
from viasd.quantized import GroupCodes, Int4, Int8, int4_codes, int8_codes, quantize
from viasd.runtime.api import generate
from viasd.testing import byte_tokenizer, tiny_model

WRITTEN_OUT = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"]
IDS = [(7 + 31 * i) % 300 for i in range(20)]


@torch.no_grad()
def own_logits(model: Any) -> Tensor:
    return model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0].float()


@torch.inference_mode()
def our_logits(model: LayeredModel) -> Tensor:
    step = model.step([Segment(model.new_kv(), 0, len(IDS))])
    return model.readout(model.run(model.embed(IDS), range(model.n_layers), step)[0])


def q4_1_rows(seed: int = 0, rows: int = 64, inputs: int = 64) -> np.ndarray:
    """Random Q4_1 blocks: fp16 scale and minimum, 16 bytes of codes."""
    rng = np.random.default_rng(seed)
    ends = np.stack((rng.uniform(0.01, 0.1, (rows, inputs // 32)), rng.uniform(-1, 0, (rows, inputs // 32))), -1)
    blocks = (ends.astype(np.float16).view(np.uint8), rng.integers(0, 256, (rows, inputs // 32, 16), dtype=np.uint8))
    return np.concatenate(blocks, axis=-1).reshape(rows, -1)


@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_equals_its_dequantised_weights_and_no_row_depends_on_the_others(
    bits: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    weight, bias, rows = torch.randn(48, 96).to(dtype), torch.randn(48).to(dtype), torch.randn(40, 96).to(dtype)
    if bits == "int8":
        codes, scale = int8_codes(weight)
        stands_for, product = codes.float() * scale.float()[:, None], Int8(codes, scale, bias)
    else:
        groups = int4_codes(weight)
        stands_for, product = groups.weights(), Int4(groups, dtype, bias)
    expected = rows.float() @ stands_for.T + bias.float()
    fine = dtype == torch.float32
    torch.testing.assert_close(product(rows).float(), expected, rtol=1e-5 if fine else 2e-2, atol=1e-4 if fine else 0.2)
    few = product(rows[:32])  # beyond that many, prompts, int8 runs through another product
    assert all(torch.equal(product(rows[:n]), few[:n]) for n in (1, 2, 3, 4, 5, 8, 17))
    # Half a step of the codes is the most that rounding to them can cost.
    step = stands_for.abs().amax(dim=1) / 127 if bits == "int8" else int4_codes(weight).scale.float().amax(dim=1)
    assert bool(((stands_for - weight.float()).abs().amax(dim=1) <= step * (0.51 if fine else 1.1)).all())


@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("family", WRITTEN_OUT)
def test_a_quantised_model_equals_its_dequantised_weights(family: str, bits: str) -> None:
    model = tiny_model(family, num_hidden_layers=2)
    plain = own_logits(model)
    weights = quantize(model, bits)
    reference = own_logits(model)  # runs on what the codes stand for
    layered = LayeredModel(model, weights=weights)
    layered.embed_scale = load_layered(tiny_model(family, num_hidden_layers=2)).embed_scale
    torch.testing.assert_close(our_logits(layered), reference, rtol=1e-4, atol=1e-3)
    assert not torch.allclose(reference, plain, rtol=1e-3, atol=1e-3)


def test_the_weights_it_stands_for_are_freed() -> None:
    model = tiny_model("qwen2", num_hidden_layers=2, tie_word_embeddings=False)
    layered = load_layered(model, quantization="int8")
    linears = [m for m in model.modules() if type(m) is torch.nn.Linear]
    assert all(m.weight.is_meta for m in linears if m is not model.lm_head)
    assert model.lm_head.weight.is_meta
    assert layered.vocabulary == 300
    assert our_logits(layered).isfinite().all()
    assert (layered.device.type, layered.dtype) == ("cpu", torch.float32)


def test_a_head_that_shares_the_embedding_table_stays() -> None:
    model = tiny_model("llama", num_hidden_layers=2, tie_word_embeddings=True)
    table = model.model.embed_tokens.weight.clone()
    load_layered(model, quantization="int4")
    assert torch.equal(model.model.embed_tokens.weight, table)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_matrices_of_shapes_that_no_kernel_takes_keep_more_bits() -> None:
    model = tiny_model("llama", num_hidden_layers=2, hidden_size=32, intermediate_size=40)
    layered = load_layered(model, quantization="int4")
    assert not model.model.layers[0].mlp.down_proj.weight.is_meta  # 40 inputs are no whole vectors
    assert model.model.layers[0].mlp.up_proj.weight.is_meta
    assert our_logits(layered).isfinite().all()


def test_what_can_not_be_quantised_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="layer 0 can't be quantised to int4: Phi3DecoderLayer is not"):
        load_layered(tiny_model("phi3", num_hidden_layers=2), quantization="int4")
    with pytest.raises(OptionError, match="int8 needs layers that are written out, but layers='hf'"):
        load_layered(tiny_model("llama", num_hidden_layers=2), quantization="int8", layers="hf")


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_speculation_is_lossless_relative_to_the_quantised_target(bits: str) -> None:
    # In fp32: the products give a row the same in any company also in bf16, but attention over bf16 keys does not.
    def pair(drafter: Any) -> Any:
        return make_pair(tiny_model("llama"), byte_tokenizer(), drafter=drafter, quantization=bits)

    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}
    plain = generate(pair("lookup"), IDS, strategy="plain", **options).token_ids
    assert generate(pair("lookup"), IDS, strategy="sd", **options).token_ids == plain
    assert generate(pair(tiny_model("llama")), IDS, strategy="sd", **options).token_ids == plain


def test_unpacked_q4_1_blocks_are_what_gguf_makes_of_them() -> None:
    rows = q4_1_rows()
    codes, scale, minimum = unpack_q4_1(rows)
    assert codes.max() == 15
    weights = codes * scale.repeat(32, axis=1) + minimum.repeat(32, axis=1)
    np.testing.assert_allclose(weights, dequantize(rows, GGMLQuantizationType.Q4_1), rtol=1e-6, atol=1e-6)


@pytest.fixture
def gguf_file(tmp_path: Path) -> Callable[[str], Path]:
    def write(name: str) -> Path:
        writer = GGUFWriter(tmp_path / "model.gguf", "llama")
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
        writer.add_tensor(name, q4_1_rows(), raw_dtype=GGMLQuantizationType.Q4_1)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / "model.gguf"

    return write


@pytest.mark.parametrize(
    ("tensor", "name", "heads"),
    [("blk.1.ffn_gate.weight", "mlp.gate_proj", None), ("blk.1.attn_q.weight", "self_attn.q_proj", 4)],
)
def test_codes_of_a_gguf_file_are_taken_over_one_by_one(
    tensor: str, name: str, heads: int | None, gguf_file: Callable[[str], Path]
) -> None:
    found = read_codes(gguf_file(tensor))
    assert list(found) == [f"model.layers.1.{name}.weight"]
    groups = found[f"model.layers.1.{name}.weight"]
    codes, scale, minimum = (torch.from_numpy(part) for part in unpack_q4_1(q4_1_rows()))
    if heads is not None:  # rotary pairs, next to each other in the file, become halves of a head
        order = torch.arange(64).reshape(heads, -1, 2).transpose(1, 2).reshape(-1)
        codes, scale, minimum = codes[order], scale[order], minimum[order]
    assert torch.equal(groups.codes, codes)
    assert torch.equal(groups.scale, scale)
    torch.testing.assert_close(groups.zero, minimum + 8 * scale)
    # One row of ones a group reads sums of codes back from the packed product: none has changed.
    product = Int4(GroupCodes(groups.codes, torch.ones(64, 2), torch.full((64, 2), 8.0)), torch.float32)
    assert torch.equal(product(torch.eye(64)).T, codes.float())


def test_quantisation_by_the_loader(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    config = LoadConfig(device="cpu", dtype="float32", quantization="int8")
    pair = load_pair(target=str(tmp_path), config=config)
    assert pair.target.model.model.layers[0].mlp.up_proj.weight.is_meta
    fused = load_pair(target=str(tmp_path), config=LoadConfig(device="cpu", dtype="float32"))
    up, gate = (getattr(fused.target.model.model.layers[0].mlp, n).weight for n in ("up_proj", "gate_proj"))
    assert up.untyped_storage().data_ptr() == gate.untyped_storage().data_ptr()
    with pytest.raises(OptionError, match="layers='hf'"):
        load_pair(target=str(tmp_path), config=LoadConfig(device="cpu", quantization="int8", layers="hf"))
    with pytest.raises(OptionError, match="layers must be one of"):
        LoadConfig(layers="fast")
    with pytest.raises(OptionError, match="runs on one CPU"):
        LoadConfig(quantization="int4", device_map="auto")
