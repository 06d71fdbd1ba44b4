"""Laws of AdaDecode, exact: every outcome of every draw is enumerated over tables in the target's place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from laws import PROMPT, constant_table, decoded_law, largest_error, random_table, target_law

from viasd.estimator import EstimatorConfig, LogisticEstimator, logit_of_max
from viasd.runtime.exits import CalibratedExits, ExitCosts, ExitRule, FixedExits
from viasd.runtime.strategies import AdaDecode, Strategy, Workbench
from viasd.sampling import SamplingConfig
from viasd.testing import TableTarget, TableWave

EXACT = 1e-12
SAMPLING = SamplingConfig(temperature=1.0)
Q = random_table(1)
NOISE, MORE = random_table(2, spread=1.5), random_table(3, spread=0.8)
HEADS: dict[int, Any] = {1: lambda x: Q(x) + NOISE(x), 2: lambda x: Q(x) + MORE(x)}
TARGET = TableTarget(Q, Q)


def ada(rule: Callable[[], ExitRule], max_pending: int = 2, *, stop: int | None = None, heads: Any = None) -> Any:
    def make(bench: Workbench) -> tuple[Strategy, Any]:
        stops = frozenset() if stop is None else frozenset({stop})
        wave = TableWave(Q, HEADS if heads is None else heads, layers=4)
        return AdaDecode(bench, wave, rule(), max_pending=max_pending, stop_tokens=stops), None

    return make


def calibrated() -> CalibratedExits:
    """A rule under which some rows exit at each place and others nowhere, refitted after every observation."""
    start = LogisticEstimator(EstimatorConfig(slopes=(1.0,), intercept=-1.3, positions=2)).state()
    return CalibratedExits(ExitCosts(4, 0.1, 0.5), (1, 2), 2, start)


RULES: dict[str, Any] = {
    "never": ada(lambda: FixedExits(1.0)),
    "always": ada(lambda: FixedExits(0.0)),
    "always-1": ada(lambda: FixedExits(0.0), 1),
    "some": ada(lambda: FixedExits(0.6)),
    "some-stop": ada(lambda: FixedExits(0.5), stop=1),
    "few": ada(lambda: FixedExits(0.8)),
    "calibrated": ada(calibrated),
    "calibrated-1": ada(calibrated, 1),
}


@pytest.mark.parametrize("name", RULES)
def test_the_outcome_has_exactly_the_targets_law(name: str) -> None:
    law = decoded_law(RULES[name], TARGET, 3, SAMPLING)
    assert largest_error(law, target_law(Q, 3, SAMPLING, 3)) < EXACT


@pytest.mark.parametrize(
    "config",
    [
        SamplingConfig(temperature=0.7, top_k=2),
        SamplingConfig(temperature=1.3, top_p=0.8),
        SamplingConfig(temperature=1.0, min_p=0.3, repetition_penalty=1.4),
    ],
)
@pytest.mark.parametrize("name", ["always", "some", "calibrated"])
def test_with_filters_and_penalties_too(name: str, config: SamplingConfig) -> None:
    law = decoded_law(RULES[name], TARGET, 2, config)
    assert largest_error(law, target_law(Q, 2, config, 3)) < EXACT


def test_while_the_rule_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("viasd.runtime.exits._REFIT_EVERY", 1)
    monkeypatch.setattr("viasd.runtime.exits._TRY_AGAIN", 1)
    law = decoded_law(ada(calibrated), TARGET, 3, SAMPLING)
    assert largest_error(law, target_law(Q, 3, SAMPLING, 3)) < EXACT


def test_the_rules_do_exit_at_some_rows_and_not_at_others() -> None:
    # Else the tests above would prove nothing.
    rows = [HEADS[e]((*PROMPT, *x)) for e in (1, 2) for x in [(), (1,), (0, 1), (2, 2)]]
    sure = [float(logit_of_max(row)) for row in rows]
    for rule in (FixedExits(0.6), calibrated()):
        rule.begin()
        decided = {rule.exits(1 if i < 4 else 2, f) for i, f in enumerate(sure)}
        assert decided == {True, False}


class GatedByTheDraw(AdaDecode):
    """The field's commonest bug: the gate reads the probability of the token that was drawn, and drops it where low."""

    threshold = 0.75

    def _climbed(self, ahead: Any) -> Any:
        wave, bench = self._wave, self._bench
        layers = wave.climb(exits=True)
        row = bench.sampler.law(wave.guess().dense[None])[0]
        drawn = bench.draws.draft(row)
        if row.prob(drawn) <= self.threshold:
            return None
        bench.draws.draft = lambda _row, token=drawn: token  # type: ignore[method-assign]
        return ahead, row, layers

    def round(self, tokens: Sequence[int], room: int) -> Any:
        draws = self._bench.draws
        try:
            return super().round(tokens, room)
        finally:
            vars(draws).pop("draft", None)


def test_a_gate_on_the_drawn_token_is_caught_with_the_very_law_that_it_gives() -> None:
    # spec: target [.6, .3, .1], head [.8, .15, .05], gate .75 gives [.72, .21, .07].
    q, head = constant_table(0.6, 0.3, 0.1), constant_table(0.8, 0.15, 0.05)

    def biased(bench: Workbench) -> tuple[Strategy, Any]:
        return GatedByTheDraw(bench, TableWave(q, {1: head}, 2), FixedExits(0.75), max_pending=1), None

    def right(bench: Workbench) -> tuple[Strategy, Any]:
        return AdaDecode(bench, TableWave(q, {1: head}, 2), FixedExits(0.75), max_pending=1), None

    target = TableTarget(q, q)
    wrong = decoded_law(biased, target, 1, SAMPLING)
    assert [wrong[(i,)] for i in range(3)] == pytest.approx([0.72, 0.21, 0.07])
    assert largest_error(decoded_law(right, target, 1, SAMPLING), target_law(q, 1, SAMPLING, 3)) < EXACT


def test_guesses_taken_untested_have_the_heads_law() -> None:
    def untested(bench: Workbench) -> tuple[Strategy, Any]:
        wave = TableWave(Q, {1: HEADS[1]}, 2)
        return AdaDecode(bench, wave, FixedExits(0.0), max_pending=2, verify=False), None

    law = decoded_law(untested, TARGET, 2, SAMPLING)
    assert largest_error(law, target_law(HEADS[1], 2, SAMPLING, 3)) < EXACT
    assert largest_error(law, target_law(Q, 2, SAMPLING, 3)) > 0.01


def test_a_word_off_the_shortlist_is_never_guessed_and_yet_comes_out() -> None:
    def short(x: tuple[int, ...]) -> torch.Tensor:
        row = HEADS[1](x).clone()
        row[2] = -1e4
        return row

    law = decoded_law(ada(lambda: FixedExits(0.0), heads={1: short}), TARGET, 2, SAMPLING)
    assert largest_error(law, target_law(Q, 2, SAMPLING, 3)) < EXACT
