"""Mirrors the ledger of a run into `study.log`. Errors in the file never affect the search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from optuna.trial import TrialState as StudyState

from cclsearch.core.text import one_line
from cclsearch.core.values import Provenance
from cclsearch.record.event import Event, SpaceGrown, TrialFinished, TrialProposed, TrialRevised
from cclsearch.record.state import RunState
from cclsearch.record.trial import Trial, find_state
from cclsearch.run.spec import RunSpec
from cclsearch.space.table import Knob
from cclsearch.study.journal import DamagedJournal, Journal, Log, Operation
from cclsearch.study.mapping import NUMBER, SPACE, STATES, StudyMapping

STUDY_FILE = "study.log"
# A long search is never in memory as a whole.
BATCH = 200
"""Number of trials that are read and appended together when a study is built."""


class StudyView:
    """The study of a run; `watch` is called after each event of its ledger, `tell` once if the file fails."""

    def __init__(self, folder: Path, spec: RunSpec, knobs: Sequence[Knob], tell: Callable[[str], None]) -> None:
        self._journal = Journal(folder / STUDY_FILE)
        self._mapping = StudyMapping(spec, tuple(knobs))
        self._tell = tell
        self._study = -1
        self._running: dict[int, int] = {}
        """Our number of a trial that runs -> its number in the journal."""
        self._is_stale = False
        """Whether the study must be built anew: a verdict or the space changed, or a trial was lost."""
        self._is_off = False

    def open(self, state: RunState) -> None:
        """Continue the last study of the file if it is as the ledger says; else begin another."""
        self._guard(lambda: self._continue(state))

    def watch(self, event: Event, state: RunState) -> None:
        """Write one event of the ledger into the study."""
        if self._is_off:
            return
        match event:
            case SpaceGrown():
                self._grow(event)
            case TrialRevised():
                self._is_stale = True
            case TrialProposed() | TrialFinished():
                self._guard(lambda: self._update(event.trial, state), state)

    def close(self, state: RunState) -> None:
        """Write what is still missing."""
        if self._is_stale and not self._is_off:
            self._guard(lambda: self._rebuild(state))

    def _guard(self, write: Callable[[], None], state: RunState | None = None) -> None:
        """Write. After an error the search continues without the file; if only this file is damaged, with a new one."""
        try:
            try:
                write()
            except DamagedJournal:
                if state is None:
                    raise
                self._continue(state)
        except (OSError, ValueError) as error:
            self._is_off = True
            reason = one_line(str(error), 200)
            self._tell(f"{str(self._journal.path)!r} is no longer written ({reason})")

    def _update(self, number: int, state: RunState) -> None:
        trial = state.trials[number]
        if self._is_stale:
            self._rebuild(state)
        elif number not in self._running:
            self._append([trial])
        elif find_state(trial.outcome) in STATES:
            trial_id = self._running[number]
            self._journal.append(lambda: self._require_study(self._mapping.finish_trial(trial_id, trial)))
            del self._running[number]
        else:
            self._rebuild(state)
        if self._study not in self._journal.studies:  # somebody deleted it meanwhile
            self._rebuild(state)

    def _require_study(self, logs: list[Log]) -> list[Log]:
        return logs if self._study in self._journal.studies else []

    def _append(self, trials: Sequence[Trial]) -> None:
        """Append trials as they are now."""

        def make() -> list[Log]:
            logs: list[Log] = []
            for trial in trials:
                log = self._mapping.create_trial(self._study, trial)
                if log is None or self._study not in self._journal.studies:
                    continue
                if log["state"] is StudyState.RUNNING:
                    self._running[trial.number] = self._journal.num_trials + len(logs)
                logs.append(log)
            return logs

        self._journal.append(make)

    def _rebuild(self, state: RunState) -> None:
        """Write every trial of the ledger into a study of a new name: Optuna changes no finished trial or space."""
        self._running, self._is_stale = {}, False

        def create() -> list[Log]:
            self._study = self._journal.num_studies
            return self._mapping.create_study(self._study, self._choose_name())

        self._journal.append(create)
        numbers = list(state.trials)
        for first in range(0, len(numbers), BATCH):
            self._append([state.trials[number] for number in numbers[first : first + BATCH]])

    def _choose_name(self) -> str:
        spec = self._mapping.spec
        base = spec.run_id if spec.provenance is Provenance.MEASURED else f"{spec.run_id} ({spec.provenance.value})"
        taken, n = set(self._journal.studies.values()), self._journal.num_studies + 1
        name = base if n == 1 else f"{base} #{n}"
        while name in taken:
            n += 1
            name = f"{base} #{n}"
        return name

    def _grow(self, event: SpaceGrown) -> None:
        grown = {knob.name: knob for knob in self._mapping.knobs}
        for name, choices in event.choices.items():
            before = grown.get(name) or Knob(name, ())
            grown[name] = replace(before, choices=tuple(dict.fromkeys((*before.choices, *choices))))
        self._mapping = StudyMapping(self._mapping.spec, tuple(grown.values()))
        self._is_stale = True

    def _continue(self, state: RunState) -> None:
        """Read the file; continue its last study of this run if it agrees with the ledger, else build one."""
        found = _FoundStudies(self._journal, self._mapping.spec.run_id)
        try:
            self._journal.read(found.take)
        except DamagedJournal:
            self._journal.replace()
            found = _FoundStudies(self._journal, self._mapping.spec.run_id)
        missing = found.find_missing(self._mapping, state)
        if missing is None:
            self._rebuild(state)
            return
        self._study, self._running, self._is_stale = found.study, found.running, False
        for trial in missing:
            if trial.number in self._running:
                trial_id = self._running.pop(trial.number)
                self._journal.append(lambda t=trial, i=trial_id: self._mapping.finish_trial(i, t))  # type: ignore[misc]
            else:
                self._append([trial])


class _FoundStudies:
    """The last study of a run in a journal, folded from its lines as they are read."""

    def __init__(self, journal: Journal, run_id: str) -> None:
        self.study = -1
        self.running: dict[int, int] = {}
        self._journal = journal
        self._run_id = run_id
        self._attributes: dict[int, dict[str, Any]] = {}
        self._numbers: dict[int, int] = {}
        """Number in the journal -> ours, of the trials of the last study."""
        self._trials: dict[int, tuple[int, list[float] | None, dict[str, float]]] = {}
        """Our number -> state, values, parameters."""
        self._is_odd = False

    def take(self, log: Log) -> None:
        """Fold one line."""
        match log["op_code"]:
            case Operation.SET_STUDY_USER_ATTR:
                attributes = self._attributes.setdefault(log["study_id"], {})
                attributes |= log["user_attr"]
                if attributes.get("run") == self._run_id and log["study_id"] > self.study:
                    self.study, self._numbers, self._trials, self._is_odd = log["study_id"], {}, {}, False
            case Operation.CREATE_TRIAL if log["study_id"] == self.study in self._journal.studies:
                self._create(log)
            case Operation.SET_TRIAL_STATE_VALUES if log["trial_id"] in self._numbers:
                number = self._numbers[log["trial_id"]]
                if self._trials[number][0] == StudyState.RUNNING:
                    self._trials[number] = (log["state"], log["values"], self._trials[number][2])

    def _create(self, log: Log) -> None:
        number = log.get("user_attrs", {}).get(NUMBER)
        if not isinstance(number, int):
            return  # of somebody else
        self._is_odd |= number in self._trials
        values = log["values"] if log.get("values") else None if log.get("value") is None else [log["value"]]
        self._numbers[self._journal.num_trials - 1] = number
        self._trials[number] = (log["state"], values, log["params"])

    def find_missing(self, mapping: StudyMapping, state: RunState) -> list[Trial] | None:
        """Return the trials that the study does not have as they are; None if it contradicts the ledger."""
        known = self._attributes.get(self.study, {})
        if self._is_odd or self.study not in self._journal.studies or known.get(SPACE) != mapping.space_sha256:
            return None
        missing = []
        for trial in state.trials.values():
            wanted = STATES.get(find_state(trial.outcome))
            has = self._trials.pop(trial.number, None)
            if wanted is None and has is None:
                continue
            if wanted is None or (has and has[2] != mapping.encode(trial.config)):
                return None
            if has is None or (has[0] == StudyState.RUNNING and wanted is not StudyState.RUNNING):
                missing.append(trial)
            elif has[0] != wanted or (has[1] or None) != mapping.values_of(trial):
                return None
        if self._trials:
            return None  # it has trials that the ledger does not have
        ids = {number: trial_id for trial_id, number in self._numbers.items()}
        self.running = {trial.number: ids[trial.number] for trial in state.unfinished if trial.number in ids}
        self.running |= {trial.number: ids[trial.number] for trial in missing if trial.number in ids}
        return missing
