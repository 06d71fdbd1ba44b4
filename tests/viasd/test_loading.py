from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import save_tiny

from viasd import hub, loading
from viasd.errors import LoadError, OptionError, WeightsError
from viasd.loading import LoadConfig, load_pair_models
from viasd.pairs import parse_pair

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


@pytest.fixture
def packaged(saved: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Packaged weights without fetching: any key is the tiny model; the keys asked for are returned."""
    asked: list[str] = []

    def ensure(key: str, **options: object) -> Path:
        asked.append(key)
        return saved

    monkeypatch.setattr(loading, "ensure_packaged", ensure)
    return asked


def test_explicit_folders_make_a_pair_with_its_own_drafter_dtype(saved: Path) -> None:
    config = dataclasses.replace(FLOAT32, drafter_dtype="bfloat16")
    pair = load_pair_models((str(saved), str(saved)), config)
    assert pair.drafter is not None
    assert pair.drafter is not pair.target
    assert (pair.dtype, pair.device, pair.source) == ("float32", "cpu", "local")
    assert pair.drafter.dtype == torch.bfloat16
    assert pair.drafter_tokenizer.get_vocab() == pair.target_tokenizer.get_vocab()
    assert pair.has_chat_template is False


@pytest.mark.parametrize("drafter", ["lookup", "self"])
def test_model_free_drafters_load_the_target_only(drafter: str, folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": "x"}))
    pair = load_pair_models((drafter, str(folder)), FLOAT32)
    assert (pair.drafter, pair.drafter_tokenizer, pair.drafter_id) == (None, None, drafter)
    assert pair.has_chat_template is True


@pytest.mark.usefixtures("offline")
def test_without_a_hub_the_default_pair_uses_packaged_weights(packaged: list[str]) -> None:
    said: list[str] = []
    pair = load_pair_models(parse_pair("smollm2-lookup:135m"), FLOAT32, said.append)
    assert packaged == ["smollm2:135m"]
    assert (pair.source, pair.target_id) == ("packaged", "smollm2:135m")
    assert said == ["using packaged weights for smollm2:135m (the model hub can't be reached)"]


def test_packaged_weights_can_be_forced(packaged: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "is_reachable", lambda: pytest.fail("asked"))
    config = dataclasses.replace(FLOAT32, weights="packaged")
    assert load_pair_models(parse_pair("smollm2-self:135m"), config).source == "packaged"
    with pytest.raises(WeightsError, match="not for smollm2:360m"):
        load_pair_models(parse_pair("smollm2-135m:360m"), config)
    with pytest.raises(OptionError, match="needs a registered pair or target such as smollm2:135m"):
        load_pair_models(("lookup", "org/name"), config)


@pytest.mark.usefixtures("offline")
def test_a_registered_target_may_be_named_alone(packaged: list[str]) -> None:
    loaded = load_pair_models(("lookup+self", "SmolLM2:135m"), FLOAT32)
    assert (loaded.source, loaded.target_id, loaded.drafter_id) == ("packaged", "smollm2:135m", "self")
    assert loaded.lookup_first
    assert packaged == ["smollm2:135m"]


def test_packaged_weights_can_be_forbidden(packaged: list[str]) -> None:
    with pytest.raises(LoadError, match="hub can't be reached"):
        load_pair_models(parse_pair("smollm2-lookup:135m"), dataclasses.replace(FLOAT32, weights="hub"))
    assert packaged == []


def test_a_reachable_hub_is_preferred(packaged: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "is_cached", lambda ref: False)
    monkeypatch.setattr(hub, "is_reachable", lambda: True)
    loaded: list[str] = []
    monkeypatch.setattr(loading, "load_tokenizer", lambda ref, config: loaded.append(ref))
    monkeypatch.setattr(loading, "load_model", lambda ref, config: pytest.fail("enough"))
    with pytest.raises(pytest.fail.Exception):
        load_pair_models(parse_pair("smollm2-lookup:135m"), FLOAT32)
    assert loaded == ["HuggingFaceTB/SmolLM2-135M-Instruct"]
    assert packaged == []


@pytest.mark.usefixtures("offline")
def test_a_base_model_in_place_of_an_instruct_one_is_announced(packaged: list[str]) -> None:
    said: list[str] = []
    load_pair_models(parse_pair("gemma3-lookup:270m"), FLOAT32, said.append)
    assert any("base model, not the instruct one" in line for line in said)
    said.clear()
    load_pair_models(parse_pair("gemma3-lookup:270m", base=True), FLOAT32, said.append)
    assert len(said) == 1


@pytest.mark.usefixtures("offline")
def test_an_instruct_model_never_stands_in_for_a_base_one(packaged: list[str]) -> None:
    with pytest.raises(WeightsError, match="smollm2:135m are an instruct model"):
        load_pair_models(parse_pair("smollm2-lookup:135m", base=True), FLOAT32)
    assert packaged == []
