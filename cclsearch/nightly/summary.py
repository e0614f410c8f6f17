"""Summary of a night: `summary.json`, how it is built, its pages, the message for the chat, and the exit code."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cclsearch.charts.chart import Chart
from cclsearch.charts.compare import NightPoint, draw_nights
from cclsearch.core.content import trial_folder
from cclsearch.core.secrets.redact import redact
from cclsearch.core.templates import open_templates
from cclsearch.core.text import one_line, show_number
from cclsearch.core.values import Model, Provenance, format_config
from cclsearch.nightly.compare import Change, Comparison, NightVerdict, compare_night
from cclsearch.nightly.config import NightlyConfig
from cclsearch.nightly.history import Night, choose_figure, find_runs, mean_of, read_earlier, read_night
from cclsearch.nightly.night import NightlyJobState, NightRun, show_time
from cclsearch.nightly.prune import Pruned
from cclsearch.nightly.window import Spent
from cclsearch.propose.events import ArbiterMove, ArbiterPhase
from cclsearch.record.trial import TrialState, describe_counts
from cclsearch.report.page import place_charts, render_template
from cclsearch.run.folder import Run, load_run
from cclsearch.stats.noise import confidence_interval, estimate_noise
from cclsearch.tasks.base import task_of

SUMMARY_VERSION = 1
EXIT_OK, EXIT_NO_RESULT, EXIT_USAGE, EXIT_REGRESSED, EXIT_TROUBLE, EXIT_BUSY = range(6)
ORDER = tuple(NightVerdict)
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
    pruned: Pruned = Pruned()
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


STOPPED = "the night was stopped before its end: a start before that end continues it, with what it already spent"


def assemble_jobs(night: NightRun) -> tuple[list[JobSummary], list[str]]:
    """Compare each job with its earlier nights; returns the summaries, and the faults of the ledgers."""
    damage: list[str] = []
    return [_assemble(night, state, damage) for state in night.states.values()], damage


def _assemble(night: NightRun, state: NightlyJobState, damage: list[str]) -> JobSummary:
    job = state.job
    base: dict[str, Any] = {
        "job": job.key,
        "workload": redact(job.workload),
        "launcher": job.launcher or ("recording" if job.recording else "this machine"),
        "objective": redact(job.objective_name),
    }
    figure = choose_figure(night.plans[job.key].spec)
    base |= {"figure": figure.name, "unit": figure.unit}
    if state.folder is None:
        text = state.error or night.find_end_reason() or "the night was stopped before its turn"
        verdict = NightVerdict.TROUBLE if state.is_trouble else NightVerdict.NO_RESULT
        return JobSummary(**base, verdict=verdict, text=one_line(f"did not run: {text}", 400))
    run = load_run(state.folder)
    tonight = read_night(run, since_s=night.window.started_s)
    others = [folder for folder in find_runs(night.runs, night.config.name, job.key) if folder != state.folder]
    earlier = read_earlier(others, run.spec)
    end = run.state.ended or run.state.stopped
    ending = state.error or (end.reason if end else "")
    compared = _compare(night.config, state, tonight, earlier, ending)
    best = tonight.best
    trial = run.state.trials[tonight.samples[best][0].trial] if best else None
    base |= {name: getattr(compared, name) for name in ("worse", "better", "same")}
    base |= {name: tonight.ends[end] for end, name in ENDS.items()}
    damage += [line for one in (*earlier, tonight) for line in one.run.state.damage]
    return JobSummary(
        **base,
        provenance=run.spec.provenance.value,
        run=run.folder.name,
        resumed=state.resumed,
        verdict=compared.verdict,
        text=redact(one_line("; ".join(filter(None, (compared.text, _describe_lost_llm(run)))), 600)),
        best=_summarize_best(tonight, compared) if best else None,
        trials=tonight.num_trials,
        spent=night.count_spent_by(state),
        noise=compared.noise.relative if compared.noise and run.spec.provenance is Provenance.MEASURED else None,
        nights_before=len(earlier),
        ending=redact(one_line(ending, 300)),
        diagnosis=tuple(one_line(line, 300) for line in trial.outcome.diagnosis[:3]) if trial and trial.outcome else (),
    )


def _describe_lost_llm(run: Run) -> str:
    """Say that the search went on without its LLM, and why; empty if it did not."""
    moves = [event.after for event in run.state.reported if isinstance(event, ArbiterMove)]
    last = moves[-1] if moves else None
    is_away = last is not None and last.phase is ArbiterPhase.FALLBACK and last.cause == "provider"
    is_lost = is_away or (last is not None and last.phase is ArbiterPhase.OFF)
    return f"searched without the LLM since trial {moves[-1].since_trial}: {moves[-1].reason}" if is_lost else ""


def _compare(
    config: NightlyConfig, state: NightlyJobState, tonight: Night, earlier: Sequence[Night], ending: str
) -> Comparison:
    limits = {"tolerance": config.tolerance, "confidence": config.confidence}
    compared = compare_night(tonight, earlier, ending=ending, **limits)
    if state.is_trouble and compared.verdict is not NightVerdict.REGRESSED:
        text = ending if compared.verdict is NightVerdict.NO_RESULT else f"{compared.text}; however: {ending}"
        return replace(compared, verdict=NightVerdict.TROUBLE, text=text)
    return compared


def _summarize_best(tonight: Night, compared: Comparison) -> BestSummary | None:
    best = tonight.best
    if best is None:
        return None
    samples = tonight.samples[best]
    measured = tonight.run.spec.provenance is Provenance.MEASURED
    noise = compared.noise or estimate_noise([])
    span = confidence_interval([sample.value for sample in samples], noise) if measured else None
    low, high = sorted(map(tonight.figure.show, (span.low, span.high))) if span else (None, None)
    outcome, primary = tonight.run.state.trials[samples[0].trial].outcome, task_of(tonight.run.spec.card).primary
    return BestSummary(
        trial=samples[0].trial,
        config=dict(best),
        value=tonight.figure.show(mean_of(samples)),
        **{primary: outcome.metrics.get(primary) if outcome else None},
        num_runs=len(samples),
        low=low,
        high=high,
        evidence=str(trial_folder(tonight.run.folder, samples[0].trial).relative_to(tonight.run.folder.parent)),
    )


def assemble_summary(
    night: NightRun, jobs: Sequence[JobSummary], damage: Sequence[str], pruned: Pruned, *, is_stopped: bool
) -> NightSummary:
    """Summary of the whole night."""
    notes = (STOPPED,) if is_stopped else ()
    verdicts = [job.verdict for job in jobs]
    window = night.window
    return NightSummary(
        name=night.config.name,
        night=window.stamp,
        started=show_time(window.started_s),
        ended=show_time(time.time()),
        deadline=show_time(window.deadline_s) if window.deadline_s is not None else None,
        exit_code=choose_exit_code(verdicts),
        stopped=is_stopped,
        text=count_verdicts(verdicts) + ("; stopped before its end" if is_stopped else ""),
        jobs=tuple(jobs),
        spent=sum((job.spent for job in jobs), Spent()),
        pruned=pruned,
        notes=(*pruned.notes, *damage, *notes),
    )


HERE = Path(__file__).parent
MAX_FOLLOWED = 3
"""Number of configurations with a line of their own: those that ran on the most nights."""
WORDS = {"show_best": show_best, "describe_trials": describe_trials, "format_config": format_config}
"""Functions that templates call."""


def render_night(night: NightSummary, history: Sequence[NightSummary]) -> str:
    """Render the page; `history` holds the summaries of earlier nights, the oldest first."""
    charts = list(draw_series([*history, night]).values())
    values = {"night": night, "history": [*history, night][::-1], "number": show_number}
    worst = (NightVerdict.REGRESSED, NightVerdict.TROUBLE)
    placed = place_charts(charts, "n")
    return render_template("night.html.j2", {**values, **WORDS, "worst": worst}, charts=placed, folder=HERE)


def render_markdown(night: NightSummary) -> str:
    """Content of `summary.md`."""
    environment = open_templates(HERE)
    environment.filters["cell"] = _cell
    return environment.get_template("summary.md.j2").render(night=night, **WORDS)


def _cell(text: str) -> str:
    """Text from outside as one line of Markdown, with all markup escaped."""
    return re.sub(r"([|<>\[\]`*\\])", r"\\\1", one_line(text, 600))


def draw_series(nights: Sequence[NightSummary]) -> dict[str, Chart]:
    """Per job, by the name of its chart: the best of each night, and configurations that ran on several nights.

    `nights` begins with the oldest.
    """
    charts: dict[str, Chart] = {}
    for place, name in enumerate(dict.fromkeys(job.job for night in nights for job in night.jobs)):
        found = [(night.night, one, one.best) for night in nights for one in night.jobs if one.job == name and one.best]
        if not found:
            continue
        newest = found[-1][1]
        shown = [each for each in found if (each[1].figure, each[1].unit) == (newest.figure, newest.unit)]
        figures = [list_figures(one) for _, one, _ in shown]
        counts = Counter(config for by_config in figures for config in by_config)
        followed = [config for config, count in counts.most_common(MAX_FOLLOWED) if count > 1]
        points = [
            NightPoint(
                night=night,
                value=best.value,
                config=format_config(best.config),
                interval=(best.low, best.high) if best.low is not None and best.high is not None else None,
                followed={config: by_config[config] for config in followed if config in by_config},
            )
            for (night, _, best), by_config in zip(shown, figures, strict=True)
        ]
        mark = Provenance(newest.provenance).mark if newest.provenance else ""
        words = newest.figure.removesuffix(f"_{newest.unit}").replace("_", " ")
        title = f"{words} ({newest.unit}){mark}" if newest.unit else words + mark
        chart = draw_nights(points, title, name=f"nights{place}", title=f"{name}, night by night")
        charts |= {chart.name: chart} if chart is not None else {}
    return charts


def list_figures(job: JobSummary) -> dict[str, float]:
    """Configuration -> its figure in this night: of the best, and of those that ran on earlier nights too."""
    changes = (*job.worse, *job.better, *job.same)
    figures = {format_config(change.config): change.now for change in changes if change.now is not None}
    return figures | ({format_config(job.best.config): job.best.value} if job.best else {})
