"""The first layers and a light head as the slim verifier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import generate, hf_greedy, model_of, pair_of, prompt_ids, watch_writes

import viasd
from viasd.attention import Segment
from viasd.errors import HeadsError, MaskError, OptionError
from viasd.heads import LightHeads
from viasd.kv import SequenceKV
from viasd.mask import LayerMask
from viasd.pair import Pair
from viasd.runtime.assembly import headed
from viasd.runtime.config import DecodingConfig
from viasd.runtime.metrics import Counters
from viasd.runtime.target import TieredTarget
from viasd.runtime.tiers import measure_tiers

N = 40
CASCADE: dict[str, Any] = {"strategy": "cascade", "tiers": "3", "heads": "lens:3,5"}


def slim_target(pair: Pair, layers: int, heads: LightHeads) -> TieredTarget:
    mask = headed(LayerMask.first(pair.target.n_layers, layers), heads, pair)
    assert mask is not None
    return TieredTarget(pair.target, mask.route, Counters())


@pytest.mark.parametrize("drafter", ["lookup", "model", "self"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_lossless_cascade_gives_plain_greedy_decoding(family: str, drafter: str) -> None:
    expected = hf_greedy(model_of(family), prompt_ids(), N)
    for layers, more in ((3, {"mode": "lossless"}), (5, {"mode": "lossless", "slim_rounds": 2, "gamma": 3})):
        result = generate(
            pair_of(family, drafter), prompt_ids(), max_new_tokens=N, mask=f"prefix:{layers}", **CASCADE, **more
        )
        assert result.token_ids == expected
        assert (result.lossless, result.mask) == (True, f"prefix:{layers}")
        assert result.stats.slim_calls > 0
    audited = {"mode": "via", "gate": "ratio", "audit": 1.0, "mask": "prefix:5"}
    assert (
        generate(pair_of(family, drafter), prompt_ids(), max_new_tokens=N, **CASCADE, **audited).token_ids == expected
    )


def test_its_rows_are_those_of_the_head_behind_these_layers() -> None:
    pair, heads = pair_of("gemma2"), LightHeads((5,), shortlist=torch.arange(3, 290))
    target, tokens = slim_target(pair, 5, heads), prompt_ids()
    with torch.inference_mode():
        target.prefill(tokens[:10])
        rows = target.slim(tokens[:16], 6)
        hidden, _ = pair.target.run(
            pair.target.embed(tokens[:16]),
            range(5),
            pair.target.step([Segment(pair.target.new_kv(), 0, 16)]),
        )
        torch.testing.assert_close(rows, heads.bind(pair.target)[5](hidden[:, 10:]), rtol=1e-4, atol=1e-4)
        full = target.full(tokens[:18], 8)
        alone = TieredTarget(pair.target, None, Counters()).full(tokens[:18], 8)
    torch.testing.assert_close(full, alone, rtol=1e-4, atol=1e-4)


def test_an_escalated_round_runs_every_layer_once_and_one_head_more(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[int, int]] = []

    def watched(_: SequenceKV, layer: int, start: int, tokens: int) -> None:
        ran.extend((layer, start + i) for i in range(tokens))

    watch_writes(monkeypatch, watched)
    target, tokens = slim_target(pair_of("llama"), 5, LightHeads.lens((5,))), prompt_ids()
    with torch.inference_mode():
        target.prefill(tokens[:10])
        ran.clear()
        target.slim(tokens[:16], 6)
        assert sorted(ran) == [(layer, place) for layer in range(5) for place in range(10, 16)]
        target.full(tokens[:17], 7)  # one token more, as every round has
    # Slim and full pass together ran what the full pass alone would have.
    assert sorted(ran) == [(layer, place) for layer in range(8) for place in range(10, 17)]


def test_a_mask_file_may_name_its_heads(tmp_path: Path) -> None:
    pair = pair_of("llama", "model")
    LightHeads((3, 5), torch.eye(32).repeat(2, 1, 1), name="mine").save(tmp_path / "h.safetensors")
    mask = LayerMask.first(8, 5, "h.safetensors")
    mask.save(tmp_path / "m.json")
    said = json.loads((tmp_path / "m.json").read_text())
    assert (said["prefix"], said["heads"], said["keep"]) == (5, "h.safetensors", [1, 1, 1, 1, 1, 0, 0, 0])
    options = {"strategy": "cascade", "tiers": "3", "mode": "lossless", "max_new_tokens": 12}
    result = generate(pair, prompt_ids(), mask=str(tmp_path / "m.json"), **options)
    assert result.token_ids == hf_greedy(model_of("llama"), prompt_ids(), 12)
    (tmp_path / "h.safetensors").unlink()
    with pytest.raises(HeadsError, match=r"h\.safetensors"):
        generate(pair, prompt_ids(), mask=str(tmp_path / "m.json"), **options)


def test_it_drafts_for_itself_too() -> None:
    result = generate(
        pair_of("llama"), prompt_ids(), max_new_tokens=N, strategy="self-sd", mask="prefix:5", heads="lens:5"
    )
    assert result.token_ids == hf_greedy(model_of("llama"), prompt_ids(), N)
    assert result.stats.drafter_calls > 0


def test_what_is_measured_of_it_is_its_own() -> None:
    pair = pair_of("llama", "model")
    config = DecodingConfig(strategy="cascade")
    reports = []
    for heads in (LightHeads.lens((5,)), LightHeads((5,), torch.eye(32)[None].flip(2).contiguous())):
        mask = headed(LayerMask.first(8, 5), heads, pair)
        assert mask is not None
        reports.append(measure_tiers(pair, mask, config, "lossless"))
    assert reports[0].rejection["slim_full"] != reports[1].rejection["slim_full"]


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"mask": "prefix:5"}, HeadsError, "viasd-fit heads"),
        ({"mask": "prefix:5", "heads": None}, MaskError, "add --heads"),
        ({"mask": "prefix:4", "heads": "lens:3,5"}, MaskError, "3, 5"),
        ({"mask": "prefix:8", "heads": "lens:3,5"}, MaskError, "not all 8"),
        ({"mask": "prefix:0", "heads": "lens:3,5"}, MaskError, "at least one"),
        ({"mask": "prefix:x", "heads": "lens:3,5"}, MaskError, "prefix:E"),
        ({"mask": "even:0.25", "heads": "lens:3,5"}, OptionError, "leave them out"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        viasd.generate(pair_of("llama"), prompt_ids(), strategy="cascade", tiers="3", **options)


def test_a_mask_without_its_last_layer_needs_a_head() -> None:
    said = LayerMask.first(4, 2, "h").to_json()
    assert LayerMask.from_json(said, "m").prefix == 2
    for wrong in ({**said, "prefix": None}, {**said, "prefix": 3}, {**said, "prefix": "2"}, {**said, "prefix": True}):
        with pytest.raises(MaskError):
            LayerMask.from_json(wrong, "m")
    with pytest.raises(MaskError, match="heads"):
        LayerMask.from_json({**said, "heads": 3}, "m")
