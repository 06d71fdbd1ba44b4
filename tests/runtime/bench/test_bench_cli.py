"""The command `viasd-bench` on tiny models, from options to files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import model_of, tokenizer

import viasd.load
from viasd.pair import Pair, make_pair
from viasd.runtime.bench import cli
from viasd.runtime.bench.methods import Answer, OwnMethod
from viasd.runtime.bench.peers import Peer
from viasd.testing import perturbed

Run = Callable[..., tuple[int, str, str]]
FEW = ("--max-new-tokens", "8", "--repeats", "2", "--no-chat", "--ignore-eos")


@pytest.fixture(scope="module")
def pair() -> Pair:
    small = perturbed(model_of("llama"), 0.2)
    return make_pair(model_of("llama"), tokenizer(), drafter=small, name="tiny-model:tiny", target_id="tiny")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("viasd.runtime.bench.costs._PROBE_BYTES", 1 << 20)
    monkeypatch.setattr("viasd.runtime.bench.costs._REPEATS", 2)
    lines = [
        {"question_id": 1, "category": "qa", "turns": ["hello hello"]},
        {"question_id": 2, "category": "qa", "turns": ["abc abc abc"]},
        {"question_id": 3, "category": "math", "turns": ["1 2 3 1 2 3"]},
    ]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return tmp_path


@pytest.fixture
def run(pair: Pair, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setattr(viasd.load, "load_pair", lambda *_, **__: pair)

    def _run(*argv: str) -> tuple[int, str, str]:
        code = cli.main([*argv])
        out, err = capfd.readouterr()
        return code, out, err

    return _run


def bench(run: Run, *argv: str) -> tuple[int, str, str]:
    return run("--dataset", "d.jsonl", *FEW, *argv)


def strict_lines(path: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_every_method_on_every_prompt_and_a_summary(run: Run, here: Path) -> None:
    code, out, err = bench(run, "--masks", "even:0.25", "--check", "--output", "r.jsonl", "--markdown", "r.md")
    assert code == 0
    *records, last = strict_lines(here / "r.jsonl")
    methods = ["plain", "sd", "cascade", "generate", "assisted", "lookup"]
    assert [(r["prompt"], r["method"]) for r in records] == [(p, m) for p in "123" for m in methods]
    for r in records:
        assert r["task"] == ("math" if r["prompt"] == "3" else "qa")
        assert r["tokens"] == 8
        assert len(r["seconds_all"]) == 2
        assert min(r["seconds_all"]) <= r["seconds"] <= max(r["seconds_all"])
        assert r["output"]["same_every_time"]
        assert len({x["output"]["sha256"] for x in records if x["prompt"] == r["prompt"]}) == 1
        if r["kind"] == "own":
            assert r["counts"]["emitted"] == sum(r["counts"]["by_tier"].values()) == 8
            # Of one repeat; the median of two lies between them, as far from either as the machine's other work makes it.
            assert any(sum(r["time"].values()) == pytest.approx(s, rel=1e-6) for s in r["seconds_all"])
            assert min(r["time"].values()) >= 0
            assert set(r["time"]) == {"draft", "slim", "full", "prefill", "loop"}
    summary = last["summary"]
    assert set(summary["methods"]) == set(methods)
    assert summary["tasks"]["qa"]["prompts"] == 2
    for name in methods:
        figures = summary["methods"][name]
        assert figures["tokens"] == 24
        for key in ("tokens_per_second", "ratio_to_plain", "ratio_to_generate", "full_calls_per_token"):
            assert figures[key] > 0
    assert summary["methods"]["plain"]["full_calls_per_token"] == 1
    assert summary["methods"]["generate"]["full_calls_per_token"] == 1
    assert summary["methods"]["assisted"]["full_calls_per_token"] < 1
    assert summary["methods"]["cascade"]["slim_calls_per_token"] > 0
    check = summary["check"]
    assert (check["compared"], check["mismatches"]) == (6, 0)
    assert (check["peers"]["compared"], check["peers"]["mismatches"]) == (9, 0)
    assert set(summary["costs"]["seconds"]["full"]) == {"1", "2", "6"}
    assert set(summary["costs"]["relative"]) == {"full", "slim", "drafter"}
    assert all(row["1"] == 1 for row in summary["costs"]["relative"].values())
    assert summary["bandwidth"]["limit_tokens_per_second"] > 0
    assert "sd" in summary["predictions"]
    where = summary["provenance"]
    assert where["command"].startswith("viasd-bench --dataset d.jsonl")
    assert where["masks"]["even:0.25"]["keep"].count("0") == 2
    assert {"torch", "transformers", "viasd"} == set(where["versions"])
    assert summary["dataset"]["name"] == "d.jsonl"
    for text in (out, (here / "r.md").read_text()):
        for words in (
            "## qa (2 prompts)",
            "## math (1 prompt)",
            "## all tasks (3 prompts)",
            "| plain ",
            "memory limit:",
        ):
            assert words in text
        assert "token counted; plain decoding has 1" in text
    assert "prompt 3 of 3: math 3" in err


def test_json_is_the_summary_and_slower_is_said(run: Run) -> None:
    code, out, err = bench(run, "--strategies", "sd", "--peers", "none", "--gammas", "2,4", "--limit", "1", "--json")
    assert code == 0
    summary = json.loads(out)
    assert list(summary["methods"]) == ["plain", "sd/gamma2", "sd/gamma4"]
    assert summary["check"] is None
    assert summary["prompts"] == 2
    assert "plain decoding is measured too" in err
    assert set(summary["costs"]["seconds"]["full"]) == {"1", "2", "3", "5"}


def test_what_is_slower_than_plain_is_said() -> None:
    from viasd.runtime.bench.report import slower_lines

    def figures(ratio: float) -> dict[str, Any]:
        return {"plain": {"ratio_to_plain": 1.0}, "sd": {"ratio_to_plain": ratio}}

    slow = {"methods": figures(0.9), "tasks": {"qa": {"methods": figures(0.8)}, "rag": {"methods": figures(1.2)}}}
    assert slower_lines(slow) == ["sd is SLOWER than plain decoding: 0.90x overall (qa 0.80x)"]
    mixed = {"methods": figures(1.1), "tasks": {"qa": {"methods": figures(0.8)}}}
    assert slower_lines(mixed) == ["sd is slower than plain decoding on some tasks: qa 0.80x"]
    assert slower_lines({"methods": figures(1.1), "tasks": {"qa": {"methods": figures(1.2)}}}) == []


def interrupt(monkeypatch: pytest.MonkeyPatch, after: int) -> list[int]:
    """Ctrl-C at an answer of ours, after so many."""
    original, done = OwnMethod.answer, [0]

    def answer(self: OwnMethod, ids: Any) -> Answer:
        done[0] += 1
        if done[0] > after:
            raise KeyboardInterrupt
        return original(self, ids)

    monkeypatch.setattr(OwnMethod, "answer", answer)
    return done


def test_ctrl_c_keeps_what_is_done_and_the_same_command_goes_on(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("--strategies", "plain,sd", "--peers", "generate", "--warmup", "0", "--output", "r.jsonl")
    with monkeypatch.context() as patch:
        interrupt(patch, 6)  # four answers a prompt: in the middle of the second
        code, out, err = bench(run, *command)
    assert (code, out) == (130, "")
    assert "interrupted after 1 of 3 prompts; they are in r.jsonl, and the same command goes on" in err
    before = strict_lines(here / "r.jsonl")
    assert [r["prompt"] for r in before] == ["1"] * 3
    with (here / "r.jsonl").open("a") as stream:  # and a crash would have left this
        stream.write(json.dumps({**before[0], "prompt": "2"}) + '\n{"meth')
    done = interrupt(monkeypatch, 8)
    code, out, err = bench(run, *command)
    assert code == 0
    assert done == [8]  # two prompts, not three
    assert "1 of 3 prompts were measured before; going on from there" in err
    assert "ended in the middle of a prompt" in err
    *records, last = strict_lines(here / "r.jsonl")
    assert records[:3] == before
    assert [r["prompt"] for r in records] == ["1"] * 3 + ["2"] * 3 + ["3"] * 3
    assert last["summary"]["prompts"] == 3
    # Once more: nothing is left to do, and the report is the same.
    content = (here / "r.jsonl").read_bytes()
    code, again, err = bench(run, *command)
    assert (code, again) == (0, out)
    assert "3 of 3 prompts were measured before" in err
    assert (here / "r.jsonl").read_bytes() == content
    code, out, err = bench(run, *command, "--gammas", "3")
    assert (code, out) == (2, "")
    assert "holds results of other settings (methods" in err
    assert (here / "r.jsonl").read_bytes() == content


def test_ctrl_c_without_a_file_says_what_is_lost(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(monkeypatch, 3)
    code, _, err = bench(run, "--strategies", "plain", "--peers", "none", "--warmup", "0")
    assert code == 130
    assert "interrupted after 1 of 3 prompts; without --output they are lost" in err


def test_a_failing_method_is_recorded_left_out_and_told(run: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Peer.answer

    def answer(self: Peer, ids: Any) -> Answer:
        if self.spec.name == "lookup" and len(ids) == 11:
            raise RuntimeError("a peer\nbreaks")
        return original(self, ids)

    monkeypatch.setattr(Peer, "answer", answer)
    code, out, _ = bench(run, "--strategies", "plain", "--peers", "generate,lookup", "--output", "r.jsonl")
    assert code == 1
    *records, last = strict_lines(here / "r.jsonl")
    failed = [r for r in records if "error" in r]
    assert {(r["method"], r["error"]) for r in failed} == {("lookup", "RuntimeError: a peer breaks")}
    assert len(failed) == 3 - last["summary"]["methods"]["lookup"]["prompts"] > 0
    assert not any({"tokens", "seconds"} & r.keys() for r in failed)
    assert f"lookup FAILED on {len(failed)} of 3 prompts" in out


def test_a_prompt_that_does_not_fit_is_recorded_and_the_others_go_on(run: Run, here: Path) -> None:
    with (here / "d.jsonl").open("a") as stream:
        stream.write(json.dumps({"question": "x" * 600}) + "\n")
    code, out, _ = bench(run, "--strategies", "sd", "--peers", "none", "--repeats", "1", "--output", "r.jsonl")
    assert code == 1
    assert "plain FAILED on 1 of 4 prompts" in out
    last = strict_lines(here / "r.jsonl")[-2]
    assert last["error"].startswith("ContextLengthError: the prompt has 600 tokens")


def test_a_wrong_token_is_a_bug_and_an_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    original = OwnMethod.answer

    def answer(self: OwnMethod, ids: Any) -> Answer:
        found = original(self, ids)
        if self.spec.name == "sd":
            found.tokens[3] = (found.tokens[3] + 7) % 300
        return found

    monkeypatch.setattr(OwnMethod, "answer", answer)
    code, out, _ = bench(run, "--strategies", "plain,sd", "--peers", "none", "--check", "--limit", "1")
    assert code == 1
    assert "2 lossless outputs of ours compared with plain greedy decoding, 2 differ (0 near-ties" in out
    assert "is a BUG" in out


def test_lossy_modes_their_distance_and_their_baselines(run: Run, here: Path) -> None:
    argv = ("--modes", "lossless,bounded,via-ratio", "--masks", "even:0.25", "--alpha", "0.5", "--peers", "none")
    code, out, err = bench(run, *argv, "--limit", "1", "--baselines", "--json", "--output", "r.jsonl")
    assert code == 0
    summary = json.loads(out)
    assert list(summary["methods"]) == [
        *(
            "plain",
            "sd",
            "sd/bounded",
            "cascade",
            "cascade/bounded",
            "cascade/via-ratio",
            "sd/gamma2",
            "sd/gamma5",
            "sd/gamma8",
        ),
        *("lossy/alpha0.1", "lossy/alpha0.3", "lossy/alpha0.5", "slim"),
        *("cascade/bounded/random-mask", "cascade/via-ratio/random-mask"),
    ]
    assert "left out: sd/via-ratio (mode via needs three tiers" in err
    assert "truncated at the same theta is plain greedy decoding at temperature 0" in err
    for name, figures in summary["methods"].items():
        lossy = not (name in ("plain", "sd", "cascade") or name.startswith("sd/gamma"))
        assert ("disagreement" in figures) == lossy
        if lossy:
            assert 0 <= figures["disagreement"] <= 1
            assert figures["mean_log_q"] < 0
    assert summary["best_strict_sd"] in ("sd", "sd/gamma2", "sd/gamma5", "sd/gamma8")
    masks = summary["provenance"]["masks"]
    assert [m["skip_ratio"] for m in masks.values()] == [0.25, 0.25]
    assert masks["even:0.25"]["keep"] != masks["random:6of8:seed0"]["keep"]
    records = strict_lines(here / "r.jsonl")[:-1]
    slim = next(r for r in records if r["method"] == "slim")
    assert slim["lossy"]["compared"] == slim["tokens"]
    assert slim["counts"]["by_tier"]["slim"] == slim["tokens"]


def test_sampling_has_its_own_baseline_and_no_check(run: Run) -> None:
    argv = ("--strategies", "cascade", "--modes", "via", "--masks", "even:0.25", "--temperature", "1.0", "--limit", "1")
    code, out, _ = bench(run, *argv, "--baselines", "--peers", "generate,assisted", "--json")
    assert code == 0
    summary = json.loads(out)
    assert "sd/min-p0.7" in summary["methods"]
    assert summary["methods"]["sd/min-p0.7"]["disagreement"] is None
    assert summary["methods"]["cascade/via"]["mean_log_q"] < 0
    assert bench(run, "--temperature", "1.0", "--check")[0] == 2


def test_other_strategies_and_what_the_pair_can_not_do(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ("--masks", "even:0.25", "--limit", "1", "--repeats", "1")
    names = "self-sd,vertical,horizontal,chow,token-v3,lossy,auto"
    code, out, _ = bench(run, "--strategies", names, "--peers", "none", *argv, "--check", "--json")
    assert code == 0
    summary = json.loads(out)
    assert list(summary["methods"]) == ["plain", *names.split(",")]
    assert summary["check"]["compared"] == 8
    assert summary["check"]["mismatches"] == 0
    lookup = make_pair(model_of("llama"), tokenizer(), name="tiny-lookup:tiny", target_id="tiny")
    monkeypatch.setattr(viasd.load, "load_pair", lambda *_, **__: lookup)
    code, out, err = bench(run, "--strategies", "chow,sd", "--peers", "assisted,lookup", *argv, "--json")
    assert code == 0
    assert list(json.loads(out)["methods"]) == ["plain", "sd", "lookup"]
    assert "left out: chow (strategy chow reads the drafter's own probabilities" in err
    assert "left out: peer assisted (assisted generation needs a drafter model, and tiny-lookup:tiny drafts by" in err


def test_a_cascade_without_a_mask_gets_a_stand_in_or_is_left_out(run: Run) -> None:
    argv = ("--strategies", "cascade", "--peers", "none", "--limit", "1", "--repeats", "1", "--json")
    _, out, err = bench(run, *argv)
    assert "no mask is shipped for tiny-model:tiny: strategy cascade uses even:0.45" in err
    assert list(json.loads(out)["methods"]) == ["plain", "cascade"]
    _, out, err = bench(run, *argv, "--masks", "none")
    assert "left out: cascade (a slim verifier needs a mask" in err
    assert list(json.loads(out)["methods"]) == ["plain"]
    several = bench(run, *argv, "--masks", "even:0.25,even:0.5")[1]
    assert list(json.loads(several)["methods"])[1:] == ["cascade/even:0.25", "cascade/even:0.5"]


def test_a_figure(run: Run, here: Path) -> None:
    pytest.importorskip("matplotlib")
    argv = (
        "--strategies",
        "sd",
        "--modes",
        "lossless,bounded",
        "--peers",
        "generate",
        "--limit",
        "1",
        "--repeats",
        "1",
    )
    assert bench(run, *argv, "--plot", "f.png")[0] == 0
    assert (here / "f.png").read_bytes().startswith(b"\x89PNG")


def test_two_files_side_by_side(run: Run, here: Path) -> None:
    argv = ("--strategies", "sd", "--peers", "none", "--repeats", "1")
    bench(run, *argv, "--output", "a.jsonl")
    bench(run, *argv, "--output", "b.jsonl", "--gammas", "3")
    bench(run, *argv, "--output", "c.jsonl", "--limit", "1")
    code, out, err = run("compare", "a.jsonl", "b.jsonl")
    assert code == 0
    assert "differs: method sd is configured differently" in err
    assert "| sd " in out
    assert "second/first" in out
    assert json.loads(run("compare", "a.jsonl", "a.jsonl", "--json")[1])["methods"]["sd"]["second_over_first"] == 1
    code, out, err = run("compare", "a.jsonl", "c.jsonl")
    assert (code, out) == (2, "")
    assert "measured on different things: a different choice of prompts (--limit). --force compares" in err
    assert run("compare", "a.jsonl", "c.jsonl", "--force")[0] == 0
    for bad in ("d.jsonl", "none.jsonl"):
        code, out, err = run("compare", "a.jsonl", bad)
        assert (code, out, err.count("\n")) == (2, "", 1)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--strategies", "plain,fast"), "strategies must be of auto, plain, .*, but got 'fast'"),
        (("--strategies", "plain,,sd"), "--strategies takes a comma-separated list"),
        (("--peers", "vllm"), "peers must be of generate, assisted, lookup, but got 'vllm'"),
        (("--modes", "exact"), "modes must be of lossless"),
        (("--gammas", "2,x"), "--gammas takes whole numbers"),
        (("--gammas", "0"), "gammas must be at least 1, but got 0"),
        (("--repeats", "0"), "repeats must be at least 1"),
        (("--warmup", "-1"), "warmup must be at least 0"),
        (("--limit", "0"), "--limit must be at least 1"),
        (("--alpha", "2"), "alpha must be above 0 and below 1"),
        (("--alpha", "0.2"), "alpha is for bounded mode and lossy strategies, and there is neither"),
        (("--temperature", "-1"), "temperature must be 0"),
        (("--temperature", "nan"), "temperature must be 0"),
        (("--max-new-tokens", "0"), "max_new_tokens must be at least 1"),
        (("--check", "--temperature", "1"), "check needs temperature 0"),
        (("--dataset", "missing.jsonl"), "can't read data set 'missing.jsonl'"),
        (("--pair", "nonsense"), "a pair must be FAMILY-DRAFTER:TARGET"),
        (("--output", "no/such/folder.jsonl"), "there is no folder"),
        (("--plot", "."), "--plot must be a file"),
        (("--masks", "none.json"), "no mask file at 'none.json'"),
        (("--speed",), "unrecognized arguments: --speed"),
        (("compare", "a"), "the following arguments are required"),
    ],
)
def test_bad_options_are_one_line_before_anything_is_loaded(
    run: Run, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], message: str
) -> None:
    def never(*_: Any, **__: Any) -> Pair:
        raise AssertionError("nothing may be loaded")

    monkeypatch.setattr(viasd.load, "load_pair", never)
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert __import__("re").search(f"viasd-bench: error: .*{message}", err)


def test_a_bad_mask_is_one_line(run: Run) -> None:
    for spec, message in (("even:1.5", "skip ratio must be"), ("d.jsonl", "is not JSON")):
        code, out, err = bench(run, "--masks", spec)
        assert (code, out) == (2, "")
        assert message in err.splitlines()[-1]
