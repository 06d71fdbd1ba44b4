"""In bf16 an answer may leave transformers' own where two words are as good as equal, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import viasd
from viasd.packaged import ensure_packaged
from viasd.runtime.hf.driven import driven, logit_rows

pytestmark = pytest.mark.weights

N = 32
QUESTIONS = (
    "Compose an engaging travel blog post about a recent trip to Hawaii.",
    "How many apples are three times four apples?",
    "Write a short letter to a friend about rain.",
)


def noise(rows: Tensor, exact: Tensor) -> float:
    """Root mean square by which rows are off, whatever is added to a whole row."""
    off = rows - exact
    return float((off - off.mean(-1, keepdim=True)).square().mean().sqrt())


def test_differences_are_rounding() -> None:
    """Rows are as far from fp32 as transformers' own in bf16, and where the texts part fp32 is undecided by that measure.

    Both round to bf16 behind every operation, in another order; how far that takes a row is seen in their own rows.
    """
    checkpoint = ensure_packaged("smollm2:135m")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    exact: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, tokenize=False)
        for q in QUESTIONS
    ]
    wanted = {"max_new_tokens": N, "eos_token_id": None, "return_dict_in_generate": True, "output_logits": True}
    off: dict[str, list[float]] = {"theirs": [], "ours": []}
    alone = []
    for text in texts:
        request = tokenizer(text, return_tensors="pt")
        length = request.input_ids.shape[1]
        theirs = model.generate(**request, **wanted)
        ours = model.generate(**request, **wanted, custom_generate=viasd.hf.generate)
        alone.append(ours)
        with torch.inference_mode():
            rows = exact(theirs.sequences[:, :-1]).logits[0, length - 1 :]
        differing = (theirs.sequences != ours.sequences)[0, length:].nonzero()
        common = N if not len(differing) else int(differing[0]) + 1  # with the row that was decided otherwise
        for name, out in (("theirs", theirs), ("ours", ours)):
            off[name].append(noise(torch.cat(list(out.logits))[:common], rows[:common]))
        if len(differing):
            said, instead = (out.sequences[0, length + common - 1] for out in (theirs, ours))
            gap = float((rows[common - 1, said] - rows[common - 1, instead]).abs())
            assert gap < 8 * off["theirs"][-1], f"{said} and {instead} are {gap} apart"
    assert sum(off["ours"]) < 1.25 * sum(off["theirs"])
    shared = model.generate(
        **tokenizer(texts, return_tensors="pt", padding=True), **wanted, custom_generate=viasd.hf.generate
    )
    if driven(model, logit_rows(model)).form == "native":
        for row, out in enumerate(alone):
            assert shared.viasd[row].token_ids == out.viasd[0].token_ids
            for a, b in zip(shared.logits, out.logits, strict=True):
                assert torch.equal(a[row], b[0])
