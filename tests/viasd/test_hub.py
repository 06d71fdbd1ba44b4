from __future__ import annotations

import errno
import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

from viasd import hub
from viasd.errors import LoadError, UnsupportedModelError


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """A hub on this machine that answers every request with `answer["status"]`."""
    answer = {"status": 200}

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(answer["status"])
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{http.server_port}")
    yield answer
    http.shutdown()
    http.server_close()


@pytest.mark.parametrize(("status", "expected"), [(200, True), (404, True), (401, True), (503, False)])
def test_a_hub_that_answers_is_reachable(status: int, expected: bool, server: dict[str, int]) -> None:
    server["status"] = status
    assert hub.is_reachable() is expected


def test_offline_mode_asks_nobody(server: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert not hub.is_reachable()


@pytest.mark.usefixtures("server")
def test_a_silent_hub_costs_no_more_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "CHECK_SECONDS", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        start = time.monotonic()
        assert not hub.is_reachable()
        assert time.monotonic() - start < 2


@pytest.mark.usefixtures("server")
def test_a_name_server_that_hangs_costs_no_more_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "CHECK_SECONDS", 0.2)

    def hang(*args: object, **options: object) -> None:
        time.sleep(2.5)
        raise TimeoutError

    monkeypatch.setattr(hub.urllib.request, "urlopen", hang)
    start = time.monotonic()
    assert not hub.is_reachable()
    assert time.monotonic() - start < 2


def test_a_closed_port_is_unreachable(server: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    assert not hub.is_reachable()


@pytest.mark.parametrize(
    ("names", "complete"),
    [
        (["config.json", "tokenizer.json", "model.safetensors"], True),
        (["config.json", "tokenizer.model", "model.safetensors.index.json", "a", "b"], True),
        (["config.json", "tokenizer.json", "model.safetensors.index.json", "a"], False),
        (["config.json", "tokenizer.json"], False),
        (["config.json", "model.safetensors"], False),
        (["tokenizer.json", "model.safetensors"], False),
        ([], False),
    ],
)
def test_only_complete_checkpoints_count_as_cached(
    names: list[str], complete: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / "index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a", "y": "b", "z": "a"}}))
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda ref, name: str(index) if name in names else None)
    assert hub.is_cached("org/name") is complete


def _http(kind: type[HfHubHTTPError], status: int) -> HfHubHTTPError:
    # A stand-in: which HTTP library makes the real one depends on the version of huggingface_hub.
    return kind("server says\nno", response=SimpleNamespace(status_code=status, headers={}, request=None))


def _caused_by(cause: BaseException) -> OSError:
    try:
        raise OSError("transformers'\n\nown text") from cause
    except OSError as error:
        return error


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (_caused_by(_http(GatedRepoError, 403)), LoadError, "org/name is gated.*`hf auth login`"),
        (_caused_by(_http(RepositoryNotFoundError, 404)), LoadError, "'org/name' is neither a local folder"),
        (_caused_by(LocalEntryNotFoundError("x")), LoadError, "hub can't be reached"),
        (_caused_by(ConnectionError("x")), LoadError, "hub can't be reached"),
        (_caused_by(_http(HfHubHTTPError, 429)), LoadError, "hub refused org/name: server says no"),
        (OSError(errno.ENOSPC, "No space"), LoadError, "no space left"),
        (torch.OutOfMemoryError("CUDA out of memory"), LoadError, "not enough memory to load org/name"),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried"), LoadError, "not enough memory"),
        (MemoryError(), LoadError, "not enough memory"),
        (ImportError("needs `x`\nplease"), LoadError, "another package: needs `x` please"),
        (
            ValueError("model type `zeta` but Transformers does not recognize this architecture"),
            UnsupportedModelError,
            "org/name is of an architecture",
        ),
        (RuntimeError("size\nmismatch"), LoadError, "can't load org/name: size mismatch"),
        (ValueError(), LoadError, "can't load org/name: ValueError"),
    ],
)
def test_failures_become_one_line(error: BaseException, kind: type, message: str) -> None:
    explained = hub.explain(error, "org/name")
    assert type(explained) is kind
    assert "\n" not in str(explained)
    with pytest.raises(kind, match=message):
        raise explained


def test_an_error_of_our_own_passes_through() -> None:
    own = LoadError("own")
    assert hub.explain(own, "org/name") is own


def test_long_messages_are_cut() -> None:
    assert len(hub.one_line(ValueError("word " * 1000))) == 240
