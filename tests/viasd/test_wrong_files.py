"""Files that are not what they are said to be: one sentence, and nothing of them is lost."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from viasd.errors import MaskError, OptionError, ViasdError
from viasd.files import write_atomically
from viasd.mask import LayerMask
from viasd.sampling import SamplingConfig
from viasd.search.options import check_writable
from viasd.search.storage import open_storage

GOOD = LayerMask.even(8, 0.25).to_json()


@pytest.mark.parametrize("content", [b'{"precious": "no trailing newline"}', b"line\nanother", bytes(range(200, 256))])
def test_a_file_that_is_no_journal_is_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(OptionError, match="not an Optuna journal"):
        open_storage(f"journal://{path}")
    assert path.read_bytes() == content


@pytest.mark.parametrize("text", ["", '{"op_co'])
def test_an_empty_journal_or_its_torn_first_line_is_gone_on_with(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.log"
    path.write_text(text)
    open_storage(f"journal://{path}")
    assert path.read_text() == ""


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    link.symlink_to(real)
    write_atomically(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ViasdError, match="not a regular file"):
        write_atomically(pipe, "new")
    assert pipe.is_fifo()
    with pytest.raises(OptionError, match="--output must be a file"):
        check_writable("output", str(pipe))


def test_a_name_that_is_too_long_is_one_sentence() -> None:
    with pytest.raises(OptionError, match="--output: can't use 'aaa"):
        check_writable("output", "a" * 300 + ".json")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"schema": ' + "9" * 5000 + "}", "is not JSON"),
        ("[" * 200_000, "is not JSON"),
        (json.dumps({**GOOD, "cost": float("nan")}), "NaN is not a JSON number"),
        (json.dumps({**GOOD, "controls": 5}), "'controls' must be an object, but is a int"),
        (json.dumps({**GOOD, "guard": [1]}), "'guard' must be an object, but is a list"),
        (json.dumps({**GOOD, "name": "\ud800"}), "'name' must be plain text"),
        (json.dumps({**GOOD, "pair": ["x"]}), "'pair' must be plain text"),
        (json.dumps({**GOOD, "sublayers": {"attention": [1.0] * 8, "mlp": [1.0] * 8}}), "'sublayers' must have"),
    ],
)
def test_malformed_masks_are_refused_in_words(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "mask.json"
    path.write_text(text)
    with pytest.raises(MaskError, match=says):
        LayerMask.load(path)


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "mask.json"
    path.write_text(json.dumps(GOOD), encoding="utf-8-sig")
    assert LayerMask.load(path).keep == LayerMask.even(8, 0.25).keep


@pytest.mark.parametrize("value", [1e-320, 1e-38, 9e-7])
def test_a_temperature_that_would_overflow_is_refused(value: Any) -> None:
    with pytest.raises(OptionError, match=r"0 \(greedy\) or at least 1e-06"):
        SamplingConfig(temperature=value)
