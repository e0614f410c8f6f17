"""Trial folders that the ledger does not know: its lines were lost, or cannot be read. They are adopted or left."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from cclsearch.core.errors import UserError
from cclsearch.core.job_file import has_job_file, read_job_json
from cclsearch.core.text import count_of
from cclsearch.launch.contract import CONFIG_FILE, RESULT_FILE, TrialInput
from cclsearch.record.event import TrialProposed, TrialSubmitting
from cclsearch.record.ledger import LEDGER_FILE
from cclsearch.record.state import RunState
from cclsearch.record.writer import RunWriter, list_trial_folders
from cclsearch.run.spec import RunSpec
from cclsearch.run.trial_folder import ATTEMPTS_FOLDER, attempt_folder
from cclsearch.space.table import Space
from cclsearch.tasks.base import task_of

RECOVERED = "recovered"
"""Proposer of an adopted trial."""


class UnknownPolicy(StrEnum):
    """Treatment of unknown trials (`resume --unknown-trials`)."""

    ADOPT = "adopt"
    """Their results are judged and count; without a result, the configuration runs again."""
    LEAVE = "leave"
    """The search continues without them; their configurations may run again, in other folders."""


@dataclass(frozen=True)
class UnknownTrials:
    """Numbered folders in `trials/` that no line of the ledger is about."""

    folder: Path
    """Folder of the run."""
    trials: dict[int, Path]

    def __bool__(self) -> bool:
        return bool(self.trials)

    def describe(self) -> str:
        """`'runs/a' has 3 trials (18-20; 2 with a result) that its ledger.jsonl does not contain`."""
        results = sum(any(map(has_job_file, _list_results(path))) for path in self.trials.values())
        noun = count_of(len(self.trials), "trial")
        listed = f"{_format_ranges(self.trials)}; {results} with a result"
        return f"{str(self.folder)!r} has {noun} ({listed}) that its {LEDGER_FILE} does not contain"

    def refuse(self) -> UserError:
        """The error of a search without a terminal to ask on."""
        return UserError(
            f"{self.describe()}: restore that file, or continue with `--unknown-trials adopt` (judge their results) or"
            " `--unknown-trials leave` (continue without them; their configurations may run again)"
        )


def find_unknown_trials(folder: Path, state: RunState) -> UnknownTrials:
    """The unknown trials of a run, without those that an earlier `resume` left."""
    known = {*state.trials, *state.left_trials}
    return UnknownTrials(folder, {n: path for n, path in list_trial_folders(folder).items() if n not in known})


def find_adoptable(found: UnknownTrials, spec: RunSpec, space: Space) -> dict[int, TrialInput]:
    """Number -> input of each trial whose `config.json` is of this run and of a configuration in its search space."""
    adoptable = {}
    for number, path in found.trials.items():
        try:
            payload = task_of(spec.card).input.model_validate(read_job_json(path / CONFIG_FILE))
        except (OSError, ValueError):
            continue
        is_own = (payload.run_id, payload.trial) == (spec.run_id, number)
        if is_own and space.row(payload.config) is not None:
            adoptable[number] = payload
    return adoptable


def record_adopted(writer: RunWriter, adopted: dict[int, TrialInput], now_s: float) -> None:
    """Record the proposals of adopted trials; their jobs and results are then found as after a kill."""
    for number, payload in adopted.items():
        text = "its folder was there, but the ledger did not contain it"
        proposed = TrialProposed(trial=number, config=payload.config, proposer=RECOVERED, rationale=text)
        writer.record(proposed.at(now_s))
        attempt = max(_list_attempts(writer.trial_folder(number)), default=1)
        writer.record(TrialSubmitting(time_s=now_s, trial=number, attempt=attempt, nonce=payload.nonce))


def _list_attempts(trial_folder: Path) -> list[int]:
    """The numbers of the attempts that have a folder."""
    return [int(path.name) for path in (trial_folder / ATTEMPTS_FOLDER).glob("*") if path.name.isdecimal()]


def _list_results(trial_folder: Path) -> list[Path]:
    """Return the places of the trial's result: after judging, and of each attempt."""
    folders = (attempt_folder(trial_folder, attempt) for attempt in _list_attempts(trial_folder))
    return [folder / RESULT_FILE for folder in (trial_folder, *folders)]


def _format_ranges(numbers: Iterable[int]) -> str:
    """`1, 3-5, 9`."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(f"{first}-{last}" if first != last else str(first) for first, last in ranges)
