"""Rows of packed sequences do not depend on the company: read out by the kernels, and beside one without tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from viasd.attention import Segment
from viasd.heads import LightHeads
from viasd.kernels import build
from viasd.kernels.matrices import MOST_TOKENS
from viasd.layered import LayeredModel
from viasd.probe import load_layered
from viasd.routes import Route
from viasd.runtime.packed import read_out
from viasd.shortlist import ShortReadout
from viasd.testing import tiny_model

WIDTH, LENGTHS = 96, (1, 6, 20, 0, 9, MOST_TOKENS + 3, 2)


def model_of(dtype: torch.dtype, layers: str = "auto") -> LayeredModel:
    return load_layered(tiny_model("llama", dtype=dtype, hidden_size=WIDTH, num_hidden_layers=4), layers=layers)


def readout_of(kind: str, model: LayeredModel) -> Any:
    generator = torch.Generator().manual_seed(2)
    turns = torch.randn(1, WIDTH, WIDTH, generator=generator)
    words = torch.arange(0, model.vocabulary, 3)
    made: dict[str, Callable[[], Any]] = {
        "the model's": lambda: None,
        "lens": lambda: LightHeads.lens((2,)).bind(model)[2],
        "head": lambda: LightHeads((2,), turns, words).bind(model)[2],
        "head of all words": lambda: LightHeads((2,), turns).bind(model)[2],
        "shortlist": lambda: ShortReadout(model, words),
    }
    return made[kind]()


def route_of(readout: Any) -> Route:
    return Route.full(4) if readout is None else Route((True, True, False, False), readout=readout)


def states() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, n + 2, WIDTH, generator=generator) for n in LENGTHS]


@pytest.mark.skipif(build.why_missing() is not None, reason=f"no kernels: {build.why_missing()}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["the model's", "lens", "head", "head of all words", "shortlist"])
def test_a_row_is_the_same_bits_whatever_is_read_out_with_it(kind: str, dtype: torch.dtype) -> None:
    model = model_of(dtype)
    readout, hidden = readout_of(kind, model), [state.to(dtype) for state in states()]
    route = route_of(readout)
    with torch.inference_mode():
        together = read_out(model, route, hidden, LENGTHS)
        for state, n, rows in zip(hidden, LENGTHS, together, strict=True):
            assert rows.shape == (n, model.vocabulary)
            assert torch.equal(rows, read_out(model, route, [state], [n])[0])
            for i in range(n):  # row by row, as plain decoding reads them
                one = read_out(model, route, [state[:, : state.shape[1] - n + i + 1]], [1])[0]
                assert torch.equal(rows[i : i + 1], one)


@pytest.mark.parametrize("kind", ["the model's", "lens", "head", "head of all words", "shortlist"])
def test_rows_by_torch_are_the_same_but_for_rounding(kind: str) -> None:
    ours, theirs = model_of(torch.float32), model_of(torch.float32, "hf")
    found = [read_out(model, route_of(readout_of(kind, model)), states(), LENGTHS) for model in (ours, theirs)]
    for rows, expected in zip(*found, strict=True):
        torch.testing.assert_close(rows, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(build.why_missing() is not None, reason=f"no kernels: {build.why_missing()}")
def test_a_sequence_without_tokens_is_passed_over() -> None:
    """By the kernels too, which look ahead at the keys of the next sequence."""
    model = model_of(torch.bfloat16, "native")

    def ran(lengths: Sequence[int]) -> Tensor:
        ids = [5 + i for n in lengths for i in range(n)]
        step = model.step([Segment(model.new_kv(), 0, n) for n in lengths])
        return model.run(model.embed(ids), range(model.n_layers), step)[0]

    with torch.inference_mode():
        assert torch.equal(ran([3, 0, 2]), torch.cat([ran([3]), ran([2])], dim=1))
