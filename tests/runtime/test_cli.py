from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import viasd
import viasd.load
import viasd.runtime.session
from viasd.confident import METHODS
from viasd.mask import LayerMask
from viasd.pair import Pair, make_pair
from viasd.runtime import cli, config, options
from viasd.runtime.display import Screen, clean, mask_strip
from viasd.testing import byte_tokenizer, tiny_model

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return make_pair(tiny_model(), byte_tokenizer(), name="tiny", target_id="tiny-target")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny target as `save_pretrained` writes it."""
    path = tmp_path_factory.mktemp("target")
    tiny_model().save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    def _run(*argv: str) -> tuple[int, str, str]:
        code = cli.main([*argv])
        out, err = capfd.readouterr()
        return code, out, err

    return _run


@pytest.fixture
def loaded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replaces loading by the tiny pair; the calls are recorded."""
    calls: list[dict[str, Any]] = []

    def load_pair(name: str | None = None, **rest: Any) -> Pair:
        print("a library prints while it loads")
        calls.append({"pair": name, **rest})
        return pair

    monkeypatch.setattr(viasd.load, "load_pair", load_pair)
    return calls


def no_loading(*args: Any, **rest: Any) -> Pair:
    raise AssertionError("nothing may be loaded")


def one_line_error(result: tuple[int, str, str]) -> str:
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.startswith("viasd-run: error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    return err


# --- one answer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["lookup", "self"])
@pytest.mark.parametrize("mask", ["none", "even:0", "even:0.25", "even:0.6"])
def test_json_lossless_equals_transformers_generate(folder: str, run: Run, drafter: str, mask: str) -> None:
    more = [] if mask == "none" else ["--tiers", "3"]
    argv = ["--target", folder, "--drafter", drafter, "--mask", mask, "--lossless", "--dtype", "float32", *more]
    code, out, _ = run(*argv, "--device", "cpu", "--no-chat", "--prompt", "abc abc", "--max-new-tokens", "24", "--json")
    assert code == 0
    assert out.count("\n") == 1
    answer = json.loads(out)
    ids = byte_tokenizer()("abc abc", return_tensors="pt")
    expected = tiny_model().generate(**ids, do_sample=False, max_new_tokens=24)[0, ids["input_ids"].shape[1] :]
    assert answer["token_ids"] == expected.tolist()
    assert answer["lossless"] is True
    assert answer["mode"] == "lossless"
    assert answer["strategy"] == ("sd" if mask == "none" else "cascade")
    assert (answer["mask"] is None) == (mask == "none")
    assert (answer["dtype"], answer["device"]) == ("float32", "cpu")
    assert len(answer["tiers"]) == answer["stats"]["emitted"] == sum(answer["stats"]["by_tier"].values())
    assert answer["finish_reason"] in ("eos", "length")


def test_json_is_one_strict_object_and_all_else_goes_to_stderr(loaded: list[Any], run: Run) -> None:
    argv = ["--mask", "even:0.5", "--mode", "via", "--tiers", "3", "--prompt", "héllo", "--max-new-tokens", "16"]
    code, out, err = run(*argv, "--json")

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    answer = json.loads(out, parse_constant=refuse)
    assert code == 0
    assert out.count("\n") == 1
    assert set(answer) >= {"text", "token_ids", "prompt_tokens", "finish_reason", "strategy", "mode", "lossless"}
    assert set(answer["stats"]["audit"]) == {"blocks", "tokens", "disagreed", "interval"}
    assert "a library prints while it loads" in err
    assert "tok/s" in err
    assert "LOSSY" in err
    assert any("LOSSY" in note for note in answer["notes"])


def test_stdout_holds_the_text_and_one_line_break_only(loaded: list[Any], run: Run, pair: Pair) -> None:
    code, out, err = run("--prompt", "hi", "--max-new-tokens", "12", "--strategy", "plain")
    expected = viasd.generate(pair, [{"role": "user", "content": "hi"}], max_new_tokens=12, strategy="plain")
    assert code == 0
    assert out == expected.text + "\n"
    assert "tok/s" in err
    assert "emitted/round" in err


def test_quiet_leaves_only_what_a_lossy_answer_may_lose(loaded: list[Any], run: Run) -> None:
    argv = ["--prompt", "hi", "--max-new-tokens", "8", "--quiet"]
    loading = "a library prints while it loads\n"
    assert run(*argv, "--lossless")[2] == loading
    assert loaded[-1]["config"].quiet
    _, _, err = run(*argv, "--mask", "even:0.5", "--mode", "via", "--tiers", "3")
    assert err.removeprefix(loading).startswith("LOSSY")
    assert err.removeprefix(loading).count("\n") == 1


def test_prompt_comes_from_a_file_or_from_standard_input(
    loaded: list[Any], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "ünï ⚡\nzwei"
    file = tmp_path / "prompt.txt"
    file.write_text(text + "\n", encoding="utf-8")
    argv = ["--max-new-tokens", "6", "--lossless", "--json", "--seed", "0"]
    outs = [run(*argv, "--prompt", text)[1], run(*argv, "--prompt-file", str(file))[1]]
    for more in ([], ["--prompt-file", "-"]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((text + "\r\n").encode())))
        outs.append(run(*argv, *more)[1])
    answers = [json.loads(out) for out in outs]
    assert {a["prompt_tokens"] for a in answers} == {len(text.encode()) + 2}
    assert len({tuple(a["token_ids"]) for a in answers}) == 1


def test_chat_template_system_message_and_plain_completion(loaded: list[Any], run: Run) -> None:
    def prompt_tokens(*argv: str) -> int:
        return int(
            json.loads(run("--prompt", "hi", "--json", "--max-new-tokens", "2", "--lossless", *argv)[1])[
                "prompt_tokens"
            ]
        )

    assert prompt_tokens("--no-chat") == 2
    assert prompt_tokens() == prompt_tokens("--chat") == 4
    assert prompt_tokens("--base") == 2
    assert prompt_tokens("--system", "be brief") > 4


def test_stop_strings_seed_and_ignore_eos_reach_the_engine(loaded: list[Any], run: Run) -> None:
    plain = json.loads(run("--prompt", "hi", "--json", "--max-new-tokens", "30", "--ignore-eos", "--lossless")[1])
    assert plain["stats"]["emitted"] == 30
    stop = plain["text"][5:7]
    argv = [
        "--prompt",
        "hi",
        "--json",
        "--max-new-tokens",
        "30",
        "--ignore-eos",
        "--lossless",
        "--stop",
        stop,
        "--stop",
        "££",
    ]
    stopped = json.loads(run(*argv, "--seed", "7")[1])
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == plain["text"][: plain["text"].index(stop)]
    assert stopped["seed"] == 7
    warm = [
        "--prompt",
        "hi",
        "--json",
        "--temperature",
        "1",
        "--top-k",
        "40",
        "--top-p",
        "0.9",
        "--seed",
        "3",
        "--lossless",
    ]
    first, second = (json.loads(run(*warm, "--max-new-tokens", "20")[1])["token_ids"] for _ in range(2))
    assert first == second != plain["token_ids"][: len(first)]


def test_threads_and_loading_options_are_passed_on(loaded: list[Any], run: Run) -> None:
    argv = ["--pair", "gemma3-270m:1b", "--base", "--weights", "hub", "--device", "cpu", "--drafter-device", "cpu"]
    code, _, err = run(
        *argv, "--dtype", "float32", "--attn", "eager", "--threads", "1", "--prompt", "x", "--max-new-tokens", "1"
    )
    assert code == 0, err
    call = loaded[-1]
    assert (call["pair"], call["base"], call["kernel"]) == ("gemma3-270m:1b", True, "eager")
    loading = call["config"]
    assert (loading.weights, loading.device, loading.drafter_device, loading.dtype) == ("hub", "cpu", "cpu", "float32")
    assert torch.get_num_threads() == 1


def test_paper_preset_sets_what_it_says(loaded: list[Any], run: Run) -> None:
    args = options.parse_args(["--preset", "paper", "--mask", "even:0.5", "--prompt", "x"])
    decoding = cli._make_config(args).decoding
    assert (decoding.strategy, decoding.mode, decoding.gate, decoding.gamma, decoding.recheck) == (
        *("cascade", "via", "ratio"),
        *(5, False),
    )
    assert decoding.thresholds is not None
    assert (decoding.thresholds.accept, decoding.thresholds.escalate) == (0.7, 0.5)
    code, out, err = run("--preset", "paper", "--mask", "even:0.5", "--prompt", "x", "--max-new-tokens", "6", "--json")
    assert code == 0
    assert json.loads(out)["lossless"] is False
    assert "nothing bounds" in err
    assert "thresholds" in err


def test_thresholds_may_be_given_as_alphas_or_one_at_a_time() -> None:
    def thresholds(*argv: str) -> tuple[float, float]:
        chosen = options.options_from_args(options.parse_args([*argv]))["thresholds"]
        return round(chosen.accept, 9), round(chosen.escalate, 9)

    assert thresholds("--alpha1", "0.4", "--alpha2", "0.2") == (0.8, 0.6)
    assert thresholds("--alpha1", "0.2", "--alpha2", "0.4") == (0.8, 0.6)
    assert thresholds("--alpha1", "0.6") == (0.7, 0.4)
    assert thresholds("--alpha2", "0.1") == (0.9, 0.5)
    assert thresholds("--theta-acc", "0.9") == (0.9, 0.5)
    assert thresholds("--theta-esc", "0") == (0.7, 0.0)


# --- interruption and broken pipes --------------------------------------------------------------------------------


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Ctrl-C in the middle of round n (0: during the prefill)."""

    def arm(n: int) -> None:
        original = viasd.runtime.session.rounds

        def interrupted(*args: Any) -> Iterator[Any]:
            for i, step in enumerate(original(*args)):
                if i == n:
                    raise KeyboardInterrupt
                yield step

        monkeypatch.setattr(viasd.runtime.session, "rounds", interrupted)

    return arm


def test_ctrl_c_prints_what_there_is_and_exits_130(
    loaded: list[Any], run: Run, interrupt: Callable[[int], None]
) -> None:
    whole = json.loads(run("--prompt", "hi", "--ignore-eos", "--strategy", "plain", "--json")[1])
    interrupt(9)
    code, out, err = run("--prompt", "hi", "--ignore-eos", "--strategy", "plain")
    assert code == 130
    assert out == byte_tokenizer().decode(whole["token_ids"][:9], skip_special_tokens=True) + "\n"
    assert err.endswith("viasd-run: interrupted\n")
    code, out, err = run("--prompt", "hi", "--ignore-eos", "--strategy", "plain", "--json")
    answer = json.loads(out)
    assert code == 130
    assert answer["finish_reason"] == "interrupted"
    assert answer["token_ids"] == whole["token_ids"][:9]
    assert answer["text"] == byte_tokenizer().decode(answer["token_ids"], skip_special_tokens=True)


@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_ctrl_c_before_the_first_token(
    loaded: list[Any], run: Run, monkeypatch: pytest.MonkeyPatch, json_flag: list[str]
) -> None:
    def prefill(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("viasd.runtime.target.TieredTarget.prefill", prefill)
    code, out, _ = run("--prompt", "hi", *json_flag)
    assert code == 130
    assert (json.loads(out)["finish_reason"] if json_flag else out) == ("interrupted" if json_flag else "\n")


def test_ctrl_c_while_loading(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_pair(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(viasd.load, "load_pair", load_pair)
    assert run("--prompt", "hi") == (130, "", "viasd-run: interrupted\n")


def test_a_reader_that_goes_away_is_no_drama() -> None:
    script = "import sys\nfrom viasd.runtime.cli import main\nsys.exit(main(['--list-pairs']))"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.returncode == 141


# --- errors -------------------------------------------------------------------------------------------------------

CONTRADICTIONS = [
    "--pair smollm2-lookup:135m --target X",
    "--pair smollm2-lookup:135m --drafter lookup",
    "--drafter lookup",
    "--target X --base",
    "--target X --weights hub",
    "--target smollm2:135m --drafter lookup+lookup",
    "--target smollm2:135m --drafter own.safetensors --drafter-device cpu",
    "--device cpu --device-map auto",
    "--compile --layers hf",
    "--compile --device-map auto",
    "--compile --quantization bnb-4bit",
    "--drafter-device cpu",
    "--target X --drafter self --drafter-device cpu",
    "--self-skip 0.5",
    "--prompt a --prompt-file b",
    "--system a --no-chat",
    "--lossless --mode via",
    "--lossless --mode bounded",
    "--theta-acc 0.8 --alpha1 0.3",
    "--theta-acc 0.8 --alpha2 0.3",
    "--theta-esc 0.2 --alpha1 0.3",
    "--theta-esc 0.2 --alpha2 0.3",
    "--preset paper --mode bounded --mask even:0.4",
    "--preset paper --lossless --mask even:0.4",
    "--preset paper --strategy sd",
    "--preset paper --tiers 2",
    "--preset paper --gate guarded --mask even:0.4",
    "--preset paper --gamma 4 --mask even:0.4",
    "--preset paper --theta-acc 0.8 --mask even:0.4",
    "--preset paper --theta-esc 0.4 --mask even:0.4",
    "--preset paper --alpha1 0.4 --mask even:0.4",
    "--preset paper --alpha2 0.4 --mask even:0.4",
    "--preset paper --recheck --mask even:0.4",
    "--preset paper --max-disagreement 0.1 --mask even:0.4",
    "--preset paper --mask none",
    "--preset paper --alpha 0.1 --mask even:0.4",
    "--strategy plain --gamma 3",
    "--strategy plain --draft-min-prob 0.3",
    "--strategy plain --mask even:0.4",
    "--strategy plain --mode via",
    "--strategy plain --mode bounded",
    "--strategy plain --tiers 3",
    "--strategy plain --tiers 2",
    "--strategy plain --slim-rounds 2",
    "--strategy sd --mask even:0.4",
    "--strategy sd --mode via",
    "--strategy sd --tiers 3",
    "--strategy sd --theta-acc 0.8",
    "--strategy sd --slim-rounds 2",
    "--tiers 2 --mask even:0.4",
    "--tiers 2 --mode via",
    "--tiers 2 --theta-acc 0.8",
    "--tiers 2 --slim-rounds 2 --lossless",
    "--mask none --mode via",
    "--mask none --tiers 3",
    "--mask none --strategy cascade",
    "--mask none --theta-acc 0.8",
    "--mask none --gate ratio",
    "--mask none --slim-rounds 2 --lossless",
    "--lossless --audit 0.1",
    "--lossless --recheck",
    "--lossless --no-recheck",
    "--lossless --max-disagreement 0.1",
    "--lossless --gate ratio",
    "--lossless --alpha 0.1",
    "--mode via --slim-rounds 2 --mask even:0.4",
    "--gate ratio --max-disagreement 0.1 --mask even:0.4",
    "--top-k 5",
    "--top-p 0.5",
    "--min-p 0.1 --temperature 0",
    "--readout-p 0.5",
    "--backtrack-layers 3",
    "--readout-log 5",
    "--readout trough --backtrack-layers 3 --backtrack-ratio 0.2",
    "--readout trough --strategy adadecode --heads lens:1",
    "--readout trough --readout-tier slim --strategy sd",
    "--readout trough --readout-tier slim --mask none",
    "--readout trough --readout-tier both --tiers 2",
    "--readout trough --strategy slim --mask even:0.4",
    "--readout trough --readout-unscored",
    "--readout final",
    "--list-pairs --readout trough",
    "--list-pairs --prompt hi",
    "--list-pairs --pair smollm2-lookup:135m",
]
OUT_OF_RANGE = [
    "--max-new-tokens 0",
    "--max-new-tokens x",
    "--gamma 0",
    "--temperature -1",
    "--temperature nan",
    "--temperature 1 --top-p 0",
    "--temperature 1 --top-k -1",
    "--repetition-penalty 0",
    "--theta-acc 0.4 --mask even:0.4",
    "--theta-acc 1.5 --mask even:0.4",
    "--alpha1 1.5 --mask even:0.4",
    "--mode bounded --alpha 0",
    "--max-disagreement 1 --mask even:0.4",
    "--audit nan --mask even:0.4",
    "--draft-min-prob 2",
    "--threads 0",
    "--readout valley",
    "--readout trough --readout-p 1.5",
    "--readout trough --backtrack-ratio 2",
    "--readout trough --readout-log 0",
    "--mask even:1",
    "--mask even:x",
    "--mask even:nan",
    "--mask no-such-file.json",
    "--mode fast",
    "--dtype int4",
    "--device tpu",
    "--device cuda:99",
    "--quantization int3",
    "--no-such-option",
    "--promp abbreviated",
    "--stop=",
    "--prompt=",
    "--prompt-file no-such-file.txt",
    "--prompt-file .",
]


@pytest.mark.parametrize("line", CONTRADICTIONS + OUT_OF_RANGE)
def test_bad_options_are_one_line_before_anything_is_loaded(
    line: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viasd.load, "load_pair", no_loading)
    argv = line.split()
    if "--prompt" not in line:
        argv += ["--prompt", "hi"] if "--list-pairs" not in line else []
    one_line_error(run(*argv))


def test_unknown_pair_shows_the_nearest_names(run: Run) -> None:
    error = one_line_error(run("--pair", "gemma2-2b:26b", "--prompt", "hi"))
    assert "gemma2-2b:27b" in error


def test_an_odd_argument_stays_one_line_without_escapes(run: Run) -> None:
    error = one_line_error(run("--pair", "a\nb\x1b[31m[red]c", "--prompt", "hi"))
    assert "\x1b" not in error
    one_line_error(run("--prompt", "bad \udcff bytes"))


def test_json_without_a_prompt_at_a_terminal_is_an_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    assert "--prompt" in one_line_error(run("--json"))


@pytest.mark.parametrize("data", [b"", b"\n", b"\xff\xfe"])
def test_standard_input_must_hold_some_text(data: bytes, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    one_line_error(run())


def test_closed_standard_input_is_an_empty_prompt(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert "empty" in one_line_error(run())


def test_errors_that_need_the_model(loaded: list[Any], run: Run, tmp_path: Path) -> None:
    loading = "a library prints while it loads\n"

    def error(*argv: str) -> str:
        code, out, err = run(*argv, "--quiet")
        assert (code, out) == (2, "")
        assert err.startswith(f"{loading}viasd-run: error: ")
        assert err.count("\n") == 2
        return err

    assert "512" in error("--prompt", "x" * 600)
    path = tmp_path / "mask.json"
    LayerMask((True, False, True)).save(path)
    assert "8" in error("--prompt", "x", "--mask", str(path))


def test_a_malformed_mask_file_is_noticed_before_loading(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viasd.load, "load_pair", no_loading)
    path = tmp_path / "mask.json"
    path.write_text("{")
    assert "JSON" in one_line_error(run("--prompt", "x", "--mask", str(path)))


def test_a_model_without_template_refuses_a_chat(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    bare = make_pair(tiny_model(), tokenizer)
    monkeypatch.setattr(viasd.load, "load_pair", lambda *_, **__: bare)
    one_line_error(run("--prompt", "x", "--chat"))
    one_line_error(run("--prompt", "x", "--system", "y"))
    assert run("--prompt", "x", "--max-new-tokens", "1")[0] == 0


def test_a_template_that_refuses_the_conversation_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    strict = make_pair(tiny_model(), tokenizer)
    monkeypatch.setattr(viasd.load, "load_pair", lambda *_, **__: strict)
    assert "System role" in one_line_error(run("--prompt", "x", "--system", "y"))


# --- what needs no model ------------------------------------------------------------------------------------------


def test_list_pairs_as_json_lines_and_table(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = json.loads(run("--list-pairs", "--json")[1])
    assert {"name", "drafter_ref", "target_ref", "base"} <= set(listed[0])
    lines = run("--list-pairs")[1].splitlines()
    assert [line.split("\t")[0] for line in lines] == [entry["name"] for entry in listed]
    assert len(json.loads(run("--list-pairs", "--json", "--base")[1])) != len(listed)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    table = run("--list-pairs", "--no-color")[1]
    assert "smollm2-lookup:135m (default)" in table
    assert all(entry["name"] in table for entry in listed)


def test_help_list_and_contradictions_do_not_import_torch() -> None:
    script = """
import sys
from viasd.runtime.cli import main
for argv in (["--help"], ["--list-pairs"], ["--lossless", "--mode", "via"], ["--pair", "x"], ["--version"]):
    try:
        main(argv)
    except SystemExit as leaving:
        assert leaving.code == 0
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
    assert "accepted/round" in done.stdout
    assert viasd.__version__ in done.stdout


def test_choices_are_those_of_the_configuration() -> None:
    actions = {action.dest: action.choices for action in options.build_parser()._actions}
    assert tuple(actions["mode"] or ()) == config.MODES
    assert tuple(actions["strategy"] or ()) == config.STRATEGIES
    assert tuple(actions["tiers"] or ()) == config.TIERS
    assert tuple(actions["gate"] or ()) == config.GATES
    assert tuple(actions["readout"] or ())[1:] == METHODS


# --- display ------------------------------------------------------------------------------------------------------


def terminal_screen(color: bool = True) -> tuple[Screen, io.StringIO]:
    screen, stream = Screen(), io.StringIO()
    system: Any = "standard" if color else None
    screen.out = Console(file=stream, force_terminal=True, color_system=system, highlight=False, no_color=not color)
    return screen, stream


def test_model_text_is_neither_markup_nor_escape_sequences() -> None:
    screen, stream = terminal_screen(color=False)
    screen.piece("[red]x[/red] :smile: \x1b[31mraw\x9b2J\a\r\n\ttab", "drafter")
    assert stream.getvalue() == "[red]x[/red] :smile: [31mraw2J\n" + " " * 8 + "tab"
    assert clean("a\u200d\ud7ff👩‍🚀\n") == "a\u200d\ud7ff👩‍🚀\n"


def test_tokens_are_coloured_by_tier() -> None:
    screen, stream = terminal_screen()
    for tier, code in (("drafter", 32), ("slim", 33), ("full", 36)):
        screen.piece(" word", tier)
        assert stream.getvalue().endswith(f"\x1b[{code}m word\x1b[0m")


def test_long_lines_are_not_wrapped_on_a_terminal() -> None:
    screen, stream = terminal_screen(color=False)
    screen.piece("word " * 100, "full")
    assert stream.getvalue() == "word " * 100


def test_mask_strip() -> None:
    strip = mask_strip([True, False, True], "m")
    assert "[■·■]" in strip
    assert "2 of 3" in strip
    assert "[#.#]" in mask_strip([True, False, True], "m", unicode=False)


# --- confident readouts -----------------------------------------------------------------------------------------------


def test_a_confident_target_is_named_in_every_output(run: Run, loaded: list[dict[str, Any]]) -> None:
    asked = ("--prompt", "hello hello", "--max-new-tokens", "20", "--ignore-eos", "--no-chat", "--readout", "trough")
    answers = []
    for strategy in ("plain", "sd"):
        code, out, err = run(*asked, "--backtrack-layers", "-1", "--strategy", strategy, "--json", "--check")
        assert code == 0
        answer = json.loads(out)
        assert answer["target"] == "confident readout (trough, any layer)"
        assert answer["lossless"] is True
        assert answer["check"]["equal"] is True
        assert len(answer["selected_layers"]) == 20
        assert answer["stats"]["readout"]["moved"] == sum(layer != 7 for layer in answer["selected_layers"]) > 0
        assert err.count("target: confident readout (trough, any layer), not the model's own readout") == 1
        assert f"{answer['stats']['readout']['moved']} of 20 moved" in err
        assert "equal plain greedy decoding with the confident readout" in err
        answers.append(answer)
    assert answers[0]["selected_layers"] == answers[1]["selected_layers"]
    code, out, err = run(*asked, "--quiet", "--strategy", "plain")
    assert code == 0
    assert err.splitlines()[-1].endswith(
        "the target is the confident readout (trough, up to 10 layers back), not the model's own readout"
    )
    code, out, _ = run("--prompt", "hello hello", "--max-new-tokens", "4", "--strategy", "plain", "--json")
    answer = json.loads(out)
    assert (answer["target"], answer["selected_layers"]) == ("the model's own readout", [])


def test_the_readouts_log_goes_to_stderr(run: Run, loaded: list[dict[str, Any]]) -> None:
    from viasd.runtime.readouts import LOG

    asked = (
        "--prompt",
        "hello",
        "--max-new-tokens",
        "12",
        "--ignore-eos",
        "--strategy",
        "plain",
        "--readout",
        "last-m1",
    )
    for _ in range(2):  # a second command in one process is not shown what the first one's screen was
        code, out, err = run(*asked, "--readout-log", "5", "--quiet")
        assert code == 0
        assert err.count("readout of the full verifier: step ") == 2
        assert "0 of 5 tokens kept at the last layer" in err
        assert "step" not in out
    assert not LOG.handlers
    assert "step" not in run(*asked)[2]


def test_tokens_read_out_earlier_are_shaded() -> None:
    screen, stream = terminal_screen()
    screen.out = Console(file=stream, force_terminal=True, color_system="256", highlight=False)
    codes = []
    for depth in (0, 1, 2, 3, 4, 8, 20):
        screen.piece(" word", "full", depth)
        codes.append(stream.getvalue().rpartition("\x1b[36")[2])
    assert codes[0] == "m word\x1b[0m"
    assert len(set(codes)) == 5
    assert codes[2] == codes[3]
    assert codes[5] == codes[6]
    assert all(";48;5;" in code for code in codes[1:])
    screen, stream = terminal_screen()
    screen.piece(" word", "full", 3)
    assert stream.getvalue() == "\x1b[4;36m word\x1b[0m"


# --- light heads ------------------------------------------------------------------------------------------------------


def test_adadecode_from_the_command_line(run: Run, loaded: list[dict[str, Any]]) -> None:
    asked = ("--prompt", "hello hello", "--max-new-tokens", "12", "--ignore-eos", "--no-chat", "--json")
    code, plain, _ = run(*asked, "--strategy", "plain")
    assert code == 0
    for more in (("--exit-threshold", "0.01"), ("--exit-rule", "auto"), ("--max-pending", "2")):
        code, out, err = run(*asked, "--strategy", "adadecode", "--heads", "lens:1,3,5", *more)
        answer = json.loads(out)
        assert code == 0
        assert answer["token_ids"] == json.loads(plain)["token_ids"]
        assert (answer["strategy"], answer["mode"], answer["lossless"]) == ("adadecode", "lossless", True)
        assert answer["heads"] == "lens:1,3,5"
        assert sum(answer["stats"]["early"]["pending"].values()) == answer["stats"]["rounds"]
        assert "layers/token" in err


def test_unverified_guesses_are_called_lossy_even_when_quiet(run: Run, loaded: list[dict[str, Any]]) -> None:
    asked = ("--prompt", "hello hello", "--max-new-tokens", "12", "--ignore-eos", "--no-chat", "--quiet")
    code, out, err = run(
        *asked,
        "--strategy",
        "adadecode",
        "--heads",
        "lens:1,3",
        "--exit-threshold",
        "0",
        "--verify",
        "off",
        "--check",
        "--json",
    )
    answer = json.loads(out)
    assert code == 0
    assert "LOSSY" in err
    assert "disagrees with" in err
    assert (answer["mode"], answer["lossless"]) == ("unbounded", False)
    assert "LOSSY" in answer["notes"][-1]
    assert answer["check"]["disagreed"] > 0
    audit = answer["stats"]["audit"]
    assert audit["tokens"] == answer["stats"]["drafted"] > 0


@pytest.mark.parametrize("more", [("--strategy", "plain"), ("--strategy", "sd"), ("--tiers", "2")])
def test_a_shipped_mask_is_no_obstacle_to_strategies_without_one(
    run: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    monkeypatch.setattr(viasd.load, "load_pair", lambda *args, **rest: pair)
    monkeypatch.setattr("viasd.shipped.shipped_mask", lambda name: LayerMask.even(8, 0.25))
    code, out, _ = run("--prompt", "hello", "--max-new-tokens", "3", "--no-chat", "--json", *more)
    assert code == 0
    assert json.loads(out)["mask"] is None


def test_a_prefix_mask_from_the_command_line(run: Run, loaded: list[dict[str, Any]]) -> None:
    asked = ("--prompt", "hello hello", "--max-new-tokens", "8", "--no-chat", "--json", "--lossless", "--tiers", "3")
    code, out, err = run(*asked, "--mask", "prefix:5", "--heads", "lens:3,5")
    assert code == 0
    assert json.loads(out)["mask"] == "prefix:5"
    assert "5 of 8 layers" in err


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("--strategy", "adadecode", "--pair", "qwen2.5-0.5b:7b"), "viasd-fit heads"),
        (("--strategy", "adadecode", "--heads", "nowhere"), "no file of light heads"),
        (("--strategy", "adadecode", "--heads", "lens:9,3"), "ascending"),
        (("--strategy", "adadecode", "--heads", "lens:3", "--gamma", "4"), "--gamma"),
        (("--strategy", "adadecode", "--heads", "lens:3", "--mask", "even:0.2"), "mask"),
        (("--strategy", "adadecode", "--heads", "lens:3", "--lossless", "--verify", "off"), "verify"),
        (("--strategy", "sd", "--heads", "lens:3"), "--heads"),
        (("--heads", "lens:3"), "--heads"),
        (("--mask", "even:0.2", "--heads", "lens:3"), "--heads"),
        (("--mask", "prefix:3", "--pair", "qwen2.5-0.5b:7b"), "viasd-fit heads"),
        (("--mask", "prefix:0", "--heads", "lens:3"), "prefix:E"),
        (("--mask", "prefix:x", "--heads", "lens:3"), "prefix:E"),
        (("--exit-threshold", "0.5"), "adadecode"),
    ],
)
def test_heads_that_nothing_uses_or_that_are_missing_are_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], named: str
) -> None:
    monkeypatch.setattr(viasd.load, "load_pair", no_loading)
    assert named in one_line_error(run("--prompt", "x", *argv))
