"""Windows, the descent and the coins of the confident readout: numbers in, decisions out."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from viasd.confident import BACKTRACK, METHODS, Coins, ConfidentConfig, Window, descend, select
from viasd.errors import OptionError

NAN = math.nan
# Entropies from shallow to deep; the index chosen with 0, 1, 2 and any number of steps.
VECTORS = [
    ([0.9, 0.5, 0.4, 0.6, 0.7], (4, 3, 2, 2)),
    ([0.2, 0.5, 0.5], (2, 2, 2, 2)),
    ([0.1, 0.9, 0.5, 0.6], (3, 2, 2, 2)),
    ([0.1, 0.2, 0.3, 0.4], (3, 2, 1, 0)),
    ([0.4, 0.3, 0.2], (2, 2, 2, 2)),
    ([0.1, NAN, 0.3], (2, 2, 2, 2)),
    ([NAN, 0.1, 0.3], (2, 1, 1, 1)),
    ([0.1, 0.2, NAN], (2, 2, 2, 2)),
    ([0.3], (0, 0, 0, 0)),
]


@pytest.mark.parametrize(("entropies", "chosen"), VECTORS)
def test_the_valley_closest_to_the_top(entropies: list[float], chosen: tuple[int, ...]) -> None:
    assert tuple(select(entropies, steps) for steps in (0, 1, 2, -1)) == chosen


def test_rows_descend_together_as_each_would_alone() -> None:
    rng = random.Random(0)
    columns = [[rng.choice([0.1, 0.2, 0.3, 0.4, NAN]) for _ in range(7)] for _ in range(200)]
    for steps in range(7):
        together, _ = descend(lambda d, rows: [columns[r][6 - d] for r in rows], range(200), steps)
        assert [6 - depth for depth in together] == [select(column, steps) for column in columns]


def test_no_entropy_is_asked_for_that_decides_nothing() -> None:
    asked: list[tuple[int, tuple[int, ...]]] = []
    columns = [[0.4, 0.3, 0.2], [0.2, 0.1, 0.3], [0.1, 0.2, 0.3], [0.9, NAN, 0.3]]

    def entropy_at(depth: int, rows: Sequence[int]) -> list[float]:
        asked.append((depth, tuple(rows)))
        return [columns[r][2 - depth] for r in rows]

    depths, margins = descend(entropy_at, range(4), 2)
    assert depths == [0, 1, 2, 0]
    assert asked == [(0, (0, 1, 2, 3)), (1, (0, 1, 2, 3)), (2, (1, 2))]
    assert margins[:3] == pytest.approx([0.1, 0.1, 0.1])
    asked.clear()
    assert descend(entropy_at, range(4), 0) == ([0] * 4, [math.inf] * 4)
    assert descend(entropy_at, [], 2) == ([], [])
    assert asked == []


# --- windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "back", "ratio", "steps"),
    [
        (30, 10, 0.0, 10),
        (30, 1, 0.0, 1),
        (30, 29, 0.0, 29),
        (30, 1000, 0.0, 29),
        (30, -1, 0.0, 29),
        (30, -7, 0.0, 29),
        (30, 0, 0.0, 0),
        (30, 0, 0.1, 3),
        (30, 0, 0.11, 4),
        (100, 0, 0.07, 7),  # 100 * 0.07 is a little above 7
        (30, 0, 0.01, 1),
        (30, 0, 1.0, 29),
        (30, None, 0.0, BACKTRACK),
        (30, None, 0.1, 3),
        (4, None, 0.0, 3),
        (1, -1, 0.0, 0),
    ],
)
def test_our_window_is_how_far_one_may_step_back(layers: int, back: int | None, ratio: float, steps: int) -> None:
    config = ConfidentConfig(max_backtrack_layers=back, backtrack_ratio=ratio)
    assert config.window(layers) == Window(steps + 1, steps)
    assert config.idle(layers) == (steps == 0)


@pytest.mark.parametrize(
    ("layers", "back", "ratio", "candidates", "steps"),
    [
        (30, 10, 0.0, 10, 9),  # the last layer is one of the ten
        (30, 1, 0.0, 1, 0),
        (8, 10, 0.0, 8, 7),
        (30, -1, 0.0, 30, 29),
        (30, -1, 0.3, 9, 8),
        (30, 0, 0.3, 9, 2),  # ceil(30 * .3) candidates, int(9 * .3) moves
        (30, 0, 0.1, 3, 0),
        (30, 0, 1.0, 30, 29),
        (30, 10, 0.3, 10, 9),
        (30, 0, 0.0, 30, 0),  # all layers are candidates, and none is ever reached
        (30, None, 0.0, 30, 0),
    ],
)
def test_the_references_windows(layers: int, back: int | None, ratio: float, candidates: int, steps: int) -> None:
    config = ConfidentConfig(max_backtrack_layers=back, backtrack_ratio=ratio, reference_compat=True)
    assert config.window(layers) == Window(candidates, steps)


def test_the_references_defaults_move_nothing_but_shift_all_the_same() -> None:
    assert ConfidentConfig(reference_compat=True).idle(30)
    shifted = ConfidentConfig("trough-m2", reference_compat=True)
    assert not shifted.idle(30)
    assert shifted.shifted(0, shifted.window(30).candidates) == 2
    assert ConfidentConfig("trough-p1", reference_compat=True).idle(30)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("trough", [0, 1, 2, 3]),
        ("trough-m1", [1, 2, 3, 3]),
        ("trough-m2", [2, 3, 3, 3]),
        ("trough-p1", [0, 0, 1, 2]),
        ("trough-p2", [0, 0, 0, 1]),
    ],
)
def test_shifts_stay_inside_the_window(method: str, expected: list[int]) -> None:
    assert [ConfidentConfig(method).shifted(valley, 4) for valley in range(4)] == expected


def test_fixed_layers_are_counted_in_the_whole_model() -> None:
    def depth(method: str, layers: Sequence[int], back: int = -1, *, compat: bool = False, of: int = 30) -> int:
        config = ConfidentConfig(method, max_backtrack_layers=back, reference_compat=compat)
        return config.fixed_depth(layers, of)

    whole, slim = range(30), [*range(20), 24, 29]
    assert [depth(m, whole) for m in ("last-m1", "last-m2", "last-m4", "last-m8")] == [1, 2, 4, 8]
    # Layers 21 to 23 and 25 to 28 are skipped: before layer 28 the last that ran is 24, before layer 21 it is 19.
    assert [depth(m, slim) for m in ("last-m1", "last-m2", "last-m4", "last-m8")] == [1, 1, 1, 2]
    assert depth("last-m4", whole, 4) == 4
    with pytest.raises(
        OptionError, match="4 layers before the last of the 30 that run, but the window lets one step back 3"
    ):
        depth("last-m4", whole, 3)
    with pytest.raises(OptionError, match="larger backtrack_layers"):
        depth("last-m8", range(4), of=4)
    assert depth("last-m4", whole, 3, compat=True) == 2
    assert depth("last-m8", range(4), -1, compat=True, of=4) == 3
    assert depth("last-m4", whole, 0, compat=True) == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "valley"}, "must be one of trough, .*last-m8, but got 'valley'"),
        ({"method": "last-m3"}, "must be one of"),
        ({"p": 1.1}, "readout_p must be between 0 and 1"),
        ({"p": -0.1}, "readout_p"),
        ({"p": NAN}, "readout_p"),
        ({"backtrack_ratio": 1.5}, "backtrack_ratio must be between 0 and 1"),
        ({"backtrack_ratio": NAN}, "backtrack_ratio"),
        ({"max_backtrack_layers": 3, "backtrack_ratio": 0.1}, "leave one out"),
        ({"max_backtrack_layers": -1, "backtrack_ratio": 0.1}, "leave one out"),
    ],
)
def test_bad_values_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        ConfidentConfig(**options)  # type: ignore[arg-type]


def test_a_mask_files_record_comes_back_as_it_was() -> None:
    for method in METHODS:
        for window in ({}, {"max_backtrack_layers": 3}, {"backtrack_ratio": 0.25}, {"reference_compat": True}):
            config = ConfidentConfig(method, 0.5, **window)
            back = ConfidentConfig.parse(json.loads(json.dumps(config.as_json())))
            assert back.window(30) == config.window(30)
            assert back == dataclasses.replace(config, max_backtrack_layers=config.backtrack_layers)
    good = ConfidentConfig().as_json()
    for bad in (None, [], {}, {**good, "p": "1"}, {**good, "p": True}, {**good, "more": 1}, {**good, "method": "x"}):
        with pytest.raises(OptionError):
            ConfidentConfig.parse(bad)


def test_what_it_is_called() -> None:
    assert ConfidentConfig().describe() == "confident readout (trough, up to 10 layers back)"
    assert ConfidentConfig(max_backtrack_layers=-1, p=0.5).describe() == "confident readout (trough, any layer, p 0.5)"
    assert ConfidentConfig("last-m4").describe() == "confident readout (last-m4)"
    assert "0.25 of the layers" in ConfidentConfig(backtrack_ratio=0.25, reference_compat=True).describe()


# --- coins ------------------------------------------------------------------------------------------------------------


def test_coins_depend_on_seed_and_position_alone_and_come_up_at_rate_p() -> None:
    coins = Coins(7, 0.3)
    tossed = [coins[i] for i in range(20000)]
    assert abs(sum(tossed) / 20000 - 0.3) < 4 * math.sqrt(0.3 * 0.7 / 20000)
    same = sum(a == b for a, b in pairwise(tossed))  # neighbours know nothing of each other
    assert abs(same / 19999 - (0.3**2 + 0.7**2)) < 0.02
    assert [coins[i] for i in reversed(range(50))] == tossed[:50][::-1]
    assert [Coins(8, 0.3)[i] for i in range(200)] != tossed[:200]
    # A larger p moves more tokens, and those of a smaller one among them.
    assert all(Coins(7, 0.6)[i] for i in range(200) if tossed[i])
    assert not any(Coins(7, 0.0)[i] for i in range(200))
    assert all(Coins(7, 1.0)[i] for i in range(200))
