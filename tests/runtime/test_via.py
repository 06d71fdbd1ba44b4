from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import generate, hf_greedy, model_of, pair_of, prompt_ids

from viasd.draws import SeededDraws
from viasd.runtime.gates import Decision, RatioGate, Thresholds
from viasd.runtime.guard import Guard, GuardConfig
from viasd.runtime.metrics import Counters
from viasd.runtime.result import describe_loss
from viasd.runtime.session import Ending, cut, rounds
from viasd.runtime.strategies import Emission, GatedCascade, Workbench
from viasd.sampling import Sampler, SamplingConfig
from viasd.testing import TableDrafter, TableTarget

VIA: dict[str, Any] = {"strategy": "cascade", "mode": "via", "tiers": "3", "mask": "even:0.25", "max_new_tokens": 60}
RATIO: dict[str, Any] = {**VIA, "gate": "ratio", "audit": 0.0}
A, B, C = Decision.ACCEPT, Decision.REWRITE, Decision.ESCALATE


# --- one round at temperature 0, by hand ------------------------------------------------------------------------------


class Scripted(RatioGate):
    """A gate that gives the decisions of a script."""

    def __init__(self, decisions: list[Decision]) -> None:
        super().__init__(Thresholds())
        self.decisions = decisions
        self.learnt: list[tuple[list[int], list[float]]] = []

    def judge(self, slim_logits: torch.Tensor, draft: Any) -> list[Decision]:
        return self.decisions[: len(draft.tokens)]

    def learn(self, slim_logits: torch.Tensor, draft: Any, tokens: list[int], agreement: list[float]) -> None:
        self.learnt.append((tokens, agreement))


def says(tokens: list[int]) -> Any:
    """A table whose argmax after n tokens of the answer is ``tokens[n]``, whatever they were."""
    return lambda prefix: torch.nn.functional.one_hot(torch.tensor(tokens[len(prefix) - 1]), 10).double() * 9


def one_round(
    decisions: list[Decision], *, p: list[int], slim: list[int], q: list[int], audit: float = 0.0, recheck: bool = True
) -> tuple[Emission, Counters, Scripted]:
    counters, gate = Counters(), Scripted(decisions)
    target, drafter = TableTarget(says(q), says(slim)), TableDrafter(says(p))
    bench = Workbench(target, Sampler(SamplingConfig()), SeededDraws(0), counters)
    strategy = GatedCascade(bench, drafter, gate, gamma=3, audit=audit, recheck=recheck)
    return strategy.round([0], 9), counters, gate


def test_all_accepted_skips_the_full_verifier() -> None:
    out, counters, gate = one_round([A, A, A], p=[1, 2, 3, 4], slim=[5] * 4, q=[6] * 4)
    assert (out.tokens, out.tiers, out.drafted, out.unseen) == ([1, 2, 3], ["drafter"] * 3, [True] * 3, 3)
    assert (counters.full_calls, counters.escalated_rounds, counters.gated, counters.kept) == (0, 0, 3, 3)
    assert gate.learnt == []


def test_a_rewrite_that_differs_ends_the_block() -> None:
    out, counters, _ = one_round([A, B, A], p=[1, 2, 3, 4], slim=[5, 6, 7, 8], q=[9] * 4)
    assert (out.tokens, out.tiers, out.drafted, out.unseen) == ([1, 6], ["drafter", "slim"], [True, False], 2)
    assert (counters.gated, counters.kept, counters.rewrites) == (2, 1, 1)


def test_a_rewrite_that_equals_the_draft_goes_on() -> None:
    out, counters, _ = one_round([A, B, A], p=[1, 2, 3, 4], slim=[5, 2, 7, 8], q=[9] * 4)
    assert (out.tokens, out.tiers, counters.rewrites, counters.kept) == ([1, 2, 3], ["drafter"] * 3, 0, 3)


@pytest.mark.parametrize(
    ("q", "recheck", "tokens", "tiers", "unseen"),
    [
        ([1, 2, 3, 4], True, [1, 2, 3, 4], ["drafter", "drafter", "drafter", "full"], 0),
        ([1, 7, 3, 4], True, [1, 7], ["drafter", "full"], 0),
        ([8, 2, 3, 4], True, [8], ["full"], 0),
        ([1, 2, 9, 4], True, [1, 2, 9], ["drafter", "drafter", "full"], 0),
        ([1, 2, 3, 4], False, [1, 2, 3, 4], ["drafter", "drafter", "drafter", "full"], 1),
        ([8, 2, 3, 4], False, [1, 2, 3, 4], ["drafter", "drafter", "drafter", "full"], 1),
        ([8, 7, 3, 4], False, [1, 7], ["drafter", "full"], 1),
        ([8, 2, 9, 4], False, [1, 2, 9], ["drafter", "drafter", "full"], 1),
    ],
)
def test_an_escalation_at_the_second_token(
    q: list[int], recheck: bool, tokens: list[int], tiers: list[str], unseen: int
) -> None:
    out, counters, gate = one_round([A, C, A], p=[1, 2, 3, 5], slim=[6] * 4, q=q, recheck=recheck)
    assert (out.tokens, out.tiers, out.unseen) == (tokens, tiers, unseen)
    assert counters.escalated_rounds == 1
    assert gate.learnt == [([1, 2, 3], [float(a == b) for a, b in zip(q, (1, 2, 3), strict=False)])]
    assert counters.audit.blocks == []


@pytest.mark.parametrize("recheck", [True, False])
def test_an_audit_records_disagreement_and_corrects_only_with_recheck(recheck: bool) -> None:
    options: dict[str, Any] = {"p": [1, 2, 3, 4], "slim": [5, 6, 7, 8], "audit": 1.0, "recheck": recheck}
    out, counters, gate = one_round([A, A, A], q=[1, 7, 3, 9], **options)
    assert counters.audit.blocks == [(3, 1.0)]
    assert gate.learnt == [([1, 2, 3], [1.0, 0.0, 1.0])]
    assert out.tokens == ([1, 7] if recheck else [1, 2, 3])
    assert out.unseen == (0 if recheck else 3)
    out, counters, gate = one_round([A, B, A], q=[1, 6, 3, 9], **options)
    assert counters.audit.blocks == [(2, 0.0)]
    assert gate.learnt == [([1, 6], [1.0, 1.0])]
    assert out.tokens == ([1, 6, 3] if recheck else [1, 6])
    assert counters.escalated_rounds == 0


def test_an_audit_does_not_change_what_follows_when_it_does_not_correct() -> None:
    # Tables keep no cache: with separate random streams the answer is the same, audited or not.
    noise = [torch.randn(10, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(40)]

    def table(shift: int) -> Any:
        return lambda prefix: noise[(len(prefix) + sum(prefix)) % 37] + 0.3 * noise[(len(prefix) + shift) % 40]

    def answer(audit: float) -> list[int]:
        counters, tokens = Counters(), [0]
        target, drafter = TableTarget(table(3), table(2)), TableDrafter(table(1))
        sampler = Sampler(SamplingConfig(temperature=1.0))
        bench = Workbench(target, sampler, SeededDraws(5), counters)
        gate = RatioGate(Thresholds(0.6, 0.2))
        strategy = GatedCascade(bench, drafter, gate, gamma=3, recheck=False, audit=audit)
        for _ in rounds(strategy, target, drafter, sampler, tokens, Ending(60, frozenset())):
            pass
        assert bool(counters.audit.blocks) == (audit > 0)
        return tokens

    assert answer(0.0) == answer(0.5) == answer(1.0)


def test_cutting_an_emission() -> None:
    whole = Emission([4, 5, 6, 7], ["drafter"] * 3 + ["full"], torch.zeros(4, 9), [True] * 3 + [False], unseen=3)
    for room in range(1, 6):
        short, reason = cut(whole, room, frozenset())
        n = min(room, 4)
        assert (short.tokens, len(short.tiers), len(short.drafted), short.logits.shape[0]) == (
            [4, 5, 6, 7][:n],
            n,
            n,
            n,
        )
        assert short.unseen == min(3, n)
        assert reason == ("length" if room <= 4 else None)
    for room, eos, tokens, reason in (
        (9, {5}, [4, 5], "eos"),
        (2, {5}, [4, 5], "eos"),
        (1, {5}, [4], "length"),
        (9, {5, 4}, [4], "eos"),
        (9, {7}, [4, 5, 6, 7], "eos"),
    ):
        short, why = cut(whole, room, frozenset(eos))
        assert (short.tokens, why) == (tokens, reason)


# --- whole answers ----------------------------------------------------------------------------------------------------


def test_a_guard_that_is_not_ready_gives_the_targets_own_text() -> None:
    for drafter in ("lookup", "model", "self"):
        result = generate(pair_of("llama", drafter), prompt_ids(), guard=Guard(GuardConfig(0.5, 10**6)), **VIA)
        assert result.token_ids == hf_greedy(model_of("llama"), prompt_ids(), 60)
        assert result.stats.unseen == 0
        assert result.stats.escalated_rounds == sum(1 for _ in range(result.stats.slim_calls))
        assert result.notes[-1] == "LOSSY mode via, but the full verifier checked every token of this answer"
        assert not result.lossless


def test_a_guard_goes_on_learning_over_several_answers() -> None:
    guard, pair = Guard(GuardConfig(max_disagreement=0.3)), pair_of("llama", "same")
    first = generate(pair, prompt_ids(), guard=guard, **VIA)
    assert first.stats.unseen == 0
    assert guard.estimator.observations == first.stats.drafted < 96
    for _ in range(3):
        last = generate(pair, prompt_ids(), guard=guard, **VIA)
    assert guard.ready
    assert last.stats.unseen > 0
    assert last.stats.full_calls < first.stats.full_calls
    assert generate(pair, prompt_ids(), **VIA).stats.unseen == 0  # a fresh one knows nothing


def test_a_guard_hears_of_every_position_of_a_block_before_it_lets_any_pass() -> None:
    guard = Guard(GuardConfig(max_disagreement=0.02))
    for _ in range(4):
        generate(pair_of("llama", "model", noise=0.05), prompt_ids(), guard=guard, **VIA)
    start = guard.estimator.config.intercept
    assert all(abs(b - start) > 1e-3 for b in guard.estimator.intercepts[:5])


def test_fixed_thresholds_skip_the_full_verifier_and_say_that_nothing_bounds_the_loss() -> None:
    result = generate(pair_of("llama", "model", noise=0.05), prompt_ids(), **RATIO)
    stats = result.stats
    assert 0 < stats.unseen <= stats.emitted
    assert stats.full_calls < stats.rounds
    assert any("gate ratio: no guard" in note for note in result.notes)
    assert "LOSSY (via)" in result.notes[-1]
    assert "none of such blocks was audited" in result.notes[-1]
    assert result.loss == result.notes[-1]


def test_audits_are_reported_with_their_interval() -> None:
    result = generate(pair_of("llama", "model", noise=0.05), prompt_ids(), **{**RATIO, "audit": 1.0, "recheck": False})
    audit = result.stats.audit
    assert len(audit.blocks) == result.stats.rounds - result.stats.escalated_rounds
    assert audit.tokens > 0
    low, high = audit.interval
    assert 0 <= low <= audit.disagreed / audit.tokens <= high <= 1
    assert "audited disagreement" in result.notes[-1]


def test_audited_disagreement_at_a_temperature_is_a_total_variation() -> None:
    options = {**RATIO, "audit": 1.0, "recheck": False, "temperature": 1.0}
    blocks = generate(pair_of("llama", "model", noise=0.05), prompt_ids(), **options).stats.audit.blocks
    assert all(0 <= d <= n for n, d in blocks)
    assert any(d != round(d) for _, d in blocks)
    # Nothing skipped and nothing but q's own argmax kept: q' = q, so rewrites and kept tokens agree with it.
    same = {**options, "mask": "even:0", "thresholds": Thresholds(1.0, 0.0)}
    for _, disagreement in generate(pair_of("llama", "same"), prompt_ids(), **same).stats.audit.blocks:
        assert disagreement < 4


def test_every_lossy_output_says_so() -> None:
    assert describe_loss("lossless", Counters(), True) == "lossless: same law as the target alone"
    for mode in ("bounded", "via"):
        assert describe_loss(mode, Counters(unseen=3, emitted=5), False, 0.2).startswith("LOSSY")
    for options in (
        {"strategy": "sd", "draft_length": "fixed", "mode": "bounded", "alpha": 0.25},
        {"strategy": "cascade", "mode": "bounded", "alpha": 0.25, "tiers": "3", "mask": "even:0.25"},
    ):
        for temperature, promise in ((0.0, "at least 0.75 of the probability"), (1.0, "total variation 0.25")):
            result = generate(pair_of("llama"), prompt_ids(), max_new_tokens=5, temperature=temperature, **options)
            assert "LOSSY (bounded)" in result.notes[-1]
            assert promise in result.notes[-1]
        assert not result.lossless
    lossless = generate(pair_of("llama"), prompt_ids(), max_new_tokens=5, strategy="sd")
    assert not any("LOSSY" in note for note in lossless.notes)


def test_without_a_mask_the_answer_is_lossless_and_says_why() -> None:
    result = generate(pair_of("llama"), prompt_ids(), max_new_tokens=5)
    assert (result.strategy, result.mode, result.lossless, result.mask) == ("sd", "lossless", True, None)
    assert any("no mask is used for this target" in note for note in result.notes)


@pytest.mark.parametrize("alpha", [0.2, 0.9])
def test_bounded_greedy_output_keeps_its_promise(alpha: float) -> None:
    strayed = 0
    for options in ({"strategy": "sd"}, {"strategy": "cascade", "tiers": "3", "mask": "even:0.25"}):
        ids = prompt_ids()
        result = generate(pair_of("llama", "model"), ids, mode="bounded", alpha=alpha, **options)
        with torch.no_grad():
            logits = model_of("llama")(input_ids=torch.tensor([[*ids, *result.token_ids]])).logits[0]
        rows = logits[len(ids) - 1 : -1].softmax(-1)
        ratio = rows.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0] / rows.max(dim=-1).values
        assert float(ratio.min()) >= 1 - alpha - 1e-4
        strayed += int((ratio < 1 - 1e-6).sum())
    assert strayed > 0 or alpha < 0.5
