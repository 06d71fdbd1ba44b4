from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Counting, generate, model_of, pair_of, prompt_ids
from torch import Tensor

import viasd
from viasd.attention import Segment
from viasd.errors import MaskError
from viasd.identity import ModelIdentity
from viasd.layered import LayeredModel
from viasd.mask import LayerMask
from viasd.probe import load_layered
from viasd.routes import Route
from viasd.runtime.config import DecodingConfig
from viasd.runtime.costs import cost_table
from viasd.runtime.drafters import SelfDrafter
from viasd.runtime.metrics import Counters
from viasd.runtime.target import TieredTarget
from viasd.runtime.tiers import measure_tiers
from viasd.stitch import Stitch
from viasd.stitches import Stitches
from viasd.testing import byte_tokenizer, tiny_model

KEEP = (True, True, False, True, False, False, True, True)  # gaps 2 and 4-5
WIDTH = 32


def stitch(seed: int, rank: int | None = None, scale: float = 0.3) -> Stitch:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * scale / WIDTH**0.5

    return Stitch((drawn(WIDTH, WIDTH),) if rank is None else (drawn(WIDTH, rank), drawn(rank, WIDTH)), drawn(WIDTH))


# Across both gaps, an adapter between them, and one before the readout.
MAPS = {3: stitch(0), 4 + 2: stitch(1), 7: stitch(2, rank=3), 8: stitch(3, rank=2)}


def stitches_of(model: LayeredModel, maps: Any = None, **details: Any) -> Stitches:
    return Stitches(maps or MAPS, ModelIdentity.of(model, "tiny"), KEEP, details)


def mask_of(pair: viasd.Pair, maps: Any = None) -> LayerMask:
    return LayerMask(KEEP, "stitched", stitches=stitches_of(pair.target, maps))


def by_hand(model: Any, ids: list[int], family: str) -> Tensor:
    """Raw logits of the stitched slim path, by transformers' own modules."""
    decoder = model.model
    n = len(ids)
    hidden = decoder.embed_tokens(torch.tensor([ids]))
    if family == "gemma2":
        hidden = hidden * torch.tensor(WIDTH**0.5)
    positions = torch.arange(n)[None]
    causal = torch.full((n, n), -torch.inf).triu(1)[None, None]
    for index, layer in enumerate(decoder.layers):
        if index in MAPS:
            hidden = applied(MAPS[index], hidden)
        if KEEP[index]:
            rotary = decoder.rotary_emb(hidden, positions)
            out = layer(hidden, attention_mask=causal, position_embeddings=rotary, position_ids=positions)
            hidden = out[0] if isinstance(out, tuple) else out
    return model.lm_head(decoder.norm(applied(MAPS[8], hidden)))[0]


def applied(one: Stitch, hidden: Tensor) -> Tensor:
    weight = one.factors[0] if len(one.factors) == 1 else one.factors[0] @ one.factors[1]
    return hidden + hidden @ weight + one.shift


@pytest.mark.parametrize("layers", ["auto", "hf"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo2"])
def test_a_stitched_slim_pass_is_what_the_modules_give_by_hand(family: str, layers: str) -> None:
    model = model_of(family)
    target = TieredTarget(load_layered(model, layers=layers), Route(KEEP, stitches=MAPS), Counters())
    ids = prompt_ids()
    with torch.inference_mode():
        found = target.slim(ids, len(ids))
        expected = by_hand(model, ids, family)
        plain = TieredTarget(target.model, Route(KEEP), Counters()).slim(ids, len(ids))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert (plain - expected).abs().max() > 0.1


@pytest.mark.parametrize("layers", ["auto", "hf"])
def test_stitches_of_zero_change_no_bit(layers: str) -> None:
    model = load_layered(model_of("llama"), layers=layers)
    nothing = {i: Stitch((torch.zeros(WIDTH, WIDTH),), torch.zeros(WIDTH)) for i in (3, 6)}
    nothing[8] = Stitch((torch.zeros(WIDTH, 4), torch.zeros(4, WIDTH)), torch.zeros(WIDTH))
    ids = prompt_ids()
    with torch.inference_mode():
        rows = [TieredTarget(model, Route(KEEP, stitches=s), Counters()).slim(ids, 9) for s in (nothing, None)]
    assert torch.equal(*rows)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_q_and_the_shared_prefix_are_untouched(family: str) -> None:
    model = pair_of(family).target
    ids = prompt_ids()
    with torch.inference_mode():
        fresh = TieredTarget(model, None, Counters()).full(ids, 8)
        target = TieredTarget(model, Route(KEEP, stitches=MAPS), Counters())
        target.prefill(ids[:10])
        target.slim(ids[:16], 4)
        target.slim(ids[:21], 3)
        boundary = target.kv.boundary
        step = model.step([Segment(model.new_kv(), 0, 21)])
        expected, _ = model.run(model.embed(ids[:21]), range(2), step)
        escalated = target.full(ids, 8)
    assert boundary is not None
    torch.testing.assert_close(boundary, expected[:, 10:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(escalated, fresh, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("drafter", ["lookup", "model", "self"])
@pytest.mark.parametrize("mode", ["lossless", "via"])
def test_decoding_with_a_stitched_mask_equals_plain_decoding(drafter: str, mode: str) -> None:
    pair = pair_of("llama", drafter)
    ids = prompt_ids()
    plain = generate(pair, ids, strategy="plain").token_ids
    audited = {"gate": "ratio", "audit": 1.0} if mode == "via" else {}
    found = generate(pair, ids, strategy="cascade", tiers="3", mode=mode, mask=mask_of(pair), **audited)
    assert found.token_ids == plain
    assert found.stats.slim_calls


def test_the_slim_verifier_alone_and_as_a_drafter_applies_them() -> None:
    pair = pair_of("llama", "self")
    ids = prompt_ids()
    raw = LayerMask(KEEP, "raw")
    alone = [generate(pair, ids, mask=mask, strategy="slim").token_ids for mask in (mask_of(pair), raw)]
    assert alone[0] != alone[1]
    judged = generate(pair, ids, mask=mask_of(pair), strategy="self-sd").token_ids
    assert judged == generate(pair, ids, strategy="plain").token_ids
    with torch.inference_mode():
        target = TieredTarget(pair.target, None, Counters())
        target.prefill(ids[:16])
        drafter = SelfDrafter(target, Route(KEEP, stitches=MAPS))
        drafter.begin(ids[:16])
        drafted = drafter.rows(ids[16:], 8)
        slim = TieredTarget(pair.target, Route(KEEP, stitches=MAPS), Counters())
        slim.prefill(ids[:16])
        torch.testing.assert_close(drafted, slim.slim(ids, 8), atol=1e-4, rtol=1e-4)


def test_compiled_passes_apply_them_too() -> None:
    ids, rows, escalated = prompt_ids(), list[Tensor](), list[Tensor]()
    for compiled in (False, True):
        model = load_layered(tiny_model())
        backend = Counting()
        if compiled:
            model.compile(backend=backend)
        for maps in (MAPS, None):
            target = TieredTarget(model, Route(KEEP, stitches=maps), Counters())
            with torch.inference_mode():
                target.prefill(ids[:16])
                rows.append(target.slim(ids, 4))
                escalated.append(target.full(ids, 4))  # from the boundary, which is what no stitch has touched
        assert backend.compiled == (3 if compiled else 0)
        assert model.form.endswith(", compiled") == compiled
    torch.testing.assert_close(rows[0], rows[2], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(rows[1], rows[3], atol=1e-4, rtol=1e-4)
    for one in escalated[1:]:
        torch.testing.assert_close(one, escalated[0], atol=1e-4, rtol=1e-4)
    assert (rows[0] - rows[1]).abs().max() > 0.1


def test_what_is_measured_of_a_mask_is_not_taken_for_its_stitched_self(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VIASD_CACHE", str(tmp_path))
    found = []
    for mask in (
        LayerMask(KEEP),
        mask_of(pair_of("llama")),
        mask_of(pair_of("llama"), {3: stitch(8)}),
        LayerMask(KEEP),
    ):
        for _ in range(2):  # measured, and as the next process finds it in the cache folder
            pair = viasd.make_pair(model_of("llama"), byte_tokenizer())
            found.append(measure_tiers(pair, mask, DecodingConfig(), "via").rejection["slim_full"])
    raw, again, stitched, stitched_again, other, _, last, _ = found
    assert raw == again == last
    assert stitched == stitched_again
    assert len({raw, stitched, other}) == 3
    masks = (mask_of(pair), LayerMask(KEEP))  # and not on one pair either
    assert [measure_tiers(pair, m, DecodingConfig(), "via").rejection["slim_full"] for m in masks] == [stitched, raw]
    # Times depend on the ranks alone.
    pair = viasd.make_pair(model_of("llama"), byte_tokenizer())
    routes = [Route(KEEP), Route(KEEP, stitches=MAPS), Route(KEEP, stitches={3: stitch(1)})]
    before = len(list((tmp_path / "costs").iterdir()))
    for route in (*routes, Route(KEEP, stitches={3: stitch(7)})):
        cost_table(pair, route, 64, 2)
    assert len(list((tmp_path / "costs").iterdir())) == before + 3


def test_a_stitched_mask_is_saved_and_loaded_whole(tmp_path: Path) -> None:
    pair = pair_of("llama")
    mask = replace(mask_of(pair), stitches=stitches_of(pair.target, corpus="abc", ridge=0.01))
    path = tmp_path / "m.stitched.json"
    mask.save(path)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["m.stitched.json", "m.stitched.safetensors"]
    again = LayerMask.load(path)
    assert again.check(pair.target, "tiny") is None
    assert again.stitches is not None
    assert again.stitches.ranks == {3: None, 6: None, 7: 3, 8: 2}
    assert again.stitches.details == {"corpus": "abc", "ridge": 0.01}
    for index, one in MAPS.items():
        for mine, theirs in zip(one.factors, again.stitches.maps[index].factors, strict=True):
            assert torch.equal(mine, theirs)
        assert torch.equal(one.shift, again.stitches.maps[index].shift)
    # And once more from there.
    moved = tmp_path / "moved.json"
    again.save(moved)
    assert LayerMask.load(moved).stitches is not None
    assert json.loads(moved.read_text())["stitches"]["file"] == "moved.safetensors"
    assert json.loads(moved.read_text())["stitches"]["sha256"] == json.loads(path.read_text())["stitches"]["sha256"]


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    pair = pair_of("llama")
    path = tmp_path / "m.json"
    mask_of(pair).save(path)
    beside = tmp_path / "m.safetensors"
    content = beside.read_bytes()
    beside.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(MaskError, match="is not the one the mask was made with"):
        LayerMask.load(path)
    beside.unlink()
    with pytest.raises(MaskError, match="can't read stitches file"):
        LayerMask.load(path)
    for bad in (
        {"file": "../m.safetensors", "sha256": "0"},
        {"file": "m.safetensors"},
        ["m"],
        {"file": 3, "sha256": "0"},
    ):
        path.write_text(json.dumps({**json.loads(path.read_text()), "stitches": bad}))
        with pytest.raises(MaskError, match="'stitches' must name a 'file' in the same folder"):
            LayerMask.load(path)
    with pytest.raises(MaskError, match="load it from the folder"):
        LayerMask.from_json({**json.loads(path.read_text()), "stitches": {"file": "x", "sha256": "0"}}, "m")


@pytest.mark.parametrize("content", [b"", b"\x00" * 7, b"{}" * 40, (2**62).to_bytes(8, "little") + b"{}"])
def test_a_file_that_holds_no_stitches_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "s.safetensors"
    path.write_bytes(content)
    with pytest.raises(MaskError, match="is not one that viasd writes"):
        Stitches.load(path)


def test_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    shift = torch.zeros(WIDTH)
    shift[3] = torch.nan
    path = tmp_path / "s.safetensors"
    stitches_of(pair_of("llama").target, {3: Stitch((torch.zeros(WIDTH, WIDTH),), shift)}).save(path)
    with pytest.raises(MaskError, match="NaN or infinity"):
        Stitches.load(path)
    stitches_of(pair_of("llama").target, {3: Stitch((torch.zeros(WIDTH, 2), torch.zeros(3, WIDTH)), shift)}).save(path)
    with pytest.raises(MaskError, match="don't fit together"):
        Stitches.load(path)


def test_stitches_of_another_target_or_mask_are_refused() -> None:
    pair = pair_of("llama")
    other = load_layered(tiny_model())
    with torch.no_grad():
        other.decoder.norm.weight += 1
    with pytest.raises(MaskError, match="other weights than it's"):
        mask_of(pair).check(other, "it")
    with pytest.raises(MaskError, match="another architecture than it's"):
        mask_of(pair).check(load_layered(tiny_model("mistral")), "it")
    with pytest.raises(MaskError, match="other weights than"):
        generate(viasd.make_pair(other.model, byte_tokenizer()), prompt_ids(), mask=mask_of(pair), strategy="cascade")
    with pytest.raises(MaskError, match="fitted for another mask"):
        LayerMask((True, False, *KEEP[2:]), stitches=stitches_of(pair.target))
    with pytest.raises(MaskError, match="only whole layers can be stitched"):
        LayerMask(KEEP, partial=((4, "mlp"),), stitches=stitches_of(pair.target))


@pytest.mark.parametrize("index", [0, 1, 2, 4, 5, 9, -1])
def test_a_stitch_where_none_may_be_is_refused(index: int) -> None:
    with pytest.raises(MaskError, match=re.escape("after its first gap, 3 6 7 8, but these are before")):
        stitches_of(pair_of("llama").target, {3: stitch(0), index: stitch(1)})
