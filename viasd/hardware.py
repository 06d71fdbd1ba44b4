"""What this machine can hold and do quickly: devices, dtypes, memory, quantisation back-ends."""

from __future__ import annotations

import importlib
import importlib.util
import platform
from pathlib import Path
from typing import Any

import torch

from viasd.errors import LoadError, OptionError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

#: CPU features with native bfloat16 multiplication (x86 names, then Arm's), as Linux lists them.
_BF16_CPU_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}

#: name -> (module that must be importable, package to install, bytes per weight).
QUANTIZATIONS: dict[str, tuple[str, str, float]] = {
    "bnb-4bit": ("bitsandbytes", "bitsandbytes", 0.55),
    "bnb-8bit": ("bitsandbytes", "bitsandbytes", 1.0),
    "torchao-int8": ("torchao", "torchao", 1.0),
    "torchao-int4": ("torchao", "torchao", 0.55),
    "hqq-4bit": ("hqq", "hqq", 0.55),
    "quanto-int8": ("optimum.quanto", "optimum-quanto", 1.0),
}


def wait_for(device: torch.device) -> None:
    """Returns when a device has done what it was given: before a clock is read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def resolve_device(name: str) -> torch.device:
    """The device a name means on this machine.

    Args:
        name: ``auto`` (CUDA, else MPS, else CPU), ``cpu``, ``cuda``, ``cuda:N`` or ``mps``.

    Raises:
        OptionError: If the name is malformed or no such device is present.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    kind, colon, index = name.partition(":")
    if kind not in ("cpu", "cuda", "mps") or (colon and not (kind == "cuda" and index.isdecimal())):
        raise OptionError(f"a device must be auto, cpu, cuda, cuda:N or mps, but got {name!r}")
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(index or 0) >= count:
            raise OptionError(f"device {name!r} was asked for, but torch sees {count} CUDA devices; use --device cpu")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise OptionError("device 'mps' was asked for, but torch finds no Apple GPU; use --device cpu")
    return torch.device(name)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype a name means on `device`.

    Args:
        name: ``auto``, ``float32``, ``bfloat16`` or ``float16``. ``auto`` is bfloat16 on CUDA from compute capability
            8.0 on and on CPUs with AVX512-BF16, AMX or Arm's BF16, else float32: Apple's GPUs emulate bfloat16 in
            part, and float16 overflows in Gemma's residual stream.
        device: Where the model will run.

    Raises:
        OptionError: If the name is not one of these.
    """
    if name != "auto":
        if name not in DTYPES:
            raise OptionError(f"a dtype must be auto, {', '.join(DTYPES)}, but got {name!r}")
        return DTYPES[name]
    if device.type == "cuda":
        fast = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        fast = device.type == "cpu" and bool(_cpu_flags() & _BF16_CPU_FLAGS)
    return torch.bfloat16 if fast else torch.float32


def quantization_config(name: str, dtype: torch.dtype) -> Any:
    """The transformers configuration object for a name in `QUANTIZATIONS`.

    Raises:
        OptionError: If the name is unknown.
        LoadError: If the back-end is not installed; the message says what to install.
    """
    if name not in QUANTIZATIONS:
        raise OptionError(f"a quantization must be one of int8, int4, {', '.join(QUANTIZATIONS)}, but got {name!r}")
    module, package, _ = QUANTIZATIONS[name]
    # The parent package is looked up first: find_spec imports it.
    if any(importlib.util.find_spec(part) is None for part in _parents(module)):
        raise LoadError(f"quantization {name} needs the package {package}; run `pip install {package}`")
    transformers = importlib.import_module("transformers")
    if name == "bnb-4bit":
        return transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
    if name == "bnb-8bit":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    if name.startswith("torchao"):
        recipes = importlib.import_module("torchao.quantization")
        int8 = name.endswith("int8")
        return transformers.TorchAoConfig(recipes.Int8WeightOnlyConfig() if int8 else recipes.Int4WeightOnlyConfig())
    if name == "hqq-4bit":
        return transformers.HqqConfig(nbits=4, group_size=64)
    return transformers.QuantoConfig(weights="int8")


def require_memory(config: Any, dtype: torch.dtype, device: torch.device, ref: str, quantization: str | None) -> None:
    """Refuse a model whose weights alone exceed the free memory, before anything is fetched or allocated.

    Args:
        config: The model's transformers configuration.
        dtype: Of the weights, unless quantised.
        device: Where they go.
        ref: Named in the message.
        quantization: A name in `QUANTIZATIONS`, or None.

    Raises:
        LoadError: If they do not fit.
    """
    free = free_memory(device)
    each = QUANTIZATIONS[quantization][2] if quantization else dtype.itemsize
    needed = parameter_count(config) * each
    if free is not None and needed > free:
        raise LoadError(
            f"{ref} needs about {needed / 1e9:.1f} GB in {quantization or str(dtype).removeprefix('torch.')}, but "
            f"{device} has {free / 1e9:.1f} GB free; choose a smaller dtype, --quantization, or a smaller model"
        )


def parameter_count(config: Any) -> int:
    """Lower bound on the weights of a dense decoder of this configuration; 0 where its fields are unusual."""
    text = config.get_text_config()
    try:
        width, heads, layers = text.hidden_size, text.num_attention_heads, text.num_hidden_layers
        head_dim = getattr(text, "head_dim", None) or width // heads
        keys = (getattr(text, "num_key_value_heads", None) or heads) * head_dim
        layer = 2 * width * heads * head_dim + 2 * width * keys + 3 * width * text.intermediate_size
        embeddings = text.vocab_size * width * (1 if getattr(text, "tie_word_embeddings", False) else 2)
        return int(layers * layer + embeddings)
    except (AttributeError, TypeError):
        return 0


def free_memory(device: torch.device) -> int | None:
    """Bytes free for new allocations on `device`, None where there is no cheap way to know."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "cpu" and platform.system() == "Linux":
        limits = [
            int(line.split()[1]) << 10
            for line in Path("/proc/meminfo").read_text().splitlines()
            if line.startswith("MemAvailable:")
        ]
        container = Path("/sys/fs/cgroup/memory.max")
        if container.is_file() and (limit := container.read_text().strip()) != "max":
            limits.append(int(limit))
        return min(limits, default=None)
    return None


def cpu_name() -> str:
    """The processor's name, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _cpu_flags() -> set[str]:
    """Feature names of the first CPU; empty where the system does not list them."""
    listing = Path("/proc/cpuinfo")
    if not listing.is_file():
        return set()
    for line in listing.read_text(errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return set(value.split())
    return set()
