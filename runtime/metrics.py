"""Counts first: what a generation did, as sums that can be added up; every ratio is derived at the edge.

A ratio whose denominator is 0 reads 0.0; the count beside it says that nothing was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from viasd.intervals import clustered_interval
from viasd.runtime.adaptive.reliability import Adaptive
from viasd.runtime.moves import Moves

TIERS = ("drafter", "slim", "full")
PARTS = (*TIERS, "prefill", "loop")
_TIME_SLACK = 1e-3  # seconds of nested clocks may pass the outer one by their resolution


@dataclass(slots=True)
class Audit:
    """Blocks that skipped the full verifier and were checked against it all the same.

    Attributes:
        blocks: (tokens, disagreement) per audited block. Disagreement is summed over the block's tokens: at
            temperature 0 the number of tokens that are not the full verifier's argmax, above it the total variation
            between the emitted law and q.
    """

    blocks: list[tuple[int, float]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Audited tokens."""
        return sum(n for n, _ in self.blocks)

    @property
    def disagreed(self) -> float:
        """Summed disagreement, in tokens."""
        return sum(d for _, d in self.blocks)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the disagreement per token, tokens of a block being dependent; (0, 1) without audits."""
        return clustered_interval([n for n, _ in self.blocks], [d for _, d in self.blocks])


@dataclass(slots=True)
class EarlyExits:
    """What `adadecode` did; all empty elsewhere.

    Attributes:
        exits: Guesses by the number of layers after which they were made.
        refused: Those of them that the full verifier was the first of its cycle to refuse.
        pending: Cycles by the number of guesses they ended with.
        layer_passes: Passes through one layer, however many tokens travelled together; plain decoding has as many a token
            as there are layers.
    """

    exits: dict[int, int] = field(default_factory=dict)
    refused: dict[int, int] = field(default_factory=dict)
    pending: dict[int, int] = field(default_factory=dict)
    layer_passes: int = 0

    def ended(self, exits: Sequence[int], refused: int | None) -> None:
        """A cycle ended: where its guesses were made, and which of them was refused first."""
        for layers in exits:
            self.exits[layers] = self.exits.get(layers, 0) + 1
        if refused is not None:
            self.refused[exits[refused]] = self.refused.get(exits[refused], 0) + 1
        self.pending[len(exits)] = self.pending.get(len(exits), 0) + 1

    def merge(self, other: EarlyExits) -> None:
        """Add the counts of another generation to these."""
        for mine, theirs in ((self.exits, other.exits), (self.refused, other.refused), (self.pending, other.pending)):
            for key, count in theirs.items():
                mine[key] = mine.get(key, 0) + count
        self.layer_passes += other.layer_passes

    def as_json(self) -> dict[str, Any]:
        """The counts as a JSON object; layers and lengths are its keys, as text."""
        counts = {"exits": self.exits, "refused": self.refused, "pending": self.pending}
        return {
            **{name: {str(k): count for k, count in sorted(found.items())} for name, found in counts.items()},
            "layer_passes": self.layer_passes,
        }


@dataclass(slots=True)
class Counters:
    """Counts of one generation, or of several after `merge`.

    What was emitted (`emitted`, `by_tier`, `accepted`, `unseen`) never includes tokens past EOS, a stop string or the
    limit. What was done (`drafted`, `gated`, `kept`, `rewrites`, calls) includes the part of the last block that such an
    end cut off.

    Attributes:
        emitted: Tokens in the output.
        by_tier: Emitted tokens by the tier they were drawn from: drafter, slim, full.
        rounds: Draft-and-verify rounds; a plain decoding step is one round.
        drafted: Tokens the drafter proposed.
        gated: Drafted tokens that some verifier judged (a trimmed or stale one is drafted, not gated).
        kept: Gated drafted tokens that stayed; a rewrite or an escalation that changes the token is a refusal.
        accepted: Drafted tokens that are in the output.
        slim_calls: Forward passes of the slim verifier.
        full_calls: Forward passes of the full verifier while decoding; the prompt's own are not counted.
        drafter_calls: Forward passes of the drafter.
        slim_tokens_fed: Positions those passes ran.
        full_tokens_fed: Positions the full verifier ran, prompt and back-fill included.
        drafter_tokens_fed: Positions those passes ran.
        escalated_rounds: Rounds in which a gate called the full verifier (audits are not escalations).
        rewrites: Drafted tokens the slim verifier replaced.
        unseen: Emitted tokens that the full verifier never tested (`via` mode).
        seconds: Wall time of generating.
        seconds_by_tier: Its parts: drafter, slim, full, prefill, and loop for what is none of them.
        audit: Audited disagreement.
        early: Exits of `adadecode`.
        readout: What confident readouts did.
        adaptive: What Adaptive Verification left out, and how well it predicted.
    """

    emitted: int = 0
    by_tier: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    rounds: int = 0
    drafted: int = 0
    gated: int = 0
    kept: int = 0
    accepted: int = 0
    slim_calls: int = 0
    full_calls: int = 0
    drafter_calls: int = 0
    slim_tokens_fed: int = 0
    full_tokens_fed: int = 0
    drafter_tokens_fed: int = 0
    escalated_rounds: int = 0
    rewrites: int = 0
    unseen: int = 0
    seconds: float = 0.0
    seconds_by_tier: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    audit: Audit = field(default_factory=Audit)
    early: EarlyExits = field(default_factory=EarlyExits)
    readout: Moves = field(default_factory=Moves)
    adaptive: Adaptive = field(default_factory=Adaptive)

    @property
    def rejection_rate(self) -> float:
        """1 - kept / gated drafted tokens. Tokens nobody judged are in neither count."""
        return 1 - self.kept / self.gated if self.gated else 0.0

    @property
    def full_calls_per_token(self) -> float:
        """Full-verifier passes per emitted token; plain decoding has 1."""
        return _ratio(self.full_calls, self.emitted)

    @property
    def slim_calls_per_token(self) -> float:
        """Slim-verifier passes per emitted token."""
        return _ratio(self.slim_calls, self.emitted)

    @property
    def escalation_rate(self) -> float:
        """Share of rounds in which a gate called the full verifier."""
        return _ratio(self.escalated_rounds, self.rounds)

    @property
    def block_efficiency(self) -> float:
        """Emitted tokens per round, the bonus token counted; plain decoding has 1."""
        return _ratio(self.emitted, self.rounds)

    @property
    def block_efficiency_per_full_call(self) -> float:
        """Emitted tokens per full-verifier pass, the bonus token counted."""
        return _ratio(self.emitted, self.full_calls)

    @property
    def layers_per_token(self) -> float:
        """Passes through one layer per emitted token (`adadecode`); plain decoding has the number of layers."""
        return _ratio(self.early.layer_passes, self.emitted)

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens per second of wall time, prefill included."""
        return _ratio(self.emitted, self.seconds)

    @property
    def tier_share(self) -> dict[str, float]:
        """Share of the emitted tokens by tier."""
        return {tier: _ratio(count, self.emitted) for tier, count in self.by_tier.items()}

    @property
    def time_share(self) -> dict[str, float]:
        """Share of the wall time by tier and of the loop itself."""
        return {part: _ratio(seconds, self.seconds) for part, seconds in self.seconds_by_tier.items()}

    def as_json(self) -> dict[str, Any]:
        """The stats object of a result: finite numbers, lists and strings only."""
        low, high = self.audit.interval
        return {
            "emitted": self.emitted,
            "by_tier": dict(self.by_tier),
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "slim_calls": self.slim_calls,
            "full_calls": self.full_calls,
            "escalated_rounds": self.escalated_rounds,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "seconds_by_tier": dict(self.seconds_by_tier),
            "audit": {
                "blocks": len(self.audit.blocks),
                "tokens": self.audit.tokens,
                "disagreed": self.audit.disagreed,
                "interval": [low, high],
            },
            "gated": self.gated,
            "kept": self.kept,
            "rewrites": self.rewrites,
            "unseen": self.unseen,
            "drafter_calls": self.drafter_calls,
            "drafter_tokens_fed": self.drafter_tokens_fed,
            "slim_tokens_fed": self.slim_tokens_fed,
            "full_tokens_fed": self.full_tokens_fed,
            "adaptive": self.adaptive.as_json(),
            "early": {**self.early.as_json(), "layers_per_token": self.layers_per_token},
            "readout": self.readout.as_json(),
        }

    def merge(self, other: Counters) -> None:
        """Add the counts of another generation to these; seconds add up as if it had run after this one."""
        for name in _SCALARS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for tier, count in other.by_tier.items():
            self.by_tier[tier] += count
        for part, seconds in other.seconds_by_tier.items():
            self.seconds_by_tier[part] += seconds
        self.audit.blocks.extend(other.audit.blocks)
        self.early.merge(other.early)
        self.readout.merge(other.readout)
        self.adaptive.merge(other.adaptive)

    def check(self) -> list[str]:
        """Sentences for every violated invariant; empty when the counts are consistent."""
        values: dict[str, float] = {name: getattr(self, name) for name in _SCALARS}
        values |= {f"by_tier[{tier}]": count for tier, count in self.by_tier.items()}
        values |= {f"seconds_by_tier[{part}]": seconds for part, seconds in self.seconds_by_tier.items()}
        found = [f"{name} is {value}, below 0" for name, value in values.items() if not value >= 0]
        if set(self.by_tier) != set(TIERS):
            found.append(f"by_tier has {sorted(self.by_tier)}, not {sorted(TIERS)}")
        if set(self.seconds_by_tier) != set(PARTS):
            found.append(f"seconds_by_tier has {sorted(self.seconds_by_tier)}, not {sorted(PARTS)}")
        if self.emitted != sum(self.by_tier.values()):
            found.append(f"emitted is {self.emitted}, but the tiers add up to {sum(self.by_tier.values())}")
        for small, large in _ORDERED:
            if getattr(self, small) > getattr(self, large):
                found.append(f"{small} is {getattr(self, small)}, above {large} = {getattr(self, large)}")
        early = self.early
        found += [
            f"{count} guesses behind layer {layers} were refused, but only {early.exits.get(layers, 0)} were made"
            for layers, count in early.refused.items()
            if count > early.exits.get(layers, 0)
        ]
        guesses, waited = sum(early.exits.values()), sum(n * count for n, count in early.pending.items())
        if guesses != waited:
            found.append(f"{guesses} guesses were made at exits, but {waited} waited for the full verifier")
        moves = self.readout
        if not (
            moves.moved <= moves.tokens <= self.emitted and moves.tokens <= moves.rows and moves.moved <= moves.depth
        ):
            found.append(f"the readout's counts contradict each other: {moves}")
        if not 0 <= self.adaptive.admitted <= self.adaptive.offered:
            found.append(
                f"{self.adaptive.admitted} drafted tokens were admitted, but {self.adaptive.offered} were offered"
            )
        parts = sum(self.seconds_by_tier.values())
        if parts > self.seconds + _TIME_SLACK:
            found.append(f"seconds is {self.seconds}, but its parts add up to {parts}")
        found += [
            f"audited block has disagreement {disagreement} of {tokens} tokens"
            for tokens, disagreement in self.audit.blocks
            if not -1e-6 <= disagreement <= tokens + 1e-6
        ]
        return found


_SCALARS = tuple(f.name for f in fields(Counters) if f.type in ("int", "float"))
_ORDERED = (
    ("kept", "gated"),
    ("gated", "drafted"),
    ("accepted", "drafted"),
    ("accepted", "emitted"),
    ("rewrites", "gated"),
    ("unseen", "emitted"),
    ("escalated_rounds", "rounds"),
    ("slim_calls", "slim_tokens_fed"),
    ("full_calls", "full_tokens_fed"),
    ("drafter_calls", "drafter_tokens_fed"),
)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
