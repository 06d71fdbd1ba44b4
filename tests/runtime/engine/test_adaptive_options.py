"""Adaptive Verification from outside: lists of prompts, `viasd-run --prompts`, and its throughput beside fixed lengths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import model_of, pair_of, tokenizer

import viasd
import viasd.load
from viasd.errors import OptionError
from viasd.pair import make_pair
from viasd.runtime import cli
from viasd.runtime.adaptive.costs import BatchCosts
from viasd.runtime.bench.concurrency import Lane, in_turns
from viasd.runtime.engine import adaptive as policy_module
from viasd.testing import perturbed

COSTS = {n: 1 + 0.05 * n for n in range(1, 100)}


@pytest.fixture(autouse=True)
def costs(monkeypatch: pytest.MonkeyPatch) -> None:
    table = BatchCosts(16, 8, COSTS, {}, {1: 0.05})
    monkeypatch.setattr(policy_module, "batch_costs", lambda *_: table)


def run(capfd: Any, monkeypatch: pytest.MonkeyPatch, *argv: str) -> tuple[int, str, str]:
    small = perturbed(model_of("llama"), 0.05)
    pair = make_pair(model_of("llama"), tokenizer(), drafter=small, name="tiny-model:tiny", target_id="tiny")
    monkeypatch.setattr(viasd.load, "load_pair", lambda *_, **__: pair)
    code = cli.main([*argv])
    out, err = capfd.readouterr()
    return code, out, err


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    lines = [{"prompt": text} for text in ("one two", "three", "once upon a time", "hello hello hello")]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(tmp_path / "p.jsonl")


COMMON = ("--no-chat", "--ignore-eos", "--strategy", "sd", "--max-new-tokens", "30", "--json")


@pytest.mark.parametrize("mode", [None, "auto", "on", "off"])
def test_answers_of_a_file_are_the_same_with_and_without(
    mode: str | None, prompts: str, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = () if mode is None else ("--adaptive-verification", mode)
    code, out, err = run(capfd, monkeypatch, "--prompts", prompts, *COMMON, *chosen)
    assert code == 0
    results = [json.loads(line) for line in out.splitlines()]
    pair = pair_of("llama", "lookup")
    for result, text in zip(results, ("one two", "three", "once upon a time", "hello hello hello"), strict=True):
        plain = viasd.generate(pair, text, max_new_tokens=30, ignore_eos=True, strategy="plain", mask=None)
        assert result["token_ids"] == plain.token_ids
    offered = sum(r["stats"]["adaptive"]["offered"] for r in results)
    assert bool(offered) == (mode != "off")
    assert ("drafted tokens were verified" in err) == (mode != "off")


def test_what_was_learnt_is_kept_in_a_file(
    prompts: str, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state.json"
    argv = ("--prompts", prompts, *COMMON, "--adaptive-state", str(state))
    drafted, stored = [], []
    for _ in range(2):
        code, out, _ = run(capfd, monkeypatch, *argv)
        assert code == 0
        drafted.append(sum(json.loads(line)["stats"]["drafted"] for line in out.splitlines()))
        stored.append(json.loads(state.read_text()))
    assert stored[0]["edges"][0]["estimator"]["observations"] > 0
    assert stored[0]["drafts"]
    assert drafted[0] > 5 * drafted[1]  # it knows from the first run that drafting does not pay; a few are trials
    state.write_text("[]")
    code, _, err = run(capfd, monkeypatch, *argv)
    assert code == 2
    assert "holds no state" in err
    state.write_text('{"edges": [1]}')
    assert run(capfd, monkeypatch, *argv)[0] == 2


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--prompt", "x", "--adaptive-verification", "on"), "about many prompts"),
        (("--prompts", "F", "--adaptive-verification", "on", "--strategy", "plain"), "drafts nothing"),
        (("--prompts", "F", "--adaptive-verification", "on", "--mode", "via"), "a gate decide"),
        (("--prompts", "F", "--adaptive-verification", "off", "--adaptive-state", "s.json"), "is off"),
    ],
)
def test_contradictions_are_refused(
    argv: tuple[str, ...], words: str, prompts: str, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = run(capfd, monkeypatch, *(prompts if a == "F" else a for a in argv))
    assert code == 2
    assert words in err


def test_a_list_of_prompts_takes_it_too() -> None:
    pair = pair_of("llama", "model", noise=0.05)
    options = {"mask": None, "max_new_tokens": 20, "ignore_eos": True, "strategy": "sd"}
    with_it = viasd.generate(pair, ["one", "two", "three"], adaptive="on", **options)
    without = viasd.generate(pair, ["one", "two", "three"], **options)
    assert [r.token_ids for r in with_it] == [r.token_ids for r in without]
    assert all(r.stats.adaptive.offered for r in with_it)
    assert not any(r.stats.adaptive.offered for r in without)
    with pytest.raises(OptionError, match="several prompts"):
        viasd.generate(pair, "one", adaptive="on", **options)


def test_its_throughput_is_measured_and_what_it_learnt_goes_on() -> None:
    pair = pair_of("llama", "model", noise=0.05)
    wanted = {"strategy": "sd", "gamma": 4, "temperature": 0.0}
    adaptive = {**wanted, "adaptive": "auto"}
    (record,) = in_turns([Lane(pair, adaptive, 3, ["one", "two"], tokens=(5, 9))], 400)
    assert record["adaptive"]["offered"] > 0
    seen = record["learnt"]["edges"][0]["estimator"]["observations"]
    (again,) = in_turns([Lane(pair, adaptive, 3, ["one"], tokens=(5, 9), state=record["learnt"])], 200)
    assert again["learnt"]["edges"][0]["estimator"]["observations"] > seen > 0
    (off,) = in_turns([Lane(pair, wanted, 3, ["one"], tokens=(5, 9), state=record["learnt"])], 50)
    assert off["learnt"] is None
