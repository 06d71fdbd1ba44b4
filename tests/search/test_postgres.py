"""Several workers on PostgreSQL, the storage a cluster would use. `.ci/run` starts a server and names it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from pathlib import Path

import optuna
import pytest
import searching
from optuna.trial import TrialState

URL = os.environ.get("VIASD_TEST_POSTGRES")
pytestmark = pytest.mark.skipif(not URL, reason="VIASD_TEST_POSTGRES names no PostgreSQL server (.ci/run starts one)")

TRIALS = 40


def worker(name: str) -> subprocess.Popen[bytes]:
    assert URL is not None
    return searching.worker(URL, TRIALS, 0.05, name)


def masks(name: str) -> list[str]:
    trials = optuna.load_study(study_name=name, storage=URL).get_trials()
    return [t.user_attrs["mask"] for t in trials if t.state in (TrialState.COMPLETE, TrialState.PRUNED)]


def test_two_workers_evaluate_exactly_n_distinct_masks(tmp_path: Path) -> None:
    name = f"two-{uuid.uuid4().hex}"
    both = [worker(name), worker(name)]
    assert [w.wait(timeout=300) for w in both] == [0, 0]
    found = masks(name)
    assert len(found) == TRIALS
    assert len(set(found)) == TRIALS


def test_a_killed_worker_leaves_nothing_undone() -> None:
    name = f"killed-{uuid.uuid4().hex}"
    victim = worker(name)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            if len(masks(name)) >= 5:
                break
        except KeyError:  # the study does not exist yet
            pass
        time.sleep(0.1)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert len(masks(name)) < TRIALS, "the worker was done before it could be killed"
    assert worker(name).wait(timeout=300) == 0
    found = masks(name)
    assert len(found) == TRIALS
    assert len(set(found)) == TRIALS
