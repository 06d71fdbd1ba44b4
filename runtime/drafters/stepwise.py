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
    rows: list[Row] = []
    confidence: list[Tensor] = []
    raw: list[Tensor] = []
    feed = backlog
    reached = 1.0
    while len(tokens) < limit:
        if stop is not None and not stop.asks(len(tokens)):
            break
        logits = (yield DraftPass(drafter, feed, 1))[0]
        if stop is not None and not stop.draws(logits):
            break
        top = torch.softmax(logits, dim=-1)
        if min_confidence > 0 and float(top.max()) < min_confidence:
            break
        if least > 0 and reached * float(top.max()) < least:
            break
        row = ahead.row(logits)
        token = draws.draft(row)
        tokens.append(token)
        rows.append(row)
        confidence.append(top[token])
        if least > 0:
            reached *= float(top[token])
        raw.append(logits)
        if token in stop_tokens:
            break
        ahead.push(token)
        feed = [token]
    values: list[float] = torch.stack(confidence).tolist() if confidence else []
    return Draft(tokens, Rows.joined(rows) if rows else Rows(tokens=()), values, raw)
