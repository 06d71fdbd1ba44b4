from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import generate, pair_of

from viasd.errors import OptionError
from viasd.search.calibration import PROMPTS, Calibration, Passage, file_calibration, self_calibration

PAIR = pair_of("llama")
LONG = "some words that go on for a while, and then some more of them"


def write(path: Path, lines: list[Any] | str) -> str:
    path.write_text(lines if isinstance(lines, str) else "\n".join(json.dumps(line) for line in lines))
    return str(path)


def test_own_text_is_the_targets_greedy_answers_in_two_disjoint_halves() -> None:
    told: list[tuple[int, int]] = []
    text = self_calibration(PAIR, 100, progress=lambda done, of: told.append((done, of)))
    assert [sum(p.scored for p in half) for half in (text.search, text.report)] == [100, 100]
    assert told[-1] == (200, 200)
    assert not {p.tokens for p in text.search} & {p.tokens for p in text.report}
    passage = text.search[0]
    ids = PAIR.encode([{"role": "user", "content": PROMPTS[0]}])
    answer = generate(PAIR, ids, strategy="plain", max_new_tokens=passage.scored, ignore_eos=False).token_ids
    assert passage.tokens == (*ids, *answer)
    assert passage.first == len(ids)
    assert self_calibration(PAIR, 100).hash == text.hash


def test_fewer_prompts_give_less_text() -> None:
    text = self_calibration(PAIR, 1000, prompts=2)
    assert (len(text.search), len(text.report)) == (1, 1)


def test_a_target_that_says_nothing_is_told() -> None:
    with pytest.raises(OptionError, match="gave 8 tokens for the search half, but at least 16"):
        self_calibration(PAIR, 8)


def test_every_kind_of_line_is_read(tmp_path: Path) -> None:
    lines = [
        {"prompt": "say: ", "completion": LONG},
        {"text": LONG},
        {"turns": ["hello", LONG]},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": LONG}]},
        {"messages": [{"role": "assistant", "content": LONG}]},
    ]
    (tmp_path / "c.jsonl").write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8-sig")
    text = file_calibration(PAIR, str(tmp_path / "c.jsonl"), 500)
    passages = {p.tokens: p.first for p in (*text.search, *text.report)}
    prompt = len(PAIR.encode("say: "))
    assert sorted(passages.values()) == sorted(
        [prompt, 1, 1, len(PAIR.encode(lines[3]["messages"][:1])), 1]  # type: ignore[index]
    )
    assert text.name == "c.jsonl"


def test_plain_text_is_cut_into_paragraphs_and_to_tau(tmp_path: Path) -> None:
    path = write(tmp_path / "c.txt", "\n\n".join(f"{i} {LONG}" for i in range(6)))
    text = file_calibration(PAIR, path, 100)
    assert [sum(p.scored for p in half) for half in (text.search, text.report)] == [100, 100]
    assert all(p.first == 1 for p in text.search)


def test_text_beyond_the_models_context_is_cut_and_not_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "c.txt", f"{LONG * 20}\n\n{LONG * 20}")
    text = file_calibration(PAIR, path, 5000, context=5000)
    assert {len(p.tokens) for p in (*text.search, *text.report)} == {PAIR.target.context_length}


def test_a_long_prompt_keeps_its_end(tmp_path: Path) -> None:
    line = {"prompt": "x" * 300, "completion": LONG}
    text = file_calibration(PAIR, write(tmp_path / "c.jsonl", [line, line]), 40, context=100)
    passage = text.search[0]
    assert len(passage.tokens) == 100
    assert passage.scored == 40


def test_the_hash_is_that_of_the_tokens_and_of_what_is_scored() -> None:
    def made(first: int, last: int) -> str:
        half = (Passage((1, 2, 3, last), first),)
        return Calibration("x", half, half).hash

    assert made(1, 4) == made(1, 4)
    assert len({made(1, 4), made(2, 4), made(1, 5)}) == 3


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "gave 0 tokens for the search half"),
        ("short", "gave 4 tokens for the search half"),
        ('{"text": "ok"}\nnot json\n', "line 2: expected an object with"),
        ("[1, 2]", "line 1: expected an object with"),
        ('{"other": 1}', "line 1: expected an object with"),
        ('{"text": ""}', "line 1: the text is empty"),
        ("[" * 100_000, "line 1: expected an object with"),
        ('{"messages": []}', "line 1: expected an object with"),
    ],
)
def test_poor_files_are_one_sentence_naming_the_line(tmp_path: Path, content: str, complaint: str) -> None:
    with pytest.raises(OptionError, match=complaint):
        file_calibration(PAIR, write(tmp_path / ("c.txt" if content == "short" else "c.jsonl"), content), 500)


def test_unreadable_files_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="can't read calibration file"):
        file_calibration(PAIR, str(tmp_path / "none.txt"), 500)
    (tmp_path / "b.txt").write_bytes(b"ab\xff")
    with pytest.raises(OptionError, match=r"not UTF-8 text \(byte 2\)"):
        file_calibration(PAIR, str(tmp_path / "b.txt"), 500)
