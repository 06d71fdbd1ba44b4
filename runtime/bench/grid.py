"""From what was asked for to the methods that are measured: strategies x modes x masks x gammas, peers and baselines."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from viasd.errors import OptionError
from viasd.mask import LayerMask
from viasd.pair import Pair
from viasd.runtime.api import make_config
from viasd.runtime.assembly import alpha_of, headed
from viasd.runtime.bench.config import BenchConfig
from viasd.runtime.bench.methods import BASELINE, OWN, Method, MethodSpec, OwnMethod
from viasd.runtime.bench.peers import Peer
from viasd.runtime.config import thresholds_of
from viasd.runtime.names import EXITING, LOSSY, MASKED, MODELESS, UNDRAFTED
from viasd.runtime.session import Session
from viasd.shipped import resolve_heads, resolve_mask

EVEN = "even:0.45"
STRICT_GAMMAS = (2, 5, 8)
LOSSY_ALPHAS = (0.1, 0.3, 0.5)


@dataclass
class Grid:
    """The methods of a benchmark, the masks they use, and what is to be said about the choice.

    Attributes:
        methods: By name; plain decoding first.
        masks: By name.
        notes: Sentences about what was left out or added.
    """

    methods: dict[str, Method] = field(default_factory=dict)
    masks: dict[str, LayerMask] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def own(self) -> list[OwnMethod]:
        """Our own methods among them, baselines too."""
        return [m for m in self.methods.values() if isinstance(m, OwnMethod)]


def make_grid(pair: Pair, config: BenchConfig) -> Grid:
    """Every combination that can run on this pair; each that can't is a note.

    Raises:
        MaskError: If a mask can't be read or belongs to another target.
    """
    grid = Grid()
    maker = _Maker(pair, config, grid)
    if "plain" not in config.strategies:
        grid.notes.append("plain decoding is measured too: it is the yardstick")
    maker.resolve_masks()
    for strategy in ("plain", *(s for s in config.strategies if s != "plain")):
        maker.add_strategy(strategy)
    for kind in config.peers:
        maker.add_peer(kind)
    if config.baselines:
        maker.add_baselines()
    return grid


class _Maker:
    def __init__(self, pair: Pair, config: BenchConfig, grid: Grid) -> None:
        self._pair = pair
        self._config = config
        self._grid = grid
        self._stand_in = False
        self._heads = None if config.heads is None else resolve_heads(config.heads, pair.name)

    def resolve_masks(self) -> None:
        """Reads the masks, or puts an evenly spaced one in the place of a missing one."""
        pair, specs = self._pair, self._config.masks
        wanted = [s for s in self._config.strategies if s in MASKED and s != "auto"]
        if not wanted and "auto" not in self._config.strategies:
            if specs:
                self._grid.notes.append("no strategy uses a mask, so the masks are left out")
            return
        masks = [resolve_mask(spec, pair.target.n_layers, pair.name) for spec in specs or ("auto",)]
        if masks == [None] and specs != ("none",) and wanted:
            self._stand_in = True
            self._grid.notes.append(
                f"no mask is shipped for {pair.name}: strategy {wanted[0]} uses {EVEN}, evenly spaced; viasd-search finds a "
                "better one"
            )
            masks = [LayerMask.even(pair.target.n_layers, float(EVEN.removeprefix("even:")))]
        for mask in masks:
            if mask is None:
                continue
            mask = headed(mask, self._heads, pair) or mask
            if (warning := mask.check(pair.target, pair.target_id)) is not None:
                self._grid.notes.append(warning)
            if mask.name in self._grid.masks:
                mask = replace(mask, name=f"{mask.name}:{mask.digest[:6]}")
            self._grid.masks[mask.name] = mask

    def add_strategy(self, strategy: str) -> None:
        config = self._config
        if strategy in MODELESS and config.modes != ("lossless",):
            self._grid.notes.append(f"strategy {strategy} has a law of its own, so the modes mean nothing to it")
        modes = (None,) if strategy in (*MODELESS, "plain") else config.modes
        gammas = (None,) if strategy in UNDRAFTED else config.gammas
        for mode, mask, gamma in product(modes, self._masks_of(strategy), gammas):
            options: dict[str, Any] = {"strategy": strategy, **_mode_options(mode)}
            if strategy == "cascade":
                options["tiers"] = "3"  # what was asked for is measured, whether it pays or not
            if gamma is not None:
                options["gamma"] = gamma
            if config.alpha is not None and (mode == "bounded" or strategy in LOSSY):
                options["alpha"] = config.alpha
            parts = [strategy]
            if mode not in (None, "lossless"):
                parts.append(mode)
            if mask is not None and len(self._grid.masks) > 1:
                parts.append(mask.name)
            if gamma is not None and len(config.gammas) > 1:
                parts.append(f"gamma{gamma}")
            self._add("/".join(parts), OWN, options, mask)
            if strategy in EXITING:
                self._add("/".join([*parts, "fixed"]), OWN, {**options, "exit_rule": "fixed"}, mask)
        if strategy in EXITING and config.unverified:
            untested = {"strategy": strategy, "verify": "off"}
            self._add(f"{strategy}/unverified", OWN, untested, None)
            self._add(f"{strategy}/fixed/unverified", OWN, {**untested, "exit_rule": "fixed"}, None)

    def _masks_of(self, strategy: str) -> Sequence[LayerMask | None]:
        """The masks a strategy runs with. `auto` does here what it would do elsewhere, so it gets no stand-in."""
        if strategy not in MASKED or (strategy == "auto" and self._stand_in):
            return [None]
        return list(self._grid.masks.values()) or [None]

    def add_peer(self, kind: str) -> None:
        gammas = (self._config.gammas[0],) if kind == "generate" else self._config.gammas
        for gamma in gammas:
            name = f"{kind}/gamma{gamma}" if len(gammas) > 1 else kind
            try:
                self._grid.methods[name] = Peer(self._pair, name, kind, self._config, gamma)
            except OptionError as error:
                self._grid.notes.append(f"left out: peer {name} ({error})")

    def add_baselines(self) -> None:
        """What a lossy method has to beat, matched to it."""
        lossy = [m for m in self._grid.own if not m.spec.lossless]
        if not lossy:
            self._grid.notes.append(
                "baselines are matched to lossy methods, and there is none; add --modes bounded or --modes via"
            )
            return
        config = self._config
        for gamma in STRICT_GAMMAS:
            strict = {"strategy": "sd", "mode": "lossless", "draft_length": "fixed", "gamma": gamma}
            self._add(f"sd/gamma{gamma}", BASELINE, strict, None)
        for alpha in LOSSY_ALPHAS:
            options = {"strategy": "lossy", "alpha": alpha, "gamma": config.gammas[0]}
            self._add(f"lossy/alpha{alpha:g}", BASELINE, options, None)
        for name, mask in self._grid.masks.items():
            self._add("slim" if len(self._grid.masks) == 1 else f"slim/{name}", BASELINE, {"strategy": "slim"}, mask)
        for method in lossy:
            if method.mask is not None:
                mask = random_mask(method.mask, config.seed)
                self._grid.masks.setdefault(mask.name, mask)
                self._add(f"{method.spec.name}/random-mask", BASELINE, dict(method.spec.options["decoding"]), mask)
        if config.temperature == 0:
            self._grid.notes.append(
                "sampling from q truncated at the same theta is plain greedy decoding at temperature 0, so that baseline is "
                "left out"
            )
            return
        for theta in sorted({theta for m in lossy if (theta := _theta(m)) is not None}):
            options = {"strategy": "sd", "mode": "lossless", "gamma": config.gammas[0], "min_p": theta}
            self._add(f"sd/min-p{theta:g}", BASELINE, options, None)

    def _add(self, name: str, kind: str, decoding: dict[str, Any], mask: LayerMask | None) -> None:
        """Adds a method, unless the pair can't run it or it is there already."""
        config = self._config
        same = (m for m in self._grid.own if m.spec.options["decoding"] == decoding and m.mask is mask)
        if name in self._grid.methods or any(same):
            return
        try:
            request = make_config(
                {
                    **decoding,
                    "max_new_tokens": config.max_new_tokens,
                    "temperature": config.temperature,
                    "seed": config.seed,
                    "ignore_eos": config.ignore_eos,
                }
            )
            # Putting a session together tells whether this pair, mask and drafter can do what is asked.
            heads = self._heads if decoding.get("strategy") in EXITING or (mask is not None and mask.prefix) else None
            plan = Session(self._pair, [1], request, mask=mask, heads=heads).plan
        except OptionError as error:
            self._grid.notes.append(f"left out: {name} ({error})")
            return
        # Truncated sampling is exact for the truncated law, but that is not q.
        lossless = plan.lossless and "min_p" not in decoding
        options = {"decoding": decoding, "mask": None if mask is None else [mask.name, mask.digest]}
        if heads is not None:
            options["heads"] = [heads.name, heads.digest]
        self._grid.methods[name] = OwnMethod(
            self._pair, MethodSpec(name, kind, lossless, options), request, mask, heads
        )


def _mode_options(mode: str | None) -> dict[str, Any]:
    if mode is None:
        return {}
    return {"mode": "via", "gate": "ratio"} if mode == "via-ratio" else {"mode": mode}


def random_mask(like: LayerMask, seed: int) -> LayerMask:
    """A mask that keeps as many whole layers, chosen at random; first and last are kept as always."""
    n, kept = len(like.keep), round((1 - like.route.skip_ratio) * len(like.keep))
    inner = random.Random(f"{seed}:{n}:{kept}").sample(range(1, n - 1), max(0, kept - 2))
    keep = tuple(i in (0, n - 1) or i in inner for i in range(n))
    return LayerMask(keep, name=f"random:{kept}of{n}:seed{seed}")


def _theta(method: OwnMethod) -> float | None:
    """The share of the best token's probability down to which a lossy method keeps tokens, None where it is not that."""
    decoding = method.config.decoding
    if decoding.mode == "via":
        return thresholds_of(decoding).accept
    return 1 - alpha_of(decoding) if decoding.mode == "bounded" else None
