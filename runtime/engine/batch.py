"""Work of several requests, run packed; a pass that fails is run again one by one, so that only those to blame fail."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from torch import Tensor

from viasd.hardware import wait_for
from viasd.routes import Route
from viasd.runtime.drafters import FeatureDrafter, ModelLine, run_drafts, run_features
from viasd.runtime.engine.request import Request
from viasd.runtime.passes import DraftPass, FullPass, SlimPass, VerifierPass
from viasd.runtime.target import TieredTarget, Wanted, run_full, run_slim
from viasd.shortlist import ShortRows

Rows = Tensor | ShortRows
_log = logging.getLogger(__name__)

Reply = Rows | Exception
W = TypeVar("W")


class Charge(NamedTuple):
    """What of a pass's time is one request's.

    Attributes:
        request: The request.
        tier: Whose time it is.
        tokens: Tokens it runs there, by which the time is shared.
    """

    request: Request
    tier: str
    tokens: int


def full_pass(requests: Sequence[Request], prompts: Sequence[Request]) -> list[Reply]:
    """One pass of the full verifier, pieces of prompts included.

    Args:
        requests: Those that wait for a `FullPass`.
        prompts: Those whose prompt's next piece rides along.

    Returns:
        For each of `requests` and then each of `prompts` its rows, or why it failed.
    """
    wanted = [_wanted(request, FullPass) for request in requests]
    for request in prompts:
        target = request.answer.target
        wanted.append(Wanted(target, target.next_piece(request.answer.prompt[:-1]), 0))
    tiers = ["full"] * len(requests) + ["prefill"] * len(prompts)
    charges = [
        Charge(request, tier, max(0, len(want.tokens) - want.target.kv.full_len))
        for request, tier, want in zip([*requests, *prompts], tiers, wanted, strict=True)
    ]
    return _packed(run_full, wanted, charges)


def slim_pass(requests: Sequence[Request]) -> list[Reply]:
    """One pass of the slim verifier for requests that wait for a `SlimPass`."""
    wanted = [_wanted(request, SlimPass) for request in requests]
    charges = [
        Charge(request, "slim", len(want.tokens) - want.target.kv.slim_len)
        for request, want in zip(requests, wanted, strict=True)
    ]
    return _packed(run_slim, wanted, charges)


def draft_pass(requests: Sequence[Request]) -> list[Reply]:
    """One pass of the drafters for requests that wait for a `DraftPass`: one for each route among them."""
    lines: dict[tuple[int, Route | None], list[tuple[int, tuple[ModelLine, Sequence[int], int]]]] = {}
    features: dict[int, list[tuple[int, tuple[FeatureDrafter, Sequence[int], int]]]] = {}
    charges = []
    for index, request in enumerate(requests):
        work = request.work
        assert isinstance(work, DraftPass)
        drafter, tokens = work.drafter, len(work.tokens)
        if isinstance(drafter, FeatureDrafter):
            features.setdefault(id(drafter.model), []).append((index, (drafter, work.tokens, work.rows)))
            tokens = max(1, drafter.due(work.tokens))  # it is read out, if nothing else
        else:
            assert isinstance(drafter, ModelLine)
            lines.setdefault((id(drafter.model), drafter.route), []).append((index, (drafter, work.tokens, work.rows)))
        charges.append(Charge(request, "drafter", tokens))
    replies: dict[int, Reply] = {}

    def together(run: Callable[[Sequence[W]], Sequence[Rows]], group: Sequence[tuple[int, W]]) -> None:
        found = _packed(run, [want for _, want in group], [charges[index] for index, _ in group])
        replies.update((index, reply) for (index, _), reply in zip(group, found, strict=True))

    for group in lines.values():
        together(run_drafts, group)
    for some in features.values():
        together(run_features, some)
    return [replies[index] for index in range(len(requests))]


def _wanted(request: Request, kind: type[VerifierPass]) -> Wanted:
    work = request.work
    assert isinstance(work, kind)
    assert isinstance(work.target, TieredTarget)
    return Wanted(work.target, work.tokens, work.rows)


def _packed(
    run: Callable[[Sequence[W]], Sequence[Rows]], wanted: Sequence[W], charges: Sequence[Charge]
) -> list[Reply]:
    """Runs wanted parts as one pass and shares its time by tokens."""
    try:
        return list(_charged(run, wanted, charges))
    except Exception as error:
        if len(wanted) == 1:
            return [error]
        # The words alone: a record that is kept would keep the error, and it the caches.
        _log.warning(
            "a pass of %d requests failed and is run one by one (%s: %s)", len(wanted), type(error).__name__, str(error)
        )
    # No watermark moves before a pass has succeeded, so each part can be run again, now alone.
    replies: list[Reply] = []
    for want, charge in zip(wanted, charges, strict=True):
        try:
            replies += _charged(run, [want], [charge])
        except Exception as error:
            replies.append(error)
    return replies


def _charged(
    run: Callable[[Sequence[W]], Sequence[Rows]], wanted: Sequence[W], charges: Sequence[Charge]
) -> Sequence[Rows]:
    started = time.perf_counter()
    rows = run(wanted)
    wait_for(rows[0].device)
    seconds, total = time.perf_counter() - started, sum(charge.tokens for charge in charges)
    for charge in charges:
        charge.request.charge(charge.tier, seconds * charge.tokens / total)
    return rows
