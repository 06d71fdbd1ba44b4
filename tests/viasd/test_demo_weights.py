from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from viasd.packaged import ensure_packaged


@pytest.mark.weights
def test_packaged_smollm2_answers_in_its_chat_format() -> None:
    folder = ensure_packaged("smollm2:135m")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    answer = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.weights
def test_packaged_gemma3_knows_paris_and_its_own_shape() -> None:
    folder = ensure_packaged("gemma3:270m")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    config = model.config
    assert (config.sliding_window, config.query_pre_attn_scalar, config.head_dim) == (512, 256, 256)
    assert [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"] == [5, 11, 17]
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 10_000
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1_000_000
    assert config.attn_logit_softcapping is config.final_logit_softcapping is None
    assert model.lm_head.weight is model.model.embed_tokens.weight
    inputs = tokenizer("The capital of France is the city of", return_tensors="pt")
    assert inputs.input_ids[0, 0] == tokenizer.bos_token_id == 2
    with torch.no_grad():
        assert tokenizer.decode(model(**inputs).logits[0, -1].argmax()) == " Paris"
