"""What a user can ask of one generation, checked before anything runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from viasd.errors import OptionError
from viasd.runtime.gates import THETA_ACC, THETA_ESC, Thresholds
from viasd.runtime.names import EXITING, LOSSY, MASKED, MODELESS, MODES, RULES, SLIM_TIERED, STRATEGIES
from viasd.runtime.readouts import BOTH, SLIM, check_readout
from viasd.sampling import Processor, SamplingConfig

GATES = ("guarded", "ratio")
TIERS = ("auto", "2", "3")
DRAFT_LENGTHS = ("auto", "fixed")
EXIT_RULES = ("auto", "fixed")
VERIFY = ("on", "off")

GAMMA = 5  # block length of the paper
SELF_SKIP = 0.6
EXIT_THRESHOLD = 0.75  # gamma and M of AdaDecode's paper
MAX_PENDING = 5


@dataclass(frozen=True)
class DecodingConfig:
    """How to decode.

    Attributes:
        strategy: ``plain``, ``sd`` (two tiers), ``cascade`` (three), or ``auto``: cascade where there is a mask, else sd.
            Also those of the literature (`viasd.runtime.names.BASELINES`).
        mode: ``lossless`` (the output's law is exactly q), ``bounded`` (total variation to q at most `alpha` per token)
            or ``via`` (dual thresholds; cascade only). None: via for a cascade, the strategy's own law where it has one,
            else lossless.
        tiers: ``auto`` lets measured times and acceptance decide whether a cascade keeps its slim tier; ``3`` forces it,
            ``2`` leaves it out.
        gate: ``guarded`` or ``ratio`` (`via` only).
        thresholds: Dual thresholds (`via` only).
        gamma: Longest drafted block.
        draft_length: Of two tiers: ``auto`` drafts as many tokens (at most gamma) as pay by measured times and by what was
            kept so far; ``fixed`` always drafts gamma. None is auto.
        alpha: Bound of `bounded` mode and of strategy ``lossy``, in ``(0, 1)``; parameter of a deferral rule, in ``[0, 1)``.
        max_disagreement: Budget of the guard (`via`, guarded).
        audit: Share of blocks that skipped the full verifier and are checked by it (`via` only).
        recheck: Where the full verifier runs, let it test the gated tokens before the escalated one too (`via` only).
        slim_rounds: Blocks judged by the slim verifier before the full one is called (cascade, lossless and bounded).
        draft_min_prob: The drafter stops before drawing where it is less sure than this.
        self_skip: Share of layers that the ``self`` drafter skips.
        exit_rule: Of strategy adadecode: ``fixed`` exits where a head's largest probability is above `exit_threshold`;
            ``auto`` where a guess is expected to pay, by what became of earlier ones. None is fixed where there is a
            threshold, else auto.
        exit_threshold: At least 0; from 1 on nothing exits. None is `EXIT_THRESHOLD`.
        max_pending: Most guesses that wait for the full verifier (adadecode), at least 0. None is `MAX_PENDING`.
        verify: ``off`` takes every guess untested (adadecode; an ablation, **lossy**). None is on.
        readout: Which of the last layers a row is read out from (`viasd.confident`): ``trough`` and its kin. In the full
            verifier that is another target. ``final``: the last one, in the slim verifier of a mask that was scored with
            another readout. None is the last layer, and in the slim verifier what the mask was scored with.
        readout_p: See `viasd.confident.ConfidentConfig`, with the next two and `readout_compat`.
        backtrack_layers: Its `max_backtrack_layers`.
        backtrack_ratio: Likewise.
        readout_compat: Its `reference_compat`.
        readout_tier: ``full``, ``slim`` or ``both``; None is full.
        readout_unscored: Let the slim verifier read out otherwise than the search did that found the mask.
        readout_log: Log what was chosen, every so many passes.

    Raises:
        OptionError: If a value is out of range or contradicts another.
    """

    strategy: str = "auto"
    mode: str | None = None
    tiers: str = "auto"
    gate: str | None = None
    thresholds: Thresholds | None = None
    gamma: int = GAMMA
    draft_length: str | None = None
    alpha: float | None = None
    max_disagreement: float | None = None
    audit: float | None = None
    recheck: bool | None = None
    slim_rounds: int | None = None
    draft_min_prob: float = 0.0
    self_skip: float = SELF_SKIP
    exit_rule: str | None = None
    exit_threshold: float | None = None
    max_pending: int | None = None
    verify: str | None = None
    readout: str | None = None
    readout_p: float | None = None
    backtrack_layers: int | None = None
    backtrack_ratio: float | None = None
    readout_compat: bool | None = None
    readout_tier: str | None = None
    readout_unscored: bool | None = None
    readout_log: int | None = None

    def __post_init__(self) -> None:
        _one_of("strategy", self.strategy, STRATEGIES)
        _one_of("tiers", self.tiers, TIERS)
        if self.draft_length is not None:
            _one_of("draft_length", self.draft_length, DRAFT_LENGTHS)
        if self.mode is not None:
            _one_of("mode", self.mode, MODES)
        if self.gate is not None:
            _one_of("gate", self.gate, GATES)
        if self.gamma < 1:
            raise OptionError(f"gamma must be at least 1, but got {self.gamma}")
        if self.slim_rounds is not None and self.slim_rounds < 1:
            raise OptionError(f"slim_rounds must be at least 1, but got {self.slim_rounds}")
        _share("draft_min_prob", self.draft_min_prob, below_one=False)
        _share("self_skip", self.self_skip)
        if self.audit is not None:
            _share("audit", self.audit, below_one=False)
        if self.max_disagreement is not None:
            _share("max_disagreement", self.max_disagreement)
        if self.alpha is not None and self.strategy in RULES:
            _share("alpha", self.alpha)
        elif self.alpha is not None and not 0 < self.alpha < 1:
            raise OptionError(f"alpha must be above 0 and below 1, but got {self.alpha:g}; alpha 0 is --mode lossless")
        if self.exit_rule is not None:
            _one_of("exit_rule", self.exit_rule, EXIT_RULES)
        if self.verify is not None:
            _one_of("verify", self.verify, VERIFY)
        if self.exit_threshold is not None and not 0 <= self.exit_threshold < math.inf:
            raise OptionError(f"exit_threshold must be at least 0, but got {self.exit_threshold}")
        if self.max_pending is not None and self.max_pending < 0:
            raise OptionError(f"max_pending must be at least 0, but got {self.max_pending}")
        check_readout(self)
        self._check_contradictions()

    @property
    def unmasked(self) -> bool:
        """Whether it has no use for a mask, whichever there is."""
        return self.strategy not in MASKED or (self.tiers == "2" and self.strategy in ("auto", "cascade"))

    def _check_contradictions(self) -> None:
        three_tiers = self.strategy in ("auto", "cascade")
        if self.mode is not None and self.strategy in MODELESS:
            raise OptionError(f"strategy {self.strategy} has a law of its own; leave out --mode {self.mode}")
        if self.mode == "via" and not three_tiers:
            raise OptionError(f"mode via needs three tiers, but strategy is {self.strategy}; use --strategy cascade")
        if self.mode == "bounded" and self.strategy == "plain":
            raise OptionError("plain decoding is always lossless; leave out --mode bounded")
        if self.tiers == "3" and not three_tiers:
            raise OptionError(f"three tiers contradict strategy {self.strategy}; use --strategy cascade")
        if self.tiers == "2" and self.strategy in ("plain", "slim", *EXITING):
            raise OptionError(f"two tiers contradict strategy {self.strategy}; use --strategy sd")
        if self.tiers == "2" and self.mode == "via":
            raise OptionError("mode via needs the slim tier; leave out --tiers 2")
        if self.alpha is not None and self.mode != "bounded" and self.strategy not in LOSSY:
            raise OptionError("alpha only means something in bounded mode; add --mode bounded")
        via = self.mode == "via" or (self.mode is None and three_tiers and self.tiers != "2")
        if not via and (idle := _given(self, _VIA_ONLY)):
            raise OptionError(f"{idle} only means something in via mode; add --strategy cascade --mode via")
        if self.gate == "ratio" and self.max_disagreement is not None:
            raise OptionError("max_disagreement is the guard's budget, but --gate ratio switches the guard off")
        if self.draft_length is not None and self.strategy not in ("auto", "cascade", "sd"):
            raise OptionError(f"draft_length is about two tiers (sd), but strategy is {self.strategy}; leave it out")
        if self.strategy not in EXITING and (idle := _given(self, _EXITS_ONLY)):
            raise OptionError(f"{idle} only means something with early exits; add --strategy adadecode")
        if self.exit_rule == "auto" and self.exit_threshold is not None:
            raise OptionError("exit_threshold is the rule of fixed exits, but exit_rule is auto; leave one out")
        if self.verify == "off" and self.mode is not None:
            raise OptionError(f"verify off promises nothing, so it contradicts mode {self.mode}; leave one out")
        if self.slim_rounds is not None and (not three_tiers or self.tiers == "2" or via):
            raise OptionError("slim_rounds only means something for a cascade in lossless or bounded mode")


@dataclass(frozen=True)
class Plan:
    """A `DecodingConfig` with every choice made.

    Attributes:
        strategy: Any of `viasd.runtime.names.STRATEGIES` but ``auto``.
        mode: ``lossless``, ``bounded``, ``via``, or ``unbounded``: a law of the strategy's own, at no stated distance to q.
        reason: Why, in words, where the user left it open; empty otherwise.
    """

    strategy: str
    mode: str
    reason: str = ""

    @property
    def lossless(self) -> bool:
        """Whether the output's law is exactly q."""
        return self.mode == "lossless"


def plan(config: DecodingConfig, *, has_mask: bool) -> Plan:
    """Settles strategy and mode, before `--tiers auto` may still drop the slim tier.

    Raises:
        OptionError: If a cascade was asked for and there is no mask.
    """
    strategy, mode, reason = config.strategy, config.mode, ""
    if strategy == "auto":
        wants_slim = has_mask and config.tiers != "2"
        if not wants_slim and (mode == "via" or config.tiers == "3"):
            raise OptionError(_NO_MASK)
        strategy = "cascade" if wants_slim else "sd"
        if not has_mask:
            reason = (
                "no mask is used for this target, so there is no slim verifier: decoding with two tiers, "
                f"{mode or 'lossless'} (viasd-search finds masks; --mask even:0.45 makes an evenly spaced one)"
            )
    if strategy in MASKED and not has_mask:
        raise OptionError(_NO_MASK)
    if strategy == "cascade" and config.tiers == "2":
        strategy = "sd"
    if mode is None:
        mode = "unbounded" if config.verify == "off" else _own_mode(strategy)
    if mode != "via" and (idle := _given(config, _VIA_ONLY)):
        raise OptionError(f"{idle} needs the slim verifier of via mode, but this is {strategy}, {mode}; {_MAKE_MASK}")
    if strategy not in SLIM_TIERED and config.readout_tier in (SLIM, BOTH):
        raise OptionError(
            f"readout_tier {config.readout_tier} needs a slim verifier, but this is {strategy}; {_MAKE_MASK}"
        )
    if strategy != "cascade" and config.slim_rounds is not None:
        raise OptionError(f"slim_rounds needs a slim verifier, but this is {strategy}; {_MAKE_MASK}")
    return Plan(strategy, mode, reason)


def _own_mode(strategy: str) -> str:
    """The mode of a strategy that was given none."""
    if strategy in ("cascade", "lossy"):
        return "via" if strategy == "cascade" else "bounded"
    return "unbounded" if strategy in MODELESS else "lossless"


_VIA_ONLY = ("gate", "thresholds", "max_disagreement", "audit", "recheck")
_EXITS_ONLY = ("exit_rule", "exit_threshold", "max_pending", "verify")
_MAKE_MASK = "add --mask even:0.45 or --mask FILE"
_NO_MASK = f"a slim verifier needs a mask and none was given or found; {_MAKE_MASK}"


def _given(config: DecodingConfig, names: Sequence[str]) -> str | None:
    """The first of these options that was set."""
    return next((name for name in names if getattr(config, name) is not None), None)


@dataclass(frozen=True)
class GenerationConfig:
    """One request: how to choose tokens, when to stop, how to decode.

    Attributes:
        max_new_tokens: Limit of the answer, at least 1.
        sampling: Temperature and filters.
        decoding: Strategy, mode and their parameters.
        seed: Seed of every random stream; None draws one (it is reported).
        stop: Strings that end the answer; not part of its text.
        ignore_eos: Go on past the end-of-sequence tokens.
        processors: The user's logits processors.
    """

    max_new_tokens: int = 256
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    decoding: DecodingConfig = field(default_factory=DecodingConfig)
    seed: int | None = None
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    processors: Sequence[Processor] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise OptionError(f"max_new_tokens must be at least 1, but got {self.max_new_tokens}")


def thresholds_of(config: DecodingConfig) -> Thresholds:
    """The thresholds asked for, or the paper's."""
    return config.thresholds or Thresholds(THETA_ACC, THETA_ESC)


def _one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise OptionError(f"{name} must be one of {', '.join(allowed)}, but got '{value}'")


def _share(name: str, value: float, *, below_one: bool = True) -> None:
    good = 0 <= value < 1 if below_one else 0 <= value <= 1
    if not good:
        raise OptionError(f"{name} must be at least 0 and {'below' if below_one else 'at most'} 1, but got {value:g}")
