"""Where a study lives: a journal file, or whatever database Optuna knows; and its failures in one sentence."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError

from viasd.errors import OptionError
from viasd.files import make_folder

_SCHEMA_ATTEMPTS = 6


def open_storage(url: str) -> BaseStorage | str:
    """An Optuna storage: ``journal:///path/file.log`` for a journal file, else any URL that Optuna knows.

    Raises:
        OptionError: If it can't be opened.
    """
    try:
        if url.startswith("journal://"):
            path = Path(url.removeprefix("journal://"))
            if path.parent != Path():
                make_folder(path.parent, OptionError)
            _mend(path)
            return JournalStorage(JournalFileBackend(str(path)))
        return _database(url)
    except OptionError:
        raise
    except Exception as error:  # drivers raise their own kinds
        raise OptionError(
            f"can't open storage '{_shown(url)}' ({_reason(error, url)}); expected journal:///path/file.log or a URL such "
            "as sqlite:///file.db or postgresql://user@host/database"
        ) from error


@contextmanager
def storage_errors(url: str) -> Iterator[None]:
    """Turns failures of a storage in use (a full disk, a database that went away) into one sentence.

    Raises:
        OptionError: If one happens inside.
    """
    try:
        yield
    except (OSError, StorageInternalError) as error:
        raise OptionError(
            f"storage '{_shown(url)}' failed ({_reason(error, url)}); what was evaluated before is kept there, and the same "
            "command goes on from it"
        ) from error


def _shown(url: str) -> str:
    """The URL without its password."""
    return re.sub(r"(://[^/@:]*):[^/]*@", r"\1:***@", url)


def _reason(error: Exception, url: str) -> str:
    text = " ".join(str(error).replace(url, _shown(url)).split())
    return f"{type(error).__name__}: {text[:200]}"


# Every entry of Optuna's journal is a JSON object that begins with its operation.
_JOURNAL_BEGINS = b'{"op_code"'


def _mend(path: Path) -> None:
    """Cuts off half a line that a full disk or a killed worker left at the end: the next one would be glued to it.

    Under the lock of all writers, so that nobody is in the middle of a line.

    Raises:
        OptionError: If the file is something else than a journal; it is then left as it is.
    """
    if not path.exists():
        return
    with open(path, "rb") as stream:
        beginning = stream.read(len(_JOURNAL_BEGINS))
    if not _JOURNAL_BEGINS.startswith(beginning):
        raise OptionError(
            f"'{path}' is not an Optuna journal file; name a new file, or the journal of an earlier search"
        )
    lock = JournalFileSymlinkLock(str(path))
    lock.acquire()
    try:
        with open(path, "rb+") as stream:
            content = stream.read()
            end = content.rfind(b"\n") + 1
            if end < len(content):
                stream.truncate(end)
    finally:
        lock.release()


def _database(url: str) -> BaseStorage:
    """A database storage. Workers that start together on an empty database all try to make its tables."""
    for attempt in range(_SCHEMA_ATTEMPTS):
        try:
            return optuna.storages.get_storage(url)
        except (IntegrityError, ProgrammingError, OperationalError) as error:
            if attempt + 1 == _SCHEMA_ATTEMPTS or "already exists" not in str(error):
                raise
            time.sleep(0.2 * (attempt + 1))  # another worker is making them
    raise AssertionError("unreachable")
