"""Compiles the kernels for this machine's own processor, once, and loads them.

They are plain C++ without any library, so that compiling takes seconds and needs no headers of torch. OpenMP calls are left
unresolved and bind to the runtime that torch has loaded: with a second one, two teams of threads would wait for each other's
cores.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from viasd.errors import KernelError, ViasdError
from viasd.files import cache_folder, make_folder, process_lock, sha256_of, why, write_atomically

SOURCE = Path(__file__).with_name("decode.cpp")

_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fno-exceptions", "-fno-rtti", "-Wno-psabi")
_FUNCTIONS = ("viasd_layers", "viasd_product", "viasd_readout", "viasd_expand", "viasd_many")
_TIMEOUT = 300  # seconds; compiling takes four
_LOCK = threading.Lock()
# The library, or why there is none: asked once a process, because a failure takes the compiler's time too.
_found: ctypes.CDLL | KernelError | None = None

Say = Callable[[str], None]


def load(say: Say = lambda line: None) -> ctypes.CDLL:
    """The kernels, compiled if this machine has not done so yet.

    Args:
        say: Told before anything is compiled.

    Raises:
        KernelError: If there is no compiler, it fails, or this is no Linux.
    """
    global _found
    with _LOCK:
        if _found is None:
            try:
                _found = _made(cache_folder() / "kernels", say)
            except KernelError as error:
                _found = error
    if isinstance(_found, KernelError):
        raise _found
    return _found


def why_missing(say: Say = lambda line: None) -> str | None:
    """Why there are no kernels here, None if there are. See `load`."""
    try:
        load(say)
    except KernelError as error:
        return str(error)
    return None


def _made(folder: Path, say: Say) -> ctypes.CDLL:
    if sys.platform != "linux":
        raise KernelError(f"the CPU kernels are built on Linux only, and this is {sys.platform}")
    command = (os.environ.get("CXX") or "").split() or [
        next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), "c++, g++ or clang++")
    ]
    if shutil.which(command[0]) is None:
        raise KernelError(f"no C++ compiler ({command[0]}) was found; install one, or set CXX")
    flags = [*_FLAGS, "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"]
    said = (SOURCE.read_bytes(), command, _output([*command, "--version"]), flags, _processor(), torch.__version__)
    path = folder / f"{hashlib.sha256(repr(said).encode()).hexdigest()[:24]}.so"
    if _sound(path):
        return _opened(path)
    say("compiling the CPU kernels for this machine (once, some seconds)")
    try:
        make_folder(folder, KernelError)
        with process_lock(path.with_suffix(".lock"), error=KernelError):
            if not _sound(path):  # another process may have made it meanwhile
                with tempfile.TemporaryDirectory(dir=folder) as scratch:
                    made = Path(scratch) / "decode.so"
                    _compile([*command, *flags], command, Path(scratch))
                    digest = sha256_of(made)
                    os.replace(made, path)
                write_atomically(_sum_of(path), digest, KernelError)
            return _opened(path)
    except ViasdError as error:
        if isinstance(error.__cause__, OSError):
            return _unkept([*command, *flags], command)
        raise
    except OSError:
        return _unkept([*command, *flags], command)


def _sum_of(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _sound(path: Path) -> bool:
    """Whether a library is there and whole: one that was cut short would end the process when it is opened."""
    try:
        return sha256_of(path) == _sum_of(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def _unkept(compiling: Sequence[str], linking: Sequence[str]) -> ctypes.CDLL:
    """The kernels for this process alone: a cache that can't be written is no reason to be slow."""
    try:
        with tempfile.TemporaryDirectory() as scratch:
            _compile(compiling, linking, Path(scratch))
            return _opened(Path(scratch) / "decode.so")  # stays mapped when its file is gone
    except OSError as error:
        raise KernelError(f"the CPU kernels can't be built: {why(error)}") from error


def _compile(compiling: Sequence[str], linking: Sequence[str], folder: Path) -> None:
    # In two steps: told of OpenMP, the linker would bring a runtime of its own.
    _output([*compiling, "-c", str(SOURCE), "-o", str(folder / "decode.o")])
    _output([*linking, "-shared", str(folder / "decode.o"), "-o", str(folder / "decode.so")])


def _opened(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name in _FUNCTIONS:
        getattr(library, name).restype = ctypes.c_int
    return library


def _output(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelError(f"the C++ compiler can't be run: {error}") from error
    if done.returncode:
        told = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        raise KernelError(f"the C++ compiler failed ({command[0]}, exit {done.returncode}): {told[0][:300]}")
    return done.stdout


def _processor() -> Any:
    """What ``native`` means here: a home may be shared by machines with different processors."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    names = ("model name", "flags", "Features", "CPU part")
    return sorted({line for line in text.splitlines() if line.split(":")[0].strip() in names})
