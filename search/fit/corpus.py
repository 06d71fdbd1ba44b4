"""Conversations to train on: user turns and answers that a target wrote itself, as token ids."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from viasd.errors import FitError
from viasd.files import write_atomically
from viasd.vocab import fingerprint

FORMAT = "viasd-corpus"
FORMAT_VERSION = 1
HELD_OUT = 0.05
#: Fewer conversations than this leave nothing worth the name to judge on.
MIN_CONVERSATIONS = 20
_ARRAYS = ("tokens", "start", "answer", "temperature")
#: Key of the provenance: fingerprint of the tokenizer.
TOKENIZER = "tokenizer"
_SAMPLED = 16  # conversations read back to see whether a corpus without a fingerprint is of this tokenizer
_ALIKE = 0.7


@dataclass(frozen=True)
class Batch:
    """Some conversations, one a row, padded at the end.

    In a causal model no position sees what comes after it, so padding needs no mask, and no row sees another.

    Attributes:
        ids: ``[B, L]``, 0 beyond a row's end.
        length: Tokens of each row, ``[B]``.
        answer: Offset within each row at which the answer begins, ``[B]``.
        temperature: At which each answer was drawn, ``[B]``.
        numbers: Which conversations of the corpus these are.
    """

    ids: Tensor
    length: Tensor
    answer: Tensor
    temperature: Tensor
    numbers: tuple[int, ...]

    @property
    def scored(self) -> Tensor:
        """Where the next token is one of the answer, boolean ``[B, L]``: the positions a drafter or head learns from."""
        place = torch.arange(self.ids.shape[1])[None]
        return (place >= self.answer[:, None] - 1) & (place < self.length[:, None] - 1)


@dataclass(frozen=True)
class Corpus:
    """Conversations end to end.

    Attributes:
        tokens: All token ids, ``[N]`` int32.
        start: Offset of each conversation, one more than there are conversations, ``[C + 1]`` int64.
        answer: Offset within each conversation at which its answer begins, ``[C]`` int64.
        temperature: At which the answer was drawn, ``[C]`` float32.
        provenance: Where it came from: target, tokenizer fingerprint, settings.
    """

    tokens: Tensor
    start: Tensor
    answer: Tensor
    temperature: Tensor
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem is not None:
            raise FitError(f"the corpus is not consistent: {problem}; make it anew with viasd-fit corpus")

    def __len__(self) -> int:
        """Number of conversations."""
        return self.answer.shape[0]

    @property
    def answer_tokens(self) -> int:
        """Tokens of all answers."""
        return int((self.start.diff() - self.answer).sum())

    @cached_property
    def hash(self) -> str:
        """Hash of all conversations."""
        digest = hashlib.sha256()
        for name in _ARRAYS:
            digest.update(getattr(self, name).numpy().tobytes())
        return digest.hexdigest()[:16]

    def conversation(self, number: int) -> Tensor:
        """Token ids of one conversation, ``[n]``."""
        return self.tokens[int(self.start[number]) : int(self.start[number + 1])]

    def split(self, held_out: float = HELD_OUT) -> tuple[range, range]:
        """Numbers of the conversations to train on, and of the last share, which is for judging only.

        Raises:
            FitError: If there are too few conversations for that.
        """
        kept = round(len(self) * held_out)
        if len(self) < MIN_CONVERSATIONS or kept < 1:
            raise FitError(
                f"expected a corpus of at least {MIN_CONVERSATIONS} conversations, but it has {len(self)}; let "
                "viasd-fit corpus write more (--conversations)"
            )
        return range(len(self) - kept), range(len(self) - kept, len(self))

    def batch(self, numbers: Sequence[int], max_length: int | None = None) -> Batch:
        """Conversations as one batch, each cut to `max_length` tokens."""
        rows = [self.conversation(n)[:max_length] for n in numbers]
        ids = torch.zeros((len(rows), max(r.shape[0] for r in rows)), dtype=torch.long)
        for i, row in enumerate(rows):
            ids[i, : row.shape[0]] = row
        length = torch.tensor([r.shape[0] for r in rows])
        index = torch.tensor(list(numbers))
        return Batch(ids, length, self.answer[index].minimum(length), self.temperature[index], tuple(numbers))

    def batches(
        self, numbers: Sequence[int], budget: int, *, seed: int | None = None, max_length: int | None = None
    ) -> list[Batch]:
        """All named conversations in batches of at most `budget` tokens, padding included.

        Conversations of like length go together, so little is padded. A conversation longer than the budget is cut to it.

        Args:
            numbers: Which conversations.
            budget: Tokens of a batch.
            seed: Of the order; None keeps conversations sorted by length.
            max_length: Longest row.
        """
        limit = budget if max_length is None else min(max_length, budget)
        return [self.batch(group, limit) for group in self._groups(numbers, budget, limit, seed)]

    def _groups(self, numbers: Sequence[int], budget: int, limit: int, seed: int | None) -> Iterator[list[int]]:
        lengths = {n: min(limit, int(self.start[n + 1] - self.start[n])) for n in numbers}
        generator = torch.Generator().manual_seed(seed or 0)
        # Ties in length in another order each time, or the same conversations would always meet.
        jitter = torch.rand(len(numbers), generator=generator).tolist() if seed is not None else [0.0] * len(numbers)
        order = [n for _, _, n in sorted(zip((lengths[n] // 8 for n in numbers), jitter, numbers, strict=True))]
        groups: list[list[int]] = []
        longest = 0
        for n in order:
            longest = max(longest, lengths[n])
            if not groups or longest * (len(groups[-1]) + 1) > budget:
                groups.append([])
                longest = lengths[n]
            groups[-1].append(n)
        if seed is not None:
            groups = [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]
        yield from groups

    def save(self, path: str | Path) -> None:
        """Writes a safetensors file, whole or not at all.

        Raises:
            FitError: If it can't be written.
        """
        header = {"format": FORMAT, "version": str(FORMAT_VERSION), "provenance": json.dumps(self.provenance)}
        tensors = {name: getattr(self, name).contiguous() for name in _ARRAYS}
        write_atomically(Path(path), save(tensors, metadata=header), FitError)

    def _problem(self) -> str | None:
        if self.start.shape[0] != len(self) + 1 or self.temperature.shape[0] != len(self):
            return "its arrays have different lengths"
        if len(self) == 0:
            return "it holds no conversation"
        lengths = self.start.diff()
        if int(self.start[0]) != 0 or int(self.start[-1]) != self.tokens.shape[0] or bool((lengths < 2).any()):
            return "its offsets do not cover its tokens"
        if bool((self.answer < 1).any()) or bool((self.answer >= lengths).any()):
            return "an answer begins outside its conversation"
        return None


def load_corpus(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> Corpus:
    """Reads a corpus of `viasd-fit corpus`, or an ``.npz`` with the arrays tokens, start, answer and temperature.

    Args:
        path: The file.
        tokenizer: Of the target that is to learn from it.

    Raises:
        FitError: If the file can't be read, is not a corpus, or is of another tokenizer.
    """
    path = Path(path)
    try:
        arrays, provenance = _read_npz(path) if path.suffix == ".npz" else _read_safetensors(path)
    except OSError as error:
        raise FitError(f"can't read corpus '{path}': {error.strerror or error}") from error
    except (SafetensorError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise FitError(
            f"expected '{path}' to be a corpus written by viasd-fit corpus, or an .npz with {', '.join(_ARRAYS)}, but it "
            f"is not ({error})"
        ) from error
    kinds = {"tokens": torch.int32, "start": torch.int64, "answer": torch.int64, "temperature": torch.float32}
    corpus = Corpus(**{name: arrays[name].to(kind) for name, kind in kinds.items()}, provenance=provenance)
    _check_tokenizer(corpus, tokenizer, str(path))
    return corpus


def _read_npz(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with np.load(path) as data:
        arrays = {
            name: torch.from_numpy(data[name].astype(np.float32 if name == _ARRAYS[3] else np.int64))
            for name in _ARRAYS
        }
    return arrays, {"file": path.name}


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with safe_open(path, framework="pt") as data:
        header = data.metadata() or {}
        if header.get("format") != FORMAT:
            raise ValueError("it has another format")
        if header.get("version") != str(FORMAT_VERSION):
            raise ValueError(f"it is of format version {header.get('version')}, this viasd reads {FORMAT_VERSION}")
        return {name: data.get_tensor(name) for name in _ARRAYS}, json.loads(header["provenance"])


def _check_tokenizer(corpus: Corpus, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    advice = "give the target that wrote it, or let viasd-fit corpus write one for this target"
    said, own = corpus.provenance.get(TOKENIZER), fingerprint(tokenizer)
    if said is not None and said != own:
        raise FitError(
            f"corpus '{path}' was written with another tokenizer than the target's (fingerprint {said}, expected {own}); "
            f"{advice}"
        )
    highest, known = int(corpus.tokens.max()), max(tokenizer.get_vocab().values())
    if highest > known:
        raise FitError(
            f"corpus '{path}' has token id {highest}, but the target's tokenizer knows ids up to {known}; {advice}"
        )
    if said is None and (alike := _read_back(corpus, tokenizer)) < _ALIKE:
        raise FitError(
            f"corpus '{path}' names no tokenizer, and only {alike:.0%} of its tokens survive being decoded and encoded by "
            f"the target's; {advice}"
        )


def _read_back(corpus: Corpus, tokenizer: PreTrainedTokenizerBase) -> float:
    """Share of some conversations' tokens that are found again when their text is encoded anew."""
    same = total = 0
    for number in range(0, len(corpus), max(1, len(corpus) // _SAMPLED)):
        ids = corpus.conversation(number).tolist()
        again = tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"]
        same += sum((Counter(ids) & Counter(again)).values())
        total += len(ids)
    return same / total
