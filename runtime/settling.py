"""What one request comes to before it runs: its plan, its mask and heads checked, the gate of `via` mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from viasd.errors import HeadsError, OptionError
from viasd.heads import LightHeads
from viasd.mask import LayerMask
from viasd.pair import Pair
from viasd.runtime.assembly import headed
from viasd.runtime.config import SELF_SKIP, GenerationConfig, Plan, thresholds_of
from viasd.runtime.config import plan as settle_plan
from viasd.runtime.gates import Gate, RatioGate, Thresholds
from viasd.runtime.guard import Guard, GuardConfig, GuardedGate
from viasd.runtime.names import EXITING
from viasd.runtime.readouts import Readouts, scored_with, settle_readouts
from viasd.runtime.tiers import measure_tiers, recorded_refusal

DEFAULT_MAX_DISAGREEMENT = 0.02


@dataclass(frozen=True)
class Settled:
    """A request with every choice made.

    Attributes:
        pair: The pair.
        config: What was asked for.
        plan: What that came to.
        mask: The mask, with the head that it ends in where it ends in one.
        heads: The light heads, where there are any.
        readouts: The readout of each tier.
        mask_warning: Whether the mask's file gave cause for a warning.
    """

    pair: Pair
    config: GenerationConfig
    plan: Plan
    mask: LayerMask | None
    heads: LightHeads | None
    readouts: Readouts
    mask_warning: bool = False


def settle(
    pair: Pair,
    config: GenerationConfig,
    mask: LayerMask | None,
    heads: LightHeads | None,
    note: Callable[[str], None],
) -> Settled:
    """Checks a request against the pair and makes every choice that it left open.

    Args:
        pair: A loaded pair.
        config: What to do.
        mask: Layers the slim verifier keeps, or None.
        heads: Light heads, or None.
        note: Receives sentences that a person should know.

    Raises:
        OptionError: If options contradict each other or the pair.
        MaskError: If the mask is not for this target, or was scored with another readout than is asked for.
        HeadsError: If the heads are not, or are needed and missing.
    """
    if heads is not None and (warning := heads.check(pair.target, pair.target_id)):
        note(warning)
    mask = headed(mask, heads, pair)
    warned = False
    if mask is not None and (warning := mask.check(pair.target, pair.target_id)):
        note(warning)
        warned = True
    plan = _plan(pair, config, mask, note)
    if heads is not None and plan.strategy not in EXITING and (mask is None or mask.prefix is None):
        raise OptionError(
            f"light heads are for strategy adadecode or a mask that ends in one (prefix:E), but this is "
            f"{plan.strategy} without; leave them out"
        )
    if plan.strategy in EXITING and heads is None:
        raise HeadsError(
            f"strategy {plan.strategy} needs light heads and none were given: add --heads FILE (viasd-fit heads "
            "trains them), or --heads lens:7,15,22 for untrained ones behind so many layers"
        )
    readouts = settle_readouts(config.decoding, plan, mask)
    return Settled(pair, config, plan, mask, heads, readouts, warned)


def _plan(pair: Pair, config: GenerationConfig, mask: LayerMask | None, note: Callable[[str], None]) -> Plan:
    decoding = config.decoding
    chosen = settle_plan(decoding, has_mask=mask is not None)
    if chosen.strategy == "cascade" and decoding.tiers == "auto" and mask is not None:
        readouts, greedy = settle_readouts(decoding, chosen, mask), config.sampling.greedy
        refusal = recorded_refusal(pair, mask, decoding, readouts)
        if refusal is None:
            report = measure_tiers(pair, mask, decoding, chosen.mode, greedy=greedy, readouts=readouts)
            refusal = None if report.keeps_slim else report.sentence()
            if report.keeps_slim:
                note(report.sentence())
        if refusal is not None:
            note(refusal)
            if readouts.slim is not None:
                note("the slim verifier's readout is left out with it")
            mode = "lossless" if chosen.mode == "via" else chosen.mode
            return replace(chosen, strategy="sd", mode=mode)
    if chosen.reason:
        note(chosen.reason)
    return chosen


def make_gate(settled: Settled, guard: Guard | None, note: Callable[[str], None]) -> tuple[Gate, Guard | None]:
    """The gate of `via` mode, and the guard in it.

    Args:
        settled: The request.
        guard: A guard that has learnt from earlier answers; None makes a fresh one.
        note: Receives sentences that a person should know.

    Raises:
        OptionError: If the request's budget contradicts the guard's.
    """
    config = settled.config.decoding
    thresholds = thresholds_of(config)
    if config.gate == "ratio":
        note("gate ratio: no guard, so nothing bounds how far this output strays from the target")
        return RatioGate(thresholds), guard
    budget = config.max_disagreement
    if guard is None:
        most = DEFAULT_MAX_DISAGREEMENT if budget is None else budget
        guard = Guard(GuardConfig(max_disagreement=most), _guard_start(settled, note))
    elif budget is not None and budget != guard.config.max_disagreement:
        raise OptionError(
            f"max_disagreement {budget:g} contradicts the guard that was handed over, whose budget is "
            f"{guard.config.max_disagreement:g}; leave one out"
        )
    return GuardedGate(thresholds, guard), guard


def _guard_start(settled: Settled, note: Callable[[str], None]) -> Mapping[str, Any] | None:
    """Coefficients stored with the mask, but only where they were fitted for what is about to happen.

    The search fits them at temperature 0, with the paper's thresholds and its pair's own drafter and weights.
    """
    pair, config, mask = settled.pair, settled.config, settled.mask
    start: Mapping[str, Any] | None = None if mask is None else mask.details.get("guard")
    if mask is None or start is None:
        return None
    fitting = (
        config.sampling.greedy
        and config.decoding.thresholds in (None, Thresholds())
        and mask.pair == pair.name
        and (pair.drafter_kind != "self" or config.decoding.self_skip == SELF_SKIP)
        and not settled.mask_warning
        and settled.readouts == Readouts(None, scored_with(mask))
    )
    if not fitting:
        note(
            "the guard starts without the mask's coefficients, which were fitted for another pair, temperature, "
            "thresholds, readout or self_skip; until it has learnt, every token is checked"
        )
    return start if fitting else None
