from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import generate, model_of, pair_of, prompt_ids, tokenizer

import viasd
from viasd.errors import OptionError
from viasd.mask import LayerMask, ModelIdentity
from viasd.pair import Pair
from viasd.runtime import tiers
from viasd.runtime.config import DecodingConfig
from viasd.runtime.gates import Decision, Thresholds
from viasd.runtime.metrics import Counters
from viasd.runtime.target import TieredTarget
from viasd.runtime.tiers import TierReport, measure_tiers

MASK = LayerMask.even(8, 0.25)
CHEAP_SLIM = {"drafter": 1e-4, "slim": 1e-4, "full": 1.0, "escalation": 0.5, "plain": 0.9}
DEAR_SLIM = {"drafter": 1e-4, "slim": 1.0, "full": 1.0, "escalation": 1.0, "plain": 0.9}


def fresh(drafter: str = "model") -> Pair:
    """A pair on which nothing has been measured."""
    from viasd.testing import perturbed

    small: Any = perturbed(model_of("llama"), 0.1) if drafter == "model" else drafter
    return viasd.make_pair(model_of("llama"), tokenizer(), drafter=small)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIASD_CACHE", str(tmp_path))


def measured(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float], costs: list[float], **options: Any) -> Any:
    """A report on given times and given stage costs (drafter to slim, slim to full, drafter to full in order of call)."""
    given = iter(costs * 10)
    monkeypatch.setattr(tiers, "time_passes", lambda *_: dict(seconds))
    monkeypatch.setattr(tiers, "stage_cost", lambda p, q: torch.full((p.shape[0],), next(given)))
    pair = options.pop("pair", None) or fresh()
    return measure_tiers(pair, MASK, DecodingConfig(**options), options.get("mode") or "via")


# Order of calls: slim -> full, drafter -> full, drafter -> slim.
SHORTER, LONGER = [0.1, 1.0, 0.2], [0.5, 1.0, 0.6]


def test_the_slim_tier_stays_where_it_shortens_the_path_and_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    report = measured(monkeypatch, CHEAP_SLIM, SHORTER)
    assert report.keeps_slim
    assert report.delta == pytest.approx(0.7)
    assert report.per_token["cascade"] < report.per_token["sd"]
    assert "keeping the slim tier (Delta +0.700" in report.sentence()


def test_it_goes_where_it_is_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    report = measured(monkeypatch, DEAR_SLIM, SHORTER)
    assert not report.keeps_slim
    assert report.per_token["cascade"] > report.per_token["sd"]
    assert "leaving the slim tier out" in report.sentence()
    assert "--tiers 3 forces it" in report.sentence()


def test_it_goes_where_it_lengthens_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    report = measured(monkeypatch, CHEAP_SLIM, LONGER)
    assert report.delta == pytest.approx(-0.1)
    assert report.per_token["cascade"] < report.per_token["sd"]
    assert not report.keeps_slim


def test_a_drafter_that_proposes_nothing_decides_for_two_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "_proposal_rows", lambda *_: None)
    report = measured(monkeypatch, CHEAP_SLIM, SHORTER, pair=fresh("lookup"))
    assert report.delta is None
    assert not report.keeps_slim
    assert "the drafter proposed nothing" in report.sentence()


def test_slower_than_plain_is_said() -> None:
    report = TierReport({}, {}, 0.1, {"plain": 0.010, "sd": 0.012, "cascade": 0.011}, True)
    assert "both are estimated to be slower than plain decoding, cascade the less so" in report.sentence()
    assert "two tiers 12.0, three tiers 11.0, plain 10.0" in report.sentence()
    quick = TierReport({}, {}, 0.1, {"plain": 0.010, "sd": 0.012, "cascade": 0.009}, True)
    assert "slower" not in quick.sentence()


def test_predictions_by_hand() -> None:
    seconds = {"drafter": 1.0, "slim": 2.0, "full": 10.0, "escalation": 8.0, "plain": 9.0}
    decisions = [Decision.ACCEPT] * 3 + [Decision.ESCALATE]
    # R = 1/4, g = 2: 1 + 3/4 + 9/16 tokens; a block escalates with probability 1 - (3/4)^2.
    # Only an escalated block has a token of q's own; another one keeps at most two.
    escalated = 1 - 0.75**2
    tokens = escalated * (1 + 0.75 + 0.75**2) + (1 - escalated) * (1 + 0.75)
    expected = (2 * 1 + 2 + escalated * 8) / tokens
    assert tiers._cascade_seconds("via", 2, seconds, {}, decisions) == pytest.approx(expected)
    assert tiers._cascade_seconds("via", 2, seconds, {}, []) == float("inf")
    # The chain: three tokens leave q', and q adds one; or, with R = 1/2 before q', 1.75 do.
    for rejection, tokens in ((0.0, 4), (0.5, 2.75)):
        rates = {"drafter_slim": rejection, "slim_full": 0.0}
        assert tiers._cascade_seconds("lossless", 2, seconds, rates, []) == pytest.approx((2 + 2 + 8) / tokens)


def test_a_pair_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    report = TierReport({}, {}, 0.1, {"plain": 3.0, "sd": 2.0, "cascade": 1.0}, True)
    monkeypatch.setattr(tiers, "_measure", lambda *_: calls.append(1) or report)
    pair, config = fresh("lookup"), DecodingConfig()
    assert measure_tiers(pair, MASK, config, "via") is measure_tiers(pair, MASK, config, "via") is report
    assert len(calls) == 1
    for mask, other, mode in (
        (LayerMask.even(8, 0.5), config, "via"),
        (MASK, DecodingConfig(gamma=2), "via"),
        (MASK, config, "lossless"),
    ):
        measure_tiers(pair, mask, other, mode)
    assert len(calls) == 4
    measure_tiers(fresh("lookup"), MASK, config, "via")
    assert len(calls) == 5


@pytest.mark.parametrize("drafter", ["lookup", "self", "model"])
def test_real_measurements_are_plausible_and_leave_the_pair_as_it_was(drafter: str) -> None:
    pair = fresh(drafter)
    before = generate(pair, prompt_ids(), strategy="sd").token_ids
    report = measure_tiers(pair, MASK, DecodingConfig(), "via")
    for mode in ("lossless", "bounded"):
        per_token = measure_tiers(pair, MASK, DecodingConfig(), mode).per_token
        assert all(0 < seconds < float("inf") for seconds in per_token.values())
    assert set(report.seconds) == {"plain", "full", "slim", "escalation", "drafter"}
    assert all(s > 0 or (k == "drafter" and drafter == "lookup") for k, s in report.seconds.items())
    assert all(0 <= r <= 1 + 1e-6 for r in report.rejection.values())
    assert generate(pair, prompt_ids(), strategy="sd").token_ids == before


@torch.inference_mode()
def test_the_rows_compared_are_those_of_the_runtime() -> None:
    pair = fresh("self")
    tokens, first, q = tiers._write(pair, prompt_ids())
    assert (
        tokens[first:] == generate(pair, prompt_ids(), strategy="plain", max_new_tokens=len(tokens) - first).token_ids
    )
    assert q.argmax(dim=-1).tolist() == tokens[first:]
    # A route that skips nothing is the target itself, block by block.
    whole = tiers._block_rows(pair, LayerMask.even(8, 0.0).route, tokens, first, 6)
    torch.testing.assert_close(whole, q, rtol=1e-3, atol=1e-3)
    slim = tiers._block_rows(pair, MASK.route, tokens, first, 6)
    target = TieredTarget(pair.target, MASK.route, Counters())
    target.prefill(tokens[: first + 5])
    expected = torch.log_softmax(target.slim(tokens[: first + 11], 6), dim=-1)
    torch.testing.assert_close(slim[6:12], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("mode", [None, "lossless", "bounded"])
def test_auto_follows_the_report_and_gives_the_reason(keeps: bool, mode: str | None, monkeypatch: Any) -> None:
    report = TierReport({}, {}, 0.1, {"plain": 3.0, "sd": 2.0, "cascade": 1.0 if keeps else 4.0}, keeps)
    monkeypatch.setattr("viasd.runtime.settling.measure_tiers", lambda *_, **__: report)
    result = generate(pair_of("llama"), prompt_ids(), mask="even:0.25", mode=mode, max_new_tokens=6)
    assert result.strategy == ("cascade" if keeps else "sd")
    assert result.mode == {None: "via" if keeps else "lossless"}.get(mode, mode)
    assert result.mask == ("even:0.25" if keeps else None)
    assert report.sentence() in result.notes


def test_three_tiers_are_not_measured_when_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr("viasd.runtime.settling.measure_tiers", never)
    result = generate(pair_of("llama"), prompt_ids(), mask="even:0.25", tiers="3", max_new_tokens=4)
    assert result.strategy == "cascade"
    for options in ({"tiers": "2"}, {"strategy": "sd"}, {"strategy": "plain"}):
        with pytest.raises(OptionError, match="a mask is for a slim verifier"):
            generate(pair_of("llama"), prompt_ids(), mask="even:0.25", max_new_tokens=4, **options)


def test_a_recorded_delta_that_is_not_positive_spares_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("measured")

    pair = pair_of("llama")
    target = ModelIdentity.of(pair.target, "tiny")
    details = {"tier": {"delta": -0.5}, "gamma": 5}
    mask = LayerMask(MASK.keep, "searched", pair.name, target, details)
    monkeypatch.setattr("viasd.runtime.settling.measure_tiers", never)
    result = generate(pair, prompt_ids(), mask=mask, max_new_tokens=4)
    assert (result.strategy, result.mode, result.mask) == ("sd", "lossless", None)
    assert any("mask searched: the search found Delta -0.500 for this pair" in note for note in result.notes)
    assert generate(pair, prompt_ids(), mask=mask, max_new_tokens=4, tiers="3").strategy == "cascade"
    # Another pair, other weights, another block length, a positive Delta or none: measured.
    others = [
        replace(mask, pair="another"),
        replace(mask, target=replace(target, weights="0")),
        replace(mask, target=None),
        replace(mask, details={**details, "gamma": 4}),
        replace(mask, details={**details, "tier": {"delta": 0.1}}),
        replace(mask, details={"gamma": 5}),
    ]
    for other in others:
        with pytest.raises(AssertionError, match="measured"):
            generate(pair, prompt_ids(), mask=other, max_new_tokens=4)
    # The self drafter is another one where it skips another share than in the search.
    own = pair_of("llama", "self")
    known = replace(mask, pair=own.name)
    assert generate(own, prompt_ids(), mask=known, max_new_tokens=4).strategy == "sd"
    with pytest.raises(AssertionError, match="measured"):
        generate(own, prompt_ids(), mask=known, max_new_tokens=4, self_skip=0.3)


def test_what_was_measured_is_kept_for_the_next_process(monkeypatch: pytest.MonkeyPatch) -> None:
    first = measure_tiers(fresh("lookup"), MASK, DecodingConfig(), "via")

    def never(*_: Any) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(tiers, "_accepted", never)
    assert measure_tiers(fresh("lookup"), MASK, DecodingConfig(), "via") == first
    # The mode decides what follows, not what is measured.
    assert measure_tiers(fresh("lookup"), MASK, DecodingConfig(), "lossless").rejection == first.rejection
    for other in (DecodingConfig(gamma=3), DecodingConfig(thresholds=Thresholds(0.9, 0.1))):
        with pytest.raises(AssertionError, match="measured"):
            measure_tiers(fresh("lookup"), MASK, other, "via")
    with pytest.raises(AssertionError, match="measured"):
        measure_tiers(fresh("lookup"), MASK, DecodingConfig(), "via", greedy=True)
