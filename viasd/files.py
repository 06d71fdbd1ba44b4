"""Files that survive interruption: the cache folder, atomic writes, checksums and a lock between processes."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from viasd.errors import ViasdError, WeightsError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_CHUNK_BYTES = 1 << 20
_LOCK_POLL_SECONDS = 0.1


def cache_folder() -> Path:
    """Where everything fetched or made once is kept (not created here).

    ``VIASD_CACHE`` if set, else ``$XDG_CACHE_HOME/viasd``, else the platform's own cache folder.
    """
    if chosen := os.environ.get("VIASD_CACHE"):
        return Path(chosen).expanduser().absolute()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser().absolute() / "viasd"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "viasd" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "viasd"
    return Path.home() / ".cache" / "viasd"


def make_folder(path: Path, error: type[ViasdError] = WeightsError) -> Path:
    """Create `path` and its parents if missing; failures are raised as `error`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise error(f"can't create folder {path}: {why(failure)}") from failure
    return path


def write_atomically(path: Path, content: bytes | str, error: type[ViasdError] = WeightsError) -> None:
    """Write `content` (text as UTF-8) so that `path` holds either its old content or all of the new one.

    Args:
        path: File to replace or create; its folder must exist.
        content: The whole new content.
        error: Class raised when the disk is full, the folder isn't writable, and the like.

    Raises:
        ViasdError: Of class `error`. The old file is untouched and no temporary file is left.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary: Path | None = None
    path = path.resolve()  # a link stays a link: what it points to is replaced
    if path.exists() and not path.is_file():
        raise error(f"can't write {path}: it is not a regular file")
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as stream:
            temporary = Path(stream.name)
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        # NamedTemporaryFile makes the file private; a result should be as readable as any other new file.
        os.chmod(temporary, usual_mode())
        os.replace(temporary, path)
    except OSError as failure:
        raise error(f"can't write {path}: {why(failure)}") from failure
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


@contextmanager
def folder_atomically(path: Path, error: type[ViasdError] = WeightsError) -> Iterator[Path]:
    """Gives a temporary folder beside `path` to fill, and moves it there once that has gone well.

    Args:
        path: Folder to make; it must not be there, its parent must.
        error: Class raised when the disk is full, the parent isn't writable, and the like.

    Raises:
        ViasdError: Of class `error`. Nothing is left then, nor after any other exception.
    """
    temporary: Path | None = None
    try:
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
        yield temporary
        for file in temporary.rglob("*"):
            os.chmod(file, usual_mode(folder=file.is_dir()))
        os.chmod(temporary, usual_mode(folder=True))
        if path.exists():  # since it was looked for: a folder that is empty would be replaced without a word
            raise error(f"can't write {path}: it is there already")
        os.rename(temporary, path)
    except OSError as failure:
        raise error(f"can't write {path}: {why(failure)}") from failure
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content as 64 hexadecimal digits.

    Raises:
        OSError: If the file can't be read.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def process_lock(
    path: Path, on_wait: Callable[[], None] | None = None, error: type[ViasdError] = WeightsError
) -> Iterator[None]:
    """Hold an exclusive lock on `path`, which is created and stays; threads of one process exclude each other too.

    The operating system drops the lock when the holder dies, so no stale lock can remain.

    Args:
        path: The lock file; its folder must exist.
        on_wait: Called once if another holder has to be waited for.
        error: Class raised when the lock file can't be opened.
    """
    try:
        stream = open(path, "ab")  # noqa: SIM115 - the lock lives as long as this handle
    except OSError as failure:
        raise error(f"can't open lock file {path}: {why(failure)}") from failure
    with stream:
        waiting = False
        while not _try_lock(stream):
            if not waiting and on_wait is not None:
                on_wait()
            waiting = True
            time.sleep(_LOCK_POLL_SECONDS)
        try:
            yield
        finally:
            _unlock(stream)


def why(failure: OSError) -> str:
    """The short reason of an operating system error, for one-line messages."""
    return failure.strerror or str(failure)


def usual_mode(folder: bool = False) -> int:
    """The permission bits that a newly created file (or folder) gets under this process's umask."""
    # The mask can only be read by setting it.
    mask = os.umask(0o077)
    os.umask(mask)
    return (0o777 if folder else 0o666) & ~mask


if sys.platform == "win32":

    def _try_lock(stream: BinaryIO) -> bool:
        stream.seek(0)
        try:
            msvcrt.locking(stream.fileno(), msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
        return True

    def _unlock(stream: BinaryIO) -> None:
        stream.seek(0)
        msvcrt.locking(stream.fileno(), msvcrt.LK_UNLCK, 1)

else:

    def _try_lock(stream: BinaryIO) -> bool:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _unlock(stream: BinaryIO) -> None:
        fcntl.flock(stream, fcntl.LOCK_UN)
