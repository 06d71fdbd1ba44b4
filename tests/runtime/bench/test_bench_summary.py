from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import model_of, pair_of, prompt_ids

from viasd.divergences import expected_tokens
from viasd.runtime.bench.compare import comparison, differences
from viasd.runtime.bench.costs import bytes_per_token, read_bandwidth
from viasd.runtime.bench.report import fitted, markdown_table
from viasd.runtime.bench.run import mismatch
from viasd.runtime.bench.summary import check_summary, figures_by_method, predictions
from viasd.runtime.costs import interpolated
from viasd.runtime.metrics import Counters


def record(method: str, prompt: str, tokens: int, *seconds: float, **more: Any) -> dict[str, Any]:
    middle = sorted(seconds)[len(seconds) // 2]
    return {
        **{"method": method, "kind": "own", "task": "qa", "prompt": prompt, "tokens": tokens, "lossless": True},
        **{"seconds": middle, "seconds_all": list(seconds), "target_calls": tokens},
        **more,
    }


def counts(**given: int) -> dict[str, Any]:
    counters = Counters(**given)
    counters.by_tier["full"] = counters.emitted
    return counters.as_json()


def test_ratios_are_over_prompts_that_both_answered() -> None:
    records = [
        record("plain", "1", 10, 1.0, 2.0, 1.5),
        record("plain", "2", 10, 4.0, 4.0, 4.0),
        record("sd", "1", 10, 1.0, 1.0, 0.5),
        {"method": "sd", "kind": "own", "task": "qa", "prompt": "2", "error": "RuntimeError: out of luck"},
    ]
    figures = figures_by_method(records, ["plain", "sd", "generate"])
    assert figures["plain"]["tokens_per_second"] == 20 / 5.5
    assert figures["plain"]["spread"] == [20 / 6, 20 / 5]
    assert figures["plain"]["ratio_to_plain"] == 1
    assert (figures["sd"]["prompts"], figures["sd"]["failed"], figures["sd"]["tokens"]) == (1, 1, 10)
    assert figures["sd"]["ratio_to_plain"] == pytest.approx(1.5)
    assert figures["sd"]["ratio_to_generate"] is None
    assert figures["generate"]["tokens_per_second"] is None


def test_counts_are_summed_before_ratios_are_taken() -> None:
    time = {"draft": 0.1, "slim": 0.0, "full": 0.5, "prefill": 0.2, "loop": 0.2}
    records = [
        record("sd", "1", 10, 1.0, counts=counts(emitted=10, rounds=5, drafted=9, gated=8, kept=4), time=time),
        record("sd", "2", 30, 1.0, counts=counts(emitted=30, rounds=5, drafted=8, gated=2, kept=2), time=time),
    ]
    figures = figures_by_method(records, ["sd"])["sd"]
    assert figures["block_efficiency"] == 4
    assert figures["rejection_rate"] == pytest.approx(0.4)
    assert figures["tier_share"] == {"drafter": 0, "slim": 0, "full": 1}
    assert figures["time_share"]["full"] == pytest.approx(0.5)
    assert figures["decoding_tokens_per_second"] == pytest.approx(40 / 1.6)
    found = predictions({"sd": figures}, {"full": {1: 0.04, 2: 0.05, 6: 0.09}}, records)["sd"]
    # 1.7 drafted a round: a pass over 2.7 tokens lies between 2 and 6.
    c_q = 0.05 + 0.04 * 0.7 / 4
    assert found["predicted_tokens_per_second"] == pytest.approx(expected_tokens(0.4, 1.7) / (1.7 * 0.2 / 17 + c_q))
    assert found["measured_tokens_per_second"] == figures["decoding_tokens_per_second"]


def test_lossy_figures_are_weighted_by_tokens() -> None:
    records = [
        record(
            "x", "1", 10, 1.0, lossy={"mean_log_q": -1.0, "compared": 10, "disagreed": 5, "plain": 12, "as_plain": 3}
        ),
        record(
            "x", "2", 30, 1.0, lossy={"mean_log_q": -2.0, "compared": 30, "disagreed": 1, "plain": 28, "as_plain": 27}
        ),
    ]
    figures = figures_by_method(records, ["x"])["x"]
    assert (figures["mean_log_q"], figures["disagreement"], figures["as_plain"]) == (-1.75, 0.15, 0.75)
    sampled = figures_by_method([record("x", "1", 10, 1.0, lossy={"mean_log_q": -1.0})], ["x"])["x"]
    assert (sampled["disagreement"], sampled["as_plain"]) == (None, None)


def test_mismatches_of_ours_and_of_peers_are_counted_apart() -> None:
    equal, tie, bug = (
        {"equal": False, "kind": k, "index": 3} if k else {"equal": True} for k in ("", "near-tie", "bug")
    )
    records = [
        record("sd", "1", 5, 1.0, check=equal),
        record("sd", "2", 5, 1.0, check=tie),
        record("sd", "3", 5, 1.0, check=bug),
        record("generate", "1", 5, 1.0, check=tie) | {"kind": "peer"},
    ]
    found = check_summary(records)
    assert found is not None
    assert [found[k] for k in ("compared", "mismatches", "near_ties", "bugs")] == [3, 2, 1, 1]
    assert [found["peers"][k] for k in ("compared", "mismatches", "near_ties", "bugs")] == [1, 1, 1, 0]
    assert check_summary([record("sd", "1", 5, 1.0)]) is None


def test_a_mismatch_is_classified() -> None:
    pair, ids = pair_of("llama"), prompt_ids()
    plain = model_of("llama").generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False, eos_token_id=None)
    tokens = [int(i) for i in plain[0, len(ids) :]]
    assert mismatch(pair, ids, tokens, tokens) == {"equal": True, "compared": 6}
    wrong = [*tokens[:2], (tokens[2] + 1) % 300, *tokens[3:]]
    found = mismatch(pair, ids, wrong, tokens)
    assert (found["kind"], found["index"], found["token"], found["plain"]) == ("bug", 2, wrong[2], tokens[2])
    assert found["gap"] > 0
    for shorter, longer in ((tokens[:4], tokens), (tokens, tokens[:4])):
        assert mismatch(pair, ids, shorter, longer)["kind"] == "bug"


def test_bytes_of_a_token_are_those_of_the_layers_and_the_head() -> None:
    model = model_of("llama")
    layers = sum(p.numel() for p in model.model.layers.parameters()) + model.model.norm.weight.numel()
    head = model.lm_head.weight.numel()
    assert bytes_per_token(pair_of("llama").target) == 4 * (layers + head)
    tied = pair_of("gemma3").target
    assert tied.model.lm_head.weight is tied.model.model.embed_tokens.weight
    everything = sum(p.numel() * p.element_size() for p in tied.model.parameters())
    assert everything <= bytes_per_token(tied) < everything + 4096  # rotary tables and scales may be buffers


def test_costs_between_the_measured_sizes() -> None:
    seconds = {1: 1.0, 2: 2.0, 6: 4.0}
    assert [interpolated(seconds, n) for n in (0.5, 1, 1.5, 2, 4, 6, 9)] == [1, 1, 1.5, 2, 3, 4, 4]


def test_bandwidth_is_a_plausible_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("viasd.runtime.bench.costs._PROBE_BYTES", 1 << 22)
    assert 1e7 < read_bandwidth(torch.device("cpu")) < 1e13


def test_cells_of_a_markdown_table_line_up() -> None:
    table = markdown_table([["method", "x"], ["a|b", "1.00"]])
    assert table == "| method | x    |\n|--------|------|\n| a\\|b   | 1.00 |"


def test_a_table_wider_than_the_terminal_is_split_by_columns() -> None:
    rows = [["method", "aaaa", "bbbb", "cccc"], ["plain", "1", "2", "3"]]
    assert fitted(rows, 80) == [rows]
    assert fitted(rows, 25) == [
        [["method", "aaaa", "bbbb"], ["plain", "1", "2"]],
        [["method", "cccc"], ["plain", "3"]],
    ]
    assert len(fitted(rows, 5)) == 3


def test_two_summaries_side_by_side() -> None:
    def summary(speed: float, **settings: Any) -> dict[str, Any]:
        methods = {"plain": {"tokens_per_second": speed, "ratio_to_plain": 1.0}}
        base = {"pair": "p", "dataset": ["d", "1"], "prompts": "x", "threads": 1, "methods": [{"name": "plain"}]}
        return {"methods": methods, "settings": {**base, **settings}, "provenance": {"gpu": None, "cpu": "c"}}

    one = summary(10.0)
    assert differences(one, one) == ([], [])
    assert differences(one, summary(1.0, threads=2)) == ([], ["threads: 1 and 2"])
    assert differences(one, summary(1.0, pair="other"))[0] == ["pair: p and other"]
    assert differences(one, summary(1.0, prompts="y"))[0] == ["a different choice of prompts (--limit)"]
    more = summary(1.0, methods=[{"name": "plain", "gamma": 1}, {"name": "sd"}])
    assert differences(one, more)[1] == ["method plain is configured differently", "method sd is only in the second"]
    assert comparison(one, summary(15.0))["plain"]["second_over_first"] == 1.5
