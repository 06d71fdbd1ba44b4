"""README and the pages of docs/, cut into code blocks and commands, and commands run as a reader would, on small models."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import model_of, save_target, tokenizer

import viasd.load
import viasd.loading
from viasd import masks
from viasd.kernels import build
from viasd.loading import LoadConfig
from viasd.pair import Pair
from viasd.pairs import DEFAULT_PAIR, MODEL_FREE_DRAFTERS, parse_pair, split_drafter
from viasd.testing import perturbed

ROOT = Path(__file__).parents[2]
#: What users read; `architecture.md` is for developers.
PAGES = (ROOT / "README.md", *sorted(p for p in (ROOT / "docs").glob("*.md") if p.name != "architecture.md"))
#: Command -> the module with its `main`.
COMMANDS = {
    "viasd-run": "viasd.runtime.cli",
    "viasd-search": "viasd.search.cli",
    "viasd-bench": "viasd.runtime.bench.cli",
    "viasd-fit": "viasd.search.fit.cli",
}
_MODULES = {"viasd.runtime.bench.acceptance": "viasd.runtime.bench.acceptance.__main__"}
# What makes a command short; options given twice mean the last.
_SHORT = {
    "viasd-run": ("--max-new-tokens", "6"),
    "viasd-search": ("--trials", "4", "--controls", "2", "--tau", "24", "--prompts", "2"),
    "viasd-fit corpus": ("--conversations", "160", "--max-new-tokens", "24", "--batch", "40"),
    "viasd-fit drafter": ("--batch", "512", "--steps", "2"),
    "viasd-fit heads": ("--steps", "2", "--batch", "64"),
    "viasd-fit stitches": ("--tokens", "200", "--exam", "256"),
    "viasd-bench": ("--max-new-tokens", "4", "--repeats", "1", "--limit", "1"),
    "viasd.runtime.bench.concurrency": ("--work", "20", "--repeats", "1", "--tokens", "2,4", "--limit", "1"),
    "viasd.runtime.bench.acceptance": ("--drafts", "40", "--max-new-tokens", "6", "--limit", "1"),
    "viasd.runtime.bench.basics": ("--repeats", "1"),
    "viasd.runtime.bench.soak": ("--requests", "12"),
    "viasd.runtime.bench.drafters": (),
    "viasd.runtime.bench.confident": (
        "--limit",
        "1",
    ),
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: File name.
        language: What stands behind the opening fence.
        text: Its lines.
    """

    page: str
    language: str
    text: str


def blocks(page: Path, language: str) -> list[Block]:
    """The fenced blocks of one language, in order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [Block(page.name, kind, text) for kind, text in found if kind == language]


def commands(page: Path) -> list[list[str]]:
    """The commands of ours in a page's shell blocks, as words; others (pip, pytest) are left to the CI script."""
    found = []
    for block in blocks(page, "bash"):
        for line in block.text.replace("\\\n", " ").splitlines():
            words: list[str] = []
            for word in [*shlex.split(line, comments=True), "&&"]:
                if word != "&&":
                    words.append(word)
                    continue
                if words and (words[0] in COMMANDS or words[:2] == ["python", "-m"]):
                    found.append(words)
                words = []
    return found


#: What stands for a name or number in a command within the text, by the option before it.
_FILLED = {
    "--pair PAIR": "smollm2-lookup:135m",
    "--dataset FILE": "spec_bench.jsonl",
    "--heads FILE": "lens:3,6",
    "--corpus FILE": "corpus.safetensors",
    "--output FILE": "out.json",
    "--mask MASK": "even:0.3",
    "--steps STEPS": "30",
    "--lr LR": "1e-4",
    "--backtrack-layers N": "1",
}


def commands_within(page: Path) -> list[list[str]]:
    """Whole commands in the sentences of a page (three options or more), with something for each capital placeholder."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    found = []
    for code in re.findall(r"`([^`]+)`", text):
        words = code.split()
        if code.count(" --") < 3 or not (words[0] in COMMANDS or words[:2] == ["python", "-m"]):
            continue
        for i, word in enumerate(words):
            if word.isupper():
                words[i] = _FILLED[f"{words[i - 1]} {word}"]
        found.append(words)
    return found


def name_of(words: Sequence[str]) -> str:
    """A command's name in `_SHORT`: the program, with its subcommand where it has some, or the module."""
    if words[0] == "python":
        return words[2]
    return " ".join(words[:2]) if words[0] == "viasd-fit" else words[0]


def needs_weights(words: Sequence[str]) -> bool:
    """Whether a command names a shipped mask and runs a model with it: that fits the demo target alone."""
    reads = words[0] == "viasd-search" and words[1] in ("show", "compare", "pick")
    return not reads and bool({*masks.names()} & {*words})


def shortened(words: Sequence[str]) -> list[str]:
    """A command's arguments, with less work for it to do."""
    rest = list(words[1:] if words[0] in COMMANDS else words[3:])
    name = name_of(words)
    if "--plot" in rest and importlib.util.find_spec("matplotlib") is None:
        at = rest.index("--plot")
        del rest[at : at + 2]
    for option, least in (("--passes", None), ("--width", "16"), ("--threads", "1"), ("--concurrency", "1,4")):
        if option in rest:
            at = rest.index(option)
            many = option != "--concurrency" or "," in rest[at + 1]
            rest[at : at + 2] = [] if least is None else [option, least if many else rest[at + 1]]
    if rest and rest[0] in ("show", "compare", "pick", "export"):
        return rest
    if name == "viasd-run" and {"--list-pairs", "--version"} & {*rest}:
        return rest
    more = list(_SHORT[name])
    if name == "viasd-search" and "--calibration" in rest:
        more = more[:-2]
    if name == "viasd-fit stitches" and "--steps" in rest:
        more += ["--steps", "2", "--batch", "64"]
    return [*rest, *more]


def run(words: Sequence[str]) -> int:
    """Runs a command in this process; returns its exit code."""
    threads = torch.get_num_threads()
    module = COMMANDS.get(words[0]) or _MODULES.get(words[2], words[2])
    try:
        code: int = importlib.import_module(module).main(shortened(words))
    finally:
        torch.set_num_threads(threads)
    return code


def furnish(folder: Path) -> None:
    """What commands read: checkpoints, prompts, questions, data sets and results of an earlier benchmark."""
    save_target(folder)
    (folder / "tiny-target").rename(folder / "my-checkpoint")
    small = folder / "tiny-drafter"
    perturbed(model_of("llama"), 0.2).save_pretrained(small)
    tokenizer().save_pretrained(small)
    lines = [{"prompt": "hello"}, {"messages": [{"role": "user", "content": "hi"}], "seed": 1, "id": "b"}]
    _write(folder / "prompts.jsonl", lines)
    items = [{"question_id": i, "category": "qa", "turns": ["hello hello hello"]} for i in range(2)]
    _write(folder / "spec_bench.jsonl", items)
    _write(folder / "gsm8k.jsonl", [{"question": "1 and 1?", "answer": "that is 2"} for _ in range(2)])
    said = {
        "prompt": "one and one and one is",
        "completion": " three, and one and one and one is three again, as it was.",
    }
    _write(folder / "maths.jsonl", [said] * 6)
    (folder / "questions.txt").write_text("what?\nwhy?\n", encoding="utf-8")


def _write(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def on_tiny_models(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever registered models are asked for, tiny ones are loaded; folders and drafter files are what they are.

    What searches and fits keep goes to a cache of the page's own. The kernels are loaded before, not compiled anew for it.
    """
    build.why_missing()
    monkeypatch.setenv("VIASD_CACHE", str(folder / "cache"))
    real, real_models = viasd.load.load_pair, viasd.loading.load_pair_models

    def present(reference: str) -> bool:
        return (folder / reference).exists()

    def small(drafter: str) -> str:
        first, behind = split_drafter(drafter)
        own = behind in MODEL_FREE_DRAFTERS or present(behind)
        return f"{'lookup+' if first else ''}{behind if own else folder / 'tiny-drafter'}"

    def load_pair(
        pair: str | None = None,
        *,
        drafter: str | None = None,
        target: str | None = None,
        base: bool = False,
        config: LoadConfig | None = None,
        **rest: Any,
    ) -> Pair:
        if target is None:
            spec = parse_pair(DEFAULT_PAIR if pair is None else pair, base=base)
            drafter, target = f"{'lookup+' if spec.lookup_first else ''}{spec.drafter}", spec.target_ref
        chosen = replace(config or LoadConfig(), weights="auto", device="cpu")
        path = target if present(target) else str(folder / "my-checkpoint")
        return real(target=path, drafter=small(drafter or "lookup"), config=chosen, **rest)

    monkeypatch.setattr(viasd.load, "load_pair", load_pair)
    for module in ("soak", "basics", "confident", "drafters"):
        monkeypatch.setattr(f"viasd.runtime.bench.{module}.load_pair", load_pair)
    monkeypatch.setattr(
        viasd.loading,
        "load_pair_models",
        lambda wanted, config, say: real_models(
            ("lookup", str(folder / "my-checkpoint")), replace(config, weights="auto"), say
        ),
    )


def on_demo_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packaged weights, and each pair loaded once for all pages."""
    real = viasd.load.load_pair

    def load_pair(pair: str | None = None, *, config: LoadConfig | None = None, **rest: Any) -> Pair:
        rest.pop("say", None)
        config = replace(config or LoadConfig(), weights="packaged", device="cpu", quiet=True)
        return _loaded(real, pair, config, tuple(sorted(rest.items())))

    monkeypatch.setattr(viasd.load, "load_pair", load_pair)


@cache
def _loaded(real: Callable[..., Pair], pair: str | None, config: LoadConfig, rest: tuple[tuple[str, Any], ...]) -> Pair:
    return real(pair, config=config, **dict(rest))


def options_named(text: str) -> Iterator[str]:
    """Every ``--option`` that a page speaks of."""
    yield from re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text)


def section(page: str, heading: str) -> str:
    """The text of a page between one heading (with its number signs) and the next of its kind."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    depth = heading.split()[0]
    return text.split(f"\n{heading}\n", 1)[1].split(f"\n{depth} ")[0]


def mask_fields() -> set[str]:
    """The fields of a mask file that docs/masks.md names."""
    rows = [line for line in section("masks.md", "## The file").splitlines() if line.startswith("| ")]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}
