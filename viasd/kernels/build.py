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
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from viasd.errors import ViasdError
from viasd.files import cache_folder, make_folder, process_lock

SOURCE = Path(__file__).with_name("decode.cpp")
#: Bumped with the structures that both sides share.
INTERFACE = 1

_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fno-exceptions", "-fno-rtti", "-Wno-psabi")
_TIMEOUT = 300  # seconds; compiling takes four
_LOCK = threading.Lock()


class KernelsMissing(ViasdError):
    """The kernels can't be had on this machine; the message says why. Everything works without them, only slower."""


def load(say: Callable[[str], None] = lambda line: None) -> ctypes.CDLL:
    """The kernels, compiled if this machine has not done so yet.

    Args:
        say: Told before anything is compiled.

    Raises:
        KernelsMissing: If there is no compiler, it fails, or this is no Linux.
    """
    with _LOCK:
        found = _loaded(str(cache_folder()), say)
    if isinstance(found, str):
        raise KernelsMissing(found)
    return found


def why_missing(say: Callable[[str], None] = lambda line: None) -> str | None:
    """Why there are no kernels here, None if there are. See `load`."""
    try:
        load(say)
    except KernelsMissing as error:
        return str(error)
    return None


class _Any:
    """Equal to every other, so that what is told to whom is no part of a cache's key."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Any)

    def __hash__(self) -> int:
        return 0


def _loaded(folder: str, say: Callable[[str], None]) -> ctypes.CDLL | str:
    return _load_once(folder, _Any(say))


@cache
def _load_once(folder: str, teller: _Any) -> ctypes.CDLL | str:
    """The library, or why there is none; asked once a process, because a failure takes the compiler's time too."""
    if sys.platform != "linux":
        return f"the CPU kernels are built on Linux only, and this is {sys.platform}"
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None or shutil.which(compiler.split()[0]) is None:
        return f"no C++ compiler ({compiler or 'c++, g++, clang++'}) was found; install one, or set CXX"
    try:
        path = _built(Path(folder) / "kernels", compiler.split(), teller.say)
        library = ctypes.CDLL(str(path))
    except ViasdError as error:
        return str(error)
    except OSError as error:
        return f"the compiled CPU kernels can't be loaded: {error}"
    for name in ("viasd_layer", "viasd_product", "viasd_readout", "viasd_expand"):
        getattr(library, name).restype = ctypes.c_int
    return library


def _built(folder: Path, compiler: list[str], say: Callable[[str], None]) -> Path:
    """The compiled library; one for each compiler, processor and source."""
    flags = [*_FLAGS, "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"]
    said = (SOURCE.read_bytes(), compiler, _output([*compiler, "--version"]), flags, _processor(), torch.__version__)
    name = hashlib.sha256(repr(said).encode()).hexdigest()[:24]
    try:
        make_folder(folder)
    except ViasdError:
        # A home that can't be written is no reason to be slow: compiled anew for each process then.
        folder = Path(tempfile.mkdtemp(prefix="viasd-kernels-"))
    path = folder / f"{name}.so"
    if path.exists():
        return path
    with process_lock(folder / f"{name}.lock"):
        if path.exists():
            return path
        say("compiling the CPU kernels for this machine (once, some seconds)")
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            unlinked, linked = Path(scratch) / "decode.o", Path(scratch) / "decode.so"
            _output([*compiler, *flags, "-c", str(SOURCE), "-o", str(unlinked)])
            _output([*compiler, "-shared", str(unlinked), "-o", str(linked)])
            os.replace(linked, path)
    return path


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsMissing(f"the C++ compiler failed: {error}") from error
    if done.returncode:
        told = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        raise KernelsMissing(
            f"the C++ compiler failed ({' '.join(command[:1])}, exit {done.returncode}): {told[0][:300]}"
        )
    return done.stdout


def _processor() -> Any:
    """What ``native`` means here: a home may be shared by machines with different processors."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    names = ("model name", "flags", "Features", "CPU part")
    return sorted({line for line in text.splitlines() if line.split("\t")[0].split(":")[0].strip() in names})
