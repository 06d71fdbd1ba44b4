"""Batches inside transformers: `viasd.hf.generate` against `model.generate`, greedy, of the very same model and inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

import viasd
from viasd.pair import Pair
from viasd.runtime.bench.timing import interleaved, spread

ROWS = (1, 4, 8)
_QUESTIONS = (
    "Write a short story about a dog who learns to read.",
    "What is the capital of France, and what is it known for?",
    "List five fruits and say a word about the taste of each of them.",
    "A train leaves at nine and travels 120 miles at 40 miles an hour. When does it arrive? Explain every step.",
    "Why is the sky blue?",
    "Summarize in two sentences: The river rose in the night. By morning the lower fields were under water, and the farmers "
    "had moved the cattle to the hill. The bridge held, but the mill lost its wheel.",
    "Translate to French: I would like a cup of coffee and a piece of cake, please.",
    "Name the planets of the solar system in order, beginning with the one nearest to the sun.",
)


def batches_inside(pair: Pair, repeats: int, tokens: int) -> dict[str, Any]:
    """Tokens/s of batches of different prompts, padded on the left, every row of them `tokens` tokens long."""
    jobs: dict[str, Callable[[], object]] = {}
    for rows in ROWS:
        request = _padded(pair, rows)
        jobs[f"generate {rows}"] = partial(_answers, pair, request, tokens)
        for name, own in (("plain", {"viasd_strategy": "plain"}), ("sd", {})):
            jobs[f"{name} {rows}"] = partial(_answers, pair, request, tokens, custom_generate=viasd.hf.generate, **own)
    times = interleaved(jobs, repeats)
    middle = {name: median(taken) for name, taken in times.items()}
    speed = {name: [int(name.split()[1]) * tokens / t for t in taken] for name, taken in times.items()}
    return {
        "tokens_per_second": {name: spread(values) for name, values in speed.items()},
        "over generate": {
            f"{name} {rows}": round(middle[f"generate {rows}"] / middle[f"{name} {rows}"], 3)
            for rows in ROWS
            for name in ("plain", "sd")
        },
        "note": "by rows of a batch; prompts included, which are different ones, so drafts are what prompt lookup finds",
    }


def _padded(pair: Pair, rows: int) -> dict[str, Tensor]:
    found = [pair.encode([{"role": "user", "content": q}] if pair.is_chat else q) for q in _QUESTIONS[:rows]]
    longest = max(map(len, found))
    ids = [[0] * (longest - len(row)) + list(row) for row in found]
    seen = [[0] * (longest - len(row)) + [1] * len(row) for row in found]
    place = pair.target.device
    return {"input_ids": torch.tensor(ids, device=place), "attention_mask": torch.tensor(seen, device=place)}


def _answers(pair: Pair, request: dict[str, Tensor], tokens: int, **own: Any) -> object:
    model: Any = pair.target.model
    options = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(**request, **options, **own)
