"""Drafts of real drafters in a real engine that stop before a token is drawn: joint laws of two requests by enumeration."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from features import feature_pair
from tiny import pair_of, prompt_ids

from viasd.estimator import EstimatorConfig
from viasd.runtime import answer as answer_module
from viasd.runtime.adaptive import edges, verification
from viasd.runtime.adaptive.costs import BatchCosts
from viasd.runtime.adaptive.edges import Edge
from viasd.runtime.adaptive.stopping import Limit
from viasd.runtime.adaptive.verification import AdaptiveVerification
from viasd.runtime.drafters import feature, line
from viasd.runtime.drafters.base import Draft
from viasd.runtime.drafters.stepwise import draft_stepwise
from viasd.runtime.engine import Engine
from viasd.runtime.engine import adaptive as policy_module
from viasd.runtime.passes import Steps
from viasd.sampling import Sampler, SamplingConfig
from viasd.testing import EnumeratingDraws

LENGTH = 4  # tokens whose law is looked at: as many as two rounds with one drafted token can emit
SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_k": 2}  # two tokens a place, so that all can be enumerated
COSTS = BatchCosts(2, 8, {n: 1.0 + 0.01 * n for n in range(1, 9)}, {}, {1: 0.01})
PROMPTS = (prompt_ids()[:6], prompt_ids()[:9])


@cache
def pair(drafter: str) -> Any:
    return feature_pair() if drafter == "feature" else pair_of("llama", drafter, noise=0.05)


@cache
def target_law(drafter: str, tokens: tuple[int, ...], left: int) -> dict[tuple[int, ...], float]:
    """Law of the next tokens by transformers' own forward: the target's two likeliest, drawn one by one."""
    if not left:
        return {(): 1.0}
    with torch.no_grad():
        logits = pair(drafter).target.model(torch.tensor([list(tokens)])).logits[0, -1].float()
    probs = Sampler(SamplingConfig(**SAMPLING)).ahead(tokens).row(logits).probs
    assert probs is not None
    law = {}
    for token in probs.nonzero().flatten().tolist():
        for rest, weight in target_law(drafter, (*tokens, token), left - 1).items():
            law[(token, *rest)] = float(probs[token]) * weight
    return law


def completed(drafter: str, prompt: list[int], said: list[int]) -> dict[tuple[int, ...], float]:
    """Law of the first tokens of an answer that has begun."""
    rest = target_law(drafter, (*prompt, *said), LENGTH - len(said))
    return {(*said, *tokens): weight for tokens, weight in rest.items()}


class Round(NamedTuple):
    """What became of both requests: tokens, tokens drafted in the last round, features of the rows it asked for."""

    said: list[list[int]]
    drafted: list[int]
    features: list[list[float]]


def rounds(drafter: str, draws: EnumeratingDraws, monkeypatch: pytest.MonkeyPatch, count: int = 1) -> Round:
    monkeypatch.setattr(answer_module, "SeededDraws", lambda _seed: draws)
    engine = Engine(pair(drafter), mask=None, concurrency=2, adaptive="on")
    gamma = 2 if count == 1 else 1
    options = {"strategy": "sd", "gamma": gamma, "max_new_tokens": 40, "ignore_eos": True, "self_skip": 0.1}
    for prompt in PROMPTS:
        engine.add(prompt, **options, **SAMPLING)
    emitted: set[int] = set()
    while not emitted:
        emitted = {event.request for event in engine.step()}
    assert emitted == {0, 1}  # in one step
    answers = [request.answer for request in engine._running]
    assert len(answers) == 2
    before = [0, 0]
    for _ in range(count - 1):
        before = [answer.counters.drafted for answer in answers]
        engine.step()
    assert isinstance(engine.policy, policy_module.AdaptivePolicy)
    return Round(
        [answer.produced for answer in answers],
        [answer.counters.drafted - n for answer, n in zip(answers, before, strict=True)],
        [engine.policy._stops[number].features for number in (0, 1)],
    )


def law_error(drafter: str, monkeypatch: pytest.MonkeyPatch, count: int = 1) -> tuple[float, set[tuple[int, ...]]]:
    """Distance of the joint law from independent answers of the target, and how much was drafted last for both."""
    law: dict[Any, float] = {}
    drafted = set()
    for draws in EnumeratingDraws().paths():
        found = rounds(drafter, draws, monkeypatch, count)
        drafted.add(tuple(found.drafted))
        ends = [completed(drafter, prompt, tokens) for prompt, tokens in zip(PROMPTS, found.said, strict=True)]
        for (one, a), (two, b) in itertools.product(*(end.items() for end in ends)):
            law[one, two] = law.get((one, two), 0.0) + draws.weight * a * b
    expected = {
        (one, two): a * b
        for (one, a), (two, b) in itertools.product(*(completed(drafter, p, []).items() for p in PROMPTS))
    }
    assert sum(law.values()) == pytest.approx(1, abs=1e-5)
    return max(abs(law.get(key, 0.0) - expected.get(key, 0.0)) for key in {*law, *expected}), drafted


def floor_between(drafter: str, monkeypatch: pytest.MonkeyPatch) -> float:
    """A floor that some drafts' second tokens reach and some do not."""
    edge = Edge("drafter->full", 2)
    reached = set()
    for draws in EnumeratingDraws().paths():
        for found in rounds(drafter, draws, monkeypatch).features:
            reached.add(edge.chance(found[0], 0) * edge.chance(found[1], 1))
    return float(np.median(sorted(reached)))


@pytest.fixture(autouse=True)
def fixed_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module, "batch_costs", lambda *_: COSTS)


@pytest.mark.parametrize("drafter", ["model", "feature", "self"])
def test_drafts_that_stop_before_a_token_is_drawn_are_exact(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    floor = floor_between(drafter, monkeypatch)
    monkeypatch.setattr(AdaptiveVerification, "limit", lambda self, sequence: Limit(2, floor))
    error, drafted = law_error(drafter, monkeypatch)
    assert error < 1e-6
    assert len({one for one, _ in drafted} | {two for _, two in drafted}) == 2  # some stop, some do not
    assert len(drafted) >= 2


def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What became of one draft is learnt from at once, and decides whether the next is drawn."""
    monkeypatch.setattr(AdaptiveVerification, "soft", lambda self, sequences: False)
    monkeypatch.setattr(edges, "refit_due", lambda estimator, steps, waiting: waiting > 0)
    monkeypatch.setattr(edges, "EstimatorConfig", lambda **rest: EstimatorConfig(**rest, shrink=0.1, max_step=8.0))
    for name, value in (("_ENOUGH", 1), ("_PLAN_EVERY", 1), ("_PATIENCE", 0.0)):
        monkeypatch.setattr(verification, name, value)


def test_a_round_that_learnt_from_the_one_before_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    hasty(monkeypatch)
    error, drafted = law_error("model", monkeypatch, 2)
    assert error < 1e-6
    assert drafted >= {(0, 0), (1, 1)}


@pytest.mark.parametrize("drafter", ["model", "feature", "self"])
def test_drafts_that_stop_after_a_token_was_seen_are_caught(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def peeking(*args: Any, **options: Any) -> Steps[Draft]:
        draft = yield from draft_stepwise(*args, **options)
        unlikely = [
            place
            for place, (row, token) in enumerate(zip(draft.logits, draft.tokens, strict=True))
            if row[token] < row.max()
        ]
        return draft.first(min(unlikely, default=len(draft.tokens)))

    for module in (line, feature):
        monkeypatch.setattr(module, "draft_stepwise", peeking)
    error, _ = law_error(drafter, monkeypatch)
    assert error > 1e-3
    if drafter == "model":
        hasty(monkeypatch)
        error, _ = law_error(drafter, monkeypatch, 2)
        assert error > 1e-3
