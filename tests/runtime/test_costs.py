from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import model_of, pair_of, tokenizer

import viasd
from viasd.pair import Pair
from viasd.routes import Route
from viasd.runtime import costs
from viasd.runtime.costs import CostTable, cost_table, models_said
from viasd.runtime.target import TieredTarget
from viasd.testing import tiny_model

ROUTE = Route.of([1, 1, 0, 1, 0, 1, 1, 1])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VIASD_CACHE", str(tmp_path))
    return tmp_path


def fresh(**options: Any) -> Pair:
    return viasd.make_pair(model_of("llama"), tokenizer(), **options)


def test_every_pass_is_measured_at_the_sizes_a_block_needs() -> None:
    table = cost_table(fresh(), ROUTE, 40, 5)
    assert table.context == 128
    assert sorted(table.full) == sorted(table.slim) == sorted(table.escalation) == [1, 2, 4, 6]
    assert all(s > 0 for tier in (table.full, table.slim, table.escalation) for s in tier.values())
    assert table.drafter == 0.0
    alone = cost_table(fresh(), None, 40, 5)
    assert alone.slim == alone.escalation == {}


def test_a_model_drafter_and_a_self_drafter_have_a_step() -> None:
    small = tiny_model("llama", num_hidden_layers=2)
    assert cost_table(fresh(drafter=small), None, 40, 3).drafter > 0
    assert cost_table(fresh(drafter="self"), None, 40, 3, drafter=ROUTE).drafter > 0


def test_a_table_is_kept_on_disk_and_read_by_the_next_process(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cost_table(fresh(), ROUTE, 40, 5)
    (file,) = (cache / "costs").iterdir()
    assert file.suffix == ".json"

    def never(*_: Any) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(costs, "_measure", never)
    pair = fresh()
    assert cost_table(pair, ROUTE, 40, 5) == first
    assert cost_table(pair, ROUTE, 128, 5) is cost_table(pair, ROUTE, 7, 5)
    # Another length of text, block or route is another table.
    for other in (dict(context=200), dict(gamma=3), dict(route=None)):
        with pytest.raises(AssertionError, match="measured"):
            cost_table(pair, **{"route": ROUTE, "context": 40, "gamma": 5, **other})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "content", ["", "[1]", '{"full": 1}', '{"context": 1, "full": {"a": 1}, "slim": {}, "drafter": 0}']
)
def test_a_broken_table_is_measured_again(cache: Path, content: str) -> None:
    cost_table(fresh(), None, 40, 5)
    (file,) = (cache / "costs").iterdir()
    file.write_text(content)
    assert cost_table(fresh(), None, 40, 5).full_seconds(1) > 0
    assert file.read_text() != content


def test_a_cache_that_cant_be_written_is_no_reason_not_to_measure(cache: Path) -> None:
    (cache / "costs").write_text("in the way")
    assert cost_table(fresh(), None, 40, 5).full_seconds(3) > 0


def test_seconds_lie_on_straight_lines_between_sizes() -> None:
    table = CostTable(128, {1: 10.0, 2: 12.0, 6: 20.0}, {4: 3.0}, {}, 0.0)
    assert [table.full_seconds(n) for n in (1, 2, 3, 4, 6, 8)] == [10, 12, 14, 16, 20, 20]
    assert table.slim_seconds(9) == 3.0


def test_measuring_leaves_no_trace_in_later_answers() -> None:
    pair = pair_of("gemma3")
    before = viasd.generate(pair, "some text", mask=None, max_new_tokens=8).token_ids
    cost_table(pair, ROUTE, 600, 4)
    assert viasd.generate(pair, "some text", mask=None, max_new_tokens=8).token_ids == before


def test_a_slow_target_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "_PATIENCE", 0.0)
    pair, calls = fresh(), [0]
    usual = TieredTarget.full

    def full(self: TieredTarget, tokens: Any, rows: int) -> Any:
        calls[0] += 1
        return usual(self, tokens, rows)

    monkeypatch.setattr(TieredTarget, "full", full)
    assert cost_table(pair, None, 40, 5).full_seconds(6) > 0
    assert calls[0] == 2 * 4  # a warm-up and one timing of four sizes


def test_compiled_passes_have_a_table_of_their_own() -> None:
    pair, compiled = fresh(), fresh()
    compiled.target.compile(backend="eager")
    assert models_said(pair) != models_said(compiled)
