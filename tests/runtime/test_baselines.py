"""Baselines of the literature: their published laws by exact enumeration, temperature 0, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from laws import PROMPT, Law, Table, decoded_law, largest_error, random_table, target_law
from tiny import generate, hf_greedy, model_of, pair_of, prompt_ids
from torch import Tensor

from viasd.deferral import READS_DRAFTER, RULES, DeferralRule, lossy_law
from viasd.draws import Draws, SeededDraws
from viasd.errors import OptionError
from viasd.mask import LayerMask
from viasd.routes import Route
from viasd.rows import Rows
from viasd.runtime import names
from viasd.runtime.drafters import Draft, HorizontalDrafter, PasslessDrafter, SelfDrafter, VerticalDrafter
from viasd.runtime.metrics import Counters
from viasd.runtime.strategies import (
    DeferringDecoding,
    SlimAlone,
    SpeculativeDecoding,
    Strategy,
    Workbench,
    lossy,
    rule_law,
)
from viasd.runtime.strategies.deferring import TargetLaw
from viasd.runtime.target import TieredTarget
from viasd.sampling import Ahead, Sampler, SamplingConfig
from viasd.testing import TableDrafter, TableTarget

EXACT = 1e-12
WARM = SamplingConfig(temperature=1.0)
GREEDY = SamplingConfig()
Q = random_table(1)
MORE = random_table(3, spread=1.5)


def P(prefix: tuple[int, ...]) -> Tensor:
    return Q(prefix) + MORE(prefix)


TARGET = TableTarget(Q, P)


def law_of(pi: Callable[[Tensor, Tensor], Tensor], length: int, config: SamplingConfig) -> Law:
    """Law of the next tokens when each is drawn from pi of the processed rows after its prefix."""
    sampler = Sampler(config)
    law: Law = {(): 1.0}
    for _ in range(length):
        grown: Law = {}
        for prefix, weight in law.items():
            text = (*PROMPT, *prefix)
            p, q = (sampler.ahead(text).row(table(text)).probs for table in (P, Q))
            assert p is not None
            assert q is not None
            row = pi(p[None], q[None])[0]
            for token, share in enumerate(row.tolist()):
                grown[(*prefix, token)] = weight * share
        law = grown
    return law


def deferring(law: TargetLaw, gamma: int) -> Callable[[Workbench], tuple[Strategy, Any]]:
    def make(bench: Workbench) -> tuple[Strategy, Any]:
        source = TableDrafter(P)
        return DeferringDecoding(bench, source, law, gamma=gamma), source

    return make


SAMPLING = {"plain": WARM, "cold": SamplingConfig(temperature=0.6), "top-k": SamplingConfig(temperature=1.0, top_k=2)}


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("alpha", [0.0, 0.3])
@pytest.mark.parametrize("name", RULES)
def test_a_deferral_rule_emits_exactly_its_law(name: str, alpha: float, sampling: str) -> None:
    rule, config = DeferralRule(name, alpha), SAMPLING[sampling]
    expected = law_of(rule.law, 2, config)
    for gamma in (1, 2) if sampling == "plain" else (2,):
        law = decoded_law(deferring(rule_law(rule), gamma), TARGET, 2, config, spare=1)
        assert largest_error(law, expected) < EXACT


def test_the_rules_differ_from_each_other_and_from_both_models() -> None:
    generator = torch.Generator().manual_seed(1)
    p, q = (torch.randn(200, 4, generator=generator).softmax(-1) for _ in range(2))
    laws = [p, q, *(DeferralRule(name, 0.2).law(p, q) for name in RULES)]
    for i, one in enumerate(laws):
        assert all(float((one - other).abs().max()) > 0.01 for other in laws[:i])


def test_rules_by_hand() -> None:
    p, q = torch.tensor([[0.5, 0.3, 0.2]]).double(), torch.tensor([[0.2, 0.7, 0.1]]).double()  # total variation 0.4
    kept, deferred = p, q
    for name, alpha, expected in (
        ("chow", 0.4, deferred),  # 0.5 < 0.6
        ("chow", 0.5, kept),
        ("diff", 0.1, deferred),  # 0.5 < 0.6
        ("diff", 0.3, kept),
        ("opt", 0.4, deferred),  # 0.5 < 0.7 - 0.16
        ("opt", 0.6, kept),  # 0.5 >= 0.7 - 0.24
    ):
        assert torch.allclose(DeferralRule(name, alpha).law(p, q), expected)
    # V1: p(v) < 0.4 for tokens 1 and 2; V2: q(v) < 0.4 for 0 and 2; V3: q(v) < 0.21 for 0 and 2.
    assert torch.allclose(DeferralRule("token-v1", 0.3).law(p, q), torch.tensor([[0.5, 0.0, 0.0]]) + 0.5 * q)
    for name, alpha in (("token-v2", 0.3), ("token-v3", 0.7)):
        assert torch.allclose(DeferralRule(name, alpha).law(p, q), torch.tensor([[0.0, 0.3, 0.0]]) + 0.7 * q)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("gamma", [1, 2])
def test_lossy_speculative_decoding_emits_exactly_its_published_law(alpha: float, gamma: int) -> None:
    expected = law_of(lambda p, q: lossy_law(p, q, alpha), 2, WARM)
    law = decoded_law(deferring(lossy(alpha), gamma), TARGET, 2, WARM, spare=1)
    assert largest_error(law, expected) < EXACT
    assert largest_error(law, target_law(Q, 2, WARM, 3)) > 1e-3


def test_the_lossy_law_is_a_distribution_within_its_bound() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.rand(200, 7, generator=generator, dtype=torch.float64) ** 3 for _ in range(2))
    q[:50, :3] = 0
    p[25:100, 2:5] = 0
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    for alpha in (0.0, 0.3, 0.8):
        pi = lossy_law(p, q, alpha)
        assert float((pi.sum(-1) - 1).abs().max()) < EXACT
        assert bool((pi <= q / (1 - alpha) + EXACT).all())
        assert float(((pi - q).abs().sum(-1) / 2).max()) <= alpha + EXACT
        # A token is either kept as often as the test allows, or raised to q / beta with one beta for the whole row.
        raised = pi > torch.minimum(p, q / (1 - alpha)) + 1e-9
        scale = torch.where(raised, pi / q, torch.nan)
        spread = torch.nan_to_num(scale, -torch.inf).amax(-1) - torch.nan_to_num(scale, torch.inf).amin(-1)
        assert float(spread[raised.any(-1)].max()) < 1e-9
    assert torch.allclose(lossy_law(p, q, 0.0), q)
    assert torch.allclose(lossy_law(q, q, 0.3), q)


class TableModel(TableDrafter):
    """A table as a drafter that can run several tokens in one pass."""

    device = torch.device("cpu")
    context_length = 100

    def __init__(self, p: Table) -> None:
        super().__init__(p)
        self.run: list[int] = []

    def begin(self, tokens: Any) -> int:
        self.run = list(tokens[:-1])
        return len(self.run)

    def rows(self, tokens: Any, n: int) -> Tensor:
        self.run += tokens
        return torch.stack([self._p(tuple(self.run[: len(self.run) - n + 1 + i])) for i in range(n)])

    def keep(self, length: int) -> None:
        del self.run[length:]


class Guess(PasslessDrafter):
    """Proposes the token that follows the last one in number, as a point mass: wrong often enough."""

    name = "guess"

    def propose(self, tokens: Any, limit: int, ahead: Ahead, draws: Draws) -> Draft:
        guess = [(tokens[-1] + 1 + i) % 3 for i in range(max(0, min(limit, 2)))]
        return Draft(guess, Rows.one_hot(guess), [1.0] * len(guess))

    def settle(self, tokens: Any) -> None: ...

    rewind = settle


def vertical(bench: Workbench) -> tuple[Strategy, Any]:
    drafter = VerticalDrafter(TableModel(P), bench.sampler, bench.counters)
    drafter._lookup = Guess()  # type: ignore[assignment]
    return SpeculativeDecoding(bench, drafter, gamma=2), drafter


def horizontal(bench: Workbench) -> tuple[Strategy, Any]:
    drafter = HorizontalDrafter(TableDrafter(P), Guess(), share=1)
    return SpeculativeDecoding(bench, drafter, gamma=2), drafter


@pytest.mark.parametrize("config", [WARM, SamplingConfig(temperature=0.7, repetition_penalty=1.5), GREEDY])
@pytest.mark.parametrize("make", [vertical, horizontal])
def test_cascades_of_drafters_are_lossless(make: Any, config: SamplingConfig) -> None:
    law = decoded_law(make, TARGET, 2, config, spare=1)
    assert largest_error(law, target_law(Q, 2, config, 3)) < EXACT


@pytest.mark.parametrize("limit", [0, 1, 2, 3])
def test_a_horizontal_cascade_proposes_no_more_than_it_may(limit: int) -> None:
    drafter = HorizontalDrafter(TableDrafter(P), Guess(), share=1)
    draft = drafter.propose([0], limit, Sampler(GREEDY).ahead([0]), SeededDraws(0))
    assert len(draft.tokens) == len(draft.rows) == limit


@pytest.mark.parametrize("config", [WARM, SamplingConfig(temperature=0.7, repetition_penalty=1.5)])
def test_what_a_vertical_cascade_proposes_has_the_drafters_law(config: SamplingConfig) -> None:
    benches: list[Workbench] = []

    def watched(bench: Workbench) -> tuple[Strategy, Any]:
        benches.append(bench)
        strategy, drafter = vertical(bench)
        strategy._gamma = 4  # type: ignore[attr-defined]  # so that a draft is made of several guesses
        return strategy, drafter

    # Against a target with the drafter's own law nothing is ever refused, on no path.
    law = decoded_law(watched, TableTarget(P, P), 4, config, spare=1)
    assert largest_error(law, target_law(P, 4, config, 3)) < EXACT
    assert all(bench.counters.kept == bench.counters.gated for bench in benches)
    assert max(bench.counters.kept for bench in benches) >= 3


def test_the_slim_verifier_alone_has_its_own_law() -> None:
    law = decoded_law(lambda bench: (SlimAlone(bench), None), TableTarget(Q, P), 2, WARM)
    assert largest_error(law, target_law(P, 2, WARM, 3)) < EXACT


# --- on tiny models ---------------------------------------------------------------------------------------------------

DRAFTED = {
    "vertical": {"strategy": "vertical"},
    "horizontal": {"strategy": "horizontal", "gamma": 4},
    "self-sd": {"strategy": "self-sd", "mask": "even:0.4"},
}


@pytest.mark.parametrize("kind", ["model", "self", "same"])
@pytest.mark.parametrize("name", DRAFTED)
def test_other_drafters_at_temperature_0_equal_transformers(name: str, kind: str) -> None:
    ids = prompt_ids()
    result = generate(pair_of("llama", kind), ids, **DRAFTED[name])
    assert result.token_ids == hf_greedy(model_of("llama"), ids, 40)
    assert result.lossless
    assert result.stats.drafted > 0
    assert result.mask == ("even:0.4" if name == "self-sd" else None)


@pytest.mark.parametrize(("kind", "more"), [("same", {}), ("self", {"self_skip": 0.0})])
def test_a_vertical_cascade_asks_its_drafter_less_often(kind: str, more: dict[str, Any]) -> None:
    # The drafter says what the target says, so anything it misremembers is refused.
    ids = prompt_ids("ab ab ab ab ab ab ab ab")
    calls = {
        name: generate(pair_of("llama", kind), ids, strategy=name, max_new_tokens=60, **options, **more).stats
        for name, options in (("sd", {"draft_length": "fixed"}), ("vertical", {}))
    }
    assert calls["vertical"].rejection_rate == calls["sd"].rejection_rate == 0
    assert calls["vertical"].drafter_calls < calls["sd"].drafter_calls


def test_self_speculation_through_a_whole_mask_accepts_everything() -> None:
    result = generate(pair_of("llama"), prompt_ids(), strategy="self-sd", mask="even:0")
    assert result.stats.rejection_rate == 0
    assert result.stats.kept == result.stats.drafted


def test_self_speculation_runs_half_layers() -> None:
    route = Route((True, False, True, False, True, True, True, True), ((1, "mlp"), (3, "attention")))
    pair, ids = pair_of("llama"), prompt_ids()
    mask = LayerMask(route.keep, partial=route.partial)
    assert generate(pair, ids, strategy="self-sd", mask=mask).token_ids == hf_greedy(model_of("llama"), ids, 40)
    with torch.inference_mode():
        target, slim = (TieredTarget(pair.target, r, Counters()) for r in (None, route))
        for each in (target, slim):
            each.prefill(ids[:-1])
        sampler = Sampler(GREEDY)
        draft = SelfDrafter(target, route).propose(ids, 1, sampler.ahead(ids), SeededDraws(0))
        torch.testing.assert_close(draft.logits[0], slim.slim(ids, 1)[0], rtol=1e-4, atol=1e-4)


def greedy_by_rule(name: str, alpha: float, ids: list[int], n: int) -> list[int]:
    """The rule at temperature 0, position by position: the drafter's argmax stands, or the verifier's takes its place."""
    tokens = list(ids)
    target, drafter = pair_of("llama", "model").target, pair_of("llama", "model").drafter
    assert drafter is not None
    with torch.inference_mode():
        for _ in range(n):
            q, p = (m.model(input_ids=torch.tensor([tokens])).logits[:, -1].softmax(-1) for m in (target, drafter))
            token = int(p.argmax())
            if name == "lossy":
                keep = bool(q[0, token] >= (1 - alpha) * q.max())
            else:
                keep = not bool(DeferralRule(name, alpha).refuses(p, q)[0, token])
            tokens.append(token if keep else int(q.argmax()))
    return tokens[len(ids) :]


@pytest.mark.parametrize("name", names.LOSSY)
def test_lossy_strategies_at_temperature_0(name: str) -> None:
    ids = prompt_ids()
    result = generate(pair_of("llama", "model"), ids, strategy=name, alpha=0.3, max_new_tokens=30)
    assert result.token_ids == greedy_by_rule(name, 0.3, ids, 30)
    assert not result.lossless
    assert result.mode == ("bounded" if name == "lossy" else "unbounded")
    assert "LOSSY" in result.notes[-1]
    assert ("0.7 of the probability" in result.loss) == (name == "lossy")


def test_the_slim_verifier_alone_is_said_to_be_lossy() -> None:
    result = generate(pair_of("llama"), prompt_ids(), strategy="slim", mask="even:0.25")
    assert set(result.tiers) == {"slim"}
    assert result.stats.unseen == result.stats.emitted
    assert "nothing bounds" in result.loss
    whole = generate(pair_of("llama"), prompt_ids(), strategy="slim", mask="even:0")
    assert whole.token_ids == hf_greedy(model_of("llama"), prompt_ids(), 40)


@pytest.mark.parametrize("name", [*READS_DRAFTER, "vertical", "horizontal"])
def test_what_needs_a_drafter_model_says_so(name: str) -> None:
    with pytest.raises(OptionError, match=f"strategy {name} .* but the drafter is prompt lookup alone"):
        generate(pair_of("llama"), prompt_ids(), strategy=name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "chow", "mode": "lossless"}, "strategy chow has a law of its own; leave out --mode lossless"),
        ({"strategy": "opt", "alpha": 1.0}, "alpha must be at least 0 and below 1, but got 1"),
        ({"strategy": "lossy", "alpha": 0.0}, "alpha must be above 0"),
        ({"strategy": "vertical", "alpha": 0.2}, "alpha only means something in bounded mode"),
        ({"strategy": "horizontal", "tiers": "3"}, "three tiers contradict strategy horizontal"),
        ({"strategy": "slim", "tiers": "2"}, "two tiers contradict strategy slim"),
        ({"strategy": "self-sd", "mode": "via"}, "mode via needs three tiers"),
        ({"strategy": "self-sd"}, "needs a mask"),
        ({"strategy": "diff", "mask": "even:0.25"}, "a mask is for a slim verifier"),
        ({"strategy": "vertical", "draft_min_prob": 0.5}, "draft_min_prob means nothing to a vertical cascade"),
    ],
)
def test_contradictions_of_the_baselines_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        generate(pair_of("llama", "model"), prompt_ids(), **options)


def test_names_agree() -> None:
    assert names.RULES == RULES
    for bad in (("chow", -0.1), ("chows", 0.1)):
        with pytest.raises(OptionError, match="must be"):
            DeferralRule(*bad)
