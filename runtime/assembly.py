"""From a settled plan to the drafter and the strategy that carry it out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypedDict

from viasd.deferral import READS_DRAFTER, DeferralRule
from viasd.errors import MaskError, OptionError
from viasd.heads import ExitHead, LightHeads
from viasd.mask import LayerMask
from viasd.pair import Pair
from viasd.runtime.config import EXIT_THRESHOLD, MAX_PENDING, DecodingConfig, Plan
from viasd.runtime.costs import cost_table
from viasd.runtime.drafters import (
    Drafter,
    FeatureDrafter,
    HorizontalDrafter,
    LookupDrafter,
    LookupFirstDrafter,
    ModelDrafter,
    SelfDrafter,
    VerticalDrafter,
)
from viasd.runtime.drafters.along import short_readout_of
from viasd.runtime.exits import CalibratedExits, ExitCosts, ExitRule, FixedExits
from viasd.runtime.gates import Gate
from viasd.runtime.lengths import LOOKUP_PRIORS, DraftLength, LookupFirstPace, LookupPace, ModelPace, Pace
from viasd.runtime.names import EXITING, LOSSY, RULES, UNDRAFTED
from viasd.runtime.strategies import (
    AdaDecode,
    ChainedCascade,
    DeferringDecoding,
    GatedCascade,
    Plain,
    SlimAlone,
    SpeculativeDecoding,
    Strategy,
    Workbench,
    lossy,
    rule_law,
)
from viasd.runtime.target import TieredTarget
from viasd.runtime.wave import LayerWave

DEFAULT_AUDIT = 0.05
DEFAULT_ALPHA = 0.1


class Stops(TypedDict):
    """When a drafter stops early."""

    min_confidence: float
    stop_tokens: frozenset[int]


@dataclass(frozen=True)
class Assembly:
    """What a strategy is put together from.

    Attributes:
        pair: The pair.
        config: How to decode.
        plan: What that came to.
        mask: The mask, where there is one.
        target: The sequence's target.
        stop_tokens: After one of these nothing more is drafted.
        context: Tokens of the prompt.
        note: Receives sentences that a person should know.
        heads: The light heads, where there are any.
    """

    pair: Pair
    config: DecodingConfig
    plan: Plan
    mask: LayerMask | None
    target: TieredTarget
    stop_tokens: frozenset[int]
    context: int
    note: Callable[[str], None]
    heads: LightHeads | None = None

    def drafter(self, bench: Workbench) -> Drafter | None:
        """The plan's drafter, None where nothing is drafted.

        Raises:
            OptionError: If the plan asks for what the pair's drafter does not have.
        """
        name = self.plan.strategy
        if name in UNDRAFTED:
            return None
        kind = self.pair.drafter_kind
        if kind == "lookup" and name in (*READS_DRAFTER, "vertical", "horizontal"):
            what = (
                "reads the drafter's own probabilities"
                if name in READS_DRAFTER
                else "puts prompt lookup beside a model"
            )
            raise OptionError(
                f"strategy {name} {what}, but the drafter is prompt lookup alone; use a pair with a drafter model, or self"
            )
        if name == "self-sd":
            assert self.mask is not None  # the plan has seen to that
            return SelfDrafter(self.target, self.mask.route, **self._stops)
        own = self._own_drafter()
        if name == "vertical":
            if self.config.draft_min_prob:
                raise OptionError(
                    "draft_min_prob means nothing to a vertical cascade, which drafts in blocks; leave it out"
                )
            if not isinstance(own, ModelDrafter | SelfDrafter):
                raise OptionError(
                    f"strategy vertical needs a drafter that judges a block of lookup's in one pass (a model, or self), "
                    f"but this one is {own.name}"
                )
            return VerticalDrafter(own, bench.sampler, bench.counters, stop_tokens=self.stop_tokens)
        if name == "horizontal":
            if self.pair.lookup_first:
                raise OptionError(
                    "strategy horizontal puts lookup behind the drafter, but this drafter asks lookup first; leave one out"
                )
            lookup = LookupDrafter(bench.counters, **self._stops)
            return HorizontalDrafter(own, lookup, share=(self.config.gamma + 1) // 2)
        return own

    def strategy(self, bench: Workbench, drafter: Drafter | None, gate: Callable[[], Gate]) -> Strategy:
        """The plan's strategy; `gate` makes the gate of via mode."""
        config, name = self.config, self.plan.strategy
        if name in EXITING:
            return self._exiting(bench)
        if drafter is None:
            return SlimAlone(bench) if name == "slim" else Plain(bench)
        if name in LOSSY:
            alpha = alpha_of(config)
            law = rule_law(DeferralRule(name, alpha)) if name in RULES else lossy(alpha)
            return DeferringDecoding(bench, drafter, law, gamma=config.gamma)
        alpha = alpha_of(config) if self.plan.mode == "bounded" else 0.0
        if name != "cascade":
            pace = self._pace(bench, drafter) if name == "sd" else None
            return SpeculativeDecoding(bench, drafter, gamma=config.gamma, alpha=alpha, pace=pace)
        if self.plan.mode != "via":
            return ChainedCascade(
                bench,
                drafter,
                gamma=config.gamma,
                slim_rounds=config.slim_rounds or 1,
                alpha=alpha,
                stop_tokens=self.stop_tokens,
            )
        return GatedCascade(
            bench,
            drafter,
            gate(),
            gamma=config.gamma,
            recheck=config.recheck is not False,
            audit=DEFAULT_AUDIT if config.audit is None else config.audit,
        )

    def _exiting(self, bench: Workbench) -> Strategy:
        """AdaDecode over the heads."""
        config, heads = self.config, self.heads
        assert heads is not None  # the session has seen to that
        longest = MAX_PENDING if config.max_pending is None else config.max_pending
        bound = bound_heads(self.pair, heads)
        rule: ExitRule
        if config.exit_rule == "auto" or (config.exit_rule is None and config.exit_threshold is None):
            start = heads.details.get("calibration")
            rule = CalibratedExits(exit_costs(self.pair, heads), heads.exits, longest, start)
        else:
            rule = FixedExits(EXIT_THRESHOLD if config.exit_threshold is None else config.exit_threshold)
        return AdaDecode(
            bench,
            LayerWave(self.target, bound),
            rule,
            max_pending=longest,
            alpha=alpha_of(config) if self.plan.mode == "bounded" else 0.0,
            verify=config.verify != "off",
            stop_tokens=self.stop_tokens,
        )

    def _pace(self, bench: Workbench, drafter: Drafter) -> Pace | None:
        """How long the blocks of two tiers are: as many tokens as pay by this machine's times, or always gamma."""
        config = self.config
        if config.draft_length == "fixed":
            return None
        model = drafter.model if isinstance(drafter, LookupFirstDrafter) else drafter
        own = model.route if isinstance(model, SelfDrafter) else None
        costs = cost_table(self.pair, None, self.context, config.gamma, own)
        seconds = [costs.full_seconds(m + 1) for m in range(config.gamma + 1)]
        looking = DraftLength(config.gamma, 0.0, seconds, LOOKUP_PRIORS)
        if isinstance(drafter, LookupDrafter):
            return LookupPace(looking, drafter, bench.sampler)
        known = None if self.pair.feature is None else self.pair.feature.file.chances
        lengths = DraftLength(config.gamma, costs.drafter, seconds, {} if known is None else {0: known})
        if isinstance(model, FeatureDrafter) and not config.draft_min_prob:
            model.least = lengths.least()
        if isinstance(drafter, LookupFirstDrafter):
            return LookupFirstPace(looking, lengths, drafter, bench.sampler)
        return ModelPace(lengths)

    @property
    def _stops(self) -> Stops:
        return {"min_confidence": self.config.draft_min_prob, "stop_tokens": self.stop_tokens}

    def _own_drafter(self) -> Drafter:
        """The pair's drafter."""
        model = self._model_drafter()
        if not self.pair.lookup_first:
            return model
        return LookupFirstDrafter(LookupDrafter(self.target.counters, **self._stops), model)

    def _model_drafter(self) -> Drafter:
        """The pair's drafter without a lookup before it."""
        pair, counters = self.pair, self.target.counters
        if pair.feature is not None:
            return FeatureDrafter(pair.feature, self.target, counters, **self._stops)
        if pair.drafter is not None:
            return ModelDrafter(pair.drafter, counters, **self._stops, readout=short_readout_of(pair))
        if pair.drafter_kind == "lookup":
            return LookupDrafter(counters, **self._stops)
        base = self.target.route or LayerMask.even(pair.target.n_layers, 0.0).route
        thinned = base.thinned(self.config.self_skip)
        if self.target.route is not None and thinned.whole_layers == base.whole_layers:
            self.note(
                f"the self drafter skips no more layers than the slim verifier ({base.skip_ratio:.0%}), so that "
                "one adds nothing; raise --self-skip"
            )
        return SelfDrafter(self.target, thinned, **self._stops)


def bound_heads(pair: Pair, heads: LightHeads) -> dict[int, ExitHead]:
    """Heads at work on a pair's target; their cut LM head is made once a pair."""
    key = ("heads", heads.digest)
    if key not in pair.measured:
        pair.measured[key] = heads.bind(pair.target)
    bound: dict[int, ExitHead] = pair.measured[key]
    return bound


def headed(mask: LayerMask | None, heads: LightHeads | None, pair: Pair) -> LayerMask | None:
    """A mask with the head that it ends in, where it ends in one.

    Args:
        mask: The mask, or None.
        heads: Heads that were given; None takes those that the mask's file names.
        pair: The pair.

    Raises:
        MaskError: If the mask ends in a head and there is none for it.
        HeadsError: If the named file can't be read or is for another target.
    """
    if mask is None or mask.prefix is None or mask.head is not None:
        return mask
    if heads is None and mask.heads is not None:
        heads = LightHeads.load(mask.heads)
        heads.check(pair.target, pair.target_id)
    if heads is None:
        raise MaskError(
            f"mask '{mask.name}' ends behind layer {mask.prefix}, so it needs a light head there; add --heads FILE"
        )
    if mask.prefix not in heads.exits:
        raise MaskError(
            f"mask '{mask.name}' ends behind layer {mask.prefix}, but {heads.name} has heads behind "
            f"{', '.join(map(str, heads.exits))}; use one of these"
        )
    return replace(mask, head=bound_heads(pair, heads)[mask.prefix])


def exit_costs(pair: Pair, heads: LightHeads) -> ExitCosts:
    """Costs of a head and of the readout, in passes through one layer, by the weights that each reads."""
    model = pair.target
    words = model.vocabulary if heads.shortlist is None else len(heads.shortlist)
    width = model.config.hidden_size
    layer = sum(p.numel() for layer in model.layers for p in layer.parameters()) / model.n_layers
    turn = 0 if heads.transforms is None else width * width
    return ExitCosts(model.n_layers, (words * width + turn) / layer, model.vocabulary * width / layer)


def alpha_of(config: DecodingConfig) -> float:
    """The alpha asked for, or the default."""
    return DEFAULT_ALPHA if config.alpha is None else config.alpha
