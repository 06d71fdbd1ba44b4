from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from viasd import masks, shipped
from viasd.errors import MaskError
from viasd.mask import LayerMask
from viasd.shipped import find_mask, resolve_mask, shipped_mask, shipped_masks

KEEP = (True, True, False, True, False, False, True, True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "shipped"
    path.mkdir()
    for module in (masks, shipped):
        monkeypatch.setattr(module.resources, "files", lambda package: path)  # type: ignore[attr-defined]
    monkeypatch.chdir(tmp_path)
    return path


def put(folder: Path, name: str, plain: Any = None, cascade: Any = None, keep: tuple[bool, ...] = KEEP) -> LayerMask:
    details = {} if plain is None else {"tier": {"per_token": {"plain": plain, "cascade": cascade}}}
    mask = LayerMask(keep, name, "tiny-lookup:8", details=details)
    mask.save(folder / f"{name}.json")
    return mask


def test_what_mask_specifications_name(folder: Path, tmp_path: Path) -> None:
    assert resolve_mask("none", 8, "smollm2-lookup:135m") is None
    even = resolve_mask("even:0.5", 8, None)
    assert even is not None
    assert (even.keep.count(False), even.name) == (4, "even:0.5")
    mask = put(tmp_path, "m")
    assert resolve_mask(str(tmp_path / "m.json"), 8, None) == mask
    assert resolve_mask("auto", 8, None) is None
    assert resolve_mask("auto", 8, "no-such:pair") is None
    for bad in ("even:half", "even:"):
        with pytest.raises(MaskError, match="expected --mask even:RATIO"):
            resolve_mask(bad, 8, None)


def test_masks_are_found_by_the_pairs_target(folder: Path) -> None:
    put(folder, "tiny-8.skip40")
    (folder / "tiny-80.json").write_text("{}")
    for pair in ("tiny-lookup:8", "tiny-2b:8"):
        found = shipped_mask(pair)
        assert found is not None
        assert found.keep == KEEP
    assert shipped_mask("tiny-lookup:9") is None
    assert shipped_mask("other-lookup:8") is None


def test_auto_takes_the_least_predicted_time_beside_plain_decoding(folder: Path) -> None:
    put(folder, "tiny-8.a")
    put(folder, "tiny-8.b", plain=2.0, cascade=3.0)
    put(folder, "tiny-8.c", plain=1.0, cascade=1.2)
    put(folder, "tiny-8.d", plain=1.0, cascade=None)
    assert [m.name for m in shipped_masks("tiny-lookup:8")] == ["tiny-8.a", "tiny-8.b", "tiny-8.c", "tiny-8.d"]
    assert resolve_mask("auto", 8, "tiny-self:8") == find_mask("tiny-8.c")


def test_a_shipped_mask_goes_by_its_name_unless_there_is_such_a_file(folder: Path, tmp_path: Path) -> None:
    own = put(folder, "tiny-8.skip40")
    assert find_mask("tiny-8.skip40") == own
    with pytest.raises(MaskError, match=r"can't read mask file 'tiny-8'.*shipped masks, by name: tiny-8\.skip40"):
        find_mask("tiny-8")
    other = put(tmp_path, "other", keep=(True, False, True))
    (tmp_path / "other.json").rename(tmp_path / "tiny-8.skip40")
    assert find_mask("tiny-8.skip40") == other
    (tmp_path / "tiny-8.skip40").write_text("[")
    with pytest.raises(MaskError, match="is not JSON"):
        find_mask("tiny-8.skip40")


@pytest.mark.parametrize("name", masks.names())
def test_every_shipped_mask_is_a_finished_search_that_beats_chance(name: str) -> None:
    mask = find_mask(name)
    details = mask.details
    assert mask.name == name
    assert mask.target is not None
    assert details["interrupted"] is False
    assert details["trials"] == details["controls"]["random_masks"] >= 60
    assert details["beats_random"] is True
    assert details["report"]["cost"] < details["controls"]["even"]["report"]["cost"]
    assert set(details["tier"]["per_token"]) == {"plain", "sd", "cascade"}
    assert len(shipped_masks(str(mask.pair))) >= 1
