"""Reads the 4-bit codes of a GGUF file's Q4_1 weights, so that they run as they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader

from viasd.gguf_convert import ARCHITECTURES, halves_from_pairs, name_of, rotary_heads
from viasd.quantized import GROUP, GroupCodes


def read_codes(gguf: Path) -> dict[str, GroupCodes]:
    """The Q4_1 weights of a Llama or Gemma3 file, by the names that transformers gives them; empty for other files.

    Q4_1 stores blocks of 32 weights ``d * code + m`` with d and m in fp16; here ``zero = m + 8 d``, in fp32.

    Raises:
        OSError: If the file can't be read.
        ValueError: If it is no GGUF file.
    """
    reader = GGUFReader(gguf)
    architecture = reader.fields["general.architecture"].contents()
    if architecture not in ARCHITECTURES:
        return {}
    found = {}
    for tensor in reader.tensors:
        if tensor.tensor_type != GGMLQuantizationType.Q4_1 or not (name := name_of(tensor.name, architecture)):
            continue
        codes, scale, minimum = unpack_q4_1(tensor.data)
        parts = [codes, scale, minimum + 8 * scale]
        if heads := rotary_heads(tensor.name, architecture, reader):
            parts = [halves_from_pairs(part, heads) for part in parts]
        found[name] = GroupCodes(*(torch.from_numpy(np.ascontiguousarray(p)) for p in parts))
    return found


def unpack_q4_1(data: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of Q4_1 blocks, ``[o, 20 k / 32]`` bytes -> codes ``[o, k]`` uint8, d and m ``[o, k / 32]`` fp32.

    A block is d, m, and 16 bytes whose low halves are the first 16 codes and whose high halves are the others.
    """
    blocks = np.ascontiguousarray(data).reshape(data.shape[0], -1, 4 + GROUP // 2)
    ends = blocks[..., :4].copy().view(np.float16).astype(np.float32)
    packed = blocks[..., 4:]
    codes = np.concatenate((packed & 15, packed >> 4), axis=-1)
    return codes.reshape(data.shape[0], -1), ends[..., 0], ends[..., 1]
