"""Finds that trials of different configurations end for the same reason: then the next ones would, too."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cclsearch.core.text import one_line
from cclsearch.core.values import Config, FailureKind
from cclsearch.evaluation.comparison import UNDECIDED
from cclsearch.launch.collect import is_killed
from cclsearch.record.state import RunState
from cclsearch.record.trial import Trial
from cclsearch.record.writer import RunWriter
from cclsearch.run.folder import resume_command
from cclsearch.run.spec import RunSpec
from cclsearch.scoring.outcome import CONSTRAINTS_RULE

NUM_TRIALS = 3
"""Trials in a row, each of another configuration, that end for the same reason before the search does."""
MAX_LOOKED_AT = 100
"""Latest trials that are looked at, those that are passed over included."""
_VARYING = re.compile(
    r"0x[0-9a-f]+"  # addresses
    r"|(?:[a-z]:)?(?:[\w.~-]*[/\\])+[\w.~-]*"  # paths
    r"|\b(?=[0-9a-f-]*\d)[0-9a-f]{8,}(?:-[0-9a-f]{4,})*\b"  # hashes, UUIDs
    r"|[-+]?\d+(?:[.,:]\d+)*(?:e[-+]?\d+)?",  # numbers, ranks, times, versions, IPv4 addresses
    re.IGNORECASE,
)
_LOGS = ("stderr.log", "stdout.log")


@dataclass(frozen=True)
class SharedCause:
    """Shared reason why the last trials of a search ended."""

    text: str
    """The root exception of the last of them, or the admission rule that refused all of them with its detail."""
    rule: str | None
    """The admission rule; None for a root exception."""
    trials: tuple[Trial, ...]
    """The trials, in order of finishing."""


def find_shared_cause(spec: RunSpec, state: RunState) -> SharedCause | None:
    """Return the cause that the last `NUM_TRIALS` trials share; None if they share none, or a trial was ever ranked.

    Trials that say nothing about the cause are skipped: out of memory (also if a process was killed, so that it is
    likely), infrastructure failures, judging errors. Answers of a recording, and trials from before the last resume, do
    not count. Never a cause: a constraint of the objective, and a comparison that a reference trial may still decide.
    """
    if spec.limits.keep_going or state.keeps_going or not spec.provenance.is_repeatable or state.ranked:
        return None
    last: dict[Config, tuple[Trial, dict[str, str]]] = {}
    for number in reversed(state.finished_since_resumed[-MAX_LOOKED_AT:]):
        trial = state.trials[number]
        causes = _list_causes(trial)
        if causes is None:
            continue
        last.setdefault(trial.config, (trial, causes))
        if len(last) == NUM_TRIALS:
            break
    if len(last) < NUM_TRIALS:
        return None
    (newest, causes), *others = last.values()
    shared = [key for key in causes if all(key in other for _, other in others)]
    if not shared:
        return None
    trials = tuple(trial for trial, _ in reversed(last.values()))
    is_refusal = newest.outcome is not None and newest.outcome.find_verdict(shared[0]) is not None
    return SharedCause(causes[shared[0]], shared[0] if is_refusal else None, trials)


def explain_end(cause: SharedCause, writer: RunWriter, spec: RunSpec) -> str:
    """Return why the search ends, where the log is, and what to do."""
    run_id, resume = spec.run_id, resume_command(spec, writer.state, spec.run_id)
    number = cause.trials[-1].number
    what = f"admission rule {cause.rule!r} refused" if cause.rule else "the same error ended"
    look = f"ccl-search {'admit' if cause.rule else 'show'} {run_id} {'--trial ' if cause.rule else ''}{number}"
    return (
        f"{what} {_name_trials(cause.trials)}, each of another configuration, and no trial"
        f" was admitted: {one_line(cause.text, 300)}. See {str(_find_log(writer.trial_folder(number)))!r} or `{look}`,"
        f" fix the cause, then run `{resume}`; `{resume} --keep-going` continues"
        f" without this limit"
    )


def _list_causes(trial: Trial) -> dict[str, str] | None:
    """Return each possible cause -> its text: violated rules, or the normalized root exception; None to skip the trial.

    Empty if the trial ended well, or only violates a constraint.
    """
    outcome = trial.outcome
    if outcome is None:
        return None
    violated = {v.rule: f"{v.rule}: {v.detail}" for v in outcome.verdicts if v.ok is False}
    failure = outcome.failure
    if failure is None or (failure.kind is FailureKind.WORK_MISMATCH and violated):
        return {
            rule: text
            for rule, text in violated.items()
            if rule != CONSTRAINTS_RULE and not text.startswith(f"{rule}: {UNDECIDED}")
        }
    if failure.kind is FailureKind.OUT_OF_MEMORY or is_killed(failure) or not failure.kind.counts:
        return None
    return {f"{failure.kind.value}: {normalize_message(failure.message)}": failure.message}


def normalize_message(message: str) -> str:
    """Return a message without its parts that differ between trials and ranks: numbers, paths, addresses."""
    return " ".join(_VARYING.sub("#", message).split()).lower()


def _name_trials(trials: Sequence[Trial]) -> str:
    *first, last = (str(trial.number) for trial in trials)
    return f"trials {', '.join(first)} and {last}"


def _find_log(folder: Path) -> Path:
    """Return the log of a trial that has something to say; its folder if none has."""
    return next(
        (folder / name for name in _LOGS if (folder / name).is_file() and (folder / name).stat().st_size), folder
    )
