from __future__ import annotations

import json
from pathlib import Path

import pytest

from viasd.errors import OptionError
from viasd.runtime.bench.dataset import Item, load_dataset


def write(path: Path, *lines: object) -> str:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines), encoding="utf-8")
    return str(path)


def test_three_shapes_and_a_limit_per_task(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mixed.jsonl",
        {"question_id": 81, "category": "qa", "turns": ["one", "a second turn"]},
        {"question_id": 82, "category": "qa", "turns": ["two"]},
        "",
        {"question": "1 + 1?", "answer": "2"},
        {"task_id": "HumanEval/0", "prompt": "def f():", "test": "..."},
        {"turns": ["no category"]},
    )
    assert load_dataset(path, None).items == (
        Item("qa", "81", "one"),
        Item("qa", "82", "two"),
        Item("gsm8k", "4", "1 + 1?"),
        Item("humaneval", "HumanEval/0", "def f():"),
        Item("all", "6", "no category"),
    )
    limited = load_dataset(path, 1)
    assert [item.id for item in limited.items] == ["81", "4", "HumanEval/0", "6"]
    assert limited.name == "mixed.jsonl"
    assert limited.sha256 == load_dataset(path, None).sha256


def test_two_prompts_of_one_id_stay_apart(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", {"question_id": 1, "turns": ["a"]}, {"question_id": 1, "turns": ["b"]})
    assert [item.id for item in load_dataset(path, None).items] == ["1", "1 (line 2)"]


def test_the_built_in_prompts() -> None:
    built_in = load_dataset(None, None)
    assert built_in.name == "built-in"
    assert len({item.id for item in built_in.items}) == len(built_in.items) == 8
    assert len(load_dataset(None, 1).items) == len({item.task for item in built_in.items}) == 4


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2: expected a JSON object, but got list"),
        ('{"text": "x"}', r"line 2: expected 'turns' \(Spec-Bench\), 'question' .*, but it has 'text'"),
        ("{}", "line 2: .* but it has nothing"),
        ('{"turns": []}', "line 2: 'turns' must be a list of at least one text"),
        ('{"turns": "x"}', "line 2: 'turns' must be a list"),
        ('{"turns": [3]}', "line 2: 'turns' must hold some text, but got 3"),
        ('{"question": " "}', "line 2: 'question' must hold some text"),
        ('{"prompt": null}', "line 2: 'prompt' must hold some text"),
        ('{"prompt": "\\ud800"}', "line 2: 'prompt' is not valid Unicode"),
        ('{"category": 3, "turns": ["x"]}', "line 2: 'category' must be a word"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "d.jsonl", {"turns": ["fine"]}, line)
    with pytest.raises(OptionError, match=message):
        load_dataset(path, 1)


def test_a_missing_an_empty_and_a_binary_file(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"can't read data set .*: No such file"):
        load_dataset(str(tmp_path / "none.jsonl"), None)
    with pytest.raises(OptionError, match="has no prompts; give one JSON object a line"):
        load_dataset(write(tmp_path / "empty.jsonl", "", "  "), None)
    (tmp_path / "binary").write_bytes(b"ab\xff")
    with pytest.raises(OptionError, match=r"is not UTF-8 text \(byte 2\)"):
        load_dataset(str(tmp_path / "binary"), None)
