from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from viasd.errors import OptionError
from viasd.runtime.bench.dataset import Item
from viasd.runtime.bench.records import ResultFile, read_lines, read_summary

SETTINGS = {"pair": "tiny", "methods": ["plain", "sd"], "gammas": (1, 2)}


def records(prompt: str) -> list[dict[str, Any]]:
    return [{"method": name, "prompt": prompt, "tokens": 3} for name in ("plain", "sd")]


def opened(path: Path, **changes: Any) -> ResultFile:
    return ResultFile(str(path), {**SETTINGS, **changes}, ["plain", "sd"])


def test_an_interrupted_file_goes_on_behind_its_last_whole_prompt(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    first = opened(path)
    first.add(records("1"))
    first.add(records("2"))
    whole = path.read_bytes()
    # Every way in which a crash can leave the second prompt.
    for length in range(len(whole) // 2 + 1, len(whole)):
        path.write_bytes(whole[:length])
        again = opened(path)
        assert again.mended
        assert [r["prompt"] for r in again.records] == ["1", "1"]
        assert again.has(Item("", "1", ""))
        assert not again.has(Item("", "2", ""))
        assert path.read_bytes() == whole[: len(whole) // 2]
    again.add(records("2"))
    again.finish({"prompts": 2})
    assert path.read_bytes().startswith(whole)
    assert read_summary(str(path)) == {"prompts": 2}
    finished = opened(path)
    assert not finished.mended
    assert finished.summary == {"prompts": 2}
    assert len(finished.records) == 4


def test_a_half_written_first_line_and_a_half_written_summary_are_mended(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"method": "pl')
    assert opened(path).records == []
    assert path.read_bytes() == b""
    file = opened(path)
    file.add(records("1"))
    file.finish({"prompts": 1})
    path.write_bytes(path.read_bytes()[:-5])
    again = opened(path)
    assert again.summary is None
    assert len(again.records) == 2


def test_a_file_of_other_settings_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    opened(path).add(records("1"))
    before = path.read_bytes()
    with pytest.raises(OptionError, match=r"other settings \(pair \"tiny\", now \"large\"\); choose another --output"):
        opened(path, pair="large")
    assert path.read_bytes() == before
    assert len(opened(path).records) == 2


@pytest.mark.parametrize("content", ["hello\n", "hello", '{"a": 1}\n', "[1]\n{}\n", '{"a": 1}\nx\n{"b": 2}\n'])
def test_what_is_no_result_file_is_refused_and_left_as_it_is(tmp_path: Path, content: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(content)
    with pytest.raises(OptionError, match=r"mine.jsonl.*(result file|no record of viasd-bench)"):
        opened(path)
    assert path.read_text() == content


def test_an_unfinished_file_has_no_summary(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    opened(path).add(records("1"))
    with pytest.raises(OptionError, match="has no summary as its last line"):
        read_summary(str(path))
    with pytest.raises(OptionError, match="can't read"):
        read_summary(str(tmp_path / "none"))
    found, length = read_lines(str(path))
    assert length == path.stat().st_size
    assert json.loads(json.dumps(found)) == found


def test_without_a_path_records_stay_in_memory(tmp_path: Path) -> None:
    file = ResultFile(None, SETTINGS, ["plain"])
    file.add(records("1")[:1])
    file.finish({})
    assert file.has(Item("", "1", ""))
    assert list(tmp_path.iterdir()) == []
