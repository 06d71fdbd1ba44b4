from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import hf_greedy, model_of, pair_of, prompt_ids, tokenizer

import viasd
from viasd.errors import MaskError, OptionError
from viasd.mask import LayerMask
from viasd.probe import load_layered
from viasd.runtime import assembly
from viasd.runtime.bench.config import BenchConfig
from viasd.runtime.bench.costs import bytes_per_token
from viasd.runtime.bench.dataset import Dataset, Item
from viasd.runtime.bench.grid import Grid, make_grid, random_mask
from viasd.runtime.bench.methods import Answer, MethodSpec
from viasd.runtime.bench.peers import Peer
from viasd.runtime.bench.records import ResultFile
from viasd.runtime.bench.report import _exit_lines
from viasd.runtime.bench.run import Bench
from viasd.runtime.bench.summary import figures_by_method
from viasd.testing import tiny_model

CONFIG = BenchConfig(max_new_tokens=20, ignore_eos=True)


@pytest.mark.parametrize("kind", ["generate", "assisted", "lookup"])
def test_a_peer_gives_what_transformers_gives_and_leaves_no_trace(kind: str) -> None:
    pair, ids = pair_of("llama", "model"), prompt_ids()
    assert pair.drafter is not None
    model, settings = pair.target.model, pair.drafter.model.generation_config
    before = settings.to_dict()
    # What a checkpoint's generation config asks for is not what our methods are asked for.
    model.generation_config.repetition_penalty = 1.7
    try:
        answer = Peer(pair, kind, kind, CONFIG, 3).answer(ids)
    finally:
        model.generation_config.repetition_penalty = None
    assert answer.tokens == hf_greedy(model_of("llama"), ids, 20)
    assert answer.counters is None
    assert (answer.target_calls == 20) == (kind == "generate")
    assert not model._forward_pre_hooks
    assert settings.to_dict() == before


def test_a_sampling_peer_draws_from_the_whole_law_by_its_seed() -> None:
    pair, ids = pair_of("llama", "model"), prompt_ids()
    config = BenchConfig(max_new_tokens=20, ignore_eos=True, temperature=1.0, seed=3)
    one, two = (Peer(pair, "generate", "generate", config, 3).answer(ids).tokens for _ in range(2))
    assert one == two != hf_greedy(model_of("llama"), ids, 20)


def test_an_eos_ends_a_peer_where_it_ends_ours() -> None:
    pair, ids = pair_of("llama"), prompt_ids()
    grid = make_grid(pair, BenchConfig(strategies=("plain",), peers=("generate", "lookup"), max_new_tokens=300))
    tokens = [m.answer(ids).tokens for m in grid.methods.values()]
    assert tokens[0] == tokens[1] == tokens[2]


class Fake:
    """A method that notes when it was called."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.spec = MethodSpec(name, "own", lossless=True)
        self.prepared = 0
        self._calls = calls

    def prepare(self, ids: Sequence[int]) -> None:
        self.prepared += 1

    def answer(self, ids: Sequence[int]) -> Answer:
        self._calls.append(self.spec.name)
        return Answer([1], "x", 1.0, "length", 1)

    def settle(self) -> None:
        self._calls.append("|")


def test_methods_take_turns_and_the_first_one_rotates() -> None:
    calls: list[str] = []
    methods: dict[str, Any] = {name: Fake(name, calls) for name in ("plain", "a", "b")}
    dataset = Dataset("d", "0", (Item("t", "1", "x"), Item("t", "2", "y")))
    config = BenchConfig(repeats=2, warmup=1)
    Bench(pair_of("llama"), config, Grid(methods), dataset, chat=False).run(ResultFile(None, {}, list(methods)))
    warm, first, second = "plain a b", "plain a b a b plain | | |", "a b plain b plain a | | |"
    assert " ".join(calls) == f"{warm} {first} {second}"
    assert {m.prepared for m in methods.values()} == {2}  # once a prompt


def test_a_guard_learns_from_prompt_to_prompt_but_not_from_repeats() -> None:
    pair = pair_of("llama", "model")
    config = BenchConfig(strategies=("cascade",), peers=(), modes=("via",), masks=("even:0.25",), ignore_eos=True)
    method = make_grid(pair, config).own[1]
    one, two = method.answer(prompt_ids()), method.answer(prompt_ids())
    assert method._guard is None
    assert one.tokens == two.tokens
    method.settle()
    assert method._guard is not None
    seen = method._guard.estimator.observations
    assert seen > 0
    method.answer(prompt_ids())
    assert method._guard.estimator.observations == seen
    method.settle()
    assert method._guard.estimator.observations > seen


def test_a_random_mask_skips_as_much_and_comes_from_its_seed() -> None:
    even = LayerMask.even(30, 0.45)
    one, two, three = (random_mask(even, seed) for seed in (0, 0, 1))
    assert one == two != three
    assert sum(one.keep) == sum(three.keep) == sum(even.keep)
    assert one.keep[0]
    assert one.keep[-1]


def test_a_mask_of_another_target_is_refused(tmp_path: Path) -> None:
    LayerMask.even(30, 0.5).save(tmp_path / "m.json")
    config = BenchConfig(strategies=("cascade",), masks=(str(tmp_path / "m.json"),))
    with pytest.raises(MaskError, match=r"has 30 layers, but .* has 8"):
        make_grid(pair_of("llama"), config)


def test_pass_times_of_a_new_length_are_measured_before_the_clock_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, ids = viasd.make_pair(model_of("llama"), tokenizer()), prompt_ids()
    grid = make_grid(pair, BenchConfig(strategies=("plain", "sd"), peers=(), max_new_tokens=4))
    pair.measured.clear()
    asked: list[int] = []
    usual = assembly.cost_table

    def cost_table(*rest: Any) -> Any:
        asked.append(len(pair.measured))
        return usual(*rest)

    monkeypatch.setattr(assembly, "cost_table", cost_table)
    grid.methods["sd"].prepare(ids)
    grid.methods["sd"].answer(ids)
    assert asked == [0, 1]  # known by the time of the answer


def test_transformers_is_left_out_where_it_has_no_weights_to_run() -> None:
    pair = viasd.make_pair(tiny_model("llama"), tokenizer(), quantization="int8")
    grid = make_grid(pair, BenchConfig(strategies=("plain",), peers=("generate", "lookup"), max_new_tokens=4))
    assert list(grid.methods) == ["plain"]
    assert sum("were freed when it was quantised" in note for note in grid.notes) == 2


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_bytes_a_pass_reads_are_those_of_the_model_fused_or_not(family: str) -> None:
    bytes_of = [bytes_per_token(load_layered(tiny_model(family), layers=how)) for how in ("hf", "auto", "fused")]
    assert bytes_of[1] == bytes_of[2] <= bytes_of[0] < bytes_of[1] + 4096  # rotary tables and scales may be buffers


def test_early_exits_and_prefixes_are_measured_with_their_heads() -> None:
    pair = pair_of("llama", "model")
    config = BenchConfig(
        strategies=("adadecode", "cascade"),
        peers=(),
        masks=("prefix:5",),
        heads="lens:2,5",
        max_new_tokens=12,
        ignore_eos=True,
        repeats=1,
        warmup=0,
        check=True,
    )
    grid = make_grid(pair, config)
    assert list(grid.methods) == ["plain", "adadecode", "adadecode/fixed", "cascade"]
    for name in list(grid.methods)[1:]:
        assert grid.methods[name].spec.options["heads"][0] == "lens:2,5"
    items = (Item("t", "one", "hello hello"), Item("u", "two", "one two three"))
    bench = Bench(pair, config, grid, Dataset("mine", "0", items), chat=False)
    results = ResultFile(None, {}, list(grid.methods))
    bench.run(results)
    figures = figures_by_method(results.records, list(grid.methods))
    assert "layers_per_token" not in figures["plain"]
    for name in ("adadecode", "adadecode/fixed"):
        own = [r["counts"]["early"] for r in results.records if r["method"] == name]
        assert figures[name]["layers_per_token"] == sum(e["layer_passes"] for e in own) / 24
    assert all(r["check"]["equal"] for r in results.records if r["method"] != "plain")
    summary = {
        "methods": figures,
        "tasks": {
            t: {"methods": figures_by_method([r for r in results.records if r["task"] == t], figures)} for t in "tu"
        },
    }
    lines = _exit_lines(summary)
    assert [line.split(":")[0] for line in lines] == ["adadecode", "adadecode/fixed"]
    assert all("layers/token" in line and "; t " in line and "; u " in line for line in lines)


def test_guesses_taken_untested_are_measured_as_what_they_are() -> None:
    pair = pair_of("llama", "model")
    config = BenchConfig(
        strategies=("adadecode",),
        peers=(),
        heads="lens:2,5",
        max_new_tokens=12,
        ignore_eos=True,
        repeats=1,
        warmup=0,
        unverified=True,
    )
    grid = make_grid(pair, config)
    assert list(grid.methods)[3:] == ["adadecode/unverified", "adadecode/fixed/unverified"]
    # A rule that always exits: an untrained lens is mostly wrong, and the text soon another.
    method = grid.own[-1]
    decoding = replace(method.config.decoding, exit_threshold=0.0)
    method.config = replace(method.config, decoding=decoding)
    bench = Bench(pair, config, grid, Dataset("mine", "0", (Item("t", "one", "hello hello"),)), chat=False)
    results = ResultFile(None, {}, list(grid.methods))
    bench.run(results)
    figures = figures_by_method(results.records, list(grid.methods))["adadecode/fixed/unverified"]
    assert figures["exits"] == {"2": 10}
    plain, untested = (viasd.generate(pair, pair.encode("hello hello"), **o).token_ids for o in _both(decoding))
    assert figures["as_plain"] == sum(a == b for a, b in zip(plain, untested, strict=True)) / 12
    assert 0 <= figures["as_plain"] < 1
    assert 0 < figures["disagreement"] <= 10 / 12  # what the top of a cycle says is the target's own
    with pytest.raises(OptionError, match="adadecode"):
        BenchConfig(unverified=True)


def _both(decoding: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    usual = {"max_new_tokens": 12, "ignore_eos": True}
    untested = {"heads": "lens:2,5", "verify": "off", "exit_rule": "fixed", "exit_threshold": decoding.exit_threshold}
    return {"strategy": "plain", **usual}, {"strategy": "adadecode", **untested, **usual}


@pytest.mark.parametrize("what", [{"strategies": ("adadecode",)}, {"masks": ("prefix:3",)}])
def test_what_needs_heads_asks_for_them(what: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="--heads"):
        BenchConfig(**what)
