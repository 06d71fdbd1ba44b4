from __future__ import annotations

import itertools
import random
import threading
from typing import Any

import pytest
import torch
from tiny import EVERY, LOSSLESS, generate, hf_greedy, model_of, pair_of, prompt_ids
from transformers import GenerationConfig, LogitsProcessorList

from viasd.errors import OptionError, ProcessorError
from viasd.sampling import Sampler, SamplingConfig

COMBINATIONS = [
    dict(zip(("temperature", "top_k", "top_p", "min_p", "repetition_penalty"), values, strict=True))
    for values in itertools.product((0.7, 1.0), (0, 5), (1.0, 0.8), (0.0, 0.2), (1.0, 1.3))
]


def theirs(options: dict[str, Any]) -> LogitsProcessorList:
    """The processors transformers' generate would use."""
    config = GenerationConfig(do_sample=True, **{**options, "top_k": options["top_k"] or None, "pad_token_id": 0})
    model = model_of("llama")
    prepare = {"logits_processor": LogitsProcessorList(), "device": "cpu", "input_ids_seq_length": 6}
    return model._get_logits_processor(config, **prepare)


@pytest.mark.parametrize("options", COMBINATIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_processed_rows_equal_those_of_transformers(options: dict[str, Any]) -> None:
    sampler = Sampler(SamplingConfig(**options))
    generator = torch.Generator().manual_seed(0)
    prefix = [3, 5, 3, 9, 17, 2]
    for _ in range(3):
        logits = torch.randn(40, generator=generator) * 2
        expected = theirs(options)(torch.tensor([prefix]), logits[None].clone()).softmax(-1)[0]
        row = sampler.ahead(prefix).row(logits)
        assert row.probs is not None
        assert torch.equal(row.probs, expected)


def test_warpers_do_not_touch_greedy_rows() -> None:
    sampler = Sampler(SamplingConfig(temperature=0, top_k=3, top_p=0.5, repetition_penalty=1.5))
    logits = torch.tensor([1.0, 1.2, 0.4])
    assert sampler.ahead([1]).row(logits).token == 0
    assert sampler.ahead([2]).row(logits).token == 1
    assert Sampler(SamplingConfig()).ahead([]).row(torch.tensor([2.0, 5.0, 5.0])).token == 1


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_block_is_processed_as_its_rows_one_by_one(temperature: float) -> None:
    sampler = Sampler(SamplingConfig(temperature=temperature, repetition_penalty=1.3))
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(1))
    prefix, tokens = [1, 2], [7, 7, 11, 4]
    block = sampler.ahead(prefix).block(logits, tokens)
    for i in range(5):
        assert torch.equal(block[i], sampler.ahead([*prefix, *tokens[:i]]).next(logits[i]))
    assert not torch.equal(block[1:], logits[1:])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.0),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("nan")),
    ],
)
def test_values_out_of_range_are_refused(option: str, value: float) -> None:
    with pytest.raises(OptionError, match=f"{option} must be .* but got {value}"):
        SamplingConfig(**{option: value})


class Recorder:
    """Notes what it is shown, and shifts the rows by a function of how often it was called."""

    def __init__(self, vocabulary: int = 300, strength: float = 0.0) -> None:
        self.seen: list[tuple[int, ...]] = []
        self.vocabulary = vocabulary
        self.strength = strength

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(len(self.seen))
        self.seen.append(tuple(ids[0].tolist()))
        return scores + self.strength * torch.randn(scores.shape, generator=generator)


@pytest.mark.parametrize("drafter", ["lookup", "model"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("strategy", EVERY)
def test_a_stateful_processor_sees_each_committed_token_once(strategy: str, temperature: float, drafter: str) -> None:
    recorder, ids = Recorder(), prompt_ids()
    options = {**EVERY[strategy], "temperature": temperature, "max_new_tokens": 16}
    result = generate(pair_of("llama", drafter), ids, processors=[recorder], **options)
    assert recorder.seen == [(*ids, *result.token_ids[:i]) for i in range(16)]


@pytest.mark.parametrize("drafter", ["lookup", "model"])
@pytest.mark.parametrize("strategy", [*LOSSLESS, "via-escalating"])
def test_a_processor_whose_rows_depend_on_its_state_gives_the_plain_output(strategy: str, drafter: str) -> None:
    options = LOSSLESS.get(strategy) or {**LOSSLESS["via0"], "recheck": False}
    pair = pair_of("llama", drafter, noise=0.1)
    plain = generate(pair, prompt_ids(), processors=[Recorder(strength=2.0)], strategy="plain")
    other = generate(pair, prompt_ids(), processors=[Recorder(strength=2.0)], **options)
    assert other.token_ids == plain.token_ids
    assert strategy == "plain" or other.stats.drafted > 0


class AlwaysEscalate:
    def judge(self, slim_logits: torch.Tensor, draft: Any) -> list[Any]:
        from viasd.runtime.gates import Decision

        # Accepts what q' likes best and escalates at the third position.
        return [Decision.ACCEPT if i < 2 else Decision.ESCALATE for i in range(len(draft.tokens))]


def test_an_escalation_behind_accepted_tokens_sees_the_processors_state_there(monkeypatch: pytest.MonkeyPatch) -> None:
    # The drafter is the target and the mask skips nothing: accepted tokens are q's own, so the output must be plain's.
    monkeypatch.setattr("viasd.runtime.gates.RatioGate.judge", AlwaysEscalate.judge)
    pair = pair_of("llama", "same")
    options = {"strategy": "cascade", "mode": "via", "tiers": "3", "mask": "even:0", "gate": "ratio", "recheck": False}
    plain = generate(pair, prompt_ids(), processors=[Recorder(strength=2.0)], strategy="plain")
    via = generate(pair, prompt_ids(), processors=[Recorder(strength=2.0)], **options)
    assert via.stats.escalated_rounds > 0
    assert via.stats.unseen > 0
    assert via.token_ids == plain.token_ids


class Ban:
    def __init__(self, tokens: set[int]) -> None:
        self.tokens = sorted(tokens)

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, self.tokens] = -torch.inf
        return scores


@pytest.mark.parametrize("drafter", ["lookup", "model"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("strategy", EVERY)
def test_a_banned_token_never_comes_from_any_tier(strategy: str, temperature: float, drafter: str) -> None:
    # The prompt already holds what the model says by itself, so that lookup proposes it; every third of these is banned.
    said = hf_greedy(model_of("llama"), prompt_ids(), 30)
    banned = set(said[::3])
    ids = [*prompt_ids(), *said, *prompt_ids()]
    processors = [Ban(banned)]
    options = {**EVERY[strategy], "temperature": temperature, "max_new_tokens": 30}
    result = generate(pair_of("llama", drafter), ids, processors=processors, **options)
    assert not banned & set(result.token_ids)
    if temperature == 0 and strategy in LOSSLESS:
        expected = hf_greedy(model_of("llama"), ids, 30, logits_processor=LogitsProcessorList(processors))
        assert result.token_ids == expected


def test_a_penalty_holds_where_only_the_slim_verifier_looks() -> None:
    # Nothing skipped, so q' = q: whatever the gate keeps must be near q's penalised best, however the drafter likes it.
    pair, ids = pair_of("llama", "lookup"), prompt_ids("abababababababab")
    options = {"strategy": "cascade", "mode": "via", "tiers": "3", "mask": "even:0", "gate": "ratio", "audit": 0.0}
    penalised = {"repetition_penalty": 3.0, "max_new_tokens": 30}
    plain = generate(pair, ids, strategy="plain", **penalised)
    assert generate(pair, ids, thresholds=_strict(), **options, **penalised).token_ids == plain.token_ids


def _strict() -> Any:
    from viasd.runtime.gates import Thresholds

    return Thresholds(1.0, 0.5)


def test_a_processor_that_cannot_be_copied_is_refused_by_name() -> None:
    class Locked:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores

    with pytest.raises(ProcessorError, match="logits processor 'Locked' can't be copied"):
        generate(pair_of("llama"), prompt_ids(), processors=[Locked()])


def test_the_users_own_processor_is_not_called_while_looking_ahead() -> None:
    recorder = Recorder()
    sampler = Sampler(SamplingConfig(temperature=1.0), [recorder])
    rng = random.Random(0)
    logits = torch.randn(4, 10)
    for _ in range(3):
        sampler.ahead([1, 2]).block(logits, [rng.randrange(10) for _ in range(3)])
    assert recorder.seen == []
    sampler.commit([1, 2], [3, 4], logits)
    assert recorder.seen == [(1, 2), (1, 2, 3)]
