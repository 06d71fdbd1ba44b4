"""What the pages say of names, fields, columns and options is what the code has: nothing left out, nothing invented."""

from __future__ import annotations

import importlib
import inspect
import re
from argparse import ArgumentParser
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import docpages
import pytest
from docpages import PAGES, ROOT, section
from tiny import generate, pair_of

import viasd
import viasd.errors
from viasd import masks, shipped
from viasd.runtime.bench import report
from viasd.runtime.hf import refusals
from viasd.runtime.names import MODES, STRATEGIES
from viasd.runtime.result import Result

DOCS = ROOT / "docs"
API = (DOCS / "api.md").read_text(encoding="utf-8")


def first_cells(text: str) -> list[str]:
    """Names in backticks in the first column of the tables of a text."""
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
    return [name for cell in rows for name in re.findall(r"`([\w-]+)`", cell)]


def tables(text: str) -> list[str]:
    return re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)


def resolved(path: str) -> Any:
    """What a dotted name of the API page stands for."""
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise AssertionError(path)


def names_of(what: Any) -> set[str]:
    """Parameters of a function, a class that is no dataclass included; fields of a dataclass."""
    if is_dataclass(what):
        return {field.name for field in fields(what)}
    return {name for name in inspect.signature(what).parameters if name != "self"}


SECTIONS = re.findall(r"^### `([\w.]+)`$", API, re.MULTILINE)


def test_the_api_page_has_every_public_name() -> None:
    beginning = API.split("```")[0]
    for name in viasd.__all__:
        assert f"`{name}`" in beginning, name
    spoken = {path.removeprefix("viasd.") for path in SECTIONS}
    assert {name for name in viasd.__all__ if name not in ("hf", "ViasdError")} <= spoken
    assert all(name in API for name in (f"viasd.hf.{n}" for n in viasd.hf.__all__))


@pytest.mark.parametrize("path", SECTIONS)
def test_every_parameter_and_field_is_there_and_no_other(path: str) -> None:
    what, told = resolved(path), first_cells(tables(section("api.md", f"### `{path}`"))[0])
    assert len(told) == len(set(told))
    extra = {"is_chat", "dtype", "device", "encode"} if what is viasd.Pair else set()
    assert all(hasattr(what, name) for name in extra)
    assert set(told) == names_of(what) | extra


def test_settings_of_transformers_are_told_as_they_are_honoured_or_refused() -> None:
    text = section("api.md", "### `viasd.hf.generate`")
    honoured, refused = (re.search(rf"{words}: (.*?)\.\s", text, re.DOTALL) for words in ("honoured", "the reason"))
    assert honoured is not None
    assert refused is not None
    assert set(re.findall(r"`(\w+)`", honoured[1])) == refusals._HONOURED
    assert set(re.findall(r"`(\w+)`", refused[1])) == set(refusals._ADVICE)


def test_every_key_of_an_answers_json_is_told() -> None:
    answer = generate(pair_of("llama"), "hello", max_new_tokens=2)
    text = section("api.md", "### `viasd.Result`")
    assert set(answer.as_json()) <= set(re.findall(r"`(\w+)`", text))
    counters = section("api.md", "### `viasd.runtime.metrics.Counters`")
    assert set(answer.stats.as_json()) <= set(re.findall(r"`(\w+)`", counters))


def test_members_of_the_engine() -> None:
    told = first_cells(tables(section("api.md", "### `viasd.Engine`"))[1])
    members = {name for name, _ in inspect.getmembers(viasd.Engine) if not name.startswith("_")}
    assert set(told) == members | {"results", "tracebacks"}


def named_before_the_table(path: str) -> set[str]:
    return set(re.findall(r"`(\w+)(?:\(\))?`", section("api.md", f"### `{path}`").split("\n|")[0]))


def test_the_ratios_of_the_counters_are_all_told() -> None:
    counters = resolved("viasd.runtime.metrics.Counters")
    ratios = {name for name, value in inspect.getmembers(counters) if isinstance(value, property)}
    assert named_before_the_table("viasd.runtime.metrics.Counters") == {*ratios, "merge"}


def test_what_makes_and_uses_a_mask_exists() -> None:
    told = named_before_the_table("viasd.LayerMask")
    members = {name for name, _ in inspect.getmembers(viasd.LayerMask) if not name.startswith("_")}
    assert told == members - {field.name for field in fields(viasd.LayerMask)}


def test_every_error_is_told() -> None:
    errors = {
        name
        for name, value in vars(viasd.errors).items()
        if isinstance(value, type) and issubclass(value, viasd.ViasdError) and value is not viasd.ViasdError
    }
    assert set(first_cells(section("api.md", "## Errors"))) == errors


def test_every_column_of_a_benchmark_is_told_in_order() -> None:
    text = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \|", text.split("### The columns")[1].split("###")[0], re.MULTILINE)
    assert rows == [column.title for column in (*report.COLUMNS, *report._LOSSY)]


def test_every_field_of_a_mask_file_is_told_and_exists() -> None:
    told = docpages.mask_fields()
    source = "".join(p.read_text(encoding="utf-8") for p in [ROOT / "viasd/mask.py", *(ROOT / "search").rglob("*.py")])
    for row in first_cells(section("masks.md", "## The file")):
        assert f'"{row}"' in source, row
    for name in masks.names():
        assert set(shipped.find_mask(name).to_json()) <= told


def test_every_mode_and_strategy_is_told() -> None:
    text = (DOCS / "choosing-a-mode.md").read_text(encoding="utf-8") + (ROOT / "README.md").read_text(encoding="utf-8")
    for name in (*MODES, *STRATEGIES):
        shown = name.removeprefix("token") if name in ("token-v2", "token-v3") else name
        assert f"`{shown}`" in text, name


def test_what_an_answer_says_of_itself_is_in_its_json() -> None:
    told = first_cells(section("choosing-a-mode.md", "## What an answer says of itself"))
    text = section("choosing-a-mode.md", "## What an answer says of itself")
    keys = {*inspect.signature(Result).parameters, "target", "check"}
    assert {*told} - {"stats"} <= keys
    for name in re.findall(r"`stats\.(\w+)`", text):
        assert name in resolved("viasd.runtime.metrics.Counters")().as_json()


def _parsers() -> list[ArgumentParser]:
    import viasd.runtime.bench.acceptance.__main__ as acceptance
    import viasd.runtime.bench.options as bench
    import viasd.runtime.options as run
    import viasd.search.export as export
    import viasd.search.options as search
    from viasd.runtime.bench import confident
    from viasd.search.fit.cli import COMMANDS

    made = [m.build_parser() for m in (acceptance, bench, run, export, search)]
    made += [confident._parser(), search._reader("pick"), search._reader("show"), bench._compare_parser()]
    for module, _ in COMMANDS.values():
        parser = ArgumentParser()
        importlib.import_module(module).add_options(parser)
        made.append(parser)
    return made


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_every_option_that_a_page_names_exists(page: Path) -> None:
    known = {option for parser in _parsers() for option in parser._option_string_actions}
    source = "".join((ROOT / "runtime" / "bench" / f"{m}.py").read_text() for m in ("basics", "concurrency", "soak"))
    known |= set(re.findall(r'"(--[a-z-]+)"', source))
    foreign = {"--seed", "--torch-backend", "--model-draft", "--speculative-config"}
    text = page.read_text(encoding="utf-8")
    assert {*docpages.options_named(text)} - foreign <= known


def links(page: Path) -> list[tuple[str, str]]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [(target, anchor) for target, anchor in re.findall(r"\]\(([^)#]*)(#[^)]*)?\)", text)]


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", [*PAGES, DOCS / "architecture.md"], ids=lambda p: p.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in links(page):
        if target.startswith("http"):
            continue
        found = page.parent / target if target else page
        assert found.exists(), target
        assert not anchor or anchor[1:] in anchors(found), f"{target}{anchor}"


def test_every_page_is_linked_from_the_readme_and_leads_back() -> None:
    listed = {target for target, _ in links(ROOT / "README.md")}
    for page in DOCS.glob("*.md"):
        assert f"docs/{page.name}" in listed
        if page.name != "architecture.md":
            assert "../README.md" in {target for target, _ in links(page)}


def test_the_readmes_figures_are_those_of_the_measured_page() -> None:
    rows = section_of_readme("## Measured")
    table = [line for line in rows.splitlines() if line.startswith("| ")]
    assert len(table) == 5
    measured = (DOCS / "measured.md").read_text(encoding="utf-8").splitlines()
    assert all(line in measured for line in table)


def section_of_readme(heading: str) -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8").split(f"\n{heading}\n")[1].split("\n## ")[0]
