"""Every message that docs/troubleshooting.md quotes is what the program says, word for word, in that very situation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from docpages import ROOT
from fitting import small_corpus
from huggingface_hub.errors import GatedRepoError
from tiny import model_of, save_target, tokenizer
from transformers import MambaConfig, MambaForCausalLM

import viasd
import viasd.load
from viasd import hub
from viasd.errors import ViasdError
from viasd.identity import ModelIdentity
from viasd.kernels import build
from viasd.loading import LoadConfig
from viasd.mask import LayerMask
from viasd.pair import Pair, make_pair
from viasd.pairs import parse_pair
from viasd.runtime import options
from viasd.runtime.bench.report import slower_lines
from viasd.runtime.check import Comparison
from viasd.runtime.config import DecodingConfig
from viasd.runtime.metrics import Counters
from viasd.runtime.result import describe_loss
from viasd.runtime.tiers import TierReport
from viasd.search.fit.training import TrainingConfig, train
from viasd.testing import byte_tokenizer

PAGE = ROOT / "docs" / "troubleshooting.md"


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(ViasdError) as refused:
        call()
    return str(refused.value)


def parsed(*argv: str) -> str:
    return refusal(lambda: options.parse_args(list(argv)))


def tiny(**more: Any) -> Pair:
    """A pair whose target is called as people call theirs."""
    return make_pair(model_of("llama"), tokenizer(), target_id="my-model", **more)


def note(beginning: str, **request: Any) -> str:
    result = viasd.generate(tiny(), "hello", **{"mask": None, "max_new_tokens": 4, "seed": 1, **request})
    (found,) = [line for line in result.notes if line.startswith(beginning)]
    return found


def too_long() -> str:
    return refusal(lambda: viasd.generate(tiny(), [5] * 600, mask=None))


def limited() -> str:
    result = viasd.generate(tiny(), [5] * 500, mask=None, max_new_tokens=64, strategy="plain")
    (found,) = [line for line in result.notes if "limited" in line]
    return found


def other_tokenizer() -> str:
    other = byte_tokenizer()
    words = json.loads(other.backend_tokenizer.to_str())
    vocabulary = words["model"]["vocab"]
    one, two = (next(word for word, i in vocabulary.items() if i == number) for number in (71, 72))
    vocabulary[one], vocabulary[two] = 72, 71
    backend = type(other.backend_tokenizer).from_str(json.dumps(words))
    swapped = type(other)(tokenizer_object=backend, eos_token=other.eos_token)
    return refusal(lambda: tiny(drafter=model_of("llama"), drafter_tokenizer=swapped))


def recurrent() -> str:
    config = MambaConfig(vocab_size=300, hidden_size=16, num_hidden_layers=2, state_size=4)
    return refusal(lambda: make_pair(MambaForCausalLM(config).eval(), tokenizer()))


def masked(n_layers: int) -> str:
    mask = replace(LayerMask.even(n_layers, 0.25), name="mask.json")
    return refusal(lambda: viasd.generate(tiny(), "hello", mask=mask, tiers="3"))


def no_chat() -> str:
    plain = byte_tokenizer()
    plain.chat_template = None
    bare = make_pair(model_of("llama"), plain, target_id="my-model")
    return refusal(lambda: bare.encode([{"role": "user", "content": "hi"}]))


class Stubborn:
    def __call__(self, ids: Any, logits: Any) -> Any:
        return logits

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot pickle 'generator' object")


def uncopied() -> str:
    return refusal(lambda: viasd.generate(tiny(), "hello", mask=None, strategy="sd", processors=[Stubborn()]))


def too_much_memory() -> str:
    engine = viasd.Engine(tiny(), mask=None, kv_budget=100_000)
    return refusal(lambda: engine.add("hello", max_new_tokens=400, strategy="plain"))


def gated() -> str:
    response: Any = type("Response", (), {"headers": {}, "request": None, "status_code": 403})()
    return str(hub.explain(GatedRepoError("no", response=response), "google/gemma-2-27b-it"))


def beams() -> str:
    ids = torch.tensor([[5, 6, 7]])
    return refusal(
        lambda: model_of("llama").generate(ids, num_beams=3, max_new_tokens=4, custom_generate=viasd.hf.generate)
    )


def streamed_batch() -> str:
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    streamer = type("Streamer", (), {"put": lambda self, value: None, "end": lambda self: None})()
    return refusal(
        lambda: viasd.hf.generate(model_of("llama"), ids, max_new_tokens=4, streamer=streamer, pad_token_id=0)
    )


def small() -> str:
    return refusal(lambda: small_corpus(6).split())


def not_finite() -> str:
    module = torch.nn.Linear(1, 1)

    def loss(step: int) -> Any:
        return module.weight.sum() * float("nan"), {}

    return refusal(lambda: train(module, loss, TrainingConfig(4), Path("."), "x"))


def lossy() -> str:
    counters = Counters(emitted=64, unseen=41)
    counters.audit.blocks += [(5, 0), (5, 1), (4, 0)]
    return describe_loss("via", counters, False)


def tiers() -> str:
    per_token = {"plain": 0.0365, "sd": 0.0332, "cascade": 0.0394}
    return TierReport({}, {}, -0.95, per_token, False).sentence()


def slower() -> str:
    figures = {"ratio_to_plain": 0.87}
    task = {"methods": {"sd": {"ratio_to_plain": 0.81}}}
    (line,) = slower_lines({"methods": {"sd": figures}, "tasks": {"writing": task}})
    return line


def no_compiler() -> str:
    """What loading says where the environment names a compiler that is not there."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", "c++-of-nowhere")
        patch.setattr("sys.platform", "linux")
        missing = refusal(lambda: build._made(Path("."), said.append))
        patch.setattr(viasd.load.build, "why_missing", lambda say=None: missing)
        viasd.load.load_pair(target=save_target(Path(".")), config=LoadConfig(device="cpu"), say=said.append)
    (line,) = said
    return line


def warned() -> str:
    target = tiny().target
    identity = replace(ModelIdentity.of(target, "the-model-it-was-searched-on"), weights="0" * 16)
    mask = replace(LayerMask.even(8, 0.25), name="mask.json", target=identity)
    told = mask.check(target, "my-model")
    assert told is not None
    return told


SITUATIONS: dict[str, Callable[[], str]] = {
    "The answer stops early": limited,
    "The prompt is too long": too_long,
    "Drafter and target do not fit": other_tokenizer,
    "A model of another kind": recurrent,
    "No such pair": lambda: refusal(lambda: parse_pair("gemma2-2b:28b")),
    "A gated checkpoint": gated,
    "No way to the hub": lambda: str(hub.unreachable("google/gemma-2-27b-it")),
    "A base model that is asked to chat": no_chat,
    "The mask is for another model": lambda: masked(12),
    "The mask is of a relative": warned,
    "There is no mask": lambda: note("no mask is used for this target"),
    "Light heads are missing": lambda: refusal(
        lambda: viasd.generate(tiny(), "hi", strategy="adadecode", mask=None, heads=None)
    ),
    "The answer is lossy": lossy,
    "A difference in bf16": lambda: Comparison(64, 1, True, 17, 260, 198, 0.0625, True).sentence(),
    "A difference that is none of rounding": lambda: Comparison(64, 1, True, 17, 260, 198, 0.75, False).sentence(),
    "Checking a sampled answer": lambda: parsed("--check", "--temperature", "0.7", "--prompt", "hi"),
    "Options that contradict each other": lambda: refusal(lambda: DecodingConfig(strategy="sd", mode="via")),
    "An option without a use": lambda: refusal(lambda: DecodingConfig(alpha=0.2)),
    "A mask that nothing would use": lambda: parsed("--strategy", "sd", "--mask", "even:0.2", "--prompt", "hi"),
    "A logits processor that can't be copied": uncopied,
    "The slim tier is left out": tiers,
    "Slower than plain decoding": slower,
    "No compiler": no_compiler,
    "A request that can never fit": too_much_memory,
    "Beam search": beams,
    "A streamer with a batch": streamed_batch,
    "Too small a corpus": small,
    "A loss that is no number": not_finite,
}


def quoted() -> dict[str, str]:
    """Situation -> the message that the page quotes."""
    found = re.findall(r"^### (.+?)\n+```text\n(.*?)\n```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return dict(found)


def test_every_quoted_message_has_its_situation() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert list(quoted()) == [name for name in re.findall(r"^### (.+)$", text, re.MULTILINE) if name in SITUATIONS]
    assert set(quoted()) == set(SITUATIONS)
    assert text.count("```text") == len(SITUATIONS)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_message_of_a_situation(situation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert quoted().get(situation) == " ".join(SITUATIONS[situation]().split())
