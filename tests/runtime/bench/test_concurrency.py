from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import pair_of

import viasd.load
from viasd.runtime.adaptive.costs import BatchCosts
from viasd.runtime.bench import concurrency
from viasd.runtime.bench.concurrency import Lane, in_turns, main, method_options, table
from viasd.runtime.engine import Engine
from viasd.runtime.engine import adaptive as adaptive_policy

FAST = ("--work", "30", "--repeats", "2", "--concurrency", "1,3", "--tokens", "3,6", "--limit", "1")
TWO = ("--method", "plain", "--method", "sd:gamma=3,draft_length=fixed")


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viasd.load, "load_pair", lambda *_, **__: pair_of("llama", "model"))


def test_an_engine_is_kept_full_while_it_is_measured() -> None:
    options = {"strategy": "sd", "gamma": 4, "draft_length": "fixed"}
    lane = Lane(pair_of("llama", "model"), options, 3, ["one", "two", "a third one"], tokens=(4, 9))
    (found,) = in_turns([lane], 400)
    assert 400 <= found["tokens"] < 400 + 3 * 5
    assert found["tokens_per_second"] == found["tokens"] / found["seconds"]
    assert found["tokens"] >= 3 * found["steps"] * 0.8  # every place says something in nearly every step
    assert found["kept"] <= found["gated"] <= found["drafted"]
    assert found["rounds"] <= found["emitted"]


def test_sampling_is_steered_where_adaptive_verification_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    steep = BatchCosts(3, 16, {n: 1.0 + n for n in range(1, 40)}, {}, {1: 0.05})
    monkeypatch.setattr(adaptive_policy, "batch_costs", lambda *_: steep)
    seeds: list[Any] = []
    add = Engine.add
    monkeypatch.setattr(Engine, "add", lambda self, *a, **o: seeds.append(o.get("seed")) or add(self, *a, **o))
    lengths = {}
    for adaptive in ("off", "auto"):
        options = {"strategy": "sd", "gamma": 4, "draft_length": "fixed", "temperature": 1.0, "adaptive": adaptive}
        pair = pair_of("llama", "model", noise=0.1)
        (found,) = in_turns([Lane(pair, options, 3, ["one", "two", "three"], tokens=(12, 20))], 400)
        assert len(seeds) >= 3
        assert all((seed is None) == (adaptive == "auto") for seed in seeds)
        seeds.clear()
        lengths[adaptive] = found["drafted"] / found["rounds"]
    assert lengths["auto"] < 0.8 * lengths["off"]


def test_measurements_are_written_and_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.jsonl"
    assert main([*TWO, *FAST, "--output", str(path)]) == 0
    lines = path.read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [(r["repeat"], r["concurrency"], r["method"]) for r in records] == [
        (repeat, n, method) for repeat in (0, 1) for n in (1, 3) for method in TWO[1::2]
    ]
    header = capsys.readouterr().out.splitlines()[0]
    assert [cell.strip() for cell in header.strip("|").split("|")] == ["tok/s by sequences", "1", "3"]
    made: list[Any] = []

    class Counted(Lane):
        def __init__(self, *args: Any, **rest: Any) -> None:
            made.append(args)
            super().__init__(*args, **rest)

    monkeypatch.setattr(concurrency, "Lane", Counted)
    path.write_text("\n".join(lines[:5]) + "\n" + lines[5][:30])
    assert main([*TWO, *FAST, "--output", str(path)]) == 0
    assert len(made) == 3
    again = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(again) == 8
    assert again[:5] == records[:5]
    assert main([*TWO, *FAST, "--seed", "9", "--output", str(path)]) == 2
    assert "of other settings" in capsys.readouterr().err


def test_lanes_take_turns_at_the_same_work() -> None:
    turns: list[tuple[int, float]] = []

    class Watched(Lane):
        def go_on(self, tokens: float) -> None:
            turns.append((self._engine.concurrency, tokens))
            super().go_on(tokens)

    pair = pair_of("llama", "model")
    lanes = [Watched(pair, {"strategy": "plain"}, n, ["one", "two"], tokens=(4, 9)) for n in (1, 2, 3)]
    found = in_turns(lanes, 200)
    assert all(200 <= record["tokens"] < 200 + n for n, record in zip((1, 2, 3), found, strict=True))
    assert turns == [(n, 10.0 * turn) for turn in range(1, 21) for n in (1, 2, 3)]
    assert all(not lane._engine.running and not lane._engine.waiting for lane in lanes)


def test_the_table_gives_medians_and_ratios() -> None:
    records = [
        {"method": method, "concurrency": n, "tokens_per_second": speed}
        for method, n, speeds in (("plain", 1, (9, 10, 30)), ("plain", 4, (40,)), ("sd", 1, (15,)), ("sd", 4, (20,)))
        for speed in speeds
    ]
    assert table(records) == [
        ["tok/s by sequences", "1", "4"],
        ["plain", "10.0", "40.0"],
        ["sd", "15.0 (1.50x)", "20.0 (0.50x)"],
        ["plain over 1", "1.00x", "4.00x"],
        ["sd over 1", "1.00x", "1.33x"],
    ]


def test_methods_are_strategies_with_options() -> None:
    assert method_options("plain") == {"strategy": "plain"}
    assert method_options("cascade:tiers=3,mode=lossless,gamma=4") == {
        "strategy": "cascade",
        "tiers": "3",
        "mode": "lossless",
        "gamma": 4,
    }


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--method", "sd:gamma"), "--method takes NAME:OPTION=VALUE"),
        (("--concurrency", "1,0"), "--concurrency takes whole numbers"),
        (("--tokens", "9,3"), "--tokens takes the least and the most"),
        (("--work", "0"), "--work must be above 0"),
        (("--method", "sd:gama=3", *FAST), "unknown option 'gama'"),
        (("--method", "adadecode", *FAST), "in a wave of its own"),
    ],
)
def test_what_can_not_be_measured_is_one_line(
    argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(argv)) == 2
    err = capsys.readouterr().err
    assert message in err
