from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from viasd.errors import LoadError, WeightsError
from viasd.files import cache_folder, make_folder, process_lock, sha256_of, write_atomically

HOLD_LOCK = """
import sys, time
from pathlib import Path
from viasd.files import process_lock
with process_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_cache_folder_prefers_its_own_variable_then_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("VIASD_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.setenv("VIASD_CACHE", "")
    assert cache_folder() == tmp_path / "xdg" / "viasd"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder().is_relative_to(tmp_path)


def test_atomic_write_replaces_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, "much longer than the second")
    write_atomically(path, "é")
    assert path.read_bytes() == "é".encode()
    write_atomically(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.skipif(os.name == "nt", reason="permission bits")
def test_atomic_write_gives_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    write_atomically(tmp_path / "made", "x")
    assert (tmp_path / "made").stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_keeps_the_old_file_and_leaves_nothing(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(f"viasd.files.os.{call}", full)
    with pytest.raises(WeightsError, match=r"a\.txt: No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_failures_are_of_the_class_asked_for(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LoadError) as caught:
        write_atomically(tmp_path / "missing" / "a", "x", LoadError)
    assert type(caught.value) is LoadError
    with pytest.raises(LoadError, match="can't create folder"):
        make_folder(tmp_path / "file" / "below", LoadError)
    with pytest.raises(LoadError, match="lock"), process_lock(tmp_path / "missing" / "lock", error=LoadError):
        pass


def test_sha256_covers_more_than_one_chunk(tmp_path: Path) -> None:
    data = os.urandom((1 << 20) + 17)
    (tmp_path / "a").write_bytes(data)
    assert sha256_of(tmp_path / "a") == hashlib.sha256(data).hexdigest()


def test_a_lock_is_exclusive_and_says_once_that_it_waits(tmp_path: Path) -> None:
    order, notices = [], []

    def second() -> None:
        with process_lock(tmp_path / "lock", lambda: notices.append("waiting")):
            order.append("second")

    with process_lock(tmp_path / "lock", lambda: notices.append("first waits")):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.4)
        order.append("first")
    thread.join(5)
    assert order == ["first", "second"]
    assert notices == ["waiting"]


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD_LOCK, str(tmp_path / "lock")], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline().strip() == b"held"
    killer = threading.Timer(0.3, holder.kill)
    killer.start()
    start, waited = time.monotonic(), []
    with process_lock(tmp_path / "lock", lambda: waited.append(True)):
        assert waited == [True]
        assert 0.2 < time.monotonic() - start < 10
    holder.wait()
