"""The rows of a transformers request, decoded together in passes that they share."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from viasd.errors import LoadError
from viasd.mask import LayerMask
from viasd.pair import Pair
from viasd.runtime.config import GenerationConfig
from viasd.runtime.engine import Engine
from viasd.runtime.engine.adaptive import AdaptivePolicy
from viasd.runtime.engine.memory import KVBudget, worst_bytes
from viasd.runtime.hf.rows import Answer, RowSession
from viasd.runtime.names import EXITING
from viasd.runtime.target import prefill_chunk

MOST_ROWS = 64  # that share passes; one that ends makes room for the next
_PIECES = 8  # of prompts in one pass
_CROWD = 4  # rows from which on drafts are trimmed to what pays beside the others, if nobody said how long they are

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Crowd:
    """Many rows, whose drafts compete for room in the passes that they share.

    Attributes:
        policy: What drafts are held against.
        key: Where in the pair's room it is kept what was learnt, for the next request of the kind.
    """

    policy: AdaptivePolicy
    key: object

    @classmethod
    def of(cls, pair: Pair, config: GenerationConfig, mask: LayerMask | None, rows: int) -> Crowd | None:
        """The crowd of a request; None where each row goes by its own costs."""
        decoding, most = config.decoding, min(rows, MOST_ROWS)
        if most < _CROWD or decoding.draft_length is not None or decoding.strategy in EXITING:
            return None
        key = ("adaptive verification", None if mask is None else mask.digest, decoding.self_skip)
        return cls(AdaptivePolicy(pair, most, "auto", state=pair.measured.get(key)), key)


def decoded(rows: list[RowSession], crowd: Crowd | None = None) -> list[Answer]:
    """Decodes every row of a request to its end.

    Args:
        rows: Of one pair and configuration. They are taken out of the list, since a row that has ended gives its memory
            back.
        crowd: See there.

    Returns:
        What became of each.

    Raises:
        LoadError: If the memory does not suffice.
    """
    if len(rows) == 1 or rows[0].config.decoding.strategy in EXITING:
        return [rows.pop(0).run() for _ in range(len(rows))]
    place = rows[0].pair.device
    try:
        return _together(rows, crowd)
    except torch.OutOfMemoryError as error:
        raise LoadError(
            f"out of memory on {place}; use fewer rows, shorter prompts or answers, or another dtype"
        ) from error


def _together(rows: list[RowSession], crowd: Crowd | None) -> list[Answer]:
    pair, guard = rows[0].pair, rows[0].guard
    most = min(len(rows), MOST_ROWS)
    needed = [worst_bytes(row) for row in rows]
    # Nothing is refused that might do alone, and what does not fit at once waits, as it would have to row by row.
    budget = max(KVBudget.of(pair, None).total, *needed)
    if sum(sorted(needed)[-most:]) > budget:
        _log.info("%d rows may need more memory than half of what is free, so some wait for others to end", len(rows))
    engine = Engine(
        pair,
        mask=None,
        heads=None,
        concurrency=most,
        kv_budget=budget,
        prompt_budget=min(most, _PIECES) * prefill_chunk(pair.target.device),
        policy=None if crowd is None else crowd.policy,
        isolated=False,
    )
    open_rows = {engine.enter(row): row for row in rows}
    order = list(open_rows)
    rows.clear()
    answers: dict[int, Answer] = {}
    try:
        while engine.busy:
            with nullcontext() if guard is None else guard.unchanging():
                events = engine.step()
            for event in events:
                if event.result is not None:
                    answers[event.request] = open_rows.pop(event.request).done()
        if crowd is not None:
            pair.measured[crowd.key] = crowd.policy.state()
    finally:
        for row in open_rows.values():
            row.close()
    return [answers[number] for number in order]
