"""What silently breaks losslessness, written out: enumeration finds the wrong law that it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from laws import Table, constant_table, decoded_law, largest_error, target_law

from viasd.draws import Draws
from viasd.rows import Row, Rows
from viasd.runtime.drafters import Draft, PasslessDrafter
from viasd.runtime.strategies import SpeculativeDecoding
from viasd.sampling import Ahead, SamplingConfig
from viasd.testing import TableTarget

PLAIN_SAMPLING = SamplingConfig(temperature=1.0)


class Biased(PasslessDrafter):
    """A drafter of one token a block that does one of the forbidden things."""

    def __init__(self, p: Table, keep: Callable[[int, torch.Tensor], bool], choose: str = "draw") -> None:
        self.name = "biased"
        self._p, self._keep, self._choose = p, keep, choose

    def propose(self, tokens: Sequence[int], limit: int, ahead: Ahead, draws: Draws) -> Draft:
        if limit < 1:
            return Draft()
        row = ahead.row(self._p(tuple(tokens)))
        assert row.probs is not None
        token = int(row.probs.argmax()) if self._choose == "argmax" else draws.draft(row)
        if not self._keep(token, row.probs):
            return Draft()
        shown = Row(probs=(row.probs.log() / 2).softmax(-1)) if self._choose == "other row" else row
        return Draft([token], Rows.joined([shown]), [1.0])

    def rewind(self, tokens: Sequence[int]) -> None: ...

    def settle(self, tokens: Sequence[int]) -> None: ...


def always(_token: int, _row: torch.Tensor) -> bool:
    return True


@pytest.mark.parametrize(
    ("target", "proposal", "keep", "choose", "expected"),
    [
        # Trimming on the drawn token's own probability.
        ([0.5, 0.5], [0.2, 0.8], lambda x, row: row[x] >= 0.5, "draw", [0.4, 0.6]),
        ([0.6, 0.3, 0.1], [0.8, 0.15, 0.05], lambda x, row: row[x] > 0.75, "draw", [0.72, 0.21, 0.07]),
        # A budget that looks at the token itself.
        ([0.7, 0.3], [0.5, 0.5], lambda x, row: x == 0, "draw", [0.85, 0.15]),
        # The argmax proposed, but tested as a draw from the row.
        ([0.6, 0.3, 0.1], [0.8, 0.15, 0.05], always, "argmax", [0.75, 0.1875, 0.0625]),
        # Gates on the row as a whole are fine.
        ([0.5, 0.5], [0.2, 0.8], lambda x, row: row.max() >= 0.5, "draw", [0.5, 0.5]),
        ([0.5, 0.5], [0.2, 0.8], lambda x, row: row.max() >= 0.9, "draw", [0.5, 0.5]),
    ],
)
def test_known_biases_give_the_known_wrong_laws(
    target: list[float], proposal: list[float], keep: Any, choose: str, expected: list[float]
) -> None:
    q = constant_table(*target)
    source = Biased(constant_table(*proposal), keep, choose)
    law = decoded_law(
        lambda bench: (SpeculativeDecoding(bench, source, gamma=1), source), TableTarget(q, q), 1, PLAIN_SAMPLING
    )
    assert [law.get((x,), 0.0) for x in range(len(expected))] == pytest.approx(expected, abs=1e-12)


def test_testing_against_another_row_than_the_one_drawn_from_is_noticed() -> None:
    q = constant_table(0.6, 0.3, 0.1)
    source = Biased(constant_table(0.8, 0.15, 0.05), always, "other row")
    law = decoded_law(
        lambda bench: (SpeculativeDecoding(bench, source, gamma=1), source), TableTarget(q, q), 1, PLAIN_SAMPLING
    )
    assert largest_error(law, target_law(q, 1, PLAIN_SAMPLING, 3)) > 0.01
