"""Training light heads: the loss, what is learnt, interruption, and the command."""

from __future__ import annotations

import json
import os
import signal
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from viasd.estimator import LogisticEstimator, logit_of_max
from viasd.heads import LightHeads
from viasd.probe import load_layered
from viasd.search.fit.cli import main
from viasd.search.fit.corpus import Corpus
from viasd.search.fit.headtraining import HeadStack, examine, shortlist_of
from viasd.search.fit.progress import FitProgress
from viasd.testing import byte_tokenizer, redundant_model, tiny_model


@cache
def corpus() -> Corpus:
    """What a tiny model says after random beginnings: 40 conversations of 24 tokens."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    model = tiny_model("llama", num_hidden_layers=4)
    for _ in range(40):
        begin = torch.randint(3, 60, (1, 8), generator=generator)
        row = model.generate(begin, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
        rows.append(row[0])
    return Corpus(
        torch.cat(rows).int(),
        torch.arange(41) * 24,
        torch.full((40,), 8),
        torch.zeros(40),
    )


def stack(model: Any = None, exits: tuple[int, ...] = (2, 3), size: int = 300) -> HeadStack:
    layered = load_layered(tiny_model("llama", num_hidden_layers=4) if model is None else model)
    return HeadStack(layered, exits, shortlist_of(corpus(), range(38), size))


def trained(heads: HeadStack, steps: int = 60, lr: float = 3e-3) -> list[float]:
    optimizer = torch.optim.Adam(heads.parameters(), lr=lr)
    lesson = heads.lesson(corpus().batch(range(30)))
    assert lesson is not None
    losses = []
    for _ in range(steps):
        kl, probe = heads(lesson)
        optimizer.zero_grad()
        (kl.sum() + probe.sum()).backward()
        optimizer.step()
        losses.append(float(kl.detach().sum()))
    return losses


def test_the_shortlist_holds_the_most_frequent_tokens() -> None:
    tokens = corpus().tokens.long()
    counts = tokens[: 38 * 24].bincount(minlength=300)
    short = shortlist_of(corpus(), range(38), 20)
    assert short.tolist() == sorted(short.tolist())
    assert len(short) == 20
    off = torch.ones(300, dtype=torch.bool)
    off[short] = False
    assert int(counts[short].min()) >= int(counts[off].max())
    everything = shortlist_of(corpus(), range(38), 300)
    assert set(everything.tolist()) == set(tokens[: 38 * 24].tolist())


def test_the_loss_is_zero_where_the_state_is_the_final_one() -> None:
    # Layers 2 and 3 pass on what they get, so an untrained head behind layer 2 says what the target says.
    model = redundant_model((2, 3), num_hidden_layers=4)
    whole = HeadStack(load_layered(model), (1, 2, 3), torch.arange(300))
    lesson = whole.lesson(corpus().batch(range(10)))
    assert lesson is not None
    kl, _ = whole(lesson)
    assert float(kl.detach()[0]) > 0.01
    assert kl[1:].tolist() == pytest.approx([0.0, 0.0], abs=1e-5)
    examined = examine(whole, [corpus().batch(range(10))])
    assert examined.figures[1]["agreement"] == 1
    assert examined.figures[1]["accept_mass"] == pytest.approx(1, abs=1e-5)
    assert examined.figures[0]["agreement"] < 1


def test_only_answers_are_learnt_from() -> None:
    lesson = stack().lesson(corpus().batch(range(10)))
    assert lesson is not None
    assert lesson.states.shape == (2, 160, 32)
    assert lesson.best.shape == (160,)


def test_a_lesson_is_what_the_target_says_by_itself() -> None:
    model = tiny_model("gemma2", num_hidden_layers=4)  # with a softcap
    heads = HeadStack(load_layered(model), (2,), torch.arange(300))
    batch = corpus().batch([5])
    lesson = heads.lesson(batch)
    assert lesson is not None
    with torch.no_grad():
        rows = model(batch.ids).logits[0].softmax(-1)[batch.scored[0]]
    torch.testing.assert_close(lesson.rows, rows, rtol=1e-4, atol=1e-5)
    assert torch.equal(lesson.best, rows.argmax(-1))


def test_heads_and_probes_learn_and_the_target_does_not() -> None:
    model = tiny_model("llama", num_hidden_layers=4)
    before = {name: p.clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    heads = stack(model)
    held = [corpus().batch(range(30, 40))]
    untaught = examine(heads, held)
    losses = trained(heads)
    taught = examine(heads, held)
    assert losses[-1] < 0.7 * losses[0]
    for one, other in zip(untaught.figures, taught.figures, strict=True):
        assert other["kl"] < one["kl"]
        assert other["accept_mass"] > one["accept_mass"]
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert float(heads.probes.detach().abs().max()) > 0


def test_a_shortlist_costs_what_it_leaves_out_and_no_more() -> None:
    heads = stack(size=20)
    lesson = heads.lesson(corpus().batch(range(30)))
    assert lesson is not None
    assert float(lesson.rows.sum(-1).max()) <= 1 + 1e-5
    assert bool((lesson.best >= -1).all())
    assert int((lesson.best == -1).sum()) > 0  # some argmaxes are off the list
    kl, _ = heads(lesson)
    assert bool(kl.isfinite().all())


def test_the_calibration_says_how_often_a_head_is_right() -> None:
    model = tiny_model("llama", num_hidden_layers=4)
    with torch.no_grad():
        model.model.norm.weight.mul_(20)  # rows as sharp as those of real models
    heads = stack(model)
    trained(heads)
    batches = [corpus().batch(range(40))]
    examined = examine(heads, batches)
    estimator = LogisticEstimator.from_state(examined.calibration)
    assert len(estimator.intercepts) == 2
    lesson = heads.lesson(batches[0])
    assert lesson is not None

    for index in (0, 1):
        f = logit_of_max(heads.logits(index, lesson.states[index])).detach().double().numpy()
        predicted = estimator.predict(f[:, None], [index] * len(f)).mean()
        assert predicted == pytest.approx(examined.figures[index]["agreement"], abs=0.03)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    tiny_model("llama", num_hidden_layers=4).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def arguments(tmp_path: Path, checkpoint: Path, *more: str) -> list[str]:
    """Of a run on text that the byte tokenizer can read back."""
    tokens = np.frombuffer(b"the quick brown fox jumps over the lazy dog and runs away ", dtype=np.uint8)
    ids = byte_tokenizer()(tokens.tobytes().decode())["input_ids"]
    path = tmp_path / "corpus.npz"
    np.savez(
        path,
        tokens=np.array(ids * 40, dtype=np.uint16),
        start=np.arange(41) * len(ids),
        answer=np.full(40, 10),
        temperature=np.ones(40, dtype=np.float32),
    )
    return [
        *("heads", "--target", str(checkpoint), "--dtype", "float32", "--device", "cpu", "--corpus", str(path)),
        *("--output", str(tmp_path / "h.safetensors"), "--work", str(tmp_path / "work"), "--batch", "256", *more),
    ]


def test_the_command_trains_examines_and_writes(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(tmp_path, checkpoint, "--steps", "12", "--json")) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["exits"] == [1, 2, 3]  # a quarter, a half, three quarters of four layers
    assert report["training"]["steps"] == 12
    assert len(report["examined"]["exits"]) == 3
    heads = LightHeads.load(tmp_path / "h.safetensors")
    assert heads.transforms is not None
    assert heads.transforms.dtype == torch.bfloat16
    assert not torch.equal(heads.transforms[0].float(), torch.eye(32))
    assert heads.details["corpus"]["hash"] == report["corpus"]["hash"]
    assert main(arguments(tmp_path, checkpoint, "--steps", "12", "--quiet")) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table[1:]] == ["exit", "1", "2", "3"]


def test_an_interrupted_training_goes_on_and_ends_in_the_same_heads(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    options = ("--steps", "10", "--exits", "2", "--seed", "3", "--quiet")
    assert main(arguments(whole, checkpoint, *options)) == 0
    told: list[int] = []

    def tell(self: FitProgress, training: Any) -> None:
        told.append(training.step)
        if len(told) == 4:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(FitProgress, "training", tell)
    assert main(arguments(tmp_path, checkpoint, *options)) == 130
    assert "interrupted after 4 of 10 steps" in capsys.readouterr().err
    assert not (tmp_path / "h.safetensors").exists()
    assert main(arguments(tmp_path, checkpoint, *options)) == 0
    assert told == list(range(1, 11))
    one, two = (LightHeads.load(folder / "h.safetensors") for folder in (whole, tmp_path))
    assert one.digest == two.digest


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (("--exits", "4"), "exits after 4 layers"),
        (("--exits", "3,1"), "ascending"),
        (("--exits", "a"), "7,15,22"),
        (("--shortlist", "1"), "--shortlist"),
        (("--steps", "0"), "--steps"),
        (("--batch", "3"), "--batch"),
        (("--lr", "0"), "learning rate"),
        (("--lr", "-1"), "learning rate"),
        (("--minutes", "0"), "minutes"),
        (("--quantization", "int8"), "--quantization"),
        (("--corpus", "nowhere.npz"), "can't read"),
    ],
)
def test_what_can_not_be_is_one_line_and_2(
    tmp_path: Path, checkpoint: Path, more: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(tmp_path, checkpoint, *more, "--quiet")) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert named in said[0]


def test_help_needs_no_torch(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["heads", "--help"])
    assert "--exits" in capsys.readouterr().out
