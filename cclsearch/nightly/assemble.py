"""Builds the summary of a finished night, and the series of nights behind its charts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cclsearch.core.content import trial_folder
from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import one_line
from cclsearch.core.values import Provenance
from cclsearch.nightly.compare import Comparison, NightVerdict, compare_night
from cclsearch.nightly.config import NightlyConfig
from cclsearch.nightly.history import Night, choose_figure, find_runs, mean_of, read_earlier, read_night
from cclsearch.nightly.night import NightlyJobState, NightRun, show_time
from cclsearch.nightly.prune import Pruned
from cclsearch.nightly.share import Spent
from cclsearch.nightly.summary import (
    ENDS,
    BestSummary,
    JobSummary,
    NightSummary,
    PrunedSummary,
    choose_exit_code,
    count_verdicts,
)
from cclsearch.propose.events import ArbiterMove, ArbiterPhase
from cclsearch.run.folder import Run, load_run
from cclsearch.stats.noise import confidence_interval, estimate_noise
from cclsearch.tasks.base import task_of

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
        pruned=PrunedSummary(trials=pruned.num_trials, gib=pruned.num_bytes / 2**30, nights=pruned.nights),
        notes=(*pruned.notes, *damage, *notes),
    )
