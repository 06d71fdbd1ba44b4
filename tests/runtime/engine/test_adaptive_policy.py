"""Adaptive Verification in the engine: laws with the real policy, outputs, what is counted, and when it keeps out."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from batchlaws import Toy
from features import feature_pair
from laws import PROMPT, random_table
from tiny import generate, hf_greedy, model_of, pair_of, prompt_ids

from viasd.errors import OptionError
from viasd.estimator import LogisticEstimator
from viasd.runtime import assembly as assembly_module
from viasd.runtime.adaptive.costs import BatchCosts
from viasd.runtime.adaptive.verification import AdaptiveConfig, Offer
from viasd.runtime.costs import CostTable
from viasd.runtime.drafters import Draft, ModelLine
from viasd.runtime.drafters.stepwise import draft_stepwise
from viasd.runtime.engine import Engine
from viasd.runtime.engine import adaptive as policy_module
from viasd.runtime.engine.adaptive import AdaptivePolicy, block_features
from viasd.runtime.engine.policy import AdmitAll, Block
from viasd.runtime.metrics import Counters
from viasd.runtime.passes import Admission, FullPass, Judged, Steps
from viasd.runtime.strategies import ChainedCascade, SpeculativeDecoding, Workbench
from viasd.sampling import Sampler, SamplingConfig
from viasd.testing import EnumeratingDraws, TableTarget

EXACT = 1e-12
STEEP = {1: 1.0, 2: 1.0, 3: 1.2, 4: 1.45, 5: 1.7, 6: 2.0, 8: 2.7}
FREE = BatchCosts(2, 8, STEEP, {n: 0.1 * s for n, s in STEEP.items()}, {})
COSTLY = BatchCosts(2, 8, STEEP, {n: 0.1 * s for n, s in STEEP.items()}, {1: 0.08, 2: 0.12})


# --- laws -------------------------------------------------------------------------------------------------------------


class SteppedTable(ModelLine):
    """A table that drafts step by step, as a model does: every row is asked for, and drafts may be stopped."""

    def __init__(self, p: Any) -> None:
        self.name = "table"
        self.stop = None
        self._p = p
        self._run: list[int] = []

    def drafting(self, tokens: Sequence[int], limit: int, ahead: Any, draws: Any) -> Steps[Draft]:
        self._run = list(tokens[:-1])
        return draft_stepwise(
            self, tokens[-1:], limit, ahead, draws, min_confidence=0.0, stop_tokens=frozenset(), stop=self.stop
        )

    def rows(self, tokens: Sequence[int], n: int) -> torch.Tensor:
        self._run += tokens
        return self._p(tuple(self._run))[None]

    def begin(self, tokens: Sequence[int]) -> int:
        return len(tokens) - 1

    def keep(self, length: int) -> None: ...

    def line(self, tokens: Sequence[int]) -> Any: ...

    def ran(self, n: int) -> None: ...

    def warm(self, tokens: Sequence[int], keep: int) -> bool:
        return False

    def rewind(self, tokens: Sequence[int]) -> None: ...

    def settle(self, tokens: Sequence[int]) -> None: ...


def sequences(seed: int) -> list[Toy]:
    found = []
    for r in range(2):
        q, a, b = (random_table(100 * seed + 10 * r + i, 2, s) for i, s in ((0, 2.0), (1, 1.2), (2, 0.7)))
        found.append(Toy(lambda x, q=q, a=a: q(x) + a(x), q, lambda x, q=q, b=b: q(x) + b(x)))
    return found


def answer_of(toy: Toy, strategy: str, drafter: SteppedTable) -> Any:
    config = SamplingConfig(temperature=1.0)
    return SimpleNamespace(
        plan=SimpleNamespace(strategy="cascade" if strategy == "chain" else strategy, mode="lossless"),
        sampler=Sampler(config),
        config=SimpleNamespace(sampling=config, seed=None, decoding=SimpleNamespace(gamma=2)),
        counters=Counters(),
        tokens=list(PROMPT),
        drafter=drafter,
        target=SimpleNamespace(route=None),
    )


def one_step(toys: list[Toy], strategy: str, policy: Any, draws: Any, gamma: int) -> list[tuple[int, ...]]:
    """One step of the engine's order of work, over tables; what each sequence emits."""
    answers, rounds = [], []
    for toy in toys:
        drafter = SteppedTable(toy._tables["p"])
        answer = answer_of(toy, strategy, drafter)
        bench = Workbench(TableTarget(toy._tables["q"], toy._tables["slim"]), answer.sampler, draws, answer.counters)
        made: Any = (
            ChainedCascade(bench, drafter, gamma=gamma)
            if strategy == "chain"
            else SpeculativeDecoding(bench, drafter, gamma=gamma)
        )
        answers.append(answer)
        rounds.append(made.steps(list(PROMPT), 9))
    policy.begin(list(enumerate(answers)))
    work: list[Any] = [None] * len(toys)
    out: list[Any] = [None] * len(toys)

    def advance(r: int, reply: Any) -> None:
        try:
            work[r] = rounds[r].send(reply)
            while isinstance(work[r], Judged):
                policy.judged(r, answers[r], work[r])
                work[r] = rounds[r].send(None)
        except StopIteration as end:
            work[r], out[r] = None, tuple(end.value.tokens)

    for r in range(len(toys)):
        advance(r, None)
    while any(work):
        passes = [r for r, w in enumerate(work) if w is not None and not isinstance(w, Admission | FullPass)]
        waiting = [r for r, w in enumerate(work) if isinstance(w, Admission)]
        if passes:
            for r in passes:
                advance(r, work[r].run())
        elif waiting:
            to_slim = [r for r in waiting if work[r].verifier == "slim"] or waiting
            lengths = policy.admit([Block(r, answers[r], work[r]) for r in to_slim], len(toys))
            for r, n in zip(to_slim, lengths, strict=True):
                advance(r, n)
        else:
            for r in [r for r, w in enumerate(work) if w is not None]:
                advance(r, work[r].run())
    return out


def warmed(strategy: str, costs: BatchCosts, toys: list[Toy], gamma: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A policy that has seen a step or two of these sequences."""
    monkeypatch.setattr(policy_module, "batch_costs", lambda *_: costs)
    policy = AdaptivePolicy(SimpleNamespace(), 2, "on")  # type: ignore[arg-type]
    for _ in range(2):
        one_step(toys, strategy, policy, next(EnumeratingDraws().paths()), gamma)
    return policy


@pytest.mark.parametrize("strategy", ["sd", "chain"])
@pytest.mark.parametrize("costs", [FREE, COSTLY], ids=["free drafts", "costly drafts"])
def test_the_joint_law_of_two_sequences_is_exactly_their_targets(
    strategy: str, costs: BatchCosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = set()
    for seed in (1, 2):
        toys = sequences(seed)
        policy = warmed(strategy, costs, toys, 2, monkeypatch)
        law = np.zeros([8, 8])
        for draws in EnumeratingDraws().paths():
            now = copy.deepcopy(policy)
            one, two = one_step(toys, strategy, now, draws, 2)
            lengths.add((len(one), len(two)))
            parts = [
                toy.completed((*PROMPT, *out), 1 + 3)[:8]  # sequences that begin with the prompt's 0
                for toy, out in zip(toys, (one, two), strict=True)
            ]
            law += draws.weight * np.multiply.outer(*parts)
        expected = np.multiply.outer(*(toy.completed(PROMPT, 1 + 3)[:8] for toy in toys))
        assert abs(law.sum() - 1) < 1e-9
        assert np.abs(law - expected).max() < EXACT
    assert len(lengths) >= 3


def test_a_policy_that_took_sampled_sequences_for_greedy_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    dear = {1: 1.0, 2: 1.0, 3: 1.45, 4: 1.5, 5: 1.95, 6: 2.0, 8: 2.6}
    costs = BatchCosts(2, 8, dear, {n: 0.1 * s for n, s in dear.items()}, {})
    worst = 0.0
    for seed in range(1, 5):
        toys = sequences(seed)
        policy = warmed("sd", costs, toys, 2, monkeypatch)
        monkeypatch.setattr(policy_module, "Offer", lambda s, f, _greedy: Offer(s, f, True))
        law = np.zeros([8, 8])
        for draws in EnumeratingDraws().paths():
            out = one_step(toys, "sd", copy.deepcopy(policy), draws, 2)
            parts = [toy.completed((*PROMPT, *o), 4)[:8] for toy, o in zip(toys, out, strict=True)]
            law += draws.weight * np.multiply.outer(*parts)
        expected = np.multiply.outer(*(toy.completed(PROMPT, 4)[:8] for toy in toys))
        worst = max(worst, float(np.abs(law - expected).max()))
        monkeypatch.undo()
    assert worst > 1e-3


# --- outputs ----------------------------------------------------------------------------------------------------------

STRATEGIES: dict[str, dict[str, Any]] = {
    "sd": {"strategy": "sd"},
    "chain": {"strategy": "cascade", "mode": "lossless", "tiers": "3"},
    "chain2": {"strategy": "cascade", "mode": "lossless", "tiers": "3", "slim_rounds": 2},
    "via": {"strategy": "cascade", "mode": "via", "tiers": "3", "max_disagreement": 0.0},
    "plain": {"strategy": "plain"},
}


def table(slope: float, drafter: float = 0.0, context: int = 8) -> BatchCosts:
    full = {n: 1 + slope * n for n in range(1, 60)}
    return BatchCosts(8, context, full, {n: 0.3 * s for n, s in full.items()}, {1: drafter} if drafter else {})


def served(pair: Any, n: int = 5, concurrency: int = 4, adaptive: str = "on", **options: Any) -> tuple[Any, list[Any]]:
    options = {"max_new_tokens": 30, "ignore_eos": True, "gamma": 4, **options}
    engine = Engine(pair, mask="even:0.3", concurrency=concurrency, adaptive=adaptive)
    seeds = options.pop("seeds", [None] * n)
    numbers = [engine.add(prompt_ids()[: 8 + i], seed=seeds[i], **options) for i in range(n)]
    for _ in engine.stream():
        pass
    results = [engine.results[number] for number in numbers]
    assert [r.error for r in results] == [None] * n
    assert all(r.stats.check() == [] for r in results)
    return engine, results


@pytest.mark.parametrize("drafter", ["model", "self", "lookup"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_greedy_outputs_are_those_of_the_target_alone(name: str, drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module, "batch_costs", lambda *_: table(0.1, 0.0 if drafter == "lookup" else 0.1))
    _, results = served(pair_of("llama", drafter, noise=0.1), temperature=0.0, **STRATEGIES[name])
    for i, result in enumerate(results):
        assert result.token_ids == hf_greedy(model_of("llama"), prompt_ids()[: 8 + i], 30)
    counts = sum((r.stats.adaptive.offered for r in results), 0)
    assert bool(counts) == (name not in ("plain", "via"))


def test_sampled_outputs_are_the_same_for_the_same_company(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module, "batch_costs", lambda *_: table(0.1, 0.05))
    pair = pair_of("llama", "model", noise=0.1)
    one, two = (
        [r.token_ids for r in served(pair, temperature=1.0, seeds=range(5), strategy="sd")[1]] for _ in range(2)
    )
    assert one == two


def test_a_request_that_names_its_seed_is_left_in_peace_by_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module, "batch_costs", lambda *_: table(1.0, 0.05))
    pair = pair_of("llama", "model", noise=0.1)
    options = {"temperature": 1.0, "strategy": "sd", "seeds": range(5), "draft_length": "fixed"}
    _, alone = served(pair, adaptive="off", **options)
    engine, left = served(pair, adaptive="auto", **options)
    assert [r.token_ids for r in left] == [r.token_ids for r in alone]
    assert all(r.stats.adaptive.admitted == r.stats.adaptive.offered > 0 for r in left)
    assert engine.policy.edges["drafter->full"].estimator.observations > 0  # but learnt from
    _, steered = served(pair, adaptive="auto", temperature=1.0, strategy="sd")
    assert sum(r.stats.adaptive.offered for r in steered) < sum(r.stats.adaptive.offered for r in left)


@pytest.mark.parametrize("drafter", ["model", "lookup"])
def test_a_sampled_request_that_names_its_seed_says_what_it_says_alone(
    drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_module, "batch_costs", lambda *_: table(1.0, 0.05))
    # Alone it chooses its lengths by these costs: longer blocks pay, but not whole ones.
    paced = CostTable(128, {n: 1 + 0.3 * max(0, n - 2) for n in range(1, 9)}, {}, {}, 0.01)
    monkeypatch.setattr(assembly_module, "cost_table", lambda *_: paced)
    pair = pair_of("llama", drafter, noise=0.1)
    options: dict[str, Any] = {"temperature": 1.0, "strategy": "sd"}
    _, answers = served(pair, adaptive="auto", seeds=range(5), **options)
    for i, answer in enumerate(answers):
        alone = generate(pair, prompt_ids()[: 8 + i], max_new_tokens=30, gamma=4, **{**options, "seed": i})
        assert answer.token_ids == alone.token_ids
        assert answer.stats.gated == alone.stats.gated


@pytest.mark.parametrize(("strategy", "lookup_first"), [("sd", True), ("horizontal", False)])
def test_a_drafter_made_of_two_is_not_steered_and_that_is_said(
    strategy: str, lookup_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_module, "batch_costs", lambda *_: pytest.fail("measured"))
    pair = feature_pair(lookup_first=lookup_first)
    _, results = served(pair, 3, temperature=0.0, strategy=strategy)
    assert all(r.stats.adaptive.admitted == r.stats.adaptive.offered > 0 for r in results)
    assert all(any("does not steer" in note for note in r.notes) for r in results)
    _, quiet = served(pair, 3, adaptive="auto", temperature=0.0, strategy=strategy)
    assert [r.token_ids for r in quiet] == [r.token_ids for r in results]
    assert not any("does not steer" in note for r in quiet for note in r.notes)


def test_steep_costs_are_heeded_and_flat_ones_trim_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_of("llama", "lookup")
    shares = []
    for slope in (0.0, 0.3, 3.0):
        monkeypatch.setattr(policy_module, "batch_costs", lambda *_, s=slope: table(s))
        _, results = served(pair, temperature=0.0, strategy="sd")
        shares.append(sum(r.stats.adaptive.admitted for r in results) / sum(r.stats.adaptive.offered for r in results))
    assert shares[0] == 1.0
    assert shares[0] > shares[1] > shares[2]


@pytest.mark.parametrize("drafter", ["model", "self", "feature"])
def test_what_does_not_pay_is_not_even_drafted(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = feature_pair() if drafter == "feature" else pair_of("llama", drafter, noise=0.1)
    calls = []
    for seconds in (0.001, 30.0):
        monkeypatch.setattr(policy_module, "batch_costs", lambda *_, s=seconds: table(0.01, s))
        _, results = served(pair, temperature=0.0, strategy="sd")
        calls.append(sum(r.stats.drafter_calls for r in results))
    assert calls[0] > 0 == calls[1]  # whatever may be hoped of it


def test_auto_keeps_out_where_it_can_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    steep_at_last = {**dict.fromkeys(range(1, 20), 1.0), 20: 1.015}
    monkeypatch.setattr(policy_module, "batch_costs", lambda *_: BatchCosts(4, 8, steep_at_last, {}, {}))
    pair = pair_of("llama", "lookup")
    limits: list[Any] = []
    begin = policy_module.AdaptiveVerification.begin
    monkeypatch.setattr(
        policy_module.AdaptiveVerification, "begin", lambda self, s: (begin(self, s), limits.append(self._costs))
    )
    _, results = served(pair, 3, 4, "auto", temperature=0.0, strategy="sd")
    assert not any(limits)
    assert all(r.stats.adaptive.admitted == r.stats.adaptive.offered for r in results)
    served(pair, 3, 4, "on", temperature=0.0, strategy="sd")
    assert any(limits)


def test_a_request_alone_chooses_its_lengths_itself() -> None:
    engine, results = served(pair_of("llama", "lookup"), 2, 1, "auto", temperature=0.0, strategy="sd")
    assert isinstance(engine.policy, AdmitAll)
    assert engine.adaptive_state() is None
    assert not any(r.stats.adaptive.offered for r in results)


def test_nothing_is_measured_for_a_sequence_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module, "batch_costs", lambda *_: pytest.fail("measured"))
    served(pair_of("llama", "model", noise=0.1), 3, 1, "auto", temperature=0.0, strategy="sd")
    served(pair_of("llama", "lookup"), 3, 4, "on", temperature=0.0, strategy="plain")


def test_costs_are_those_of_the_batch_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(policy_module, "batch_costs", lambda *args: asked.append(args) or table(0.1))
    pair = pair_of("llama", "self")
    served(pair, 3, 4, "on", temperature=0.0, **STRATEGIES["chain"])
    _, route, concurrency, context, gamma, own = asked[-1]
    assert (concurrency, gamma) == (4, 4)
    assert route is not None
    assert own is not None
    assert set(own.layers) <= set(route.layers)
    assert context >= len(prompt_ids()[:8])


def test_costs_are_those_of_the_mean_context(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(policy_module, "batch_costs", lambda *args: asked.append(args[3]) or table(0.1))
    pair = pair_of("llama", "model")
    engine = Engine(pair, concurrency=3, adaptive="on")
    for length in (4, 8, 60):
        engine.add((prompt_ids() * 8)[:length], max_new_tokens=4, temperature=0.0, strategy="sd")
    while not asked:  # their prompts are run first
        engine.step()
    assert asked[0] == (4 + 8 + 60) // 3


# --- learning ---------------------------------------------------------------------------------------------------------


def test_what_is_learnt_is_counted_saved_and_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module, "batch_costs", lambda *_: table(0.001))
    pair = pair_of("llama", "model", noise=0.05)
    engine, results = served(pair, 6, temperature=0.0, strategy="sd", max_new_tokens=60)
    total = Counters()
    for result in results:
        total.merge(result.stats)
    counts = total.adaptive.reliability["drafter->full"]
    assert sum(counts.judged) == total.gated
    assert sum(counts.kept) == total.kept
    edge = engine.policy.edges["drafter->full"]
    assert edge.estimator.observations == total.gated
    assert total.adaptive.coefficients["drafter->full"] == edge.coefficients
    edge.estimator.refit()
    assert edge.coefficients[:2] != [0.5, -0.2]
    again = Engine(pair, concurrency=4, adaptive="auto", adaptive_state=engine.adaptive_state()).policy
    assert isinstance(again, AdaptivePolicy)
    assert again.edges["drafter->full"].coefficients == edge.coefficients
    assert again.two_tiers.edge is again.edges["drafter->full"]
    for wrong in ({}, {"edges": 3}, {"edges": [{}]}):
        with pytest.raises(OptionError):
            AdaptivePolicy(pair, 4, "on", state=wrong)


def test_nothing_is_learnt_from_lossy_verdicts_nor_where_processors_were_at_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policy_module, "batch_costs", lambda *_: table(0.001))
    pair = pair_of("llama", "model", noise=0.05)
    for options in (
        {"mode": "bounded", "alpha": 0.3, "temperature": 1.0},
        {"repetition_penalty": 1.2, "temperature": 0.0},
    ):
        engine, results = served(pair, 3, strategy="sd", **options)
        assert engine.policy.edges["drafter->full"].estimator.observations == 0
        assert not any(r.stats.adaptive.reliability for r in results)
        assert all(r.stats.adaptive.offered for r in results)


def test_labels_are_chances_in_small_batches_and_outcomes_in_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module, "batch_costs", lambda *_: table(0.001))
    pair = pair_of("llama", "model", noise=0.3)
    labels: dict[int, list[float]] = {0: [], 8: []}
    for below, seen in labels.items():
        monkeypatch.setattr(policy_module, "AdaptiveConfig", lambda b=below: AdaptiveConfig(soft_below=b))
        observe = LogisticEstimator.observe

        def watched(self: Any, f: Any, k: Any, y: Any, weight: Any = 1.0, seen: Any = seen, o: Any = observe) -> None:
            seen.extend(np.asarray(y, dtype=float).tolist())
            o(self, f, k, y, weight)

        monkeypatch.setattr(LogisticEstimator, "observe", watched)
        served(pair, 3, temperature=1.0, strategy="sd")
        monkeypatch.setattr(LogisticEstimator, "observe", observe)
    assert set(labels[0]) <= {0.0, 1.0}
    assert any(0 < y < 1 for y in labels[8])


def test_features_of_rows_and_of_lookups_shares() -> None:
    rows = [torch.tensor([2.0, 0.0]), torch.tensor([0.0, 1.0])]
    assert block_features(Admission("drafter", "full", [0, 1], rows, [0.9, 0.1]), 1.0) == pytest.approx([2.0, 1.0])
    assert block_features(Admission("drafter", "full", [0, 1], rows), 0.5) == pytest.approx([4.0, 2.0])
    assert block_features(Admission("slim", "full", [0, 1], torch.stack(rows)), 0.0) == pytest.approx([2.0, 1.0])
    shares = [1.0, 0.75, 0.5, 0.01, 0.0]
    found = block_features(Admission("drafter", "full", [1] * 5, [], shares), 1.0)
    assert found == pytest.approx([2.0, math.log(3), 0.0, -2.0, -2.0])
    # A block whose first token came from a model and the others from lookup.
    assert block_features(Admission("drafter", "full", [0, 1], rows[:1], [0.9, 0.5]), 1.0) == pytest.approx([2.0, 0.0])


def test_options_are_checked() -> None:
    pair = pair_of("llama", "lookup")
    with pytest.raises(OptionError, match="adaptive must be one of"):
        Engine(pair, adaptive="maybe")
    with pytest.raises(OptionError, match="either a policy or adaptive"):
        Engine(pair, adaptive="on", policy=AdmitAll())
    with pytest.raises(OptionError, match="which is off"):
        Engine(pair, adaptive_state={"edges": []})
    with pytest.raises(OptionError):
        AdaptivePolicy(pair, 4, "off")
