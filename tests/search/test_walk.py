from __future__ import annotations

import pytest

from viasd.routes import Route
from viasd.runtime.gates import Thresholds
from viasd.search.walk import Heard, PassTimes, Walk, walk

GATE = Thresholds(0.7, 0.5)
NOTHING = -1


def heard(
    drafted: list[int], ratio: list[float], slim: list[int], full: list[int], lengths: list[int] | None = None
) -> Heard:
    return Heard(drafted, ratio, slim, full, lengths or [len(full)])


def test_a_block_that_the_slim_verifier_keeps_whole_skips_the_full_one_and_its_bonus() -> None:
    found = walk(heard([1] * 6, [1.0] * 6, [1] * 6, [1] * 6), 3, GATE)
    assert found == Walk(emitted=6, plain=0, rounds=2, drafted=6, escalated=0)


def test_two_tiers_get_a_bonus_after_every_whole_block() -> None:
    found = walk(heard([1] * 8, [1.0] * 8, [1] * 8, [1] * 8), 3, None)
    assert found == Walk(emitted=8, plain=0, rounds=2, drafted=6, escalated=2)


def test_an_escalation_ends_at_the_first_wrong_draft_and_corrects_it() -> None:
    # Escalated at the first token, which is right; the second is wrong.
    found = walk(heard([1, 9, 1], [0.1, 1.0, 1.0], [1, 1, 1], [1, 1, 1]), 3, GATE)
    assert found == Walk(emitted=3, plain=0, rounds=2, drafted=4, escalated=1)


def test_a_rewrite_that_is_right_ends_the_block_without_the_full_verifier() -> None:
    found = walk(heard([9, 1], [0.6, 1.0], [1, 1], [1, 1]), 2, GATE)
    assert found == Walk(emitted=2, plain=0, rounds=2, drafted=3, escalated=0)


@pytest.mark.parametrize(("ratio", "slim"), [(1.0, 9), (0.6, 8)], ids=["kept", "rewritten"])
def test_what_the_full_verifier_would_not_have_said_calls_it(ratio: float, slim: int) -> None:
    found = walk(heard([9], [ratio], [slim], [1]), 2, GATE)
    assert found == Walk(emitted=1, plain=0, rounds=1, drafted=1, escalated=1)


def test_plain_steps_where_nothing_is_drafted_and_no_round_across_passages() -> None:
    found = walk(heard([NOTHING, 1, 1, 1], [0.0, 1.0, 1.0, 1.0], [1] * 4, [1] * 4, [2, 2]), 5, GATE)
    assert found == Walk(emitted=4, plain=1, rounds=2, drafted=3, escalated=0)


def test_what_went_out_without_the_full_verifier_is_run_by_its_next_pass() -> None:
    # Two blocks of two pass, the third is escalated; in the second passage one passes before a plain step, one after it.
    ratio = [1.0] * 4 + [0.1, 1.0, 1.0] + [1.0] * 5
    drafted = [1] * 9 + [NOTHING, 1, 1]
    found = walk(heard(drafted, ratio, [1] * 12, [1] * 12, [7, 5]), 2, GATE)
    assert found == Walk(emitted=12, plain=1, rounds=5, drafted=10, escalated=1, backfilled=4 + 2)


def test_seconds_are_those_of_the_parts() -> None:
    times = PassTimes(plain=9.0, full=12.0, drafter=1.0, layer=1.0, attention=0.25, ends=4.0, token=0.6)
    route = Route((True, True, False, False, False, True, True, True), ((3, "attention"), (4, "mlp")))
    assert times.slim(route) == 4 + 5 + 0.25 + 0.75
    # The two shared layers are saved for all tokens of the block but the last.
    assert times.escalation(route) == 12 - 2 * (1 - 9 / 12)
    counts = Walk(emitted=10, plain=2, rounds=3, drafted=6, escalated=1, backfilled=4)
    assert times.cascade(counts, route) == pytest.approx((2 * 9 + 6 * 1 + 3 * 10 + 11.5 + 4 * 0.6 * 10 / 12) / 10)
    assert times.two_tiers(counts) == pytest.approx((18 + 6 + 36) / 10)
    assert PassTimes.of(times.as_json()) == times


def test_a_slim_verifier_that_is_confidently_wrong_is_slower_than_none() -> None:
    times = PassTimes(plain=10.0, full=12.0, drafter=0.0, layer=1.0, attention=0.5, ends=4.0)
    text = heard([1] * 40, [0.0] * 40, [7] * 40, [1] * 40)
    assert times.cascade(walk(text, 4, GATE), Route.of([1, 0, 0, 0, 0, 0, 0, 1])) > times.two_tiers(walk(text, 4, None))
