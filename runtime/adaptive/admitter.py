"""Between an engine and the controllers: blocks that wait become offers, verdicts become outcomes, sequence by sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor

from viasd.accept import overlaps
from viasd.estimator import logit_of_max
from viasd.rows import Rows
from viasd.runtime.adaptive.budget import survivals
from viasd.runtime.adaptive.edges import Edge, Outcome
from viasd.runtime.adaptive.stopping import asks
from viasd.runtime.adaptive.three_tiers import CascadeVerification
from viasd.runtime.adaptive.verification import AdaptiveVerification, Offer
from viasd.runtime.metrics import Counters
from viasd.runtime.passes import Admission

_SHARE_LIMIT = 2.0  # logits of an n-gram's shares, which are 1 where it was seen once: none is as sure as that


class DraftStop(Protocol):
    """Decides before each token of a draft whether it is worth a pass, and then whether it is worth drawing."""

    def asks(self, place: int) -> bool:
        """Whether the row of this place is asked for; place 0 begins a draft."""
        ...

    def draws(self, logits: Tensor) -> bool:
        """Whether a token is drawn from this row, raw logits ``[V]``."""
        ...


class Observer(Protocol):
    """Is told what verifiers make of blocks."""

    def judged(self, verifier: str, p: Rows, q: Rows, accepted: int, *, lossy: bool) -> None:
        """A block of tokens drawn from `p` met a verifier whose laws are `q`; it kept so many of them."""
        ...


class Participant:
    """One sequence's part in Adaptive Verification.

    Args:
        admitter: Of the batch.
        number: Which sequence this is.
        temperature: Of its request; 0 is greedy.
        processed: Whether its rows go through logits processors, of which features know nothing.
        counters: Where it is counted.
    """

    def __init__(
        self, admitter: Admitter, number: int, temperature: float, processed: bool, counters: Counters
    ) -> None:
        self.number = number
        self.temperature = temperature
        self.counters = counters
        self.features: dict[str, list[float]] = {}
        self.admitted: dict[str, int] = {}
        self.reached: list[float] = []
        self._processed = processed
        self._admitter = admitter

    def asks(self, place: int) -> bool:
        """See `DraftStop`."""
        controller = self._admitter.two_tiers
        if controller is None or not controller.stops_drafting:
            return True
        if place == 0:
            self.reached = []
        return asks(controller.floor(self.number), controller.usual, self.reached[-1] if place else 1.0, place)

    def draws(self, logits: Tensor) -> bool:
        """See `DraftStop`."""
        controller = self._admitter.two_tiers
        if controller is None or not controller.stops_drafting:
            return True
        feature = float(logit_of_max(logits, self.temperature))
        before = self.reached[-1] if self.reached else 1.0
        survival = before * survivals([controller.edge.chance(feature, len(self.reached))])[0]
        self.reached.append(survival)
        return survival >= controller.floor(self.number)

    def judged(self, verifier: str, p: Rows, q: Rows, accepted: int, *, lossy: bool) -> None:
        """See `Observer`."""
        features = self.features.pop(verifier, None)
        if features is None:
            return
        outcome = Outcome(features, self.admitted[verifier], accepted, lossy=lossy, processed=self._processed)
        if self._admitter.soft and not lossy:
            labels = overlaps(p, q, outcome.judged)
            outcome = Outcome(features, outcome.admitted, accepted, labels, lossy, self._processed)
        self._admitter.learn(self, verifier, outcome)


class Admitter:
    """Adaptive Verification of a batch.

    Args:
        controller: For two tiers or for three.
    """

    def __init__(self, controller: AdaptiveVerification | CascadeVerification) -> None:
        self.two_tiers = controller if isinstance(controller, AdaptiveVerification) else None
        self._three_tiers = controller if isinstance(controller, CascadeVerification) else None
        self._controller = controller
        self._numbers = count()
        self._active: list[Participant] = []

    @property
    def soft(self) -> bool:
        """Whether chances of being kept are learnt from instead of outcomes."""
        return len(self._active) <= self._controller.config.soft_below

    def join(self, temperature: float, processed: bool, counters: Counters) -> Participant:
        """A new sequence."""
        return Participant(self, next(self._numbers), temperature, processed, counters)

    def leave(self, participant: Participant) -> None:
        """A sequence has ended."""
        self._controller.leave(participant.number)
        self._active = [p for p in self._active if p is not participant]

    def begin(self, participants: Sequence[Participant]) -> None:
        """A step begins in which these sequences decode one round each."""
        if self.two_tiers is not None and self.two_tiers.stops_drafting:
            for participant in self._active:
                self.two_tiers.stopped(participant.number, participant.reached)
                participant.reached = []
        self._active = list(participants)
        self._controller.begin([p.number for p in participants])

    def answer(self, waiting: Sequence[tuple[Participant, Admission]]) -> list[int]:
        """How many tokens of each block are verified. All blocks of a step on the same way are to be asked for together.

        Args:
            waiting: Sequences of this step and their blocks, all of them between the same two tiers.
        """
        ways = {(a.proposer, a.verifier) for _, a in waiting}
        if len(ways) > 1:
            raise ValueError(f"blocks between one pair of tiers are answered together, but got {sorted(ways)}")
        offers = []
        for participant, admission in waiting:
            features = block_features(admission, participant.temperature)
            participant.features[admission.verifier] = features
            offers.append(Offer(participant.number, features, participant.temperature == 0))
        others = len(self._active) - len(waiting)
        lengths = self._asked(next(iter(ways)), offers, others) if waiting else []
        for (participant, admission), n in zip(waiting, lengths, strict=True):
            participant.admitted[admission.verifier] = n
            counts = participant.counters.adaptive
            if admission.proposer == "drafter":
                counts.offered += len(admission.tokens)
                counts.admitted += n
            else:
                counts.withheld += len(admission.tokens) - n
        return lengths

    def learn(self, participant: Participant, verifier: str, outcome: Outcome) -> None:
        """A verifier judged a block."""
        edge = self._edge(verifier)
        counts = participant.counters.adaptive
        if not outcome.lossy and not outcome.processed:
            edge.score(outcome, counts.of(edge.name))
            counts.coefficients[edge.name] = edge.coefficients
        edge.observe(outcome)

    def state(self) -> dict[str, Any]:
        """What was learnt, ready for `json.dumps`."""
        return self._controller.state()

    def _edge(self, verifier: str) -> Edge:
        found: dict[str, Edge] = {edge.name.split("->")[1]: edge for edge in self._controller.edges}
        return found[verifier]

    def _asked(self, way: tuple[str, str], offers: Sequence[Offer], others: int) -> list[int]:
        if self.two_tiers is not None:
            return self.two_tiers.admit(offers, others)
        assert self._three_tiers is not None
        if way == ("drafter", "slim"):
            return self._three_tiers.admit_to_slim(offers)
        return self._three_tiers.admit_to_full(offers, others)


def block_features(admission: Admission, temperature: float) -> list[float]:
    """Logit of the largest probability of the row behind every token of a block.

    A token of prompt lookup has no row: the share of its n-gram's occurrences that it followed stands for the probability,
    with a limit.
    """
    features: list[float] = []
    if len(admission.logits):
        rows = admission.logits if isinstance(admission.logits, Tensor) else torch.stack(list(admission.logits))
        features = logit_of_max(rows, temperature).tolist()
    for share in admission.confidence[len(features) :]:
        logit = math.log(share / (1 - share)) if 0 < share < 1 else math.copysign(math.inf, share - 0.5)
        features.append(min(_SHARE_LIMIT, max(-_SHARE_LIMIT, logit)))
    return features
