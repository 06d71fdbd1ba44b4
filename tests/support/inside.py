"""Requests to transformers' `generate` with and without viasd inside, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tiny import TEXT, tokenizer
from torch import Tensor

import viasd
from viasd.runtime.hf import driven


class Recorder:
    """A streamer that remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.calls.append((value.device.type, value.tolist()))

    def end(self) -> None:
        self.calls.append("end")


def inputs(texts: str | Sequence[str] = TEXT) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask` of one text, or of several, padded on the left."""
    rows = [tokenizer()(t).input_ids for t in ([texts] if isinstance(texts, str) else texts)]
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def both(model: Any, request: dict[str, Any], own: dict[str, Any] | None = None, **options: Any) -> tuple[Any, Any]:
    """What transformers gives, and what it gives with viasd inside."""
    theirs = model.generate(**request, **options)
    ours = model.generate(**request, **options, custom_generate=viasd.hf.generate, **(own or {}))
    return theirs, ours


def state(model: Any) -> Any:
    """Everything of a model that somebody could notice."""
    return (
        [(n, p.data_ptr(), p._version, p.requires_grad, p.sum().item()) for n, p in model.named_parameters()],
        [(n, b.data_ptr(), b._version) for n, b in model.named_buffers()],
        [
            (n, type(m), len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in vars(m))
            for n, m in model.named_modules()
        ],
        model.config.to_dict(),
        model.generation_config.to_dict(),
        {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")},
        model.training,
        sorted(set(vars(model)) - {driven._KEPT}),
    )
