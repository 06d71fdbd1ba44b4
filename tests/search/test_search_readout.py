"""Masks scored with a confident readout in the slim tier, and used that way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import hf_greedy, model_of, pair_of, prompt_ids, save_target

import viasd
from viasd.confident import ConfidentConfig
from viasd.divergences import stage_cost
from viasd.errors import OptionError
from viasd.heads import LightHeads
from viasd.routes import Route
from viasd.runtime.assembly import bound_heads
from viasd.runtime.config import SELF_SKIP
from viasd.runtime.readouts import Readouts
from viasd.runtime.tiers import _block_rows
from viasd.search import cli
from viasd.search.calibration import Passage
from viasd.search.config import SearchConfig
from viasd.search.guardfit import _TeacherForced
from viasd.search.scorer import Scorer

BLOCK = 6
PASSAGES = [
    Passage(tuple(prompt_ids(text)), 9)
    for text in ("hello hello world, hello again and again", "one two three one two three one")
]
ROUTES = [
    Route.of([1, 1, 0, 1, 0, 0, 1, 1]),
    Route.of([1, 1, 1, 1, 1, 1, 0, 1]),
    Route.of([1, 0, 1, 1, 1, 1, 1, 1]),
    Route.full(8),
]
READOUTS = [
    ConfidentConfig(max_backtrack_layers=-1),
    ConfidentConfig("trough-m1", max_backtrack_layers=2),
    ConfidentConfig("last-m2"),
]


@pytest.mark.parametrize("readout", READOUTS, ids=lambda r: r.method)
@pytest.mark.parametrize("route", ROUTES, ids=lambda r: "".join(str(int(k)) for k in r.keep))
def test_scores_are_those_of_the_runtimes_own_slim_passes(route: Route, readout: ConfidentConfig) -> None:
    pair = pair_of("llama")
    scorer = Scorer(pair.target, PASSAGES, block=BLOCK, readout=readout)
    _, slim_readout = Readouts(None, readout).bind(pair, route, 0)
    costs, said = [], []
    with torch.inference_mode():
        blocks = list(scorer.blocks(route))
        for passage in PASSAGES:
            tokens = list(passage.tokens)
            slim = _block_rows(pair, route, tokens, passage.first, BLOCK, slim_readout)
            full = _block_rows(pair, Route.full(8), tokens, passage.first, BLOCK)
            rows = torch.cat([b.logits for b in blocks if b.tokens == passage.tokens[:-1]]).log_softmax(-1)
            torch.testing.assert_close(rows, slim, atol=2e-4, rtol=1e-3)
            costs.append(stage_cost(slim, full))
            said.append(slim.argmax(-1))
    score = scorer.score(route)
    assert score.cost == pytest.approx(float(torch.cat(costs).mean()), abs=2e-3, rel=1e-2)
    assert torch.equal(score.best, torch.cat(said))
    own = Scorer(pair.target, PASSAGES, block=BLOCK)
    assert abs(score.kl - own.score(route).kl) > 1e-3
    # q, and what a self drafter says, stay as they are.
    assert torch.equal(scorer.best, own.best)
    assert torch.equal(scorer.answers(route), own.answers(route))
    with torch.inference_mode():
        for one, other in zip(scorer.blocks(route, own=True), own.blocks(route), strict=True):
            assert torch.equal(one.logits, other.logits)


def test_the_guard_is_fitted_to_a_self_drafter_that_reads_out_its_last_layer() -> None:
    pair, route = pair_of("llama", "self"), ROUTES[0]
    scorer = Scorer(pair.target, PASSAGES, block=BLOCK, readout=READOUTS[0])
    own = Scorer(pair.target, PASSAGES, block=BLOCK)
    with torch.inference_mode():
        drafter, drafted = _TeacherForced(pair, scorer, route), []
        for block in scorer.blocks(route):
            drafted += [draft.tokens[0] for _, draft in sorted(drafter.of(block).items())]
        said = torch.cat([b.logits.argmax(-1) for b in own.blocks(route.thinned(SELF_SKIP))])
    assert drafted == said.tolist()


def test_private_keys_are_scored_with_the_readout_too() -> None:
    readout = ConfidentConfig(max_backtrack_layers=-1)
    model = pair_of("llama").target
    private = Scorer(model, PASSAGES, private_kv=True, readout=readout)
    with torch.inference_mode():
        for route in ROUTES[:3]:
            costs = {s: s.score(route).cost for s in (private, Scorer(model, PASSAGES, private_kv=True))}
            assert len(set(costs.values())) == 2
            found = torch.cat([b.logits for b in private.blocks(route)])
            assert torch.equal(found.argmax(-1), private.score(route).best)


def test_a_light_head_stays_a_light_head() -> None:
    pair = pair_of("llama")
    head = bound_heads(pair, LightHeads.lens([4]))[4]
    route = Route((True,) * 4 + (False,) * 4, readout=head)
    with_readout, own = (Scorer(pair.target, PASSAGES, readout=r).score(route) for r in (READOUTS[0], None))
    assert with_readout.cost == own.cost


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"readout": "deepest"}, "readout must be one of"),
        ({"backtrack_layers": 3}, "add --readout trough"),
        ({"backtrack_ratio": 0.3}, "add --readout trough"),
        ({"readout_compat": True}, "add --readout trough"),
        ({"readout": "trough", "backtrack_layers": 2, "backtrack_ratio": 0.3}, "leave one out"),
        ({"readout": "trough", "objective": "time"}, "use --objective cost with --readout"),
        ({"readout": "trough", "skip_range": (0.1, 0.5)}, "use --objective cost with --readout"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        SearchConfig(**options)


FEW = ("--skip", "0.4", "--trials", "4", "--controls", "2", "--tau", "32", "--device", "cpu", "--drafter", "self")


def test_from_the_search_to_a_generation_that_reads_out_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VIASD_CACHE", str(tmp_path / "cache"))
    folder = save_target(tmp_path)
    argv = ["--target", folder, *FEW, "--quiet"]
    for more, name in (["--readout", "trough", "--backtrack-layers", "3"], "read.json"), ([], "own.json"):
        assert cli.main([*argv, *more, "--output", name]) == 0
    capfd.readouterr()
    assert cli.main(["show", "read.json"]) == 0
    assert "slim verifier read out as a confident readout (trough, up to 3 layers back)" in capfd.readouterr().out
    saved = {name: json.loads(Path(name).read_text()) for name in ("read.json", "own.json")}
    assert "readout" not in saved["own.json"]
    readout = ConfidentConfig(max_backtrack_layers=3)
    assert saved["read.json"]["readout"] == readout.as_json()
    # The same masks are tried and another cost is found, in another study.
    assert saved["read.json"]["cost"] != saved["own.json"]["cost"]
    mask = viasd.LayerMask.load("read.json")
    pair = viasd.load_pair(target=folder, drafter="self")
    scorer = Scorer(pair.target, PASSAGES, readout=readout)
    assert scorer.score(mask.route).cost > 0
    answer = viasd.generate(
        pair, prompt_ids(), mask="read.json", mode="lossless", tiers="3", max_new_tokens=16, ignore_eos=True
    )
    assert answer.readouts == Readouts(None, readout)
    assert answer.token_ids == hf_greedy(model_of("llama"), prompt_ids(), 16)
    assert len(answer.selected_layers) == 16


def test_a_fixed_layer_outside_the_window_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VIASD_CACHE", str(tmp_path / "cache"))
    argv = ["--target", save_target(tmp_path), *FEW, "--quiet", "--readout", "last-m8"]
    capfd.readouterr()
    assert cli.main(argv) == 2
    err = capfd.readouterr().err
    assert "viasd-search: error: readout last-m8 is" in err
    assert err.count("\n") == 1
