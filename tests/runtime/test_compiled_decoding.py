"""With compiled passes the lossless strategies still give what transformers' own greedy generate gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny import LOSSLESS, Counting, generate, hf_greedy, model_of, prompt_ids, tokenizer
from tiny_checkpoints import save_tiny

import viasd
from viasd.layered import LayeredModel
from viasd.runtime import cli
from viasd.testing import perturbed


@pytest.mark.parametrize(
    ("family", "drafter", "strategy"),
    [
        ("llama", "lookup", "sd"),
        ("llama", "model", "via-audited"),
        ("gemma2", "self", "chain2"),
        ("gemma2", "model", "chain"),
    ],
)
def test_lossless_is_lossless_and_graphs_are_bounded(family: str, drafter: str, strategy: str) -> None:
    model = model_of(family, num_hidden_layers=4)
    pair = viasd.make_pair(model, tokenizer(), drafter=perturbed(model, 0.3) if drafter == "model" else drafter)
    backends = []
    for each in (pair.target, pair.drafter):
        if each is not None:
            backends.append(Counting())
            each.compile(backend=backends[-1], buckets=(1, 8))
    for text in ("hello hello world, hello", "a b a b"):
        expected = hf_greedy(model, prompt_ids(text), 32)
        options = {"mask": None, **LOSSLESS[strategy]}
        assert generate(pair, prompt_ids(text), max_new_tokens=32, **options).token_ids == expected
    # Full, slim, up to the gap and from it on, self drafter; two buckets and one capacity.
    assert 0 < backends[0].compiled <= 5 * 2
    assert all(0 < backend.compiled <= 2 for backend in backends[1:])


def test_the_option_compiles_both_models_and_the_form_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny(tmp_path / "model")
    counting, own, forms = Counting(), LayeredModel.compile, []

    def compile(self: LayeredModel) -> None:
        own(self, backend=counting, buckets=(1, 8))
        forms.append(self.form)

    monkeypatch.setattr(LayeredModel, "compile", compile)
    folder = str(tmp_path / "model")
    line = ["--target", folder, "--drafter", folder, "--prompt", "hello", "--max-new-tokens", "6", "--json"]
    answers = []
    for more in ([], ["--compile"]):
        threads = ["--threads", str(torch.get_num_threads())]
        assert cli.main([*line, *threads, "--strategy", "sd", "--dtype", "float32", "--quiet", *more]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert forms == ["dense, compiled"] * 2
    assert counting.compiled > 0
    assert answers[0]["text"] == answers[1]["text"]
