"""What one benchmark measures, checked before anything is loaded. Nothing here imports torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from viasd.errors import OptionError
from viasd.runtime.names import EXITING, LOSSY, STRATEGIES
from viasd.runtime.names import MODES as RUN_MODES

PEERS = ("generate", "assisted", "lookup")
#: ``via-ratio`` is via mode with fixed thresholds, without its guard.
MODES = (*RUN_MODES, "via-ratio")

MAX_NEW_TOKENS = 64
REPEATS = 3
GAMMA = 5
_COLDEST = 1e-6  # as `viasd.sampling.SamplingConfig`, which needs torch


@dataclass(frozen=True)
class BenchConfig:
    """One benchmark.

    Attributes:
        strategies: Our own methods; plain decoding is always among them, as the yardstick.
        peers: Transformers' own: greedy or sampled ``generate``, ``assisted`` generation, prompt ``lookup``.
        modes: Modes of the strategies that take one.
        masks: Masks of the strategies that take one, as ``--mask`` of `viasd-run` takes them; empty for the pair's shipped
            mask, or an evenly spaced one.
        heads: Light heads (what ``--heads`` of `viasd-run` takes) of adadecode and of masks ``prefix:E``; None is none.
        gammas: Longest drafted blocks.
        alpha: Of bounded mode and lossy strategies; None for the default.
        max_new_tokens: Limit of every answer.
        temperature: 0 is greedy.
        seed: Of every random stream, the same for every method, prompt and repeat.
        repeats: Timed runs per prompt and method; their median counts.
        warmup: Untimed runs of every method before the first prompt.
        ignore_eos: Go on past end-of-sequence tokens.
        check: Compare outputs with plain greedy decoding, token by token.
        baselines: Add baselines matched to the lossy methods.
        unverified: Also measure adadecode with its guesses taken untested, an ablation of it.

    Raises:
        OptionError: If a name is unknown or a number out of range.
    """

    strategies: tuple[str, ...] = ("plain", "sd", "cascade")
    peers: tuple[str, ...] = PEERS
    modes: tuple[str, ...] = ("lossless",)
    masks: tuple[str, ...] = ()
    heads: str | None = None
    gammas: tuple[int, ...] = (GAMMA,)
    alpha: float | None = None
    max_new_tokens: int = MAX_NEW_TOKENS
    temperature: float = 0.0
    seed: int = 0
    repeats: int = REPEATS
    warmup: int = 1
    ignore_eos: bool = False
    check: bool = False
    baselines: bool = False
    unverified: bool = False

    def __post_init__(self) -> None:
        for name, values, allowed in (
            ("strategies", self.strategies, STRATEGIES),
            ("peers", self.peers, PEERS),
            ("modes", self.modes, MODES),
        ):
            _known(name, values, allowed)
        if not self.modes or not self.gammas:
            raise OptionError(f"{'gammas' if self.modes else 'modes'} must have at least one entry")
        for name in ("max_new_tokens", "repeats", "gammas"):
            value = getattr(self, name)
            least = min(value) if name == "gammas" else value
            if least < 1:
                raise OptionError(f"{name} must be at least 1, but got {least}")
        if self.heads is None and (needs := [s for s in self.strategies if s in EXITING]):
            raise OptionError(f"strategy {needs[0]} needs light heads; add --heads FILE (viasd-fit heads trains them)")
        if self.heads is None and (needs := [m for m in self.masks if m.startswith("prefix:")]):
            raise OptionError(f"mask {needs[0]} ends in a light head; add --heads FILE (viasd-fit heads trains them)")
        if self.unverified and not set(EXITING) & set(self.strategies):
            raise OptionError("unverified is an ablation of adadecode, which is not measured; add it to --strategies")
        if self.warmup < 0:
            raise OptionError(f"warmup must be at least 0, but got {self.warmup}")
        if self.alpha is not None and not 0 < self.alpha < 1:
            raise OptionError(f"alpha must be above 0 and below 1, but got {self.alpha:g}")
        if self.alpha is not None and "bounded" not in self.modes and not set(LOSSY) & set(self.strategies):
            raise OptionError(
                "alpha is for bounded mode and lossy strategies, and there is neither; add --modes bounded"
            )
        if not (self.temperature == 0 or _COLDEST <= self.temperature < math.inf):
            raise OptionError(f"temperature must be 0 (greedy) or at least {_COLDEST:g}, but got {self.temperature:g}")
        if self.check and self.temperature:
            raise OptionError("check needs temperature 0: a sampled answer has no single right text; leave one out")


def _known(name: str, values: Sequence[str], allowed: Sequence[str]) -> None:
    for value in values:
        if value not in allowed:
            raise OptionError(f"{name} must be of {', '.join(allowed)}, but got '{value}'")
