from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from features import feature_file
from tiny import save_target

import viasd
import viasd.load
import viasd.mask
import viasd.search.cli as cli
from viasd.errors import WeightsError
from viasd.runtime import figures
from viasd.search.scorer import Scorer

Run = Callable[..., tuple[int, str, str]]
FEW = ("--skip", "0.4", "--trials", "6", "--controls", "4", "--tau", "48", "--device", "cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VIASD_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def run(folder: str, capfd: pytest.CaptureFixture[str]) -> Run:
    def _run(*argv: str, target: bool = True) -> tuple[int, str, str]:
        code = cli.main([*argv, *(["--target", folder, *FEW] if target else [])])
        out, err = capfd.readouterr()
        return code, out, err

    return _run


def one_line(result: tuple[int, str, str]) -> str:
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.startswith("viasd-search: error: ")
    assert err.count("\n") == 1
    return err


def interrupt_after(monkeypatch: pytest.MonkeyPatch, masks: int) -> None:
    """Ctrl-C while the mask after so many is being scored."""
    original, done = Scorer.score, [0]

    def score(self: Scorer, *rest: Any) -> Any:
        done[0] += 1
        if done[0] == masks + 1:
            raise KeyboardInterrupt
        return original(self, *rest)

    monkeypatch.setattr(Scorer, "score", score)


def test_from_a_folder_to_a_mask_that_generation_uses(run: Run, folder: str, here: Path) -> None:
    code, out, err = run("--drafter", "self")
    assert code == 0
    assert "6 of 6 masks that skip 3 of 8 layers evaluated" in out
    for words in ("best found", "even-spaced", "best of 4 random", "recommendation: ", "Delta ", "masks/minute"):
        assert words in out
    assert "mask written to tiny-target.skip40.json" in err
    mask = viasd.LayerMask.load(here / "tiny-target.skip40.json")
    assert mask.keep.count(False) == 3
    details = mask.details
    assert details["trials"] == 6
    assert details["cost"] == details["report"]["cost"]
    assert set(details["versions"]) == {"viasd", "torch", "transformers", "optuna"}
    assert (details["alpha"], details["beta"], details["tau"], details["theta"], details["gamma"]) == (
        0.5,
        0.5,
        48,
        10,
        5,
    )
    assert details["calibration"]["name"] == "self"
    assert details["tier"]["pays"] in (True, False)
    pair = viasd.load_pair(target=folder, drafter="self")
    answer = viasd.generate(pair, "hello", mask=mask, strategy="cascade", mode="via", tiers="3", max_new_tokens=12)
    assert answer.mask == "tiny-target.skip40"
    assert not any("weights" in note for note in answer.notes)


def test_the_guards_start_is_stored_and_used(run: Run, folder: str, here: Path) -> None:
    run("--drafter", "self", "--tau", "320", "--quiet", "--output", "m.json")
    # FEW comes last and sets tau 48: too little for start values.
    assert "guard" not in json.loads((here / "m.json").read_text())
    argv = ["--target", folder, *FEW[:-4], "--tau", "320", "--device", "cpu", "--drafter", "self", "--quiet"]
    assert cli.main([*argv, "--output", "n.json"]) == 0
    details = viasd.LayerMask.load("n.json").details
    assert details["guard_reliability"]["n"] >= 200
    assert details["guard_reliability"]["stored"] == ("guard" in details)
    if "guard" in details:
        pair = viasd.load_pair(target=folder, drafter="self")
        mask = viasd.LayerMask.load("n.json")
        stream = viasd.stream(pair, "hello", mask=mask, strategy="cascade", mode="via", tiers="3", max_new_tokens=8)
        list(stream)
        assert stream.session.guard is not None
        assert stream.session.guard.ready


def test_json_is_one_strict_object(run: Run) -> None:
    code, out, _ = run("--json", "--quiet")

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    found = json.loads(out, parse_constant=refuse)
    assert code == 0
    assert out.count("\n") == 1
    assert set(found) >= {"best", "trials", "cost", "kl", "agreement", "controls", "tier", "seconds", "beats_random"}
    assert found["trials"] == len(found["trace"]) == 6
    assert found["best"]["keep"].count(0) == 3
    assert len(found["importance"]) == 8
    assert found["controls"]["random_masks"] == 4
    assert found["controls"]["random_best"]["report"]["cost"] >= 0


def test_quiet_says_nothing_and_the_same_command_again_scores_nothing(run: Run) -> None:
    first = run("--json", "--quiet")
    again = run("--json", "--quiet")
    assert (first[2], again[2]) == ("", "")
    one, two = json.loads(first[1]), json.loads(again[1])
    assert two["masks_per_minute"] is None
    for same in ("trace", "cost", "controls"):
        assert one[same] == two[same]
    assert one["best"]["keep"] == two["best"]["keep"]


def test_half_layers(run: Run) -> None:
    code, out, err = run("--sublayers")
    assert code == 0
    assert "masks that skip 6 of 16 half layers" in out
    assert "mask written to tiny-target.skip40-sublayers.json" in err
    shown = run("show", "tiny-target.skip40-sublayers.json", target=False)[1]
    halves = json.loads(Path("tiny-target.skip40-sublayers.json").read_text()).get("sublayers")
    assert ("attention only" in shown) == (halves is not None)


def test_layers_before_light_heads_are_ranked_beside_the_mask(run: Run, here: Path) -> None:
    code, out, _ = run("--heads", "lens:2,6", "--output", "m.json")
    assert code == 0
    rows = [line.split() for line in out.splitlines() if " accept mass " in line]
    assert sorted(row[0] for row in rows) == ["prefix:2", "prefix:6", "this"]
    costs = [float(row[row.index("cost") + 1]) for row in rows]
    assert costs == sorted(costs)
    found = json.loads((here / "m.json").read_text())["prefixes"]
    assert [p["layers"] for p in found["found"]] == [2, 6]
    assert all(0 <= p["agreement"] <= 1 and 0 <= p["accept_mass"] <= 1 for p in found["found"])
    assert found["found"][0]["cost"] != found["found"][1]["cost"]
    assert "prefixes" not in json.loads(run("--json")[1])["best"]  # without heads there is nothing to say
    assert "leave at least one" in one_line(run("--heads", "lens:2,8"))
    assert "nowhere" in one_line(run("--heads", "nowhere"))


def test_text_from_a_file_and_private_keys(run: Run, here: Path) -> None:
    lines = [json.dumps({"text": f"{i} words that go on and on for quite a while"}) for i in range(4)]
    (here / "c.jsonl").write_text("\n".join(lines))
    code, out, _ = run("--calibration", "c.jsonl", "--private-kv", "--json", "--quiet")
    best = json.loads(out)["best"]
    assert code == 0
    assert best["calibration"]["name"] == "c.jsonl"
    assert best["kv"] == "private"


@pytest.mark.parametrize("masks", [3, 8])
def test_ctrl_c_writes_the_best_so_far_and_the_same_command_goes_on(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch, masks: int
) -> None:
    with monkeypatch.context() as patch:
        interrupt_after(patch, masks)
        code, out, err = run("--output", "m.json")
    assert code == 130
    assert f"interrupted after {min(masks, 6)} of 6 masks; the best so far is in m.json" in err
    assert "interrupted, the best so far" in out
    details = viasd.LayerMask.load(here / "m.json").details
    assert details["interrupted"] is True
    assert details["trials"] == min(masks, 6)
    assert details["beats_random"] is details["tier"] is None
    code, out, _ = run("--output", "m.json", "--json", "--quiet")
    assert code == 0
    assert json.loads(out)["trials"] == 6
    assert viasd.LayerMask.load(here / "m.json").details["interrupted"] is False


def test_ctrl_c_before_the_first_mask_writes_nothing(run: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_after(monkeypatch, 0)
    code, _, err = run("--output", "m.json", "--quiet")
    assert code == 130
    assert "interrupted before the first mask was scored" in err
    assert not (here / "m.json").exists()


def test_ctrl_c_of_a_real_process(folder: str, here: Path) -> None:
    argv = [
        "--target",
        folder,
        "--trials",
        "100000",
        "--sublayers",
        "--tau",
        "400",
        "--output",
        "m.json",
        "--threads",
        "1",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "viasd.search.cli", *argv],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # A test run in the background of a shell ignores Ctrl-C, and so would everything that it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("searching (masks)"):
            break
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "the best so far is in m.json" in err
    assert viasd.LayerMask.load(here / "m.json").details["trials"] >= 1


def test_a_full_disk_loses_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *rest: Any) -> None:
        raise WeightsError(f"can't write {path}: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(viasd.mask, "write_atomically", full)
        err = one_line(run("--quiet"))
    assert "No space left on device; nothing is lost" in err
    assert json.loads(run("--json", "--quiet")[1])["masks_per_minute"] is None


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--skip", "0"], "skip must be above 0 and below 1"),
        (["--skip", "1"], "skip must be above 0 and below 1"),
        (["--skip", "0.3", "--skip-range", "0.1:0.5"], "contradict each other"),
        (["--skip-range", "0.5:0.1"], "must be LO:HI with 0 < LO < HI < 1"),
        (["--skip-range", "half"], "expected LO:HI"),
        (["--objective", "pareto"], "add --skip-range LO:HI"),
        (["--objective", "speed"], "invalid choice"),
        (["pick", "x.json"], "the following arguments are required"),
        (["--trials", "0"], "trials must be at least 1"),
        (["--theta", "0"], "theta must be at least 1"),
        (["--alpha", "2"], "alpha must be above 0"),
        (["--refine", "-1"], "refine must be between 0 and 1"),
        (["--prompts", "3"], "prompts must be an even number"),
        (["--prompts", "2", "--calibration", "x.txt"], "but a file was given"),
        (["--output", "no/such/m.json"], "there is no folder 'no/such'"),
        (["--output", "."], "--output must be a file"),
        (["--study", " "], "study's name is empty"),
        (["--bogus"], "unrecognized arguments"),
        (["--pair", "gemma2-2b:3b"], "unknown size"),
        (["--pair", "gemma2-2b:9b", "--target", "x"], "contradict each other"),
    ],
)
def test_bad_options_are_one_line_before_anything_is_loaded(
    run: Run, monkeypatch: pytest.MonkeyPatch, argv: list[str], complaint: str
) -> None:
    def no_loading(*args: Any, **rest: Any) -> None:
        raise AssertionError("nothing may be loaded")

    monkeypatch.setattr(viasd.load, "load_pair", no_loading)
    assert complaint in one_line(run(*argv, target=False))


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--keep-prefix", "7"], "are kept"),
        (["--storage", "nope://x"], "can't open storage 'nope://x'"),
        (["--calibration", "none.txt"], "can't read calibration file"),
        (["--calibration", "empty.txt"], "at least 16 are needed"),
    ],
)
def test_what_does_not_fit_the_target_is_one_line(run: Run, here: Path, argv: list[str], complaint: str) -> None:
    (here / "empty.txt").write_text("")
    assert complaint in one_line(run(*argv, "--quiet"))


def test_a_study_of_another_search_is_refused(run: Run) -> None:
    assert run("--study", "mine", "--storage", "sqlite:///s.db", "--quiet")[0] == 0
    err = one_line(run("--study", "mine", "--storage", "sqlite:///s.db", "--quiet", "--alpha", "0.6"))
    assert "study 'mine' was made with alpha = 0.5, but now it is 0.6" in err


def test_a_study_of_predicted_times_belongs_to_its_drafter(run: Run, folder: str) -> None:
    argv = ("--target", folder, *FEW, "--study", "mine", "--storage", "sqlite:///s.db", "--quiet", "--output", "m.json")
    assert run(*argv, "--objective", "time", target=False)[0] == 0
    err = one_line(run(*argv, "--objective", "time", "--drafter", "self", target=False))
    assert "made with drafter = 'lookup', but now it is 'self'" in err
    # What a mask costs is the same with any drafter.
    argv = (*argv, "--study", "cost")
    assert run(*argv, target=False)[0] == run(*argv, "--drafter", folder, target=False)[0] == 0


def test_show_and_compare(run: Run, here: Path) -> None:
    run("--quiet", "--output", "a.json")
    viasd.LayerMask.even(8, 0.4).save(here / "b.json")
    code, out, _ = run("show", "a.json", target=False)
    assert code == 0
    assert "runs 5 of 8 layers" in out
    assert "best found" in out
    assert json.loads(run("show", "a.json", "--json", target=False)[1])["layers"] == 8
    assert "runs 5 of 8 layers" in run("show", "b.json", target=False)[1]  # a mask without any figures
    code, out, _ = run("compare", "a.json", "b.json", target=False)
    assert code == 0
    assert "skipped by both: " in out
    both = json.loads(run("compare", "a.json", "b.json", "--json", target=False)[1])
    assert len(both["skipped_by_both"]) + len(both["skipped_by_first"]) == 3
    viasd.LayerMask.even(6, 0.4).save(here / "c.json")
    assert "8 and 6 layers" in one_line(run("compare", "a.json", "c.json", target=False))
    assert "can't read mask file" in one_line(run("show", "none.json", target=False))


RANGE = ("--skip-range", "0.1:0.5", "--trials", "12", "--controls", "4", "--tau", "48", "--device", "cpu")


def test_a_range_is_searched_for_predicted_time(run: Run, folder: str, here: Path) -> None:
    code, out, _ = run("--target", folder, *RANGE, "--json", target=False)
    assert code == 0
    found = json.loads(out)
    best, times = found["best"], found["best"]["times"]
    assert found["objective"] == "time"
    assert found["trials"] == 12
    assert found["front"] == []
    assert set(times) == {"plain", "full", "drafter", "layer", "attention", "ends", "token"}
    assert best["search"]["seconds_per_token"] == min(t for t in found["trace"] if t is not None)
    assert found["controls"]["random_best"]["search"]["seconds_per_token"] > 0
    assert set(best["two_tiers"]) == {"plain", "sd"}
    assert (here / "tiny-target.skip10to50.json").exists()
    # Measured once a study: whoever goes on with it gets the same values.
    code, out, _ = run("--target", folder, *RANGE, "--json", target=False)
    again = json.loads(out)
    assert (again["trace"], again["best"]["times"]) == (found["trace"], times)
    code, out, _ = run("show", "tiny-target.skip10to50.json", target=False)
    assert "ms/token" in out
    assert "two tiers" in out


def test_a_pareto_front_and_another_mask_of_it(run: Run, folder: str, here: Path) -> None:
    argv = ("--target", folder, *RANGE, "--objective", "pareto", "--output", "front.json")
    code, out, _ = run(*argv, target=False)
    assert code == 0
    assert "<- this file" in out
    mask = json.loads((here / "front.json").read_text())
    front = mask["front"]
    assert len(front) >= 2
    slim, cost = ([e["search"][name] for e in front] for name in ("slim_share", "cost"))
    assert slim == sorted(slim, reverse=True)
    assert cost == sorted(cost)
    assert mask["keep"] in [e["keep"] for e in front]
    skipped = round(8 * front[-1]["skip_ratio"])
    assert run("pick", "front.json", "--skipped", str(skipped), "--output", "other.json", target=False)[0] == 0
    other = viasd.mask.LayerMask.load("other.json")
    assert [int(k) for k in other.keep] == front[-1]["keep"]
    assert other.details["cost"] == front[-1]["report"]["cost"]
    assert "tier" not in other.details
    assert run("show", "other.json", target=False)[0] == 0
    assert "there are " in one_line(run("pick", "front.json", "--skipped", "7", "--output", "x.json", target=False))
    assert "has no front" in one_line(run("pick", "other.json", "--skipped", "2", "--output", "x.json", target=False))
    for broken in ([1], {"a": 1}, [{"skip_ratio": 0.5}], [{**front[0], "report": True}], [{**front[0], "report": [1]}]):
        (here / "broken.json").write_text(json.dumps({**mask, "front": broken}))
        assert "'front' must be" in one_line(run("show", "broken.json", target=False))


def test_masks_of_one_size_on_a_front_of_half_layers_are_told_apart(run: Run, here: Path) -> None:
    # Two masks with the same whole layers and as many halves: without one MLP, without one attention.
    whole = [1, 1, 0, 0, 1, 1, 1, 1]
    attention, mlp = [1, 1, 1, 0, 1, 1, 1, 1], [1, 1, 0, 1, 1, 1, 1, 1]
    halves = [{"attention": attention, "mlp": mlp}, {"attention": mlp, "mlp": attention}]
    figures = [{"cost": cost, "slim_share": 0.5 + cost} for cost in (0.1, 0.2)]
    front = [
        {"keep": whole, "sublayers": h, "skip_ratio": 0.125, "search": f, "report": f}
        for h, f in zip(halves, figures, strict=True)
    ]
    file = {"schema": 1, "layers": 8, "keep": whole, "sublayers": halves[1], "front": front}
    (here / "front.json").write_text(json.dumps(file))
    shown = run("show", "front.json", target=False)[1].splitlines()
    lines = [line for line in shown if "of a full one" in line]
    assert [("0.6000" in line, "<- this file" in line) for line in lines] == [(True, False), (False, True)]
    err = one_line(run("pick", "front.json", "--skipped", "1", "--output", "x.json", target=False))
    assert "2 masks that skip 1 layers on its front; pick one by --number (1, 2)" in err
    for number in (1, 2):
        assert run("pick", "front.json", "--number", str(number), "--output", "x.json", target=False)[0] == 0
        assert json.loads((here / "x.json").read_text())["sublayers"] == halves[number - 1]
    for argv in (("--number", "3"), ("--number", "0")):
        assert "has 2 masks" in one_line(run("pick", "front.json", *argv, "--output", "x.json", target=False))


def test_figures_of_other_kinds_are_one_line(run: Run, here: Path) -> None:
    mask = viasd.LayerMask.even(8, 0.4).to_json()
    good = {"auc": 0.5, "n": 1, "ece": 0.1, "log_loss": 0.1, "passed": 0, "passed_disagreed": 0, "stored": True}
    for wrong in (
        {"controls": {"even": [1]}, "search": {}},
        {"controls": {"margin": 5}, "beats_random": True},
        {"two_tiers": 5},
        {"tier": {"delta": "x"}},
        {"tier": {"per_token": [1]}},
        {"tier": {"per_token": {"plain": "x"}}},
        {"guard_reliability": {}},
        {"guard_reliability": {**good, "ece": None}},
    ):
        (here / "wrong.json").write_text(json.dumps({**mask, **wrong}))
        assert "not of the kinds that a search writes" in one_line(run("show", "wrong.json", target=False))
        assert run("show", "wrong.json", "--json", target=False)[0] == 0


def test_the_same_range_by_cost_says_what_that_means(run: Run, folder: str) -> None:
    code, out, err = run("--target", folder, *RANGE, "--objective", "cost", "--json", target=False)
    assert code == 0
    assert "prefers the fewest skipped layers" in err
    assert json.loads(out)["best"]["skip_ratio"] == 0.125


def test_a_figure_is_drawn(run: Run, here: Path) -> None:
    pytest.importorskip("matplotlib")
    assert run("--plot", "p.png", "--quiet")[0] == 0
    assert (here / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("objective", ["time", "pareto"])
def test_figures_of_a_range_are_drawn(run: Run, folder: str, here: Path, objective: str) -> None:
    pytest.importorskip("matplotlib")
    argv = ("--target", folder, *RANGE, "--objective", objective, "--plot", "range.png")
    assert run(*argv, target=False)[0] == 0
    assert (here / "range.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_plot_extra_is_one_line_before_the_search(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures.importlib.util, "find_spec", lambda name: None)
    assert "pip install viasd[plot]" in one_line(run("--plot", "p.png"))


def test_a_search_follows_a_feature_drafter_and_refuses_two_drafters(run: Run, here: Path) -> None:
    feature_file().save(here / "own.safetensors")
    assert run("--drafter", "own.safetensors", "--output", "mask.json")[0] == 0
    assert "own.safetensors" in json.loads((here / "mask.json").read_text())["pair"]
    said = one_line(run("--drafter", "lookup+own.safetensors"))
    assert "lookup first" in said
    assert "alone" in said
