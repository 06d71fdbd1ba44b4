from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from laws import PROMPT, random_table

from viasd.draws import SeededDraws
from viasd.layered import LayeredModel
from viasd.runtime.drafters import ModelDrafter
from viasd.runtime.gates import RatioGate, Thresholds
from viasd.runtime.metrics import Counters
from viasd.runtime.passes import Admission, DraftPass, FullPass, SlimPass, Steps, drive
from viasd.runtime.strategies import ChainedCascade, GatedCascade, Plain, SpeculativeDecoding, Workbench
from viasd.sampling import Sampler, SamplingConfig
from viasd.testing import TableDrafter, TableTarget, tiny_model

Q, SLIM, P = random_table(1, 5), random_table(2, 5), random_table(3, 5)


def bench(temperature: float = 0.0) -> Workbench:
    return Workbench(TableTarget(Q, SLIM), Sampler(SamplingConfig(temperature=temperature)), SeededDraws(0), Counters())


def strategies(made: Workbench) -> dict[str, Any]:
    drafter = TableDrafter(P)
    return {
        "plain": Plain(made),
        "sd": SpeculativeDecoding(made, drafter, gamma=3),
        "chain": ChainedCascade(made, drafter, gamma=3, slim_rounds=2),
        "via": GatedCascade(made, drafter, RatioGate(Thresholds()), gamma=3, audit=0.5),
    }


def answered(steps: Steps[Any], admit: int | None = None) -> tuple[Any, list[Any]]:
    """A round with its work, admissions answered with at most `admit`."""
    seen: list[Any] = []
    answer: Any = None
    while True:
        try:
            work = steps.send(answer)
        except StopIteration as end:
            return end.value, seen
        seen.append(work)
        whole = work.run()
        answer = min(whole, admit) if isinstance(work, Admission) and admit is not None else whole


@pytest.mark.parametrize("name", ["plain", "sd", "chain", "via"])
def test_a_round_is_what_its_steps_come_to(name: str) -> None:
    tokens = list(PROMPT)
    for room in (1, 2, 3, 9):
        alone = strategies(bench(1.0))[name].round(tokens, room)
        stepped, _ = answered(strategies(bench(1.0))[name].steps(tokens, room))
        assert (alone.tokens, alone.tiers, alone.drafted) == (stepped.tokens, stepped.tiers, stepped.drafted)


@pytest.mark.parametrize(
    ("name", "edges"),
    [("sd", [("drafter", "full")]), ("chain", [("drafter", "slim")] * 2 + [("slim", "full")])],
)
def test_every_block_asks_for_admission_with_its_raw_rows(name: str, edges: list[tuple[str, str]]) -> None:
    _, seen = answered(strategies(bench())[name].steps(PROMPT, 20))
    asked = [(work, then) for work, then in pairwise(seen) if isinstance(work, Admission)]
    assert [(work.proposer, work.verifier) for work, _ in asked] == edges
    table = {"drafter": P, "slim": SLIM}
    for work, then in asked:
        n = len(work.tokens)
        prefix = then.tokens[:-n]
        assert list(then.tokens[-n:]) == list(work.tokens)
        for i in range(n):
            assert torch.equal(work.logits[i], table[work.proposer]((*prefix, *work.tokens[:i])))


@pytest.mark.parametrize("name", ["sd", "chain", "via"])
@pytest.mark.parametrize("admit", [0, 1, 2])
def test_only_admitted_tokens_are_verified(name: str, admit: int) -> None:
    made = bench()
    emission, seen = answered(strategies(made)[name].steps(PROMPT, 20), admit)
    fed = [len(work.tokens) - len(PROMPT) for work in seen if isinstance(work, FullPass)]
    assert max(fed, default=0) <= admit
    assert 1 <= len(emission.tokens) <= admit + 1
    counters = made.counters
    assert counters.drafted > counters.gated
    assert counters.kept <= counters.gated <= admit * 2
    if name != "via":
        greedy, _ = answered(Plain(bench()).steps(PROMPT, 1))
        assert emission.tokens[0] == greedy.tokens[0]


def test_waiting_for_a_pass_is_not_the_drafters_time() -> None:
    counters = Counters()
    drafter = ModelDrafter(LayeredModel(tiny_model()), counters)
    sampler = Sampler(SamplingConfig())
    tokens = [5, 6, 7]
    steps = drafter.drafting(tokens, 3, sampler.ahead(tokens), SeededDraws(0))
    answer: Any = None
    with torch.inference_mode():
        for _ in range(3):
            work = steps.send(answer)
            assert isinstance(work, DraftPass)
            time.sleep(0.2)  # neighbours are at work
            answer = torch.zeros(1, 300)
    assert counters.seconds_by_tier["drafter"] < 0.2
    with torch.inference_mode():
        drive(drafter.drafting(tokens, 2, sampler.ahead(tokens), SeededDraws(0)))
    assert 0 < counters.seconds_by_tier["drafter"] < 0.4


def test_a_failing_pass_is_not_taken_for_the_end_of_a_round() -> None:
    class Broken(TableTarget):
        def full(self, tokens: Sequence[int], rows: int) -> Any:
            raise StopIteration

    made = Workbench(Broken(Q, SLIM), Sampler(SamplingConfig()), SeededDraws(0), Counters())
    with pytest.raises(StopIteration):
        Plain(made).round(PROMPT, 1)


def test_the_slim_tier_is_a_pass_too() -> None:
    _, seen = answered(strategies(bench())["via"].steps(PROMPT, 20))
    assert any(isinstance(work, SlimPass) for work in seen)
