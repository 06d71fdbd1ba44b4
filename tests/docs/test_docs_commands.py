"""Every command and program of README and docs/ works as it stands there, on smaller models and with less to do."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import docpages
import pytest
import torch
from docpages import PAGES, ROOT, blocks, commands, needs_weights

pages = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("viasd.runtime.bench.costs._PROBE_BYTES", 1 << 20)
    monkeypatch.setattr("viasd.runtime.bench.costs._REPEATS", 2)
    monkeypatch.setattr("viasd.search.fit.drafterfit.PROMPTS", 2)
    # A command without a prompt reads one.
    typed = SimpleNamespace(read=lambda: b"hello hello")
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: False, buffer=typed))
    return tmp_path


@pages
def test_the_commands_of_a_page(
    page: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One after the other in one folder, because later ones use what earlier ones wrote."""
    todo = [words for words in commands(page) if not needs_weights(words)]
    if not todo:
        pytest.skip("no commands")
    docpages.furnish(here)
    docpages.on_tiny_models(here, monkeypatch)
    if any("before.jsonl" in words for words in todo):
        for name in ("before.jsonl", "after.jsonl"):
            assert docpages.run(["viasd-bench", "--peers", "none", "--strategies", "plain,sd", "--output", name]) == 0
    for words in todo:
        capfd.readouterr()
        assert docpages.run(words) == 0, f"{shlex.join(words)}\n{capfd.readouterr().err}"
    told = docpages.mask_fields()
    for path in here.glob("*.json"):
        found = json.loads(path.read_text(encoding="utf-8"))
        if "keep" in found:
            assert set(found) <= told, f"{path.name} has fields of which docs/masks.md says nothing"


def test_the_commands_behind_the_figures(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Those that stand in the sentences of docs/measured.md."""
    docpages.furnish(here)
    docpages.on_tiny_models(here, monkeypatch)
    todo = docpages.commands_within(ROOT / "docs" / "measured.md")
    assert len(todo) >= 8
    assert docpages.run(["viasd-fit", "corpus", "--output", "corpus.safetensors"]) == 0
    for words in todo:
        if "viasd.runtime.bench.confident" in words:
            words = ["gsm8k.jsonl" if word == "spec_bench.jsonl" else word for word in words]
        capfd.readouterr()
        assert docpages.run(words) == 0, f"{shlex.join(words)}\n{capfd.readouterr().err}"


@pytest.mark.weights
@pages
def test_the_commands_of_a_page_that_name_a_shipped_mask(
    page: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    todo = [words for words in commands(page) if needs_weights(words)]
    if not todo:
        pytest.skip("no such commands")
    docpages.on_demo_weights(monkeypatch)
    for words in todo:
        assert docpages.run(words) == 0, f"{shlex.join(words)}\n{capfd.readouterr().err}"


@pytest.mark.weights
@pages
def test_the_programs_of_a_page(page: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other under one roof, on the demo weights, with short answers."""
    # What README says of transformers is run, and looked at, by tests/runtime/hf/test_hf_readme.py.
    programs = [b for b in blocks(page, "python") if page.name != "README.md" or "viasd.hf" not in b.text]
    if not programs:
        pytest.skip("no programs")
    docpages.on_demo_weights(monkeypatch)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(here / "modules"))
    names: dict[str, object] = {}
    torch.manual_seed(0)
    for block in programs:
        exec(compile(re.sub(r"max_new_tokens=\d+", "max_new_tokens=6", block.text), page.name, "exec"), names)
