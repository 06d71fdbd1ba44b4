"""The file that answers to many prompts go to: written as they come, continued after an interruption, sorted at the end."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from viasd.errors import OptionError
from viasd.files import why, write_atomically

Record = dict[str, Any]


class AnswerFile:
    """Answers by the line of their prompt.

    Args:
        path: File to write or to continue.
        wanted: For each line a fingerprint of its request: what was asked, and of what.

    Attributes:
        done: Records that were there already.
        mended: Whether the file ended in the middle of a record.

    Raises:
        OptionError: If the file can't be read or written, holds something else, or answers to other requests.
    """

    def __init__(self, path: str, wanted: Mapping[int, str]) -> None:
        self._path = Path(path)
        self._wanted = wanted
        self.done: dict[int, Record] = {}
        self.mended = False
        if self._path.exists():
            self._resume()

    def add(self, number: int, answer: Mapping[str, Any]) -> None:
        """Appends an answer, whole or not at all as far as a later run is concerned."""
        record = {"line": number, "request": self._wanted[number], **answer}
        try:
            with open(self._path, "a", encoding="utf-8") as stream:
                stream.write(_written(record))
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as failure:
            raise OptionError(f"can't write '{self._path}': {why(failure)}; what was written before stays") from failure
        self.done[number] = record

    def finish(self) -> None:
        """Puts the answers into the order of their prompts."""
        whole = "".join(_written(self.done[number]) for number in sorted(self.done))
        write_atomically(self._path, whole, OptionError)

    def _resume(self) -> None:
        try:
            data = self._path.read_bytes()
        except OSError as failure:
            raise OptionError(f"can't read '{self._path}': {why(failure)}") from failure
        lines = data.split(b"\n")
        for number, line in enumerate(lines, start=1):
            if not line:
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                if number == len(lines) and line.startswith(b'{"line": '[: len(line)]):
                    break  # half-written
                raise OptionError(self._foreign(number)) from error
            if not isinstance(record, dict) or not {"line", "request", "finish_reason"} <= record.keys():
                raise OptionError(self._foreign(number))
            if self._wanted.get(record["line"]) != record["request"]:
                raise OptionError(
                    f"'{self._path}' holds answers to other prompts or settings (to line {record['line']} of the prompts, "
                    "for one); choose another --output, or remove the file"
                )
            if number < len(lines) and record["finish_reason"] not in ("error", "interrupted"):
                self.done[record["line"]] = record
        whole = "".join(_written(record) for record in self.done.values()).encode()
        if whole != data:
            self.mended = True
            write_atomically(self._path, whole, OptionError)

    def _foreign(self, number: int) -> str:
        return f"'{self._path}', line {number} is no answer of viasd-run; choose another --output"


def _written(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
