"""Passes over packed sequences. A sequence alone is a pack of one: there is no other way through a model while decoding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from viasd.attention import Segment
from viasd.kv import SequenceKV
from viasd.layered import LayeredModel
from viasd.routes import Route


class Line(NamedTuple):
    """One sequence's share of a pass.

    Attributes:
        kv: Its cache.
        start: Position of the first token.
        tokens: The tokens to run; at least one.
    """

    kv: SequenceKV
    start: int
    tokens: Sequence[int]


def through(
    model: LayeredModel, route: Route | None, lines: Sequence[Line], capture: tuple[int, ...] = ()
) -> tuple[list[Tensor], dict[int, list[Tensor]]]:
    """Runs tokens of several sequences through the layers of one route (None: through all).

    Returns:
        For each sequence its hidden states ``[1, n, d]`` at the end, and its captured states by layer index.
    """
    step = model.step([Segment(line.kv, line.start, len(line.tokens)) for line in lines])
    hidden = model.embed([token for line in lines for token in line.tokens])
    if route is None:
        hidden, captured = model.run(hidden, range(model.n_layers), step, capture)
    else:
        hidden, captured = model.run(
            hidden, route.layers, step, capture=capture, parts=route.parts, stitches=route.stitches
        )
    lengths = [len(line.tokens) for line in lines]
    return _apart(hidden, lengths), {index: _apart(states, lengths) for index, states in captured.items()}


class Share(NamedTuple):
    """One sequence's share of a verifier's pass.

    Attributes:
        kv: Its cache.
        tokens: Its tokens up to the end of the pass.
        capture: Layers whose input it wants to see at the positions that run.
        beside: Those before the route's first gap that its full passes want. Slim passes keep them with the boundary, as
            a full pass that goes on from there does not compute them.
    """

    kv: SequenceKV
    tokens: Sequence[int]
    capture: tuple[int, ...] = ()
    beside: tuple[int, ...] = ()


class States(NamedTuple):
    """Where one sequence's share of a pass ended.

    Attributes:
        hidden: States ``[1, n, d]`` after the last layer, at the n positions it ran.
        captured: Those that enter the layers it captures, likewise.
    """

    hidden: Tensor
    captured: dict[int, Tensor]


def full_states(model: LayeredModel, route: Route | None, shares: Sequence[Share]) -> list[States]:
    """The full path over everything it has not run, each sequence from its own watermark on.

    Where the slim path has computed the layers before the first gap for its positions, only newer ones need them: those
    tokens join the pass at the gap.

    Args:
        model: The target.
        route: The slim path, where there is one.
        shares: Of the sequences.

    Returns:
        Where each ended. No watermark has moved yet, so a pass that fails can be run again; `full_done` moves them.
    """
    for share in shares:
        share.kv.roll_back(len(share.tokens))
    if all(share.kv.boundary is None for share in shares):
        lines = [Line(share.kv, share.kv.full_len, share.tokens[share.kv.full_len :]) for share in shares]
        hidden, captured = through(model, None, lines, _union(share.capture for share in shares))
        return [
            States(states, {index: captured[index][i] for index in share.capture})
            for i, (share, states) in enumerate(zip(shares, hidden, strict=True))
        ]
    assert route is not None  # only a slim pass leaves a boundary
    return _joined_at_gap(model, route, shares)


def full_done(shares: Sequence[Share]) -> None:
    """The full path has run all these tokens."""
    for kv, tokens, *_ in shares:
        kv.full_len = kv.slim_len = len(tokens)
        kv.boundary = None


def slim_states(model: LayeredModel, route: Route, shares: Sequence[Share]) -> tuple[list[States], list[Tensor]]:
    """The slim path over everything it has not run.

    Arguments as for `full_states`.

    Returns:
        Where each sequence ended, and the states at the route's first gap, from which an escalation can start, with those
        that it keeps beside them: ``[1, n, k d]``. `slim_done` keeps the latter and moves the watermarks.
    """
    lines = [Line(share.kv, share.kv.slim_len, share.tokens[share.kv.slim_len :]) for share in shares]
    at_gap = route.resumes_at
    wanted = _union([(at_gap,), *(share.beside for share in shares), *(share.capture for share in shares)])
    hidden, captured = through(model, route, lines, wanted)
    ended, boundaries = [], []
    for i, (share, states) in enumerate(zip(shares, hidden, strict=True)):
        ended.append(States(states, {index: captured[index][i] for index in share.capture}))
        boundaries.append(_beside(captured[at_gap][i], [captured[index][i] for index in share.beside]))
    return ended, boundaries


def slim_done(shares: Sequence[Share], boundaries: Sequence[Tensor]) -> None:
    """The slim path has run all these tokens."""
    for (kv, tokens, *_), states in zip(shares, boundaries, strict=True):
        kv.boundary = _after(kv.boundary, states)
        kv.slim_len = len(tokens)


def read_out(
    model: LayeredModel,
    route: Route | None,
    hidden: Sequence[Tensor],
    rows: Sequence[int],
) -> list[Tensor]:
    """Raw logits ``[rows, V]`` at the last positions of each sequence, as many as asked for (none where that is 0).

    By the CPU kernels a row is the same whatever other rows there are.
    """
    wanted = [states[:, states.shape[1] - n :] for states, n in zip(hidden, rows, strict=True)]
    own = None if route is None else route.readout
    read = [states for states in wanted if states.shape[1]]
    if not read:
        return list(torch.empty(0, model.vocabulary).split(list(rows)))
    joined = _together(read)
    if own is None:
        logits = model.readout(joined, steady=True)
    else:
        parts = [own(piece) for piece in joined.split(model.steady_rows or joined.shape[1], dim=1)]
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
    return [logits] if len(wanted) == 1 else list(logits.split(list(rows)))


def _joined_at_gap(model: LayeredModel, route: Route, shares: Sequence[Share]) -> list[States]:
    gap, everything = route.first_gap, range(model.n_layers)
    # Without a boundary the two watermarks are one, so this is all that has not run the first layers, in any sequence.
    running = [share for share in shares if len(share.tokens) > share.kv.slim_len]
    lower: dict[int, States] = {}
    if running:
        fresh = [share.tokens[share.kv.slim_len :] for share in running]
        step = model.step(
            [Segment(share.kv, share.kv.slim_len, len(new)) for share, new in zip(running, fresh, strict=True)]
        )
        below = [tuple(index for index in share.capture if index < gap) for share in running]
        early = _union([*below, *(share.beside for share in running)])
        states, found = model.run(model.embed([token for new in fresh for token in new]), everything[:gap], step, early)
        lengths = [len(new) for new in fresh]
        parts, seen = _apart(states, lengths), {index: _apart(inputs, lengths) for index, inputs in found.items()}
        for i, share in enumerate(running):
            lower[id(share.kv)] = States(parts[i], {index: inputs[i] for index, inputs in seen.items()})
    entering, before = [], []
    for share in shares:
        kept = [] if share.kv.boundary is None else list(share.kv.boundary.chunk(1 + len(share.beside), dim=2))
        extra = lower.get(id(share.kv))
        state = kept[0] if kept else None
        shared: dict[int, Tensor] = dict(zip(share.beside, kept[1:], strict=False))
        if extra is not None:
            state = _after(state, extra.hidden)
            shared = {
                index: _after(shared.get(index), extra.captured[index])
                for index in _union([share.beside, tuple(index for index in share.capture if index < gap)])
            }
        assert state is not None
        entering.append(state)
        before.append(shared)
    step = model.step([Segment(share.kv, share.kv.full_len, len(share.tokens) - share.kv.full_len) for share in shares])
    late = tuple(index for index in _union(share.capture for share in shares) if index >= gap)
    states, found = model.run(_together(entering), everything[gap:], step, late)
    lengths = [len(share.tokens) - share.kv.full_len for share in shares]
    later = {index: _apart(inputs, lengths) for index, inputs in found.items()}
    return [
        States(hidden, {index: shared[index] if index < gap else later[index][i] for index in share.capture})
        for i, (share, hidden, shared) in enumerate(zip(shares, _apart(states, lengths), before, strict=True))
    ]


def _union(groups: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """Each index once, in the order in which they come."""
    return tuple(dict.fromkeys(index for group in groups for index in group))


def _after(before: Tensor | None, states: Tensor) -> Tensor:
    return states if before is None else torch.cat([before, states.to(before.device)], dim=1)


def _beside(state: Tensor, others: Sequence[Tensor]) -> Tensor:
    """States of the same positions side by side, ``[1, n, k d]``: rolled back as one."""
    return torch.cat([state, *(other.to(state.device) for other in others)], dim=2) if others else state


def _together(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)


def _apart(hidden: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    return [hidden] if len(lengths) == 1 else list(hidden.split(list(lengths), dim=1))
