"""Does the slim tier pay? Measured times and acceptance of this pair on this machine, and the decision in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from viasd.divergences import (
    accept_mass,
    expected_tokens,
    predicted_seconds_sd,
    stage_cost,
)
from viasd.mask import LayerMask, ModelIdentity
from viasd.pair import Pair
from viasd.remember import remembered
from viasd.routes import Route
from viasd.runtime.config import SELF_SKIP, DecodingConfig, thresholds_of
from viasd.runtime.costs import cost_table, models_said
from viasd.runtime.drafters import LookupDrafter
from viasd.runtime.gates import Decision
from viasd.runtime.metrics import Counters
from viasd.runtime.readouts import Readouts, scored_with
from viasd.runtime.target import TieredTarget
from viasd.selecting import ConfidentReadout

# Short texts whose continuations the target writes itself; the second invites repetition, so that lookup has a say.
_PROMPTS = (
    "The three most important inventions of the last two hundred years are",
    "Repeat this list twice, word for word: red apples, green pears, yellow plums, blue berries. Red apples, green pears,",
)
_TOKENS = 32  # written per prompt
_FLOOR = -50.0
_CONTEXT = 64  # about where those texts end
_SEED = 0
_NO_READOUTS = Readouts()
_STAGES = ("drafter_full", "drafter_slim", "slim_full")


@dataclass(frozen=True)
class TierReport:
    """What was measured and what follows from it.

    Attributes:
        seconds: Median seconds of a drafter step (``drafter``), a slim pass over a block (``slim``), a full pass over a
            block (``full``), the part of a full pass behind the shared prefix (``escalation``), and a full pass over one
            token (``plain``).
        rejection: Mean rejection by stage: ``drafter_full``, ``drafter_slim``, ``slim_full`` (1 - accept mass).
        delta: ``C(p->q) - C(p->u) - C(u->q)``; positive means the slim tier shortens the path. None where the drafter
            proposed nothing on the calibration text.
        per_token: Predicted seconds per token of ``plain``, ``sd`` and ``cascade``.
        keeps_slim: The decision.
    """

    seconds: dict[str, float]
    rejection: dict[str, float]
    delta: float | None
    per_token: dict[str, float]
    keeps_slim: bool

    def sentence(self) -> str:
        """The decision and the numbers behind it."""
        sd, cascade, plain = (self.per_token[k] * 1e3 for k in ("sd", "cascade", "plain"))
        delta = "unknown (the drafter proposed nothing)" if self.delta is None else f"{self.delta:+.3f}"
        verdict = "keeping the slim tier" if self.keeps_slim else "leaving the slim tier out"
        slower = min(sd, cascade) > plain
        best = "sd" if sd <= cascade else "cascade"
        warning = f"; both are estimated to be slower than plain decoding, {best} the less so" if slower else ""
        return (
            f"tiers auto: {verdict} (Delta {delta}; estimated ms/token: two tiers {sd:.1f}, three tiers {cascade:.1f}, "
            f"plain {plain:.1f}{warning}; --tiers 3 forces it)"
        )


def recorded_refusal(
    pair: Pair, mask: LayerMask, config: DecodingConfig, readouts: Readouts = _NO_READOUTS
) -> str | None:
    """Why the slim tier is left out without measuring anything, or None where it has to be measured.

    Delta compares distances between laws, which do not depend on the machine. Where the search found it for this very
    pair, weights, drafter and block length, and it is not above 0, the times can't change the decision.
    """
    tier = mask.details.get("tier")
    delta = tier.get("delta") if isinstance(tier, Mapping) else None
    if not isinstance(delta, int | float) or delta > 0 or mask.target is None:
        return None
    known = mask.pair == pair.name and mask.details.get("gamma") == config.gamma
    known = known and readouts == Readouts(None, scored_with(mask))
    known = known and (pair.drafter_kind != "self" or config.self_skip == SELF_SKIP)
    if not known or ModelIdentity.of(pair.target, mask.target.id) != mask.target:
        return None
    return (
        f"tiers auto: leaving the slim tier out (mask {mask.name}: the search found Delta {delta:+.3f} for this pair, so "
        "it does not shorten the way from the drafter to the target; --tiers 3 forces it)"
    )


def measure_tiers(
    pair: Pair,
    mask: LayerMask,
    config: DecodingConfig,
    mode: str,
    *,
    greedy: bool = False,
    readouts: Readouts = _NO_READOUTS,
) -> TierReport:
    """Measures once per machine, pair, mask and settings, and remembers it in the cache folder.

    The target writes a little text of its own; rows of drafter and slim verifier are compared with its rows there, as the
    runtime would see them (the slim path reads the full path's keys below each block). Times are medians on this machine.
    Acceptance is that of temperature 0 (`greedy`) or of temperature 1; a guard's own escalations are not in it, since what
    it will learn is not known beforehand. With confident readouts the rows are theirs; what these cost is not in the times.
    """
    key = (mask.route, _stitched(mask), config.gamma, mode, config.thresholds, config.self_skip, greedy, readouts)
    if key not in pair.measured:
        with torch.inference_mode():
            pair.measured[key] = _measure(pair, mask, config, mode, greedy, readouts)
    report: TierReport = pair.measured[key]
    return report


@dataclass(frozen=True)
class _Acceptance:
    """What drafter, slim and full verifier think of each other; the same on every machine but for rounding.

    Attributes:
        rejection: See `TierReport`.
        delta: Likewise.
        proposed: Share of the written tokens for which the drafter had something to say.
        decisions: Of the gate on those, by value.
    """

    rejection: dict[str, float]
    delta: float | None
    proposed: float
    decisions: list[str]

    @classmethod
    def parse(cls, data: Any) -> _Acceptance:
        """From what `asdict` gave."""
        rejection = {name: float(data["rejection"][name]) for name in _STAGES}
        delta = None if data["delta"] is None else float(data["delta"])
        return cls(rejection, delta, float(data["proposed"]), [Decision(d).value for d in data["decisions"]])


def _measure(
    pair: Pair, mask: LayerMask, config: DecodingConfig, mode: str, greedy: bool, readouts: Readouts
) -> TierReport:
    gamma, thresholds = config.gamma, thresholds_of(config)
    said = {
        **models_said(pair),
        "mask": [*mask.route.key, *([] if mask.stitches is None else [_stitched(mask)])],
        "gamma": gamma,
        "thresholds": [thresholds.accept, thresholds.escalate],
        "self_skip": config.self_skip,
        "greedy": greedy,
        **({"readouts": readouts.key} if readouts.key else {}),
    }
    found = remembered(
        "tiers", said, lambda: _accepted(pair, mask, config, greedy, readouts), asdict, _Acceptance.parse
    )
    seconds = time_passes(pair, mask.route, _CONTEXT, config)
    decisions = [Decision(value) for value in found.decisions]
    speculative = {
        "sd": predicted_seconds_sd(found.rejection["drafter_full"], gamma, seconds["drafter"], seconds["full"]),
        "cascade": _cascade_seconds(mode, gamma, seconds, found.rejection, decisions),
    }
    per_token = {"plain": seconds["plain"]}
    # Where the drafter has nothing to say, any strategy takes a plain step.
    share = found.proposed
    per_token |= {
        name: share * value + (1 - share) * seconds["plain"] if share else seconds["plain"]
        for name, value in speculative.items()
    }
    pays = per_token["cascade"] < per_token["sd"] and found.delta is not None and found.delta > 0
    return TierReport(seconds, found.rejection, found.delta, per_token, pays)


def _stitched(mask: LayerMask) -> str | None:
    return None if mask.stitches is None else mask.stitches.sha256


def _accepted(pair: Pair, mask: LayerMask, config: DecodingConfig, greedy: bool, readouts: Readouts) -> _Acceptance:
    full_readout, slim_readout = readouts.bind(pair, mask.route, _SEED)
    gamma, thresholds = config.gamma, thresholds_of(config)
    stages: dict[str, list[Tensor]] = {name: [] for name in _STAGES}
    costs: dict[str, list[Tensor]] = {name: [] for name in _STAGES}
    decisions: list[str] = []
    written = proposed = 0
    for prompt in _PROMPTS:
        tokens, first, q = _write(pair, pair.encode(prompt), full_readout)
        # On the CPU from here on: the drafter, or a part of the target, may sit on another device.
        q = q.cpu()
        slim = _block_rows(pair, mask.route, tokens, first, gamma + 1, slim_readout).cpu()
        written += len(q)
        pairs = [("slim_full", slim, q)]
        proposals = _proposal_rows(pair, mask.route, tokens, first, gamma, config)
        if proposals is not None:
            where, p = proposals[0], proposals[1].cpu()
            proposed += len(where)
            pairs += [("drafter_full", p, q[where]), ("drafter_slim", p, slim[where])]
            best = slim[where].amax(dim=-1)
            ratio = (slim[where].gather(1, p.argmax(dim=-1, keepdim=True))[:, 0] - best).exp()
            decisions += [thresholds.decide(r).value for r in ratio.tolist()]
        for name, proposal, verifier in pairs:
            if greedy:
                refused = (proposal.argmax(dim=-1) != verifier.argmax(dim=-1)).float()
            else:
                refused = (1 - accept_mass(proposal, verifier)).clamp(0, 1)
            stages[name].append(refused)
            costs[name].append(stage_cost(proposal, verifier))
    rejection = {name: float(torch.cat(v).mean()) if v else 1.0 for name, v in stages.items()}
    cost = {name: float(torch.cat(v).mean()) if v else None for name, v in costs.items()}
    delta = None
    if cost["drafter_full"] is not None and cost["drafter_slim"] is not None and cost["slim_full"] is not None:
        delta = cost["drafter_full"] - cost["drafter_slim"] - cost["slim_full"]
    return _Acceptance(rejection, delta, proposed / written, decisions)


def _cascade_seconds(
    mode: str, gamma: int, seconds: dict[str, float], rejection: dict[str, float], decisions: list[Decision]
) -> float:
    """Predicted seconds per token of three tiers."""
    if mode == "via":
        if not decisions:
            return float("inf")
        refused = sum(d is not Decision.ACCEPT for d in decisions) / len(decisions)
        escalated = sum(d is Decision.ESCALATE for d in decisions) / len(decisions)
        share = 1 - (1 - escalated) ** gamma
        # Only a block that the full verifier sees ends with a token of its own; the others have at most gamma.
        with_bonus = expected_tokens(refused, gamma)
        without = expected_tokens(refused, gamma - 1)
        emitted = share * with_bonus + (1 - share) * without
        return (gamma * seconds["drafter"] + seconds["slim"] + share * seconds["escalation"]) / emitted
    # Chain: a slim block of E tokens, each of which the full verifier keeps with probability 1 - rejection.
    block = expected_tokens(rejection["drafter_slim"], gamma)
    emitted = expected_tokens(rejection["slim_full"], block)
    return (gamma * seconds["drafter"] + seconds["slim"] + seconds["escalation"]) / emitted


def _write(pair: Pair, prompt: list[int], readout: ConfidentReadout | None = None) -> tuple[list[int], int, Tensor]:
    """Greedy text of the target: all tokens, where its own begin, and q's log-probs ``[n, V]`` of the written ones."""
    target = TieredTarget(pair.target, None, Counters(), full_readout=readout)
    tokens = list(prompt)
    rows = []
    for _ in range(min(_TOKENS, pair.target.context_length - len(prompt) - 1)):
        row = target.full(tokens, 1)
        rows.append(torch.log_softmax(row, dim=-1))
        tokens.append(int(row[0].argmax()))
    return tokens, len(prompt), torch.cat(rows)


def _block_rows(
    pair: Pair,
    route: Route,
    tokens: list[int],
    first: int,
    block: int,
    readout: ConfidentReadout | None = None,
) -> Tensor:
    """Log-probs ``[n, V]`` of a route for the tokens from `first` on, in blocks above the full path's keys."""
    target = TieredTarget(pair.target, route, Counters(), slim_readout=readout)
    rows = []
    for start in range(first, len(tokens), block):
        end = min(start + block, len(tokens))
        target.prefill(tokens[: start - 1])
        rows.append(torch.log_softmax(target.slim(tokens[: end - 1], end - start), dim=-1))
        target.kv.forget_pending()
    return torch.cat(rows)


def _proposal_rows(
    pair: Pair, slim: Route, tokens: list[int], first: int, gamma: int, config: DecodingConfig
) -> tuple[Tensor, Tensor] | None:
    """Indices (of written tokens) at which the drafter has something to say, and its log-probs ``[n, V]`` there."""
    n = len(tokens) - first
    if pair.drafter is not None:
        alone = TieredTarget(pair.drafter, None, Counters())
        return torch.arange(n), torch.log_softmax(alone.full(tokens[:-1], n), dim=-1)
    if pair.drafter_kind == "self":
        return torch.arange(n), _block_rows(pair, slim.thinned(config.self_skip), tokens, first, gamma + 1)
    lookup = LookupDrafter(Counters())
    found = [(i, lookup.next_token(tokens[: first + i])) for i in range(n)]
    hits = [(i, token) for i, token in found if token is not None]
    if not hits:
        return None
    rows = torch.full((len(hits), pair.target.vocabulary), _FLOOR, device=pair.target.device)
    for row, (_, token) in zip(rows, hits, strict=True):
        row[token] = 0.0
    return torch.tensor([i for i, _ in hits]), rows


def time_passes(pair: Pair, route: Route, context: int, config: DecodingConfig) -> dict[str, float]:
    """Median seconds of every pass a round is made of, as in `TierReport.seconds`.

    Args:
        pair: The pair.
        route: Layers of the slim verifier.
        context: Tokens before the passes.
        config: Its `gamma` and `self_skip` count.
    """
    own = route.thinned(config.self_skip) if pair.drafter_kind == "self" else None
    costs, block = cost_table(pair, route, context, config.gamma, own), config.gamma + 1
    return {
        "plain": costs.full[1],
        "full": costs.full[block],
        "slim": costs.slim[block],
        "escalation": costs.escalation[block],
        "drafter": costs.drafter,
    }
