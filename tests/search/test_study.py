from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState
from searching import SPACE, search, worker

from viasd.errors import OptionError
from viasd.routes import Route
from viasd.search.proposals import DimrSampler, SearchSpace
from viasd.search.storage import open_storage, storage_errors
from viasd.search.study import Progress, agreed

TRIALS = 24


@pytest.fixture(params=["journal", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return {"journal": f"journal://{tmp_path}/s.log", "sqlite": f"sqlite:///{tmp_path}/s.db"}[request.param]


def masks(run: Any) -> list[str]:
    return [t.user_attrs["mask"] for t in run.finished()]


def exactly(run: Any, trials: int) -> None:
    found = masks(run)
    assert len(found) == trials
    assert len(set(found)) == trials
    assert {t.user_attrs["step"] for t in run.finished()} == set(range(trials))


def test_a_search_evaluates_each_mask_once_and_tells_of_it(url: str) -> None:
    told: list[Progress] = []
    run = search(url, TRIALS, tell=told.append)
    run.run()
    exactly(run, TRIALS)
    assert [p.done for p in told] == list(range(1, TRIALS + 1))
    assert told[-1].best["cost"] == min(t.value for t in run.finished() if t.state == TrialState.COMPLETE)
    assert told[0].baseline == told[-1].baseline is not None
    assert run.best() is not None


def test_a_finished_search_evaluates_nothing_more_and_a_longer_one_goes_on(url: str) -> None:
    search(url, TRIALS).run()
    again = search(url, TRIALS)
    again.run()
    assert again.scored == 0
    longer = search(url, TRIALS + 5)
    longer.run()
    assert longer.scored == 5
    exactly(longer, TRIALS + 5)


def test_stopping_at_any_mask_and_going_on_gives_exactly_n(url: str) -> None:
    class Stop(Exception):
        pass

    for last in (1, 7, 8):

        def stop(progress: Progress, last: int = last) -> None:
            if progress.done == last:
                raise Stop

        with pytest.raises(Stop):
            search(url, TRIALS, tell=stop).run()
    run = search(url, TRIALS)
    run.run()
    exactly(run, TRIALS)


def test_an_interrupted_mask_is_failed_and_tried_again(url: str) -> None:
    run = search(url, TRIALS)

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    run.objective.evaluate = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run.run()
    assert [t.state for t in run.study.get_trials()] == [TrialState.FAIL]
    search(url, TRIALS).run()
    exactly(run, TRIALS)


@pytest.mark.parametrize("objectives", [1, 2])
def test_a_mask_without_a_finite_cost_is_given_up_and_never_tried_again(objectives: int) -> None:
    run = search(None, TRIALS, space=SearchSpace(16, 6, theta=4))
    if objectives == 2:
        run.sampler = DimrSampler(run.sampler.space, TRIALS, 2)
        run.study = optuna.create_study(sampler=run.sampler, directions=["minimize"] * 2)
        run._storage = run.study._storage
        run.objective.values = lambda figures: [figures["cost"], figures["kl"]]  # type: ignore[method-assign]
    evaluate = run.objective.evaluate

    def overflows(route: Route, report: Any) -> Any:
        found = evaluate(route, report)
        found.figures["cost"] = found.figures["cost"] if route.keep[3] else float("nan")
        return found

    run.objective.evaluate = overflows  # type: ignore[method-assign]
    run.run()
    exactly(run, TRIALS)
    states = {
        t.user_attrs["mask"][3]: t.state for t in run.finished() if t.state == TrialState.PRUNED or objectives == 2
    }
    assert states["0"] == TrialState.PRUNED
    assert run.scored == TRIALS


def wait_for_masks(url: str, n: int) -> Any:
    """The search, once a worker has evaluated n masks."""
    run = None
    deadline = time.monotonic() + 60
    while (run is None or len(masks(run)) < n) and time.monotonic() < deadline:
        if Path(url.split("://")[1]).exists():
            with contextlib.suppress(OptionError, KeyError):  # its tables may not all be there yet
                run = search(url, TRIALS)
        time.sleep(0.1)
    assert run is not None
    return run


def test_two_worker_processes_share_the_masks_and_one_survives_the_other(url: str) -> None:
    victim, other = (worker(url, TRIALS, 0.1) for _ in range(2))
    run = wait_for_masks(url, 6)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert other.wait(timeout=120) == 0
    exactly(run, TRIALS)
    assert TrialState.RUNNING not in {t.state for t in run.study.get_trials()}


def test_the_same_command_goes_on_after_a_kill(tmp_path: Path) -> None:
    url = f"journal://{tmp_path}/s.log"
    victim = worker(url, TRIALS, 0.2)
    run = wait_for_masks(url, 3)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert 3 <= len(masks(run)) < TRIALS
    zombies = [t.number for t in run.study.get_trials() if t.state == TrialState.RUNNING]
    run.run()
    exactly(run, TRIALS)
    trials = run.study.get_trials()
    assert [trials[n].state for n in zombies] == [TrialState.FAIL] * len(zombies)


def zombie(run: Any, **attrs: Any) -> int:
    """A running trial of some other worker."""
    mask = "".join(map(str, SPACE.even()))
    template = optuna.trial.create_trial(
        state=TrialState.RUNNING,
        user_attrs={"worker": "elsewhere:1", "started": time.time(), "mask": mask, "step": 0, **attrs},
    )
    run.study._storage.create_new_trial(run.study._study_id, template_trial=template)
    return len(run.study.get_trials()) - 1


def test_silent_workers_elsewhere_are_given_up_and_others_waited_for(tmp_path: Path) -> None:
    run = search(f"journal://{tmp_path}/s.log", TRIALS)
    old = zombie(run, started=time.time() - 1e5)
    assert run._free_step() == 0
    assert run.study.get_trials()[old].state == TrialState.FAIL
    zombie(run)
    assert run._free_step() == 1  # step 0 is being worked on
    # A process of this machine that is gone, and one whose number belongs to somebody else by now.
    gone = zombie(run, worker=f"{os.uname().nodename}:{2**22 - 1}", step=1)
    reused = zombie(run, worker=f"{os.uname().nodename}:1", step=2, started=time.time() - 1e5)
    assert run._free_step() == 1
    assert {run.study.get_trials()[n].state for n in (gone, reused)} == {TrialState.FAIL}


def test_of_two_workers_with_one_mask_the_later_one_yields(tmp_path: Path) -> None:
    run = search(f"journal://{tmp_path}/s.log", TRIALS)
    first = zombie(run)
    second = zombie(run, worker="other:2", step=5)
    assert not run._contested(first, 0, SPACE.even())
    assert run._contested(second, 5, SPACE.even())


def test_a_study_of_another_setup_is_refused(url: str) -> None:
    search(url, 3, setup={"pair": "a", "alpha": 0.5}).run()
    with pytest.raises(OptionError, match=r"alpha = 0\.5, but now it is 0\.3"):
        search(url, 3, setup={"pair": "a", "alpha": 0.3})


def test_a_study_that_no_search_made_is_refused(url: str) -> None:
    other = optuna.create_study(storage=open_storage(url), study_name="s")
    other.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)
    with pytest.raises(OptionError, match="was not made by a mask search"):
        search(url, 3)


@pytest.mark.parametrize(
    "bad",
    ["nope://x", "sqlite:////no/such/folder/x.db", "journal:///proc/no/x.log", "postgresql://u:secret@127.0.0.1:1/x"],
)
def test_storages_that_do_not_open_are_one_sentence_without_a_password(bad: str) -> None:
    with pytest.raises(OptionError) as caught:
        open_storage(bad)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_storage_that_fails_in_use_is_one_sentence_and_loses_nothing(tmp_path: Path) -> None:
    url = f"journal://{tmp_path}/s.log"
    run = search(url, TRIALS)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    told = []

    def fill(progress: Progress) -> None:
        told.append(progress)
        if progress.done == 5:
            run._storage._backend.append_logs = full  # type: ignore[attr-defined]

    run.tell = fill
    with pytest.raises(OptionError, match=r"No space left on device.*goes on from it"), storage_errors(url):
        run.run()
    again = search(url, TRIALS)
    again.run()
    assert again.scored == TRIALS - 5
    exactly(again, TRIALS)


def test_a_truncated_last_line_of_a_journal_is_survived(tmp_path: Path) -> None:
    url = f"journal://{tmp_path}/s.log"
    search(url, 5).run()
    with open(tmp_path / "s.log", "a") as stream:
        stream.write(json.dumps({"op_code": 4})[:7])
    run = search(url, TRIALS)
    run.run()
    exactly(run, TRIALS)


def test_workers_that_make_a_value_at_the_same_moment_agree_on_one(url: str) -> None:
    both = [search(url, TRIALS).study, search(url, TRIALS).study]
    barrier = threading.Barrier(2)

    def make(number: int) -> int:
        barrier.wait(timeout=30)
        return number

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda i: agreed(both[i], "text", lambda: make(i)), range(2)))
    assert found[0] == found[1]
    # Whoever comes later makes nothing.
    assert agreed(search(url, TRIALS).study, "text", lambda: pytest.fail("made again")) == found[0]
    assert agreed(both[0], "other", lambda: [1, 2]) == [1, 2]
