"""Lookup with a model behind it: who is asked, and how long for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from viasd.draws import SeededDraws
from viasd.rows import Rows
from viasd.runtime.drafters import Draft, LookupDrafter, LookupFirstDrafter, PasslessDrafter
from viasd.runtime.lengths import DraftLength, LookupFirstPace
from viasd.runtime.metrics import Counters
from viasd.sampling import Sampler, SamplingConfig

SAMPLER = Sampler(SamplingConfig())
REPEATED = [1, 2, 3, 4, 1, 2, 3]  # three words that have occurred before, and 4 came next
ONCE = [1, 2, 9, 4, 7, 2]  # one word has
FRESH = [1, 2, 3, 4, 5, 6]


class Nines(PasslessDrafter):
    """A drafter that says 9 and counts how often it was asked."""

    name = "nines"

    def __init__(self) -> None:
        self.asked = 0

    def propose(self, tokens: Sequence[int], limit: int, ahead: Any, draws: Any) -> Draft:
        self.asked += 1
        return Draft([9] * limit, Rows.one_hot([9] * limit), [1.0] * limit)

    def rewind(self, tokens: Sequence[int]) -> None:
        pass

    def settle(self, tokens: Sequence[int]) -> None:
        pass


def drafter() -> LookupFirstDrafter:
    return LookupFirstDrafter(LookupDrafter(Counters()), Nines())


def propose(source: LookupFirstDrafter, tokens: list[int], limit: int = 2) -> list[int]:
    source.settle(tokens)
    return source.propose(tokens, limit, SAMPLER.ahead(tokens), SeededDraws(0)).tokens


def test_lookup_is_asked_where_two_words_have_occurred_before_and_the_model_elsewhere() -> None:
    assert propose(drafter(), REPEATED) == [4, 1]
    assert propose(drafter(), ONCE) == [9, 9]
    assert propose(drafter(), FRESH) == [9, 9]


def test_a_choice_holds_for_one_block() -> None:
    source = drafter()
    source.choice = "model"
    assert propose(source, REPEATED) == [9, 9]
    assert propose(source, REPEATED) == [4, 1]
    once, fresh = drafter(), drafter()
    once.choice = fresh.choice = "lookup"
    assert propose(once, ONCE) == [9, 4]
    assert propose(fresh, FRESH) == [9, 9]  # nothing to be found, whatever was chosen


def pace(
    source: LookupFirstDrafter, model_seconds: float, full: Sequence[float] = (1.0, 1.1, 1.2, 1.3)
) -> LookupFirstPace:
    return LookupFirstPace(DraftLength(3, 0.0, full), DraftLength(3, model_seconds, full), source, SAMPLER)


def test_a_model_that_costs_nothing_takes_over_where_lookup_was_refused() -> None:
    source = drafter()
    source.settle(REPEATED)
    chooser = pace(source, 0.0)
    assert chooser.limit(REPEATED, 3) == 2
    assert source.choice == "lookup"  # equal promises: the cheaper one
    for _ in range(4):
        n = chooser.limit(REPEATED, 3)
        chooser.judged(
            *((0, 1) if source.choice == "lookup" else (n, n))
        )  # lookup's words are refused, the model's kept
    assert chooser.limit(REPEATED, 3) > 0
    assert source.choice == "model"


def test_what_lookup_would_have_said_is_compared_with_the_text() -> None:
    source = drafter()
    source.settle(REPEATED)
    chooser = pace(source, 0.0)
    for _ in range(6):
        n = chooser.limit(REPEATED, 3)
        chooser.judged(*((0, 1) if source.choice == "lookup" else (n, n)))
    refused = chooser._lookup.chance(3, 0)
    chooser.limit(REPEATED, 3)
    assert source.choice == "model"
    said = [*REPEATED, 4, 1, 2]  # what lookup would have drafted came true
    source.settle(said)
    chooser.limit(said, 3)
    assert chooser._lookup.chance(3, 0) > refused


def test_a_dear_model_is_asked_now_and_then() -> None:
    source = drafter()
    source.settle(FRESH)
    chooser = pace(source, 5.0)
    lengths = []
    for _ in range(60):
        lengths.append(chooser.limit(FRESH, 3))
        if lengths[-1]:
            chooser.judged(0, 1)
        else:
            chooser.passed([1])
    assert set(lengths) == {0, 1}
    assert 1 <= sum(lengths) <= 3


def test_no_room_is_no_block() -> None:
    source = drafter()
    source.settle(REPEATED)
    assert pace(source, 0.0).limit(REPEATED, 0) == 0
