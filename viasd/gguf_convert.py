"""Turns a GGUF file of a Llama or Gemma3 model into a folder that transformers loads: config, tokenizer, fp32 weights.

transformers can read GGUF too, but what it makes of it differs by version: Gemma3's tokenizer is wrong in 5.0, later
versions keep weights packed and refuse to save them, and both parse the file several times. Here one reading gives
one result, equal under every version.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from viasd.errors import WeightsError

#: Raised whenever the output of this module changes, so that older conversions are made anew.
CONVERTER_VERSION = 1

#: Several files instead of one, so that their checksums can be computed side by side.
_SHARD_BYTES = 96 << 20

#: GGUF's token types (gguf.TokenType): control tokens are special, user-defined ones are matched before merging.
_CONTROL, _USER_DEFINED = 3, 4

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
#: The norm before the MLP: Gemma has four norms a layer, and Llama's second one bears the name of Gemma's second.
_MLP_NORM = {"llama": "post_attention_layernorm", "gemma3": "pre_feedforward_layernorm"}
ARCHITECTURES = tuple(_MLP_NORM)


def convert(gguf: Path, folder: Path) -> None:
    """Write config, generation config, tokenizer and fp32 safetensors for `gguf` into the existing `folder`.

    Args:
        gguf: A GGUF file of architecture ``llama`` (SmolLM2) or ``gemma3`` with its tokenizer.
        folder: Where to write.

    Raises:
        WeightsError: If the file is of another architecture, or its tokenizer of another kind.
        OSError: If a file can't be read or written.
    """
    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    architecture = fields["general.architecture"]
    if architecture not in _MLP_NORM or not _is_known_tokenizer(fields):
        raise WeightsError(f"can convert GGUF files of SmolLM2 and Gemma3, but {gguf.name} holds {architecture!r}")
    config = _config(architecture, fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    _write_json(folder / "config.json", config)
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", {"_from_model_config": True, **ends})
    _write_tokenizer(folder, fields)
    _write_weights(folder, _tensors(reader, architecture))


def write_known_tokenizer(gguf: Path, folder: Path) -> bool:
    """Write the tokenizer of `gguf` into `folder` if it is one of those rebuilt here exactly; False if it is not.

    Raises:
        OSError: If a file can't be read or written.
        ValueError: If `gguf` is no GGUF file.
    """
    fields = {name: field.contents() for name, field in GGUFReader(gguf).fields.items()}
    if not _is_known_tokenizer(fields):
        return False
    _write_tokenizer(folder, fields)
    return True


def _is_known_tokenizer(fields: dict[str, Any]) -> bool:
    """SmolLM2's or Gemma3's; others of the same two kinds split text differently before merging."""
    kind, split = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    return (kind, split) == ("gpt2", "smollm") or (kind == "llama" and fields["general.architecture"] == "gemma3")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(architecture: str, fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    def field(name: str) -> Any:
        return fields[f"{architecture}.{name}"]

    heads, width, layers = field("attention.head_count"), field("embedding_length"), field("block_count")
    theta = field("rope.freq_base")
    common = {
        "hidden_size": width,
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv"),
        "head_dim": fields.get(f"{architecture}.attention.key_length", width // heads),
        "max_position_embeddings": field("context_length"),
        # GGUF keeps it in 32 bits: 9.999999747e-06 is the shortest decimal that fits, 1e-05.
        "rms_norm_eps": float(str(np.float32(field("attention.layer_norm_rms_epsilon")))),
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "dtype": "float32",
        # Without a version before 4.57.3, transformers 5.0 warns that any large local tokenizer has Mistral's old bug.
        "transformers_version": "4.57.0",
    }
    if architecture == "llama":
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **common,
            "hidden_act": "silu",
            "mlp_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        }
    # Gemma 3 (technical report, section 2): five sliding layers with base 10k to one full layer with the stored base.
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **common,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": common["head_dim"],
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "sliding_window": field("attention.sliding_window"),
        "layer_types": ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(layers)],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    }


def name_of(tensor: str, architecture: str) -> str | None:
    """What transformers calls a tensor of a GGUF file of one of `ARCHITECTURES`, None for one not known here."""
    stem, _, kind = tensor.rpartition(".")
    prefix = ""
    if stem.startswith("blk."):
        _, layer, stem = stem.split(".")
        prefix = f"model.layers.{layer}."
    name = _MLP_NORM[architecture] if stem == "ffn_norm" else _NAMES.get(stem)
    return None if name is None else f"{prefix}{name}.{kind}"


def rotary_heads(tensor: str, architecture: str, reader: GGUFReader) -> int | None:
    """Number of heads of a tensor whose rows llama.cpp has put in another order, None for all others."""
    counts = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
    count = counts.get(tensor.split(".")[-2])
    if architecture != "llama" or count is None:
        return None
    return int(reader.fields[f"{architecture}.{count}"].contents())


def halves_from_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp stores rotary pairs next to each other; transformers has the halves one after the other."""
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def _tensors(reader: GGUFReader, architecture: str) -> Iterator[tuple[str, np.ndarray]]:
    for tensor in reader.tensors:
        if (name := name_of(tensor.name, architecture)) is None:
            raise WeightsError(
                f"can't convert the tensor {tensor.name!r}, which no {architecture} model known here has"
            )
        weight = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if heads := rotary_heads(tensor.name, architecture, reader):
            weight = halves_from_pairs(weight, heads)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            weight = weight - 1  # transformers' Gemma norms multiply by 1 + weight
        yield name, np.ascontiguousarray(weight)


def _write_weights(folder: Path, tensors: Iterator[tuple[str, np.ndarray]]) -> None:
    shards: list[dict[str, np.ndarray]] = [{}]
    for name, weight in tensors:
        if shards[-1] and sum(w.nbytes for w in shards[-1].values()) + weight.nbytes > _SHARD_BYTES:
            shards.append({})
        shards[-1][name] = weight
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(weight.nbytes for shard in shards for weight in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def _write_tokenizer(folder: Path, fields: dict[str, Any]) -> None:
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    kind = fields["tokenizer.ggml.model"]
    bos = fields["tokenizer.ggml.bos_token_id"]
    tokenizer = _bytelevel_bpe(tokens, fields["tokenizer.ggml.merges"]) if kind == "gpt2" else _spm_bpe(tokens, types)
    added = [
        AddedToken(text, special=kind_of == _CONTROL, normalized=False)
        for text, kind_of in zip(tokens, types, strict=True)
        # Runs of blanks are user-defined too, but blanks are already "▁" where these are matched: merges make them.
        if kind_of in (_CONTROL, _USER_DEFINED) and text.strip(" ")
    ]
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])
    if fields.get("tokenizer.ggml.add_bos_token"):
        begin = tokens[bos]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A {begin}:1 $B:1", special_tokens=[(begin, bos)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields[f"{fields['general.architecture']}.context_length"],
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[bos],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
    }
    if template := fields.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    _write_json(folder / "tokenizer_config.json", settings)


def _bytelevel_bpe(tokens: list[str], merges: list[str]) -> Tokenizer:
    """SmolLM2's tokenizer: GPT-2's byte-level BPE with every digit on its own."""
    vocabulary = {text: i for i, text in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, fuse_unk=False, byte_fallback=False))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _spm_bpe(tokens: list[str], types: list[int]) -> Tokenizer:
    """Gemma's SentencePiece BPE: ids are in order of merging, so every way to split a piece into two is a merge."""
    # GGUF shows the runs of blanks as blanks; inside the model a blank is "▁".
    pieces = [text if text.strip(" ") else text.replace(" ", "▁") for text in tokens]
    vocabulary = {text: i for i, text in enumerate(pieces)}
    merges = []
    for piece in pieces:
        cuts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        known = [(left, right) for left, right in cuts if left in vocabulary and right in vocabulary]
        merges += sorted(known, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    bpe = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(" "), "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer
