from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import pair_of, prompt_ids

import viasd
import viasd.load
from viasd.confident import ConfidentConfig
from viasd.errors import OptionError
from viasd.identity import ModelIdentity
from viasd.mask import LayerMask
from viasd.pair import Pair, make_pair
from viasd.runtime import cli
from viasd.runtime.engine import Engine
from viasd.runtime.promptfile import RESULT_KEYS
from viasd.runtime.readouts import recorded
from viasd.stitch import Stitch
from viasd.stitches import Stitches
from viasd.testing import byte_tokenizer, tiny_model

Run = Callable[..., tuple[int, str, str]]
LINES: list[dict[str, Any]] = [
    {"prompt": "once upon", "id": "a"},
    {"messages": [{"role": "user", "content": "hello"}], "max_new_tokens": 30},
    {"prompt": "x", "temperature": 0.7, "seed": 3, "max_new_tokens": 12},
    {"prompt": "a longer prompt than the others", "stop": ["a", "e"], "topic": {"deep": [1, 2]}},
    {"prompt": "once upon", "max_new_tokens": 3, "id": "b"},
]


# --- a list for `generate` ------------------------------------------------------------------------------------------


def test_a_list_of_prompts_gives_a_list_of_results() -> None:
    pair = pair_of("llama", "model")
    texts = ["one", "two and more", "three"]
    for options in ({"strategy": "sd"}, {"strategy": "cascade", "mask": "even:0.25", "tiers": "3"}):
        results = viasd.generate(pair, texts, max_new_tokens=12, seed=1, temperature=0.5, **options)
        for text, result in zip(texts, results, strict=True):
            alone = viasd.generate(pair, text, max_new_tokens=12, seed=1, temperature=0.5, **options)
            assert (result.text, result.token_ids) == (alone.text, alone.token_ids)
    chats = [[{"role": "user", "content": text}] for text in texts]
    for chat, result in zip(chats, viasd.generate(pair, chats, max_new_tokens=8, mask=None), strict=True):
        assert result.text == viasd.generate(pair, chat, max_new_tokens=8, mask=None).text
    ids = [prompt_ids(text) for text in texts]
    assert [r.prompt_tokens for r in viasd.generate(pair, ids, max_new_tokens=1, mask=None)] == [3, 12, 5]


class Every:
    """A stateful processor: bans the token it saw chosen last."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, ids: Any, logits: torch.Tensor) -> torch.Tensor:
        self.seen.append(int(ids[0, -1]))
        logits[:, list(self.seen)] = -torch.inf
        return logits


def test_each_prompt_of_a_list_has_its_own_copy_of_a_processor() -> None:
    pair, mine = pair_of("llama", "model"), Every()
    options = {"max_new_tokens": 10, "mask": None, "ignore_eos": True}
    results = viasd.generate(pair, ["one", "two"], processors=[mine], **options)
    assert mine.seen == []
    for text, result in zip(["one", "two"], results, strict=True):
        assert result.token_ids == viasd.generate(pair, text, processors=[Every()], **options).token_ids


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        (["a", ""], {}, "prompt 1 of 2: the prompt is empty"),
        (["a", 5], {}, "prompt 1 of 2 is a int"),
        (["a", "b"], {"strategy": "adadecode"}, "prompt 0 of 2: strategy adadecode runs its tokens"),
        (["a", "b"], {"concurrency": 0}, "concurrency must be at least 1"),
        ("a", {"concurrency": 2}, "concurrency is for several prompts"),
        (["a"], {"guard": object()}, "a guard learns from one answer after the other"),
        (["a"], {"strategy": "sd", "mask": "even:0.5"}, "a mask is for a slim verifier"),
    ],
)
def test_what_a_list_can_not_have_is_said_before_anything_runs(prompts: Any, options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        viasd.generate(pair_of("llama"), prompts, **{"mask": None, **options})


# --- viasd-run --prompts --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> Pair:
    return make_pair(tiny_model(), byte_tokenizer(), name="tiny", target_id="tiny-target")


@pytest.fixture
def run(pair: Pair, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(viasd.load, "load_pair", lambda *_, **__: pair)

    def _run(*argv: str) -> tuple[int, str, str]:
        code = cli.main(["--mask", "none", "--no-chat", "--max-new-tokens", "9", *argv])
        out, err = capfd.readouterr()
        return code, out, err

    return _run


def write(path: Path, lines: list[Any]) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    return write(tmp_path / "prompts.jsonl", [line for line in LINES if "prompt" in line])


TEXTS = [line for line in LINES if "prompt" in line]


def test_answers_come_in_the_order_of_the_lines(run: Run, prompts: str, pair: Pair) -> None:
    code, out, err = run("--prompts", prompts, "--concurrency", "2", "--json")
    assert code == 0
    answers = [json.loads(line) for line in out.splitlines()]
    assert len(answers) == len(TEXTS)
    for line, answer in zip(TEXTS, answers, strict=True):
        options = {k: v for k, v in line.items() if k in ("temperature", "seed", "stop", "max_new_tokens")}
        alone = viasd.generate(pair, line["prompt"], mask=None, **{"max_new_tokens": 9, **options})
        assert (answer["text"], answer["token_ids"]) == (alone.text, alone.token_ids)
        assert {k: answer[k] for k in line if k in ("id", "topic")} == {
            k: line[k] for k in line if k in ("id", "topic")
        }
    assert set(answers[0]) == {*RESULT_KEYS, "id"} - {"line", "request"}
    assert "4 answers" in err
    assert "up to 2 at once" in err


def test_a_file_of_prompts_reads_out_as_it_is_told(run: Run, prompts: str, pair: Pair) -> None:
    code, out, err = run("--prompts", prompts, "--json", "--readout", "trough", "--readout-log", "3")
    assert code == 0
    for line, answer in zip(TEXTS, map(json.loads, out.splitlines()), strict=True):
        options = {k: v for k, v in line.items() if k in ("temperature", "seed", "stop", "max_new_tokens")}
        alone = viasd.generate(pair, line["prompt"], mask=None, readout="trough", **{"max_new_tokens": 9, **options})
        assert (answer["token_ids"], answer["selected_layers"]) == (alone.token_ids, alone.selected_layers)
        assert answer["target"] == alone.target
    for number in range(1, len(TEXTS) + 1):
        assert f"line {number}: readout of the full verifier: step 3" in " ".join(err.split())


def test_messages_go_through_the_template_and_prompts_as_messages_where_it_is_used(
    pair: Pair, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(viasd.load, "load_pair", lambda *_, **__: pair)
    path = write(tmp_path / "p.jsonl", [LINES[1], {"prompt": "hello", "max_new_tokens": 30}])
    assert cli.main(["--mask", "none", "--prompts", path, "--json"]) == 0
    first, second = (json.loads(line) for line in capfd.readouterr().out.splitlines())
    assert first["token_ids"] == second["token_ids"]
    alone = viasd.generate(pair, LINES[1]["messages"], mask=None, max_new_tokens=30)
    assert first["text"] == alone.text


def test_without_json_texts_are_shown(run: Run, prompts: str) -> None:
    _, out, _ = run("--prompts", prompts, "--json")
    texts = [json.loads(line)["text"] for line in out.splitlines()]
    code, out, _ = run("--prompts", prompts)
    assert code == 0
    assert out == "".join(f"--- {i} ---\n{text}\n" for i, text in enumerate(texts, start=1))


@pytest.mark.parametrize("torn", [0, 1, 40])
def test_an_output_file_goes_on_where_it_stopped(
    run: Run, prompts: str, tmp_path: Path, torn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole.jsonl"
    code, out, _ = run("--prompts", prompts, "--output", str(whole))
    assert (code, out) == (0, "")
    lines = whole.read_text().splitlines()
    assert [json.loads(line)["line"] for line in lines] == [1, 2, 3, 4]
    path = tmp_path / "part.jsonl"
    # As a crash leaves it: in the order in which they were done, the last one half-written.
    torn_line = lines[1][:-torn] if torn else ""
    path.write_text("\n".join([lines[2], lines[0], torn_line]))
    asked: list[Any] = []
    add = Engine.add
    monkeypatch.setattr(
        Engine, "add", lambda self, prompt, **rest: (asked.append(prompt), add(self, prompt, **rest))[1]
    )
    code, _, err = run("--prompts", prompts, "--output", str(path))
    assert code == 0
    assert asked == [TEXTS[1]["prompt"], TEXTS[3]["prompt"]]
    assert "2 of 4 prompts were answered before" in err
    assert ("is made anew" in err) == (torn > 0)
    again = [json.loads(line) for line in path.read_text().splitlines()]
    first = [json.loads(line) for line in lines]
    assert [(a["line"], a["text"]) for a in again] == [(a["line"], a["text"]) for a in first]
    before = path.read_bytes()
    assert run("--prompts", prompts, "--output", str(path))[0] == 0
    assert path.read_bytes() == before


def test_ctrl_c_keeps_what_is_done(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = write(tmp_path / "p.jsonl", [{k: v for k, v in line.items() if k != "stop"} for line in TEXTS])
    path = tmp_path / "out.jsonl"
    step, steps = Engine.step, []

    def interrupted(self: Any) -> Any:
        steps.append(None)
        if len(steps) == 5:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted)
    code, out, err = run("--prompts", prompts, "--output", str(path), "--strategy", "plain", "--ignore-eos")
    assert (code, out) == (130, "")
    assert "interrupted after 1 of 4 prompts; they are in" in err
    assert [json.loads(line)["line"] for line in path.read_text().splitlines()] == [4]  # the one of three tokens
    monkeypatch.setattr(Engine, "step", step)
    assert run("--prompts", prompts, "--output", str(path), "--strategy", "plain", "--ignore-eos")[0] == 0
    assert len(path.read_text().splitlines()) == 4
    steps.clear()
    monkeypatch.setattr(Engine, "step", interrupted)
    code, out, err = run("--prompts", prompts, "--json", "--strategy", "plain", "--ignore-eos")
    assert code == 130
    assert len(json.loads(out)["token_ids"]) == 3
    assert "with --output FILE the same command could go on" in err


def test_a_request_that_fails_is_told_and_made_anew_the_next_time(
    run: Run, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import viasd.runtime.engine.request as request

    begin = request.Request.begin_round

    def failing(self: Any) -> None:
        if self.number == 1:
            raise ValueError("broken")
        begin(self)

    monkeypatch.setattr(request.Request, "begin_round", failing)
    path = tmp_path / "out.jsonl"
    code, _, err = run("--prompts", prompts, "--output", str(path))
    assert code == 1
    assert "line 2: ValueError: broken" in err
    assert [json.loads(line)["finish_reason"] == "error" for line in path.read_text().splitlines()] == [0, 1, 0, 0]
    monkeypatch.setattr(request.Request, "begin_round", begin)
    assert run("--prompts", prompts, "--output", str(path))[0] == 0
    assert not any(json.loads(line)["error"] for line in path.read_text().splitlines())


def test_bad_lines_are_named_before_anything_is_loaded(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_loading(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing may be loaded")

    monkeypatch.setattr(viasd.load, "load_pair", no_loading)
    bad = [
        ({"prompt": ""}, 'line 2: "prompt" must be text'),
        ("[1]", "line 2: expected a JSON object"),
        ('{"prompt": "a"', "line 2: "),
        ({"prompt": "a", "messages": []}, 'line 2: expected either "prompt" or "messages"'),
        ({"messages": [{"role": "user"}]}, 'line 2: "messages" must be a list of objects'),
        ({"prompt": "a", "max_new_tokens": True}, 'line 2: "max_new_tokens" must be a whole number, but is true'),
        ({"prompt": "a", "stop": [1]}, 'line 2: "stop" must be text or a list of texts'),
        ({"prompt": "a", "strategy": "plain"}, 'line 2: "strategy" is a key of the answer'),
        ("[" * 100_000, "line 2 is nested too deeply"),
    ]
    for line, message in bad:
        path = write(tmp_path / "bad.jsonl", [LINES[0], line, "", LINES[2]])
        assert cli.main(["--prompts", path]) == 2
        err = capfd.readouterr().err
        assert message in err
        assert err.count("\n") == 1
    path = write(tmp_path / "bad.jsonl", [{"x": 1}, *LINES, *["{"] * 7])
    assert cli.main(["--prompts", path]) == 2
    assert "line 1: " in (err := capfd.readouterr().err)
    assert "line 10: " in err
    assert "and 3 more" in err
    for argv, message in [
        (["--prompts", write(tmp_path / "none.jsonl", [""])], "has no prompts"),
        (["--prompts", str(tmp_path / "absent")], "can't read the prompts"),
        (["--prompts", path, "--prompt", "a"], "contradict each other"),
        (["--prompts", path, "--check"], "contradict each other"),
        (["--prompts", path, "--output", "x", "--json"], "contradict each other"),
        (["--prompts", path, "--concurrency", "0"], "--concurrency must be at least 1"),
        (["--prompts", path, "--kv-budget", "0"], "--kv-budget must be above 0"),
        (["--prompts", path, "--output", str(tmp_path / "no" / "x")], "there is no folder"),
        (["--prompts", path, "--strategy", "adadecode", "--heads", "lens:2"], "one --prompt at a time"),
        (["--prompt", "a", "--concurrency", "3"], "add --prompts FILE"),
    ]:
        assert cli.main(argv) == 2
        assert message in capfd.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "a", "temperature": -1}, "line 2: temperature must be"),
        ({"prompt": "a" * 600}, "line 2: the prompt has 600 tokens"),
        ({"messages": [{"role": "user", "content": "a"}]}, 'line 2: "messages" is a chat, but --no-chat'),
    ],
)
def test_what_only_the_model_can_tell_is_said_before_anything_runs(
    run: Run, tmp_path: Path, line: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(self: Any) -> Any:
        raise AssertionError("a step")

    monkeypatch.setattr(Engine, "step", never)
    path = write(tmp_path / "p.jsonl", [LINES[0], line])
    code, out, err = run("--prompts", path)
    assert (code, out) == (2, "")
    assert message in err


def test_memory_that_can_never_hold_a_line_is_said_with_its_number(run: Run, prompts: str) -> None:
    code, _, err = run("--prompts", prompts, "--kv-budget", "0.0001")
    assert code == 2
    assert "line 1: the request can need" in err
    assert "kv_budget is 0.1 MB" in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1}\n', "line 1 is no answer of viasd-run"),
        ("text\n", "line 1 is no answer of viasd-run"),
        ('{"line": 1, "request": "x", "finish_reason": "eos"}\n', "holds answers to other prompts or settings"),
    ],
)
def test_an_output_file_of_something_else_is_left_alone(
    run: Run, prompts: str, tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(content)
    code, _, err = run("--prompts", prompts, "--output", str(path))
    assert code == 2
    assert message in err
    assert path.read_text() == content


def test_other_settings_are_no_continuation(run: Run, prompts: str, tmp_path: Path) -> None:
    path = str(tmp_path / "out.jsonl")
    assert run("--prompts", prompts, "--output", path)[0] == 0
    assert "other prompts or settings" in run("--prompts", prompts, "--output", path, "--temperature", "0.5")[2]


@pytest.mark.parametrize("changed", ["guard", "readout", "stitches", "quantization", "weights", "nothing"])
def test_answers_of_another_mask_or_other_weights_are_no_continuation(
    changed: str, run: Run, prompts: str, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = LayerMask.even(pair.target.n_layers, 0.25)
    target = ModelIdentity.of(pair.target, "tiny-target")
    stitch = Stitch((torch.zeros(32, 32),), torch.zeros(32))
    others = {
        "guard": replace(mask, details={"guard": {"slope": 1.0}}),
        "readout": replace(mask, details=recorded(ConfidentConfig("trough", 1.0, 2))),
        "stitches": replace(mask, stitches=Stitches({mask.route.gaps[0][1]: stitch}, target, mask.keep)),
    }
    path, file = str(tmp_path / "out.jsonl"), str(tmp_path / "mask.json")
    argv = ["--prompts", prompts, "--output", path, "--mask", file, "--tiers", "3", "--lossless"]
    mask.save(file)
    assert run(*argv)[0] == 0
    others.get(changed, mask).save(file)
    if changed == "weights":
        monkeypatch.setattr(viasd.load, "load_pair", lambda *_, **__: replace(pair, source="packaged"))
    code, _, err = run(*argv, *(["--quantization", "int8"] if changed == "quantization" else []))
    assert ("other prompts or settings" in err) == (changed != "nothing")
    assert code == (0 if changed == "nothing" else 2)


def test_lossy_answers_are_never_silent(run: Run, prompts: str) -> None:
    argv = ["--mask", "even:0.25", "--tiers", "3", "--mode", "via", "--gate", "ratio", "--quiet"]
    code, _, err = run("--prompts", prompts, *argv)
    assert code == 0
    assert "LOSSY: 4 of 4 answers" in err
