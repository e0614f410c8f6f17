"""Summary of a night: `summary.json`, the message for the chat, and the exit code."""

from __future__ import annotations

from collections.abc import Sequence

from cclsearch.core.text import one_line, show_number
from cclsearch.core.values import Model, Provenance
from cclsearch.nightly.compare import Change, NightVerdict
from cclsearch.nightly.share import Spent
from cclsearch.record.trial import TrialState, describe_counts

SUMMARY_VERSION = 1
EXIT_OK, EXIT_NO_RESULT, EXIT_USAGE, EXIT_REGRESSED, EXIT_TROUBLE, EXIT_BUSY = range(6)
ORDER = (
    NightVerdict.REGRESSED,
    NightVerdict.TROUBLE,
    NightVerdict.NO_RESULT,
    NightVerdict.IMPROVED,
    NightVerdict.FIRST,
    NightVerdict.UNCHANGED,
)
"""Verdicts in the order in which summaries list them."""
COUNTED = {
    NightVerdict.TROUBLE: "with infrastructure trouble",
    NightVerdict.NO_RESULT: "without a result",
    NightVerdict.FIRST: "without an earlier night",
}
"""Words after a count of jobs; for other verdicts their own words."""
ENDS = {
    TrialState.ADMITTED: "admitted",
    TrialState.FAILED: "failed",
    TrialState.REFUSED: "refused",
    TrialState.LOST: "lost",
    TrialState.UNJUDGED: "unjudged",
    TrialState.PRUNED: "ended_early",
}
"""End of a job's trial -> the field of the job's summary that counts it."""


class BestSummary(Model, extra="allow"):
    """The best configuration of a job's night; the primary metric is a further field of its own name."""

    trial: int
    config: dict[str, bool | int | float | str]
    value: float
    """Value of the compared figure."""
    num_runs: int
    low: float | None = None
    high: float | None = None
    """`low` to `high` is the 95 % interval of the value; None if nothing was measured here."""
    evidence: str


class JobSummary(Model):
    """One job's night."""

    job: str
    workload: str
    launcher: str
    objective: str
    provenance: str | None = None
    """None if it did not run."""
    run: str | None = None
    resumed: bool = False
    """Whether it continued an interrupted search."""
    verdict: NightVerdict
    text: str
    figure: str = ""
    """Name of the figure that is compared from night to night."""
    unit: str = ""
    """Its unit."""
    best: BestSummary | None = None
    trials: int = 0
    """Trials that finished, confirmations and those lost to the infrastructure included: the sum of `ENDS`."""
    admitted: int = 0
    failed: int = 0
    refused: int = 0
    """Trials that ran and were not admitted."""
    lost: int = 0
    """Trials lost to infrastructure failures."""
    unjudged: int = 0
    """Trials that could not be judged because of an error of ccl-search."""
    ended_early: int = 0
    """Trials whose first measurements showed that they are slower than the best beyond doubt."""
    spent: Spent = Spent()
    """Amounts that count against budgets; its trials are those that the search proposed."""
    worse: tuple[Change, ...] = ()
    better: tuple[Change, ...] = ()
    same: tuple[Change, ...] = ()
    noise: float | None = None
    """Run-to-run noise: standard deviation of one run, relative to its value."""
    nights_before: int = 0
    ending: str = ""
    diagnosis: tuple[str, ...] = ()


class PrunedSummary(Model):
    """Evidence that was removed."""

    trials: int = 0
    gib: float = 0.0
    nights: tuple[str, ...] = ()


class NightSummary(Model):
    """Content of `summary.json`."""

    schema_version: int = SUMMARY_VERSION
    name: str
    night: str
    """Stamp of the start, UTC: `20261121-220000`."""
    started: str
    ended: str
    deadline: str | None = None
    exit_code: int
    stopped: bool = False
    """Whether a signal stopped it before its end; a start before that end continues it."""
    text: str
    jobs: tuple[JobSummary, ...]
    spent: Spent
    """Sum over the jobs."""
    pruned: PrunedSummary = PrunedSummary()
    notes: tuple[str, ...] = ()


def describe_trials(night: NightSummary) -> str:
    """The trials of all jobs in words: `8 of 12 trials admitted (2 failed, 1 not admitted, 1 lost ...)`."""
    return describe_counts({end: sum(getattr(job, name) for job in night.jobs) for end, name in ENDS.items()})


def choose_exit_code(verdicts: Sequence[NightVerdict]) -> int:
    """3 if a job regressed, else 4 if one had infrastructure trouble, else 1 if one has no result, else 0."""
    codes = (EXIT_REGRESSED, EXIT_TROUBLE, EXIT_NO_RESULT)
    return next((code for verdict, code in zip(ORDER, codes, strict=False) if verdict in verdicts), EXIT_OK)


def count_verdicts(verdicts: Sequence[NightVerdict]) -> str:
    """The verdicts in one line: `3 jobs: 1 regressed, 2 unchanged`."""
    counted = [(verdict, list(verdicts).count(verdict)) for verdict in ORDER]
    parts = [f"{count} {COUNTED.get(verdict, verdict.value)}" for verdict, count in counted if count]
    return f"{len(verdicts)} job{'s' * (len(verdicts) > 1)}: {', '.join(parts)}" if parts else "nothing ran"


def render_message(night: NightSummary) -> str:
    """The message for the chat, a few lines."""
    shown = [job for verdict in ORDER for job in night.jobs if job.verdict is verdict][:10]
    lines = [f"ccl-search {night.name}, night {night.night}: {night.text}"]
    names = {NightVerdict.FIRST: "first night"}
    lines += [f"- {job.job}: {names.get(job.verdict, job.verdict.value)}: {one_line(job.text, 220)}" for job in shown]
    more = len(night.jobs) - len(shown)
    return "\n".join([*lines, f"and {more} more jobs"] if more else lines)


def show_best(job: JobSummary) -> str:
    """The best figure with its unit, interval and provenance."""
    if job.best is None:
        return "none"
    mark = Provenance(job.provenance).mark if job.provenance else ""
    low, high = job.best.low, job.best.high
    span = f" [{show_number(low, 4)}, {show_number(high, 4)}]" if low is not None and high is not None else ""
    return f"{show_number(job.best.value, 4)} {job.unit}".rstrip() + span + mark
