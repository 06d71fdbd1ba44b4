from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from fitting import read_corpus, small_corpus, target_pair
from tiny import tokenizer
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from viasd.errors import FitError
from viasd.search.fit.corpus import Corpus, load_corpus


def other_tokenizer(size: int = 300) -> PreTrainedTokenizerFast:
    vocabulary = {f"word{i}": i for i in range(size)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="word0")))


def same(one: Corpus, other: Corpus) -> bool:
    return one.hash == other.hash and bool((one.temperature == other.temperature).all())


def npz(path: Path, corpus: Corpus) -> Path:
    np.savez(
        path,
        tokens=corpus.tokens.numpy().astype(np.uint16),
        start=corpus.start.numpy(),
        answer=corpus.answer.numpy().astype(np.int32),
        temperature=corpus.temperature.numpy(),
    )
    return path


def test_a_corpus_survives_its_file(tmp_path: Path) -> None:
    small_corpus().save(tmp_path / "c.safetensors")
    again = load_corpus(tmp_path / "c.safetensors", tokenizer())
    assert same(again, small_corpus())
    assert again.provenance == small_corpus().provenance


def test_an_npz_of_four_arrays_is_a_corpus_too(tmp_path: Path) -> None:
    assert same(load_corpus(npz(tmp_path / "c.npz", read_corpus()), tokenizer()), read_corpus())


def test_a_corpus_of_another_tokenizer_is_refused_by_its_fingerprint(tmp_path: Path) -> None:
    small_corpus().save(tmp_path / "c.safetensors")
    with pytest.raises(FitError, match=r"another tokenizer.*fingerprint.*viasd-fit corpus"):
        load_corpus(tmp_path / "c.safetensors", other_tokenizer())


def test_a_corpus_without_a_fingerprint_is_refused_by_what_it_reads_as(tmp_path: Path) -> None:
    path = npz(tmp_path / "c.npz", read_corpus())
    with pytest.raises(FitError, match="knows ids up to 9"):
        load_corpus(path, other_tokenizer(10))
    with pytest.raises(FitError, match="survive being decoded and encoded"):
        load_corpus(path, other_tokenizer())


@pytest.mark.parametrize(
    ("content", "message"), [(b"nothing of the kind", "expected .* to be a corpus"), (None, "can't read corpus")]
)
@pytest.mark.parametrize("name", ["c.npz", "c.safetensors"])
def test_what_is_no_corpus_is_refused(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(FitError, match=message):
        load_corpus(tmp_path / name, tokenizer())


def test_offsets_that_do_not_fit_are_refused() -> None:
    good = small_corpus()
    with pytest.raises(FitError, match="offsets do not cover"):
        Corpus(good.tokens[:-1], good.start, good.answer, good.temperature)
    with pytest.raises(FitError, match="answer begins outside"):
        Corpus(good.tokens, good.start, good.answer + 100, good.temperature)


def test_the_last_twentieth_is_held_out_and_too_little_is_refused() -> None:
    learnt, held = small_corpus().split()
    assert [*learnt, *held] == list(range(60))
    assert len(held) == 3
    few = small_corpus()
    cut = Corpus(few.tokens[: int(few.start[10])], few.start[:11], few.answer[:10], few.temperature[:10])
    with pytest.raises(FitError, match="at least 20 conversations, but it has 10"):
        cut.split()


def test_batches_keep_to_their_budget_and_hold_every_conversation_once() -> None:
    corpus = small_corpus()
    for seed in (None, 1, 2):
        batches = corpus.batches(range(60), 100, seed=seed)
        assert all(batch.ids.numel() <= 100 for batch in batches)
        assert sorted(n for batch in batches for n in batch.numbers) == list(range(60))
    orders = [[b.numbers for b in corpus.batches(range(60), 100, seed=seed)] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def test_scored_positions_are_those_before_each_token_of_the_answer() -> None:
    corpus = small_corpus()
    batch = corpus.batch([3, 8, 21], max_length=20)
    for row, number in enumerate(batch.numbers):
        tokens, answer = corpus.conversation(number)[:20], int(corpus.answer[number])
        after = batch.ids[row, 1:][batch.scored[row, :-1]]
        assert after.tolist() == tokens[answer:].tolist()


def test_no_row_of_a_batch_sees_another_or_its_padding() -> None:
    corpus, model = small_corpus(), target_pair().target.model
    batch = corpus.batch([3, 8, 21])
    with torch.inference_mode():
        together = model(batch.ids).logits
        for row, number in enumerate(batch.numbers):
            alone = model(corpus.conversation(number)[None].long()).logits[0]
            assert torch.allclose(together[row, : len(alone)], alone, atol=1e-4)
