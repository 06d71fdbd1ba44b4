"""The user's model is read and never changed, and what was found out about it is kept exactly as long as it is true."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from inside import Recorder, both, inputs, state

import viasd
from viasd.errors import OptionError, TokenizerMismatchError, UnsupportedModelError
from viasd.runtime.hf import driven
from viasd.testing import byte_tokenizer, perturbed, tiny_model

N = 30


class Breaks(Recorder):
    def put(self, value: Any) -> None:
        super().put(value)
        if len(self.calls) == 5:
            raise KeyboardInterrupt


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
def test_nothing_of_the_model_changes(family: str) -> None:
    model = tiny_model(family)
    drafter = perturbed(model, 0.2)
    before, reference = (state(model), state(drafter)), model.generate(**inputs(), max_new_tokens=N)
    own = {"viasd_mask": "even:0.3", "assistant_model": drafter}
    ours = model.generate(**inputs(), max_new_tokens=N, custom_generate=viasd.hf.generate, **own)
    with pytest.raises(KeyboardInterrupt):
        model.generate(**inputs(), max_new_tokens=N, streamer=Breaks(), custom_generate=viasd.hf.generate, **own)
    assert (state(model), state(drafter)) == before
    assert torch.equal(ours, reference)
    assert torch.equal(model.generate(**inputs(), max_new_tokens=N), reference)


@pytest.fixture
def probes(monkeypatch: Any) -> list[Any]:
    """The models that were probed."""
    found: list[Any] = []
    usual = driven.probe
    monkeypatch.setattr(driven, "probe", lambda layered: (found.append(layered.model), usual(layered))[1])
    return found


def call(model: Any, **options: Any) -> Any:
    return model.generate(**inputs(), max_new_tokens=N, custom_generate=viasd.hf.generate, **options)


def test_a_model_is_probed_once(probes: list[Any]) -> None:
    model = tiny_model("llama")
    drafter = perturbed(model, 0.2)
    call(model)
    call(model, viasd_mask="even:0.3")
    call(model, assistant_model=drafter)
    call(model, assistant_model=drafter)
    assert [m is model for m in probes] == [True, False]


def written(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[3].mlp.down_proj.weight.mul_(-1)


def replaced(model: Any) -> None:
    model.model.layers[3].mlp.down_proj = torch.nn.Linear(64, 32, bias=False)


def norm_written(model: Any) -> None:
    with torch.no_grad():
        model.model.norm.weight.add_(torch.linspace(0, 3, 32))  # lean layers keep Gemma's norms as 1 + w


def moved(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def hooked(model: Any) -> None:
    model.model.layers[2].register_forward_hook(lambda module, args, out: out * 0.5)


@pytest.mark.parametrize("change", [written, replaced, norm_written, moved, hooked])
def test_and_again_when_it_has_changed(change: Any, probes: list[Any]) -> None:
    model = tiny_model("gemma2")
    before = call(model)
    change(model)
    theirs, ours = both(model, inputs(), max_new_tokens=N)
    assert torch.equal(theirs, ours)
    assert change in (moved,) or not torch.equal(ours, before), "the change can be seen"
    assert len(probes) == 2


def test_what_is_kept_dies_with_the_model() -> None:
    model = tiny_model("llama")
    call(model, viasd_mask="even:0.3", assistant_model=(drafter := perturbed(model, 0.2)))
    watched = [weakref.ref(drafter), weakref.ref(model)]
    del drafter
    gc.collect()
    assert watched[0]() is None, "a drafter is not kept alive by its target"
    del model
    gc.collect()
    assert watched[1]() is None


def test_copies_and_files_of_the_model_know_nothing_of_it(probes: list[Any]) -> None:
    model = tiny_model("llama")
    before = call(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(call(twin), before)
        assert probes[-1] is twin
    assert b"viasd" not in pickle.dumps(model).replace(driven._KEPT.encode(), b"")


def test_a_drafter_that_knows_fewer_words() -> None:
    """Rows are then as wide as the target's, and the target keeps all of its own."""
    model = tiny_model("llama", vocab_size=320)
    drafter = tiny_model("llama", seed=3, num_hidden_layers=2)
    with pytest.raises(OptionError, match="vocabulary of 320 and assistant_model one of 300"):
        call(model, assistant_model=drafter)
    tokenizers = {"tokenizer": byte_tokenizer(), "assistant_tokenizer": byte_tokenizer()}
    allowed = {"prefix_allowed_tokens_fn": lambda row, ids: [301 + len(ids) % 9]}
    for settings in ({}, {"repetition_penalty": 1.3, "sequence_bias": [[[310], 60.0]]}, allowed):
        theirs = model.generate(**inputs(), max_new_tokens=N, **settings)
        ours = viasd.hf.generate(
            model,
            **inputs(),
            max_new_tokens=N,
            assistant_model=drafter,
            return_dict_in_generate=True,
            output_logits=True,
            **settings,
            **tokenizers,
        )
        assert torch.equal(theirs, ours.sequences)
        assert ours.viasd[0].stats.drafted > 0
        assert ours.logits[0].shape[1] == 320
    other = byte_tokenizer()
    other.add_tokens(["<something-else>"])
    shifted = byte_tokenizer()
    shifted._tokenizer = type(shifted._tokenizer).from_str(
        shifted._tokenizer.to_str().replace('"<filler0>"', '"<another>"')
    )
    with pytest.raises(TokenizerMismatchError, match="<another>"):
        viasd.hf.generate(
            model, **inputs(), max_new_tokens=N, assistant_model=drafter, tokenizer=other, assistant_tokenizer=shifted
        )


def test_a_model_in_training_is_refused() -> None:
    model = tiny_model("llama")
    call(model)
    model.train()
    with pytest.raises(UnsupportedModelError, match=r"model\.eval\(\)"):
        call(model)
    model.eval()
    drafter = perturbed(model, 0.2).train()
    with pytest.raises(UnsupportedModelError, match=r"model\.eval\(\)"):
        call(model, assistant_model=drafter)
