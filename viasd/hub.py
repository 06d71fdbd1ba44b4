"""The model hub: whether it can be reached, what is already here, and its many failures in one line each."""

from __future__ import annotations

import errno
import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import torch
from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from safetensors import SafetensorError

from viasd.errors import LoadError, UnsupportedModelError, ViasdError

#: Longest a connection check may take, in seconds; name look-up included.
CHECK_SECONDS = 4.0

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_WEIGHT_INDEX, _WEIGHTS = "model.safetensors.index.json", "model.safetensors"


def is_cached(ref: str) -> bool:
    """Whether the hub's local cache holds config, tokenizer and all safetensors of `ref`."""
    if not (_cached(ref, "config.json") and any(_cached(ref, name) for name in _TOKENIZER_FILES)):
        return False
    if _cached(ref, _WEIGHTS):
        return True
    index = _cached(ref, _WEIGHT_INDEX)
    if index is None:
        return False
    shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return all(_cached(ref, shard) for shard in shards)


def is_reachable() -> bool:
    """Whether the hub answers within `CHECK_SECONDS` (never, if ``HF_HUB_OFFLINE`` is set)."""
    if constants.HF_HUB_OFFLINE:
        return False
    answered = threading.Event()

    def ask() -> None:
        request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
        try:
            with urllib.request.urlopen(request, timeout=CHECK_SECONDS):
                answered.set()
        except urllib.error.HTTPError as answer:
            # Whatever it says, it said something; a server that fails is as good as none.
            if answer.code < 500:
                answered.set()
        except (OSError, ValueError, http.client.HTTPException):
            return  # no route, no name, refused by a proxy, timed out, a malformed address, or no HTTP at all

    # The resolver has no timeout of its own, hence a thread that we can stop waiting for.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(CHECK_SECONDS)
    return answered.is_set()


def explain(error: BaseException, ref: str) -> ViasdError:
    """The one-line error for a failure of transformers, tokenizers or the hub client while loading `ref`."""
    chain = list(_causes(error))
    for cause in chain:
        if isinstance(cause, ViasdError):
            return cause
        if isinstance(cause, GatedRepoError):
            return LoadError(
                f"{ref} is gated: accept its terms on its page at the hub, then log in with `hf auth login` "
                "(or set HF_TOKEN) and try again"
            )
        if isinstance(cause, RepositoryNotFoundError | HFValidationError):
            return LoadError(
                f"{ref!r} is neither a local folder, nor a .gguf file, nor a model on the hub; check the name "
                "(a private model needs `hf auth login`)"
            )
    for cause in chain:
        if isinstance(cause, LocalEntryNotFoundError | OfflineModeIsEnabled | ConnectionError | TimeoutError):
            return unreachable(ref)
        if isinstance(cause, HfHubHTTPError):
            return LoadError(f"the hub refused {ref}: {one_line(cause)}")
        if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:
            return LoadError(f"no space left on the disk while fetching {ref}; free some, or move HF_HOME")
        if _is_out_of_memory(cause):
            return LoadError(
                f"not enough memory to load {ref}; choose a smaller dtype (--dtype bfloat16), --quantization, "
                "--device-map auto, or a smaller model"
            )
        if isinstance(cause, SafetensorError | json.JSONDecodeError | UnicodeDecodeError):
            return LoadError(f"{ref} has a file that is broken or cut short ({one_line(cause)}); fetch it again")
        if isinstance(cause, ImportError):
            return LoadError(f"loading {ref} needs another package: {one_line(cause)}")
    text = one_line(error)
    unknown = ("does not recognize this architecture", "Unrecognized model", "Unrecognized configuration class")
    if any(sign in text for sign in unknown) or "is not supported yet" in text:
        return UnsupportedModelError(f"{ref} is of an architecture this transformers can't run: {text}")
    return LoadError(f"can't load {ref}: {text or type(error).__name__}")


def unreachable(ref: str) -> LoadError:
    """The error for a hub that does not answer."""
    return LoadError(
        f"the model hub can't be reached and {ref} is not in its local cache; check the network, or give a local "
        "folder or .gguf file (the default pair needs no hub: --weights packaged)"
    )


def one_line(error: BaseException, limit: int = 240) -> str:
    """The error's message with line breaks removed, cut to `limit` characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _cached(ref: str, name: str) -> Path | None:
    path = try_to_load_from_cache(ref, name)
    return Path(path) if isinstance(path, str) else None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    signs = ("not enough memory", "can't allocate memory", "Cannot allocate memory", "out of memory")
    return isinstance(error, RuntimeError | OSError) and any(sign in str(error) for sign in signs)
