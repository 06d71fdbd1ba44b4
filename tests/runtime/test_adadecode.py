"""AdaDecode: equality with plain decoding, the wave's invariants, ends, ablation, and counters."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny import Counting as CountingBackend
from tiny import generate, hf_greedy, model_of, pair_of, prompt_ids, tokenizer, watch_writes

import viasd
from viasd.errors import HeadsError, OptionError
from viasd.heads import LightHeads
from viasd.kv import SequenceKV
from viasd.runtime.display import status_line
from viasd.runtime.exits import CalibratedExits, FixedExits
from viasd.runtime.metrics import Counters
from viasd.runtime.target import TieredTarget
from viasd.runtime.wave import LayerWave
from viasd.shortlist import ShortRow
from viasd.testing import FAMILIES, redundant_model, tiny_model

N = 40  # with the prompt of 24: eight windows of 8
LENS = "lens:1,3,5"
ADA: dict[str, Any] = {"strategy": "adadecode", "heads": LENS, "exit_rule": "fixed"}


class RandomExits:
    """Exits by the roll of a die, whatever the heads say."""

    def __init__(self, share: float = 0.5, seed: int = 0) -> None:
        self._share = share
        self._random = random.Random(seed)
        self.labels: list[float] = []

    def begin(self) -> None: ...

    def looks(self, layers: int, promise: float | None) -> bool:
        return self._random.random() < 0.8

    def exits(self, layers: int, certainty: float) -> bool:
        return self._random.random() < self._share

    def waits(self) -> None: ...

    def judged(self, labels: Sequence[float]) -> None:
        self.labels += labels


class OraclesHeads:
    """Heads that are told by the test what to guess: the token with the highest logit, or a wrong one at some positions."""

    def __init__(self, truth: Sequence[int], start: int, wrong: frozenset[int] = frozenset()) -> None:
        self._truth, self._start, self.wrong = truth, start, wrong
        self.position = 0

    def logits(self, position: int) -> torch.Tensor:
        index = position - self._start
        row = torch.full((300,), -5.0)
        token = self._truth[index] if 0 <= index < len(self._truth) else 7
        row[(token + 1) % 300 if index in self.wrong else token] = 5.0
        return row


def always(monkeypatch: pytest.MonkeyPatch, rule: Any) -> None:
    monkeypatch.setattr("viasd.runtime.assembly.FixedExits", lambda _threshold: rule)


def told(monkeypatch: pytest.MonkeyPatch, oracle: OraclesHeads) -> None:
    """Every head guesses what the oracle says of the position after the newest token."""

    def guess(self: Any) -> ShortRow:
        return ShortRow.of(oracle.logits(self._newest + 1))

    monkeypatch.setattr("viasd.runtime.wave.LayerWave.guess", guess)


_REFERENCES: dict[str, list[int]] = {}


def reference(family: str, n: int = N) -> list[int]:
    if family not in _REFERENCES:
        _REFERENCES[family] = hf_greedy(model_of(family), prompt_ids(), N)
    return _REFERENCES[family][:n]


# --- equality ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_random_exits_give_plain_greedy_decoding(family: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(3):
        always(monkeypatch, RandomExits(share, seed))
        result = generate(pair_of(family), prompt_ids(), max_new_tokens=N, max_pending=1 + seed * 2, **ADA)
        assert result.token_ids == reference(family)
        assert (result.lossless, result.mode) == (True, "lossless")
        assert sum(result.stats.early.refused.values()) > 0  # an untrained lens is mostly wrong
        assert max(result.stats.early.pending) <= 1 + seed * 2


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"llama", "gemma2"}))
def test_every_other_family(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch, RandomExits(0.5))
    assert generate(pair_of(family), prompt_ids(), max_new_tokens=N, **ADA).token_ids == reference(family)


@pytest.mark.parametrize("layers", ["hf", "fused"])
def test_however_layers_run(layers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch, RandomExits(0.5))
    pair = viasd.make_pair(tiny_model("gemma2"), tokenizer(), layers=layers)
    assert generate(pair, prompt_ids(), max_new_tokens=N, **ADA).token_ids == reference("gemma2")


def test_compiled_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch, RandomExits(0.5))
    model = tiny_model("gemma2", num_hidden_layers=3)
    pair, backend = viasd.make_pair(model, tokenizer()), CountingBackend()
    pair.target.compile(backend=backend, buckets=(8,))
    result = generate(pair, prompt_ids(), max_new_tokens=20, strategy="adadecode", heads="lens:2")
    assert result.token_ids == hf_greedy(model, prompt_ids(), 20)
    assert 0 < backend.compiled <= 3  # bottom to exit, exit to top, bottom to top


@pytest.mark.parametrize("options", [{"max_pending": 0}, {"exit_threshold": 1.0}, {"exit_threshold": 7.5}])
def test_without_exits_it_is_plain_decoding(options: dict[str, Any]) -> None:
    for temperature in (0.0, 0.9):
        plain = generate(pair_of("gemma2"), prompt_ids(), strategy="plain", temperature=temperature)
        result = generate(pair_of("gemma2"), prompt_ids(), temperature=temperature, **ADA, **options)
        assert result.token_ids == plain.token_ids
        assert result.stats.early.exits == {}
        assert result.stats.full_calls == result.stats.emitted == 40
        assert result.stats.layers_per_token == 8


def test_layers_that_do_nothing_are_saved() -> None:
    # Layers 3 to 7 pass their input on, so a lens behind layer 3 is always right.
    pair = viasd.make_pair(redundant_model(range(3, 8)), tokenizer())
    options = {"strategy": "adadecode", "heads": "lens:3", "exit_threshold": 0.0, "max_pending": 4}
    result = generate(pair, prompt_ids(), max_new_tokens=20, **options)
    assert result.token_ids == generate(pair, prompt_ids(), max_new_tokens=20, strategy="plain").token_ids
    stats = result.stats
    assert stats.early.exits == {3: 16}
    assert stats.early.refused == {}
    assert stats.early.pending == {4: 4}
    assert stats.layers_per_token == (4 * 3 + 8) / 5
    assert stats.by_tier == {"drafter": 16, "slim": 0, "full": 4}


def test_guesses_obey_the_requests_processors() -> None:
    # The same lens: it is wrong only where the penalty, or what the processor forbids, is not seen by it.
    def forbids(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        logits[:, torch.cat([ids[0, -8:], logits[0].argmax()[None]])] = -torch.inf
        return logits

    pair = viasd.make_pair(redundant_model(range(3, 8)), tokenizer())
    heads = LightHeads((3,), shortlist=torch.arange(300))
    options = {"processors": [forbids], "repetition_penalty": 1.3, "max_new_tokens": 20}
    result = generate(pair, prompt_ids(), strategy="adadecode", heads=heads, exit_threshold=0.0, **options)
    assert result.token_ids == generate(pair, prompt_ids(), strategy="plain", **options).token_ids
    assert (sum(result.stats.early.exits.values()), result.stats.early.refused) == (16, {})


@pytest.mark.parametrize("wrong", [0, 2, 4])
def test_a_refusal_of_the_first_the_middle_and_the_last_guess(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = reference("gemma2")
    told(monkeypatch, OraclesHeads(truth, len(prompt_ids()), frozenset({wrong})))
    result = generate(pair_of("gemma2"), prompt_ids(), max_new_tokens=12, exit_threshold=0.9, **ADA)
    assert result.token_ids == truth[:12]
    # A cycle of five guesses, cut at the wrong one, whose place the full verifier fills; then whole cycles.
    assert result.tiers[: wrong + 1] == ["drafter"] * wrong + ["full"]
    assert sum(result.stats.early.refused.values()) == 1
    assert result.stats.rejection_rate > 0


# --- the wave ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_keys_of_a_layer_are_contiguous_and_never_more_than_those_of_the_layer_before(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [0] * 8
    begun: list[int] = []
    joined = 0

    def watched(kv: SequenceKV, layer: int, start: int, tokens: int) -> None:
        nonlocal joined
        committed = kv.full_len  # a refusal cuts every layer back to what was committed
        assert committed <= start <= lengths[layer]
        if start < lengths[layer]:
            begun.append(layer)
        joined = max(joined, tokens if start > 23 else 0)
        lengths[layer] = start + tokens
        assert lengths[layer] <= (lengths[layer - 1] if layer else lengths[0])

    watch_writes(monkeypatch, watched)
    always(monkeypatch, RandomExits(0.6))
    for seed in range(3):
        lengths[:] = [0] * 8
        result = generate(pair_of(family), prompt_ids(), max_new_tokens=N, seed=seed, **ADA)
        assert result.token_ids == reference(family)
    assert joined > 2  # tokens did travel together
    assert 0 in begun  # and refusals did cut the keys back


def test_no_layer_runs_a_position_twice_within_a_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[int, int]] = []

    def watched(_: SequenceKV, layer: int, start: int, tokens: int) -> None:
        ran.extend((layer, start + i) for i in range(tokens))

    watch_writes(monkeypatch, watched)
    truth = reference("llama")
    told(monkeypatch, OraclesHeads(truth, len(prompt_ids())))  # nothing is ever refused
    result = generate(pair_of("llama"), prompt_ids(), max_new_tokens=N, exit_threshold=0.9, **ADA)
    assert result.token_ids == truth
    assert len(ran) == len(set(ran)) == 8 * (len(prompt_ids()) + N - 1)


@torch.inference_mode()
def test_watermarks_of_a_cycle_are_what_it_ran_and_of_the_next_what_was_committed() -> None:
    pair, ids = pair_of("gemma2"), prompt_ids()
    target = TieredTarget(pair.target, None, Counters())
    target.prefill(ids[:-1])
    wave = LayerWave(target, LightHeads.lens((1, 3)).bind(pair.target))

    def cycle(tokens: list[int], guesses: list[int]) -> torch.Tensor:
        wave.begin(tokens)
        assert target.kv.full_len == target.kv.slim_len == len(tokens) - 1
        for token in [tokens[-1], *guesses][:-1]:
            wave.enter(token)
            wave.climb(exits=True)
            wave.wait()
        wave.enter(guesses[-1])
        while wave.climb(exits=False) < wave.layers:
            pass
        logits = wave.top()
        assert target.kv.full_len == target.kv.slim_len == len(tokens) + len(guesses)
        return logits

    def alone(tokens: list[int]) -> torch.Tensor:
        return model_of("gemma2")(torch.tensor([tokens])).logits[0]

    torch.testing.assert_close(cycle(ids, [5, 6, 7]), alone([*ids, 5, 6, 7])[-4:], rtol=1e-4, atol=1e-4)
    # The second guess was refused: what was run beyond it counts for nothing.
    committed = [*ids, 5, 9]
    torch.testing.assert_close(cycle(committed, [8]), alone([*committed, 8])[-2:], rtol=1e-4, atol=1e-4)


# --- ends -------------------------------------------------------------------------------------------------------------


def test_no_more_tokens_than_asked_for_and_nothing_run_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[int] = []

    def watched(kv: SequenceKV, layer: int, start: int, tokens: int) -> None:
        ends.append(start + tokens)

    watch_writes(monkeypatch, watched)
    told(monkeypatch, OraclesHeads(reference("llama"), len(prompt_ids())))
    for n in range(1, 9):
        result = generate(pair_of("llama"), prompt_ids(), max_new_tokens=n, exit_threshold=0.9, **ADA)
        assert result.token_ids == reference("llama", n)
        assert max(ends) < len(prompt_ids()) + n
        ends.clear()


def test_each_token_in_turn_declared_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, whole = pair_of("llama"), reference("llama", 20)
    told(monkeypatch, OraclesHeads(whole, len(prompt_ids()), frozenset({3, 11})))
    options = {**ADA, "exit_threshold": 0.9, "max_new_tokens": 20}
    for token in dict.fromkeys(whole):
        monkeypatch.setitem(vars(pair), "eos_ids", frozenset({token}))
        result = generate(pair, prompt_ids(), ignore_eos=False, **options)
        assert result.token_ids == whole[: whole.index(token) + 1]
        assert result.finish_reason == "eos"
        assert generate(pair, prompt_ids(), **options).token_ids == whole


def test_an_end_that_was_guessed_wrongly_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, whole = pair_of("llama"), reference("llama", 20)
    oracle = OraclesHeads(whole, len(prompt_ids()), frozenset({2}))
    told(monkeypatch, oracle)
    wrong = (whole[2] + 1) % 300
    assert wrong not in whole
    monkeypatch.setitem(vars(pair), "eos_ids", frozenset({wrong}))
    options = {**ADA, "exit_threshold": 0.9, "max_new_tokens": 20, "ignore_eos": False}
    result = generate(pair, prompt_ids(), **options)
    assert result.token_ids == whole
    # Two right guesses, the wrong end, and no guess after it.
    assert 3 in result.stats.early.pending


def test_a_stop_string_may_end_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, OraclesHeads(reference("llama"), len(prompt_ids())))
    options = {**ADA, "exit_threshold": 0.9, "max_new_tokens": 20}
    text = generate(pair_of("llama"), prompt_ids(), **options).text
    stops = [text[i : i + 2] for i in range(len(text) - 1)]
    for stop in [s for i, s in enumerate(stops) if "\ufffd" not in s and text.find(s) == i]:
        result = generate(pair_of("llama"), prompt_ids(), stop=stop, **options)
        assert (result.text, result.finish_reason) == (text[: text.find(stop)], "stop")


def test_a_repetition_penalty_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch, RandomExits(0.5))
    expected = hf_greedy(model_of("gemma2"), prompt_ids(), 30, repetition_penalty=1.3)
    result = generate(pair_of("gemma2"), prompt_ids(), max_new_tokens=30, repetition_penalty=1.3, **ADA)
    assert result.token_ids == expected
    assert expected != reference("gemma2", 30)


class Counting:
    """A processor with a state: it bans the token it saw chosen most, and must see each committed token once."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        self.calls.append(ids.shape[1])
        out = logits.clone()
        out[:, (7 * len(self.calls)) % 300] = -torch.inf
        out[:, int(logits.argmax()) if len(self.calls) % 3 == 0 else 0] = -torch.inf
        return out


def test_a_processor_with_a_state_sees_each_committed_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = Counting(), Counting()
    expected = generate(pair_of("llama"), prompt_ids(), strategy="plain", processors=[one])
    always(monkeypatch, RandomExits(0.6))
    result = generate(pair_of("llama"), prompt_ids(), processors=[other], **ADA)
    assert result.token_ids == expected.token_ids
    assert other.calls == one.calls == list(range(24, 64))


def test_a_head_that_is_read_in_vain_leaves_no_trace_in_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    class Once:
        """Bans the likeliest token from its second call for a position on."""

        def __init__(self) -> None:
            self.length = self.calls = 0

        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1 if ids.shape[1] == self.length else 1
            self.length = ids.shape[1]
            if self.calls > 1:
                scores[:, scores.argmax(dim=-1)] = -torch.inf
            return scores

    class LastExit(RandomExits):
        def looks(self, layers: int, promise: float | None) -> bool:
            return True

        def exits(self, layers: int, certainty: float) -> bool:
            return layers == 5

    truth = reference("llama")
    told(monkeypatch, OraclesHeads(truth, len(prompt_ids())))
    always(monkeypatch, LastExit())
    result = generate(pair_of("llama"), prompt_ids(), max_new_tokens=N, processors=[Once()], **ADA)
    assert result.token_ids == truth
    assert sum(result.stats.early.exits.values()) > N // 2
    assert not result.stats.early.refused  # every guess was the head's own first choice, though three heads were read


def test_a_processor_that_bans_all_that_the_heads_know(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_high(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        out = torch.full_like(logits, -torch.inf)
        out[:, 200:] = logits[:, 200:]
        return out

    always(monkeypatch, RandomExits(0.6))
    heads = LightHeads((1, 3, 5), shortlist=torch.arange(100))
    for temperature in (0.0, 1.0):
        options = {"processors": [only_high], "temperature": temperature, "max_new_tokens": 20}
        result = generate(pair_of("llama"), prompt_ids(), strategy="adadecode", heads=heads, **options)
        assert min(result.token_ids) >= 200
        if not temperature:
            assert result.token_ids == generate(pair_of("llama"), prompt_ids(), strategy="plain", **options).token_ids


# --- seeds, rules, modes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["fixed", "auto"])
def test_two_identical_calls_behave_identically(rule: str) -> None:
    for temperature in (0.0, 1.0):
        options = {**ADA, "exit_rule": rule, "temperature": temperature, "max_new_tokens": 30}
        options |= {"exit_threshold": 0.1} if rule == "fixed" else {}
        one, two = (generate(pair_of("llama"), prompt_ids(), **options) for _ in range(2))
        assert one.token_ids == two.token_ids
        assert one.stats.early == two.stats.early
        other = generate(pair_of("llama"), prompt_ids(), **{**options, "seed": 2})
        assert (other.token_ids == one.token_ids) == (temperature == 0)


def test_calibrated_exits_come_to_trust_what_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = hf_greedy(model_of("llama"), prompt_ids(), 120)
    options = {**ADA, "heads": "lens:6", "exit_rule": "auto", "max_new_tokens": 120}
    shares = []
    for wrong in (frozenset(), frozenset(range(120))):
        told(monkeypatch, OraclesHeads(truth, len(prompt_ids()), frozenset(wrong)))
        result = generate(pair_of("llama"), prompt_ids(), **options)
        assert result.token_ids == truth
        shares.append(sum(result.stats.early.exits.values()))
    assert shares[0] > 90
    assert 0 < shares[1] < 180  # of five a cycle at first, they are given up


def test_bounded_mode_says_so() -> None:
    result = generate(pair_of("llama"), prompt_ids(), mode="bounded", alpha=0.5, exit_threshold=0.05, **ADA)
    assert (result.mode, result.lossless) == ("bounded", False)


def test_without_verification_the_answer_says_what_it_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = reference("llama")
    told(monkeypatch, OraclesHeads(truth, len(prompt_ids()), frozenset({1})))
    options = {**ADA, "exit_threshold": 0.9, "verify": "off", "max_new_tokens": 6}
    result = generate(pair_of("llama"), prompt_ids(), **options)
    assert result.token_ids[:2] == [truth[0], (truth[1] + 1) % 300]  # what no verification would have caught
    assert (result.mode, result.lossless) == ("unbounded", False)
    stats = result.stats
    assert (stats.unseen, stats.emitted, stats.audit.tokens) == (5, 6, 5)
    assert stats.audit.disagreed >= 1
    assert result.notes[-1] == result.loss
    assert "LOSSY" in result.loss
    assert f"{stats.audit.disagreed:g} of 5" in result.loss
    sampled = generate(pair_of("llama"), prompt_ids(), temperature=1.0, **options).stats
    assert 0 < sampled.audit.disagreed <= sampled.audit.tokens


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"strategy": "sd", "exit_threshold": 0.5}, "adadecode"),
        ({"strategy": "adadecode", "exit_rule": "auto", "exit_threshold": 0.5}, "exit_rule"),
        ({"strategy": "adadecode", "exit_threshold": -0.1}, "exit_threshold"),
        ({"strategy": "adadecode", "exit_threshold": float("nan")}, "exit_threshold"),
        ({"strategy": "adadecode", "max_pending": -1}, "max_pending"),
        ({"strategy": "adadecode", "verify": "off", "mode": "lossless"}, "verify"),
        ({"strategy": "adadecode", "verify": "no"}, "verify"),
        ({"strategy": "adadecode", "exit_rule": "probe"}, "exit_rule"),
        ({"strategy": "adadecode", "mode": "via"}, "via"),
        ({"strategy": "adadecode", "tiers": "3"}, "tiers"),
        ({"strategy": "adadecode", "heads": "lens:0"}, "exits"),
        ({"strategy": "adadecode", "heads": "lens:5,3"}, "exits"),
        ({"strategy": "adadecode", "heads": "lens:x"}, "lens|layer counts"),
        ({"strategy": "sd", "heads": LENS}, "leave them out"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], named: str) -> None:
    with pytest.raises(OptionError, match=named):
        generate(
            pair_of("llama"), prompt_ids(), **{"heads": LENS, **options} if options["strategy"] != "sd" else options
        )


def test_heads_that_are_missing_or_of_another_target() -> None:
    with pytest.raises(HeadsError, match="viasd-fit heads"):
        generate(pair_of("llama"), prompt_ids(), strategy="adadecode")
    with pytest.raises(HeadsError, match="8"):
        generate(pair_of("llama"), prompt_ids(), strategy="adadecode", heads="lens:3,8")


# --- what is shown ----------------------------------------------------------------------------------------------------


def test_the_status_line_and_the_json_tell_of_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, OraclesHeads(reference("llama"), len(prompt_ids()), frozenset({3})))
    result = generate(pair_of("llama"), prompt_ids(), max_new_tokens=10, exit_threshold=0.9, **ADA)
    early = result.as_json()["stats"]["early"]
    assert early["exits"] == {"1": sum(result.stats.early.exits.values())}
    assert early["refused"] == {"1": 1}
    assert sum(early["pending"].values()) == result.stats.rounds
    assert early["layers_per_token"] == early["layer_passes"] / 10
    assert f"{early['layers_per_token']:.1f} layers/token" in status_line(result)
    assert "1 refused" in status_line(result)
    assert result.as_json()["heads"] == LENS
    plain = generate(pair_of("llama"), prompt_ids(), max_new_tokens=3, strategy="plain")
    assert "layers/token" not in status_line(plain)


def test_counts_add_up_and_their_faults_are_found() -> None:
    one, two = Counters(), Counters()
    one.early.ended([3, 5], 1)
    two.early.ended([3], None)
    two.early.layer_passes = 4
    one.merge(two)
    assert one.early.exits == {3: 2, 5: 1}
    assert one.early.refused == {5: 1}
    assert one.early.pending == {2: 1, 1: 1}
    assert one.early.layer_passes == 4
    assert one.check() == []
    one.early.refused[7] = 1
    one.early.pending[2] = 5
    assert len(one.check()) == 2


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, CalibratedExits),
        ({"exit_rule": "auto"}, CalibratedExits),
        ({"exit_rule": "fixed"}, FixedExits),
        ({"exit_threshold": 0.6}, FixedExits),
    ],
)
def test_the_rule_that_is_used(options: dict[str, Any], kind: type) -> None:
    events = viasd.stream(pair_of("llama"), prompt_ids(), strategy="adadecode", heads=LENS, max_new_tokens=3, **options)
    assert type(events.session._strategy._rule) is kind  # type: ignore[attr-defined]
