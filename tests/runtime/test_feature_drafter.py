"""The feature drafter at decoding: what it says is what its definition says, and the output is the target's own."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import alone, same
from features import answer, feature_file, feature_pair, states_of
from laws import largest_error
from tiny import LOSSLESS, Counting, generate, hf_greedy, model_of, prompt_ids, save_target, tokenizer

import viasd
from viasd.draws import SeededDraws
from viasd.errors import DrafterError, OptionError
from viasd.feature import FeatureDrafterFile, FeatureShape
from viasd.featuremodel import FeatureModel
from viasd.identity import ModelIdentity
from viasd.probe import load_layered
from viasd.runtime.cli import main
from viasd.runtime.costs import cost_table
from viasd.runtime.drafters import FeatureDrafter
from viasd.runtime.lengths import DraftLength
from viasd.runtime.metrics import Counters
from viasd.runtime.session import Ending, rounds
from viasd.runtime.strategies import ChainedCascade, SpeculativeDecoding, Workbench
from viasd.runtime.target import TieredTarget
from viasd.sampling import Sampler, SamplingConfig
from viasd.testing import EnumeratingDraws, tiny_model

N = 40


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIASD_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("lookup_first", [False, True])
@pytest.mark.parametrize("strategy", LOSSLESS)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_temperature_0_is_the_target_alone(family: str, strategy: str, lookup_first: bool) -> None:
    pair = feature_pair(family, lookup_first=lookup_first)
    result = generate(pair, prompt_ids(), max_new_tokens=N, **LOSSLESS[strategy])
    assert result.token_ids == list(answer(family)[len(prompt_ids()) :][:N])


@pytest.mark.parametrize("gamma", [1, 3, 7])
@pytest.mark.parametrize("text", ["h", "hello wo"])
def test_short_prompts_and_any_gamma(text: str, gamma: int) -> None:
    ids = prompt_ids(text)
    expected = hf_greedy(model_of("llama"), ids, N)
    for name in ("sd", "chain2", "via-audited"):
        options = {**LOSSLESS[name], "gamma": gamma}
        assert generate(feature_pair(), ids, max_new_tokens=N, **options).token_ids == expected
    assert generate(feature_pair(), ids[:1], max_new_tokens=5, strategy="sd").token_ids == hf_greedy(
        model_of("llama"), ids[:1], 5
    )


def test_a_taught_drafter_is_believed() -> None:
    result = generate(feature_pair(), prompt_ids(), max_new_tokens=N, **LOSSLESS["sd"])
    assert result.stats.accepted / result.stats.gated > 0.5  # or the tests above would see refusals alone
    assert result.stats.drafter_calls > 0


def by_definition(prefix: Sequence[int], known: int, n: int, depth: int) -> torch.Tensor:
    """Rows ``[n, V]`` of a greedy block after a prefix, from nothing: states of transformers' forward, no cache kept."""
    file = feature_file(depth=depth)
    runner = FeatureModel(file, load_layered(model_of("llama")))
    states = states_of("llama", prefix)[:, :known]
    kv = runner.new_kv()
    tokens = list(prefix)
    hidden = runner.run(states, tokens[1 : known + 1], kv)[:, -1:]
    rows = []
    for token in tokens[known + 1 :]:
        hidden = runner.run(hidden, [token], kv)
    for _ in range(n):
        rows.append(runner.logits(hidden)[0])
        hidden = runner.run(hidden, [int(rows[-1].argmax())], kv)
    return torch.stack(rows)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("strategy", ["sd", "chain2", "via-audited"])
def test_every_draft_is_what_the_definition_says(strategy: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    drafting = FeatureDrafter.drafting

    def watched(self: FeatureDrafter, tokens: Any, *more: Any) -> Any:
        known = min(self._known, len(tokens) - 1)
        draft = yield from drafting(self, tokens, *more)
        if draft.tokens:
            seen.append((list(tokens), known, torch.stack(list(draft.logits))))
        return draft

    monkeypatch.setattr(FeatureDrafter, "drafting", watched)
    generate(feature_pair(depth=depth), prompt_ids(), max_new_tokens=24, **LOSSLESS[strategy])
    assert len(seen) > 3
    if strategy == "chain2":  # where the full verifier has not been, its own states are fed
        assert any(known < len(tokens) - 1 for tokens, known, _ in seen)
    for tokens, known, logits in seen:
        torch.testing.assert_close(logits, by_definition(tokens, known, len(logits), depth), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("seed", range(4))
def test_drafting_now_and_then_makes_no_difference(seed: int) -> None:
    rng = random.Random(seed)
    pair, counters = feature_pair(), Counters()
    assert pair.feature is not None
    target = TieredTarget(pair.target, None, counters)
    drafter = FeatureDrafter(pair.feature, target, counters)
    sampler = Sampler(SamplingConfig())
    tokens = [rng.randrange(5, 260) for _ in range(6)]
    feature_file(depth=1)  # is taught, which inference mode forbids
    with torch.inference_mode():
        target.prefill(tokens[:-1])
        drafter.settle(tokens)
        for _ in range(12):
            for _ in range(rng.choice([0, 1, 2])):
                draft = drafter.propose(tokens, 3, sampler.ahead(tokens), SeededDraws(0))
                expected = by_definition(tokens, len(tokens) - 1, 3, 1)
                torch.testing.assert_close(torch.stack(list(draft.logits)), expected, rtol=1e-3, atol=1e-3)
            block = [rng.randrange(5, 260) for _ in range(rng.randrange(4))]
            target.full([*tokens, *block], 1)
            if rng.random() < 0.4:  # another block, before anybody said what is kept of the first
                target.kv.roll_back(len(tokens) - 1)
                block = [rng.randrange(5, 260) for _ in block]
                target.full([*tokens, *block], 1)
            tokens += [*block[: rng.randrange(len(block) + 1)], rng.randrange(5, 260)]
            target.settle(tokens)
            drafter.settle(tokens)


def test_taken_back_below_what_it_has_run_it_goes_by_the_last_result_that_is_left() -> None:
    pair, tokens = feature_pair(), list(answer("llama")[:14])
    assert pair.feature is not None
    feature_file(depth=1)  # is taught, which inference mode forbids
    target = TieredTarget(pair.target, None, Counters())
    drafter = FeatureDrafter(pair.feature, target, Counters())
    sampler = Sampler(SamplingConfig(temperature=0.0))
    with torch.inference_mode():
        for prefix in (tokens, tokens[:9]):
            target.settle(prefix)
            target.prefill(prefix[:-1])
            drafter.settle(prefix)
            draft = drafter.propose(prefix, 3, sampler.ahead(prefix), SeededDraws(0))
            expected = by_definition(prefix, len(prefix) - 1, 3, 1)
            torch.testing.assert_close(torch.stack(list(draft.logits)), expected, rtol=1e-3, atol=1e-3)


def test_states_of_a_long_prompt_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = generate(feature_pair(), prompt_ids(), max_new_tokens=N, **LOSSLESS["sd"])
    monkeypatch.setattr("viasd.runtime.target.PREFILL_CHUNK", 7)
    monkeypatch.setattr("viasd.runtime.drafters.feature.PREFILL_CHUNK", 5)
    pieces = generate(feature_pair(), prompt_ids(), max_new_tokens=N, **LOSSLESS["sd"])
    assert pieces.token_ids == whole.token_ids
    assert pieces.stats.accepted == whole.stats.accepted


@pytest.mark.parametrize("how", ["int8", "compiled"])
def test_targets_that_run_in_another_form(how: str) -> None:
    model = tiny_model("llama")  # of its own: quantising takes its weights away
    quantization = how if how == "int8" else None
    pair = viasd.make_pair(model, tokenizer(), drafter=feature_file(), quantization=quantization)
    if how == "compiled":
        pair.target.compile(backend=Counting(), buckets=(1, 8))
    plain = generate(pair, prompt_ids(), max_new_tokens=N, strategy="plain")
    for name in ("sd", "chain2"):
        result = generate(pair, prompt_ids(), max_new_tokens=N, **LOSSLESS[name])
        assert result.token_ids == plain.token_ids
        assert result.stats.accepted > 0


def test_words_off_the_shortlist_are_never_drafted_and_are_said_all_the_same() -> None:
    file = feature_file("llama", 1, 100)
    assert file.shortlist.tolist() == list(range(0, 300, 3))
    pair = viasd.make_pair(model_of("llama"), tokenizer(), drafter=file)
    result = generate(pair, prompt_ids(), max_new_tokens=N, strategy="sd", draft_length="fixed", gamma=3)
    assert result.token_ids == list(answer("llama")[len(prompt_ids()) :][:N])
    drafted = [t for t, tier in zip(result.token_ids, result.tiers, strict=True) if tier == "drafter"]
    assert all(token % 3 == 0 for token in drafted)
    assert any(token % 3 for token in result.token_ids)


# --- the law, exact ---------------------------------------------------------------------------------------------------

WORDS = 5


def small() -> tuple[Any, FeatureDrafterFile]:
    """A target of five words, and a random drafter that knows four of them."""
    model = tiny_model("llama", num_hidden_layers=4, vocab_size=WORDS, scale=6.0)
    layered = load_layered(model)
    shape = FeatureShape.of(layered)
    torch.manual_seed(0)
    layers = {f"layers.{k}": v * 8 if v.dim() > 1 else v for k, v in shape.layers().state_dict().items()}
    weights = {"fuse.weight": torch.randn(32, 64), **layers}
    return model, FeatureDrafterFile(shape, weights, torch.tensor([0, 1, 3, 4]), ModelIdentity.of(layered, "small"))


@pytest.mark.parametrize(("strategy", "least"), [("sd", 0.0), ("sd", 0.35), ("chain", 0.0), ("chain", 0.35)])
def test_the_law_of_two_tokens_is_the_targets(strategy: str, least: float) -> None:
    model, file = small()
    layered = load_layered(model)
    runner = FeatureModel(file, layered)
    config, prompt = SamplingConfig(temperature=1.0), (1, 3)
    route = viasd.LayerMask.even(4, 0.5).route if strategy == "chain" else None
    law: dict[tuple[int, ...], float] = {}
    with torch.inference_mode():
        for draws in EnumeratingDraws().paths():
            counters, sampler, tokens = Counters(), Sampler(config), list(prompt)
            target = TieredTarget(layered, route, counters)
            drafter = FeatureDrafter(runner, target, counters)
            drafter.least = least
            bench = Workbench(target, sampler, draws, counters)
            one = SpeculativeDecoding(bench, drafter, gamma=2)
            chosen: Any = one if route is None else ChainedCascade(bench, drafter, gamma=1)
            target.prefill(tokens[:-1])
            for _ in rounds(chosen, target, drafter, sampler, tokens, Ending(3, frozenset())):
                if len(tokens) >= 4:
                    break
            out = tuple(tokens[2:4])
            law[out] = law.get(out, 0.0) + draws.weight
        expected = {}
        first = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
        for a in range(WORDS):
            second = model(torch.tensor([[*prompt, a]])).logits[0, -1].softmax(-1)
            for b in range(WORDS):
                expected[a, b] = float(first[a] * second[b])
    assert sum(law.values()) == pytest.approx(1, abs=1e-5)
    assert largest_error(law, expected) < 2e-6
    assert 0.01 < expected[1, 3] < 0.5 or max(expected.values()) < 0.9  # a law worth the test


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("lookup_first", [False, True])
def test_many_requests_at_once_are_each_what_they_are_alone(lookup_first: bool, temperature: float) -> None:
    pair = feature_pair(lookup_first=lookup_first)
    todo = [
        {
            "prompt": prompt_ids(f"{'once upon a time ' * (i % 3)}number {i}"),
            "seed": 100 + i,
            "max_new_tokens": 6 + 5 * (i % 3),
            "temperature": temperature,
            "ignore_eos": True,
            **{k: v for k, v in LOSSLESS[("sd", "chain2", "via-audited")[i % 3]].items() if k != "mask"},
        }
        for i in range(9)
    ]
    engine = viasd.Engine(pair, mask="even:0.25", concurrency=4, prompt_budget=20, chunk=9)
    numbers = [engine.add(**request) for request in todo]
    while engine.busy:
        engine.step()
    for number, request in zip(numbers, todo, strict=True):
        assert same(engine.results[number], alone(pair, request, "even:0.25"))
    assert engine.budget.reserved == 0


# --- choosing and refusing --------------------------------------------------------------------------------------------


def test_its_step_is_measured_and_decides_how_much_is_drafted() -> None:
    pair = feature_pair()
    table = cost_table(pair, None, 40, 3)
    assert 0 < table.drafter < 1
    assert cost_table(feature_pair(lookup_first=True), None, 40, 3).drafter > 0
    dear = {**table.as_json(), "drafter": 1e3}
    for first in (False, True):
        asked = feature_pair(lookup_first=first)
        asked.measured.update(pair.measured)
        for key in [k for k in pair.measured if k[0] == "costs"]:
            asked.measured[key] = type(table)(**dear)
        result = generate(asked, prompt_ids(), max_new_tokens=N, strategy="sd", gamma=3)
        assert result.stats.drafter_calls <= 2


def test_it_stops_where_the_next_token_is_hardly_ever_reached() -> None:
    pair, counters, sampler = feature_pair(), Counters(), Sampler(SamplingConfig())
    assert pair.feature is not None
    target = TieredTarget(pair.target, None, counters)
    drafter = FeatureDrafter(pair.feature, target, counters)
    tokens = list(answer("llama"))[:30]
    with torch.inference_mode():
        target.prefill(tokens[:-1])
        whole = drafter.propose(tokens, 6, sampler.ahead(tokens), SeededDraws(0))
        reached = torch.tensor(whole.confidence).cumprod(0)
        for n in range(6):  # at temperature 0 the largest probability is the drawn token's
            drafter.least = float(reached[n]) * 1.001
            cut = drafter.propose(tokens, 6, sampler.ahead(tokens), SeededDraws(0))
            assert cut.tokens == whole.tokens[:n]


def test_what_a_token_costs_decides_how_sure_it_must_be() -> None:
    cheap, dear = DraftLength(4, 0.01, [1.0, 1.0, 1.0, 1.0, 1.0]), DraftLength(4, 0.01, [1.0, 1.4, 1.8, 2.2, 2.6])
    assert 0 < cheap.least() < 0.05
    assert cheap.least() < dear.least() <= 0.6
    assert DraftLength(2, 0.0, [1.0, 0.9, 0.9]).least() == 0  # times are measured, and measured times stray


def test_its_record_is_believed_until_there_is_something_to_go_by() -> None:
    asked = []
    for places in ([0.0, 0.0, 0.0], [1.0, 1.0, 1.0]):
        file = replace(feature_file(), details={"decoded": {"by_place": places}})
        pair = viasd.make_pair(model_of("llama"), tokenizer(), drafter=file)
        cost_table(pair, None, len(prompt_ids()), 3)
        for key in [k for k in pair.measured if k[0] == "costs"]:
            times = {"drafter": 1e-3, "full": {m: 1.0 for m in range(1, 5)}}
            pair.measured[key] = replace(pair.measured[key], **times)
        asked.append(generate(pair, prompt_ids(), max_new_tokens=2, strategy="sd", gamma=3).stats.drafted)
    assert asked[0] == 0 < asked[1]


@pytest.mark.parametrize(("strategy", "first"), [("vertical", False), ("vertical", True), ("horizontal", True)])
def test_strategies_that_it_can_not_serve_say_so(strategy: str, first: bool) -> None:
    with pytest.raises(OptionError, match=f"strategy {strategy}"):
        generate(feature_pair(lookup_first=first), prompt_ids(), strategy=strategy)


def test_lookup_before_lookup_is_refused() -> None:
    with pytest.raises(OptionError, match="lookup alone"):
        viasd.make_pair(model_of("llama"), tokenizer(), drafter="lookup", lookup_first=True)


def test_another_target_is_refused() -> None:
    with pytest.raises(DrafterError, match="architecture"):
        viasd.make_pair(model_of("gemma2"), tokenizer(), drafter=feature_file())


# --- from the command line --------------------------------------------------------------------------------------------


@pytest.fixture
def target(tmp_path: Path) -> str:
    return save_target(tmp_path)


def run(*arguments: str) -> int:
    usual = ("--dtype", "float32", "--device", "cpu", "--max-new-tokens", "12", "--prompt", "hello hello", "--quiet")
    return main([*usual, "--ignore-eos", "--no-chat", *arguments])


@pytest.mark.parametrize("before", ["", "lookup+"])
def test_the_command_takes_a_file(before: str, tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.safetensors"
    feature_file().save(path)
    assert run("--target", target, "--drafter", f"{before}{path}", "--strategy", "sd", "--json") == 0
    drafted = json.loads(capsys.readouterr().out)
    assert run("--target", target, "--strategy", "plain", "--json") == 0
    assert json.loads(capsys.readouterr().out)["text"] == drafted["text"]
    assert drafted["stats"]["drafted"] >= 0


def test_bad_files_are_one_line_and_2(tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.safetensors"
    feature_file("llama", num_hidden_layers=3).save(other)
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(other.read_bytes()[:200])
    for path, said in (
        (other, "architecture"),
        (broken, "no file of a feature drafter"),
        (tmp_path / "none.safetensors", "can't read drafter file"),
    ):
        assert run("--target", target, "--drafter", str(path), "--strategy", "sd") == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1
        assert said in lines[0]
    assert run("--target", target, "--drafter", "lookup+lookup") == 2
    assert "lookup alone" in capsys.readouterr().err
    assert run("--target", target, "--drafter", str(other), "--drafter-device", "cpu") == 2
    assert "none of its own" in capsys.readouterr().err
