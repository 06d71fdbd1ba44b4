from __future__ import annotations

import math

import pytest
import torch
from tiny import model_of, prompt_ids

from viasd.attention import Segment
from viasd.kv import SequenceKV
from viasd.layered import LayeredModel
from viasd.probe import load_layered


def write(kv: SequenceKV, layer: int, start: int, n: int, value: float) -> tuple[torch.Tensor, torch.Tensor]:
    return kv.write(layer, start, torch.full((2, n, 3), value), torch.full((2, n, 4), -value))


def test_views_reach_from_position_zero_to_the_end_of_what_was_written() -> None:
    kv = SequenceKV(2)
    write(kv, 1, 0, 3, 1.0)
    keys, values = write(kv, 1, 3, 2, 2.0)
    assert keys.shape == (1, 2, 5, 3)
    assert values.shape == (1, 2, 5, 4)
    assert keys[0, 0, :, 0].tolist() == [1, 1, 1, 2, 2]
    assert values[0, 1, :, 3].tolist() == [-1, -1, -1, -2, -2]


@pytest.mark.parametrize("n", [255, 256, 257, 600, 1025])
def test_growth_keeps_what_lies_below_the_write(n: int) -> None:
    kv = SequenceKV(1)
    expected = []
    for start in range(0, n, 37):
        length = min(37, n - start)
        keys, _ = write(kv, 0, start, length, float(start))
        expected += [float(start)] * length
    assert keys[0, 1, :, 2].tolist() == expected


def test_buffers_grow_by_doubling_and_layers_without_tokens_cost_nothing() -> None:
    kv = SequenceKV(3)
    assert kv.nbytes() == 0
    write(kv, 0, 0, 1, 1.0)
    small = kv.nbytes()
    write(kv, 0, 1, 255, 1.0)
    assert kv.nbytes() == small == 256 * 2 * (3 + 4) * 4
    write(kv, 0, 256, 1, 1.0)
    assert kv.nbytes() == 2 * small


def test_a_rewritten_position_holds_the_new_value() -> None:
    kv = SequenceKV(1)
    write(kv, 0, 0, 6, 1.0)
    keys, _ = write(kv, 0, 2, 2, 9.0)
    assert keys[0, 0, :, 0].tolist() == [1, 1, 9, 9]


def marks(full: int, slim: int) -> SequenceKV:
    kv = SequenceKV(1)
    kv.full_len, kv.slim_len = full, slim
    kv.boundary = torch.arange(float(slim - full)).reshape(1, -1, 1) if slim > full else None
    return kv


@pytest.mark.parametrize(
    ("length", "full", "slim", "boundary"),
    [
        (9, 4, 7, [0, 1, 2]),  # nothing lies there
        (7, 4, 7, [0, 1, 2]),
        (6, 4, 6, [0, 1]),
        (5, 4, 5, [0]),
        (4, 4, 4, None),
        (3, 3, 3, None),
        (0, 0, 0, None),
    ],
)
def test_roll_back_moves_the_watermarks_and_trims_the_boundary(
    length: int, full: int, slim: int, boundary: list[float] | None
) -> None:
    kv = marks(4, 7)
    kv.roll_back(length)
    assert (kv.full_len, kv.slim_len, kv.pending) == (full, slim, slim - full)
    assert (None if kv.boundary is None else kv.boundary.flatten().tolist()) == boundary


def test_forget_pending_keeps_the_full_path() -> None:
    kv = marks(4, 7)
    kv.forget_pending()
    assert (kv.full_len, kv.slim_len, kv.boundary) == (4, 4, None)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("n", [1, 3])
def test_nan_in_memory_above_the_watermark_does_not_leak(family: str, kernel: str, n: int) -> None:
    model = load_layered(model_of(family), kernel=kernel)
    ids = prompt_ids()
    clean, poisoned = (_run_twice(model, ids, n, poison) for poison in (False, True))
    assert torch.equal(clean, poisoned)
    assert not poisoned.isnan().any()


@torch.inference_mode()
def _run_twice(model: LayeredModel, ids: list[int], n: int, poison: bool) -> torch.Tensor:
    kv = model.new_kv()
    _, base = model.run(model.embed(ids[:12]), range(model.n_layers), model.step([Segment(kv, 0, 12)])), 10
    if poison:
        for buffer in (*kv._keys, *kv._values):
            assert buffer is not None
            buffer[:, :, base:] = math.nan
    step = model.step([Segment(kv, base, n)])
    out, _ = model.run(model.embed(ids[base : base + n]), range(model.n_layers), step)
    return model.readout(out)
