from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tiny import model_of, watch_writes
from torch import Tensor

from viasd.attention import Segment
from viasd.errors import OptionError, UnsupportedModelError, ViasdError
from viasd.kv import SequenceKV
from viasd.layered import LayeredModel
from viasd.probe import load_layered, probe
from viasd.testing import FAMILIES, tiny_model


def random_ids(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300) for _ in range(n)]


def hf_logits(model: Any, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


@torch.inference_mode()
def feed(model: LayeredModel, kv: SequenceKV, ids: list[int], start: int, end: int) -> Tensor:
    out, _ = model.run(
        model.embed(ids[start:end]), range(model.n_layers), model.step([Segment(kv, start, end - start)])
    )
    return model.readout(out)


def in_pieces(model: LayeredModel, ids: list[int], cuts: list[int]) -> Tensor:
    kv, edges = model.new_kv(), [0, *cuts, len(ids)]
    return torch.cat([feed(model, kv, ids, a, b) for a, b in itertools.pairwise(edges)])


@pytest.mark.parametrize("layers", ["auto", "hf"])
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_pieces_of_any_length_equal_the_models_own_forward(family: str, kernel: str, layers: str) -> None:
    # 40 tokens: five windows of 8 where there is one.
    model = LayeredModel(model_of(family), kernel=kernel, layers=layers)
    model.embed_scale = load_layered(model_of(family), kernel=kernel).embed_scale
    ids = random_ids(40)
    reference = hf_logits(model_of(family), ids)
    rng = random.Random(family + kernel)
    splits = [[], list(range(1, 40)), [8], [9, 17], [7, 8, 9, 10]]
    splits += [sorted(rng.sample(range(1, 40), rng.randrange(1, 8))) for _ in range(4)]
    for cuts in splits:
        torch.testing.assert_close(in_pieces(model, ids, cuts), reference, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2", "olmo2"])
def test_several_sequences_in_one_pass_equal_each_alone(family: str) -> None:
    model = load_layered(model_of(family))
    texts = [random_ids(n, seed) for seed, n in enumerate((30, 3, 19))]
    starts, lengths = [25, 0, 12], [5, 3, 1]
    kvs = [model.new_kv() for _ in texts]
    for kv, ids, start in zip(kvs, texts, starts, strict=True):
        if start:
            feed(model, kv, ids, 0, start)
    segments = [Segment(kv, s, n) for kv, s, n in zip(kvs, starts, lengths, strict=True)]
    packed = [t for ids, s, n in zip(texts, starts, lengths, strict=True) for t in ids[s : s + n]]
    with torch.inference_mode():
        out, _ = model.run(model.embed(packed), range(model.n_layers), model.step(segments))
        rows = model.readout(out).split(lengths)
    for ids, start, n, got in zip(texts, starts, lengths, rows, strict=True):
        torch.testing.assert_close(got, hf_logits(model.model, ids)[start : start + n], rtol=2e-4, atol=2e-4)


def test_captured_states_are_the_inputs_of_the_layers() -> None:
    hf = tiny_model("qwen3")  # its own: to output hidden states transformers leaves hooks on the model
    model = load_layered(hf)
    ids = random_ids(9)
    with torch.no_grad():
        states = hf(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
    with torch.inference_mode():
        step = model.step([Segment(model.new_kv(), 0, 9)])
        out, captured = model.run(model.embed(ids), range(8), step, capture=(0, 3, 7, 8))
    assert sorted(captured) == [0, 3, 7, 8]
    for index in (0, 3, 7):
        torch.testing.assert_close(captured[index], states[index], rtol=1e-4, atol=1e-4)
    assert captured[8] is out


def test_left_out_layers_pass_the_hidden_state_on() -> None:
    model = load_layered(model_of("llama"))
    thin = copy.deepcopy(model_of("llama"))
    thin.model.layers = torch.nn.ModuleList([thin.model.layers[i] for i in (0, 2, 3, 7)])
    for i, layer in enumerate(thin.model.layers):
        layer.self_attn.layer_idx = i
    thin.config.num_hidden_layers = 4
    ids = random_ids(12)
    with torch.inference_mode():
        step = model.step([Segment(model.new_kv(), 0, 12)])
        out, _ = model.run(model.embed(ids), (0, 2, 3, 7), step)
    torch.testing.assert_close(model.readout(out).detach(), hf_logits(thin, ids), rtol=2e-4, atol=2e-4)


def test_padded_vocabulary_rows_are_cut() -> None:
    model = load_layered(model_of("gemma2"), vocabulary=261)
    assert in_pieces(model, random_ids(5), []).shape == (5, 261)


def test_bfloat16_agrees_within_the_probes_tolerance() -> None:
    for family in ("llama", "gemma2", "gemma3"):
        load_layered(tiny_model(family, dtype=torch.bfloat16, scale=1.0))


# --- refusals ---------------------------------------------------------------------------------------------------------


def small(name: str, **more: Any) -> Any:
    shape = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1}
    config = getattr(transformers, f"{name}Config")(**{**shape, "eos_token_id": 2, **more})
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


HEADS = {"intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
FOREIGN: dict[str, tuple[Callable[[], Any], str]] = {
    "mamba": (lambda: small("Mamba", state_size=4), "MambaForCausalLM.*has another shape"),
    "recurrent gemma": (
        lambda: small("RecurrentGemma", **HEADS, lru_width=16, num_hidden_layers=3),
        "RecurrentGemmaForCausalLM.*has another shape",
    ),
    "lfm2": (
        lambda: small("Lfm2", **HEADS, layer_types=["conv", "full_attention"]),
        "Lfm2ForCausalLM.*(another shape|'conv')",
    ),
    "qwen3 next": (
        lambda: small(
            "Qwen3Next",
            **HEADS,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=1,
            linear_num_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            num_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        ),
        "Qwen3NextForCausalLM: layer 0 .*'linear_attention'",
    ),
    "gpt2": (
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, bos_token_id=1, eos_token_id=2)
        ).eval(),
        r"GPT2LMHeadModel \(model type 'gpt2'\) has another shape .* lacks",
    ),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_models_of_another_kind_are_refused_by_name(kind: str) -> None:
    build, message = FOREIGN[kind]
    with pytest.raises(UnsupportedModelError, match=message):
        load_layered(build())


def test_a_model_in_training_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM in eval mode.*call model.eval\(\)"):
        load_layered(tiny_model("llama", num_hidden_layers=2).train())


def test_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(OptionError, match="must be one of auto, sdpa, eager, but got 'flash'"):
        LayeredModel(model_of("llama"), kernel="flash")


def test_layers_that_need_more_inputs_are_refused() -> None:
    model = tiny_model("llama", num_hidden_layers=2)
    layer = model.model.layers[1]
    inner = layer.forward
    layer.forward = lambda hidden_states, per_layer_input, **kwargs: inner(hidden_states, **kwargs)
    with pytest.raises(UnsupportedModelError, match="layer 1 needs an input 'per_layer_input'"):
        load_layered(model)


def test_a_layer_without_self_attention_is_refused() -> None:
    model = tiny_model("llama", num_hidden_layers=2)
    model.model.layers[1] = torch.nn.Linear(32, 32)
    with pytest.raises(UnsupportedModelError, match=r"layer 1 \(Linear\) has no self-attention"):
        load_layered(model)


def test_the_probe_refuses_another_readout_and_says_where() -> None:
    class Scaled(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 1.01
            return out

    model = Scaled(model_of("llama").config).eval()
    with pytest.raises(
        UnsupportedModelError, match=r"Scaled computes something.*differ by.*in the last layer or the re"
    ):
        load_layered(model)


def test_the_probe_names_the_layer_from_which_a_model_differs() -> None:
    model = tiny_model("llama")
    layer = model.model.layers[3]
    inner = layer.forward

    def forward(hidden_states: Tensor, viasd_step: Any = None, **kwargs: Any) -> Any:
        extra = {} if viasd_step is None else {"viasd_step": viasd_step}
        out = inner(hidden_states, **kwargs, **extra)
        return out if extra else out + 0.5

    layer.forward = forward
    with pytest.raises(UnsupportedModelError, match=r"from layer 3 on \(LlamaDecoderLayer\)"):
        load_layered(model)


def test_the_probe_refuses_unknown_changes_of_the_embeddings() -> None:
    model = tiny_model("llama", num_hidden_layers=2)
    own = model.model.forward

    def shifted(input_ids: Tensor, **kwargs: Any) -> Any:
        return own(**{**kwargs, "inputs_embeds": model.model.embed_tokens(input_ids) + 1})

    model.model.forward = shifted
    with pytest.raises(UnsupportedModelError, match="changes its embeddings"):
        load_layered(model)


def test_length_dependent_rotary_embeddings_limit_the_context() -> None:
    scaling = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    model = load_layered(tiny_model("llama", num_hidden_layers=2, rope_parameters=scaling))
    assert model.context_length == 64
    assert load_layered(model_of("llama")).context_length == 512


# --- nothing of the user's model changes ------------------------------------------------------------------------------


def snapshot(model: Any) -> tuple[Any, ...]:
    state = {k: v.clone() for k, v in model.state_dict().items()}
    configs = [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")]
    return state, model.config.to_dict(), configs, list(map(id, model.modules())), model.training


def assert_untouched(model: Any, before: tuple[Any, ...]) -> None:
    state, *rest = snapshot(model)
    assert state.keys() == before[0].keys()
    assert all(torch.equal(v, before[0][k]) for k, v in state.items())
    assert rest == list(before[1:])
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("layers", ["auto", "hf"])
def test_an_exception_in_a_layer_leaves_the_model_as_it_was(
    family: str, layers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = tiny_model(family)
    before = snapshot(hf)
    model = LayeredModel(hf, layers=layers)

    def failing(kv: SequenceKV, layer: int, *rest: Any) -> None:
        if layer == 5:
            raise RuntimeError("boom")

    watch_writes(monkeypatch, failing)
    with pytest.raises(RuntimeError, match="boom"):
        in_pieces(model, random_ids(6), [3])
    assert_untouched(hf, before)


def test_loading_and_refusing_leave_the_model_as_it_was() -> None:
    hf = tiny_model("gemma2")
    before = snapshot(hf)
    load_layered(hf)
    assert_untouched(hf, before)
    hf.config.final_logit_softcapping = 1.0
    hf.model.config = copy.copy(hf.config)
    hf.config.final_logit_softcapping = 30.0
    before = snapshot(hf)
    with pytest.raises(ViasdError):
        load_layered(hf)
    assert_untouched(hf, before)


def test_a_window_that_lives_in_the_mask_alone_is_refused() -> None:
    model = tiny_model("mistral")
    model.config.sliding_window = None
    layered = LayeredModel(model)
    model.config.sliding_window = 8
    # What the lean layers read at their making now differs from the config, as in a family whose modules know no window.
    with pytest.raises(UnsupportedModelError, match="layer 0 attends within a window of None by its module and of 8"):
        probe(layered)
