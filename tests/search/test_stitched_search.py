from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import save_target

import viasd
import viasd.search.cli as cli
from viasd.loading import LoadConfig
from viasd.mask import LayerMask

BASE = ("--skip", "0.4", "--trials", "6", "--controls", "2", "--device", "cpu", "--dtype", "float32", "--gamma", "3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VIASD_CACHE", str(tmp_path / "cache"))
    return tmp_path


def run(folder: str, *argv: str) -> int:
    return cli.main(["--target", folder, *BASE, "--output", "m.json", *argv])


def test_the_mask_that_is_best_with_stitches_is_taken(folder: str, capfd: Any) -> None:
    assert run(folder, "--tau", "200", "--stitch", "--json") == 0
    said = json.loads(capfd.readouterr()[0])["best"]
    tried = said["stitched"]["tried"]
    assert len(tried) == 4
    assert [one["without"]["cost"] for one in tried] == sorted(one["without"]["cost"] for one in tried)
    best = min(tried, key=lambda one: (one["with"]["cost"], one["with"]["kl"]))
    assert "".join(map(str, said["keep"])) == best["keep"]
    assert said["stitched"]["search"] == best["with"]
    assert said["stitched"]["search"]["cost"] < said["search"]["cost"]
    assert said["cost"] == said["stitched"]["report"]["cost"] != said["report"]["cost"]
    mask = LayerMask.load("m.json")
    assert mask.to_json() == said
    assert mask.stitches is not None
    assert mask.stitches.details["corpus"] == "calibration"
    assert list(said["trust"]) == ["without stitches", "slim verifier"]
    pair = viasd.load_pair(target=folder, config=LoadConfig(dtype="float32"))
    found = viasd.generate(pair, "hello", mask=mask, mode="lossless", tiers="3", max_new_tokens=12, ignore_eos=True)
    plain = viasd.generate(pair, "hello", mask=None, strategy="plain", max_new_tokens=12, ignore_eos=True)
    assert found.token_ids == plain.token_ids
    assert cli.main(["show", "m.json"]) == 0
    assert "with stitches, reporting half: cost" in capfd.readouterr()[0]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--tau", "24", "--stitch"), "width 32 on the searching half, which has 24 tokens"),
        (("--tau", "24", "--stitch", "nowhere.npz"), "can't read corpus 'nowhere.npz'"),
        (("--stitch", "--sublayers"), "stitch and sublayers contradict each other"),
        (("--stitch", "--private-kv"), "stitch and private_kv contradict each other"),
    ],
)
def test_what_can_not_be_stitched_is_refused_before_anything_is_searched(
    folder: str, capfd: Any, argv: tuple[str, ...], message: str
) -> None:
    assert run(folder, *argv) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert message in err
    assert not Path("m.json").exists()
