from __future__ import annotations

from typing import Any

import pytest
from tiny import pair_of

from viasd.runtime.bench.soak import Soaked, soak
from viasd.runtime.engine import batch


@pytest.mark.parametrize("drafter", ["model", "lookup"])
def test_random_requests_are_as_alone_and_leave_no_memory(drafter: str) -> None:
    pair = pair_of("llama", drafter)
    one = 256 * 2 * 8 * 2 * 8 * 4  # bytes of a cache of the first size: positions, k and v, layers, heads, width, fp32
    found = soak(pair, "even:0.25", 60, seed=3, concurrency=6, kv_budget=7 * one)
    assert found.well, found
    assert found.cancelled > 2
    assert found.tokens > 500
    assert 4 * one < found.caches[0] <= 7 * one  # the budget was in the way, and was kept
    assert found.resident[1] <= found.resident[0] + 30e6


def test_a_soak_sees_what_is_not_well(monkeypatch: pytest.MonkeyPatch) -> None:
    run_full = batch.run_full

    def mixed_up(wanted: Any) -> Any:
        rows = run_full(wanted)
        return [rows[1], rows[0], *rows[2:]] if len(rows) > 1 and rows[0].shape == rows[1].shape else rows

    monkeypatch.setattr(batch, "run_full", mixed_up)
    assert len(soak(pair_of("llama"), "even:0.25", 12, seed=1).different) > 3
    assert not Soaked(reserved=1).well
    assert not Soaked(caches=(5, 5)).well
