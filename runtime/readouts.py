"""Which tiers read out confidently (`viasd.confident`): what options mean, where they make sense, what a mask says."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from viasd.confident import METHODS, ConfidentConfig
from viasd.errors import MaskError, OptionError
from viasd.runtime.names import EXITING, SLIM_TIERED

if TYPE_CHECKING:
    from viasd.mask import LayerMask
    from viasd.pair import Pair
    from viasd.routes import Route
    from viasd.runtime.config import DecodingConfig, Plan
    from viasd.selecting import Chosen, ConfidentReadout

FULL, SLIM, BOTH = "full", "slim", "both"
READOUT_TIERS = (FULL, SLIM, BOTH)
#: The last layer, in the slim tier, where a mask says something else.
FINAL = "final"
READOUTS = (FINAL, *METHODS)
#: What the target is where nothing else is said.
OWN_TARGET = "the model's own readout"

LOG = logging.getLogger("viasd.readout")
_ONLY = (
    *("readout_p", "backtrack_layers", "backtrack_ratio", "readout_tier", "readout_compat", "readout_unscored"),
    "readout_log",
)
_RECORD = "readout"  # entry of a mask file


@dataclass(frozen=True)
class Readouts:
    """The readout of each tier, None for the last layer's.

    Attributes:
        full: Of the full verifier: another target than the model's own.
        slim: Of the slim verifier: another proposal.
    """

    full: ConfidentConfig | None = None
    slim: ConfidentConfig | None = None

    @property
    def target(self) -> str:
        """What losslessness is about."""
        return OWN_TARGET if self.full is None else self.full.describe()

    @property
    def key(self) -> list[Any]:
        """Both, as JSON can say them; empty where there is none."""
        if self.full is None and self.slim is None:
            return []
        return [None if config is None else config.as_json() for config in (self.full, self.slim)]

    def bind(
        self, pair: Pair, route: Route | None, seed: int
    ) -> tuple[ConfidentReadout | None, ConfidentReadout | None]:
        """Both at work on a pair's target.

        Args:
            pair: The pair.
            route: Of the slim verifier, None without one.
            seed: Of the request.

        Raises:
            OptionError: If a fixed layer lies outside the window.
        """
        from viasd.selecting import ConfidentReadout  # needs torch, and this module's names do not

        model = pair.target
        full = None if self.full is None else ConfidentReadout(model, self.full, range(model.n_layers), seed)
        if self.slim is None or route is None:
            return full, None
        return full, ConfidentReadout(model, self.slim, route.layers, seed, route.stitches)


def check_readout(config: DecodingConfig) -> None:
    """Whether the options of a readout make sense together.

    Raises:
        OptionError: If a value is out of range, nothing would use it, or it contradicts the strategy.
    """
    if config.readout is None:
        if idle := next((name for name in _ONLY if getattr(config, name) is not None), None):
            raise OptionError(f"{idle} only means something with a confident readout; add --readout trough")
        return
    if config.readout not in READOUTS:
        raise OptionError(f"readout must be one of {', '.join(READOUTS)}, but got '{config.readout}'")
    tier = config.readout_tier or FULL
    if tier not in READOUT_TIERS:
        raise OptionError(f"readout_tier must be one of {', '.join(READOUT_TIERS)}, but got '{tier}'")
    if config.readout == FINAL:
        given = [name for name in _ONLY if name != "readout_tier" and name != "readout_unscored"]
        if idle := next((name for name in given if getattr(config, name) is not None), None):
            raise OptionError(f"{idle} means nothing to the last layer's readout; leave it out")
        if tier != SLIM:
            raise OptionError(
                "the full verifier reads out its last layer unless something else is asked for; --readout final is for "
                "--readout-tier slim, with a mask that was scored with another readout"
            )
    confident_of(config)
    if config.readout_log is not None and config.readout_log < 1:
        raise OptionError(f"readout_log must be at least 1 (passes), but got {config.readout_log}")
    if config.strategy in EXITING:
        raise OptionError(
            f"strategy {config.strategy} lets tokens wait inside the target, whose last layers they then pass without being "
            "read out; a confident readout is for the other strategies"
        )
    if tier != SLIM and config.strategy == "slim":
        raise OptionError("strategy slim never asks the full verifier; use --readout-tier slim")
    if tier != FULL and (config.strategy not in SLIM_TIERED or config.tiers == "2"):
        raise OptionError(
            f"readout_tier {tier} needs a slim verifier, which strategy {config.strategy} with {_tiers(config)} does not "
            "have; use --strategy cascade, or --readout-tier full"
        )
    if config.readout_unscored is not None and tier == FULL:
        raise OptionError("readout_unscored is about masks, which the full verifier does not use; leave it out")


def _tiers(config: DecodingConfig) -> str:
    return "two tiers" if config.tiers == "2" else "its tiers"


def confident_of(config: DecodingConfig) -> ConfidentConfig | None:
    """The confident readout that the options describe, None for the last layer's.

    Raises:
        OptionError: If a value is out of range.
    """
    if config.readout in (None, FINAL):
        return None
    return ConfidentConfig(
        config.readout,
        1.0 if config.readout_p is None else config.readout_p,
        config.backtrack_layers,
        config.backtrack_ratio or 0.0,
        bool(config.readout_compat),
    )


def scored_with(mask: LayerMask) -> ConfidentConfig | None:
    """The readout that a search scored a mask with, None for the last layer's.

    Raises:
        MaskError: If the mask's file says something else there.
    """
    said = mask.details.get(_RECORD)
    if said is None:
        return None
    try:
        return ConfidentConfig.parse(said)
    except OptionError as error:
        raise MaskError(f"mask '{mask.name}': 'readout' is malformed ({error}); search the mask anew") from error


def recorded(readout: ConfidentConfig | None) -> dict[str, Any]:
    """What a mask file says of the readout it was scored with."""
    return {} if readout is None else {_RECORD: readout.as_json()}


def settle_readouts(config: DecodingConfig, plan: Plan, mask: LayerMask | None) -> Readouts:
    """The readout of each tier of a settled plan.

    The slim tier reads out as the search did that found the mask, unless something else is asked for.

    Raises:
        OptionError: If the plan has no slim tier to read out, or it ends in a light head.
        MaskError: If the mask was scored with another readout than is asked for.
    """
    wanted, tier = confident_of(config), (config.readout_tier or FULL) if config.readout else None
    full = wanted if tier in (FULL, BOTH) else None
    if mask is None or plan.strategy not in ("cascade", "slim"):
        return Readouts(full)
    known = scored_with(mask)
    if tier not in (SLIM, BOTH):
        return Readouts(full, known)
    if mask.prefix is not None and wanted is not None:
        raise OptionError(
            f"mask '{mask.name}' ends in a light head, which is its readout; use --readout-tier full, or another mask"
        )
    # A mask made on the spot was never scored.
    if mask.target is not None and known != wanted and not config.readout_unscored:
        was, asked = (OWN_TARGET if r is None else r.describe() for r in (known, wanted))
        raise MaskError(
            f"mask '{mask.name}' was scored with {was}, but its slim verifier is to use {asked}; search one with that "
            "(viasd-search --readout), leave out --readout-tier, or add --readout-unscored"
        )
    return Readouts(full, wanted)


def describe_readouts(readouts: Readouts, layers: int, slim_layers: int | None) -> list[str]:
    """Sentences that a person should know.

    Args:
        readouts: Of a plan.
        layers: Layers of the target.
        slim_layers: Layers that the slim verifier runs, None without one.
    """
    said = []
    if readouts.full is not None:
        said.append(f"target: {readouts.full.describe()}, not the model's own readout")
    if readouts.slim is not None:
        said.append(f"slim verifier: {readouts.slim.describe()}; only a proposal")
    for config, n in ((readouts.full, layers), (readouts.slim, slim_layers)):
        if config is not None and n is not None and config.idle(n):
            said.append(f"{config.describe()} moves nothing: its window, or p, is 0")
    return said


@dataclass
class ReadoutLog:
    """One line every so many passes that were read out confidently, through `LOG`, about the passes since the last line.

    Attributes:
        every: Passes from line to line.
        tier: Whose.
        name: Of the request, where there are several: every line begins with it.
    """

    every: int
    tier: str
    name: str | None = None
    _steps: int = 0
    _layers: list[int] = field(default_factory=list)
    _depths: list[int] = field(default_factory=list)

    def add(self, readout: ConfidentReadout, chosen: Chosen) -> None:
        """A pass was read out."""
        self._steps += 1
        self._layers += chosen.layers
        self._depths += chosen.depths
        if self._steps % self.every:
            return
        layers, depths, n = self._layers, self._depths, len(self._depths)
        LOG.info(
            "%sreadout of the %s verifier: step %d, %d tokens, %d candidate layers, %s, p %g, layer %.2f on average and %d "
            "at the shallowest, %.3f layers back on average and %d at most, %d of %d tokens kept at the last layer",
            "" if self.name is None else f"{self.name}: ",
            self.tier,
            self._steps,
            n,
            readout.window.candidates,
            readout.config.method,
            readout.config.p,
            math.fsum(layers) / n,
            min(layers),
            math.fsum(depths) / n,
            max(depths),
            depths.count(0),
            n,
        )
        self._layers, self._depths = [], []
