"""Labelled drafts and the features scored on them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import hf_greedy, model_of, pair_of, prompt_ids, save_target

from viasd.accept import overlaps
from viasd.errors import OptionError
from viasd.mask import LayerMask
from viasd.rows import Rows
from viasd.runtime.bench.acceptance.__main__ import main
from viasd.runtime.bench.acceptance.drafts import (
    COLUMNS,
    DraftFile,
    Request,
    labelled_drafts,
    requests,
)
from viasd.runtime.bench.acceptance.features import FEATURES, MEASURED, POST, RAW, SHIPPED, measure_rows
from viasd.runtime.bench.acceptance.report import markdown
from viasd.runtime.bench.acceptance.scoring import (
    auc,
    calibration_error,
    log_loss,
    reliability,
    run_online,
    score,
)


def columns(n: int = 6000, gamma: int = 4, seed: int = 0) -> dict[str, Any]:
    """Drafts whose fate follows a logistic law of the row, refused ones ending their block."""
    rng = np.random.default_rng(seed)
    out: dict[str, list[float]] = {name: [] for name in COLUMNS}
    turn = 0
    while len(out["kept"]) < n:
        for place in range(gamma):
            f = rng.normal(1.5, 2.0)
            chance = 1 / (1 + math.exp(-(0.8 * f + (0.4, 0.1, -0.2, -0.5)[place])))
            kept = rng.random() < chance
            row = (
                place,
                f,
                abs(f) + 0.1,
                math.exp(-f / 2),
                -math.log1p(math.exp(-f)) - rng.exponential(0.2),
                kept,
                chance,
            )
            for name, value in zip(COLUMNS, (*row, turn // 50, turn % 50), strict=True):
                out[name].append(float(value))
            if not kept:
                break
        turn += 1
    return {name: np.array(values) for name, values in out.items()}


# --- features ---------------------------------------------------------------------------------------------------------


def test_the_four_measured_columns_by_hand() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2], [0.98, 0.01, 0.01]], dtype=torch.float64)
    found = measure_rows(p.log() + 3, [1, 0], 1.0)
    assert set(found) == set(MEASURED)
    assert found["logit_max"] == pytest.approx([0.0, math.log(0.98 / 0.02)])
    assert found["margin"] == pytest.approx([math.log(0.5 / 0.3), math.log(98)])
    assert found["log_p_token"] == pytest.approx([math.log(0.3), math.log(0.98)])
    assert found["entropy"] == pytest.approx([-sum(x * math.log(x) for x in row) for row in p.tolist()])


def test_temperature_and_banned_words_are_understood() -> None:
    logits = torch.tensor([[2.0, 1.0, -math.inf]])
    cold = measure_rows(logits, [0], 0.5)
    assert cold["logit_max"][0] == pytest.approx(2.0)
    assert measure_rows(logits, [0], 0.0)["logit_max"][0] == pytest.approx(1.0)
    assert all(np.isfinite(v).all() for v in measure_rows(torch.tensor([[0.0, -math.inf]]), [0], 1.0).values())


def test_all_nine_features_of_one_row() -> None:
    row = measure_rows(torch.tensor([[0.5, 0.3, 0.2]]).log(), [1], 1.0)
    values = {f.name: float(f.of(row)[0]) for f in FEATURES}
    assert len(values) == 9
    assert values[SHIPPED] == pytest.approx(0.0, abs=1e-6)
    assert values["log q_max"] == pytest.approx(math.log(0.5), abs=1e-6)
    assert values["-log(-log q_max)"] == pytest.approx(-math.log(math.log(2)), abs=1e-6)
    assert values["q_max"] == values[RAW] == pytest.approx(0.5, abs=1e-6)
    assert values["log q(drawn token)"] == pytest.approx(math.log(0.3), abs=1e-6)
    assert values["logit q(drawn token)"] == pytest.approx(math.log(0.3 / 0.7), abs=1e-6)
    assert [f.name for f in FEATURES if not f.lossless] == ["log q(drawn token)", "logit q(drawn token)"]
    assert [f.name for f in FEATURES if not f.fitted] == [RAW]


def test_lawful_features_do_not_change_with_the_drawn_token() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    one, two = (measure_rows(logits, [t], 1.0) for t in (3, 7))
    for feature in FEATURES:
        same = bool((feature.of(one) == feature.of(two)).all())
        assert same == feature.lossless


def test_every_feature_is_finite_for_a_certain_row() -> None:
    row = measure_rows(torch.tensor([[200.0, 0.0, 0.0]]), [0], 1.0)
    assert all(np.isfinite(f.of(row)).all() for f in FEATURES)


# --- scoring ----------------------------------------------------------------------------------------------------------


def test_figures_by_hand() -> None:
    kept = np.array([1.0, 0.0, 1.0, 1.0])
    assert auc(np.array([0.9, 0.1, 0.8, 0.05]), kept) == pytest.approx(2 / 3)
    assert auc(np.array([0.5, 0.5, 0.5, 0.5]), kept) == 0.5
    assert auc(np.array([0.5]), np.array([1.0])) is None
    assert log_loss(np.array([0.5, 0.5]), np.array([1.0, 0.0])) == pytest.approx(math.log(2))
    assert math.isfinite(log_loss(np.array([1.0]), np.array([0.0])))
    bins = reliability(np.array([0.95, 1.0, 0.05]), np.array([1.0, 0.0, 0.0]))
    assert bins[9].drafts == 2
    assert bins[9].kept == 0.5
    assert calibration_error(bins) == pytest.approx((2 * (0.975 - 0.5) + 0.05) / 3)


def test_every_prediction_is_made_before_its_label_is_seen() -> None:
    drafts = columns(1500)
    shipped = FEATURES[0]
    before = run_online(shipped, drafts, "kept").predicted
    changed = {**drafts, "kept": drafts["kept"].copy()}
    changed["kept"][700:] = 1 - changed["kept"][700:]
    after = run_online(shipped, changed, "kept").predicted
    assert np.array_equal(before[:701], after[:701])
    assert not np.array_equal(before[1000:], after[1000:])


def test_the_fitted_feature_is_calibrated_and_ranks_better_than_raw() -> None:
    drafts = columns(12000)
    for labels in ("kept", "overlap"):
        scores = score(drafts, labels)
        assert scores["drafts"] == len(drafts["kept"])
        assert scores["features"][SHIPPED]["ece"] < 0.02 < scores["features"][RAW]["ece"]
        assert scores["features"][SHIPPED]["auc"] > scores["features"][RAW]["auc"]
        assert scores["features"][SHIPPED]["log_loss"] < scores["features"][RAW]["log_loss"]
        late = scores["coefficients"][-20:]
        assert np.mean([c["slope"] for c in late]) == pytest.approx(0.8, abs=0.1)
        assert np.mean([c["intercepts"] for c in late], axis=0) == pytest.approx([0.4, 0.1, -0.2, -0.5], abs=0.15)
        assert [r["position"] for r in scores["by_position"]] == [0, 1, 2, 3]
        assert sum(r["drafts"] for r in scores["by_position"]) == scores["drafts"]
        json.dumps(scores, allow_nan=False)


# --- drafts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["model", "self"])
def test_greedy_drafts_are_labelled_by_the_targets_own_choices(drafter: str) -> None:
    pair, ids = pair_of("llama", drafter, noise=0.05), prompt_ids()
    found = labelled_drafts(pair, Request(3, ids, 0.0, 1), gamma=4, max_new_tokens=30, ignore_eos=True)
    assert set(found) == set(COLUMNS)
    assert set(found["kept"].tolist()) <= {0.0, 1.0}
    assert np.array_equal(found["kept"], found["overlap"])
    assert (found["prompt"] == 3).all()
    for turn in range(int(found["round"].max()) + 1):
        here = found["round"] == turn
        assert found["position"][here].tolist() == list(range(here.sum()))
        assert found["kept"][here][:-1].all()  # only the last judged one can have been refused
    # As many tokens as kept ones, and one of the verifier's a round, make the answer.
    emitted = found["kept"].sum() + found["round"].max() + 1
    assert emitted >= 30 - 4


def test_the_target_drafting_for_itself_is_always_kept() -> None:
    pair = pair_of("llama", "same")
    for temperature in (0.0, 1.0):
        found = labelled_drafts(
            pair, Request(0, prompt_ids(), temperature, 5), gamma=4, max_new_tokens=20, ignore_eos=True
        )
        assert found["kept"].all()
        assert found["overlap"] == pytest.approx(np.ones(len(found["kept"])), abs=1e-3)


def test_a_mask_drafts_in_the_pairs_drafters_place() -> None:
    pair = pair_of("llama", "lookup")
    mask = LayerMask.even(pair.target.n_layers, 0.25)
    found = labelled_drafts(
        pair, Request(0, prompt_ids(), 1.0, 0), gamma=3, max_new_tokens=20, mask=mask, ignore_eos=True
    )
    assert 0 < found["overlap"].mean() < 1
    assert found["position"].max() <= 2
    assert len(hf_greedy(model_of("llama"), prompt_ids(), 3)) == 3  # the model is as it was


def test_overlaps_of_every_kind_of_row() -> None:
    p, q = torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([[0.2, 0.8], [0.4, 0.6], [0.5, 0.5]])
    assert overlaps(Rows(probs=p), Rows(probs=q), 2) == pytest.approx([0.7, 0.4])
    assert overlaps(Rows(tokens=(1, 0)), Rows(probs=q), 2) == pytest.approx([0.8, 0.4])
    assert overlaps(Rows(probs=p), Rows(tokens=(0, 1, 1)), 1) == pytest.approx([0.5])
    assert overlaps(Rows(tokens=(1, 0)), Rows(tokens=(1, 1, 0)), 2) == [1.0, 0.0]


def test_answers_take_turns_and_greedy_ones_are_not_repeated() -> None:
    prompts = [[1], [2]]
    greedy = list(requests(prompts, [0.0], 7))
    assert [(r.ids, r.temperature) for r in greedy] == [([1], 0.0), ([2], 0.0)]
    mixed = requests(prompts, [0.0, 1.0], 7)
    first = [next(mixed) for _ in range(8)]
    assert [(r.ids[0], r.temperature) for r in first[:4]] == [(1, 0.0), (2, 1.0), (1, 1.0), (2, 0.0)]
    assert sum(r.temperature == 0 for r in first) == 2
    assert len({r.seed for r in first}) == 8
    assert [r.number for r in first] == list(range(8))


def test_a_draft_file_is_continued_only_by_its_own_settings(tmp_path: Path) -> None:
    path = str(tmp_path / "drafts.npz")
    one = DraftFile(path, {"gamma": 4})
    one.add(columns(100))
    one.save()
    again = DraftFile(path, {"gamma": 4})
    assert again.done == 1
    assert len(again) == len(one)
    assert np.allclose(again.columns["logit_max"], one.columns["logit_max"], atol=1e-5)
    with pytest.raises(OptionError, match="gamma 4, now 5"):
        DraftFile(path, {"gamma": 5})
    (tmp_path / "other.npz").write_text("no such thing")
    with pytest.raises(OptionError, match="no file of labelled drafts"):
        DraftFile(str(tmp_path / "other.npz"), {})


# --- command ----------------------------------------------------------------------------------------------------------


def run(folder: Path, *extra: str) -> int:
    models = ("--target", save_target(folder), "--drafter", "self", "--device", "cpu", "--no-chat")
    answers = ("--max-new-tokens", "12", "--ignore-eos", "--limit", "1", "--gamma", "3")
    return main([*models, *answers, "--quiet", "--output", str(folder / "drafts.npz"), *extra])


def test_the_command_measures_continues_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, report = tmp_path / "figures.json", tmp_path / "report.md"
    assert run(tmp_path, "--drafts", "30") == 0
    done = int(np.load(tmp_path / "drafts.npz")["done"])
    capsys.readouterr()
    assert run(tmp_path, "--drafts", "60", "--json", str(figures), "--markdown", str(report)) == 0
    assert int(np.load(tmp_path / "drafts.npz")["done"]) > done
    summary = json.loads(figures.read_text())
    assert summary["scores"]["drafts"] >= 60
    assert set(summary["scores"]["features"]) == {f.name for f in FEATURES}
    text = report.read_text()
    assert capsys.readouterr().out == text
    assert "not lossless" in text
    assert all(f"{x:.4f}" in text for figures in POST.values() for x in figures)
    # The same run in one go gives the same drafts.
    whole = dict(np.load(tmp_path / "drafts.npz"))
    (tmp_path / "drafts.npz").unlink()
    assert run(tmp_path, "--drafts", "60") == 0
    once = dict(np.load(tmp_path / "drafts.npz"))
    assert all(np.array_equal(whole[name], once[name]) for name in COLUMNS)


def test_drafts_that_were_all_kept_are_reported_without_an_auc(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "figures.json"
    assert run(tmp_path, "--drafts", "20", "--mask", "even:0", "--temperatures", "0", "--json", str(figures)) == 0
    scores = json.loads(figures.read_text())["scores"]
    assert scores["kept"] == 1
    assert all(f["auc"] is None and f["log_loss"] is not None for f in scores["features"].values())
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert all(row[1] == "-" for row in rows if row[0][2:] in scores["features"])


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert run(tmp_path, "--drafts", "30", "--plot", str(tmp_path / "figure.png")) == 0
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_the_report_names_what_it_was_measured_on() -> None:
    summary = {
        "provenance": {"pair": "a -> b"},
        "settings": {"drafter": "model", "dataset": "x.jsonl", "temperatures": [0.0, 1.0], "gamma": 4},
        "scores": score(columns(500), "kept"),
    }
    text = markdown(summary)
    assert "500" in text or str(summary["scores"]["drafts"]) in text
    assert "x.jsonl" in text
    assert text.count("\n| ") >= len(FEATURES)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--pair", "smollm2-lookup:135m", "--output", "x.npz"], "no rows"),
        (["--pair", "smollm2-self:135m", "--output", "x.npz", "--drafts", "0"], "--drafts must be at least 1"),
        (["--pair", "smollm2-self:135m", "--output", "x.npz", "--temperatures", "a"], "numbers separated"),
        (["--pair", "smollm2-self:135m", "--output", "x.npz", "--temperatures", "-1"], "at least 0"),
        (["--pair", "smollm2-self:135m", "--output", "/nowhere/x.npz"], "no folder"),
        (["--pair", "smollm2-self:135m"], "--output"),
    ],
)
def test_what_contradicts_is_refused_in_one_line(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
