"""Tiny models, pairs and reference outputs shared by engine tests (built once per process)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

import viasd
import viasd.kernels.native as native
import viasd.layered as layered
from viasd.kv import SequenceKV
from viasd.testing import byte_tokenizer, perturbed, tiny_model

TEXT = "hello hello world, hello"  # 24 tokens: three windows of 8, with something to look up


@cache
def model_of(family: str, **shape: Any) -> Any:
    with torch.inference_mode(mode=False):  # whoever asks first: another test may train on it
        return tiny_model(family, **shape)


@cache
def tokenizer() -> Any:
    return byte_tokenizer()


@cache
def pair_of(family: str, drafter: str = "lookup", noise: float = 0.3, **shape: Any) -> viasd.Pair:
    """A pair over a tiny model; `drafter` is lookup, self, model (a perturbed copy) or same (the target itself)."""
    model = model_of(family, **shape)
    small = {"model": lambda: perturbed(model, noise), "same": lambda: model}.get(drafter, lambda: drafter)()
    return viasd.make_pair(model, tokenizer(), drafter=small)


def prompt_ids(text: str = TEXT) -> list[int]:
    return [int(i) for i in tokenizer()(text).input_ids]


def hf_greedy(model: Any, ids: Sequence[int], n: int, **options: Any) -> list[int]:
    """What transformers' own greedy generate gives, EOS ignored unless asked for."""
    options = {"eos_token_id": None, "pad_token_id": 0, **options}
    row = torch.tensor([list(ids)])
    out = model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=n, do_sample=False, **options)
    return [int(i) for i in out[0, len(ids) :]]


def generate(pair: viasd.Pair, ids: Any, **options: Any) -> viasd.Result:
    """`viasd.generate` with test defaults; checks the counters of every answer on the way."""
    options = {"mask": None, "seed": 1, "ignore_eos": True, "max_new_tokens": 40, **options}
    result = viasd.generate(pair, ids, **options)
    assert result.stats.check() == []
    assert result.stats.emitted == len(result.token_ids) == len(result.tiers)
    return result


class Counting:
    """A backend of `torch.compile` that runs what was traced as it is, and counts the graphs."""

    def __init__(self) -> None:
        self.compiled = 0

    def __call__(self, graph: Any, inputs: Sequence[Any]) -> Any:
        self.compiled += 1
        return graph.forward


# Every strategy that must reproduce the target alone, as options of `generate`.
LOSSLESS: dict[str, dict[str, Any]] = {
    "plain": {"strategy": "plain"},
    "sd": {"strategy": "sd", "draft_length": "fixed"},
    "sd-paced": {"strategy": "sd"},
    "chain": {"strategy": "cascade", "mode": "lossless", "tiers": "3", "mask": "even:0.45"},
    "chain2": {
        "strategy": "cascade",
        "mode": "lossless",
        "tiers": "3",
        "mask": "even:0.3",
        "slim_rounds": 2,
        "gamma": 3,
    },
    "via0": {"strategy": "cascade", "mode": "via", "tiers": "3", "mask": "even:0.45", "max_disagreement": 0.0},
    "via-audited": {
        "strategy": "cascade",
        "mode": "via",
        "tiers": "3",
        "mask": "even:0.25",
        "gate": "ratio",
        "audit": 1.0,
    },
}
LOSSY: dict[str, dict[str, Any]] = {
    "ratio": {"strategy": "cascade", "mode": "via", "tiers": "3", "mask": "even:0.25", "gate": "ratio", "audit": 0.0},
    "ratio-audit": {
        "strategy": "cascade",
        "mode": "via",
        "tiers": "3",
        "mask": "even:0.25",
        "gate": "ratio",
        "recheck": False,
        "audit": 0.5,
    },
    "bounded": {"strategy": "cascade", "mode": "bounded", "alpha": 0.5, "tiers": "3", "mask": "even:0.45"},
    "bounded-sd": {"strategy": "sd", "mode": "bounded", "alpha": 0.5},
}
EVERY = {**LOSSLESS, **LOSSY}


def watch_writes(monkeypatch: Any, seen: Any) -> None:
    """Calls ``seen(kv, layer, start, tokens)`` before anything is written into a cache, by torch or by a kernel."""
    write, run = SequenceKV.write, native.run_layers

    def watched_write(self: SequenceKV, layer: int, start: int, keys: Any, values: Any) -> Any:
        seen(self, layer, start, keys.shape[1])
        return write(self, layer, start, keys, values)

    def watched_run(layers: Any, hidden: Any, rotations: Any, step: Any, part: str | None = None) -> Any:
        for layer in layers if part != "mlp" else ():
            for segment in step.segments:
                seen(segment.kv, layer.lean.index, segment.start, segment.length)
        return run(layers, hidden, rotations, step, part)

    monkeypatch.setattr(SequenceKV, "write", watched_write)
    monkeypatch.setattr(native, "run_layers", watched_run)
    monkeypatch.setattr(layered, "run_layers", watched_run)


def save_target(folder: Path) -> str:
    """The tiny Llama with the byte tokenizer, as a folder that commands take; returns its path."""
    path = folder / "tiny-target"
    tiny_model().save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)
