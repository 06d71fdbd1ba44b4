"""Targets whose redundancy is known: the search must find it."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import pytest
import torch
from tiny import tokenizer

import viasd
from viasd.routes import Route
from viasd.search.config import SearchConfig
from viasd.search.objective import Objective
from viasd.search.run import search_mask
from viasd.search.walk import PassTimes
from viasd.testing import redundant_model

IDLE = (2, 3, 7, 9, 10, 13)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIASD_CACHE", str(tmp_path))


class Kept(Objective):
    """Remembers every objective that a search makes."""

    made: ClassVar[list[Objective]] = []

    def __init__(self, *rest: Any) -> None:
        super().__init__(*rest)
        self.made.append(self)


@pytest.fixture
def objectives(monkeypatch: pytest.MonkeyPatch) -> list[Objective]:
    monkeypatch.setattr("viasd.search.run.Objective", Kept)
    Kept.made.clear()
    return Kept.made


@pytest.mark.parametrize(("family", "rest"), [("llama", 0.0), ("gemma3", 0.0), ("llama", 0.01)])
def test_layers_that_do_nothing_are_found_in_a_deep_target(
    family: str, rest: float, objectives: list[Objective]
) -> None:
    # With norms behind its halves, a layer of Gemma that adds a little of something adds all of it.
    model = redundant_model(IDLE, family, rest=rest, num_hidden_layers=16, scale=6.0)
    pair = viasd.make_pair(model, tokenizer())
    outcome = search_mask(pair, SearchConfig(skip=len(IDLE) / 16, trials=200, tau=64, controls=200))
    details = outcome.mask.details
    if rest:  # then another layer may happen to do even less on this text
        known = objectives[0].evaluate(Route.of(i not in IDLE for i in range(16))).figures
        assert (details["search"]["cost"], details["search"]["kl"]) <= (known["cost"], known["kl"])
    else:
        assert tuple(i for i, k in enumerate(outcome.mask.keep) if not k) == IDLE
        assert details["report"]["kl"] == pytest.approx(0, abs=1e-4)
    assert details["report"]["cost"] == pytest.approx(0, abs=1e-4)
    assert details["report"]["agreement"] >= (0.95 if rest else 1)
    assert details["beats_random"] is True
    best = details["controls"]["random_best"]["report"]
    assert (best["cost"], best["kl"]) > (details["report"]["cost"], details["report"]["kl"])
    # The layers' importance says the same on the whole.
    worth = {i: v for i, v in enumerate(outcome.importance) if v is not None}
    assert fmean(worth[i] for i in IDLE) < fmean(v for i, v in worth.items() if i not in IDLE)


def test_half_layers_that_do_nothing_are_found() -> None:
    model = redundant_model((), num_hidden_layers=8, scale=6.0)
    with torch.no_grad():
        for layer in (1, 4):
            model.model.layers[layer].self_attn.o_proj.weight.zero_()
        for layer in (3, 4):
            model.model.layers[layer].mlp.down_proj.weight.zero_()
    pair = viasd.make_pair(model, tokenizer())
    config = SearchConfig(skip=4 / 16, trials=100, tau=64, sublayers=True, controls=0)
    outcome = search_mask(pair, config)
    assert outcome.mask.partial == ((1, "mlp"), (3, "attention"))
    assert outcome.mask.keep == (True, False, True, False, False, True, True, True)
    assert outcome.mask.details["report"]["agreement"] == 1


TIMES = PassTimes(plain=20.0, full=24.0, drafter=0.0, layer=1.4, attention=0.5, ends=1.6)


@pytest.mark.parametrize("objective", ["time", "pareto"])
def test_a_range_finds_how_many_layers_do_nothing(
    objective: str, objectives: list[Objective], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("viasd.search.run.measure_passes", lambda *_: TIMES)  # the same on every machine
    model = redundant_model(IDLE, num_hidden_layers=16, scale=6.0)
    pair = viasd.make_pair(model, tokenizer())
    config = SearchConfig(skip_range=(0.1, 0.6), objective=objective, trials=160, tau=64, controls=40)
    details = search_mask(pair, config).mask.details
    known = objectives[0].evaluate(Route.of(i not in IDLE for i in range(16))).figures
    if objective == "time":
        # Not always by the very layers that do nothing: a first gap further up makes escalations cheaper.
        assert details["search"]["seconds_per_token"] <= known["seconds_per_token"]
    else:
        free = [round(16 * e["skip_ratio"]) for e in details["front"] if e["report"]["cost"] < 1e-4]
        assert max(free) >= len(IDLE) - 1
        assert len(details["front"]) > len(free)
