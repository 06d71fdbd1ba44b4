"""An exported slim model says, in transformers, what the slim verifier says in viasd."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import prompt_ids, tokenizer
from tiny_checkpoints import tiny_llama, write_llama_gguf
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import viasd
import viasd.search.cli as cli
from viasd.confident import ConfidentConfig
from viasd.heads import LightHeads
from viasd.identity import ModelIdentity
from viasd.layered import LayeredModel
from viasd.mask import LayerMask
from viasd.probe import load_layered
from viasd.routes import Route
from viasd.runtime.assembly import headed
from viasd.runtime.metrics import Counters
from viasd.runtime.readouts import recorded
from viasd.runtime.target import TieredTarget
from viasd.search import export
from viasd.stitch import Stitch
from viasd.stitches import Stitches
from viasd.testing import tiny_model

# Gaps of one and of two layers; Gemma2's and Qwen2's kinds of attention no longer alternate as they did.
KEEP = (True, True, False, True, False, False, True, True)
HALVES = ((2, "attention"), (5, "mlp"))


def slim_rows(layered: LayeredModel, route: Route, ids: list[int]) -> Tensor:
    """Raw logits of the slim path over a text of its own."""
    with torch.inference_mode():
        return TieredTarget(layered, route, Counters()).slim(ids, len(ids)).clone()


def exported_rows(folder: Path, ids: list[int]) -> Tensor:
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        return model.eval()(torch.tensor([ids])).logits[0].float()


def saved(folder: Path, family: str = "llama", **shape: Any) -> tuple[Any, str]:
    """A tiny target, and the folder that it lies in."""
    model = tiny_model(family, **shape)
    model.save_pretrained(folder / "target")
    tokenizer().save_pretrained(folder / "target")
    return model, str(folder / "target")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*argv: str, code: int = 0) -> None:
    assert cli.main(["export", *argv]) == code


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "smollm3"]
)
def test_the_rows_are_those_of_the_slim_path(family: str, here: Path) -> None:
    model, target = saved(here, family)
    ids = prompt_ids() * 2  # six windows
    layered = load_layered(model)
    kinds = [(KEEP, ())]
    if layered.runs_parts:  # else there is nothing to compare with
        kinds.append((tuple(k and i not in dict(HALVES) for i, k in enumerate(KEEP)), HALVES))
    for number, (keep, partial) in enumerate(kinds):
        mask = LayerMask(keep, "mine", partial=partial)
        mask.save(here / "mask.json")
        run("mask.json", "--target", target, "--output", f"out{number}", "--dtype", "float32", "--quiet")
        expected = slim_rows(layered, mask.route, ids)
        rows = exported_rows(here / f"out{number}", ids)
        torch.testing.assert_close(rows[:, : expected.shape[1]], expected, atol=2e-4, rtol=1e-4)
        assert not torch.allclose(rows, slim_rows(layered, Route.full(8), ids), atol=0.1), "layers are missing"
        config = json.loads((here / f"out{number}" / "config.json").read_text())
        assert config["num_hidden_layers"] == len(mask.route.layers)
    assert AutoTokenizer.from_pretrained("out0").get_vocab() == AutoTokenizer.from_pretrained(target).get_vocab()


@pytest.mark.parametrize("family", ["phi3", "olmo2", "smollm3"])
def test_halves_of_families_that_viasd_runs_whole(family: str, here: Path) -> None:
    model, target = saved(here, family)
    LayerMask(tuple(i not in dict(HALVES) for i in range(8)), "mine", partial=HALVES).save(here / "mask.json")
    run("mask.json", "--target", target, "--output", "slim", "--dtype", "float32", "--quiet")
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight.zero_()
        model.model.layers[5].self_attn.o_proj.weight.zero_()
        expected = model(torch.tensor([prompt_ids()])).logits[0]
    torch.testing.assert_close(exported_rows(here / "slim", prompt_ids()), expected)


def test_a_gguf_file(here: Path) -> None:
    model = tiny_llama()
    write_llama_gguf(here / "tiny.gguf", model)
    run("even:0.3", "--target", "tiny.gguf", "--output", "slim", "--dtype", "float32", "--quiet")
    ids = [5, 9, 7, 5, 9]
    rows = slim_rows(load_layered(model.eval()), LayerMask.even(3, 0.3).route, ids)
    torch.testing.assert_close(exported_rows(here / "slim", ids), rows, atol=1e-5, rtol=1e-4)
    assert "quantization_config" not in json.loads((here / "slim" / "config.json").read_text())


def test_it_drafts_for_its_target_in_transformers(here: Path, capsys: Any) -> None:
    model, target = saved(here)
    run("even:0.25", "--target", target, "--output", "slim", "--dtype", "float32")
    told = capsys.readouterr().out
    assert "slim: 6 of 8 layers of" in told
    assert "assistant_model=AutoModelForCausalLM.from_pretrained('slim')" in told
    drafter = AutoModelForCausalLM.from_pretrained("slim")
    ids = torch.tensor([prompt_ids()])
    plain = model.generate(ids, max_new_tokens=20)
    assert torch.equal(model.generate(ids, max_new_tokens=20, assistant_model=drafter), plain)
    inside = model.generate(ids, max_new_tokens=20, assistant_model=drafter, custom_generate=viasd.hf.generate)
    assert torch.equal(inside, plain)


@pytest.mark.parametrize("tied", [True, False])
def test_a_prefix_with_a_light_head(tied: bool, here: Path, capsys: Any) -> None:
    model, target = saved(here, "gemma2", tie_word_embeddings=tied, final_logit_softcapping=20.0)
    turn = torch.eye(32) + torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(0)) * 0.2
    LightHeads((3, 5), turn, name="mine").save("heads.safetensors")
    pair = viasd.make_pair(model, tokenizer())
    mask = headed(LayerMask.first(8, 5), LightHeads.load("heads.safetensors"), pair)
    assert mask is not None
    run("prefix:5", "--heads", "heads.safetensors", "--target", target, "--output", "slim", "--dtype", "float32")
    expected = slim_rows(pair.target, mask.route, prompt_ids())
    torch.testing.assert_close(exported_rows(here / "slim", prompt_ids()), expected, atol=2e-4, rtol=1e-4)
    lens = headed(LayerMask.first(8, 5), LightHeads.lens((5,)), pair)
    assert lens is not None
    run("prefix:5", "--heads", "lens:5", "--target", target, "--output", "lens", "--dtype", "float32")
    expected = slim_rows(pair.target, lens.route, prompt_ids())
    torch.testing.assert_close(exported_rows(here / "lens", prompt_ids()), expected, atol=2e-4, rtol=1e-4)
    assert json.loads((here / "lens" / "config.json").read_text())["tie_word_embeddings"] is tied
    few = LightHeads((5,), turn[:1], torch.arange(40), name="few")
    few.save("few.safetensors")
    capsys.readouterr()
    for spec, message in (
        (["--heads", "few.safetensors"], "knows 40 of 300 words"),
        (["--heads", "lens:4"], "has heads behind 4"),
        ([], "needs a light head"),
    ):
        run("prefix:5", *spec, "--target", target, "--output", "never", code=2)
        assert message in capsys.readouterr().err


def test_stitches_are_refused_or_left_out(here: Path, capsys: Any) -> None:
    model, target = saved(here)
    layered = load_layered(model)
    maps = {3: Stitch((torch.eye(32) * 0.1,), torch.ones(32))}
    LayerMask(KEEP, "stitched", stitches=Stitches(maps, ModelIdentity.of(layered, "tiny"), KEEP)).save("mask.json")
    run("mask.json", "--target", target, "--output", "slim", code=2)
    assert "has stitches, which no decoder layer can express" in capsys.readouterr().err
    run("mask.json", "--target", target, "--output", "slim", "--dtype", "float32", "--without-stitches")
    rows = slim_rows(layered, Route.of(KEEP), prompt_ids())
    torch.testing.assert_close(exported_rows(here / "slim", prompt_ids()), rows, atol=2e-4, rtol=1e-4)


def test_attention_windows_out_of_their_order_are_said(here: Path, capsys: Any) -> None:
    _, target = saved(here, "gemma2")
    LayerMask((True, False, *[True] * 6)).save("mask.json")
    run("mask.json", "--target", target, "--output", "one")
    assert "is wrong beyond 8 tokens" in capsys.readouterr().out
    LayerMask((True, False, False, *[True] * 5)).save("mask.json")
    run("mask.json", "--target", target, "--output", "two")
    assert "wrong beyond" not in capsys.readouterr().out


def test_what_is_written_and_where_it_came_from(here: Path, capsys: Any) -> None:
    _, target = saved(here)
    run("even:0.25", "--target", target, "--output", "slim", "--json", "--quiet")
    said = json.loads(capsys.readouterr().out)
    file = json.loads((here / "slim" / export.PROVENANCE).read_text())
    assert {k: v for k, v in said.items() if k not in ("output", "bytes")} == file
    assert (file["dtype"], file["mask"]["name"], file["target"]["id"]) == ("bfloat16", "even:0.25", target)
    assert file["layers"] == [i for i, k in enumerate(file["mask"]["keep"]) if k]
    assert said["bytes"] == sum(f.stat().st_size for f in (here / "slim").iterdir())
    weights = AutoModelForCausalLM.from_pretrained("slim")
    assert weights.dtype == torch.bfloat16
    config = json.loads((here / "slim" / "config.json").read_text())
    assert target not in json.dumps(config)
    plain = here / "plain"
    plain.mkdir()
    assert (here / "slim").stat().st_mode == plain.stat().st_mode
    assert {f.name for f in here.iterdir() if f.name.startswith(".")} == set()


def test_a_mask_that_was_scored_with_another_readout_is_exported_with_a_note(here: Path, capsys: Any) -> None:
    _, target = saved(here)
    scored = ConfidentConfig("trough", 1.0, 3)
    for readout in (scored, None):
        LayerMask(KEEP, "mine", details=recorded(readout)).save(here / "mask.json")
        run("mask.json", "--target", target, "--output", f"slim{readout is None}", "--json")
        out, err = capsys.readouterr()
        assert json.loads(out)["scored_with"] == (None if readout is None else readout.as_json())
        assert (f"was scored with {scored.describe()}" in err) == (readout is not None)
    kept = json.loads((here / "slimFalse" / export.PROVENANCE).read_text())
    assert ConfidentConfig.parse(kept["scored_with"]) == scored


def test_nothing_is_left_of_an_export_that_fails(here: Path, monkeypatch: Any, capsys: Any) -> None:
    _, target = saved(here)
    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", lambda *_: os.open("/nowhere/x", 0))
    run("even:0.25", "--target", target, "--output", "slim", code=2)
    assert "can't write slim" in capsys.readouterr().err
    assert sorted(p.name for p in here.iterdir() if "slim" in p.name) == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["even:0.25", "--output", "there"], "'there' is there already"),
        (["even:0.25", "--output", "no/where"], "no folder 'no'"),
        (["even:0.25", "--output", "new"], "the mask names no pair"),
        (["even:0.25", "--output", "new", "--pair", "gemma2-2b:27b", "--target", "x"], "contradict each other"),
        (["even:0.25", "--output", "new", "--pair", "gemma9"], "gemma9"),
        (["nothing", "--output", "new"], "can't read mask file 'nothing'"),
        (["even:0.25", "--target", "target", "--output", "new", "--without-stitches"], "has none"),
        (["even:0.25", "--target", "target", "--output", "new", "--heads", "lens:3"], "does not end in a light head"),
        (["smollm2-135m.skip20", "--target", "target", "--output", "new"], "has 30 layers"),
    ],
)
def test_refusals_are_one_line_and_leave_nothing(argv: list[str], message: str, here: Path, capsys: Any) -> None:
    saved(here)
    (here / "there").mkdir()
    capsys.readouterr()
    run(*argv, code=2)
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
    assert not (here / "new").exists()


@pytest.mark.weights
def test_the_packaged_weights(here: Path) -> None:
    """Unpacked from their GGUF file; the pair comes from the mask."""
    run("smollm2-135m.skip20", "--weights", "packaged", "--output", "slim", "--dtype", "float32", "--quiet")
    pair = viasd.load_pair("smollm2-lookup:135m", config=viasd.load.LoadConfig(dtype="float32", weights="packaged"))
    ids = pair.encode("The capital of France is")
    mask = viasd.shipped.find_mask("smollm2-135m.skip20")
    torch.testing.assert_close(
        exported_rows(here / "slim", ids)[:, : pair.target.vocabulary],
        slim_rows(pair.target, mask.route, ids),
        atol=2e-3,
        rtol=1e-3,
    )
