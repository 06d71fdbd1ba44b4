"""Drafters side by side: the price of a block by hand, the table of two real files, and what has no record."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from features import feature_file
from tiny import model_of, tokenizer
from transformers import AutoModelForCausalLM

from viasd.runtime.bench import basics, confident, drafters, soak
from viasd.runtime.bench.drafters import main, priced
from viasd.standalone import RECORD
from viasd.testing import tiny_model

KEPT = {"decoded": {"by_place": [0.5, 0.8]}, "examined": {"steps": [{"accept_mass": 0.4}]}}


def test_the_best_block_has_the_least_seconds_per_token() -> None:
    full = [10.0, 11.0, 11.5]
    # One token: 1.5 for 12 s; two: 1.9 for 13.5 s.
    price = priced([0.5, 0.8], 1.0, full)
    assert (price.block, price.tokens) == (2, pytest.approx(1.9))
    assert price.seconds == pytest.approx(13.5 / 1.9)
    assert price.speed == pytest.approx(10 * 1.9 / 13.5)
    # A dear step: one token, and slower than plain decoding.
    price = priced([0.5, 0.8], 6.0, full)
    assert (price.block, price.tokens, price.speed) == (1, 1.5, pytest.approx(10 * 1.5 / 17))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """A target, a feature drafter and a standalone one."""
    folder = tmp_path_factory.mktemp("made")
    target, feature, small = (str(folder / name) for name in ("target", "f.safetensors", "small"))
    model_of("llama").save_pretrained(target)
    replace(feature_file("llama", words=150), details=KEPT).save(feature)
    tiny_model("llama", num_hidden_layers=1).save_pretrained(small)
    for path in (target, small):
        tokenizer().save_pretrained(path)
    Path(small, RECORD).write_text(json.dumps({"shortlist": list(range(0, 300, 6)), **KEPT}))
    return target, feature, small


def test_every_drafter_is_a_line_with_what_it_reads_keeps_and_costs(
    made: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, feature, small = made
    # The target's passes are slower beside the second; both are priced by the mean of two.
    beside = [
        {"full": {1: 9.0, 2: 10.0, 3: 10.5}, "drafter": {1: 1.0}},
        {"full": {1: 11.0, 2: 12.0, 3: 12.5}, "drafter": {1: 2.0}},
        {"full": {1: 10.0, 2: 11.0, 3: 11.5}, "drafter": {1: 1.0}},
    ]
    times = iter(beside)
    monkeypatch.setattr(drafters, "pass_seconds", lambda pair, masks, gammas: next(times))
    usual = ["--target", target, "--dtype", "float32", "--device", "cpu"]
    assert main([*usual, feature, small, "--json"]) == 0
    one, other = json.loads(capsys.readouterr().out)
    assert (one["kind"], one["shape"], one["words"]) == ("feature", [1, 32, 64], 150)
    assert one["read"] == 150 * 32 + sum(weight.numel() for weight in feature_file("llama", words=150).weights.values())
    assert (other["kind"], other["shape"], other["words"]) == ("standalone", [1, 32, 64], 50)
    layers = AutoModelForCausalLM.from_pretrained(small).model.layers
    assert other["read"] == 50 * 32 + sum(weight.numel() for weight in layers.parameters())
    for line, share in ((one, 0.1), (other, 0.2)):
        assert (line["kept"], line["accept_mass"], line["share"]) == ([0.5, 0.8], 0.4, share)
        assert (line["price"]["block"], line["price"]["speed"]) == (2, pytest.approx(19 / (11.5 + 20 * share)))
    assert main([*usual, feature]) == 0
    cells = capsys.readouterr().out.splitlines()[-1].strip("| ").split(" | ")
    read = f"{one['read'] / 1e6:.1f}"
    assert cells == ["feature", "1 x 32 (64)", "150", read, "0.400", "0.50 0.80", "0.100", "2", "1.90", "1.41x"]


def test_times_are_measured(made: tuple[str, str, str], capsys: pytest.CaptureFixture[str]) -> None:
    target, feature, _ = made
    assert main(["--target", target, "--dtype", "float32", "--device", "cpu", feature, "--json"]) == 0
    line = json.loads(capsys.readouterr().out)[0]
    assert 0 < line["step"] < 1
    assert line["price"]["seconds"] > line["step"]


def test_a_drafter_without_a_record_is_refused_by_name(
    made: tuple[str, str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, _, small = made
    bare = str(tmp_path / "bare.safetensors")
    feature_file("llama", words=150).save(bare)
    usual = ["--target", target, "--dtype", "float32", "--device", "cpu"]
    assert main([*usual, bare]) == 2
    assert f"'{bare}'" in capsys.readouterr().err
    assert main([*usual, target]) == 2
    assert "viasd-fit drafter" in capsys.readouterr().err
    Path(small, RECORD).rename(tmp_path / RECORD)
    Path(small, RECORD).write_text("[1, 2]")
    try:
        assert main([*usual, small]) == 2
        assert RECORD in capsys.readouterr().err
    finally:
        (tmp_path / RECORD).rename(Path(small, RECORD))


def test_a_number_of_threads_that_can_not_be_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for program, argv in ((main, ["--target", "none", "drafter"]), (confident.main, ["--section", "overhead"])):
        assert program([*argv, "--threads", "0"]) == 2
        said = capsys.readouterr().err
        assert "--threads must be at least 1, but got 0" in said
        assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("module", "argv"),
    [
        (basics, ["--section", "memory"]),
        (confident, ["--section", "overhead"]),
        (drafters, ["--target", "none", "drafter"]),
        (soak, ["--pair", "none"]),
    ],
)
def test_interrupted_measurements_end_in_one_line(
    module: ModuleType, argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "load_pair", interrupted)
    assert module.main(argv) == 130
    assert capsys.readouterr().err == f"{module.__name__.rpartition('.')[2]}: interrupted\n"
