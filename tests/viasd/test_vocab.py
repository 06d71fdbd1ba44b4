from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from viasd.errors import TokenizerMismatchError
from viasd.vocab import common_vocabulary, vocabulary_size


def tokenizer(vocabulary: str | dict[str, int], eos: str | None = "a") -> PreTrainedTokenizerFast:
    """A word-level tokenizer; a string gives its letters the ids 0, 1, ..."""
    ids = {letter: i for i, letter in enumerate(vocabulary)} if isinstance(vocabulary, str) else vocabulary
    inner = Tokenizer(models.WordLevel(ids, unk_token=next(iter(ids))))
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=eos)


def test_padding_rows_are_cut_from_one_model() -> None:
    assert vocabulary_size(tokenizer("abc"), 8) == 3
    assert vocabulary_size(tokenizer("abc"), 2) == 2
    assert vocabulary_size(tokenizer({"a": 0, "b": 5}), 8) == 6


def test_equal_tokenizers_with_different_padding_share_their_strings_only() -> None:
    assert common_vocabulary(tokenizer("abcd"), tokenizer("abcd"), 6, 8) == 4
    assert common_vocabulary(tokenizer("abcd"), tokenizer("abcd"), 3, 8) == 3


def test_tokens_that_only_one_has_at_the_end_are_cut() -> None:
    assert common_vocabulary(tokenizer("abcde"), tokenizer("abc"), 8, 8) == 3
    assert common_vocabulary(tokenizer("abc"), tokenizer("abcde"), 8, 8) == 3


def test_two_swapped_ids_are_refused_though_the_sizes_agree() -> None:
    with pytest.raises(TokenizerMismatchError) as caught:
        common_vocabulary(tokenizer("abcde"), tokenizer("abdce"), 5, 5)
    message = str(caught.value)
    assert "id 2" in message
    assert "drafter has 'c' (id 3 in the target)" in message
    assert "target has 'd' (id 3 in the drafter)" in message


def test_the_lowest_differing_id_is_named() -> None:
    with pytest.raises(TokenizerMismatchError, match=r"id 1: .*'b' \(unknown to the target\).*'x' \(unknown to the dr"):
        common_vocabulary(tokenizer("abcdy"), tokenizer("axcdz"), 5, 5)


def test_a_difference_in_the_very_last_row_is_refused() -> None:
    with pytest.raises(TokenizerMismatchError, match="id 2"):
        common_vocabulary(tokenizer("abx"), tokenizer("aby"), 3, 3)


def test_a_gap_that_only_one_has_is_refused() -> None:
    with pytest.raises(TokenizerMismatchError, match="id 1: the drafter has none, the target has 'b'"):
        common_vocabulary(tokenizer({"a": 0, "c": 2}), tokenizer("abc"), 3, 3)


def test_a_gap_that_both_have_is_fine() -> None:
    gap = {"a": 0, "c": 2}
    assert common_vocabulary(tokenizer(gap), tokenizer({**gap, "d": 3}), 9, 9) == 3


def test_a_difference_beyond_the_rows_of_either_model_does_not_matter() -> None:
    assert common_vocabulary(tokenizer("abcx"), tokenizer("abcy"), 3, 4) == 3


def test_cutting_off_the_targets_end_token_is_refused() -> None:
    with pytest.raises(TokenizerMismatchError, match=r"ends its text with 'd' \(id 3\)"):
        common_vocabulary(tokenizer("abc"), tokenizer("abcd", eos="d"), 4, 4)


def test_an_added_token_counts() -> None:
    with_added = tokenizer("abc")
    with_added.add_tokens(["zz"])
    assert vocabulary_size(with_added, 9) == 4
    assert common_vocabulary(with_added, tokenizer(dict(a=0, b=1, c=2, zz=3)), 9, 9) == 4
