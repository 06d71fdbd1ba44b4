"""Confident Decoding (arXiv 2606.21906): which of the last layers a token is read out from. Decisions only, without torch.

Every layer runs. The row that is handed on comes from the near-final layer at the entropy valley closest to the top: from
the last layer one goes to shallower ones as long as the entropy of the raw row strictly decreases. `viasd.selecting` does
this with a model; which tiers may use it is `viasd.runtime.readouts`.

The authors' code differs from the paper's words in four ways, which `reference_compat` reproduces: a window of 10 allows 9
moves (it counts the last layer); a ratio is applied twice (to the layers, and again to the candidates that gives); with
neither given nothing moves, and no word is said; a fixed layer outside the window becomes the window's end.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from viasd.errors import OptionError

# Layers above (positive: shallower) the valley.
_SHIFTS = {"trough": 0, "trough-m1": 1, "trough-m2": 2, "trough-p1": -1, "trough-p2": -2}
# Layers before the last one of the whole model.
_FIXED = {"last-m1": 1, "last-m2": 2, "last-m4": 4, "last-m8": 8}
METHODS = (*_SHIFTS, *_FIXED)

#: Layers to step back where nobody says, the value of the authors' own examples.
BACKTRACK = 10

EntropyAt = Callable[[int, Sequence[int]], Sequence[float]]


@dataclass(frozen=True)
class Window:
    """Where a layer may be chosen.

    Attributes:
        candidates: The last so many layers, at least 1.
        steps: Most moves of the descent, below `candidates`.
    """

    candidates: int
    steps: int


@dataclass(frozen=True)
class ConfidentConfig:
    """How a row is chosen.

    Attributes:
        method: ``trough`` takes the valley; ``trough-m1``, ``-m2`` one and two layers shallower than it, ``trough-p1``,
            ``-p2`` deeper, inside the window; ``last-m1``, ``-m2``, ``-m4``, ``-m8`` a fixed layer before the last,
            whatever the entropies.
        p: Share of the tokens that are read out this way, in ``[0, 1]``; the others take the last layer.
        max_backtrack_layers: Above 0, how many layers one may step back; below 0, any number; 0 leaves it to
            `backtrack_ratio`. None is 0 where there is a ratio, else `BACKTRACK`; with `reference_compat` it is 0.
        backtrack_ratio: Share of the layers that one may step back, rounded up, in ``[0, 1]``. Both 0: nothing moves.
        reference_compat: Windows and fixed layers as the authors' code has them; see above.

    Raises:
        OptionError: If a value is out of range, or both kinds of window are given.
    """

    method: str = "trough"
    p: float = 1.0
    max_backtrack_layers: int | None = None
    backtrack_ratio: float = 0.0
    reference_compat: bool = False

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise OptionError(f"readout must be one of {', '.join(METHODS)}, but got '{self.method}'")
        if not 0 <= self.p <= 1:
            raise OptionError(f"readout_p must be between 0 and 1 (a share of the tokens), but got {self.p}")
        if not 0 <= self.backtrack_ratio <= 1:
            raise OptionError(
                f"backtrack_ratio must be between 0 and 1 (a share of the layers), but got {self.backtrack_ratio}"
            )
        if self.max_backtrack_layers and self.backtrack_ratio and not self.reference_compat:
            raise OptionError(
                f"backtrack_layers {self.max_backtrack_layers} and backtrack_ratio {self.backtrack_ratio:g} are two ways to "
                "give one window; leave one out"
            )

    @property
    def backtrack_layers(self) -> int:
        """`max_backtrack_layers`, None resolved."""
        if self.max_backtrack_layers is not None:
            return self.max_backtrack_layers
        return 0 if self.reference_compat or self.backtrack_ratio else BACKTRACK

    @property
    def fixed(self) -> int | None:
        """Layers before the last that a fixed method names, None where entropies decide."""
        return _FIXED.get(self.method)

    def window(self, n_layers: int) -> Window:
        """The window in a path of so many layers (at least 1)."""
        return (_reference_window if self.reference_compat else _window)(self, n_layers)

    def idle(self, n_layers: int) -> bool:
        """Whether every token would be read out from the last layer."""
        window = self.window(n_layers)
        if self.p == 0 or window.candidates == 1:
            return True
        return self.fixed is None and not window.steps and _SHIFTS[self.method] <= 0

    def shifted(self, valley: int, candidates: int) -> int:
        """How far above the last layer the chosen one is, by how far the valley is; methods of entropies only."""
        return min(max(0, valley + _SHIFTS[self.method]), candidates - 1)

    def fixed_depth(self, layers: Sequence[int], n_layers: int) -> int:
        """The same of a fixed method: the last layer run that is none of the model's last k.

        Args:
            layers: Indices of the layers that run, ascending.
            n_layers: Layers of the whole model.

        Raises:
            OptionError: If that is outside the window; with `reference_compat` the window's end is taken.
        """
        assert self.fixed is not None
        candidates = self.window(len(layers)).candidates
        depth = len(layers) - sum(index < n_layers - self.fixed for index in layers)
        if self.reference_compat:
            return min(depth, candidates - 1)
        if depth >= candidates:
            raise OptionError(
                f"readout {self.method} is {depth} layers before the last of the {len(layers)} that run, but the window "
                f"lets one step back {candidates - 1}; use a larger backtrack_layers, or a readout closer to the last layer"
            )
        return depth

    def describe(self) -> str:
        """The readout in a few words."""
        words = [self.method]
        if self.fixed is None:
            back = self.backtrack_layers
            if back < 0:
                words.append("any layer")
            elif back:
                words.append(f"up to {back} layer{'s' if back > 1 else ''} back")
            else:
                words.append(f"up to {self.backtrack_ratio:g} of the layers back")
        if self.p < 1:
            words.append(f"p {self.p:g}")
        if self.reference_compat:
            words.append("windows of the reference")
        return f"confident readout ({', '.join(words)})"

    def as_json(self) -> dict[str, Any]:
        """What a mask file says of it; the reverse is `parse`."""
        return {**asdict(self), "max_backtrack_layers": self.backtrack_layers}

    @classmethod
    def parse(cls, data: Any) -> ConfidentConfig:
        """From what `as_json` gave.

        Raises:
            OptionError: If it is something else.
        """
        kinds: dict[str, Any] = {
            "method": str,
            "p": (int, float),
            "max_backtrack_layers": int,
            "backtrack_ratio": (int, float),
        }
        if not isinstance(data, dict) or set(data) != {*kinds, "reference_compat"}:
            raise OptionError(f"expected method, p, window and reference_compat of a readout, but got {data!r:.200}")
        for name, kind in kinds.items():
            if not isinstance(data[name], kind) or isinstance(data[name], bool):
                raise OptionError(f"'{name}' of a readout is {data[name]!r:.100}")
        if not isinstance(data["reference_compat"], bool):
            raise OptionError(f"'reference_compat' of a readout is {data['reference_compat']!r:.100}")
        return cls(**data)


def descend(entropy_at: EntropyAt, rows: Sequence[int], steps: int | Sequence[int]) -> tuple[list[int], list[float]]:
    """The valley closest to the top, for several rows at once; an entropy is asked for only where it decides something.

    A row moves one layer up while its entropy strictly decreases, at most `steps` times. The first time it does not (a tie
    and NaN included), it has found its valley.

    Args:
        entropy_at: (depth, rows) -> entropies of these rows so many layers before the last.
        rows: Names of the rows.
        steps: Most moves, of all rows or of each.

    Returns:
        The valley's depth of each row, and the least difference between two entropies that were compared on its way
        (infinity where none were): below what rounding can do, the valley might as well be another.
    """
    valley = dict.fromkeys(rows, 0)
    margin = dict.fromkeys(rows, math.inf)
    most = dict(zip(rows, [steps] * len(rows) if isinstance(steps, int) else steps, strict=True))
    moving = [row for row in rows if most[row] > 0]
    before = dict(zip(moving, entropy_at(0, moving), strict=True)) if moving else {}
    depth = 0
    while moving:
        depth += 1
        found = dict(zip(moving, entropy_at(depth, moving), strict=True))
        for row in moving:
            margin[row] = min(margin[row], abs(before[row] - found[row]))
        moving = [row for row in moving if found[row] < before[row]]
        valley |= dict.fromkeys(moving, depth)
        before = found
        moving = [row for row in moving if most[row] > depth]
    return list(valley.values()), list(margin.values())


def select(entropies: Sequence[float], steps: int) -> int:
    """Index of the valley closest to the end.

    Args:
        entropies: Of the candidates, from the shallowest to the last layer; at least one.
        steps: Most moves; below 0 any number.
    """
    last = len(entropies) - 1
    most = last if steps < 0 else min(steps, last)
    (depth,), _ = descend(lambda depth, _: [entropies[last - depth]], [0], most)
    return last - depth


class Coins:
    """Which tokens are read out confidently where `p` is below 1: one draw a position, in a stream of its own.

    The draw depends on the seed and the position alone. However often a position is run, and by whatever strategy, it is
    read out the same way, so that speculative decoding has the very target of plain decoding.
    """

    def __init__(self, seed: int, p: float) -> None:
        self._seed = seed
        self._p = p

    def __getitem__(self, position: int) -> bool:
        """Whether the row at this position is chosen by the method (else it is the last layer's)."""
        if self._p >= 1:
            return True
        return self._p > 0 and random.Random(f"{self._seed}:readout:{position}").random() < self._p


def _window(config: ConfidentConfig, n_layers: int) -> Window:
    back = config.backtrack_layers
    if not back:
        # What a product of floats adds to a whole number must not become a layer.
        back = math.ceil(n_layers * config.backtrack_ratio - 1e-9)
    steps = n_layers - 1 if back < 0 else min(back, n_layers - 1)
    return Window(steps + 1, steps)


def _reference_window(config: ConfidentConfig, n_layers: int) -> Window:
    back, ratio = config.backtrack_layers, config.backtrack_ratio
    if back > 0:
        candidates = min(n_layers, back)
    else:
        candidates = max(1, math.ceil(n_layers * ratio)) if ratio else n_layers
    most = back if back > 0 else candidates if back < 0 else int(candidates * ratio)
    return Window(candidates, min(most, candidates - 1))
