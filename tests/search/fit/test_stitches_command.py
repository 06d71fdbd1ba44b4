from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import save_target

import viasd
import viasd.load
import viasd.search.cli as search_cli
import viasd.search.fit.cli as cli
from viasd.confident import ConfidentConfig
from viasd.loading import LoadConfig
from viasd.mask import LayerMask
from viasd.testing import byte_tokenizer

Run = Callable[..., tuple[int, str, str]]
WORDS = ("hello ", "world ", "again ", "and ", "one two ", "three, ")
FEW = ("--tokens", "400", "--exam", "300", "--gamma", "3", "--device", "cpu", "--dtype", "float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a mask of it, and conversations."""
    path = tmp_path_factory.mktemp("stitching")
    save_target(path)
    LayerMask((True, True, False, True, False, False, True, True), "m").save(path / "m.json")
    write_corpus(path / "corpus.npz", 300)
    return path


def write_corpus(path: Path, n: int, offset: int = 0) -> None:
    generator = np.random.default_rng(1)
    texts = ["".join(generator.choice(WORDS, 5)) for _ in range(n)]
    ids = [byte_tokenizer()(text)["input_ids"] for text in texts]
    start = np.cumsum([0, *map(len, ids)])
    np.savez(path, tokens=np.concatenate(ids) + offset, start=start, answer=np.full(n, 3), temperature=np.ones(n))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VIASD_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def run(folder: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    def _run(*argv: str, **replaced: str) -> tuple[int, str, str]:
        given = {"target": str(folder / "tiny-target"), "mask": str(folder / "m.json"), "output": "m.stitched.json"}
        given = {**given, "corpus": str(folder / "corpus.npz"), **replaced}
        options = [part for name, value in given.items() for part in (f"--{name}", value)]
        code = cli.main(["stitches", *options, *FEW, *argv])
        out, err = capfd.readouterr()
        return code, out, err

    return _run


def one_line(result: tuple[int, str, str]) -> str:
    code, out, err = result
    assert (code, out) == (2, "")
    # In a new cache folder the kernels are compiled first, and that is said.
    (line,) = (line for line in err.splitlines() if not line.startswith("compiling the CPU kernels"))
    assert line.startswith("viasd-fit: error: ")
    return line


def test_a_mask_is_stitched_tuned_judged_written_and_used(run: Run, folder: Path, capfd: Any) -> None:
    code, out, err = run(
        "--rank", "2", "--steps", "12", "--adapters", "2", "--lr", "0.0003", "--batch", "128", "--json"
    )
    assert code == 0, err
    said = json.loads(out)
    raw, stitched, tuned = (said["variants"][name] for name in ("raw", "stitched", "tuned"))
    assert stitched["kl"] < raw["kl"]
    assert tuned["kl"] < raw["kl"]
    assert tuned["kl"] != stitched["kl"]
    assert raw["parameters"] < stitched["parameters"] < tuned["parameters"] < 1.6
    assert said["kl"] == said["report"]["kl"] == tuned["kl"]
    assert said["trust"]["tuned"]["tokens"] == said["report_tokens"]
    assert said["stitches"]["before"] == {"3": 2, "6": 2, "7": 2, "8": 2}
    assert said["stitches"]["tuned"]["steps"] == 12
    # The file does what it says.
    mask = LayerMask.load("m.stitched.json")
    assert mask.to_json() == said
    pair = viasd.load_pair(target=str(folder / "tiny-target"), config=LoadConfig(dtype="float32"))
    assert mask.check(pair.target, pair.target_id) is None
    options: Any = {"max_new_tokens": 20, "ignore_eos": True, "seed": 0}
    plain = viasd.generate(pair, "hello world", strategy="plain", mask=None, **options)
    found = viasd.generate(pair, "hello world", mask="m.stitched.json", mode="lossless", tiers="3", **options)
    assert found.token_ids == plain.token_ids
    assert found.stats.slim_calls
    assert search_cli.main(["show", "m.stitched.json"]) == 0
    shown, _ = capfd.readouterr()
    assert "stitched before layers 3 (rank 2), 6 (rank 2), 7 (rank 2), 8 (rank 2)" in shown
    assert "to be believed" in shown
    assert f"{tuned['agreement']:.4f}" in shown


def test_a_mask_keeps_the_readout_that_it_was_searched_with(run: Run, folder: Path, here: Path) -> None:
    readout = ConfidentConfig(max_backtrack_layers=2)
    mask = LayerMask.load(folder / "m.json")
    replace(mask, details={"readout": readout.as_json()}).save(here / "read.json")
    assert run("--quiet", mask="read.json")[0] == 0
    said = json.loads(Path("m.stitched.json").read_text())
    assert said["readout"] == readout.as_json()
    assert run("--quiet")[0] == 0
    assert said["kl"] != json.loads(Path("m.stitched.json").read_text())["kl"]


def test_the_closed_form_alone_and_of_low_rank(run: Run) -> None:
    pytest.importorskip("matplotlib")
    code, out, err = run("--rank", "3", "--plot", "trust.png", "--quiet")
    assert (code, err) == (0, "")
    assert "raw" in out
    assert "tuned" not in out
    assert load_file("m.stitched.safetensors")["3.down"].shape == (32, 3)
    assert Path("trust.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_fit_goes_on_and_ends_as_one_that_was_not(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import signal

    import viasd.search.fit.stitching as stitching
    import viasd.search.fit.sweep as sweep

    tune = ("--steps", "6", "--adapters", "2", "--batch", "128", "--json")
    expected = json.loads(run(*tune, output="other.json", work="elsewhere")[1])
    real, calls = stitching.SlimPath.forward, []

    def interrupted(self: Any, passages: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return real(self, passages)

    with monkeypatch.context() as patched:
        patched.setattr(stitching.SlimPath, "forward", interrupted)
        code, out, err = run(*tune, work="work")
    assert (code, out) == (130, "")
    assert "interrupted after 3 of 6 steps; the same command goes on" in err
    assert not Path("m.stitched.json").exists()

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("the closed form was kept")

    monkeypatch.setattr(stitching, "fit_stitches", never)
    code, out, err = run(*tune, work="work")
    assert code == 0, err
    assert sweep.fit_stitches is not never
    found = json.loads(out)
    assert found["kl"] == expected["kl"]
    assert found["stitches"]["tuned"]["steps"] == 6


def test_text_that_will_not_do_is_refused(run: Run, folder: Path, here: Path) -> None:
    write_corpus(here / "other.npz", 40, offset=700)
    assert "token id" in one_line(run(corpus="other.npz"))
    write_corpus(here / "few.npz", 3)
    assert "at least 20 conversations" in one_line(run(corpus="few.npz"))
    write_corpus(here / "short.npz", 40)
    assert "answer tokens kept back to judge on" in one_line(run(corpus="short.npz"))
    assert "scored tokens, but an affine map of states of width 32 needs" in one_line(run("--tokens", "5"))
    assert "can't read corpus" in one_line(run(corpus="nowhere.npz"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--ridge", "-1"), "ridge must be at least 0, but got -1"),
        (("--ridge", "nan"), "ridge must be at least 0, but got nan"),
        (("--rank", "0"), "rank must be at least 1, but got 0"),
        (("--tokens", "0"), "tokens must be at least 1"),
        (("--exam", "10"), "exam must be at least 256"),
        (("--steps", "-2"), "steps must be at least 0"),
        (("--minutes", "3"), "--minutes is about fine-tuning, which needs --steps N"),
        (("--steps", "3", "--lr", "-1"), "learning rate must be above 0"),
        (("--compile",), "--compile speeds up decoding"),
    ],
)
def test_options_that_mean_nothing_are_refused(run: Run, argv: tuple[str, ...], message: str) -> None:
    assert message in one_line(run(*argv))


def test_masks_that_can_not_be_stitched_are_refused(run: Run, here: Path) -> None:
    LayerMask((True,) * 8, "all").save("all.json")
    assert "skips no layer" in one_line(run(mask="all.json"))
    LayerMask((True, False, *(True,) * 6), "half", partial=((1, "mlp"),)).save("half.json")
    assert "only whole layers can be stitched" in one_line(run(mask="half.json"))
    assert "mask 'none'" in one_line(run(mask="none")) or "there is none by 'none'" in one_line(run(mask="none"))
    assert not list(here.glob("m.stitched*"))
