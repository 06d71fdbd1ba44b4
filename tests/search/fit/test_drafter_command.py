"""`viasd-fit drafter`: from corpora to a drafter that decodes, interruption, and what can't be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fitting import read_corpus, small_corpus
from safetensors.torch import load_file
from tiny import tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from viasd.feature import FeatureDrafterFile
from viasd.runtime.cli import main as run_main
from viasd.search.fit import drafterfit
from viasd.search.fit.cli import main
from viasd.search.fit.featuretraining import FeatureStack
from viasd.search.fit.progress import FitProgress
from viasd.search.fit.training import TrainingConfig
from viasd.standalone import RECORD
from viasd.testing import tiny_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIASD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(drafterfit, "PROMPTS", 2)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny target that wrote `small_corpus`."""
    folder = tmp_path_factory.mktemp("target")
    tiny_model("llama", num_hidden_layers=3).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "own.safetensors"
    small_corpus().save(path)
    return str(path)


def arguments(folder: Path, target: str, corpus: str, kind: str, *more: str) -> list[str]:
    output = folder / ("d.safetensors" if kind == "feature" else "drafter")
    usual = ("--dtype", "float32", "--device", "cpu", "--batch", "256", "--work", str(folder / "work"))
    own = () if "--corpus" in more else ("--corpus", corpus)
    return ["drafter", "--target", target, "--kind", kind, *own, "--output", str(output), *usual, *more]


def test_a_feature_drafter_is_made_examined_recorded_and_used(
    tmp_path: Path, target: str, corpus: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--corpus", corpus, corpus, "--steps", "60", "--lr", "3e-3", "--ahead", "2", "--json")
    assert main(arguments(tmp_path, target, corpus, "feature", *more)) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["training"]["steps"] == 60
    assert [step["agreement"] > 0.05 for step in report["examined"]["steps"]] == [True, True]
    assert len(report["decoded"]["by_place"]) == report["decoded"]["gamma"]
    assert 1 <= report["decoded"]["emitted_per_round"] <= 1 + report["decoded"]["gamma"]
    assert [c["conversations"] for c in report["corpora"]] == [60, 60]
    options = report["made_by"]["options"]
    assert options["corpus"] == ["own.safetensors", "own.safetensors"]
    assert str(tmp_path) not in json.dumps(report["made_by"]["options"])
    path = tmp_path / "d.safetensors"
    file = FeatureDrafterFile.load(path)
    assert file.details["training"] == report["training"]
    assert all(t.dtype == torch.bfloat16 for t in file.weights.values())
    decode = ("--target", target, "--dtype", "float32", "--device", "cpu", "--prompt", "hi", "--quiet", "--no-chat")
    assert run_main([*decode, "--drafter", str(path), "--strategy", "sd", "--max-new-tokens", "8"]) == 0


def test_a_standalone_drafter_is_a_folder_that_transformers_assists_with(
    tmp_path: Path, target: str, corpus: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--steps", "10", "--width", "32", "--depth", "1", "--shortlist", "40", "--quiet")
    assert main(arguments(tmp_path, target, corpus, "standalone", *more)) == 0
    assert "of the judged tokens kept" in capsys.readouterr().out
    folder = tmp_path / "drafter"
    words = json.loads((folder / RECORD).read_text())["shortlist"]
    assert len(words) == 40
    small, big = (AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32).eval() for p in (folder, target))
    ids = AutoTokenizer.from_pretrained(folder)("hello", return_tensors="pt").input_ids
    usual: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    alone = big.generate(ids, **usual)
    assert torch.equal(big.generate(ids, assistant_model=small, **usual), alone)
    decode = ("--target", target, "--dtype", "float32", "--device", "cpu", "--prompt", "hello", "--no-chat", "--json")
    for before in ("", "lookup+"):
        more = (
            "--drafter",
            f"{before}{folder}",
            "--strategy",
            "sd",
            "--draft-length",
            "fixed",
            "--max-new-tokens",
            "12",
        )
        assert run_main([*decode, *more]) == 0
        said = json.loads(capsys.readouterr().out)
        assert said["token_ids"] == alone[0, ids.shape[1] :].tolist()
        drafted = [t for t, tier in zip(said["token_ids"], said["tiers"], strict=True) if tier == "drafter"]
        assert before or set(drafted) <= set(words)


def test_an_interrupted_training_goes_on_and_ends_in_the_same_drafter(
    tmp_path: Path, target: str, corpus: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    more = ("--steps", "9", "--seed", "3", "--quiet")
    assert main(arguments(whole, target, corpus, "feature", *more)) == 0
    told: list[int] = []

    def tell(self: FitProgress, training: Any) -> None:
        told.append(training.step)
        if len(told) == 4:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(FitProgress, "training", tell)
    assert main(arguments(tmp_path, target, corpus, "feature", *more)) == 130
    assert "interrupted after 4 of 9 steps" in capsys.readouterr().err
    assert not (tmp_path / "d.safetensors").exists()
    assert main(arguments(tmp_path, target, corpus, "feature", *more)) == 0
    assert told == list(range(1, 10))
    one, two = (load_file(folder / "d.safetensors") for folder in (whole, tmp_path))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_killed_training_goes_on_from_its_checkpoint(tmp_path: Path, target: str, corpus: str) -> None:
    more = ("--steps", "9", "--seed", "3", "--quiet")
    arguments_ = arguments(tmp_path, target, corpus, "feature", *more)
    code = (
        "import os, signal, sys\n"
        "from viasd.search.fit import drafterfit\n"
        "from viasd.search.fit.training import TrainingConfig\n"
        "drafterfit.PROMPTS = 2\n"
        "drafterfit.TrainingConfig = lambda *a, **k: TrainingConfig(*a, **k, save_every=0.0)\n"
        "from viasd.search.fit.progress import FitProgress\n"
        "def tell(self, training):\n"
        "    if training.step == 5: os.kill(os.getpid(), signal.SIGKILL)\n"
        "FitProgress.training = tell\n"
        "from viasd.search.fit.cli import main\n"
        f"sys.exit(main({arguments_!r}))\n"
    )
    first = subprocess.run([sys.executable, "-c", code], timeout=300, check=False)
    assert first.returncode == -signal.SIGKILL
    assert not (tmp_path / "d.safetensors").exists()
    assert main(arguments_) == 0
    whole = tmp_path / "whole"
    whole.mkdir()
    assert main(arguments(whole, target, corpus, "feature", *more)) == 0
    one, two = (load_file(folder / "d.safetensors") for folder in (whole, tmp_path))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_good_state(
    tmp_path: Path, target: str, corpus: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    judged = FeatureStack.judged
    steps = iter(range(100))

    def broken(self: FeatureStack, *more: Any) -> Any:
        found = judged(self, *more)
        assert found is not None
        return (found[0]._replace(loss=found[0].loss * torch.nan), found[1]) if next(steps) == 5 else found

    with monkeypatch.context() as patched:
        patched.setattr(FeatureStack, "judged", broken)
        patched.setattr(drafterfit, "TrainingConfig", lambda *a, **k: TrainingConfig(*a, **k, save_every=0.0))
        assert main(arguments(tmp_path, target, corpus, "feature", "--steps", "9", "--quiet")) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert "the loss of step 6 is nan" in said[0]
    assert "the last good state is in" in said[0]
    assert not (tmp_path / "d.safetensors").exists()
    assert main(arguments(tmp_path, target, corpus, "feature", "--steps", "9", "--quiet")) == 0


def test_only_cold_conversations_where_that_is_asked_for(
    tmp_path: Path, target: str, corpus: str, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[float] = []
    judged = FeatureStack.judged

    def watched(self: FeatureStack, batch: Any, *more: Any) -> Any:
        seen.extend(batch.temperature.tolist())
        return judged(self, batch, *more)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(FeatureStack, "judged", watched)
        more = ("--steps", "2", "--max-temperature", "0.6", "--quiet")
        assert main(arguments(tmp_path, target, corpus, "feature", *more)) == 0
    assert 0 < max(seen) < 0.61
    capsys.readouterr()
    assert main(arguments(tmp_path, target, corpus, "feature", "--max-temperature", "0.001", "--quiet")) == 2
    assert "raise --max-temperature" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "more", "named"),
    [
        ("feature", ("--width", "64"), "--width is for --kind standalone"),
        ("standalone", ("--ahead", "2"), "--ahead is for --kind feature"),
        ("standalone", ("--width", "40"), "multiple of 16"),
        ("standalone", ("--width", "48"), "at most as wide as its target"),
        ("feature", ("--depth", "0"), "--depth"),
        ("feature", ("--shortlist", "1"), "--shortlist"),
        ("feature", ("--steps", "3", "--passes", "2"), "--passes and --steps"),
        ("feature", ("--passes", "0"), "--passes"),
        ("feature", ("--accept-weight", "-1"), "--accept-weight"),
        ("feature", ("--lr", "0"), "learning rate"),
        ("feature", ("--quantization", "int8"), "--quantization"),
        ("feature", ("--corpus", "nowhere.npz"), "can't read"),
        ("feature", ("--weights", "packaged"), "--weights"),
        ("feature", ("--kind", "other"), "--kind"),
    ],
)
def test_what_can_not_be_is_one_line_and_2(
    tmp_path: Path,
    target: str,
    corpus: str,
    kind: str,
    more: tuple[str, ...],
    named: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(arguments(tmp_path, target, corpus, kind, *more, "--quiet")) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert named in said[0]


def test_corpora_that_do_not_fit_are_refused(tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    few = tmp_path / "few.safetensors"
    small_corpus(conversations=8).save(few)
    assert main(arguments(tmp_path, target, str(few), "feature", "--quiet")) == 2
    assert "at least 20 conversations, but it has 8" in capsys.readouterr().err
    strange = read_corpus()
    other = tmp_path / "other.safetensors"
    type(strange)(
        strange.tokens, strange.start, strange.answer, strange.temperature, {"tokenizer": "of another model"}
    ).save(other)
    assert main(arguments(tmp_path, target, str(other), "feature", "--quiet")) == 2
    assert "another tokenizer than the target's" in capsys.readouterr().err


def test_an_output_of_the_other_kind_is_refused(
    tmp_path: Path, target: str, corpus: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "d.safetensors").mkdir()
    assert main(arguments(tmp_path, target, corpus, "feature", "--quiet")) == 2
    assert "is a folder" in capsys.readouterr().err
    (tmp_path / "drafter").write_text("")
    assert main(arguments(tmp_path, target, corpus, "standalone", "--quiet")) == 2
    assert "is a file" in capsys.readouterr().err


def test_help_needs_no_torch() -> None:
    code = (
        "import sys\nfrom viasd.search.fit.cli import main\n"
        "try: main(['drafter', '--help'])\nexcept SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "--max-temperature" in done.stdout
