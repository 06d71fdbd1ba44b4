import functools
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from viasd.errors import OptionError
from viasd.runtime.textstream import TextStream

LINES = [
    "Hello world, the quick brown fox.\n\n",
    "안녕하세요 세계 🙂👩‍👩‍👧 naïve café\n",
    "def f(x):\n    return x  # 한국어\n",
]
TEXT = "Hello 세계 🙂🙂 naïve\n\n    return 👩‍👩‍👧 x 漢字 end."


@functools.cache
def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer.train_from_iterator(LINES * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


@functools.cache
def metaspace():
    """As Llama 2: metaspace, byte fallback, and a decoder that strips the leading space of a text."""
    pieces = ["▁", "▁Hello", "▁wor", "ld", "▁return", "▁x", "▁na", "ve", "세", "계", "end", ".", "a", "b", "▁▁▁"]
    vocab = ["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    scores = [(token, -float(len(vocab) - i)) for i, token in enumerate(vocab)]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


TOKENIZERS = pytest.mark.parametrize("make", [byte_level, metaspace])


class Counting:
    """A tokenizer that counts the ids it decodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.decoded = tokenizer, 0
        self.added_tokens_decoder = tokenizer.added_tokens_decoder
        self.convert_ids_to_tokens = tokenizer.convert_ids_to_tokens

    def decode(self, ids, **options):
        self.decoded += len(ids)
        return self.tokenizer.decode(ids, **options)


def full(tokenizer, ids, skip=True):
    return tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def stream(tokenizer, ids, cuts=None, **options):
    """Push `ids` in blocks that end at `cuts` (default: one by one), as a caller does: deltas, kept ids, stopped_at."""
    text_stream = TextStream(tokenizer, **options)
    bounds = sorted({0, len(ids), *(range(len(ids)) if cuts is None else cuts)})
    deltas, kept = [], []
    for start, end in itertools.pairwise(bounds):
        pieces = text_stream.push(ids[start:end])
        assert sum(piece.tokens for piece in pieces) == text_stream.consumed
        kept += ids[start:end][: text_stream.consumed]
        deltas += [piece.text for piece in pieces]
    return [*deltas, text_stream.finish()], kept, text_stream.stopped_at


@TOKENIZERS
def test_deltas_of_real_text_join_to_the_full_decode_without_broken_characters(make):
    ids = encode(make(), TEXT)
    deltas, kept, stopped_at = stream(make(), ids)
    assert full(make(), ids) == TEXT
    assert "".join(deltas) == TEXT
    assert not any("\ufffd" in delta for delta in deltas)
    assert (kept, stopped_at) == (ids, None)
    assert sum(map(bool, deltas)) > 10


@TOKENIZERS
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_ids_in_any_split_join_to_the_full_decode(make, data):
    tokenizer = make()
    # Mostly bytes and specials, where decoding depends on the neighbours.
    some = st.one_of(st.integers(0, len(tokenizer) + 3), st.sampled_from(encode(tokenizer, TEXT)))
    ids = data.draw(st.lists(some, max_size=80))
    skip = data.draw(st.booleans())
    cuts = data.draw(st.sets(st.integers(0, len(ids))))
    deltas, kept, _ = stream(tokenizer, ids, cuts, skip_special_tokens=skip)
    assert "".join(deltas) == full(tokenizer, ids, skip)
    assert kept == ids


@TOKENIZERS
def test_text_is_passed_on_as_soon_as_it_is_certain(make):
    text_stream = TextStream(make())
    for token in encode(make(), "Hello world x x"):
        assert text_stream.push([token])[0].text or make() is metaspace()
    assert text_stream.finish() == ""


@TOKENIZERS
def test_unfinished_character_is_shown_only_at_the_end(make):
    ids = encode(make(), "x 漢")[:-1]
    deltas, _, _ = stream(make(), ids)
    assert "\ufffd" not in "".join(deltas[:-1])
    assert "".join(deltas) == full(make(), ids)
    assert deltas[-1].endswith("\ufffd")


def test_special_tokens_do_not_break_a_byte_run():
    ids = encode(metaspace(), "Hello 漢字")
    ids.insert(-1, metaspace().eos_token_id)
    deltas, _, _ = stream(metaspace(), ids)
    assert "".join(deltas) == full(metaspace(), ids) == "Hello 漢字"


def test_a_prompt_tail_keeps_the_leading_space():
    tokenizer = metaspace()
    prompt, ids = encode(tokenizer, "Hello"), encode(tokenizer, "Hello return x")
    assert "".join(stream(tokenizer, ids)[0]) == "Hello return x"
    assert "".join(stream(tokenizer, ids, prompt_tail_ids=prompt)[0]) == " Hello return x"


@pytest.mark.parametrize("text", [TEXT, "\ufffd", "é漢", "   "])
@TOKENIZERS
def test_cost_of_a_token_does_not_grow_with_the_answer(make, text):
    ids = encode(make(), text)
    costs = []
    for repeats in (400, 1600):
        answer = (ids * repeats)[:repeats]
        counting = Counting(make())
        assert "".join(stream(counting, answer)[0]) == full(make(), answer)
        costs.append(counting.decoded / len(answer))
    assert costs[1] < costs[0] + 0.5
    assert costs[1] < 25


@TOKENIZERS
def test_a_stop_string_is_found_at_every_offset_of_text_and_block(make):
    tokenizer = make()
    ids = encode(tokenizer, TEXT)
    for start in range(len(TEXT)):
        for length in (1, 2, 5):
            stop = TEXT[start : start + length]
            first = TEXT.find(stop)
            completing = next(i for i in range(len(ids)) if stop in full(tokenizer, ids[: i + 1]))
            for cuts in (None, (), range(0, len(ids), 3)):
                deltas, kept, stopped_at = stream(tokenizer, ids, cuts, stop_strings=["absent", stop])
                assert "".join(deltas) == TEXT[:first]
                assert stopped_at == completing
                assert kept == ids[: completing + 1]


@TOKENIZERS
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_stop_strings_are_split_invariant_and_never_shown_in_part(make, data):
    tokenizer = make()
    ids = encode(tokenizer, data.draw(st.text(alphabet="ab \n漢", min_size=1, max_size=30)))
    stops = data.draw(st.lists(st.text(alphabet="ab \n漢", min_size=1, max_size=4), min_size=1, max_size=3))
    cuts = data.draw(st.sets(st.integers(0, len(ids))))
    one_by_one, in_blocks = stream(tokenizer, ids, stop_strings=stops), stream(tokenizer, ids, cuts, stop_strings=stops)
    assert "".join(one_by_one[0]) == "".join(in_blocks[0])
    assert one_by_one[1:] == in_blocks[1:]
    text = full(tokenizer, ids)
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert "".join(one_by_one[0]) == (text[: min(ends)[1]] if ends else text)
    assert (one_by_one[2] is not None) == bool(ends)


@pytest.mark.parametrize(
    ("stops", "shown"), [(["lo", "el"], " H"), (["lo", "llo"], " He"), (["ell", " Hello"], " H"), ([" H", "H"], "")]
)
def test_of_several_stop_strings_in_one_token_the_first_to_be_completed_counts(stops, shown):
    ids = encode(metaspace(), "x Hello.")
    deltas, _, stopped_at = stream(metaspace(), ids, stop_strings=stops)
    assert "".join(deltas) == "x" + shown
    assert stopped_at == 1


def test_a_newline_byte_stops_at_once():
    ids = encode(metaspace(), "Hello\n\n") + encode(metaspace(), "漢")
    _, kept, stopped_at = stream(metaspace(), ids, stop_strings=["\n\n"])
    assert stopped_at == len(kept) - 1
    assert full(metaspace(), kept) == "Hello\n\n"


def test_the_beginning_of_a_stop_string_is_held_back_until_decided():
    tokenizer = byte_level()
    a, b, c = (encode(tokenizer, letter)[0] for letter in "abc")
    text_stream = TextStream(tokenizer, stop_strings=["aab"])
    shown = [text_stream.push([token])[0].text for token in (c, a, a, a, c, a)]
    assert shown == ["c", "", "", "a", "aac", ""]
    assert text_stream.finish() == "a"
    text_stream = TextStream(tokenizer, stop_strings=["aab"])
    assert "".join(piece.text for piece in text_stream.push([c, a, a, b, c, c])) == "c"
    assert (text_stream.consumed, text_stream.stopped_at) == (4, 3)
    assert text_stream.push([c]) == []
    assert (text_stream.consumed, text_stream.finish()) == (0, "")


@pytest.mark.parametrize("stops", [[""], ["x", ""], [3]])
def test_stop_strings_without_text_are_refused(stops):
    with pytest.raises(OptionError, match="stop strings"):
        TextStream(byte_level(), stop_strings=stops)
