"""Laws of whole strategies, exact: every outcome of every draw is enumerated over tables in the models' place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from laws import PROMPT, Law, Table, decoded_law, largest_error, random_table, target_law

from viasd.accept import gated_law
from viasd.rows import Row, Rows
from viasd.runtime.drafters import Draft, LookupDrafter, LookupFirstDrafter
from viasd.runtime.gates import Decision, RatioGate, Thresholds
from viasd.runtime.guard import Guard, GuardConfig, GuardedGate
from viasd.runtime.lengths import DraftLength, LookupFirstPace, LookupPace, ModelPace
from viasd.runtime.strategies import (
    ChainedCascade,
    GatedCascade,
    Plain,
    SpeculativeDecoding,
    Strategy,
    Workbench,
)
from viasd.runtime.strategies.via import emitted_law
from viasd.sampling import Sampler, SamplingConfig
from viasd.testing import TableDrafter, TableTarget

EXACT = 1e-12
PLAIN_SAMPLING = SamplingConfig(temperature=1.0)
Make = Callable[[Workbench], tuple[Strategy, Any]]


def tables(vocabulary: int = 3) -> tuple[Table, Table, Table]:
    """p, q' and q: related, so that every branch has weight, and different."""
    q = random_table(1, vocabulary)
    noise, more = random_table(2, vocabulary, 0.8), random_table(3, vocabulary, 1.5)
    return (lambda x: q(x) + more(x)), (lambda x: q(x) + noise(x)), q


P, SLIM, Q = tables()
TARGET = TableTarget(Q, SLIM)


def drafter(kind: str = "dense", p: Table = P) -> TableDrafter:
    return TableDrafter(p, point_mass=kind == "point", min_confidence=0.6 if kind == "unsure" else 0.0)


def sd(kind: str = "dense", gamma: int = 2, alpha: float = 0.0) -> Make:
    def make(bench: Workbench) -> tuple[Strategy, Any]:
        source = drafter(kind)
        return SpeculativeDecoding(bench, source, gamma=gamma, alpha=alpha), source

    return make


def paced(kind: str, seconds: list[float]) -> Make:
    """Blocks whose length follows from what became of earlier ones; `seconds` make every length the best one somewhere."""

    def make(bench: Workbench) -> tuple[Strategy, Any]:
        lengths = DraftLength(2, 0.05, seconds)
        if kind == "lookup":
            lookup = LookupDrafter(bench.counters)
            return SpeculativeDecoding(bench, lookup, gamma=2, pace=LookupPace(lengths, lookup, bench.sampler)), lookup
        source = drafter(kind)
        return SpeculativeDecoding(bench, source, gamma=2, pace=ModelPace(lengths)), source

    return make


def lookup_first(kind: str, gamma: int = 2, seconds: list[float] | None = None) -> Make:
    """Lookup before a table; with `seconds`, whichever promises more is asked for as many tokens as pay."""

    def make(bench: Workbench) -> tuple[Strategy, Any]:
        source = LookupFirstDrafter(LookupDrafter(bench.counters), drafter(kind), shortest=1)
        pace = None
        if seconds is not None:
            lengths = DraftLength(gamma, 0.0, seconds), DraftLength(gamma, 0.05, seconds)
            pace = LookupFirstPace(*lengths, source, bench.sampler)
        return SpeculativeDecoding(bench, source, gamma=gamma, pace=pace), source

    return make


def chain(
    kind: str = "dense", gamma: int = 1, slim_rounds: int = 1, alpha: float = 0.0, stop: int | None = None
) -> Make:
    def make(bench: Workbench) -> tuple[Strategy, Any]:
        source = drafter(kind)
        stops = frozenset() if stop is None else frozenset({stop})
        options = {"gamma": gamma, "slim_rounds": slim_rounds, "alpha": alpha, "stop_tokens": stops}
        return ChainedCascade(bench, source, **options), source

    return make


def via(
    gate: Callable[[], Any], kind: str = "dense", gamma: int = 2, *, recheck: bool = True, audit: float = 0.0
) -> Make:
    def make(bench: Workbench) -> tuple[Strategy, Any]:
        source = drafter(kind)
        return GatedCascade(bench, source, gate(), gamma=gamma, recheck=recheck, audit=audit), source

    return make


def ratio_gate() -> RatioGate:
    return RatioGate(Thresholds(0.7, 0.3))


class Escalating(RatioGate):
    def __init__(self) -> None:
        super().__init__(Thresholds())

    def judge(self, slim_logits: torch.Tensor, draft: Draft) -> list[Decision]:
        return [Decision.ESCALATE] * len(draft.tokens)

    def sets(self, slim_logits: torch.Tensor, draft: Draft, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        none = torch.zeros(slim_logits.shape[1], dtype=torch.bool)
        return none, none


def unready() -> GuardedGate:
    return GuardedGate(Thresholds(0.7, 0.3), Guard(GuardConfig(max_disagreement=0.5)))


def trained() -> GuardedGate:
    """A guard that vouches for some tokens and not for others."""
    from viasd.estimator import EstimatorConfig, LogisticEstimator

    slopes = (2.0, 1.0, 0.3, 0.0, 0.0, 0.0, 0.0, 0.5)
    state = LogisticEstimator(EstimatorConfig(slopes=slopes, intercept=0.3, nonnegative_slopes=False)).state()
    return GuardedGate(Thresholds(0.5, 0.2), Guard(GuardConfig(max_disagreement=0.4), start=state))


LOSSLESS: dict[str, Make] = {
    "plain": lambda bench: (Plain(bench), None),
    **{f"sd-{kind}-{g}": sd(kind, g) for kind in ("dense", "point", "unsure") for g in (1, 2)},
    "sd-dense-3": sd("dense", 3),
    "sd-point-3": sd("point", 3),
    **{
        f"sd-paced-{kind}-{name}": paced(kind, seconds)
        for kind in ("dense", "point", "lookup")
        for name, seconds in (("cheap", [1.0, 1.1, 1.2]), ("close", [1.0, 1.38, 1.6]), ("dear", [1.0, 2.1, 3.0]))
    },
    **{f"lookup-first-{kind}": lookup_first(kind) for kind in ("dense", "point", "unsure")},
    **{
        f"lookup-first-paced-{name}": lookup_first("dense", 2, seconds)
        for name, seconds in (("cheap", [1.0, 1.1, 1.2]), ("close", [1.0, 1.38, 1.6]), ("dear", [1.0, 2.1, 3.0]))
    },
    **{f"chain-{kind}-1": chain(kind, 1) for kind in ("dense", "point", "unsure")},
    "chain-dense-2": chain("dense", 2),
    "chain-point-1x2": chain("point", 1, slim_rounds=2),
    "chain-point-3x2": chain("point", 3, slim_rounds=2),
    "chain-point-1x2-stop": chain("point", 1, slim_rounds=2, stop=1),
    "via-escalating-2": via(Escalating, gamma=2),
    "via-escalating-2-norecheck": via(Escalating, gamma=2, recheck=False),
    "via-escalating-point": via(Escalating, "point", 2, recheck=False),
    "via-unready": via(unready, gamma=2),
    "via-unready-norecheck": via(unready, gamma=2, recheck=False),
    "via-audited-1": via(ratio_gate, gamma=1, audit=1.0),
    "via-audited-2": via(ratio_gate, gamma=2, audit=1.0),
    "via-audited-point": via(ratio_gate, "point", 2, audit=1.0),
    "via-audited-trained": via(trained, gamma=2, audit=1.0),
    "via-audited-trained-point": via(trained, "point", 2, audit=1.0),
}


@pytest.mark.parametrize("name", LOSSLESS)
def test_the_law_of_two_tokens_is_exactly_the_targets(name: str) -> None:
    # Two blocks for the slim verifier need room for five tokens.
    law = decoded_law(LOSSLESS[name], TARGET, 2, PLAIN_SAMPLING, spare=3 if "x2" in name else 1)
    assert largest_error(law, target_law(Q, 2, PLAIN_SAMPLING, 3)) < EXACT


@pytest.mark.parametrize(
    "name",
    [
        "sd-dense-2",
        "lookup-first-dense",
        "lookup-first-paced-cheap",
        "sd-point-2",
        "chain-point-1x2",
        "via-audited-point",
    ],
)
def test_the_law_of_three_tokens_is_exactly_the_targets(name: str) -> None:
    law = decoded_law(LOSSLESS[name], TARGET, 3, PLAIN_SAMPLING, spare=0)
    assert largest_error(law, target_law(Q, 3, PLAIN_SAMPLING, 3)) < EXACT


SAMPLING = {
    "cold": {"temperature": 0.5},
    "top-k": {"temperature": 1.0, "top_k": 2},
    "top-p": {"temperature": 1.3, "top_p": 0.7},
    "min-p": {"temperature": 1.0, "min_p": 0.4},
    "penalty": {"temperature": 1.0, "repetition_penalty": 1.7},
    "greedy": {"temperature": 0.0},
}


@pytest.mark.parametrize("filters", SAMPLING)
@pytest.mark.parametrize("name", ["sd-dense-2", "sd-point-3", "chain-point-1x2", "via-audited-2", "via-unready"])
def test_the_law_is_exact_for_processed_rows(name: str, filters: str) -> None:
    config = SamplingConfig(**SAMPLING[filters])
    law = decoded_law(LOSSLESS[name], TARGET, 2, config, spare=1)
    assert largest_error(law, target_law(Q, 2, config, 3)) < EXACT


def test_two_slim_blocks_of_drawn_tokens_are_exact() -> None:
    p, slim, q = tables(2)

    def make(bench: Workbench) -> tuple[Strategy, Any]:
        source = drafter("dense", p)
        return ChainedCascade(bench, source, gamma=1, slim_rounds=2), source

    law = decoded_law(make, TableTarget(q, slim), 2, PLAIN_SAMPLING, spare=3)
    assert largest_error(law, target_law(q, 2, PLAIN_SAMPLING, 2)) < EXACT


@pytest.mark.parametrize("kind", ["dense", "point"])
def test_a_longer_vocabulary_is_exact_too(kind: str) -> None:
    p, slim, q = tables(4)
    source = drafter(kind, p)
    law = decoded_law(
        lambda bench: (SpeculativeDecoding(bench, source, gamma=2), source), TableTarget(q, slim), 2, PLAIN_SAMPLING
    )
    assert largest_error(law, target_law(q, 2, PLAIN_SAMPLING, 4)) < EXACT


# --- bounded mode -----------------------------------------------------------------------------------------------------


def conditionals(law: Law, length: int) -> dict[tuple[int, ...], torch.Tensor]:
    """Next-token law after every prefix shorter than `length`."""
    found: dict[tuple[int, ...], torch.Tensor] = {}
    for tokens, weight in law.items():
        for i in range(length):
            found.setdefault(tokens[:i], torch.zeros(3, dtype=torch.float64))[tokens[i]] += weight
    return {prefix: row / row.sum() for prefix, row in found.items()}


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(
    "make", [sd("dense", 2, 1), sd("point", 2, 1), chain("dense", 1, 1, 1), chain("point", 2, 2, 1)]
)
def test_bounded_mode_keeps_every_token_within_its_bounds(make: Make, alpha: float) -> None:
    def bounded(bench: Workbench) -> tuple[Strategy, Any]:
        strategy, source = make(bench)
        strategy._alpha = alpha  # type: ignore[attr-defined]
        return strategy, source

    strayed = 0.0
    for prefix, row in conditionals(decoded_law(bounded, TARGET, 2, PLAIN_SAMPLING, spare=1), 2).items():
        q = Q((*PROMPT, *prefix)).softmax(-1)
        distance = float((row - q).abs().sum()) / 2
        assert bool((row <= q / (1 - alpha) + EXACT).all())
        assert distance <= alpha + EXACT
        strayed = max(strayed, distance)
    assert strayed > alpha / 20  # it does use the freedom it was given


# --- via --------------------------------------------------------------------------------------------------------------


def one_position_law(gate: Any, kind: str) -> torch.Tensor:
    """L = p 1_A + p(B) q' + p(C) q, straight from the formula."""
    p = P(PROMPT).softmax(-1)
    if kind == "point":
        p = torch.nn.functional.one_hot(p.argmax(), 3).double()
    slim, q = SLIM(PROMPT).softmax(-1), Q(PROMPT).softmax(-1)
    accept, rewrite = gate.sets(SLIM(PROMPT)[None], Draft([0], Rows(tokens=(0,)), [1.0], [P(PROMPT)]), 0)
    escalate = ~(accept | rewrite)
    return p * accept + (p * rewrite).sum() * slim + (p * escalate).sum() * q


@pytest.mark.parametrize(("accept", "escalate"), [(0.7, 0.5), (0.9, 0.05), (0.5, 0.2), (1.0, 0.99), (0.05, 0.0)])
@pytest.mark.parametrize("kind", ["dense", "point"])
def test_one_gated_position_without_recheck_has_the_papers_law(kind: str, accept: float, escalate: float) -> None:
    gate = RatioGate(Thresholds(accept, escalate))
    law = decoded_law(via(lambda: gate, kind, gamma=1, recheck=False), TARGET, 1, PLAIN_SAMPLING)
    expected = one_position_law(gate, kind)
    assert max(abs(law.get((x,), 0.0) - float(expected[x])) for x in range(3)) < EXACT


def test_the_emitted_law_by_hand() -> None:
    p, slim = Row(probs=torch.tensor([0.5, 0.25, 0.25])), Row(probs=torch.tensor([0.2, 0.8, 0.0]))
    q = torch.tensor([0.0, 0.5, 0.5])
    accept, rewrite = torch.tensor([True, False, False]), torch.tensor([False, True, False])
    law = emitted_law(p, slim, q, accept, rewrite)
    assert law.tolist() == pytest.approx([0.5 + 0.25 * 0.2, 0.25 * 0.8 + 0.25 * 0.5, 0.25 * 0.5])


def test_without_audits_the_gate_strays_from_the_target() -> None:
    # Else the tests above would prove nothing about recheck and audits.
    for recheck in (True, False):
        law = decoded_law(via(ratio_gate, gamma=2, recheck=recheck), TARGET, 2, PLAIN_SAMPLING)
        assert largest_error(law, target_law(Q, 2, PLAIN_SAMPLING, 3)) > 1e-3


def test_testing_an_escalated_token_as_a_draw_from_p_would_be_wrong() -> None:
    # What spec and code avoid: the token is known to lie in C, so its law is p restricted to C.
    gate = RatioGate(Thresholds(0.9, 0.89))
    q = Q(PROMPT).softmax(-1)
    p, slim = P(PROMPT).softmax(-1), Row(probs=SLIM(PROMPT).softmax(-1))
    accept, rewrite = gate.sets(SLIM(PROMPT)[None], Draft([0], Rows(tokens=(0,))), 0)
    m = gated_law(Row(probs=p), slim, rewrite).probs
    assert m is not None
    assert not rewrite.any()
    wrong = p * accept
    for x in range(3):
        if not accept[x]:
            kept = min(1.0, float(q[x] / m[x]))
            rest = (q - m).clamp_min(0)
            wrong = wrong + p[x] * (
                kept * torch.nn.functional.one_hot(torch.tensor(x), 3) + (1 - kept) * rest / rest.sum()
            )
    assert float((wrong - torch.tensor([float(v) for v in one_position_law(gate, "dense")])).abs().max()) > 1e-3


def test_rows_do_not_depend_on_who_asks() -> None:
    assert torch.equal(TARGET.full([0, 1, 2], 2)[0], Q((0, 1)))
    assert torch.equal(TARGET.slim([0, 1, 2], 1)[0], SLIM((0, 1, 2)))
    assert Sampler(PLAIN_SAMPLING).ahead(PROMPT).row(Q(PROMPT)).prob(0) == pytest.approx(
        float(Q(PROMPT).softmax(-1)[0])
    )
