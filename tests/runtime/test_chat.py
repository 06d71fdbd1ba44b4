from __future__ import annotations

import contextlib
import io
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import viasd
import viasd.load
import viasd.runtime.session
from viasd.mask import LayerMask
from viasd.pair import Pair, make_pair
from viasd.runtime.chat import Chat, history
from viasd.runtime.display import Screen
from viasd.testing import byte_tokenizer, tiny_model

Step = str | type[BaseException]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return make_pair(tiny_model(), byte_tokenizer(), name="tiny", target_id="tiny-target")


class Talk:
    """A chat with a scripted person at the keyboard."""

    def __init__(self, pair: Pair, *, mask: str | None = None, templated: bool = True, **options: Any) -> None:
        self.out, self.err = io.StringIO(), io.StringIO()
        screen = Screen()
        screen.out = Console(file=self.out, color_system=None, highlight=False)
        screen.err = Console(file=self.err, color_system=None, highlight=False, width=60)
        self.asked: list[str] = []
        self._script: Iterator[Step] = iter(())
        options = {"max_new_tokens": 8, "ignore_eos": True, **options}
        made = None if mask is None else LayerMask.even(8, float(mask))
        self.chat = Chat(pair, options, made, screen, templated=templated, read=self._read)

    def _read(self, prompt: str) -> str:
        self.asked.append(prompt)
        step = next(self._script)
        if isinstance(step, str):
            return step
        raise step

    def __call__(self, *script: Step) -> str:
        """Runs a script (and Ctrl-D); gives what was said meanwhile on standard error."""
        self.err.truncate(0)
        self.err.seek(0)
        self._script = iter((*script, EOFError))
        self.chat.run()
        return self.err.getvalue()


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Ctrl-C before round n of every answer from now on; -1 never again."""
    state = {"n": -1}
    original = viasd.runtime.session.rounds

    def interrupted(*args: Any) -> Iterator[Any]:
        for i, step in enumerate(original(*args)):
            if i == state["n"]:
                raise KeyboardInterrupt
            yield step

    monkeypatch.setattr(viasd.runtime.session, "rounds", interrupted)
    return lambda n: state.update(n=n)


def test_a_conversation_goes_through_the_template_with_its_history(pair: Pair) -> None:
    talk = Talk(pair)
    err = talk("one", "two")
    messages = [{"role": "user", "content": "one"}]
    first = viasd.generate(pair, messages, max_new_tokens=8, ignore_eos=True)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "two"}]
    second = viasd.generate(pair, messages, max_new_tokens=8, ignore_eos=True)
    assert talk.out.getvalue() == f"{first.text}\n{second.text}\n"
    assert err.count("tok/s") == 2
    assert err.count("no mask is used for this target") == 1


def test_plain_completion_takes_each_line_by_itself(pair: Pair) -> None:
    talk = Talk(pair, templated=False)
    talk("one", "one")
    first, second = (turn["answer"] for turn in talk.chat._turns)
    assert first["token_ids"] == second["token_ids"]
    assert first["prompt_tokens"] == second["prompt_tokens"] == 3
    assert "error" in talk("/system be brief")


def test_reset_and_system(pair: Pair) -> None:
    talk = Talk(pair)
    talk("one", "/reset", "one")
    assert len(talk.chat._messages) == 2
    assert [turn["answer"]["prompt_tokens"] for turn in talk.chat._turns] == [5, 5]
    talk("/system be brief", "/reset", "one", "/system", "/reset", "one")
    assert [turn["system"] for turn in talk.chat._turns[2:]] == ["be brief", None]
    assert talk.chat._turns[2]["answer"]["prompt_tokens"] > 5
    assert talk.chat._turns[3]["answer"]["prompt_tokens"] == 5


def test_mode_mask_gamma_and_theta_change_how_it_goes_on(pair: Pair) -> None:
    talk = Talk(pair, mask="0.5", tiers="3")
    err = talk("a", "/mode lossless", "b", "/mask even:0.25", "c", "/gamma 3", "/mode via", "/theta 0.9 0.1", "d")
    answers = [turn["answer"] for turn in talk.chat._turns]
    assert [(a["mode"], a["mask"]) for a in answers] == [
        *(("via", "even:0.5"), ("lossless", "even:0.5"), ("lossless", "even:0.25"), ("via", "even:0.25")),
    ]
    assert "error" not in err
    assert "8 layers (even:0.25)" in err
    assert "theta_acc 0.9, theta_esc 0.1" in err
    assert talk.chat._config.decoding.gamma == 3
    assert "dropped" in talk("/mode lossless")
    assert talk.chat._config.decoding.thresholds is None
    err = talk("/mask", "/gamma", "/theta", "/mode")
    for part in ("even:0.25", "gamma 3", "theta_acc 0.7", "mode lossless"):
        assert part in err


def test_without_a_mask_the_chat_falls_back_to_two_tiers(pair: Pair) -> None:
    talk = Talk(pair, mask="0.5")
    assert "two tiers" in talk("/mask none", "a")
    assert talk.chat._turns[0]["answer"]["strategy"] == "sd"


@pytest.mark.parametrize(
    "line",
    [
        "/mode fast",
        "/mode viaa",
        "/mask even:2",
        "/mask even:x",
        "/mask nowhere.json",
        "/gamma 0",
        "/gamma x",
        "/theta 0.5",
        "/theta 0.5 0.7",
        "/theta a b",
        "/save",
        "/save /nowhere/at/all.json",
        "/sav x",
        "/unknown",
        "/",
    ],
)
def test_a_bad_command_is_one_line_and_the_chat_goes_on(pair: Pair, line: str) -> None:
    talk = Talk(pair, mask="0.5", tiers="3")
    before = (talk.chat._config, talk.chat._mask)
    lines = [entry for entry in talk(line).splitlines() if not entry.startswith("tiny:") and entry]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert (talk.chat._config, talk.chat._mask) == before
    talk("still here")
    assert len(talk.chat._turns) == 1


def test_commands_that_contradict_the_options_are_refused(pair: Pair) -> None:
    plain = Talk(pair, strategy="plain")
    err = plain("/gamma 3", "/mask even:0.5", "/mode via", "/theta 0.8 0.2", "/mode bounded")
    assert err.count("error: ") == 5
    assert "error: " in Talk(pair, mask="0.5", strategy="cascade", mode="via")("/mask none")
    assert "error: " in Talk(pair)("/mode via")
    assert "error: " in Talk(pair)("/theta 0.8 0.2")


def test_a_blank_before_a_slash_sends_the_line(pair: Pair) -> None:
    talk = Talk(pair)
    assert "did you mean /help?" in talk("/halp", " /halp")
    assert [turn["prompt"] for turn in talk.chat._turns] == ["/halp"]


def test_empty_lines_are_passed_over(pair: Pair) -> None:
    talk = Talk(pair)
    talk("", "   ")
    assert talk.chat._turns == []


def test_help_lists_commands_and_definitions(pair: Pair) -> None:
    err = Talk(pair)("/help")
    for part in ("/reset", "/system", "/mode", "/mask", "/gamma", "/theta", "/stats", "/save", "/quit", "bonus"):
        assert part in err


def test_a_conversation_that_outgrows_the_context_suggests_reset(pair: Pair) -> None:
    talk = Talk(pair)
    err = talk("x" * 600, "short")
    assert err.count("error: ") == 1
    assert "/reset" in err.split("error: ")[1].splitlines()[0]
    assert [turn["prompt"] for turn in talk.chat._turns] == ["short"]


def test_one_guard_learns_over_all_answers_until_its_ground_changes(pair: Pair) -> None:
    talk = Talk(pair, mask="0.5", tiers="3", mode="via")
    talk("aaaa aaaa aaaa aaaa")
    guard = talk.chat._guard
    assert guard is not None
    seen = guard.estimator.observations
    talk("aaaa aaaa aaaa aaaa")
    assert talk.chat._guard is guard
    assert guard.estimator.observations > seen > 0
    talk("/gamma 4", "/stats", "/reset")
    assert talk.chat._guard is guard
    for change in ("/mask even:0.25", "/theta 0.8 0.4", "/mode via"):
        talk("a", change)
        assert talk.chat._guard is None


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(pair: Pair, interrupt: Callable[[int], None]) -> None:
    talk = Talk(pair, strategy="plain")
    interrupt(3)
    err = talk("one")
    assert "interrupted" in err
    partial = talk.chat._turns[0]["answer"]
    assert len(partial["token_ids"]) == 3
    assert talk.out.getvalue() == partial["text"] + "\n"
    assert talk.chat._messages[1] == {"role": "assistant", "content": partial["text"]}
    interrupt(-1)
    talk("two")
    assert talk.chat._turns[1]["answer"]["finish_reason"] == "length"


def test_ctrl_c_before_the_first_token_leaves_no_trace(pair: Pair, interrupt: Callable[[int], None]) -> None:
    talk = Talk(pair)
    interrupt(0)
    talk("one")
    assert talk.chat._messages == []
    assert talk.chat._turns == []


def test_ctrl_c_twice_leaves(pair: Pair, interrupt: Callable[[int], None]) -> None:
    talk = Talk(pair)
    assert "leaves" in talk(KeyboardInterrupt, KeyboardInterrupt, "never read")
    assert len(talk.asked) == 2
    assert "leaves" in talk(KeyboardInterrupt, "", KeyboardInterrupt, KeyboardInterrupt, "never read")
    assert len(talk.asked) == 2 + 4
    interrupt(2)
    talk("one", KeyboardInterrupt, "never read")
    assert len(talk.asked) == 2 + 4 + 2
    assert len(talk.chat._turns) == 1


def test_quit_and_ctrl_d_leave(pair: Pair) -> None:
    talk = Talk(pair)
    talk("/quit", "never read")
    talk()
    assert len(talk.asked) == 2


def test_stats_add_up_over_answers(pair: Pair) -> None:
    talk = Talk(pair, mask="0.5", tiers="3", mode="via", audit=1.0)
    err = talk("aaaa", "bbbb", "/stats")
    assert "2 answers, 16 tokens" in err
    assert "time: drafter" in err
    assert sum(talk.chat._totals.by_tier.values()) == 16
    assert Talk(pair)("/stats").count("0 answers, 0 tokens") == 1


def test_saved_conversation_is_json_with_provenance(pair: Pair, tmp_path: Path) -> None:
    talk = Talk(pair, mask="0.5", tiers="3", mode="via")
    path = tmp_path / "chat of today.json"
    talk("/system s", "/theta 0.8 0.4", "hé", f"/save {path}")
    saved = json.loads(path.read_text(encoding="utf-8"))
    assert saved["viasd"] == viasd.__version__
    assert (saved["pair"], saved["target"], saved["system"]) == ("tiny", "tiny-target", "s")
    assert saved["options"]["theta_acc"] == 0.8
    assert saved["mask"]["keep"].count(0) == 4
    assert [m["role"] for m in saved["messages"]] == ["user", "assistant"]
    assert saved["turns"][0]["answer"]["stats"]["emitted"] == 8
    assert saved["turns"][0]["prompt"] == "hé"
    assert LayerMask.from_json(saved["mask"], "saved").keep == LayerMask.even(8, 0.5).keep


def test_a_mask_of_another_model_is_refused_at_the_start(pair: Pair) -> None:
    with pytest.raises(viasd.ViasdError, match="8"):
        Chat(pair, {}, LayerMask((True, False, True)), Screen(), templated=True)


def test_history_is_kept_in_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readline = pytest.importorskip("readline")
    monkeypatch.setenv("VIASD_CACHE", str(tmp_path / "cache"))
    readline.clear_history()
    with history(Screen()):
        readline.add_history("typed before")
    readline.clear_history()
    with history(Screen()):
        assert readline.get_history_item(1) == "typed before"
    readline.clear_history()


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_at_a_real_terminal(tmp_path: Path) -> None:
    """The installed command over a pseudo-terminal: colours, legend, Ctrl-C and Ctrl-D, markup-like text untouched."""
    import pty

    target = tmp_path / "target"
    tiny_model().save_pretrained(target)
    byte_tokenizer().save_pretrained(target)
    argv = ["--target", str(target), "--device", "cpu", "--threads", "1", "--max-new-tokens", "20", "--ignore-eos"]
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits SIGINT ignored
        environment = {**os.environ, "TERM": "xterm", "VIASD_CACHE": str(tmp_path / "cache")}
        environment.pop("NO_COLOR", None)
        os.execvpe(sys.executable, [sys.executable, "-m", "viasd.runtime.cli", *argv], environment)
    shown = b""

    def wait_for(sign: bytes, after: int = 0) -> int:
        """Reads until `sign` is shown after an offset; returns the offset behind it."""
        nonlocal shown
        deadline = time.monotonic() + 60
        while (at := shown.find(sign, after)) < 0:
            assert time.monotonic() < deadline, shown
            if select.select([terminal], [], [], 1.0)[0]:
                shown += os.read(terminal, 4096)
        return at + len(sign)

    wait_for(b"> ", wait_for(b"/help"))  # the greeting, then the prompt (readline drops what is typed before it)
    os.write(terminal, b"hello [red] hello\n")
    answered = wait_for(b"tok/s")
    wait_for(b"> ", answered)
    # What is typed before readline is ready is lost, so keys are pressed again until they have worked.
    deadline = time.monotonic() + 60
    while shown.find(b"leaves", answered) < 0:
        assert time.monotonic() < deadline, shown
        os.write(terminal, b"\x03")
        if select.select([terminal], [], [], 5.0)[0]:
            shown += os.read(terminal, 4096)
    wait_for(b"> ", answered)
    deadline, ended, status = time.monotonic() + 60, 0, 0
    while not ended:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(OSError):  # the child may have closed the terminal already
            os.write(terminal, b"\x04")
        if select.select([terminal], [], [], 0.5)[0]:
            with contextlib.suppress(OSError):
                shown += os.read(terminal, 4096)
        ended, status = os.waitpid(child, os.WNOHANG)
    assert os.waitstatus_to_exitcode(status) == 0, shown
    assert b"colours: " in shown
    assert b"\x1b[36m" in shown
    assert b"Traceback" not in shown
    assert "hello [red] hello" in (tmp_path / "cache" / "history").read_text()
