"""Stitches in closed form: one sweep through the layers, the full and the slim stream of all the text side by side.

Layer by layer both streams go one layer further, the full one first: its keys of this layer are what the slim one, as in
decoding, reads below each block. They are needed nowhere else and kept no longer. At the end of a gap the stitch is fitted
from the slim states, which the gap left as they were, to the full ones, and the slim stream goes on from what it makes of
them; so later gaps are fitted to what earlier stitches leave. All gaps together cost one full and one slim pass over the
text.

Memory besides the model, for T tokens of width d, N of them scored: hidden states ``(T + N) d`` in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from viasd.attention import Segment
from viasd.errors import FitError, OptionError
from viasd.layered import LayeredModel
from viasd.routes import Route
from viasd.search.calibration import Passage
from viasd.search.fit.ridge import RIDGE, Moments
from viasd.search.scorer import BlockStep, Placed
from viasd.stitch import Stitch

_GROUP_TOKENS = 1024  # tokens that travel together
# A token whose state is so many times as long as the median's is a sink: its few huge features would rule the fit.
_MASSIVE = 8.0
_SINK_POSITIONS = 1  # and the very first one always is


@dataclass(frozen=True)
class GapFit:
    """One stitch and how well it fits.

    Attributes:
        start: First skipped layer.
        end: The layer before which the stitch is applied.
        rows: Tokens it was fitted on.
        sinks: Tokens left out because their states are huge.
        error_before: Mean over these tokens of ``|full - slim|^2`` before the stitch, over that of ``|full - mean|^2``.
        error_after: The same after it.
    """

    start: int
    end: int
    rows: int
    sinks: int
    error_before: float
    error_after: float


def fit_stitches(
    model: LayeredModel,
    route: Route,
    passages: Sequence[Passage],
    *,
    block: int = 6,
    ridge: float = RIDGE,
    rank: int | None = None,
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> tuple[dict[int, Stitch], list[GapFit]]:
    """Fits a stitch across every gap of a route.

    Args:
        model: The target.
        route: Layers of the slim path; its own stitches are ignored.
        passages: Text; the scored tokens of each passage are fitted on.
        block: Block length, gamma + 1.
        ridge: See `Moments.solve`.
        rank: Likewise.
        tell: Receives (layers done, layers in all).

    Returns:
        Stitches in the model's dtype by the layer they come before, and how well each fits.

    Raises:
        OptionError: If a half layer is skipped, or nothing is.
        FitError: If the text does not determine the maps.
    """
    if route.partial:
        raise OptionError(
            "only whole layers can be stitched, but the mask skips attention and MLP separately; use a mask of whole layers"
        )
    if not route.gaps:
        raise OptionError("the mask skips no layer, so there is no gap to stitch")
    width = model.embed([0]).shape[-1]
    tokens = sum(p.scored for p in passages)
    if tokens < width:
        raise FitError(
            f"the text has {tokens} scored tokens, but an affine map of states of width {width} needs at least {width} "
            "(better 20 times as many); give more text"
        )
    starts = {end: start for start, end in route.gaps}
    kept = set(route.layers)
    maps: dict[int, Stitch] = {}
    fits: list[GapFit] = []
    with torch.inference_mode():
        streams = [_Stream(model, group, block, route.first_gap) for group in _grouped(passages)]
        for layer in range(model.n_layers):
            if layer in starts:
                maps[layer], fit = _fitted(streams, starts[layer], layer, ridge, rank, model.dtype)
                fits.append(fit)
                for stream in streams:
                    stream.slim = maps[layer](stream.slim)
            for stream in streams:
                stream.advance(layer, slim=layer in kept)
            tell(layer + 1, model.n_layers)
    return maps, fits


class _Stream:
    """Full and slim hidden states of a group of passages, before the layer that comes next."""

    def __init__(self, model: LayeredModel, group: Sequence[Passage], block: int, first_gap: int) -> None:
        self._model = model
        self._block = block
        self._first_gap = first_gap
        self._lengths = [len(p.tokens) - 1 for p in group]
        self._starts = [p.first - 1 for p in group]
        offsets = [0]
        for length in self._lengths:
            offsets.append(offsets[-1] + length)
        pieces = [torch.arange(a + s, b) for (a, b), s in zip(pairwise(offsets), self._starts, strict=True)]
        self._scored = torch.cat(pieces).to(model.device)
        self.positions = torch.cat([torch.arange(s, n) for s, n in zip(self._starts, self._lengths, strict=True)])
        self.full = model.embed([t for p in group for t in p.tokens[:-1]])
        self.slim = self.at_scored()

    def at_scored(self) -> Tensor:
        """Full states at the scored positions, ``[1, n, d]``."""
        return self.full[:, self._scored.to(self.full.device)]

    def advance(self, layer: int, *, slim: bool) -> None:
        """Runs the full stream through a layer, and the slim one too where it runs it."""
        model = self._model
        placed = [
            Placed(model.new_kv(), start, length - start, length)
            for start, length in zip(self._starts, self._lengths, strict=True)
        ]
        step = model.step([Segment(p.kv, 0, p.end) for p in placed])
        self.full, _ = model.run(self.full, (layer,), step)
        if layer < self._first_gap:
            self.slim = self.at_scored()
        elif slim:
            self.slim, _ = model.run(self.slim, (layer,), BlockStep(placed, self._block, model.device, model.kernel))


def _fitted(
    streams: Sequence[_Stream], start: int, end: int, ridge: float, rank: int | None, dtype: torch.dtype
) -> tuple[Stitch, GapFit]:
    """The stitch across one gap."""
    lengths = [s.full.float().norm(dim=-1)[0] for s in streams]
    limit = _MASSIVE * torch.cat([n.cpu() for n in lengths]).median()
    width = streams[0].slim.shape[-1]
    moments = Moments(width, streams[0].slim.device)
    left_out = 0

    def rows() -> Iterator[tuple[Tensor, Tensor]]:
        for stream in streams:
            x, y = stream.slim[0].float(), stream.at_scored()[0].float().to(stream.slim.device)
            usual = (
                (x.norm(dim=-1) < limit) & (y.norm(dim=-1) < limit) & (stream.positions >= _SINK_POSITIONS).to(x.device)
            )
            # What is not a number must be complained of, not left out.
            usual |= ~(torch.isfinite(x).all(dim=-1) & torch.isfinite(y).all(dim=-1))
            yield x[usual], y[usual]

    for stream, (x, y) in zip(streams, rows(), strict=True):
        moments.add(x, y)
        left_out += stream.slim.shape[1] - len(x)
    try:
        weight, shift = moments.solve(ridge, rank)
    except FitError as error:
        raise FitError(f"layers {start} to {end - 1}: {error}") from error
    factors: tuple[Tensor, ...] = (weight,)
    if rank is not None and rank < width:
        left, scale, right = torch.linalg.svd(weight)
        root = scale[:rank].sqrt()
        factors = (left[:, :rank] * root, root[:, None] * right[:rank])
    stitch = Stitch(factors, shift).to(dtype)
    before = after = spread = 0.0
    mean = torch.stack([y.double().sum(dim=0) for _, y in rows()]).sum(dim=0) / moments.rows
    for x, y in rows():
        before += float((y - x).square().sum())
        after += float((y - stitch(x[None])[0]).square().sum())
        spread += float((y - mean).square().sum())
    return stitch, GapFit(start, end, moments.rows, left_out, before / spread, after / spread)


def _grouped(passages: Sequence[Passage]) -> list[list[Passage]]:
    groups: list[list[Passage]] = [[]]
    size = 0
    for passage in passages:
        if groups[-1] and size + len(passage.tokens) > _GROUP_TOKENS:
            groups.append([])
            size = 0
        groups[-1].append(passage)
        size += len(passage.tokens)
    return groups
