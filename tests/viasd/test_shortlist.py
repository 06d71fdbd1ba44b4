"""Rows over some words only: the numbers of the whole row, and the bits that each sequence has alone."""

from __future__ import annotations

import math

import pytest
import torch
from test_kernels import needs_kernels

from viasd.errors import OptionError
from viasd.estimator import logit_of_max
from viasd.kernels.matrices import MOST_TOKENS
from viasd.layered import LayeredModel
from viasd.pair import make_pair
from viasd.probe import load_layered
from viasd.rows import likeliest
from viasd.shortlist import UNKNOWN, DenseLater, ShortReadout, ShortRow, ShortTable
from viasd.testing import byte_tokenizer, tiny_model

WORDS = torch.tensor([2, 3, 7, 11, 40, 41, 199, 299])


def target(family: str = "llama", layers: str = "auto", dtype: torch.dtype = torch.float32) -> LayeredModel:
    return load_layered(tiny_model(family, dtype=dtype, num_hidden_layers=2), layers=layers)


def states(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(1, n, 32, generator=torch.Generator().manual_seed(n)).to(dtype)


@pytest.mark.parametrize("layers", ["auto", "hf"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])  # gemma2 changes its logits behind the head
@pytest.mark.parametrize("n", [1, MOST_TOKENS + 3])
def test_it_says_what_the_whole_head_says_of_these_words(family: str, layers: str, n: int) -> None:
    model, hidden = target(family, layers), states(n)
    with torch.inference_mode():
        whole = model.readout(hidden)
        readout = ShortReadout(model, WORDS)
        short, (last,) = readout(hidden), readout.last([hidden], [n])
    torch.testing.assert_close(short[:, WORDS], whole[:, WORDS], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(last.dense, short, rtol=1e-5, atol=1e-5)
    others = [w for w in range(300) if w not in WORDS.tolist()]
    assert set(short[:, others].unique().tolist()) == {UNKNOWN}
    assert short.dtype == last.dense.dtype == torch.float32


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_rows_are_the_same_bits_however_many_sequences_are_read_with_them(family: str, dtype: torch.dtype) -> None:
    model = target(family, "native", dtype)
    readout = ShortReadout(model, WORDS)
    rows = [1, 2, 0, 1, 3] * 8  # more than the kernels take of one sequence
    hidden = [states(3 + i, dtype) for i in range(len(rows))]
    with torch.inference_mode():
        together = readout.last(hidden, rows)
        for states_of_one, n, found in zip(hidden, rows, together, strict=True):
            assert len(found) == n
            if n:
                assert torch.equal(found.dense, readout.last([states_of_one], [n])[0].dense)
                assert torch.equal(found.dense, readout(states_of_one[:, -n:]))


def test_what_a_row_says_is_what_the_row_written_out_says() -> None:
    known = torch.tensor([[0.5, 2.0, 2.0, -1.0, 0.0, 1.0, -3.0, 0.1], [4.0, 0, 0, 0, 0, 0, 0, 9.0]])
    table = ShortTable(known, WORDS, 300)
    for index in (0, 1):
        row = ShortRow(table, index)
        whole = ShortRow.of(row.dense)
        column, token, chance = row.best
        assert token == whole.best[1] == int(row.dense.argmax()) == int(WORDS[column])
        assert chance == pytest.approx(whole.best[2]) == float(row.dense.softmax(-1).max())
        for word in (0, 2, 3, 4, 41, 298, 299):
            assert float(row.chance(word)) == pytest.approx(float(row.dense.softmax(-1)[word]))
            assert float(row.chance(word)) == pytest.approx(float(whole.chance(word)))
    assert ShortRow(table, 0).best[1] == 3  # of two equal ones the first, as an argmax over all words takes it
    assert table.best[1] is ShortRow(table, 1).best


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_how_sure_a_row_is_does_not_depend_on_how_it_is_found(temperature: float) -> None:
    generator = torch.Generator().manual_seed(3)
    known = torch.randn(6, 40, generator=generator) * torch.tensor([0.1, 1.0, 3.0, 10.0, 30.0, 90.0])[:, None]
    table = ShortTable(known, torch.arange(40) * 2, 100)
    exact = logit_of_max(known.double(), temperature).tolist()
    found = [ShortRow(table, i).certainty(temperature) for i in range(6)]
    assert found == pytest.approx(exact, abs=1e-3)
    assert found[0] < 0 < 4.6 < found[-1]  # on both sides of the probability from which on it is computed anew
    known[2, 7] = float("nan")
    assert math.isnan(ShortRow(ShortTable(known, None, 40), 2).certainty(temperature))


def test_rows_of_a_draft_are_written_out_where_they_are_asked_for() -> None:
    known = torch.arange(24.0).reshape(3, 8)
    later = DenseLater([ShortRow(ShortTable(known, WORDS, 300), i) for i in range(3)])
    assert len(later) == 3
    assert [row.shape for row in later] == [(300,)] * 3
    assert torch.equal(later[1][WORDS], known[1])
    assert [torch.equal(a, b) for a, b in zip(later[1:].known, known[1:], strict=True)] == [True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_likeliest_word_is_what_argmax_says(dtype: torch.dtype) -> None:
    rows = torch.randn(40, 70, generator=torch.Generator().manual_seed(1)).mul(4).round().to(dtype)  # ties abound
    rows[3, 50], rows[4, :], rows[5, 9] = torch.nan, -torch.inf, torch.inf
    rows.requires_grad_()
    assert likeliest(rows) == rows.argmax(dim=-1).tolist()
    assert likeliest(rows)[4] == 0
    assert likeliest(rows[:, ::3]) == rows[:, ::3].argmax(dim=-1).tolist()


@pytest.mark.parametrize("words", [[3, 3, 7], [7, 3], [-1, 3], []])
def test_a_pair_takes_no_list_in_which_a_word_has_two_places_or_none(words: list[int]) -> None:
    """Tokens are drawn by their column and tested by their id."""
    model = tiny_model("llama", num_hidden_layers=1)
    with pytest.raises(OptionError, match="ascending"):
        make_pair(model, byte_tokenizer(), drafter=model, shortlist=torch.tensor(words, dtype=torch.long))
