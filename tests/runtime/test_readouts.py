"""Confident readouts while decoding: in the full verifier another target, in the slim one another proposal."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch
from laws import PROMPT, decoded_law, largest_error, target_law
from tiny import LOSSLESS, LOSSY, TEXT, Counting, generate, hf_greedy, model_of, pair_of, prompt_ids, tokenizer

import viasd
from viasd.attention import Segment
from viasd.confident import Coins, ConfidentConfig
from viasd.errors import MaskError, OptionError
from viasd.identity import ModelIdentity
from viasd.mask import LayerMask
from viasd.probe import load_layered
from viasd.routes import Route
from viasd.runtime.check import compare_with_plain
from viasd.runtime.config import DecodingConfig
from viasd.runtime.metrics import Counters
from viasd.runtime.readouts import OWN_TARGET, Readouts
from viasd.runtime.strategies import ChainedCascade, Plain, SpeculativeDecoding
from viasd.runtime.target import TieredTarget
from viasd.sampling import SamplingConfig
from viasd.selecting import ConfidentReadout, read_together
from viasd.testing import TableDrafter, tiny_model

ANY: dict[str, Any] = {"readout": "trough", "backtrack_layers": -1}
N = 32


def plain(family: str, **options: Any) -> viasd.Result:
    return generate(pair_of(family), prompt_ids(), strategy="plain", max_new_tokens=N, **options)


def by_transformers(family: str, n: int) -> tuple[list[int], list[int]]:
    """Greedy decoding with the readout of `ANY`, by transformers' own modules alone: tokens and layers."""
    hf = model_of(family)
    tokens, layers = prompt_ids(), []
    found: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _, __, out: found.append(out[0] if isinstance(out, tuple) else out))
        for layer in hf.model.layers
    ]
    softcap = getattr(hf.config, "final_logit_softcapping", None)
    with torch.no_grad():
        for _ in range(n):
            found.clear()
            hf(input_ids=torch.tensor([tokens]), use_cache=False)
            rows = torch.stack([hf.lm_head(hf.model.norm(h[:, -1:]))[0, 0] for h in found])
            rows = torch.tanh(rows / softcap) * softcap if softcap else rows
            entropies = torch.distributions.Categorical(logits=rows.double()).entropy()
            layer = len(rows) - 1
            while layer and entropies[layer - 1] < entropies[layer]:
                layer -= 1
            layers.append(layer)
            tokens.append(int(rows[layer].argmax()))
    for hook in hooks:
        hook.remove()
    return tokens[-n:], layers


# --- another target ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_plain_decoding_reads_out_where_entropy_is_least(family: str) -> None:
    tokens, layers = by_transformers(family, N)
    result = plain(family, **ANY)
    assert (result.token_ids, result.selected_layers) == (tokens, layers)
    assert family == "gemma2" or tokens != hf_greedy(model_of(family), prompt_ids(), N)
    assert result.lossless
    assert result.target == "confident readout (trough, any layer)"
    assert result.as_json()["target"] == result.target
    assert result.as_json()["selected_layers"] == layers
    assert "not the model's own readout" in result.loss
    assert any(note.startswith("target: confident readout (trough, any layer)") for note in result.notes)
    moves = result.stats.readout
    depths = [7 - layer for layer in layers]
    assert (moves.tokens, moves.moved, moves.depth) == (N, sum(d > 0 for d in depths), sum(depths))
    assert (moves.deepest, moves.rows) == (max(depths), N)
    assert moves.read > 2 * N


@pytest.mark.parametrize("strategy", LOSSLESS)
@pytest.mark.parametrize("drafter", ["lookup", "model", "self"])
@pytest.mark.parametrize("readout", ["trough", "trough-m2", "last-m4", "mixed"])
def test_every_lossless_strategy_gives_what_plain_decoding_gives(readout: str, drafter: str, strategy: str) -> None:
    options = {**ANY, **({"readout_p": 0.5} if readout == "mixed" else {"readout": readout})}
    for family in ("llama", "gemma2"):
        expected = plain(family, **options)
        result = generate(
            pair_of(family, drafter, noise=0.05), prompt_ids(), max_new_tokens=N, **LOSSLESS[strategy], **options
        )
        assert result.token_ids == expected.token_ids
        assert result.selected_layers == expected.selected_layers
        assert result.target == expected.target


@pytest.mark.parametrize("mask", ["even:0", "even:0.125", "even:0.5", "even:0.6"])
@pytest.mark.parametrize("gamma", [1, 2, 4, 7, 17])
def test_any_mask_and_any_gamma(gamma: int, mask: str) -> None:
    # 18 rows and as many candidates are more than the kernels read out in one call.
    expected = plain("gemma2", **ANY)
    for strategy in ("sd", "chain", "via-audited"):
        options = {**LOSSLESS[strategy], "gamma": gamma, **({} if strategy == "sd" else {"mask": mask})}
        for tier in ("full",) if strategy == "sd" else ("full", "both"):
            result = generate(
                pair_of("gemma2", "model", noise=0.05),
                prompt_ids(),
                **{**ANY, **options, "readout_tier": tier, "max_new_tokens": N},
            )
            assert result.token_ids == expected.token_ids
            assert result.selected_layers == expected.selected_layers


@pytest.mark.parametrize(
    "keep", [[1, 1, 1, 1, 1, 1, 0, 1], [1, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 1, 0, 1, 1], [1] * 8]
)
@torch.inference_mode()
def test_a_full_pass_that_goes_on_from_the_boundary_has_every_candidate(keep: list[int]) -> None:
    model, ids = load_layered(model_of("gemma2")), prompt_ids()
    readout = ConfidentReadout(model, ConfidentConfig(max_backtrack_layers=-1), range(8))
    fresh = TieredTarget(model, None, Counters(), full_readout=readout)
    fresh.prefill(ids[:8])
    expected = fresh.full(ids[:20], 12)
    target = TieredTarget(model, Route.of(keep), Counters(), full_readout=readout)
    target.prefill(ids[:8])
    target.slim(ids[:12], 2)
    target.slim(ids[:18], 2)  # the boundary is made of two passes,
    target.settle(ids[:16])  # loses some positions,
    torch.testing.assert_close(target.full(ids[:20], 5), expected[-5:], rtol=1e-4, atol=1e-4)  # and is gone on from
    assert {i: c.layer for i, c in target.choices["full"].items()} == {
        i: fresh.choices["full"][i].layer for i in range(15, 20)
    }


def test_processors_and_temperature_apply_after_it() -> None:
    seen: list[torch.Tensor] = []

    def ban(ids: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        seen.append(row.clone())
        return row.index_fill(1, row[0].argmax(), -torch.inf)

    greedy = generate(pair_of("llama"), prompt_ids(), strategy="plain", max_new_tokens=4, **ANY)
    banned = generate(pair_of("llama"), prompt_ids(), strategy="plain", max_new_tokens=4, processors=[ban], **ANY)
    assert int(seen[0].argmax()) == greedy.token_ids[0] != banned.token_ids[0]
    assert banned.selected_layers[0] == greedy.selected_layers[0]
    hot = [
        generate(pair_of("llama", "same"), prompt_ids(), max_new_tokens=60, temperature=0.9, top_k=20, **ANY, **options)
        for options in (LOSSLESS["sd"], LOSSLESS["plain"])
    ]
    assert hot[0].stats.by_tier["drafter"] > 0
    penalised = [
        generate(pair_of("llama", "model"), prompt_ids(), repetition_penalty=1.3, **ANY, **LOSSLESS[s]).token_ids
        for s in ("plain", "sd", "chain2")
    ]
    assert penalised[0] == penalised[1] == penalised[2]


class InDouble:
    """A target whose rows are float64, as exact laws need them."""

    def __init__(self, target: TieredTarget) -> None:
        self.settle = target.settle
        self._target = target

    def full(self, tokens: Any, rows: int) -> torch.Tensor:
        return self._target.full(tokens, rows).double()

    def slim(self, tokens: Any, rows: int) -> torch.Tensor:
        return self._target.slim(tokens, rows).double()


def confident_target(p: float, seed: int, route: Route | None = None) -> TieredTarget:
    """A real target of so few tokens that laws can be enumerated."""
    shape = {"hidden_size": 16, "num_hidden_layers": 5, "num_attention_heads": 2, "num_key_value_heads": 1}
    hf = tiny_model("llama", dtype=torch.float64, seed=5, scale=20.0, vocab_size=4, pad_token_id=None, **shape)
    model = load_layered(hf, layers="hf")
    config = ConfidentConfig(max_backtrack_layers=-1, p=p)
    full = ConfidentReadout(model, config, range(5), seed)
    slim = None if route is None else ConfidentReadout(model, config, route.layers, seed)
    return TieredTarget(model, route, Counters(), full_readout=full, slim_readout=slim)


@pytest.mark.parametrize("p", [1.0, 0.5])
@pytest.mark.parametrize("strategy", ["plain", "sd", "chain"])
@torch.inference_mode()
def test_the_law_above_temperature_0_is_exactly_the_confident_targets(strategy: str, p: float) -> None:
    sampling, route = SamplingConfig(temperature=1.0), Route.of([1, 0, 1, 1, 1])
    laws = []
    for seed in (1, 4):
        target = confident_target(p, seed, route if strategy == "chain" else None)
        table = confident_target(p, seed)

        def q(prefix: tuple[int, ...], table: TieredTarget = table) -> torch.Tensor:
            table.settle([0])
            return table.full(prefix, 1)[0].double()

        def make(bench: Any, target: TieredTarget = target) -> Any:
            target.settle(list(PROMPT))
            drafter = TableDrafter(lambda x: torch.tensor([0.3, 0.1 * len(x), -0.5, 0.2], dtype=torch.float64))
            if strategy == "plain":
                return Plain(bench), None
            if strategy == "sd":
                return SpeculativeDecoding(bench, drafter, gamma=2), drafter
            return ChainedCascade(bench, drafter, gamma=1), drafter

        laws.append(target_law(q, 2, sampling, 4))
        assert largest_error(decoded_law(make, InDouble(target), 2, sampling, spare=1), laws[-1]) < 1e-5
    if p < 1:
        assert largest_error(*laws) > 1e-2  # other coins, another law


def test_coins_that_are_tossed_anew_in_every_pass_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**ANY, "readout_p": 0.5}
    expected = plain("llama", **options).token_ids
    assert plain("llama", **{**options, "seed": 2}).token_ids != expected
    tosses = iter(range(100000))
    right = Coins.__getitem__
    monkeypatch.setattr(Coins, "__getitem__", lambda self, position: right(self, next(tosses)))
    pair = pair_of("llama", "model", noise=0.05)
    assert generate(pair, prompt_ids(), max_new_tokens=N, **LOSSLESS["sd"], **options).token_ids != expected


@pytest.mark.parametrize("strategy", ["ratio", "ratio-audit", "bounded", "bounded-sd"])
def test_lossy_strategies_say_where_each_judged_token_was_read_out(strategy: str) -> None:
    result = generate(pair_of("llama", "model", noise=0.05), prompt_ids(), **ANY, **LOSSY[strategy])
    assert not result.lossless
    assert result.loss.startswith("LOSSY")
    assert "the target is the confident readout" in result.loss
    assert len(result.selected_layers) == len(result.token_ids)
    assert sum(layer is None for layer in result.selected_layers) == result.stats.unseen
    assert result.stats.readout.tokens == result.stats.emitted - result.stats.unseen


def test_a_token_that_was_not_judged_keeps_no_layer_of_an_earlier_pass() -> None:
    model = load_layered(model_of("llama"))
    readout = ConfidentReadout(model, ConfidentConfig(max_backtrack_layers=-1), range(8))
    target = TieredTarget(model, LayerMask.even(8, 0.25).route, Counters(), full_readout=readout)
    ids = prompt_ids()
    with torch.inference_mode():
        target.prefill(ids[:8])
        target.full(ids[:14], 6)
        target.settle(ids[:11])
        target.slim(ids[:14], 3)
    assert [choice is not None for choice in target.chosen("full", 9, 5)] == [True, True, False, False, False]


# --- a proposal -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["chain", "chain2", "via0", "via-audited"])
@pytest.mark.parametrize("readout", ["trough", "last-m1"])
def test_in_the_slim_tier_it_changes_no_token(readout: str, strategy: str) -> None:
    options = {**LOSSLESS[strategy], "readout": readout, "readout_tier": "slim", "backtrack_layers": 3}
    for drafter in ("lookup", "model"):
        result = generate(pair_of("llama", drafter, noise=0.05), prompt_ids(), max_new_tokens=N, **options)
        assert result.token_ids == hf_greedy(model_of("llama"), prompt_ids(), N)
        assert result.target == OWN_TARGET
        assert "readout" not in result.loss
        assert result.as_json()["slim_readout"].startswith(f"confident readout ({readout}")
        judged = [layer for layer in result.selected_layers if layer is not None]
        assert judged
        assert min(judged) < 7
        assert set(judged) <= {i for i, keep in enumerate(_kept(strategy)) if keep}


def _kept(strategy: str) -> tuple[bool, ...]:
    return LayerMask.even(8, float(LOSSLESS[strategy]["mask"].partition(":")[2])).keep


@torch.inference_mode()
def test_slim_candidates_are_the_last_layers_that_the_route_runs() -> None:
    model, ids = load_layered(model_of("llama")), prompt_ids()
    route = Route.of([1, 1, 1, 0, 1, 0, 0, 1])
    readout = ConfidentReadout(model, ConfidentConfig("last-m2"), route.layers)
    target = TieredTarget(model, route, Counters(), slim_readout=readout)
    target.prefill(ids[:10])
    rows = target.slim(ids[:15], 5)
    # Two layers before the last of the model is layer 5, which is skipped: what is there is what left layer 4.
    assert {choice.layer for choice in target.choices["slim"].values()} == {4}
    shorter = TieredTarget(model, Route.of([1, 1, 1, 0, 1, 0, 0, 0]), Counters())
    shorter.prefill(ids[:10])
    torch.testing.assert_close(rows, shorter.slim(ids[:15], 5), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_slim_candidates_are_stitched_as_what_enters_the_next_layer() -> None:
    model, ids = load_layered(model_of("llama")), prompt_ids()
    maps = {4: lambda h: h * 1.5, 7: lambda h: h - 0.3}
    route = Route((True, True, True, False, True, False, False, True), stitches=maps)  # type: ignore[arg-type]
    _, readout = Readouts(None, ConfidentConfig("last-m1")).bind(pair_of("llama"), route, 0)
    target = TieredTarget(model, route, Counters(), slim_readout=readout)
    target.prefill(ids[:10])
    rows = target.slim(ids[:15], 5)
    by_hand = TieredTarget(model, None, Counters())
    by_hand.prefill(ids[:10])
    kv = by_hand.kv
    hidden, _ = model.run(model.embed(ids[10:15]), [0, 1, 2], model.step([Segment(kv, 10, 5)]))
    hidden, _ = model.run(maps[4](hidden), [4], model.step([Segment(kv, 10, 5)]))
    torch.testing.assert_close(rows, model.readout(maps[7](hidden)), rtol=1e-4, atol=1e-4)


def test_slim_alone_reads_out_as_it_is_told() -> None:
    options = {"strategy": "slim", "mask": "even:0.25", "max_new_tokens": N}
    own = generate(pair_of("llama"), prompt_ids(), **options)
    read = generate(pair_of("llama"), prompt_ids(), **options, **ANY, readout_tier="slim")
    assert own.token_ids != read.token_ids
    assert own.selected_layers == []
    assert len(read.selected_layers) == N
    assert None not in read.selected_layers


# --- masks ------------------------------------------------------------------------------------------------------------


def scored_mask(readout: ConfidentConfig | None, **details: Any) -> LayerMask:
    """A mask as a search writes it."""
    target = ModelIdentity.of(pair_of("llama").target, "tiny")
    said = {} if readout is None else {"readout": readout.as_json()}
    return dataclasses.replace(LayerMask.even(8, 0.375), target=target, details={**said, **details})


CHAIN = {"strategy": "cascade", "mode": "lossless", "tiers": "3", "max_new_tokens": 16}


def test_a_slim_tier_reads_out_as_its_mask_was_scored() -> None:
    mask = scored_mask(ConfidentConfig(max_backtrack_layers=3))
    result = generate(pair_of("llama", "model"), prompt_ids(), mask=mask, **CHAIN)
    assert result.readouts.slim == ConfidentConfig(max_backtrack_layers=3)
    assert result.target == OWN_TARGET
    assert result.token_ids == hf_greedy(model_of("llama"), prompt_ids(), 16)
    assert any("only a proposal" in note for note in result.notes)
    both = generate(pair_of("llama", "model"), prompt_ids(), mask=mask, **CHAIN, **ANY)
    assert both.readouts.slim == ConfidentConfig(max_backtrack_layers=3)
    assert both.readouts.full == ConfidentConfig(max_backtrack_layers=-1)


def test_a_mask_that_was_scored_with_another_readout_is_refused_unless_told() -> None:
    for mask, asked in (
        (scored_mask(None), {"readout": "trough"}),
        (scored_mask(ConfidentConfig("last-m1")), {"readout": "trough"}),
        (scored_mask(ConfidentConfig(max_backtrack_layers=3)), {"readout": "trough", "backtrack_layers": 4}),
        (scored_mask(ConfidentConfig(max_backtrack_layers=3)), {"readout": "final"}),
    ):
        options = {**CHAIN, "mask": mask, "readout_tier": "slim", **asked}
        with pytest.raises(
            MaskError, match=r"was scored with .*, but its slim verifier is to use .*--readout-unscored"
        ):
            generate(pair_of("llama", "model"), prompt_ids(), **options)
        told = generate(pair_of("llama", "model"), prompt_ids(), **options, readout_unscored=True)
        assert (told.readouts.slim is None) == (asked["readout"] == "final")
    made = generate(pair_of("llama", "model"), prompt_ids(), mask="even:0.375", readout_tier="slim", **CHAIN, **ANY)
    assert made.readouts.slim is not None


def test_a_malformed_record_is_refused() -> None:
    mask = dataclasses.replace(scored_mask(None), details={"readout": {"method": "trough"}})
    with pytest.raises(MaskError, match="'readout' is malformed"):
        generate(pair_of("llama", "model"), prompt_ids(), mask=mask, **CHAIN)


def test_what_a_search_found_for_another_readout_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from viasd.runtime import tiers

    pair = pair_of("llama", "model")
    mask = dataclasses.replace(scored_mask(None, tier={"delta": -0.5}, gamma=5), pair=pair.name)
    measured = []
    own = tiers.measure_tiers
    monkeypatch.setattr(
        "viasd.runtime.settling.measure_tiers", lambda *a, **k: measured.append(k["readouts"]) or own(*a, **k)
    )
    options = {"mode": "lossless", "max_new_tokens": 4, "mask": mask}
    generate(pair, prompt_ids(), **options)
    assert measured == []
    result = generate(pair, prompt_ids(), **options, **ANY)
    assert [r.full for r in measured] == [ConfidentConfig(max_backtrack_layers=-1)]
    assert result.readouts.full is not None


# --- check, stream, log -----------------------------------------------------------------------------------------------


def test_check_compares_with_the_confident_target() -> None:
    pair, ids = pair_of("llama", "model"), prompt_ids()
    for options in (ANY, {**ANY, "readout_p": 0.5}):
        result = generate(pair, ids, **LOSSLESS["sd"], **options)
        found = compare_with_plain(pair, ids, result, SamplingConfig())
        assert found.equal
        assert "equal plain greedy decoding with the confident readout (trough" in found.sentence()
        assert found.as_json()["readout"] == result.target
        other = compare_with_plain(
            pair, ids, dataclasses.replace(result, readouts=plain("llama").readouts), SamplingConfig()
        )
        assert not other.equal
    wrong = dataclasses.replace(result, token_ids=[5, *result.token_ids[1:]])
    found = compare_with_plain(pair, ids, wrong, SamplingConfig())
    assert (found.index, found.near_tie) == (0, False)


def test_check_calls_two_layers_of_nearly_one_entropy_a_near_tie() -> None:
    pair, ids = pair_of("llama"), prompt_ids()
    result = plain("llama", **ANY)
    wrong = [next(t for t in range(5, 300) if t != result.token_ids[0]), *result.token_ids[1:]]
    layers = [result.selected_layers[0] - 1, *result.selected_layers[1:]]  # type: ignore[operator]
    answer = dataclasses.replace(result, token_ids=wrong, selected_layers=layers)
    assert compare_with_plain(pair, ids, answer, SamplingConfig()).near_tie is False
    near = compare_with_margin(pair, ids, answer, 1e-9)
    assert near.near_tie is True
    same_layer = dataclasses.replace(answer, selected_layers=result.selected_layers)
    assert compare_with_margin(pair, ids, same_layer, 1e-9).near_tie is False


def compare_with_margin(pair: viasd.Pair, ids: list[int], answer: viasd.Result, margin: float) -> Any:
    """The comparison as it were if entropies had been that close."""

    def close(*rest: Any, **more: Any) -> Any:
        return [dataclasses.replace(c, margins=[margin] * len(c.margins)) for c in read_together(*rest, **more)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("viasd.runtime.target.read_together", close)
        return compare_with_plain(pair, ids, answer, SamplingConfig())


@pytest.mark.parametrize("strategy", ["plain", "sd"])
def test_events_carry_the_layers_and_still_unpack_into_four(strategy: str) -> None:
    answer = viasd.stream(
        pair_of("llama", "model"), TEXT, mask=None, max_new_tokens=N, ignore_eos=True, **LOSSLESS[strategy], **ANY
    )
    layers: list[int | None] = []
    tokens: list[int] = []
    for event in answer:
        _, ids, _, stats = event
        assert len(event.selected_layers) == len(ids)
        layers += event.selected_layers
        tokens += ids
    assert layers == answer.result.selected_layers
    assert tokens == answer.result.token_ids
    assert stats.readout.tokens == N
    without = viasd.stream(pair_of("llama"), TEXT, mask=None, max_new_tokens=2, ignore_eos=True, strategy="plain")
    assert all(tuple(event.selected_layers) == () for event in without)


def test_an_answer_cut_at_its_end_counts_only_its_own_tokens() -> None:
    for n in range(1, 9):
        options = {**LOSSLESS["sd"], **ANY, "max_new_tokens": n}
        result = generate(pair_of("llama", "same"), prompt_ids(), **options)
        assert result.selected_layers == plain("llama", **ANY).selected_layers[:n]
        assert result.stats.readout.tokens == n


def test_the_log_has_a_line_every_so_many_passes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="viasd.readout"):
        result = plain("llama", **ANY, readout_log=10)
        assert len(caplog.records) == N // 10
        line = caplog.records[0].getMessage()
        depths = [7 - layer for layer in result.selected_layers[:10] if layer is not None]
        kept, mean = depths.count(0), sum(depths) / 10
        assert line.startswith(
            "readout of the full verifier: step 10, 10 tokens, 8 candidate layers, trough, p 1, layer "
        )
        assert f"layer {7 - mean:.2f} on average and {7 - max(depths)} at the shallowest" in line
        assert f"{mean:.3f} layers back on average and {max(depths)} at most" in line
        assert line.endswith(f"{kept} of 10 tokens kept at the last layer")
        caplog.clear()
        plain("llama", **ANY)
        assert caplog.records == []


# --- what else it touches ---------------------------------------------------------------------------------------------


def test_a_readout_that_moves_nothing_says_so_and_changes_nothing() -> None:
    own = plain("llama").token_ids
    for options in (
        {"readout_p": 0.0},
        {"backtrack_layers": 0},
        {"readout_compat": True},
        {"backtrack_ratio": 0.0, "backtrack_layers": 0},
    ):
        result = plain("llama", **{"readout": "trough", **options})
        assert result.token_ids == own
        assert set(result.selected_layers) == {7}
        assert any("moves nothing" in note for note in result.notes)
    assert not any("moves nothing" in note for note in plain("llama", **ANY).notes)


def test_compiled_passes_read_out_as_others_do() -> None:
    options = {**LOSSLESS["chain"], **ANY, "readout_tier": "both", "max_new_tokens": 16}
    model = model_of("gemma2", num_hidden_layers=4)
    expected = generate(viasd.make_pair(model, tokenizer()), prompt_ids(), **options)
    pair, counting = viasd.make_pair(model, tokenizer()), Counting()
    pair.target.compile(backend=counting, buckets=(8,))
    result = generate(pair, prompt_ids(), **options)
    assert counting.compiled > 0
    assert result.stats.slim_calls > 0
    assert (result.token_ids, result.selected_layers) == (expected.token_ids, expected.selected_layers)


def test_without_a_readout_nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    from viasd.layered import LayeredModel

    captured: list[tuple[int, ...]] = []
    own = LayeredModel.run

    def run(self: Any, hidden: Any, layers: Any, step: Any, capture: Any = (), *rest: Any, **more: Any) -> Any:
        captured.append(tuple(capture))
        return own(self, hidden, layers, step, capture, *rest, **more)

    monkeypatch.setattr(LayeredModel, "run", run)
    generate(pair_of("llama", "model"), prompt_ids(), **LOSSLESS["sd"])
    assert set(captured) == {()}
    generate(pair_of("llama", "model"), prompt_ids(), **LOSSLESS["chain"])
    assert {len(c) for c in captured} == {0, 1}  # the state at the first gap
    captured.clear()
    plain("llama", readout="trough", backtrack_layers=2)
    assert captured[0] == ()  # the prompt
    assert set(captured[1:]) == {(7, 6)}


def test_an_exception_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_of("llama", "model")
    hf = pair.target.model
    weights = {k: v.clone() for k, v in hf.state_dict().items()}
    attention = hf.config._attn_implementation
    before = plain("llama", **ANY).token_ids
    calls = iter([False, False, True])

    def failing(*rest: Any, **more: Any) -> Any:
        if next(calls):
            raise RuntimeError("in the middle")
        return read_together(*rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr("viasd.runtime.target.read_together", failing)
        with pytest.raises(RuntimeError, match="in the middle"):
            generate(pair, prompt_ids(), **LOSSLESS["sd"], **ANY)
    assert hf.config._attn_implementation == attention
    assert all(torch.equal(v, weights[k]) for k, v in hf.state_dict().items())
    assert not hf.model.layers[0]._forward_hooks
    assert generate(pair, prompt_ids(), max_new_tokens=N, **LOSSLESS["sd"], **ANY).token_ids == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"readout": "valley"}, "readout must be one of final, trough"),
        ({"readout_p": 0.5}, "readout_p only means something with a confident readout; add --readout trough"),
        ({"backtrack_layers": 3}, "backtrack_layers only means"),
        ({"readout_log": 5}, "readout_log only means"),
        ({"readout_unscored": True}, "readout_unscored only means"),
        ({**ANY, "backtrack_ratio": 0.5}, "two ways"),
        ({**ANY, "readout_p": 2.0}, "readout_p must be between"),
        ({**ANY, "readout_tier": "upper"}, "readout_tier must be one of full, slim, both"),
        ({**ANY, "readout_log": 0}, "readout_log must be at least 1"),
        ({**ANY, "readout_unscored": True}, "which the full verifier does not use"),
        ({**ANY, "strategy": "adadecode"}, "a confident readout is for the other strategies"),
        ({**ANY, "strategy": "slim"}, "never asks the full verifier; use --readout-tier slim"),
        ({**ANY, "strategy": "sd", "readout_tier": "slim"}, "needs a slim verifier, which strategy sd"),
        ({**ANY, "tiers": "2", "readout_tier": "both"}, "needs a slim verifier, which strategy auto with two tiers"),
        ({"readout": "final"}, "--readout final is for --readout-tier slim"),
        ({"readout": "final", "readout_tier": "slim", "readout_p": 0.5}, "means nothing to the last layer's readout"),
    ],
)
def test_options_that_mean_nothing_are_one_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        DecodingConfig(**options)


def test_requests_that_the_pair_can_not_fulfil() -> None:
    with pytest.raises(OptionError, match="readout_tier slim needs a slim verifier, but this is sd"):
        generate(pair_of("llama"), prompt_ids(), **ANY, readout_tier="slim")
    with pytest.raises(OptionError, match="last-m8 is 8 layers before the last"):
        plain("llama", readout="last-m8")
    with pytest.raises(OptionError, match="ends in a light head, which is its readout"):
        generate(
            pair_of("llama"), prompt_ids(), mask="prefix:4", heads="lens:4", **{**CHAIN, **ANY, "readout_tier": "slim"}
        )
    head = generate(pair_of("llama"), prompt_ids(), mask="prefix:4", heads="lens:4", **CHAIN, **ANY)
    assert head.token_ids == plain("llama", **ANY).token_ids[:16]
