"""With viasd inside, `model.generate` gives, token for token and call for call, what it gives without."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from inside import Recorder, both, inputs
from tiny import TEXT, model_of, tokenizer
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    StoppingCriteria,
    StopStringCriteria,
    SynthIDTextWatermarkingConfig,
    TextIteratorStreamer,
    TypicalLogitsWarper,
    WatermarkingConfig,
)

import viasd
from viasd.mask import LayerMask
from viasd.testing import FAMILIES, perturbed, tiny_model

N = 40
BATCH = ("hello hello world, hello", "hi there, hi", "a")
# Else nothing is drafted where it does not pay, and nothing of tiny models does.
FIXED: dict[str, Any] = {"viasd_options": {"draft_length": "fixed"}}
HOWS: dict[str, dict[str, Any]] = {
    "lookup": FIXED,
    "mask": {"viasd_mask": "even:0.3"},
    "self": {"assistant_model": "self", "viasd_strategy": "sd", "viasd_gamma": 3, **FIXED},
    "exits": {"viasd_strategy": "adadecode", "viasd_heads": "lens:3,5"},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "penalty": {"repetition_penalty": 1.5},
    "ngrams": {"no_repeat_ngram_size": 2},
    "bad-words": {"bad_words_ids": [[101], [234, 234]]},
    "bias": {"sequence_bias": [[[40], 30.0], [[40, 41], -40.0]]},
    "shortest": {"min_new_tokens": 12},
    "shortest-whole": {"min_length": 40},
    "suppressed": {"suppress_tokens": list(range(100, 200)), "begin_suppress_tokens": list(range(200, 290))},
    "forced-end": {"forced_eos_token_id": 2},
    "decay": {"exponential_decay_length_penalty": (5, 1.4)},
    "finite": {"remove_invalid_values": True, "renormalize_logits": True},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=5.0, context_width=1)},
    "whole-length": {"max_length": 50, "max_new_tokens": None},
    "together": {
        **{"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 9, "suppress_tokens": [60, 61]},
        **{"bad_words_ids": [[207, 207]], "renormalize_logits": True, "eos_token_id": [2, 90, 91]},
    },
}


def small(model: Any) -> Any:
    return perturbed(model, 0.2)


@pytest.mark.parametrize("how", sorted(HOWS))
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family(family: str, how: str) -> None:
    model = model_of(family)
    theirs, ours = both(model, inputs(), HOWS[how], max_new_tokens=N)
    assert torch.equal(theirs, ours)
    assert ours.dtype == theirs.dtype
    theirs, ours = both(model, inputs(BATCH), {**HOWS[how]}, max_new_tokens=12)
    assert torch.equal(theirs, ours)


@pytest.mark.parametrize(
    "own",
    [
        {"viasd_strategy": "plain"},
        {"viasd_mask": "prefix:4", "viasd_heads": "lens:4"},
        {"viasd_mask": "even:0.3", "viasd_options": {"slim_rounds": 2}, "assistant_model": "self", "viasd_gamma": 2},
        {"viasd_mask": "even:0.3", "viasd_options": {"tiers": "auto"}, "tokenizer": tokenizer()},
        {"viasd_mask": LayerMask.even(8, 0.25), "viasd_mode": "via", "viasd_options": {"max_disagreement": 0.0}},
    ],
)
@pytest.mark.filterwarnings("ignore::viasd.hf.LossyWarning")
def test_every_way_to_ask(own: dict[str, Any]) -> None:
    model = model_of("gemma2")
    theirs = model.generate(**inputs(), max_new_tokens=N)
    assert torch.equal(theirs, viasd.hf.generate(model, **inputs(), max_new_tokens=N, **own))
    if "tokenizer" not in own:
        bound = partial(viasd.hf.generate, **{k: v for k, v in own.items() if k != "assistant_model"})
        named = {k: v for k, v in own.items() if k == "assistant_model"}
        assert torch.equal(theirs, model.generate(**inputs(), max_new_tokens=N, custom_generate=bound, **named))


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
def test_an_assistant_model(family: str) -> None:
    model = model_of(family)
    for own in (FIXED, {"viasd_mask": "even:0.25", "viasd_gamma": 3}):
        ours = model.generate(
            **inputs(),
            max_new_tokens=N,
            custom_generate=viasd.hf.generate,
            assistant_model=small(model),
            return_dict_in_generate=True,
            **own,
        )
        assert torch.equal(ours.sequences, model.generate(**inputs(), max_new_tokens=N))
        assert ours.viasd[0].stats.drafter_calls > 0
        assert ours.viasd[0].lossless


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_every_setting_alone_and_in_a_batch(name: str) -> None:
    settings = {"max_new_tokens": N, **SETTINGS[name]}
    # The one goes on for long, the other ends soon.
    model = model_of("qwen3" if name.startswith(("shortest", "forced", "decay")) else "gemma3")
    for request in (inputs(), inputs(BATCH)):
        for how in ("lookup", "mask"):
            theirs, ours = both(model, request, HOWS[how], **settings)
            assert torch.equal(theirs, ours)
    plain = model.generate(**inputs(), max_new_tokens=N)
    assert name == "finite" or not torch.equal(plain, theirs[:1]), "it does something"


def test_a_generation_config_of_the_models_own() -> None:
    model = tiny_model("llama")
    model.generation_config = GenerationConfig(
        max_new_tokens=23, repetition_penalty=1.4, eos_token_id=[2, 77], pad_token_id=0, do_sample=False
    )
    theirs, ours = both(model, inputs(BATCH))
    assert torch.equal(theirs, ours)
    given = GenerationConfig(max_new_tokens=7, no_repeat_ngram_size=2)
    theirs, ours = both(model, inputs(), generation_config=given)
    assert torch.equal(theirs, ours)


def test_default_lengths() -> None:
    theirs, ours = both(model_of("llama"), inputs())
    assert torch.equal(theirs, ours)


@pytest.mark.parametrize("place", [0, 2, 5, 9, 12, 13, 14, 16])
def test_an_end_token_anywhere_in_a_block(place: int) -> None:
    model = model_of("gemma3")  # which writes other tokens all the time
    text = model.generate(**inputs(), max_new_tokens=N)[0, inputs()["input_ids"].shape[1] :].tolist()
    theirs, ours = both(
        model,
        inputs(),
        {"assistant_model": model, "viasd_gamma": 6, **FIXED},
        max_new_tokens=N,
        eos_token_id=[text[place], 299],
        return_dict_in_generate=True,
    )
    assert torch.equal(theirs.sequences, ours.sequences)
    assert ours.sequences[0, -1] == text[place]
    assert ours.viasd[0].finish_reason == "eos"
    assert text.index(text[place]) == place
    assert ours.viasd[0].token_ids == text[: place + 1]
    assert ours.viasd[0].stats.rounds == place // 7 + 1


def test_stop_strings() -> None:
    model = model_of("gemma3")
    written = tokenizer().decode(model.generate(**inputs(), max_new_tokens=N)[0, inputs()["input_ids"].shape[1] :])
    stop = next(written[i : i + 2] for i in range(5, 30) if written[i : i + 2].isascii())
    theirs = model.generate(**inputs(), max_new_tokens=N, stop_strings=[stop], tokenizer=tokenizer())
    assert theirs.shape[1] < inputs()["input_ids"].shape[1] + N
    own = {"assistant_model": model, "viasd_gamma": 6, **FIXED}
    criteria = [StopStringCriteria(tokenizer(), [stop])]
    as_callable = model.generate(
        **inputs(), max_new_tokens=N, stopping_criteria=criteria, custom_generate=viasd.hf.generate, **own
    )
    in_its_place = viasd.hf.generate(
        model, **inputs(), max_new_tokens=N, stop_strings=[stop], tokenizer=tokenizer(), **own
    )
    by_config = viasd.hf.generate(
        model,
        inputs()["input_ids"],
        generation_config=GenerationConfig(max_new_tokens=N, stop_strings=stop, eos_token_id=2, pad_token_id=0),
        tokenizer=tokenizer(),
        return_dict_in_generate=True,
    )
    assert torch.equal(theirs, as_callable)
    assert torch.equal(theirs, in_its_place)
    assert torch.equal(theirs, by_config.sequences)
    assert by_config.viasd[0].finish_reason == "stop"
    assert by_config.viasd[0].text, "where the tokenizer is known there is a text"


class AfterTokens(StoppingCriteria):
    """Ends after so many tokens, and remembers what it was shown."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.shown: list[Any] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.shown.append((input_ids.tolist(), None if scores is None else len(scores)))
        return torch.tensor([len(self.shown) >= self.tokens])


@pytest.mark.parametrize("tokens", [1, 2, 5, 6, 7])
def test_stopping_criteria_are_asked_after_every_token(tokens: int) -> None:
    model = model_of("llama")
    for scores in (False, True):
        told = []
        for own in ({}, {"custom_generate": viasd.hf.generate, "assistant_model": model, "viasd_gamma": 4, **FIXED}):
            criterion = AfterTokens(tokens)
            out = model.generate(
                **inputs(),
                max_new_tokens=N,
                stopping_criteria=[criterion],
                return_dict_in_generate=True,
                output_scores=scores,
                **own,
            )
            told.append((criterion.shown, out.sequences.tolist()))
        assert told[0] == told[1]
        assert out.viasd[0].token_ids == out.sequences[0, -tokens:].tolist()
        assert out.viasd[0].finish_reason == "stop"


def test_max_time_ends_the_answer() -> None:
    ours = model_of("llama").generate(
        **inputs(), max_new_tokens=400, max_time=1e-9, custom_generate=viasd.hf.generate, **FIXED
    )
    assert ours.shape[1] == inputs()["input_ids"].shape[1] + 1


@pytest.mark.parametrize("own", [FIXED, {"assistant_model": "self", "viasd_mask": "even:0.25"}])
def test_a_streamer_sees_the_same_calls(own: dict[str, Any]) -> None:
    model = model_of("gemma3")
    theirs, ours = Recorder(), Recorder()
    model.generate(**inputs(), max_new_tokens=N, streamer=theirs)
    model.generate(**inputs(), max_new_tokens=N, streamer=ours, custom_generate=viasd.hf.generate, **own)
    assert ours.calls == theirs.calls
    assert ours.calls.count("end") == 1
    text = TextIteratorStreamer(tokenizer(), skip_prompt=True)
    out = viasd.hf.generate(model, **inputs(), max_new_tokens=N, streamer=text, **own)
    assert "".join(text) == tokenizer().decode(out[0, inputs()["input_ids"].shape[1] :])


@pytest.mark.parametrize("own", [FIXED, {"viasd_mask": "even:0.3", "assistant_model": "self"}])
def test_scores_and_logits(own: dict[str, Any]) -> None:
    model = model_of("llama")
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    theirs, ours = both(model, inputs(), own, max_new_tokens=20, repetition_penalty=1.3, **wanted)
    for name in ("scores", "logits"):
        for a, b in zip(getattr(theirs, name), getattr(ours, name), strict=True):
            torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-4)
            assert not b.is_inference()
    model = tiny_model("llama")
    model.generation_config.eos_token_id = [2, *range(40, 80)]
    theirs, ours = both(model, inputs(BATCH), own, max_new_tokens=20, **wanted)
    begun = inputs(BATCH)["input_ids"].shape[1]
    ends = [int((row[begun:] == 0).int().argmax()) or len(theirs.scores) for row in theirs.sequences]
    assert len(set(ends)) > 1, "rows end at different places"
    for t, (a, b) in enumerate(zip(theirs.scores, ours.scores, strict=True)):
        assert a.shape == b.shape
        for row, end in enumerate(ends):
            if t < end:
                torch.testing.assert_close(a[row], b[row], atol=1e-3, rtol=1e-4)
            else:
                assert b[row].argmax() == 0
                assert b[row].softmax(-1)[0] == 1
    assert not hasattr(model.generate(**inputs(), max_new_tokens=2, custom_generate=viasd.hf.generate), "viasd")


class Counting(LogitsProcessor):
    """Bans the tokens it has chosen before, by a memory of its own, and remembers every call."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.gone: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.lengths.append(input_ids.shape[1])
        scores[:, self.gone] = -torch.inf
        self.gone.append(int(scores.argmax()))
        return scores


@pytest.mark.parametrize("own", [FIXED, {"viasd_mask": "even:0.25", "assistant_model": "self"}])
def test_a_processor_with_a_memory_sees_each_token_once(own: dict[str, Any]) -> None:
    model = model_of("llama")
    first, second = Counting(), Counting()
    theirs = model.generate(**inputs(), max_new_tokens=N, logits_processor=[first], repetition_penalty=1.2)
    ours = model.generate(
        **inputs(),
        max_new_tokens=N,
        logits_processor=[second],
        repetition_penalty=1.2,
        custom_generate=viasd.hf.generate,
        **own,
    )
    assert torch.equal(theirs, ours)
    assert (first.lengths, first.gone) == (second.lengths, second.gone)


def test_a_warper_of_the_callers_own_where_the_argmax_is_taken() -> None:
    """`typical_p` may ban the most probable token."""
    warper = TypicalLogitsWarper(mass=0.1)
    theirs, ours = both(model_of("llama"), inputs(BATCH), {}, max_new_tokens=N, logits_processor=[warper])
    assert torch.equal(theirs, ours)
    assert not torch.equal(ours, model_of("llama").generate(**inputs(BATCH), max_new_tokens=N))


def test_a_watermark_with_a_memory_in_a_batch() -> None:
    keys = SynthIDTextWatermarkingConfig(keys=[654, 400, 836, 123, 340], ngram_len=3)
    theirs, ours = both(model_of("llama"), inputs(BATCH), {}, max_new_tokens=12, watermarking_config=keys)
    assert torch.equal(theirs, ours)


def test_allowed_tokens_are_asked_with_the_prompts_own_number() -> None:
    allowed = {0: list(range(50, 60)), 1: list(range(60, 70)), 2: list(range(70, 80))}
    theirs, ours = both(
        model_of("llama"), inputs(BATCH), {}, max_new_tokens=9, prefix_allowed_tokens_fn=lambda row, _: allowed[row]
    )
    assert torch.equal(theirs, ours)
    assert all(set(row[-9:].tolist()) <= set(allowed[i]) for i, row in enumerate(ours))


def test_padding_is_inferred_as_transformers_infers_it() -> None:
    ids = inputs(BATCH)["input_ids"]
    theirs, ours = both(model_of("llama"), {"inputs": ids}, {}, max_new_tokens=9)
    assert torch.equal(theirs, ours)


@pytest.mark.parametrize("folder", [True, False])
def test_as_a_folder(folder: bool, tmp_path: Any, monkeypatch: Any) -> None:
    """By ``custom_generate=FOLDER`` and trust_remote_code, and as part of a model's own folder."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = tiny_model("llama")
    theirs = model.generate(**inputs(BATCH), max_new_tokens=N, repetition_penalty=1.1)
    options = {
        "max_new_tokens": N,
        "repetition_penalty": 1.1,
        "viasd_mask": "even:0.3",
        "return_dict_in_generate": True,
    }
    if folder:
        ours = model.generate(
            **inputs(BATCH), custom_generate=viasd.hf.FOLDER, trust_remote_code=True, tokenizer=tokenizer(), **options
        )
    else:
        import shutil

        from transformers import AutoModelForCausalLM

        model.save_pretrained(tmp_path / "model")
        shutil.copytree(f"{viasd.hf.FOLDER}/custom_generate", tmp_path / "model" / "custom_generate")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=True)
        ours = loaded.generate(**inputs(BATCH), **options)
    assert torch.equal(theirs, ours.sequences)
    assert [r.strategy for r in ours.viasd] == ["cascade"] * len(BATCH)


def test_text_of_the_prompt_only_once() -> None:
    """A single-token prompt, and one longer than every window."""
    for text in ("h", TEXT * 4):
        theirs, ours = both(model_of("mistral"), inputs(text), {"viasd_mask": "even:0.3"}, max_new_tokens=15)
        assert torch.equal(theirs, ours)
