"""Small corpora and pairs for tests of what is trained."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from tiny import model_of, tokenizer

import viasd
from viasd.search.fit.corpus import TOKENIZER, Corpus
from viasd.vocab import fingerprint


@cache
def target_pair() -> viasd.Pair:
    return viasd.make_pair(model_of("llama", num_hidden_layers=3), tokenizer(), target_id="tiny")


@cache
def small_corpus(conversations: int = 60, seed: int = 0, length: int = 24) -> Corpus:
    """Texts that the tiny target wrote greedily after random beginnings of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    model: Any = target_pair().target.model
    rows, answers = [], []
    for number in range(conversations):
        begin = torch.randint(5, 260, (3 + number % 5,), generator=generator)
        with torch.inference_mode():
            row = model.generate(
                begin[None],
                attention_mask=torch.ones_like(begin[None]),
                max_new_tokens=length - number % 7,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )[0]
        rows.append(row)
        answers.append(len(begin))
    lengths = torch.tensor([0, *(len(row) for row in rows)])
    return Corpus(
        torch.cat(rows).int(),
        lengths.cumsum(0),
        torch.tensor(answers),
        torch.tensor([(0.01, 0.6, 1.0)[n % 3] for n in range(conversations)]),
        {TOKENIZER: fingerprint(tokenizer())},
    )


def read_corpus(conversations: int = 30) -> Corpus:
    """Sentences of words, as ids of the byte tokenizer; names no tokenizer."""
    rows = [torch.tensor(tokenizer()(f"question {n}? the answer is {n * n}").input_ids) for n in range(conversations)]
    lengths = torch.tensor([0, *(len(row) for row in rows)])
    answers = torch.full((conversations,), 12)
    return Corpus(torch.cat(rows).int(), lengths.cumsum(0), answers, torch.full((conversations,), 0.5))
