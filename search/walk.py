"""What a mask would save: three-tier decoding played through on calibration text, counted, and priced in seconds.

At temperature 0 everything that decides a round is known beforehand: the drafter's token at every position, how the slim
verifier looks upon it, and what the full verifier says. `walk` plays the rounds of `via` mode along the text with a guard
that is always right: the full verifier is called where the gate escalates, and where a token would go out that it would
not have said. A real guard calls it more often, so the time is what a mask can reach at best; but a mask whose slim
verifier is confidently wrong gains nothing by that.

The price is the usual one, ``(g c_p + c_q' + P_esc c_esc) / E`` per token, with ``P_esc``, ``E`` and the tokens that an
escalation runs belatedly (back-fill) counted, not modelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from viasd.routes import ATTENTION, Route
from viasd.runtime.gates import Decision, Thresholds


@dataclass(frozen=True)
class Heard:
    """What the tiers say along a text, one entry a position.

    Attributes:
        drafted: The drafter's token, or -1 where it has none.
        ratio: ``q'(drafted) / max q'``; anything where nothing is drafted.
        slim: Argmax of the slim verifier.
        full: Argmax of the full verifier.
        lengths: Positions of each passage; a round never crosses into the next.
    """

    drafted: Sequence[int]
    ratio: Sequence[float]
    slim: Sequence[int]
    full: Sequence[int]
    lengths: Sequence[int]


@dataclass(frozen=True)
class Walk:
    """Counts of a walk.

    Attributes:
        emitted: Tokens, the full verifier's bonus included.
        plain: Steps at which the drafter had nothing, each one full pass over a token.
        rounds: Drafted blocks.
        drafted: Tokens in them.
        escalated: Blocks that the full verifier saw.
        backfilled: Tokens that went out without it and that its next pass had to run first.
    """

    emitted: int
    plain: int
    rounds: int
    drafted: int
    escalated: int
    backfilled: int = 0


@dataclass(frozen=True)
class PassTimes:
    """Measured seconds of what a round is made of; the numbers of a study, whoever works on it.

    Attributes:
        plain: Full pass over one token.
        full: Full pass over a block.
        drafter: One drafted token.
        layer: One whole layer over a block.
        attention: Attention alone of one layer over a block.
        ends: Everything of a pass over a block that is no layer.
        token: What one token more adds to a full pass.
    """

    plain: float
    full: float
    drafter: float
    layer: float
    attention: float
    ends: float
    token: float = 0.0

    @classmethod
    def of(cls, values: dict[str, float]) -> PassTimes:
        """From what `as_json` gave."""
        return cls(**{f.name: float(values[f.name]) for f in fields(cls)})

    def as_json(self) -> dict[str, float]:
        """The numbers by name."""
        return asdict(self)

    def slim(self, route: Route) -> float:
        """Seconds of a slim pass over a block."""
        halves = list(route.parts.values())
        attentions = halves.count(ATTENTION)
        mlps = len(halves) - attentions
        return (
            self.ends
            + len(route.whole_layers) * self.layer
            + attentions * self.attention
            + mlps * (self.layer - self.attention)
        )

    def escalation(self, route: Route) -> float:
        """Seconds of a full pass that starts at the end of the shared prefix.

        The slim pass does not run the block's last token, so the layers before the first gap run for that one.
        """
        return self.full - route.first_gap * self.layer * max(0.0, 1 - self.plain / self.full)

    def cascade(self, walk: Walk, route: Route) -> float:
        """Predicted seconds per token of three tiers."""
        spent = walk.plain * self.plain + walk.drafted * self.drafter + walk.rounds * self.slim(route)
        # What is run belatedly also starts at the end of the shared prefix.
        share = max(0.0, 1 - route.first_gap * self.layer / self.full)
        spent += walk.escalated * self.escalation(route) + walk.backfilled * self.token * share
        return spent / walk.emitted

    def two_tiers(self, walk: Walk) -> float:
        """Predicted seconds per token without the slim verifier; of a walk in which every block is escalated."""
        return (walk.plain * self.plain + walk.drafted * self.drafter + walk.rounds * self.full) / walk.emitted


def walk(heard: Heard, gamma: int, thresholds: Thresholds | None) -> Walk:
    """Plays decoding through; see above.

    Args:
        heard: What the tiers say.
        gamma: Drafted tokens a block, at most.
        thresholds: Of the gate; None for two tiers, where every block goes to the full verifier.
    """
    emitted = plain = rounds = drafted = escalated = backfilled = 0
    begin = 0
    for length in heard.lengths:
        at, end = begin, begin + length
        begin = end
        pending = 0
        while at < end:
            if heard.drafted[at] < 0:
                at, plain, emitted = at + 1, plain + 1, emitted + 1
                backfilled, pending = backfilled + pending, 0
                continue
            block = 1
            while block < gamma and at + block < end and heard.drafted[at + block] >= 0:
                block += 1
            kept, called = _round(heard, range(at, at + block), thresholds)
            advance = min(kept, end - at)
            rounds, drafted, escalated = rounds + 1, drafted + block, escalated + called
            at, emitted = at + advance, emitted + advance
            if called:
                backfilled, pending = backfilled + pending, 0
            else:
                pending += advance
    return Walk(emitted, plain, rounds, drafted, escalated, backfilled)


def _round(heard: Heard, block: range, thresholds: Thresholds | None) -> tuple[int, bool]:
    """Emitted tokens of one block, and whether the full verifier was called."""
    called = thresholds is None
    for place, at in enumerate(block):
        drafted, wanted = heard.drafted[at], heard.full[at]
        if thresholds is not None and not called:
            decision = thresholds.decide(heard.ratio[at])
            shown = heard.slim[at] if decision is Decision.REWRITE else drafted
            called = decision is Decision.ESCALATE or shown != wanted
        if drafted != wanted:
            return place + 1, called  # rewritten or corrected, and what was drafted behind it is stale
    return len(block) + called, called  # only the full verifier adds a token of its own
