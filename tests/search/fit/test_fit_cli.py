from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from fitting import target_pair
from tiny import tokenizer

import viasd
from viasd.search.fit import corpus_command, writing
from viasd.search.fit.cli import main
from viasd.search.fit.corpus import TOKENIZER, load_corpus
from viasd.search.fit.writing import WritingConfig, write_corpus
from viasd.vocab import fingerprint


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder; whatever target is asked for is the tiny one."""
    monkeypatch.setenv("VIASD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(corpus_command, "load_models", lambda args, say: target_pair())
    return tmp_path


def test_the_command_without_a_subcommand_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["nonsense"]) == 2
    assert "corpus" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "train light heads" in capsys.readouterr().out


def corpus(here: Path, *more: str) -> list[str]:
    return [
        "corpus", "--target", "tiny", "--output", str(here / "new.safetensors"), "--conversations", "22",
        "--max-new-tokens", "12", "--batch", "4", "--quiet", *more,
    ]  # fmt: skip


def test_a_corpus_from_the_command_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(corpus(here, "--json")) == 0
    said = json.loads(capsys.readouterr().out)
    made = load_corpus(here / "new.safetensors", tokenizer())
    assert (len(made), made.answer_tokens) == (said["conversations"], said["answer_tokens"])
    assert 15 <= len(made) <= 22
    assert made.provenance[TOKENIZER] == fingerprint(tokenizer())
    assert made.provenance["target"]["id"] == "tiny"
    assert {round(t, 2) for t in made.temperature.tolist()} == {0.0, 0.3, 0.6, 1.0}
    before, after = writing._around_question(target_pair())
    for number in range(len(made)):
        tokens, answer = made.conversation(number).tolist(), int(made.answer[number])
        assert tokens[: len(before)] == before
        assert tokens[answer - len(after) : answer] == after
        if made.temperature[number] == 0:
            alone = viasd.generate(
                target_pair(), tokens[:answer], strategy="plain", max_new_tokens=len(tokens) - answer
            )
            assert tokens[answer:] == alone.token_ids
    assert not list(here.glob("new.safetensors.*"))


def test_an_interrupted_corpus_goes_on_and_is_the_same(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, whole = WritingConfig(20, (0.5, 1.0), 9, 4, seed=3), None
    whole = write_corpus(target_pair(), config, here / "whole.safetensors")
    write, calls = writing._write_batch, []

    def stopping(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return write(*args)

    monkeypatch.setattr(writing, "_write_batch", stopping)
    with pytest.raises(KeyboardInterrupt):
        write_corpus(target_pair(), config, here / "parts.safetensors")
    again = write_corpus(target_pair(), config, here / "parts.safetensors")
    assert len(calls) == 6  # two batches were kept
    assert again.hash == whole.hash


def test_questions_of_a_file_are_asked_in_turn(here: Path) -> None:
    (here / "q.txt").write_text("what?\n\nwhy?\n", encoding="utf-8")
    assert main(corpus(here, "--prompts", str(here / "q.txt"))) == 0
    made = load_corpus(here / "new.safetensors", tokenizer())
    texts = [tokenizer().decode(made.conversation(n)[: int(made.answer[n])]) for n in range(len(made))]
    assert all("what?" in text or "why?" in text for text in texts)
    assert any("what?" in text for text in texts)
    assert any("why?" in text for text in texts)
    asked = made.provenance["written"]
    assert (asked["questions"], asked["questions_hash"]) == (2, hashlib.sha256(b"what?\nwhy?").hexdigest()[:16])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--temperatures", "hot"), "must be numbers with commas"),
        (("--temperatures", "0.5,-1"), "from 0 on"),
        (("--conversations", "0"), "conversations must be at least 1"),
        (("--output", "/no/such/folder/c"), "there is no folder"),
        (("--prompts", "no-such-file"), "can't read questions"),
        (("--max-new-tokens", "505"), "takes more than"),
    ],
)
def test_faults_of_a_corpus(
    here: Path, more: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(corpus(here, *more)) == 2
    assert message in capsys.readouterr().err


def test_options_of_models_are_checked_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["corpus", "--pair", "nonsense", "--output", "x.safetensors"]) == 2
    assert "FAMILY-DRAFTER:TARGET" in capsys.readouterr().err
