"""Passes over packed sequences. A sequence alone is a pack of one: there is no other way through a model while decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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


def full_states(
    model: LayeredModel, route: Route | None, sequences: Sequence[tuple[SequenceKV, Sequence[int]]]
) -> list[Tensor]:
    """The full path over everything it has not run, each sequence from its own watermark on.

    Where the slim path has computed the layers before the first gap for its positions, only newer ones need them: those
    tokens join the pass at the gap.

    Args:
        model: The target.
        route: The slim path, where there is one.
        sequences: Cache and tokens of each, up to the end of the pass.

    Returns:
        Hidden states ``[1, n, d]`` after the last layer at the n positions each ran. No watermark has moved yet, so a pass
        that fails can be run again; `full_done` moves them.
    """
    for kv, tokens in sequences:
        kv.roll_back(len(tokens))
    if all(kv.boundary is None for kv, _ in sequences):
        hidden, _ = through(model, None, [Line(kv, kv.full_len, tokens[kv.full_len :]) for kv, tokens in sequences])
    else:
        hidden = _joined_at_gap(model, route, sequences)
    return hidden


def full_done(sequences: Sequence[tuple[SequenceKV, Sequence[int]]]) -> None:
    """The full path has run all these tokens."""
    for kv, tokens in sequences:
        kv.full_len = kv.slim_len = len(tokens)
        kv.boundary = None


def slim_states(
    model: LayeredModel, route: Route, sequences: Sequence[tuple[SequenceKV, Sequence[int]]]
) -> tuple[list[Tensor], list[Tensor]]:
    """The slim path over everything it has not run.

    Arguments as for `full_states`.

    Returns:
        Hidden states at the end of the route, and those at its first gap, from which an escalation can start; both
        ``[1, n, d]``. `slim_done` keeps the latter and moves the watermarks.
    """
    lines = [Line(kv, kv.slim_len, tokens[kv.slim_len :]) for kv, tokens in sequences]
    hidden, captured = through(model, route, lines, capture=(route.resumes_at,))
    return hidden, captured[route.resumes_at]


def slim_done(sequences: Sequence[tuple[SequenceKV, Sequence[int]]], boundaries: Sequence[Tensor]) -> None:
    """The slim path has run all these tokens."""
    for (kv, tokens), states in zip(sequences, boundaries, strict=True):
        kv.boundary = _after(kv.boundary, states)
        kv.slim_len = len(tokens)


def read_out(
    model: LayeredModel,
    route: Route | None,
    hidden: Sequence[Tensor],
    rows: Sequence[int],
    own: Callable[[Tensor], Tensor] | None = None,
) -> list[Tensor]:
    """Raw logits ``[rows, V]`` at the last positions of each sequence, as many as asked for (none where that is 0).

    `own` reads them in the place of the route's or the model's readout.
    """
    wanted = [states[:, states.shape[1] - n :] for states, n in zip(hidden, rows, strict=True)]
    own = own or (None if route is None else route.readout)
    readout: Callable[[Tensor], Tensor] = own or partial(model.readout, steady=True)
    read = [states for states in wanted if states.shape[1]]
    if len(wanted) == 1 and read:
        return [readout(read[0])]
    logits = readout(torch.cat(read, dim=1)) if read else torch.empty(0, model.vocabulary)
    return list(logits.split(list(rows)))


def _joined_at_gap(
    model: LayeredModel, route: Route | None, sequences: Sequence[tuple[SequenceKV, Sequence[int]]]
) -> list[Tensor]:
    assert route is not None  # only a slim pass leaves a boundary
    gap, everything = route.first_gap, range(model.n_layers)
    # Without a boundary the two watermarks are one, so this is all that has not run the first layers, in any sequence.
    newer = [(kv, tokens[kv.slim_len :]) for kv, tokens in sequences]
    running = [(kv, tokens) for kv, tokens in newer if tokens]
    lower: dict[int, Tensor] = {}
    if running:
        step = model.step([Segment(kv, kv.slim_len, len(tokens)) for kv, tokens in running])
        states, _ = model.run(model.embed([t for _, tokens in running for t in tokens]), everything[:gap], step)
        parts = _apart(states, [len(tokens) for _, tokens in running])
        lower = {id(kv): part for (kv, _), part in zip(running, parts, strict=True)}
    entering = []
    for kv, _ in sequences:
        extra = lower.get(id(kv))
        entering.append(kv.boundary if extra is None else _after(kv.boundary, extra))
    states = _together([part for part in entering if part is not None])
    step = model.step([Segment(kv, kv.full_len, len(tokens) - kv.full_len) for kv, tokens in sequences])
    states, _ = model.run(states, everything[gap:], step)
    return _apart(states, [len(tokens) - kv.full_len for kv, tokens in sequences])


def _after(before: Tensor | None, states: Tensor) -> Tensor:
    return states if before is None else torch.cat([before, states], dim=1)


def _together(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)


def _apart(hidden: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    return [hidden] if len(lengths) == 1 else list(hidden.split(list(lengths), dim=1))
