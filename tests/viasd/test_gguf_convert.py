from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import tiny_gemma3, tiny_llama, write_gemma3_gguf, write_llama_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from viasd.errors import WeightsError
from viasd.gguf_convert import convert, write_known_tokenizer


def reload(folder: Path) -> PreTrainedModel:
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model


def assert_same_logits(one: PreTrainedModel, other: PreTrainedModel) -> None:
    ids = torch.arange(3, 33)[None]
    with torch.no_grad():
        torch.testing.assert_close(one(ids).logits, other(ids).logits, rtol=0, atol=1e-6)


def test_a_converted_llama_is_the_model_that_was_written(tmp_path: Path) -> None:
    original = tiny_llama()
    write_llama_gguf(tmp_path / "a.gguf", original)
    convert(tmp_path / "a.gguf", tmp_path)
    model = reload(tmp_path)
    assert_same_logits(model, original)
    assert model.config.rms_norm_eps == 1e-5
    assert model.config.dtype == torch.float32
    assert model.generation_config.eos_token_id == 2


def test_a_converted_gemma3_is_the_model_that_was_written_across_its_window(tmp_path: Path) -> None:
    original = tiny_gemma3()
    write_gemma3_gguf(tmp_path / "a.gguf", original)
    convert(tmp_path / "a.gguf", tmp_path)
    model = reload(tmp_path)
    assert_same_logits(model, original)
    assert model.config.layer_types == original.config.layer_types
    assert model.config.final_logit_softcapping is None


def test_shards_hold_every_tensor_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("viasd.gguf_convert._SHARD_BYTES", 20_000)
    original = tiny_llama()
    write_llama_gguf(tmp_path / "a.gguf", original)
    convert(tmp_path / "a.gguf", tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    assert_same_logits(reload(tmp_path), original)


def test_the_smollm_tokenizer_merges_splits_digits_and_has_its_template(tmp_path: Path) -> None:
    write_llama_gguf(tmp_path / "a.gguf")
    convert(tmp_path / "a.gguf", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.tokenize("he the 12") == ["he", "Ġthe", "Ġ", "1", "2"]
    text = "the  émoji 😀 안녕\n\t<|im_end|>he"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert ids.count(2) == 1
    assert tokenizer.eos_token_id == 2
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False)
    assert chat == "<|im_start|>user\nhe<|im_end|>\n"


def test_the_gemma_tokenizer_begins_with_bos_and_falls_back_to_bytes(tmp_path: Path) -> None:
    write_gemma3_gguf(tmp_path / "a.gguf", tiny_gemma3())
    convert(tmp_path / "a.gguf", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("he the\n\n   é").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["<bos>", "he", "▁the", "\n\n", "▁▁▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "he the\n\n   é"
    assert tokenizer.chat_template is None


def test_a_tokenizer_of_another_kind_is_not_guessed(tmp_path: Path) -> None:
    write_llama_gguf(tmp_path / "a.gguf")
    other = (tmp_path / "a.gguf").read_bytes().replace(b"smollm", b"qwen-2")
    (tmp_path / "b.gguf").write_bytes(other)
    assert write_known_tokenizer(tmp_path / "b.gguf", tmp_path) is False
    assert not (tmp_path / "tokenizer.json").exists()
    with pytest.raises(WeightsError, match="SmolLM2 and Gemma3"):
        convert(tmp_path / "b.gguf", tmp_path)
