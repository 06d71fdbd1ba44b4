"""The result file: one JSON line a prompt and method, written prompt by prompt, and a summary as its last line.

A prompt's lines are written together and flushed, so an interruption costs at most the prompt in hand. A rerun drops what a
crash has left half-written and goes on behind the last whole prompt.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from viasd.errors import OptionError
from viasd.files import why, write_atomically
from viasd.runtime.bench.dataset import Item

Record = dict[str, Any]


def read_lines(path: str) -> tuple[list[Record], int]:
    """The JSON objects of a result file, and the bytes they take; a half-written last line is left out.

    Raises:
        OptionError: If the file can't be read, or a line before the last is not a JSON object.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as failure:
        raise OptionError(f"can't read '{path}': {why(failure)}") from failure
    found: list[Record] = []
    whole = 0
    for number, line in enumerate(data.splitlines(keepends=True), start=1):
        last = whole + len(line) == len(data)
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            if last:
                break
            raise OptionError(
                f"'{path}', line {number} is not JSON, so this is no result file of viasd-bench"
            ) from error
        if not isinstance(entry, dict):
            raise OptionError(f"'{path}', line {number} is not a JSON object, so this is no result file of viasd-bench")
        if last and not line.endswith(b"\n"):
            break
        found.append(entry)
        whole += len(line)
    return found, whole


def read_summary(path: str) -> dict[str, Any]:
    """The summary of a finished result file.

    Raises:
        OptionError: If the file can't be read or has none.
    """
    found, _ = read_lines(path)
    summary = found[-1].get("summary") if found else None
    if not isinstance(summary, dict):
        raise OptionError(f"'{path}' has no summary as its last line; the run is unfinished, or it is no result file")
    return summary


class ResultFile:
    """Records in memory and, where there is a path, on disk.

    Args:
        path: File to write or to continue; None keeps records in memory alone.
        settings: What decides the records; a file of other settings is not continued.
        methods: Names of all methods: a prompt is whole when it has a line of each.

    Raises:
        OptionError: If the file holds something else, or records of other settings (naming what differs).
    """

    def __init__(self, path: str | None, settings: Mapping[str, Any], methods: Sequence[str]) -> None:
        self._path = path
        # As JSON gives it back, so that tuples and lists compare equal.
        self.settings: dict[str, Any] = json.loads(json.dumps(settings))
        self._methods = list(methods)
        self.records: list[Record] = []
        self.summary: dict[str, Any] | None = None
        self.mended = False
        if path is not None and Path(path).exists():
            self._resume(path)

    def has(self, item: Item) -> bool:
        """Whether a prompt has been measured."""
        return any(r["prompt"] == item.id for r in self.records)

    def add(self, records: Sequence[Record]) -> None:
        """Writes the records of one prompt."""
        whole = [{**record, "settings": self.settings} for record in records]
        self.records += whole
        self._append(whole)

    def finish(self, summary: dict[str, Any]) -> None:
        """Writes the summary as the last line."""
        self.summary = summary
        self._append([{"summary": summary}])

    def _append(self, entries: Sequence[Record]) -> None:
        if self._path is None:
            return
        text = "".join(json.dumps(e, ensure_ascii=False, allow_nan=False) + "\n" for e in entries)
        try:
            with open(self._path, "a", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as failure:
            raise OptionError(f"can't write '{self._path}': {why(failure)}; what was written before stays") from failure

    def _resume(self, path: str) -> None:
        found, length = read_lines(path)
        if found and "summary" in found[-1]:
            self.summary = found.pop()["summary"]
        for number, record in enumerate(found, start=1):
            if not {"method", "prompt", "settings"} <= record.keys():
                raise OptionError(f"'{path}', line {number} is no record of viasd-bench; choose another --output")
            if record["settings"] != self.settings:
                raise OptionError(
                    f"'{path}' holds results of other settings ({_difference(record['settings'], self.settings)}); choose "
                    "another --output, or remove the file"
                )
        size = os.path.getsize(path)
        if not found and length != size and not _looks_like_ours(path):
            raise OptionError(f"'{path}' is no result file of viasd-bench; choose another --output")
        self.records = self._whole(found)
        if length != size or len(self.records) != len(found):
            self.mended, self.summary = True, None
            lines = [json.dumps(r, ensure_ascii=False, allow_nan=False) + "\n" for r in self.records]
            write_atomically(Path(path), "".join(lines), OptionError)

    def _whole(self, found: Sequence[Record]) -> list[Record]:
        """The records of prompts that have a line of every method."""
        methods: dict[str, set[str]] = {}
        for record in found:
            methods.setdefault(record["prompt"], set()).add(record["method"])
        return [r for r in found if methods[r["prompt"]] == set(self._methods)]


def _looks_like_ours(path: str) -> bool:
    """Whether a file that holds less than one line is the beginning of a record."""
    beginning = b'{"method": '
    with open(path, "rb") as stream:
        start = stream.read(len(beginning))
    return start == beginning[: len(start)]


def _difference(old: Any, new: Mapping[str, Any]) -> str:
    """The settings that differ, in words."""
    if not isinstance(old, dict):
        return "unknown ones"
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return "; ".join(f"{key} {_short(old.get(key))}, now {_short(new.get(key))}" for key in keys[:3])


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
