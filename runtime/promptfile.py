"""A file of prompts: JSON lines, each with a prompt or messages, options of its own, and whatever is to be handed through.

Nothing here imports torch, so that every bad line is named before anything is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from viasd.errors import OptionError

#: Options that a line may set for itself: how its tokens are chosen and where it ends.
OWN_OPTIONS: dict[str, tuple[type, ...]] = {
    "max_new_tokens": (int,),
    "seed": (int,),
    "temperature": (int, float),
    "top_k": (int,),
    "top_p": (int, float),
    "min_p": (int, float),
    "repetition_penalty": (int, float),
    "stop": (str, list),
    "ignore_eos": (bool,),
}

#: Keys of an answer, which no line can hand through.
RESULT_KEYS = {
    *("line", "request", "text", "token_ids", "selected_layers", "prompt_tokens", "finish_reason", "error"),
    *("strategy", "mode", "lossless", "target", "slim_readout", "pair", "mask", "heads", "dtype", "device", "seed"),
    *("tiers", "stats", "notes"),
}


@dataclass(frozen=True)
class PromptLine:
    """One request of a file.

    Attributes:
        number: Its line, from 1 on.
        prompt: Text; None where there are messages.
        messages: Messages of a chat; None where there is a text.
        options: What it sets for itself, of `OWN_OPTIONS`.
        extra: All other keys.
    """

    number: int
    prompt: str | None
    messages: list[dict[str, str]] | None
    options: dict[str, Any]
    extra: dict[str, Any]


def read_prompts(path: str) -> list[PromptLine]:
    """The requests of a file; empty lines are passed over.

    Raises:
        OptionError: If the file can't be read, has no prompts, or a line anywhere in it is malformed (naming all of them, up
            to five).
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise OptionError(f"can't read the prompts in '{path}': {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"the prompts in '{path}' are not UTF-8 text (byte {error.start})") from error
    found: list[PromptLine] = []
    bad: list[str] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                found.append(parse_prompt(number, json.loads(line)))
            except RecursionError:
                bad.append(f"line {number} is nested too deeply")
            except ValueError as error:
                bad.append(f"line {number}: {error}")
    if bad:
        more = f"; and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise OptionError(f"'{path}': {'; '.join(bad[:5])}{more}")
    if not found:
        raise OptionError(
            f'\'{path}\' has no prompts; give one JSON object a line, with "prompt" (text) or "messages" (a chat)'
        )
    return found


def parse_prompt(number: int, entry: Any) -> PromptLine:
    """One line's object.

    Raises:
        ValueError: If it is not a request; says why.
    """
    if not isinstance(entry, dict):
        raise ValueError("expected a JSON object")
    prompt, messages = entry.get("prompt"), entry.get("messages")
    if (prompt is None) == (messages is None):
        raise ValueError('expected either "prompt" or "messages"')
    if prompt is not None and not (isinstance(prompt, str) and prompt):
        raise ValueError('"prompt" must be text, at least one character')
    if messages is not None:
        _check_messages(messages)
    rest = {key: value for key, value in entry.items() if key not in ("prompt", "messages")}
    options = {key: value for key, value in rest.items() if key in OWN_OPTIONS}
    for key, value in options.items():
        _check_option(key, value)
    extra = {key: value for key, value in rest.items() if key not in options}
    if taken := next((key for key in extra if key in RESULT_KEYS), None):
        raise ValueError(f'"{taken}" is a key of the answer\'s own and no option of a line; rename it')
    return PromptLine(number, prompt, messages, options, extra)


def _check_messages(messages: Any) -> None:
    good = isinstance(messages, list) and messages
    if not good or not all(
        isinstance(m, Mapping) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in messages
    ):
        raise ValueError('"messages" must be a list of objects with "role" and "content"')


def _check_option(key: str, value: Any) -> None:
    kinds = OWN_OPTIONS[key]
    # A truth value is a number in Python.
    good = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
    if good and isinstance(value, list):
        good = all(isinstance(item, str) for item in value)
    if not good:
        names = {int: "a whole number", float: "a number", str: "text", list: "a list of texts", bool: "true or false"}
        wanted = "a number" if float in kinds else " or ".join(names[kind] for kind in kinds)
        raise ValueError(f'"{key}" must be {wanted}, but is {json.dumps(value)[:40]}')
