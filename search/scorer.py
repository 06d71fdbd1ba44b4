"""The objective: how far a slim verifier strays from the full one on text of the target's own.

Masks are scored as the runtime runs them. Below a block's start the slim path reads the full path's keys, inside the block
its own; one pass over the text per mask does that for all blocks at once, with both kinds of keys side by side and a mask
that says which a position may see. What does not depend on the mask is computed once: the full path's keys, its hidden
states before every layer (a mask's pass starts at its first skip), and q's log-probabilities.

Memory besides the model, for N scored tokens, T tokens in all, L layers, width d, V words: hidden states ``L T d`` and
keys of one cache in the model's dtype, q's rows ``N V`` in fp16, and per pass rows of at most `ROWS` positions in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from viasd.attention import Segment, Step
from viasd.confident import ConfidentConfig
from viasd.divergences import stage_figures
from viasd.kv import SequenceKV
from viasd.layered import LayeredModel
from viasd.routes import Route
from viasd.search.calibration import Passage
from viasd.search.states import States
from viasd.selecting import ConfidentReadout

#: Positions whose rows over the vocabulary exist in fp32 at one time.
ROWS = 64
_GROUP_TOKENS = 128  # scored tokens per group; a partial cost is reported after each


@dataclass(frozen=True)
class Score:
    """Means over the scored tokens.

    Attributes:
        cost: R(q' || q) of the stage (`viasd.divergences.stage_cost`).
        kl: KL(q' || q), nats.
        tv: Total variation.
        agreement: Share of positions with the same argmax.
        tokens: Number of positions.
        per_token: Cost of each position (for comparing masks pairwise).
        best: Argmax of the slim verifier at each position.
        ratio: ``q'(drafted) / max q'`` at each position, where drafted tokens were given.
    """

    cost: float
    kl: float
    tv: float
    agreement: float
    tokens: int
    per_token: Tensor
    best: Tensor
    ratio: Tensor | None = None

    @property
    def accept_mass(self) -> float:
        """Mean probability that q keeps a token drawn from q'."""
        return 1 - self.tv


@dataclass(frozen=True)
class Text:
    """One passage as it is scored.

    Attributes:
        tokens: All tokens of the passage but the last.
        start: Position of the first scored row, which follows ``tokens[: start + 1]``.
        length: Scored rows.
    """

    tokens: tuple[int, ...]
    start: int
    length: int


@dataclass(frozen=True)
class Block:
    """One block of a passage.

    Attributes:
        tokens: All tokens of the passage but the last.
        start: Position of the first row; row i follows ``tokens[: start + i + 1]``.
        logits: Rows ``[n, V]`` of the slim path.
        best: Argmax of q at each.
    """

    tokens: tuple[int, ...]
    start: int
    logits: Tensor
    best: list[int]


@dataclass(frozen=True)
class Placed:
    """Where a passage's scored positions lie.

    Attributes:
        kv: The full path's keys.
        start: First position whose row is scored (it predicts the first scored token).
        length: Scored positions.
        end: Positions in the cache.
    """

    kv: SequenceKV
    start: int
    length: int
    end: int


class BlockStep(Step):
    """A pass over the scored positions of several passages, cut into blocks.

    A position of a block that starts at s sees the full path's keys below s, and from s on the keys of this very pass.
    """

    def __init__(self, passages: Sequence[Placed], block: int, device: torch.device, kernel: str) -> None:
        super().__init__([Segment(p.kv, 0, p.length) for p in passages], device, kernel, [p.start for p in passages])
        self._passages = passages
        self._block = block
        self._block_masks: dict[tuple[int, int | None, int, torch.device], Tensor] = {}

    def store(self, layer: int, keys: Tensor, values: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Own keys are put beside the full path's; nothing is written into the cache."""
        views, offset = [], 0
        for passage in self._passages:
            rows = slice(offset, offset + passage.length)
            full_keys, full_values = passage.kv.read(layer, passage.end)
            views.append(
                (
                    torch.cat([full_keys, keys[None, :, rows]], dim=2),
                    torch.cat([full_values, values[None, :, rows]], dim=2),
                )
            )
            offset += passage.length
        return views

    def mask(self, index: int, window: int | None, groups: int, device: torch.device) -> Tensor:
        """``[groups * n, end + n]``: full keys below the block's start, own keys inside the block, within the window."""
        cached = self._block_masks.get((index, window, groups, device))
        if cached is None:
            passage = self._passages[index]
            query = torch.arange(passage.start, passage.start + passage.length, device=device)[:, None]
            block_start = passage.start + (query - passage.start) // self._block * self._block
            full = torch.arange(passage.end, device=device)[None]
            own = query.T
            seen = torch.cat([full < block_start, (own >= block_start) & (own <= query)], dim=1)
            if window is not None:
                seen &= torch.cat([full, own], dim=1) > query - window
            cached = seen.repeat(groups, 1)
            self._block_masks[(index, window, groups, device)] = cached
        return cached


@dataclass(frozen=True)
class _Prepared(Placed):
    """A passage after the full path has run over it.

    Attributes:
        hidden: Hidden states ``[1, length, d]`` before each layer, at the scored positions.
        tokens: All tokens of the passage but the last.
    """

    hidden: list[Tensor]
    tokens: tuple[int, ...]


class Scorer:
    """Scores routes of one target on fixed text.

    Args:
        model: The target.
        passages: Calibration text, each passage with at least two scored tokens.
        block: Block length, gamma + 1.
        alpha: See `viasd.divergences.stage_cost`.
        beta: Likewise.
        private_kv: Let the slim path read only its own keys, from the first token on (for comparison; the runtime
            shares).
        readout: Chooses the rows of the slim path, as decoding then does; None takes those of its last layer. A route that
            ends in a light head keeps that.
    """

    def __init__(
        self,
        model: LayeredModel,
        passages: Sequence[Passage],
        *,
        block: int = 6,
        alpha: float = 0.5,
        beta: float = 0.5,
        private_kv: bool = False,
        readout: ConfidentConfig | None = None,
    ) -> None:
        self.model = model
        self.block = block
        self.alpha, self.beta = alpha, beta
        self.private_kv = private_kv
        self.readout = readout
        self.layers_run = 0  # layer passes over a group, for the report on what reuse saves
        self.layers_saved = 0
        self.groups_run = 0
        self._groups: list[list[_Prepared]] = []
        self._rows: list[Tensor] = []
        self._best: list[Tensor] = []
        with torch.inference_mode():
            for group in _grouped(passages):
                prepared = [self._prepare(p) for p in group]
                self._groups.append(prepared)
                final = torch.cat([p.hidden[-1] for p in prepared], dim=1)
                rows, best = [], []
                for chunk in final.split(ROWS, dim=1):
                    logits = model.readout(chunk)
                    best.append(logits.argmax(dim=-1))
                    rows.append(torch.log_softmax(logits, dim=-1).clamp_min(-60.0).half())
                self._rows.append(torch.cat(rows))
                self._best.append(torch.cat(best))

    @property
    def tokens(self) -> int:
        """Scored positions."""
        return sum(len(b) for b in self._best)

    @property
    def groups(self) -> int:
        """Groups of passages; a partial cost is reported after each."""
        return len(self._groups)

    @property
    def texts(self) -> list[Text]:
        """The passages in the order of their rows."""
        return [Text(p.tokens, p.start, p.length) for group in self._groups for p in group]

    @property
    def best(self) -> Tensor:
        """Argmax of q at every scored position."""
        return torch.cat(self._best)

    def score(
        self,
        route: Route,
        report: Callable[[int, Score], None] = lambda group, score: None,
        drafted: Tensor | None = None,
    ) -> Score:
        """Scores one route. The same route gives the same score, bit for bit, whatever was scored before.

        Args:
            route: Layers the slim path runs.
            report: Receives the group's number and the score so far after every group; may raise to stop early.
            drafted: A token for each scored position, whose `Score.ratio` is wanted; below 0 is none.
        """
        figures: list[Tensor] = []
        same: list[Tensor] = []
        best: list[Tensor] = []
        ratios: list[Tensor] = []
        done = 0
        score: Score | None = None
        with torch.inference_mode():
            for number, group in enumerate(self._groups):
                states = self._run(group, route)
                self.groups_run += 1
                at = 0
                for start in range(0, states.rows, ROWS):
                    logits = states.logits(start, ROWS)
                    n = logits.shape[0]
                    rows = self._rows[number][at : at + n]
                    figures.append(stage_figures(logits, rows, self.alpha, self.beta).double().cpu())
                    best.append(logits.argmax(dim=-1))
                    same.append((best[-1] == self._best[number][at : at + n]).double().cpu())
                    if drafted is not None:
                        tokens = drafted[done : done + n].to(best[-1]).clamp_min(0)
                        both = torch.stack([tokens, best[-1]], dim=1)
                        mine, peak = logits.gather(1, both).unbind(dim=1)
                        ratios.append((mine - peak).exp().cpu())
                    at, done = at + n, done + n
                score = _score(figures, same, best, ratios)
                report(number, score)
        assert score is not None  # a scorer has at least one group
        return score

    def answers(self, route: Route) -> Tensor:
        """A route's argmax at every scored position, by its last layer: what a self drafter would say."""
        found = []
        with torch.inference_mode():
            for group in self._groups:
                states = self._run(group, route, own=True)
                found += [states.logits(start, ROWS).argmax(dim=-1) for start in range(0, states.rows, ROWS)]
        return torch.cat(found)

    def blocks(self, route: Route, *, own: bool = False) -> Iterator[Block]:
        """A route's rows, block by block, beside what q says there. Call it in inference mode.

        Args:
            route: Layers that run.
            own: Take the rows of its last layer whatever the readout: what a self drafter would say.
        """
        for number, group in enumerate(self._groups):
            at = 0
            for passage in group:
                states = self._run([passage], route, own=own)
                for start in range(0, passage.length, self.block):
                    logits = states.logits(start, self.block)
                    best = self._best[number][at + start : at + start + logits.shape[0]]
                    yield Block(passage.tokens, passage.start + start, logits, best.tolist())
                at += passage.length

    def _prepare(self, passage: Passage) -> _Prepared:
        model, tokens = self.model, passage.tokens[:-1]
        kv = model.new_kv()
        step = model.step([Segment(kv, 0, len(tokens))])
        final, captured = model.run(model.embed(tokens), range(model.n_layers), step, capture=range(model.n_layers + 1))
        start = 0 if self.private_kv else passage.first - 1
        hidden = [captured[i][:, start:].clone() for i in range(model.n_layers)]
        hidden.append(final[:, passage.first - 1 :].clone())
        return _Prepared(kv, passage.first - 1, passage.scored, len(tokens), hidden, tokens)

    def _run(self, group: Sequence[_Prepared], route: Route, *, own: bool = False) -> States:
        """What a route says at the scored positions of a group; `own` takes its last layer whatever the readout."""
        readout = None
        if self.readout is not None and route.readout is None and not own:
            readout = ConfidentReadout(self.model, self.readout, route.layers, stitches=route.stitches)
        plain = route.readout or self.model.readout
        capture = () if readout is None else readout.capture
        first = route.first_gap
        # States before the first gap are the full path's, whatever the route.
        known = [i for i in capture if i <= first]
        captured = {i: torch.cat([p.hidden[i][:, -p.length :] for p in group], dim=1) for i in known}
        if first == self.model.n_layers:
            return States(torch.cat([p.hidden[-1] for p in group], dim=1), captured, readout, plain)
        layers = [i for i in route.layers if i >= first]
        self.layers_run += len(layers)
        self.layers_saved += len(route.layers) - len(layers)
        if self.private_kv:
            parts = [self._run_private(p, layers, first, route, capture) for p in group]
            final = torch.cat([last for last, _ in parts], dim=1)
            found = {i: torch.cat([more[i] for _, more in parts], dim=1) for i in capture if i not in captured}
        else:
            hidden = torch.cat([p.hidden[first] for p in group], dim=1)
            step = BlockStep(group, self.block, self.model.device, self.model.kernel)
            final, found = self.model.run(hidden, layers, step, capture, route.parts, route.stitches)
        return States(final, {**found, **captured}, readout, plain)

    def _run_private(
        self, passage: _Prepared, layers: Sequence[int], first: int, route: Route, capture: Sequence[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        kv = self.model.new_kv()
        step = self.model.step([Segment(kv, 0, passage.end)])
        final, found = self.model.run(passage.hidden[first], layers, step, capture, route.parts, route.stitches)
        return final[:, passage.start :], {i: hidden[:, passage.start :] for i, hidden in found.items()}


def _score(figures: list[Tensor], same: list[Tensor], best: list[Tensor], ratios: list[Tensor]) -> Score:
    per_token = torch.cat(figures)
    mean = per_token.mean(dim=0).tolist()
    agreement = float(torch.cat(same).mean())
    ratio = torch.cat(ratios) if ratios else None
    return Score(mean[0], mean[1], mean[2], agreement, len(per_token), per_token[:, 0], torch.cat(best), ratio)


def _grouped(passages: Sequence[Passage]) -> list[list[Passage]]:
    groups: list[list[Passage]] = [[]]
    size = 0
    for passage in passages:
        if size and size + passage.scored > _GROUP_TOKENS:
            groups.append([])
            size = 0
        groups[-1].append(passage)
        size += passage.scored
    return groups
