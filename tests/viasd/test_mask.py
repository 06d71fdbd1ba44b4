from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import generate, model_of, pair_of, prompt_ids

from viasd.errors import MaskError
from viasd.mask import LayerMask, ModelIdentity
from viasd.probe import load_layered
from viasd.routes import Route
from viasd.stitch import Stitch
from viasd.stitches import Stitches
from viasd.testing import tiny_model


@pytest.mark.parametrize("n_layers", [2, 3, 8, 26, 30, 46])
def test_even_masks_skip_the_share_asked_for_and_keep_the_ends(n_layers: int) -> None:
    for percent in range(0, 94):
        skipped = round(percent / 100 * n_layers)
        if skipped > n_layers - 2:
            with pytest.raises(MaskError, match="first and last are always kept"):
                LayerMask.even(n_layers, percent / 100)
            continue
        mask = LayerMask.even(n_layers, percent / 100)
        assert len(mask.keep) == n_layers
        assert mask.keep.count(False) == skipped
        assert mask.keep[0]
        assert mask.keep[-1]
        gaps = [i for i, k in enumerate(mask.keep) if not k]
        steps = [b - a for a, b in itertools.pairwise(gaps)]
        assert not steps or max(steps) - min(steps) <= 1


@pytest.mark.parametrize("ratio", [-0.1, 1.0, 1.5, math.nan, math.inf])
def test_ratios_out_of_range_are_refused(ratio: float) -> None:
    with pytest.raises(MaskError, match="at least 0 and below 1"):
        LayerMask.even(8, ratio)


def test_a_mask_keeps_first_and_last_layer() -> None:
    with pytest.raises(MaskError, match="skips the first layer"):
        LayerMask((False, True, True))
    with pytest.raises(MaskError, match="skips the last layer"):
        LayerMask((True, True, False))
    with pytest.raises(MaskError, match="at least two layers"):
        LayerMask((True,))


def searched() -> LayerMask:
    identity = ModelIdentity.of(load_layered(model_of("llama")), "tiny/llama")
    keep = (True, True, False, True, False, False, True, True)
    return LayerMask(keep, "study-3", "tiny-lookup:8", identity, {"cost": 0.25, "guard": {"slopes": [1.0]}, "seed": 7})


def test_saving_and_loading_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "mask.json"
    searched().save(path)
    assert LayerMask.load(path) == searched()
    assert [f.name for f in tmp_path.iterdir()] == ["mask.json"]
    data = json.loads(path.read_text())
    assert (data["schema"], data["layers"], data["keep"]) == (1, 8, [1, 1, 0, 1, 0, 0, 1, 1])
    assert data["skip_ratio"] == 0.375


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "schema 2, but this version reads 1"),
        ({"schema": None}, "schema None"),
        ({"keep": "11"}, "'keep' must be a list of 0 and 1"),
        ({"keep": [1, 2, 1]}, "'keep' must be a list of 0 and 1"),
        ({"keep": [1.0, 1.0]}, "'keep' must be a list of 0 and 1"),
        ({"keep": [1, None]}, "'keep' must be a list of 0 and 1"),
        ({"layers": 9}, "'layers' says 9, but 'keep' has 8"),
        ({"layers": None}, "'layers' says None"),
        ({"keep": [0, 1], "layers": 2}, "skips the first layer"),
        ({"sublayers": [[1, 0]]}, "'sublayers' must have 'attention' and 'mlp'"),
        ({"target": {"id": "x"}}, "'target' must have id, config and weights"),
        ({"target": "x"}, "'target' must have id, config and weights"),
    ],
)
def test_malformed_masks_are_refused_naming_the_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(MaskError, match=message):
        LayerMask.from_json({**searched().to_json(), **change}, "m")


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MaskError, match=r"can't read mask file .*No such file"):
        LayerMask.load(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text('{"schema": 1, "keep": [1, 0')
    with pytest.raises(MaskError, match=r"bad.json' is not JSON"):
        LayerMask.load(tmp_path / "bad.json")
    (tmp_path / "list.json").write_text("[1, 1]")
    with pytest.raises(MaskError, match="must be a JSON object, but is a list"):
        LayerMask.load(tmp_path / "list.json")
    for number in ("1e999", "-1e999", "1" + "0" * 400, "NaN"):
        (tmp_path / "huge.json").write_text(f'{{"schema": 1, "layers": 2, "keep": [1, 1], "cost": {number}}}')
        with pytest.raises(MaskError, match="is not JSON"):
            LayerMask.load(tmp_path / "huge.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MaskError, match="is not JSON"):
        LayerMask.load(tmp_path / "bytes.json")


def test_a_mask_fits_its_own_target_only() -> None:
    own = load_layered(model_of("llama"))
    assert searched().check(own, "tiny/llama") is None
    with pytest.raises(MaskError, match="has 8 layers, but other has 4"):
        searched().check(load_layered(tiny_model("llama", num_hidden_layers=4)), "other")
    with pytest.raises(MaskError, match="made for tiny/llama, whose architecture differs from other's"):
        searched().check(load_layered(tiny_model("llama", intermediate_size=48)), "other")
    retrained = tiny_model("llama")
    with torch.no_grad():
        retrained.model.norm.weight.mul_(1.25)
    warning = searched().check(load_layered(retrained), "other")
    assert warning is not None
    assert "searched on tiny/llama; the weights of other are others" in warning


def test_identity_does_not_depend_on_the_load_dtype() -> None:
    half, full = tiny_model("llama", dtype=torch.bfloat16), model_of("llama")
    assert ModelIdentity.of(load_layered(half), "x") == ModelIdentity.of(load_layered(full), "x")


def test_a_stale_mask_is_noted_in_the_result_and_a_foreign_one_refused() -> None:
    stale = LayerMask((True,) * 7 + (True,), "old", None, ModelIdentity("tiny/llama", searched().target.config, "0"))  # type: ignore[union-attr]
    options = {"strategy": "cascade", "mode": "lossless", "tiers": "3", "max_new_tokens": 4}
    result = generate(pair_of("llama"), prompt_ids(), mask=stale, **options)
    assert any("may not hold" in note for note in result.notes)
    with pytest.raises(MaskError, match="has 9 layers"):
        generate(pair_of("llama"), prompt_ids(), mask=LayerMask((True,) * 9), **options)


def test_routes_know_their_gap() -> None:
    route = Route.of([1, 1, 0, 1, 0, 0, 1])
    assert (route.layers, route.first_gap, route.resumes_at) == ((0, 1, 3, 6), 2, 3)
    assert route.skip_ratio == pytest.approx(3 / 7)
    assert (Route.full(5).first_gap, Route.full(5).resumes_at, Route.full(5).skip_ratio) == (5, 5, 0)
    assert Route.of([1, 0, 0, 1]).resumes_at == 3


@pytest.mark.parametrize("mask", [0.0, 0.2, 0.45, 0.6])
@pytest.mark.parametrize("skip", [0.0, 0.3, 0.6, 0.75, 0.9, 0.99])
def test_thinned_routes_are_sub_routes_of_the_size_asked_for(mask: float, skip: float) -> None:
    for n in (8, 13, 30):
        route = LayerMask.even(n, mask).route
        thin = route.thinned(skip)
        assert set(thin.layers) <= set(route.layers)
        assert len(thin.layers) == min(len(route.layers), max(2, n - round(skip * n)))
        assert thin.keep[0]
        assert thin.keep[-1]


def test_the_digest_tells_masks_apart_by_layers_head_and_stitches() -> None:
    pair = pair_of("llama")
    mask = LayerMask.even(pair.target.n_layers, 0.3)
    target = ModelIdentity.of(pair.target, "tiny")
    gap = mask.route.gaps[0][1]

    def stitched(shift: float) -> LayerMask:
        stitch = Stitch((torch.zeros(32, 32),), torch.full((32,), shift))
        return replace(mask, stitches=Stitches({gap: stitch}, target, mask.keep))

    prefix = LayerMask.first(8, 3)
    ended = [replace(prefix, head=SimpleNamespace(key=key)) for key in ("a", "b")]
    other = LayerMask.even(pair.target.n_layers, 0.5)
    masks = (mask, other, stitched(0.0), stitched(1.0), prefix, *ended)
    assert len({m.digest for m in masks}) == len(masks)
    assert stitched(1.0).digest == stitched(1.0).digest
    assert replace(mask, name="another", details={"seed": 1}).digest == mask.digest
