from __future__ import annotations

import itertools
import random

import pytest

from viasd.runtime.drafters import LookupDrafter
from viasd.runtime.lengths import LOOKUP_PRIORS, DraftLength, LookupPace, ModelPace, Shadow
from viasd.runtime.metrics import Counters
from viasd.sampling import Sampler, SamplingConfig

CHEAP = [10.0, 12.0, 12.5, 12.5, 13.0, 13.0]  # a pass over 1 .. 6 tokens
DEAR = [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]


def taught(seconds: list[float], kept: int, judged: int, drafter: float = 0.0) -> DraftLength:
    lengths = DraftLength(5, drafter, seconds)
    for _ in range(50):
        lengths.observe(0, kept, judged)
    return lengths


def test_long_blocks_where_everything_is_kept_and_none_where_nothing_is() -> None:
    assert taught(CHEAP, 5, 5).choose(5) == 5
    assert taught(CHEAP, 0, 1).choose(5) == 0


def test_no_block_where_a_pass_over_several_tokens_costs_as_much_as_that_many_passes() -> None:
    assert taught(DEAR, 4, 5).choose(5) == 0


def test_a_block_ends_where_tokens_stop_being_kept() -> None:
    assert taught([10.0, 11.0, 12.0, 13.0, 14.0, 15.0], 2, 3).choose(5) == 2


def test_a_dear_drafter_drafts_less() -> None:
    chosen = []
    for seconds in (0.0, 2.0, 9.0):
        lengths = DraftLength(5, seconds, CHEAP)
        for kept in (0, 1, 2, 3, 5, 5) * 20:
            lengths.observe(0, kept, min(kept + 1, 5))
        chosen.append(lengths.choose(5))
    assert chosen[0] > chosen[1] > chosen[2] == 0


def test_no_more_than_fits() -> None:
    assert [taught(CHEAP, 5, 5).choose(room) for room in (0, 1, 3)] == [0, 1, 3]


def test_kinds_of_drafts_have_chances_of_their_own() -> None:
    lengths = DraftLength(5, 0.0, CHEAP)
    for _ in range(30):
        lengths.observe(1, 0, 1)
        lengths.observe(3, 5, 5)
    assert lengths.choose(5, label=1) == 0
    assert lengths.choose(5, label=3) == 5
    assert lengths.chance(2, 0) == 0.5


def test_what_is_believed_at_first_gives_way_to_what_is_seen() -> None:
    lengths = DraftLength(5, 0.0, CHEAP, LOOKUP_PRIORS)
    assert [lengths.chance(label, 0) for label in (1, 2, 3)] == [0.25, 0.55, 0.7]
    assert [lengths.chance(3, place) for place in (1, 4)] == [0.8, 0.8]
    unlikely = []
    for label in (1, 3):
        refused = 0
        while lengths.choose(5, label):
            lengths.observe(label, 0, 1)
            refused += 1
        unlikely.append(refused)
    assert 0 < unlikely[0] < unlikely[1], "a match of one token is given up sooner than a match of three"
    for _ in range(60):
        lengths.observe(1, 5, 5)
    assert lengths.chance(1, 0) > 0.9


def test_what_was_true_long_ago_fades() -> None:
    lengths = taught(CHEAP, 0, 1)
    for _ in range(120):
        lengths.observe(0, 5, 5)
    assert lengths.choose(5) == 5


@pytest.mark.parametrize("seconds", [CHEAP, DEAR, [10.0, 14.0, 14.0, 15.0, 19.0, 19.0]])
def test_the_choice_has_the_best_rate_of_all_lengths(seconds: list[float]) -> None:
    rng = random.Random(1)
    for _ in range(50):
        lengths = DraftLength(5, rng.random(), seconds)
        for _ in range(40):
            judged = rng.randint(1, 5)
            lengths.observe(0, rng.randint(judged - 1, judged), judged)

        def rate(m: int, lengths: DraftLength = lengths) -> float:
            chances = itertools.accumulate((lengths.chance(0, i) for i in range(m)), lambda a, b: a * b)
            return (1 + sum(chances)) / lengths._seconds[m]

        chosen = lengths.choose(5)
        best = max(range(6), key=rate)
        assert rate(chosen) >= rate(best) / 1.03 - 1e-12


def test_a_draft_that_was_not_sent_is_compared_with_what_follows() -> None:
    lengths, shadow = DraftLength(5, 0.0, CHEAP), Shadow()
    shadow.watch(2, [4, 5, 6])
    shadow.meet([4], lengths)
    shadow.watch(2, [9, 9])  # the first is still coming true
    shadow.meet([5, 7], lengths)
    assert lengths.chance(2, 0) > 0.5
    assert lengths.chance(2, 1) > 0.5
    assert lengths.chance(2, 2) < 0.5
    shadow.watch(2, [8])
    shadow.meet([8, 1, 1], lengths)
    assert lengths.chance(2, 0) > 0.74


def test_a_drafter_that_did_not_pay_is_asked_again_after_a_while() -> None:
    pace = ModelPace(taught(CHEAP, 0, 1))
    asked = []
    for _ in range(60):
        asked.append(pace.limit([1], 5))
        if asked[-1]:
            pace.judged(0, 1)
        else:
            pace.passed([1])
    assert asked.count(1) == 2
    assert set(asked) == {0, 1}
    assert pace.limit([1], 0) == 0


class Watched(DraftLength):
    def __init__(self) -> None:
        super().__init__(3, 0.0, DEAR)  # never worth a pass
        self.heard: list[tuple[int, int, int]] = []

    def observe(self, label: int, kept: int, judged: int) -> None:
        self.heard.append((label, kept, judged))


def lookup_pace(lengths: DraftLength) -> tuple[LookupPace, LookupDrafter]:
    drafter = LookupDrafter(Counters())
    return LookupPace(lengths, drafter, Sampler(SamplingConfig())), drafter


def test_what_lookup_would_have_said_is_followed_in_the_answer() -> None:
    lengths = Watched()
    pace, drafter = lookup_pace(lengths)
    text = [1, 2, 3, 4, 5, 1, 2, 3]  # lookup matches 1 2 3 and would say 4 5 1
    for following in (4, 5, 9):
        drafter.settle(text)
        assert pace.limit(text, 3) == 0
        pace.passed([following])
        text.append(following)
    assert lengths.heard == [(3, 2, 3)]  # two came true, the third did not


def test_a_draft_that_met_the_verifier_ends_what_was_followed() -> None:
    lengths = Watched()
    pace, drafter = lookup_pace(lengths)
    text = [1, 2, 3, 4, 5, 1, 2, 3]
    drafter.settle(text)
    pace.limit(text, 3)
    pace.judged(1, 2)
    pace.passed([8])  # not compared with the draft of before
    assert lengths.heard == [(3, 1, 2)]


def test_without_a_match_lookup_has_no_block() -> None:
    pace, drafter = lookup_pace(taught(CHEAP, 5, 5))
    drafter.settle([1, 2, 3])
    assert pace.limit([1, 2, 3], 5) == 0
