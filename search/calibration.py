"""Calibration text: what the target itself writes, split into a half to search on and a half to report on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from viasd.errors import OptionError, ViasdError
from viasd.pair import Pair
from viasd.runtime.api import generate

#: Questions of the kinds people ask, for text generated on the spot. Even and odd ones go to different halves.
PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Describe how a bicycle stays upright while it moves.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Tell the story of a fox who wants to learn to swim.",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey? Explain your steps.",
    "A shop sells pens at 3 for 2 dollars. How much do 18 pens cost? Explain your steps.",
    "Write a Python function that reverses the words of a sentence.",
    "Write a Python function that counts the vowels in a string.",
    "Give five tips for sleeping better.",
    "Give five tips for learning a foreign language.",
    "Summarize the life of Marie Curie in one paragraph.",
    "Summarize what the French Revolution changed in one paragraph.",
    "What is the difference between weather and climate?",
    "What is the difference between a virus and a bacterium?",
    "Write an email to a colleague, asking to move a meeting to Thursday.",
    "Write an email to a landlord about a broken heater.",
    "List the steps for baking a simple loaf of bread.",
    "List the steps for planting tomatoes on a balcony.",
    "What are the advantages and disadvantages of working from home?",
    "What are the advantages and disadvantages of electric cars?",
    "Translate into plain words: 'The committee deferred its decision pending further review.'",
    "Rewrite more politely: 'Send me the report now, you are late again.'",
    "Name three countries in South America and their capitals, with one fact about each.",
    "Name three famous composers and one work by each, with one fact about it.",
)
_ANSWER_TOKENS = 64
_MIN_TOKENS = 16  # of one half; below it a cost says nothing


@dataclass(frozen=True)
class Passage:
    """A conversation of which the tokens from `first` on are scored.

    Attributes:
        tokens: All tokens.
        first: Index of the first scored token, at least 1.
    """

    tokens: tuple[int, ...]
    first: int

    @property
    def scored(self) -> int:
        """Number of scored tokens."""
        return len(self.tokens) - self.first


@dataclass(frozen=True)
class Calibration:
    """Text to search on and text to report on.

    Attributes:
        name: Where it came from: ``self``, or the file.
        search: Passages the objective sees.
        report: Passages it never sees.
    """

    name: str
    search: tuple[Passage, ...]
    report: tuple[Passage, ...]

    @property
    def hash(self) -> str:
        """Hash of all its tokens."""
        digest = hashlib.sha256()
        for passage in (*self.search, *self.report):
            digest.update(f"{passage.first}:{','.join(map(str, passage.tokens))};".encode())
        return digest.hexdigest()[:16]


def self_calibration(
    pair: Pair, tau: int, prompts: int | None = None, progress: Callable[[int, int], None] = lambda done, of: None
) -> Calibration:
    """Greedy answers of the target to built-in questions.

    Args:
        pair: The pair; only its target is used.
        tau: Scored tokens per half, at most.
        prompts: Questions to use at most, an even number; None uses as many as tau needs.
        progress: Receives (tokens written, tokens wanted).

    Raises:
        OptionError: If the target ends its answers so early that a half stays nearly empty.
    """
    halves: tuple[list[Passage], list[Passage]] = ([], [])
    written = [0, 0]
    for index, question in enumerate(PROMPTS[:prompts]):
        half = index % 2
        room = min(_ANSWER_TOKENS, tau - written[half])
        if room < 2:
            continue
        ids = pair.encode([{"role": "user", "content": question}] if pair.is_chat else question)
        answer = generate(pair, ids, mask=None, strategy="plain", max_new_tokens=room).token_ids
        if len(answer) >= 2:
            halves[half].append(Passage((*ids, *answer), len(ids)))
            written[half] += len(answer)
            progress(sum(written), 2 * tau)
    return _checked(Calibration("self", tuple(halves[0]), tuple(halves[1])), "the target's own answers")


def file_calibration(pair: Pair, path: str, tau: int, context: int = 512) -> Calibration:
    """Text from a file: JSON lines or plain text.

    A JSON line is ``{"prompt": ..., "completion": ...}`` (the completion is scored), ``{"messages": [...]}`` (the last
    message is scored), ``{"text": ...}`` or ``{"turns": [...]}`` (all of it is scored). Plain text is one passage per
    paragraph. Passages go to the two halves in turn, each cut to `context` tokens.

    Raises:
        OptionError: If the file can't be read or has too little text, naming the line where it is malformed.
    """
    try:
        raw = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise OptionError(f"can't read calibration file '{path}': {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"calibration file '{path}' is not UTF-8 text (byte {error.start})") from error
    if path.endswith((".jsonl", ".json")):
        passages = [
            _from_json(pair, line, f"'{path}', line {n}") for n, line in enumerate(raw.splitlines(), 1) if line.strip()
        ]
    else:
        passages = [_whole(pair, p) for p in raw.split("\n\n") if p.strip()]
    halves: tuple[list[Passage], list[Passage]] = ([], [])
    written = [0, 0]
    context = min(context, pair.target.context_length)
    for passage in passages:
        half = written.index(min(written))
        room = min(tau - written[half], context)
        end = min(len(passage.tokens), passage.first + room)
        start = max(0, end - context)
        first = max(1, passage.first - start)
        cut = Passage(passage.tokens[start:end], first)
        if cut.scored >= 2:
            halves[half].append(cut)
            written[half] += cut.scored
    return _checked(Calibration(Path(path).name, tuple(halves[0]), tuple(halves[1])), f"calibration file '{path}'")


def _from_json(pair: Pair, line: str, where: str) -> Passage:
    try:
        entry = json.loads(line)
        if "messages" in entry:
            *before, last = entry["messages"]
            ids = pair.encode(before) if before else pair.encode(last["content"])[:1]
            return _continued(pair, ids, last["content"])
        if "completion" in entry:
            return _continued(pair, pair.encode(entry["prompt"]), entry["completion"])
        return _whole(pair, entry["text"] if "text" in entry else "\n".join(entry["turns"]))
    except ViasdError as error:
        raise OptionError(f"calibration {where}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise OptionError(
            f"calibration {where}: expected an object with 'text', 'turns', 'messages', or 'prompt' and 'completion' "
            f"({error!r})"
        ) from error


def _whole(pair: Pair, text: str) -> Passage:
    # Not `Pair.encode`: a text beyond the model's context is cut here, not refused.
    ids = [int(i) for i in pair.tokenizer(text)["input_ids"]]
    if not ids:
        raise OptionError("the text is empty")
    return Passage(tuple(ids), 1)


def _continued(pair: Pair, ids: list[int], text: str) -> Passage:
    more = [int(i) for i in pair.tokenizer(text, add_special_tokens=False)["input_ids"]]
    return Passage((*ids, *more), len(ids))


def _checked(calibration: Calibration, what: str) -> Calibration:
    for name, half in (("search", calibration.search), ("report", calibration.report)):
        n = sum(p.scored for p in half)
        if n < _MIN_TOKENS:
            raise OptionError(
                f"{what} gave {n} tokens for the {name} half, but at least {_MIN_TOKENS} are needed; give more text"
            )
    return calibration
