"""Tiny checkpoints: folders as transformers saves them, and GGUF files as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(_smollm_tokens()),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
    )
    return _with_random_norms(LlamaForCausalLM(config))


def tiny_gemma3(layers: int = 7) -> Gemma3ForCausalLM:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=len(_gemma_tokens()[0]),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=8,
        max_position_embeddings=128,
        layer_types=["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(layers)],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    )
    return _with_random_norms(Gemma3ForCausalLM(config))


def save_tiny(folder: Path) -> None:
    """A tiny Llama with a three-word tokenizer, as a folder that transformers loads."""
    tiny_llama().save_pretrained(folder)
    inner = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1, "b": 2}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>").save_pretrained(folder)


def write_llama_gguf(path: Path, model: LlamaForCausalLM | None = None) -> None:
    model = model or tiny_llama()
    writer = gguf.GGUFWriter(path, "llama")
    _write_dimensions(writer, model.config, 100_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(_smollm_tokens())
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(_smollm_tokens()) - len(SPECIAL)))
    writer.add_token_merges(["h e", "Ġ t", "Ġt he", "1 2"])
    _write_ends(writer, bos=1, eos=2, unk=0, pad=2)
    writer.add_chat_template(TEMPLATE)
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    for name, weight in _tensors(model):
        for projection, count in heads.items():
            if projection in name:
                # As llama.cpp's converter: the two halves of each head become neighbours.
                weight = weight.reshape(count, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(_gguf_name(name, gguf.MODEL_ARCH.LLAMA, 3), np.ascontiguousarray(weight))
    _close(writer)


def write_gemma3_gguf(path: Path, model: Gemma3ForCausalLM) -> None:
    writer = gguf.GGUFWriter(path, "gemma3")
    _write_dimensions(writer, model.config, 1_000_000.0)
    writer.add_sliding_window(model.config.sliding_window)
    writer.add_key_length(16)
    tokens, types = _gemma_tokens()
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_token_types(types)
    _write_ends(writer, bos=2, eos=1, unk=3, pad=0)
    writer.add_add_bos_token(True)
    for name, weight in _tensors(model):
        layers = model.config.num_hidden_layers
        weight = weight + 1 if "norm" in name else weight
        writer.add_tensor(_gguf_name(name, gguf.MODEL_ARCH.GEMMA3, layers), weight)
    _close(writer)


def _with_random_norms(model: PreTrainedModel) -> PreTrainedModel:
    # Norms start equal; only different ones show when two were exchanged.
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(torch.rand_like(weight) - 0.5)
    return model.eval()


def _smollm_tokens() -> list[str]:
    return [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "Ġt", "Ġthe", "12"]


def _gemma_tokens() -> tuple[list[str], list[int]]:
    control = ["<pad>", "<eos>", "<bos>", "<unk>"]
    user = ["\n", "\n\n", "  ", "   ", "[multimodal]"]
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    normal = ["▁t", "he", "▁the", *"▁abcdefghijklmnopqrstuvwxyz"]
    types = [3] * len(control) + [4] * len(user) + [6] * 256 + [1] * len(normal)
    return control + user + bytes_ + normal, types


def _write_dimensions(writer: gguf.GGUFWriter, config: object, theta: float) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(theta)


def _write_ends(writer: gguf.GGUFWriter, bos: int, eos: int, unk: int, pad: int) -> None:
    writer.add_bos_token_id(bos)
    writer.add_eos_token_id(eos)
    writer.add_unk_token_id(unk)
    writer.add_pad_token_id(pad)


def _tensors(model: PreTrainedModel) -> list[tuple[str, np.ndarray]]:
    return [(name, weight.detach().numpy()) for name, weight in model.named_parameters()]


def _gguf_name(name: str, architecture: gguf.MODEL_ARCH, layers: int) -> str:
    stem, _, kind = name.rpartition(".")
    return f"{gguf.get_tensor_name_map(architecture, layers).get_name(stem)}.{kind}"


def _close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
