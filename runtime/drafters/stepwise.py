"""Drafting token by token from a source of logits: shared by the model drafter and the self drafter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from viasd.draws import Draws
from viasd.rows import Row, Rows
from viasd.runtime.drafters.base import Draft, DraftStop
from viasd.runtime.passes import DraftPass, RowSource, Steps
from viasd.sampling import Ahead
from viasd.shortlist import DenseLater, ShortRow


def draft_stepwise(
    drafter: RowSource,
    backlog: Sequence[int],
    limit: int,
    ahead: Ahead,
    draws: Draws,
    *,
    min_confidence: float,
    stop_tokens: frozenset[int],
    stop: DraftStop | None = None,
    least: float = 0.0,
) -> Steps[Draft]:
    """Draws up to `limit` tokens one after another.

    Args:
        drafter: Whose passes they are.
        backlog: Tokens that it has not run, at least one.
        limit: Largest number of tokens to draw.
        ahead: The request's processors at this prefix.
        draws: Source of randomness.
        min_confidence: Stop before drawing where the largest raw probability is below this (0 never stops).
        stop_tokens: After drawing one of these there is nothing left to draft (the token itself is kept).
        stop: Asked before every pass, and before every draw.
        least: Stop before drawing where the raw probabilities of the tokens drawn so far, times the largest of this row,
            make less than this: a token that is hardly ever reached (0 never stops).
    """
    tokens: list[int] = []
    laws: list[Row] = []
    confidence: list[Tensor | float] = []
    raw: list[ShortRow] = []
    feed = backlog
    reached = 1.0
    while len(tokens) < limit:
        if stop is not None and not stop.asks(len(tokens)):
            break
        said = (yield DraftPass(drafter, feed, 1))[0]
        row = said if isinstance(said, ShortRow) else ShortRow.of(said)
        if stop is not None and not stop.draws(row):
            break
        if min_confidence > 0 and row.best[2] < min_confidence:
            break
        if least > 0 and reached * row.best[2] < least:
            break
        law, token, chance = _drawn(row, ahead, draws)
        tokens.append(token)
        laws.append(law)
        confidence.append(chance)
        if least > 0:
            reached *= float(confidence[-1])
        raw.append(row)
        if token in stop_tokens:
            break
        ahead.push(token)
        feed = [token]
    logits = [row.known for row in raw] if all(row.table.words is None for row in raw) else DenseLater(raw)
    return Draft(tokens, _joined(laws, raw, ahead), _fetched(confidence), logits)


def _drawn(row: ShortRow, ahead: Ahead, draws: Draws) -> tuple[Row, int, Tensor | float]:
    """A law (over the words that the row knows, or all where there are processors), a token of it, its raw probability."""
    if not ahead.plain:
        law = ahead.row(row.dense)
        token = draws.draft(law)
        return law, token, row.chance(token)
    if ahead.greedy:
        law = Row(token=row.best[1])
        return law, draws.draft(law), row.best[2]
    law = ahead.row(row.known)
    column = draws.draft(law)
    return law, row.token(column), row.probs[column]


def _joined(laws: Sequence[Row], raw: Sequence[ShortRow], ahead: Ahead) -> Rows:
    """The laws as they are tested: over all words."""
    if not laws:
        return Rows(tokens=())
    joined = Rows.joined(laws)
    if joined.probs is None or not ahead.plain:
        return joined
    return Rows(probs=raw[0].spread(joined.probs, 0.0))


def _fetched(values: Sequence[Tensor | float]) -> list[float]:
    tensors = [value for value in values if isinstance(value, Tensor)]
    fetched = iter(torch.stack(tensors).tolist() if tensors else ())  # in one transfer
    return [next(fetched) if isinstance(value, Tensor) else value for value in values]
