from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import save_tiny, tiny_llama, write_llama_gguf
from transformers import LlamaForCausalLM

from viasd import checkpoints, hardware, hub
from viasd.checkpoints import LoadConfig, load_model, load_tokenizer
from viasd.errors import LoadError, OptionError, UnsupportedModelError, ViasdError

FLOAT32 = LoadConfig(device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    copy = tmp_path / "model"
    copy.mkdir()
    for path in saved.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "is_reachable", lambda: False)
    monkeypatch.setattr(hub, "is_cached", lambda ref: False)


def refusal(kind: type[ViasdError], ref: object, config: LoadConfig = FLOAT32) -> str:
    with pytest.raises(ViasdError) as caught:
        load_model(str(ref), config)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_loads_as_it_was_saved(saved: Path) -> None:
    model = load_model(str(saved), FLOAT32)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, tiny_llama()(ids).logits)
    assert not model.training
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_the_dtype_asked_for_is_the_dtype_of_all_weights(name: str, saved: Path) -> None:
    model = load_model(str(saved), LoadConfig(device="cpu", dtype=name))
    assert {weight.dtype for weight in model.parameters()} == {hardware.DTYPES[name]}


def test_a_gguf_file_loads_dense_with_its_tokenizer(tmp_path: Path) -> None:
    write_llama_gguf(tmp_path / "tiny.gguf")
    model = load_model(str(tmp_path / "tiny.gguf"), FLOAT32)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, tiny_llama()(ids).logits, rtol=0, atol=1e-6)
    assert load_tokenizer(str(tmp_path / "tiny.gguf")).tokenize("the 12") == ["t", "he", "Ġ", "1", "2"]


def test_missing_paths_are_named(tmp_path: Path) -> None:
    assert "no folder at" in refusal(LoadError, tmp_path / "none")
    assert "no folder at ./none" in refusal(LoadError, "./none")
    assert "no GGUF file" in refusal(LoadError, tmp_path / "none.gguf")
    assert "holds no config.json" in refusal(LoadError, tmp_path)
    (tmp_path / "weights.bin").touch()
    assert "another kind of file" in refusal(LoadError, tmp_path / "weights.bin")
    assert "neither a local folder" in refusal(LoadError, "not a name")


def test_a_weight_file_cut_short_is_called_broken(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "broken or cut short" in refusal(LoadError, folder)


def test_missing_weights_are_refused_not_drawn_at_random(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "lacks 1 weights, the first is model.layers.1.mlp.up_proj.weight" in refusal(LoadError, folder)


def test_a_broken_config_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')
    assert str(folder) in refusal(LoadError, folder)


def test_an_unknown_architecture_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "zeta9"}))
    assert "zeta9" in refusal(UnsupportedModelError, folder)


def test_a_broken_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"not a gguf file at all" * 10)
    assert "can't load" in refusal(LoadError, tmp_path / "a.gguf")
    with pytest.raises(LoadError, match="can't load"):
        load_tokenizer(str(tmp_path / "a.gguf"))


def test_too_little_memory_is_noticed_before_reading(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "free_memory", lambda device: 1000)
    monkeypatch.setattr(LlamaForCausalLM, "__init__", None)
    assert "GB in float32, but cpu has" in refusal(LoadError, saved)


def test_a_quantization_backend_that_is_not_there_is_named(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hardware.QUANTIZATIONS, "hqq-4bit", ("no_such_module", "some-package", 0.5))
    config = dataclasses.replace(FLOAT32, quantization="hqq-4bit")
    assert "pip install some-package" in refusal(LoadError, saved, config)


def test_a_gguf_file_is_not_quantized_again(tmp_path: Path) -> None:
    write_llama_gguf(tmp_path / "tiny.gguf")
    config = dataclasses.replace(FLOAT32, quantization="bnb-8bit")
    assert "is a GGUF file" in refusal(OptionError, tmp_path / "tiny.gguf", config)


@pytest.mark.usefixtures("offline")
def test_an_unreachable_hub_is_named() -> None:
    assert "hub can't be reached and org/name is not in its local cache" in refusal(LoadError, "org/name")


def test_a_cached_checkpoint_is_loaded_without_asking_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []

    def note(ref: str, **options: object) -> None:
        asked.append(options)
        raise ValueError("enough")

    monkeypatch.setattr(hub, "is_cached", lambda ref: True)
    monkeypatch.setattr(hub, "is_reachable", lambda: pytest.fail("asked"))
    monkeypatch.setattr(checkpoints.AutoConfig, "from_pretrained", note)
    refusal(LoadError, "org/name")
    assert asked[0]["local_files_only"] is True


@pytest.mark.parametrize("content", ['{"version": "1.0"', "", '{"model": {"type": "Nope"}}'])
def test_a_broken_tokenizer_is_refused(content: str, folder: Path) -> None:
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(LoadError) as caught:
        load_tokenizer(str(folder))
    assert "\n" not in str(caught.value)


def test_a_folder_without_tokenizer_is_refused(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(LoadError, match=r"has no tokenizer; add its tokenizer\.json"):
        load_tokenizer(str(folder))


def test_progress_bars_are_as_before_afterwards(saved: Path, capfd: pytest.CaptureFixture) -> None:
    from transformers.utils import logging

    logging.enable_progress_bar()
    load_model(str(saved), FLOAT32)
    assert logging.is_progress_bar_enabled()
    assert "Loading weights" not in capfd.readouterr().err


@pytest.mark.parametrize("options", [{"weights": "zip"}, {"device": "cpu", "device_map": "auto"}])
def test_contradicting_options_are_refused_at_once(options: dict[str, str]) -> None:
    with pytest.raises(OptionError):
        LoadConfig(**options)
