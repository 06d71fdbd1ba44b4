from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from viasd import hardware
from viasd.errors import LoadError, OptionError
from viasd.hardware import parameter_count, quantization_config, require_memory, resolve_device, resolve_dtype

CPU = torch.device("cpu")


def test_cpu_is_cpu_and_auto_is_something_usable() -> None:
    assert resolve_device("cpu") == CPU
    torch.zeros(1, device=resolve_device("auto"))


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "mps:0", ""])
def test_malformed_devices_are_refused(name: str) -> None:
    with pytest.raises(OptionError, match="auto, cpu, cuda, cuda:N or mps"):
        resolve_device(name)


@pytest.mark.parametrize(("count", "name"), [(0, "cuda"), (2, "cuda:2")])
def test_absent_gpus_are_refused(count: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(OptionError, match=f"torch sees {count} CUDA devices"):
        resolve_device(name)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [({"avx2", "avx512f"}, torch.float32), ({"amx_bf16"}, torch.bfloat16), ({"avx512_bf16"}, torch.bfloat16)],
)
def test_auto_is_bfloat16_only_on_cpus_that_multiply_it(
    flags: set[str], expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "_cpu_flags", lambda: flags)
    assert resolve_dtype("auto", CPU) == expected
    assert resolve_dtype("float16", CPU) == torch.float16


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), torch.float32), ((8, 0), torch.bfloat16)])
def test_auto_on_cuda_follows_the_compute_capability(
    capability: tuple[int, int], expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert resolve_dtype("auto", torch.device("cuda")) == expected


def test_unknown_dtypes_are_refused() -> None:
    with pytest.raises(OptionError, match="float32, bfloat16, float16, but got 'fp8'"):
        resolve_dtype("fp8", CPU)


def test_unknown_quantizations_are_refused() -> None:
    with pytest.raises(OptionError, match="bnb-4bit"):
        quantization_config("int3", torch.float32)


@pytest.mark.parametrize(("name", "package"), [("bnb-4bit", "bitsandbytes"), ("quanto-int8", "optimum-quanto")])
def test_a_missing_backend_says_what_to_install(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware.importlib.util, "find_spec", lambda module: None)
    with pytest.raises(LoadError, match=f"pip install {package}"):
        quantization_config(name, torch.float32)


@pytest.mark.parametrize("tied", [True, False])
def test_the_parameter_estimate_is_just_below_the_truth(tied: bool) -> None:
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    actual = LlamaForCausalLM(config).num_parameters()
    assert 0.95 * actual < parameter_count(config) < actual


def test_models_larger_than_the_free_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(num_hidden_layers=1, vocab_size=10)  # about 202M weights
    monkeypatch.setattr(hardware, "free_memory", lambda device: 600_000_000)
    with pytest.raises(LoadError, match=r"org/name needs about 0\.8 GB in float32, but cpu has 0\.6 GB free"):
        require_memory(config, torch.float32, CPU, "org/name", None)
    require_memory(config, torch.bfloat16, CPU, "org/name", None)
    require_memory(config, torch.float32, CPU, "org/name", "bnb-4bit")
    monkeypatch.setattr(hardware, "free_memory", lambda device: None)
    require_memory(config, torch.float32, CPU, "org/name", None)
