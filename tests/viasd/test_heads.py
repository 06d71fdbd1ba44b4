"""Light heads: the logit lens, shortlists, files, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from viasd.attention import Segment
from viasd.errors import HeadsError, OptionError
from viasd.estimator import logit_of_max
from viasd.heads import LightHeads
from viasd.layered import LayeredModel
from viasd.mask import ModelIdentity
from viasd.probe import load_layered
from viasd.shipped import resolve_heads
from viasd.testing import FAMILIES, tiny_model

IDS = [3, 50, 120, 7, 299]


def states(model: LayeredModel, exits: Any) -> dict[int, torch.Tensor]:
    """Hidden states behind some layers, and behind all."""
    step = model.step([Segment(model.new_kv(), 0, len(IDS))])
    with torch.inference_mode():
        return model.run(model.embed(IDS), range(model.n_layers), step, capture=[*exits, model.n_layers])[1]


def made(model: LayeredModel | None = None, **fields: Any) -> LightHeads:
    """Random heads behind layers 2 and 5."""
    generator = torch.Generator().manual_seed(0)
    identity = None if model is None else ModelIdentity.of(model, "tiny")
    return LightHeads(
        **{
            "exits": (2, 5),
            "transforms": torch.randn(2, 32, 32, generator=generator).bfloat16(),
            "shortlist": torch.tensor([1, 3, 7, 50, 120, 280]),
            "probes": torch.randn(2, 33, generator=generator),
            "target": identity,
            "name": "mine",
            "details": {"corpus": {"hash": "abc"}},
            **fields,
        }
    )


@pytest.mark.parametrize("layers", ["auto", "hf"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_an_identity_is_the_logit_lens(family: str, layers: str) -> None:
    model = load_layered(tiny_model(family), layers=layers)
    heads = LightHeads((2, 5), torch.eye(32).repeat(2, 1, 1))
    found = states(model, (2, 5))
    with torch.inference_mode():
        for bound in (heads.bind(model), LightHeads.lens((2, 5)).bind(model)):
            for layer in (2, 5):
                logits = bound[layer](found[layer])
                torch.testing.assert_close(logits, model.readout(found[layer]), rtol=1e-5, atol=1e-5)
                assert logits.dtype == torch.float32


def test_a_shortlist_cuts_the_row_and_changes_nothing_else() -> None:
    model = load_layered(tiny_model("gemma2"))  # with a softcap, and tied to the embedding
    heads = made()
    found = states(model, (5,))[5]
    with torch.inference_mode():
        short = heads.bind(model)[5](found)
        whole = replace(heads, shortlist=None).bind(model)[5](found)
        one = heads.bind(model)[5](found[:, -1:])
    assert heads.shortlist is not None
    known = torch.zeros(300, dtype=torch.bool)
    known[heads.shortlist] = True
    torch.testing.assert_close(short[:, known], whole[:, known], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(one, short[-1:], rtol=1e-5, atol=1e-5)
    assert bool((short.softmax(-1)[:, ~known] == 0).all())


def test_what_is_read_off_the_known_words_is_what_the_whole_row_says() -> None:
    model = load_layered(tiny_model("gemma2"))
    with torch.inference_mode():
        for heads in (made(), made(shortlist=None)):
            head = heads.bind(model)[5]
            for i in range(len(IDS)):
                state = states(model, (5,))[5][:, i : i + 1]
                row, whole = head.row(state), head(state)[0]
                assert torch.equal(row.dense, whole)
                assert row.best[1] == int(whole.argmax())
                assert float(logit_of_max(row.known)) == pytest.approx(float(logit_of_max(whole)), rel=1e-5)


def test_a_head_of_a_quantised_model_with_a_head_of_its_own() -> None:
    model = load_layered(tiny_model("llama", tie_word_embeddings=False), quantization="int8")
    found = states(model, (5,))[5]
    with torch.inference_mode():
        short = made(transforms=None).bind(model)[5](found)
        whole = model.readout(found)
    known = [1, 3, 7, 50, 120, 280]
    torch.testing.assert_close(short[:, known], whole[:, known], rtol=1e-4, atol=1e-4)


def test_a_probe_reads_the_state_alone() -> None:
    model = load_layered(tiny_model("llama"))
    heads, found = made(), states(model, (2, 5))
    assert heads.probes is not None
    with torch.inference_mode():
        state = found[2][0, -1]
        unit = state / (state.pow(2).mean() + 1e-6).sqrt()
        expected = torch.sigmoid(unit @ heads.probes[0, :-1] + heads.probes[0, -1])
        assert heads.bind(model)[2].promise(found[2]) == pytest.approx(float(expected), rel=1e-5)
        assert LightHeads.lens((2,)).bind(model)[2].promise(found[2]) is None
        for bias, chance in ((-1e4, 0.0), (1e4, 1.0)):  # beyond what exp can take
            extreme = made(probes=torch.cat([torch.zeros(2, 32), torch.full((2, 1), bias)], dim=1))
            assert extreme.bind(model)[2].promise(found[2]) == chance


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    model = load_layered(tiny_model("llama"))
    heads, path = made(model), tmp_path / "heads.safetensors"
    heads.save(path)
    again = resolve_heads(str(path), None)
    assert (again.exits, again.name, again.details, again.target) == (
        heads.exits,
        heads.name,
        heads.details,
        heads.target,
    )
    assert again.digest == heads.digest
    assert again.check(model, "tiny") is None
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert replace(heads, exits=(2, 6)).digest != heads.digest
    lens = LightHeads.lens((1, 4))
    lens.save(path)
    assert LightHeads.load(path).transforms is None


def test_heads_of_one_file_are_equal_and_others_are_not() -> None:
    model = load_layered(tiny_model("llama"))
    one, two = made().bind(model), made().bind(model)
    assert one[2] == two[2] != one[5]
    assert len({one[2], two[2], one[5]}) == 2


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"exits": (5, 2)}, "ascending"),
        ({"exits": (2, 2)}, "ascending"),
        ({"exits": (0, 2)}, "ascending"),
        ({"exits": ()}, "ascending"),
        ({"exits": (2,)}, "one square matrix"),
        ({"transforms": torch.zeros(2, 32, 31)}, "square"),
        ({"transforms": torch.full((2, 32, 32), torch.nan)}, "finite"),
        ({"probes": torch.zeros(3, 33)}, "probe"),
        ({"shortlist": torch.tensor([3, 1])}, "ascending"),
        ({"shortlist": torch.tensor([1])}, "two or more"),
    ],
)
def test_heads_that_do_not_hold_together_are_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(HeadsError, match=named):
        made(**fields)


def test_heads_of_another_target_are_refused_or_warned_of() -> None:
    model = load_layered(tiny_model("llama"))
    heads = made(model)
    other = load_layered(tiny_model("llama", seed=3))
    with torch.no_grad():
        other.decoder.norm.weight.mul_(2)
    assert "weights" in str(heads.check(other, "other"))
    for wrong, named in (
        (load_layered(tiny_model("qwen3")), "architecture"),
        (load_layered(tiny_model("llama", hidden_size=64)), "width"),
        (load_layered(tiny_model("llama", num_hidden_layers=5)), "5 layers"),
        (load_layered(tiny_model("llama"), vocabulary=200), "vocabulary"),
    ):
        with pytest.raises(HeadsError, match=named):
            heads.check(wrong, "another")


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(HeadsError, match="can't read"):
        LightHeads.load(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(HeadsError, match="no file of light heads"):
        LightHeads.load(path)
    tensors = {"transforms": torch.zeros(1, 4, 4)}
    about = {"schema": 1, "exits": [2], "target": None, "name": "x"}
    for wrong, named in (
        (None, "schema"),
        ({**about, "schema": 9}, "9"),
        ({**about, "exits": None}, "exits"),
        ({**about, "target": {"id": "x"}}, "target"),
        ({k: v for k, v in about.items() if k != "name"}, "name"),
        ([1], "schema"),
    ):
        meta = None if wrong is None else {"viasd": json.dumps(wrong)}
        path.write_bytes(safetensors.torch.save(tensors, meta))
        with pytest.raises(HeadsError, match=named):
            LightHeads.load(path)
    path.write_bytes(safetensors.torch.save({**tensors, "more": torch.zeros(1)}, {"viasd": json.dumps(about)}))
    with pytest.raises(HeadsError, match="'more'"):
        LightHeads.load(path)
    with pytest.raises(HeadsError, match="can't write"):
        made().save(tmp_path / "nowhere" / "x")
    with pytest.raises(OptionError, match="7,15,22"):
        resolve_heads("lens:", None)


def test_heads_that_come_with_the_package_go_by_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("viasd.shipped.resources.files", lambda package: tmp_path)
    made(name="shipped").save(tmp_path / "smollm2-135m.heads.safetensors")
    for pair in ("smollm2-lookup:135m", "smollm2-self:135m"):
        assert resolve_heads("auto", pair).name == "shipped"
    for other in ("smollm2-lookup:1.7b", "qwen2.5-0.5b:7b", None):
        with pytest.raises(HeadsError, match="viasd-fit heads"):
            resolve_heads("auto", other)
