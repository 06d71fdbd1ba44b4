"""What would change the answer and is not honoured is refused by name, and a lossy answer is never given in silence."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from inside import Recorder, inputs
from tiny import model_of
from transformers import BartConfig, BartForConditionalGeneration, DynamicCache, GenerationConfig, LogitsProcessorList

import viasd
from viasd.errors import MaskError, OptionError
from viasd.mask import LayerMask
from viasd.runtime.hf import refusals

TWO = ("hello world", "hi")
SETTINGS: dict[str, dict[str, Any]] = {
    "num_beams": {"num_beams": 3},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "dola_layers": {"dola_layers": "low"},
    "guidance_scale": {"guidance_scale": 2.0},
    "output_attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "output_hidden_states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "use_cache": {"use_cache": False},
    "cache_implementation": {"cache_implementation": "static"},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "num_assistant_tokens_schedule": {"num_assistant_tokens_schedule": "heuristic"},
    "assistant_early_exit": {"assistant_early_exit": 3},
    "prefill_chunk_size": {"prefill_chunk_size": 8},
}


def call(model: Any = None, request: Any = None, **options: Any) -> Any:
    model = model_of("llama") if model is None else model
    options = {"max_new_tokens": 8, **options}
    return model.generate(**(request or inputs()), custom_generate=viasd.hf.generate, **options)


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_settings_that_are_not_honoured(name: str) -> None:
    with pytest.raises(OptionError, match=f"can't honour {name}=") as refused:
        call(**SETTINGS[name])
    assert "\n" not in str(refused.value)


def test_a_setting_that_a_later_transformers_invents(monkeypatch: Any) -> None:
    usual = GenerationConfig.__init__

    def newer(self: Any, **kwargs: Any) -> None:
        self.telepathy = kwargs.pop("telepathy", None)
        usual(self, **kwargs)

    monkeypatch.setattr(GenerationConfig, "__init__", newer)
    call()
    with pytest.raises(OptionError, match=r"can't honour telepathy=0\.5"):
        call(telepathy=0.5)


def test_every_setting_of_this_transformers_is_accounted_for() -> None:
    """Nothing that viasd claims to honour is a misspelling."""
    known = set(vars(GenerationConfig()))
    assert known >= refusals._IDLE
    assert known >= refusals._HONOURED


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"inputs_embeds": torch.zeros(1, 3, 32)}, "given inputs_embeds"),
        ({**inputs(), "past_key_values": DynamicCache()}, "can't continue from (past_key_values|cache)"),
        ({**inputs(), "position_ids": torch.arange(24)[None] + 3}, "position_ids of your own"),
        ({**inputs(), "output_router_logits": True}, "given output_router_logits"),
        (
            {"input_ids": torch.ones(1, 4).long(), "attention_mask": torch.tensor([[1, 1, 0, 1]])},
            "padding belongs in front",
        ),
        (
            {"input_ids": torch.ones(1, 4).long(), "attention_mask": torch.tensor([[1, 1, 1, 0]])},
            "padding belongs in front",
        ),
        (
            {"input_ids": torch.ones(1, 4).long(), "attention_mask": torch.tensor([[0, 0, 0, 0]])},
            "every row needs a token",
        ),
        ({"input_ids": torch.ones(1, 4).long(), "attention_mask": torch.ones(1, 3).long()}, "the shape of input_ids"),
    ],
)
def test_inputs_that_it_can_not_take(request_: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        call(request=request_)


def test_position_ids_that_say_nothing_new() -> None:
    request = inputs(TWO)
    positions = (request["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    assert torch.equal(call(request={**request, "position_ids": positions}), call(request=request))
    single = {**inputs(), "position_ids": torch.arange(24)[None]}
    assert call(request=single, do_sample=True, num_return_sequences=2).shape[0] == 2


def test_token_types_that_say_plain_text() -> None:
    model = model_of("llama")
    refusals.check_arguments(model, {"token_type_ids": torch.zeros(1, 4), "mm_token_type_ids": None}, {}, None)
    with pytest.raises(OptionError, match="given token_type_ids"):
        refusals.check_arguments(model, {"token_type_ids": torch.tensor([[0, 1]])}, {}, None)


def test_an_encoder() -> None:
    sizes = {
        f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 1), ("attention_heads", 2))
    }
    config = BartConfig(vocab_size=300, d_model=16, encoder_ffn_dim=16, decoder_ffn_dim=16, **sizes)
    with pytest.raises(OptionError, match="decoder-only models, but BartForConditionalGeneration has an encoder"):
        call(BartForConditionalGeneration(config).eval())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"streamer": Recorder()}, "streamer needs a single row, but 2 rows"),
        ({"logits_processor": LogitsProcessorList([lambda ids, row: row])}, "logits processor <lambda> may want"),
        ({"stopping_criteria": [lambda ids, scores: torch.tensor([True, True])]}, "stopping criterion <lambda>"),
        ({"encoder_no_repeat_ngram_size": 2}, "EncoderNoRepeatNGramLogitsProcessor may want"),
        ({"max_time": 9.0, "eos_token_id": None}, "without eos_token_id"),
    ],
)
def test_what_rows_at_a_pace_of_their_own_can_not_have(options: dict[str, Any], message: str) -> None:
    model = viasd.testing.tiny_model("llama")
    model.generation_config.eos_token_id = None
    options = {"eos_token_id": 2, **options}
    with pytest.raises(OptionError, match=message):
        call(model, inputs(TWO), **options)
    if "streamer" not in options and options["eos_token_id"] is not None:
        call(model, inputs(), **options)


@pytest.mark.parametrize("setting", [{"encoder_repetition_penalty": 1.7}, {"encoder_no_repeat_ngram_size": 2}])
def test_the_prompt_as_an_encoders_text(setting: dict[str, Any]) -> None:
    assert torch.equal(
        call(max_new_tokens=40, **setting), model_of("llama").generate(**inputs(), max_new_tokens=40, **setting)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"viasd_mode": "fast"}, "mode must be one of"),
        ({"viasd_strategy": "fast"}, "strategy must be one of"),
        ({"viasd_gamma": 0}, "gamma must be at least 1"),
        ({"viasd_options": {"gamma": 3}}, "give gamma as viasd_gamma"),
        ({"viasd_options": {"telepathy": 3}}, "unknown entry 'telepathy'"),
        ({"viasd_mode": "via"}, "needs a mask"),
        ({"viasd_mask": "auto"}, "which shipped mask"),
        ({"viasd_mask": "even:0.3", "viasd_strategy": "sd"}, "strategy sd does not have"),
        ({"viasd_mask": "even:0.3", "viasd_options": {"tiers": "auto"}}, "takes a tokenizer"),
        ({"viasd_mask": "even:0.3", "viasd_options": {"tiers": "2"}}, "does not have as asked"),
        ({"assistant_model": "mtp"}, "'lookup' or 'self', but got 'mtp'"),
        ({"assistant_model": "self", "viasd_strategy": "plain"}, "no use for assistant_model"),
        ({"max_new_tokens": 600}, "may come to 624 tokens"),
        ({"synced_gpus": True}, "synced_gpus"),
    ],
)
def test_own_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        call(**options)


def test_a_mask_for_another_model() -> None:
    with pytest.raises(MaskError, match="has 30 layers"):
        call(viasd_mask="smollm2-135m.skip20")
    with pytest.raises(MaskError, match="can't read mask file 'nowhere'"):
        call(viasd_mask="nowhere")


def test_named_assistant_tokens_are_the_block_length(tmp_path: Any) -> None:
    model = model_of("llama")
    for options, longest in (({"num_assistant_tokens": 2}, 2), ({"viasd_gamma": 3, "num_assistant_tokens": 2}, 3)):
        out = call(
            assistant_model=model,
            max_new_tokens=24,
            return_dict_in_generate=True,
            viasd_options={"draft_length": "fixed"},
            **options,
        )
        stats = out.viasd[0].stats
        assert stats.rounds == 24 // (longest + 1)
    path = tmp_path / "mask.json"
    LayerMask.even(8, 0.3).save(path)
    by_file = call(viasd_mask=str(path), return_dict_in_generate=True)
    assert by_file.viasd[0].mask == "even:0.3"


def test_lossless_is_the_default_and_a_lossy_mode_warns_once() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for own in ({}, {"viasd_mask": "even:0.3"}, {"viasd_mask": "even:0.3", "viasd_strategy": "cascade"}):
            out = call(return_dict_in_generate=True, **own)
            assert (out.viasd[0].mode, out.viasd[0].lossless) == ("lossless", True)
    lossy = {"gate": "ratio", "audit": 1.0, "recheck": False}
    with pytest.warns(viasd.hf.LossyWarning, match=r"LOSSY \(via\).*audited disagreement") as told:
        out = call(
            request=inputs(("hello hello world, hello", "hi there, hi, hi there, hi")),
            max_new_tokens=60,
            viasd_mask="even:0.25",
            viasd_mode="via",
            viasd_options=lossy,
            return_dict_in_generate=True,
        )
    assert len([t for t in told if t.category is viasd.hf.LossyWarning]) == 1
    assert [r.mode for r in out.viasd] == ["via", "via"]
    audited = sum(r.stats.audit.tokens for r in out.viasd)
    assert f"in {audited} tokens" in str(told[0].message)
    with pytest.warns(viasd.hf.LossyWarning, match=r"LOSSY \(bounded\): each token has at least 0.8"):
        call(viasd_mode="bounded", viasd_options={"alpha": 0.2})
    with pytest.warns(viasd.hf.LossyWarning, match="strategy's own"):
        call(viasd_strategy="slim", viasd_mask="even:0.3")


def test_another_target_than_the_models_own_is_said_as_a_warning() -> None:
    trough = {"readout": "trough"}
    with pytest.warns(viasd.hf.LossyWarning, match=r"^viasd.hf.generate: lossless: .*not the model's own") as told:
        assert isinstance(call(viasd_options=trough), torch.Tensor)
    assert len([t for t in told if t.category is viasd.hf.LossyWarning]) == 1
    with pytest.warns(viasd.hf.LossyWarning, match=r"LOSSY \(bounded\).*not the model's own readout"):
        call(viasd_mode="bounded", viasd_options={"alpha": 0.2, **trough})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a proposal of another kind changes no target
        call(viasd_mask="even:0.3", viasd_options={**trough, "readout_tier": "slim"})
