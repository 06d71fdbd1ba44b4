"""The study: exactly N distinct masks, by any number of workers, across crashes, in any Optuna storage."""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.pruners import MedianPruner
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from viasd.errors import OptionError
from viasd.routes import Route
from viasd.search.objective import Figures, Objective, rank, sound
from viasd.search.proposals import FIGURES, MASK_ATTR, DimrSampler, Mask, mask_in, mask_text

SLOT = "step"
_WORKER = "worker"
_STARTED = "started"
_SETUP = "setup"
# A worker of another machine can't be asked whether it lives: its trial is given up after this long.
_SILENT_SECONDS = 3600.0
_POLL_SECONDS = 0.2
_AGREE_SECONDS = 0.3
_FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)


@dataclass(frozen=True)
class Progress:
    """Told after every mask.

    Attributes:
        done: Masks evaluated so far, by all workers.
        trials: Masks wanted.
        figures: This mask's figures, or None where it was pruned.
        route: Route of the best mask so far.
        best: Its figures.
        baseline: Figures of the even-spaced mask.
    """

    done: int
    trials: int
    figures: Figures | None
    route: Route
    best: Figures
    baseline: Figures | None


def open_study(storage: BaseStorage | str, name: str, setup: dict[str, Any], sampler: DimrSampler) -> optuna.Study:
    """Opens or makes a study, and makes sure that it is the same search.

    Args:
        storage: See `open_storage`.
        name: Name of the study.
        setup: Everything that decides what a mask's cost is; JSON-able.
        sampler: Proposes masks.

    Raises:
        OptionError: If the study was made for something else, naming what differs.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = MedianPruner(n_startup_trials=sampler.space.theta, n_warmup_steps=0)
    study = optuna.create_study(
        storage=storage,
        study_name=name,
        sampler=sampler,
        pruner=pruner,
        directions=["minimize"] * sampler.objectives,
        load_if_exists=True,
    )
    text = json.dumps(setup, sort_keys=True)
    stored = study.user_attrs.get(_SETUP)
    if stored is None:
        if study.get_trials(deepcopy=False):
            raise OptionError(f"study '{name}' was not made by a mask search; use another --study name")
        study.set_user_attr(_SETUP, text)
        return study
    if stored != text:
        before = json.loads(stored)
        key = next(k for k in sorted({*setup, *before}) if setup.get(k) != before.get(k))
        raise OptionError(
            f"study '{name}' was made with {key} = {before.get(key)!r}, but now it is {setup.get(key)!r}; "
            "use another --study name or the same settings"
        )
    return study


class Search:
    """One worker of a search. Several may run on one study.

    Args:
        study: See `open_study`.
        sampler: The study's sampler.
        objective: Evaluates masks on the searching half.
        trials: Masks to evaluate in all.
        tell: Receives a `Progress` after every mask.
    """

    def __init__(
        self,
        study: optuna.Study,
        sampler: DimrSampler,
        objective: Objective,
        trials: int,
        tell: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self.study = study
        self.sampler = sampler
        self.objective = objective
        self.trials = min(trials, sampler.space.size)
        self.tell = tell
        self.proposal_seconds = 0.0
        self.scoring_seconds = 0.0
        self.scored = 0  # masks that this worker evaluated
        self._storage: BaseStorage = study._storage
        self._worker = f"{socket.gethostname()}:{os.getpid()}"

    def run(self) -> None:
        """Works until every step has been evaluated, by this or another worker."""
        while True:
            step = self._free_step()
            if step is None:
                return
            if step < 0:
                time.sleep(_POLL_SECONDS)  # others are at the last ones; if one dies, its step comes free
                continue
            self._evaluate(step)

    def finished(self) -> list[FrozenTrial]:
        """Trials whose mask has been evaluated, pruned ones included."""
        return [t for t in self.study.get_trials(deepcopy=False) if t.state in _FINISHED]

    def best(self) -> tuple[Mask, Figures] | None:
        """Best mask so far and its figures, or None."""
        done = [t for t in self.study.get_trials(deepcopy=False) if t.state == TrialState.COMPLETE]
        if not done:
            return None
        trial = min(done, key=lambda t: (*rank(t.user_attrs[FIGURES], self.objective.name), t.number))
        mask = mask_in(trial)
        assert mask is not None
        return mask, dict(trial.user_attrs[FIGURES])

    def _free_step(self) -> int | None:
        """A step nobody has taken; -1 while others are busy with the last ones; None when all are done."""
        taken: set[int] = set()
        busy = False
        for trial in self.study.get_trials(deepcopy=False):
            if trial.state in _FINISHED:
                taken.add(trial.user_attrs[SLOT])
            elif trial.state == TrialState.RUNNING:
                if self._alive(trial):
                    busy = True
                    taken.add(trial.user_attrs[SLOT])
                else:
                    self._fail(trial.number)
        free = next((s for s in range(self.trials) if s not in taken), None)
        return free if free is not None else (-1 if busy else None)

    def _evaluate(self, step: int) -> None:
        started = time.perf_counter()
        self.sampler.step = step
        mask = self.sampler.propose(self.study)
        trial_id = self._claim(step, mask)
        number = self._storage.get_trial_number_from_id(trial_id)
        if self._contested(number, step, mask):
            self._fail(number)
            return
        self.proposal_seconds += time.perf_counter() - started
        started = time.perf_counter()
        figures: Figures | None = None
        # Telling is skipped where another worker gave this one up for dead.
        try:
            figures = self._measure(trial_id, mask)
        except optuna.TrialPruned:
            self.study.tell(number, state=TrialState.PRUNED, skip_if_finished=True)
        except BaseException:
            self._fail(number)
            raise
        else:
            self._storage.set_trial_user_attr(trial_id, FIGURES, figures)
            self.study.tell(number, self.objective.values(figures), skip_if_finished=True)
        self.scoring_seconds += time.perf_counter() - started
        self.scored += 1
        self._report(figures)

    def _claim(self, step: int, mask: Mask) -> int:
        """A running trial with everything that is known of it, in one write.

        `Study.ask` and `suggest_float` would write every dimension on its own, each time waiting for the disk or the
        database: with 92 of them that takes longer than choosing the mask.
        """
        attrs = {_WORKER: self._worker, _STARTED: time.time(), MASK_ATTR: mask_text(mask), SLOT: step}
        template = optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs=attrs)
        return int(self._storage.create_new_trial(self.study._study_id, template_trial=template))

    def _measure(self, trial_id: int, mask: Mask) -> Figures:
        def partial(group: int, value: float) -> None:
            self._storage.set_trial_intermediate_value(trial_id, group, value)
            # Optuna prunes by one value; and half-way through, of two masks of different sizes neither is the worse one.
            single = self.sampler.objectives == 1
            if single and self.study.pruner.prune(self.study, self._storage.get_trial(trial_id)):
                raise optuna.TrialPruned

        figures = self.objective.evaluate(self.sampler.space.route(mask), partial).figures
        if not sound(figures):  # Optuna would fail such a trial, and its step would be tried forever
            raise optuna.TrialPruned
        return figures

    def _contested(self, number: int, step: int, mask: Mask) -> bool:
        """Whether an earlier trial has this step or this mask: of two workers at the same moment, the later one yields."""
        text = mask_text(mask)
        for other in self.study.get_trials(deepcopy=False):
            if other.number == number or other.state == TrialState.FAIL:
                continue
            same = other.user_attrs.get(SLOT) == step or other.user_attrs.get(MASK_ATTR) == text
            if same and (other.state in _FINISHED or other.number < number):
                return True
        return False

    def _alive(self, trial: FrozenTrial) -> bool:
        """Whether the worker of a running trial still lives, as far as can be told from here."""
        # Not the trial's own start: databases keep it in the local time of some machine.
        age = time.time() - trial.user_attrs.get(_STARTED, 0.0)
        worker = trial.user_attrs.get(_WORKER)
        host, _, pid = str(worker).rpartition(":")
        if worker == self._worker:
            return False  # this worker evaluates one mask at a time: an older one of its own is dead
        if host != socket.gethostname() or age > _SILENT_SECONDS:
            return age < _SILENT_SECONDS  # a process number may long belong to somebody else
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    def _fail(self, number: int) -> None:
        # Two workers may bury the same trial; Optuna refuses the second, which is fine.
        self.study.tell(number, state=TrialState.FAIL, skip_if_finished=True)

    def _report(self, figures: Figures | None) -> None:
        best = self.best()
        if best is None:
            return
        trials = self.study.get_trials(deepcopy=False)
        even = mask_text(self.sampler.space.even())
        baseline = next(
            (
                dict(t.user_attrs[FIGURES])
                for t in trials
                if t.state == TrialState.COMPLETE and t.user_attrs.get(MASK_ATTR) == even
            ),
            None,
        )
        done = sum(t.state in _FINISHED for t in trials)
        self.tell(Progress(done, self.trials, figures, self.sampler.space.route(best[0]), best[1], baseline))


def agreed(study: optuna.Study, name: str, make: Callable[[], Any], wait: float = _AGREE_SECONDS) -> Any:
    """A value that all workers of a study use: the one it has, or a new one.

    Two machines that measure, or write text, get different values. Whoever is ready first puts its own into the study; of
    two at the same moment each does so, waits for the other, and takes the first by name, as does whoever comes later.

    Args:
        study: The study.
        name: Of the value.
        make: Makes it; JSON-able.
        wait: Seconds within which another worker's value becomes visible.
    """
    key = f"{name}:"

    def present() -> list[str]:
        return sorted(k for k in study.user_attrs if k.startswith(key))

    if not present():
        value = make()
        if not present():
            study.set_user_attr(key + uuid.uuid4().hex, value)
            time.sleep(wait)
    return study.user_attrs[present()[0]]
