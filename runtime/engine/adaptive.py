"""Adaptive Verification as an engine's policy: waiting blocks become offers, and verdicts outcomes, request by request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from viasd.accept import overlaps
from viasd.errors import OptionError
from viasd.estimator import logit_of_max
from viasd.pair import Pair
from viasd.routes import Route
from viasd.runtime.adaptive.budget import survivals
from viasd.runtime.adaptive.costs import BatchCosts, batch_costs
from viasd.runtime.adaptive.edges import EDGES, Edge, Outcome
from viasd.runtime.adaptive.reliability import Adaptive, Reliability
from viasd.runtime.adaptive.three_tiers import CascadeVerification
from viasd.runtime.adaptive.verification import AdaptiveConfig, AdaptiveVerification, Offer, Tables
from viasd.runtime.answer import Answer
from viasd.runtime.config import GenerationConfig
from viasd.runtime.drafters import FeatureDrafter, LookupDrafter, ModelLine, SelfDrafter
from viasd.runtime.engine.policy import Block
from viasd.runtime.passes import Admission, Judged
from viasd.shortlist import ShortRow

MODES = ("auto", "on", "off")
_SHARE_LIMIT = 2.0  # logits of an n-gram's shares, which are 1 where it was seen once: none is as sure as that
_PLACES = 16  # of a block, each with an intercept of its own; later ones count as the last
_STOPPED = (ModelLine, FeatureDrafter)  # drafters whose every token costs a pass


class AdaptivePolicy:
    """Chooses how much is drafted and verified, by chances learnt from every verdict and by measured costs.

    Laws stay what they are, but how much of a draft is verified depends on the other requests, and so does which draws a
    sampled answer is made of. A request that names a seed wants the very tokens that this seed gives alone: in ``auto`` mode
    it is left in peace. So is a bounded one, whose answer at temperature 0, too, may depend on what is verified; and two
    tiers whose drafter is made of two (lookup first, vertical, horizontal): what its next token costs is not known before
    it is there.

    Args:
        pair: The pair.
        concurrency: Most requests that run at once.
        mode: ``on`` wherever there is a table of costs; ``auto`` only in steps of so many sequences that it can pay.
        config: Policy.
        state: What an earlier run has learnt (`state`), or None.

    Raises:
        OptionError: If `mode` is unknown or `state` malformed.
    """

    def __init__(
        self,
        pair: Pair,
        concurrency: int,
        mode: str = "auto",
        *,
        config: AdaptiveConfig | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        if mode not in MODES[:2]:
            raise OptionError(f"adaptive verification must be one of {', '.join(MODES)}, but got '{mode}'")
        config = config or AdaptiveConfig()
        edges = {name: Edge(name, _PLACES) for name in EDGES}
        drafts: list[list[float]] = []
        if state is not None:
            known, drafts = _loaded(state)
            edges |= known
        self.edges = edges
        self.two_tiers = AdaptiveVerification(edges["drafter->full"], 1, self._costs_of("two"), config)
        self.three_tiers = CascadeVerification(
            edges["drafter->slim"], edges["slim->full"], 1, self._costs_of("three"), config
        )
        for draft in drafts:
            self.two_tiers.drafted(draft)
        self._pair = pair
        self._concurrency = concurrency
        self._mode = mode
        self._routes: dict[str, tuple[Route | None, Route | None]] = {}
        self._context = 1
        self._running = 0
        self._sent: dict[tuple[int, str], tuple[list[float], int]] = {}
        self._stops: dict[int, _Stop] = {}
        self._counts: dict[int, Adaptive] = {}  # of requests that something was learnt from
        self._heard: dict[str, list[tuple[Outcome, Reliability]]] = {}  # since the step began

    def begin(self, running: Sequence[tuple[int, Answer]]) -> None:
        """See `AdmissionPolicy`."""
        self._learn()
        for stop in self._stops.values():
            self.two_tiers.drafted(stop.taken())
        steered = [(n, a) for n, a in running if self.steers(a)]
        two = [(n, a) for n, a in steered if a.plan.strategy != "cascade"]
        three = [(n, a) for n, a in steered if a.plan.strategy == "cascade"]
        self._running = len(running)
        # The mean: what attention takes grows with the sum of all, and one long request must not stand for the others.
        self._context = sum(len(answer.tokens) for _, answer in running) // max(1, len(running)) or 1
        for kind, answers in (("two", two), ("three", three)):
            if answers:
                answer = answers[0][1]
                own = answer.drafter.route if isinstance(answer.drafter, SelfDrafter) else None
                self._routes[kind] = (answer.target.route if kind == "three" else None, own)
                controller = self.two_tiers if kind == "two" else self.three_tiers
                controller.gamma = max(a.config.decoding.gamma for _, a in answers)
        steered_two = {n for n, _ in two}
        self._stops = {n: stop for n, stop in self._stops.items() if n in steered_two}
        for number, answer in two:
            if number not in self._stops and isinstance(answer.drafter, _STOPPED):
                self._stops[number] = _Stop(self.two_tiers, number, answer.config.sampling.temperature)
                answer.drafter.stop = self._stops[number]
        self.two_tiers.begin([n for n, _ in two])
        self.three_tiers.begin([n for n, _ in three], greedy=all(answer.sampler.greedy for _, answer in three))

    def passed_over(self, answer: Answer) -> str | None:
        """A sentence for a request that drafts and is not steered although it should be: in ``on`` mode."""
        if self._mode != "on" or answer.drafter is None or self.steers(answer):
            return None
        what = "via mode" if answer.plan.mode == "via" else f"strategy {answer.plan.strategy} with this drafter"
        return f"Adaptive Verification does not steer {what}: its drafts are verified whole"

    def admit(self, blocks: Sequence[Block], others: int) -> list[int]:
        """See `AdmissionPolicy`."""
        lengths = [len(block.admission.tokens) for block in blocks]
        heard = [block.answer.plan.mode != "via" for block in blocks]  # a gate's verdicts are not a verifier's
        features = [self._features(block) if h else [] for block, h in zip(blocks, heard, strict=True)]
        ways: dict[tuple[str, str], list[int]] = {}
        for i, block in enumerate(blocks):
            if self.steers(block.answer):
                ways.setdefault((block.admission.proposer, block.admission.verifier), []).append(i)
            else:
                others += lengths[i]
        for way, members in ways.items():
            offers = [Offer(blocks[i].request, features[i], blocks[i].answer.sampler.greedy) for i in members]
            for i, n in zip(members, self._asked(way, offers, others), strict=True):
                lengths[i] = n
        for block, seen, n, h in zip(blocks, features, lengths, heard, strict=True):
            if not h:
                continue
            self._sent[block.request, block.admission.verifier] = (seen, n)
            counts, offered = block.answer.counters.adaptive, len(block.admission.tokens)
            if block.admission.proposer == "drafter":
                counts.offered += offered
                counts.admitted += n
            else:
                counts.withheld += offered - n
        return lengths

    def judged(self, request: int, answer: Answer, verdict: Judged) -> None:
        """See `AdmissionPolicy`."""
        features, admitted = self._sent.pop((request, verdict.verifier))
        edge = self.edges[f"{verdict.proposer}->{verdict.verifier}"]
        outcome = Outcome(
            features, admitted, verdict.kept, lossy=not verdict.exact, processed=answer.sampler.has_processors
        )
        if outcome.lossy or outcome.processed:
            return
        if self.two_tiers.soft(self._running):
            labels = overlaps(verdict.p, verdict.q, outcome.judged)
            outcome = Outcome(features, admitted, verdict.kept, labels)
        self._counts[request] = answer.counters.adaptive
        self._heard.setdefault(edge.name, []).append((outcome, answer.counters.adaptive.of(edge.name)))

    def ended(self, request: int) -> None:
        """See `AdmissionPolicy`."""
        self._learn()
        counts = self._counts.pop(request, None)
        self.two_tiers.leave(request)
        self.three_tiers.leave(request)
        self._stops.pop(request, None)
        for edge in self.edges.values():
            self._sent.pop((request, edge.name.split("->")[1]), None)
            if counts is not None and edge.name in counts.reliability:
                counts.coefficients[edge.name] = edge.coefficients

    def state(self) -> dict[str, Any]:
        """What was learnt, ready for `json.dumps`."""
        self._learn()
        return {"edges": [edge.state() for edge in self.edges.values()], "drafts": self.two_tiers.recent.state()}

    def _learn(self) -> None:
        """From all verdicts of a step at once: one by one they would take longer than the drafts that they save."""
        for name, heard in self._heard.items():
            self.edges[name].score(heard)
            self.edges[name].observe([outcome for outcome, _ in heard])
        self._heard = {}

    def _features(self, block: Block) -> list[float]:
        stop = self._stops.get(block.request)
        n = len(block.admission.tokens)
        if stop is not None and len(stop.features) >= n:
            return stop.features[:n]
        return block_features(block.admission, block.answer.config.sampling.temperature)

    def _asked(self, way: tuple[str, str], offers: Sequence[Offer], others: int) -> list[int]:
        if way == ("drafter", "full"):
            return self.two_tiers.admit(offers, others)
        if way == ("drafter", "slim"):
            return self.three_tiers.admit_to_slim(offers)
        return self.three_tiers.admit_to_full(offers, others)

    def leaves(self, config: GenerationConfig) -> bool:
        """Whether requests of this configuration are left in peace: what they say must not depend on the others."""
        seeded = not config.sampling.greedy and config.seed is not None
        return self._mode == "auto" and (seeded or config.decoding.mode == "bounded")

    def paces(self, config: GenerationConfig) -> bool:
        """Whether it says how long drafts are, where a request alone would choose that by its own costs."""
        decoding = config.decoding
        own = decoding.draft_length is None and decoding.strategy in ("auto", "cascade", "sd")
        return own and not self.leaves(config) and not self._pair.lookup_first

    def paced(self, config: GenerationConfig) -> GenerationConfig:
        """The same, but that where `paces` drafts end where one more token does not pay by the costs of a batch."""
        if not self.paces(config):
            return config
        return replace(config, decoding=replace(config.decoding, draft_length="fixed"))

    def steers(self, answer: Answer) -> bool:
        """Whether it decides how much of this request's drafts is verified."""
        if self.leaves(answer.config) or answer.plan.mode == "via":
            return False
        if answer.plan.strategy == "cascade":
            return True
        return answer.plan.strategy in ("sd", "self-sd") and isinstance(answer.drafter, (*_STOPPED, LookupDrafter))

    def _costs_of(self, kind: str) -> Tables:
        def costs(sequences: int) -> BatchCosts | None:
            route, own = self._routes[kind]
            gamma = (self.two_tiers if kind == "two" else self.three_tiers).gamma
            table = batch_costs(self._pair, route, self._concurrency, self._context, gamma, own)
            pays = self._mode == "on" or bool(table.drafter) or table.can_pay(sequences, gamma)
            return table if pays else None

        return costs


class _Stop:
    """When one request's drafts stop (`DraftStop`)."""

    def __init__(self, controller: AdaptiveVerification, number: int, temperature: float) -> None:
        self._controller = controller
        self._number = number
        self._temperature = temperature
        self._limit = controller.limit(number)
        self._reached = 1.0
        self.features: list[float] = []  # of every row of the last draft that was asked for

    def taken(self) -> list[float]:
        """The same, once."""
        features, self.features = self.features, []
        return features

    def asks(self, place: int) -> bool:
        """See `DraftStop`."""
        if place == 0:
            self._limit, self._reached, self.features = self._controller.limit(self._number), 1.0, []
        usual = self._controller.usual
        return self._limit.asks(self._reached, float(usual[min(place, len(usual) - 1)]), place)

    def draws(self, row: ShortRow) -> bool:
        """See `DraftStop`."""
        place = len(self.features)
        self.features.append(row.certainty(self._temperature))
        self._reached *= survivals([self._controller.edge.chance(self.features[-1], place)])[0]
        return self._limit.draws(self._reached)


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


def _loaded(state: Mapping[str, Any]) -> tuple[dict[str, Edge], list[list[float]]]:
    stored = state.get("edges") if isinstance(state, Mapping) else None
    if not isinstance(stored, list):
        raise OptionError(
            "the state of adaptive verification must be what AdaptivePolicy.state() gives: an object with 'edges'"
        )
    found = [Edge.from_state(each) for each in stored]
    try:
        drafts = [[float(feature) for feature in draft] for draft in state.get("drafts", [])]
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"'drafts' in the state of adaptive verification must be lists of numbers, but {error}"
        ) from error
    return {edge.name: edge for edge in found}, drafts
