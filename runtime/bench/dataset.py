"""Prompts to measure on: JSON lines of three well-known shapes, or a few built-in ones. Nothing here imports torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from viasd.errors import OptionError

_EXPECTED = "'turns' (Spec-Bench), 'question' (GSM8K) or 'prompt' (HumanEval)"


@dataclass(frozen=True)
class Item:
    """One prompt.

    Attributes:
        task: What kind of prompt it is; figures are given per task.
        id: Unique in its data set.
        text: The prompt; of a conversation its first turn.
    """

    task: str
    id: str
    text: str


@dataclass(frozen=True)
class Dataset:
    """Prompts and where they came from.

    Attributes:
        name: File name, or ``built-in``.
        sha256: Of the file's content, or of the built-in prompts.
        items: The chosen prompts, in the file's order.
    """

    name: str
    sha256: str
    items: tuple[Item, ...]


def load_dataset(path: str | None, limit: int | None) -> Dataset:
    """Reads the first `limit` prompts of every task.

    Args:
        path: JSON lines, each with ``turns`` (and ``category``, ``question_id``), ``question``, or ``prompt`` (and
            ``task_id``); None for the built-in prompts.
        limit: Prompts per task; None for all.

    Raises:
        OptionError: If the file can't be read, has no prompts, or a line anywhere in it is malformed (naming it).
    """
    if path is None:
        data, items = json.dumps(_BUILT_IN).encode(), _built_in()
        name = "built-in"
    else:
        name = Path(path).name
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise OptionError(f"can't read data set '{path}': {error.strerror or error}") from error
        items = _parse(data, path)
    taken: dict[str, int] = {}
    chosen: list[Item] = []
    for item in items:
        taken[item.task] = taken.get(item.task, 0) + 1
        if limit is None or taken[item.task] <= limit:
            chosen.append(item)
    return Dataset(name, hashlib.sha256(data).hexdigest(), tuple(chosen))


def _parse(data: bytes, path: str) -> list[Item]:
    try:
        lines = data.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise OptionError(f"data set '{path}' is not UTF-8 text (byte {error.start})") from error
    items: list[Item] = []
    seen: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise OptionError(f"data set '{path}', line {number} is not JSON: {error}") from error
        try:
            item = _item(entry, number)
        except ValueError as error:
            raise OptionError(f"data set '{path}', line {number}: {error}") from error
        if item.id in seen:
            item = Item(item.task, f"{item.id} (line {number})", item.text)
        seen.add(item.id)
        items.append(item)
    if not items:
        raise OptionError(f"data set '{path}' has no prompts; give one JSON object a line, with {_EXPECTED}")
    return items


def _item(entry: Any, number: int) -> Item:
    """One line's prompt.

    Raises:
        ValueError: Saying what is wrong with it.
    """
    if not isinstance(entry, dict):
        raise ValueError(f"expected a JSON object, but got {type(entry).__name__}")
    if "turns" in entry:
        turns = entry["turns"]
        if not isinstance(turns, list) or not turns:
            raise ValueError("'turns' must be a list of at least one text")
        name, text = "turns", turns[0]
        task, identity = entry.get("category", "all"), entry.get("question_id", number)
    elif "question" in entry:
        name, text, task, identity = "question", entry["question"], "gsm8k", number
    elif "prompt" in entry:
        name, text, task, identity = "prompt", entry["prompt"], "humaneval", entry.get("task_id", number)
    else:
        raise ValueError(f"expected {_EXPECTED}, but it has {', '.join(map(repr, list(entry)[:5])) or 'nothing'}")
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"'{name}' must hold some text, but got {text!r:.60}")
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise ValueError(f"'{name}' is not valid Unicode text")
    if not isinstance(task, str) or not task.isprintable() or not task:
        raise ValueError(f"'category' must be a word, but got {task!r:.60}")
    return Item(task, str(identity), text)


# Two prompts a task: text of the model's own, text that repeats what it was given, code, and short answers.
_BUILT_IN = {
    "writing": [
        "Write a short story about a dog who learns to read.",
        "Describe a walk through a harbour town on a foggy morning.",
    ],
    "rewriting": [
        "Correct the spelling and repeat the text: The librery opens at nine in the mornng. On Sundays the librery "
        "is closed. Members of the librery may borow ten books at a time and keep them for four weeks.",
        "Repeat this list, adding a price to every line: red apples, green pears, yellow plums, blue berries, red cherries, "
        "green grapes, yellow lemons, red apples by the box, green pears by the box.",
    ],
    "coding": [
        "Write a Python class for a stack with push, pop, peek and size, then a test for every method.",
        "Write a Python function that returns the n-th Fibonacci number, once with recursion and once with a loop.",
    ],
    "question": [
        "Why is the sky blue?",
        "What is the difference between a virus and a bacterium?",
    ],
}


def _built_in() -> list[Item]:
    return [
        Item(task, f"{task}-{i}", text) for task, texts in _BUILT_IN.items() for i, text in enumerate(texts, start=1)
    ]
