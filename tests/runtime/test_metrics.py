import copy
import json

import pytest

from viasd.intervals import clustered_interval
from viasd.runtime.metrics import Audit, Counters


def counted():
    """Three rounds of 4: 12 drafted, 10 gated, 7 kept of which one fell behind EOS, one rewritten, one escalated."""
    return Counters(
        emitted=9,
        by_tier={"drafter": 6, "slim": 1, "full": 2},
        rounds=3,
        drafted=12,
        gated=10,
        kept=7,
        accepted=6,
        slim_calls=3,
        full_calls=2,
        drafter_calls=12,
        slim_tokens_fed=15,
        full_tokens_fed=20,
        drafter_tokens_fed=18,
        escalated_rounds=1,
        rewrites=1,
        unseen=4,
        seconds=2.0,
        seconds_by_tier={"drafter": 0.5, "slim": 0.25, "full": 0.75, "prefill": 0.25, "loop": 0.25},
        audit=Audit([(4, 1), (5, 0.5)]),
    )


def test_derived_values_by_hand():
    c = counted()
    assert c.rejection_rate == pytest.approx(0.3)
    assert c.full_calls_per_token == pytest.approx(2 / 9)
    assert c.slim_calls_per_token == pytest.approx(3 / 9)
    assert c.escalation_rate == pytest.approx(1 / 3)
    assert c.block_efficiency == 3
    assert c.block_efficiency_per_full_call == 4.5
    assert c.tokens_per_second == 4.5
    assert c.tier_share == pytest.approx({"drafter": 6 / 9, "slim": 1 / 9, "full": 2 / 9})
    assert c.time_share == {"drafter": 0.25, "slim": 0.125, "full": 0.375, "prefill": 0.125, "loop": 0.125}
    assert (c.audit.tokens, c.audit.disagreed) == (9, 1.5)
    assert c.audit.interval == clustered_interval([4, 5], [1, 0.5])


def test_stats_object_has_the_published_keys_in_order():
    stats = json.loads(json.dumps(counted().as_json(), allow_nan=False))
    published = (
        "emitted by_tier rounds drafted accepted slim_calls full_calls escalated_rounds seconds tokens_per_second"
    )
    assert list(stats)[:12] == [*published.split(), "seconds_by_tier", "audit"]
    assert stats["by_tier"] == {"drafter": 6, "slim": 1, "full": 2}
    assert list(stats["seconds_by_tier"]) == ["drafter", "slim", "full", "prefill", "loop"]
    assert stats["audit"] == {"blocks": 2, "tokens": 9, "disagreed": 1.5, "interval": list(counted().audit.interval)}
    assert [stats[key] for key in ("emitted", "rounds", "drafted", "accepted", "slim_calls", "full_calls")] == [
        9,
        3,
        12,
        6,
        3,
        2,
    ]
    assert (stats["escalated_rounds"], stats["seconds"], stats["tokens_per_second"]) == (1, 2.0, 4.5)
    assert (stats["gated"], stats["kept"], stats["rewrites"], stats["full_tokens_fed"]) == (10, 7, 1, 20)


def test_nothing_generated_is_valid_json_and_consistent():
    empty = Counters()
    stats = json.loads(json.dumps(empty.as_json(), allow_nan=False))
    assert stats["tokens_per_second"] == 0
    assert stats["audit"]["interval"] == [0, 1]
    assert (empty.rejection_rate, empty.block_efficiency, empty.tier_share["full"]) == (0, 0, 0)
    assert empty.check() == []


def test_merge_adds_every_count_and_leaves_the_other_alone():
    total, other = counted(), counted()
    untouched = copy.deepcopy(other)
    total.merge(other)
    total.merge(Counters())
    once, twice = untouched.as_json(), total.as_json()
    for key, value in once.items():
        if isinstance(value, int | float) and key != "tokens_per_second":
            assert twice[key] == 2 * value
    assert twice["tokens_per_second"] == once["tokens_per_second"]
    assert total.by_tier == {"drafter": 12, "slim": 2, "full": 4}
    assert total.seconds_by_tier["full"] == 1.5
    assert len(total.audit.blocks) == 4
    assert other == untouched
    assert total.check() == []


def test_counters_share_no_state():
    one, two = Counters(), Counters()
    one.by_tier["full"] += 1
    one.seconds_by_tier["loop"] += 1
    one.audit.blocks.append((1, 0))
    assert two == Counters()
    one.as_json()["by_tier"]["full"] = 7
    assert one.by_tier["full"] == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"emitted": 10}, "emitted is 10, but the tiers add up to 9"),
        ({"kept": 11}, "kept is 11, above gated = 10"),
        ({"gated": 13}, "gated is 13, above drafted = 12"),
        ({"accepted": 10}, "accepted is 10, above emitted = 9"),
        ({"unseen": 10}, "unseen is 10, above emitted = 9"),
        ({"rewrites": 11}, "rewrites is 11, above gated = 10"),
        ({"escalated_rounds": 4}, "escalated_rounds is 4, above rounds = 3"),
        ({"full_calls": 21}, "full_calls is 21, above full_tokens_fed = 20"),
        ({"rounds": -1}, "rounds is -1, below 0"),
        ({"seconds": 1.9}, "seconds is 1.9, but its parts add up to 2.0"),
        ({"seconds": float("nan")}, "seconds is nan, below 0"),
        ({"by_tier": {"drafter": 9}}, "by_tier has ['drafter'], not ['drafter', 'full', 'slim']"),
        ({"audit": Audit([(3, 4)])}, "audited block has disagreement 4 of 3 tokens"),
    ],
)
def test_check_names_each_violated_invariant(change, sentence):
    c = counted()
    assert c.check() == []
    for name, value in change.items():
        setattr(c, name, value)
    assert sentence in c.check()


def test_a_misspelt_counter_is_an_error():
    with pytest.raises(AttributeError):
        Counters().emited = 1
