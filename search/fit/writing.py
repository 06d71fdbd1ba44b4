"""Conversations that a target writes itself: it invents the questions, then answers them at several temperatures."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import viasd
from viasd.errors import FitError, OptionError
from viasd.files import make_folder
from viasd.identity import ModelIdentity
from viasd.pair import Pair
from viasd.search.fit.corpus import TOKENIZER, Corpus, load_corpus
from viasd.vocab import fingerprint

_GREEDY = 1e-3  # colder than this nothing is drawn
_SHORTEST = 2  # tokens of an answer; less teaches nothing
_MARK = "\x00"


@dataclass(frozen=True)
class WritingConfig:
    """What to write.

    Attributes:
        conversations: How many in all.
        temperatures: Of the answers; conversations take them in turn. 0 is greedy.
        max_new_tokens: Longest answer; a question may be a third as long.
        batch: Conversations written at once.
        seed: Of every random choice.
    """

    conversations: int = 2000
    temperatures: tuple[float, ...] = (0.0, 0.3, 0.6, 1.0)
    max_new_tokens: int = 192
    batch: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("conversations", 1), ("batch", 1), ("max_new_tokens", 6)):
            if getattr(self, name) < least:
                raise OptionError(f"{name} must be at least {least}, but got {getattr(self, name)}")
        if not self.temperatures or not all(0 <= t < math.inf for t in self.temperatures):
            raise OptionError(f"temperatures must be numbers from 0 on, but got {self.temperatures}")


def read_questions(path: str) -> list[str]:
    """Questions of a file, one a line; empty lines are left out.

    Raises:
        OptionError: If it can't be read or holds none.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"can't read questions '{path}': {error}") from error
    questions = [line.strip() for line in text.splitlines() if line.strip()]
    if not questions:
        raise OptionError(f"expected '{path}' to hold one question a line, but it holds none")
    return questions


def write_corpus(
    pair: Pair,
    config: WritingConfig,
    path: Path,
    questions: Sequence[str] | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Corpus:
    """Writes a corpus; batches are kept beside the output as they are finished, so the same call goes on.

    Args:
        pair: Its target writes.
        config: What.
        path: The corpus file.
        questions: User turns in turn; None lets the target invent them, at temperature 1.
        progress: Receives (conversations, of how many).

    Raises:
        FitError: If something can't be written, or the target writes nothing of use.
    """
    if any(parameter.is_meta for parameter in pair.target.model.parameters()):
        raise FitError("the target's own weights were taken away by --quantization; leave it out to write a corpus")
    said = {**asdict(config), "conversations": None, "questions": questions, "target": asdict(_identity(pair))}
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]
    provenance = {
        "target": asdict(_identity(pair)),
        TOKENIZER: fingerprint(pair.tokenizer),
        "written": {**asdict(config), **_asked(questions)},
        "viasd": viasd.__version__,
        "made": time.strftime("%Y-%m-%d"),
    }
    work = make_folder(path.parent / f"{path.name}.work-{digest}", FitError)
    parts: list[Corpus] = []
    starts = range(0, config.conversations, config.batch)
    for number, first in enumerate(starts):
        progress(first, config.conversations)
        part = work / f"{number:06d}.safetensors"
        if not part.exists():
            _write_batch(pair, config, questions, first).save(part)
        parts.append(load_corpus(part, pair.tokenizer))
    corpus = _cut(_joined(parts), config.conversations, provenance)
    corpus.save(path)
    progress(config.conversations, config.conversations)
    for part in work.iterdir():
        part.unlink()
    with contextlib.suppress(OSError):
        work.rmdir()
    return corpus


@torch.inference_mode()
def _write_batch(pair: Pair, config: WritingConfig, questions: Sequence[str] | None, first: int) -> Corpus:
    """A batch of one temperature, whole however many are wanted, so that a longer corpus begins with a shorter one."""
    torch.manual_seed(config.seed * 1_000_003 + first)
    numbers = range(first, first + config.batch)
    before, after = _around_question(pair)
    if questions is None:
        asked = _continued(pair, [before] * len(numbers), 1.0, max(2, config.max_new_tokens // 3))
    else:
        texts = [questions[n % len(questions)] for n in numbers]
        asked = [[int(i) for i in pair.tokenizer(t, add_special_tokens=False)["input_ids"]] for t in texts]
    prompts = [[*before, *(_without_end(turn, pair.eos_ids)), *after] for turn in asked]
    room = pair.target.context_length - config.max_new_tokens
    if max(len(prompt) for prompt in prompts) > room:
        raise FitError(f"a question takes more than the {room} tokens that an answer of --max-new-tokens leaves it")
    temperature = config.temperatures[(first // config.batch) % len(config.temperatures)]
    answers = _continued(pair, prompts, temperature, config.max_new_tokens)
    kept = [(p, a) for p, a in zip(prompts, answers, strict=True) if len(a) >= _SHORTEST]
    if not kept:
        raise FitError("the target ends its answers at once; give it questions of your own (--prompts)")
    rows = [[*p, *a] for p, a in kept]
    lengths = torch.tensor([0, *(len(row) for row in rows)])
    return Corpus(
        torch.tensor([token for row in rows for token in row], dtype=torch.int32),
        lengths.cumsum(0),
        torch.tensor([len(p) for p, _ in kept]),
        torch.full((len(kept),), temperature),
        {TOKENIZER: fingerprint(pair.tokenizer)},
    )


def _continued(pair: Pair, prompts: Sequence[Sequence[int]], temperature: float, limit: int) -> list[list[int]]:
    """What the target writes after each prompt, its end token included where it came to one."""
    pad = next(iter(pair.eos_ids), 0)
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), longest), pad)
    seen = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):  # padded on the left: answers begin in one column
        ids[row, longest - len(prompt) :] = torch.tensor(list(prompt))
        seen[row, longest - len(prompt) :] = 1
    drawing: dict[str, Any] = (
        {"do_sample": False} if temperature < _GREEDY else {"do_sample": True, "temperature": temperature, "top_k": 0}
    )
    device = pair.target.device
    model: Any = pair.target.model
    out: Tensor = model.generate(
        ids.to(device),
        attention_mask=seen.to(device),
        max_new_tokens=limit,
        eos_token_id=sorted(pair.eos_ids) or None,
        pad_token_id=pad,
        **{"top_p": 1.0, **drawing} if drawing["do_sample"] else drawing,
    )
    return [_to_end(row, pair.eos_ids) for row in out[:, longest:].tolist()]


def _around_question(pair: Pair) -> tuple[list[int], list[int]]:
    """Tokens before and after a user turn, by the chat template; around plain text only what begins a text."""
    tokenizer = pair.tokenizer
    if not pair.is_chat:
        begin = tokenizer.bos_token_id
        end = next(iter(sorted(pair.eos_ids)), 0)
        return [end if begin is None else begin], []
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
    )
    before, mark, after = text.partition(_MARK)
    if not mark:
        raise FitError("the chat template leaves out what the user says; give a target with another template")
    sides = [[int(i) for i in tokenizer(side, add_special_tokens=False)["input_ids"]] for side in (before, after)]
    return sides[0], sides[1]


def _to_end(tokens: list[int], ends: frozenset[int]) -> list[int]:
    stop = next((i for i, token in enumerate(tokens) if token in ends), None)
    return tokens if stop is None else tokens[: stop + 1]


def _without_end(tokens: Sequence[int], ends: frozenset[int]) -> list[int]:
    return [token for token in tokens if token not in ends]


def _joined(parts: Sequence[Corpus]) -> Corpus:
    lengths = torch.cat([part.start.diff() for part in parts])
    return Corpus(
        torch.cat([part.tokens for part in parts]),
        torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        torch.cat([part.answer for part in parts]),
        torch.cat([part.temperature for part in parts]),
    )


def _cut(corpus: Corpus, conversations: int, provenance: dict[str, Any]) -> Corpus:
    n = min(conversations, len(corpus))
    start = corpus.start[: n + 1]
    return Corpus(corpus.tokens[: int(start[-1])], start, corpus.answer[:n], corpus.temperature[:n], provenance)


def _asked(questions: Sequence[str] | None) -> dict[str, Any]:
    """What the record says of the questions: enough to know the file again."""
    if questions is None:
        return {"questions": "the target's own"}
    digest = hashlib.sha256("\n".join(questions).encode()).hexdigest()
    return {"questions": len(questions), "questions_hash": digest[:16]}


def _identity(pair: Pair) -> ModelIdentity:
    return ModelIdentity.of(pair.target, pair.target_id)
