"""Turns a run folder into the data of its report. Here text from outside is made plain and secrets are masked."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta

from cclsearch.charts.trials import NeighborPoint
from cclsearch.core.text import show_number
from cclsearch.core.values import Provenance, Value, format_knob_value
from cclsearch.propose.events import LlmTurn, find_withdrawn, leave_out_outdated
from cclsearch.record.trial import Trial, TrialState, describe_counts
from cclsearch.report.certainty import estimate_certainty
from cclsearch.report.data import RunPage
from cclsearch.report.figures import find_figure, show_value
from cclsearch.report.launch_form import describe_launch
from cclsearch.report.rows import TrialRow, clean, gather_environment, gather_turns, make_detailed_row, read_script
from cclsearch.report.summary import describe_confidence, describe_drift, describe_other_load
from cclsearch.run.annotations import read_annotations
from cclsearch.run.closest import find_closest
from cclsearch.run.folder import Run, Standing
from cclsearch.run.spec import RunSpec
from cclsearch.run.usage import describe_saved, describe_usage
from cclsearch.tasks.base import task_of

TOKENS = ("input", "output", "cache_read", "cache_write")


def gather_run(run: Run) -> RunPage:
    """Everything that a report shows about one run."""
    spec, state = run.spec, run.state
    baseline = state.baseline
    figure, best = find_figure(spec), state.best
    rows = tuple(make_detailed_row(run, trial, figure) for trial in state.trials.values())
    certainty = estimate_certainty(state, spec.provenance)
    interval = (certainty.interval.low, certainty.interval.high) if certainty else ()
    measured = spec.provenance is Provenance.MEASURED
    low_high = sorted(spec.objective.score_from_loss(loss) for loss in interval)
    return RunPage(
        run_id=spec.run_id,
        task=task_of(spec.card),
        workload=clean(spec.workload),
        card=clean(spec.card.name),
        title=clean(spec.card.title),
        model=clean(spec.card.family),
        work=describe_work(spec),
        hardware=_describe_hardware(spec),
        framework=clean(spec.framework),
        provenance=spec.provenance.value,
        objective=clean(spec.objective.spec),
        constraints=tuple(clean(str(constraint)) for constraint in spec.objective.constraints),
        score_label=figure.metric.words_with_unit,
        greater_is_better=spec.objective.is_weighted or spec.objective.terms[0].direction.value == "maximize",
        status=_describe_status(run),
        banner=tuple(clean(line) for line in spec.banner),
        damage=tuple(clean(line) for line in state.damage),
        trials=rows,
        counts=describe_counts(state.trials.counts),
        best=best.number if best else None,
        baseline=baseline.number if baseline else None,
        facts=_gather_facts(run, rows),
        confidence=_gather_confidence(run),
        interval=(low_high[0], low_high[1]) if low_high else None,
        drift=tuple(clean(line) for line in describe_drift(state)),
        other_load=tuple(clean(line) for line in describe_other_load(spec, state)),
        neighbors=_find_neighbors(rows, best),
        costs=_gather_costs(run, rows),
        notes=_gather_notes(run),
        tags=read_annotations(run.folder).tags,
        launch="\n".join(describe_launch(spec, best.config)) if best else "",
        created=spec.created,
        folder=run.folder,
        job_script=read_script(run.trial_folder(best.number)) if best and measured else "",
        turns=gather_turns(run.folder),
        environment=gather_environment(run),
    )


def _gather_notes(run: Run) -> tuple[tuple[str, str], ...]:
    """Tags and notes of people, then the search's own notes."""
    lines = [line.split(": ", 1) for line in read_annotations(run.folder).describe()]
    reported = leave_out_outdated(run.state.reported)
    withdrawn = find_withdrawn(reported)
    marks = {turn: f" (withdrawn in turn {later})" for turn, later in withdrawn.items()}
    own = [(e.label, e.text + (marks.get(e.turn, "") if isinstance(e, LlmTurn) else "")) for e in reported]
    return tuple((clean(topic), clean(text)) for topic, text in (*lines, *own))


def describe_work(spec: RunSpec) -> str:
    """Model with its shape, work and precision: two runs of a task are compared only if these are equal."""
    card, arch = spec.card, spec.card.model
    model = f"{card.family} ({arch.num_layers} layers of {arch.hidden_size})" if arch else ""
    return clean(", ".join(filter(None, (model, task_of(card).describe_work(card), card.precision))))


def _describe_hardware(spec: RunSpec) -> str:
    """The accelerators, and which simulated cluster has them."""
    accelerators = f"{spec.card.hardware.num_accelerators} x {clean(spec.card.hardware.accelerator)}"
    return f"{accelerators} ({spec.simulated_cluster})" if spec.simulated_cluster else accelerators


def metrics_of(trial: Trial | None) -> Mapping[str, float] | None:
    """The metrics of a finished trial, such as the baseline; None before there is one."""
    return trial.outcome.metrics if trial and trial.outcome else None


def _describe_status(run: Run) -> str:
    end = run.state.ended or (run.state.stopped if run.status is Standing.STOPPED else None)
    reason = re.sub(r"(?<=')/[^']*/(?=trials/\d+/)", "", end.reason) if end else ""  # paths as this page links them
    return clean(f"{run.status}: {reason}" if end else run.status)


def _gather_facts(run: Run, rows: tuple[TrialRow, ...]) -> tuple[tuple[str, str], ...]:
    spec = run.spec
    best = run.state.best
    facts: list[tuple[str, str]] = []
    if best is not None and best.outcome is not None:
        metrics, task = best.outcome.metrics, task_of(spec.card)
        facts.append((f"best {task.primary_metric.words}", show_value(task.primary_metric, metrics[task.primary])))
        if spec.objective.is_weighted or spec.objective.metrics[0] != task.primary:
            row = next(row for row in rows if row.number == best.number)
            figure = find_figure(spec).metric
            facts.append(
                (f"best {figure.words}", show_value(figure, row.score) if row.score is not None else "unknown")
            )
        shown = [task.metric(name) for name in task.highlights if name in metrics]
        shown.sort(key=lambda metric: metric.unit == "fraction")
        facts += [(metric.words, show_value(metric, metrics[metric.name])) for metric in shown]
    ends = run.state.trials.counts
    facts.append(("trials admitted", f"{ends[TrialState.ADMITTED]} of {ends.total()}"))
    facts.append(("configurations in the space", f"{spec.space_size:,}"))
    return tuple(facts)


def _gather_confidence(run: Run) -> tuple[str, ...]:
    best = run.state.best
    if best is None:
        closest = find_closest(run.spec.objective, run.state)
        return (f"none: {clean(closest.text) if closest else 'no trial was admitted'}",)
    return tuple(clean(line) for line in describe_confidence(run.spec, run.state, best, run.folder))


def _find_neighbors(rows: tuple[TrialRow, ...], best: Trial | None) -> tuple[NeighborPoint, ...]:
    """Ranked trials that differ from the best in one or two knobs (two: one degree grows as another shrinks)."""
    winner = next((row for row in rows if best and row.number == best.number), None)
    if winner is None or not winner.value:
        return ()
    found = []
    for row in rows:
        changed = [knob for knob in winner.config if row.config.get(knob) != winner.config[knob]]
        if row.value and 1 <= len(changed) <= 2:
            found.append(
                NeighborPoint(describe_change(winner.config, row.config), row.value / winner.value, row.number)
            )
    return tuple(found)


def describe_change(old: Mapping[str, Value], new: Mapping[str, Value]) -> str:
    """The knobs in which two configurations differ, as `tp 2 → 4, dp 8 → 4`."""
    changed = [knob for knob in old if new.get(knob) != old[knob]]
    return ", ".join(
        f"{knob} {format_knob_value(old[knob])} → {format_knob_value(new.get(knob, '?'))}" for knob in changed
    )


def _gather_costs(run: Run, rows: tuple[TrialRow, ...]) -> tuple[tuple[str, str], ...]:
    costs: list[tuple[str, str]] = []
    hours = [row.accelerator_hours for row in rows if row.accelerator_hours is not None]
    if hours:
        costs.append(("accelerator-hours, queue time included", show_number(sum(hours))))
    elif run.spec.provenance is Provenance.CALLER:
        costs.append(("accelerator-hours", "unknown: the caller's function does not say what it used"))
    elif run.spec.provenance is not Provenance.MEASURED:
        costs.append(("accelerator-hours", f"none: the figures are {run.spec.provenance.value}, nothing ran"))
    if usage := describe_usage(run.spec, run.state):
        costs.append(("node-hours", usage))
    if saved := describe_saved(run.spec, run.state):
        costs.append(("saved", saved))
    turns = [event for event in run.state.reported if isinstance(event, LlmTurn)]
    tokens = {name: sum(getattr(turn.cost.usage, f"{name}_tokens") for turn in turns) for name in TOKENS}
    if any(tokens.values()):
        costs.append(("LLM tokens", ", ".join(f"{n:,} {name.replace('_', ' ')}" for name, n in tokens.items() if n)))
    if usd := sum(turn.cost.usd or 0.0 for turn in turns):
        costs.append(("LLM cost", f"{usd:.2f} USD"))
    if run.state.started_s and run.state.last_s > run.state.started_s:
        costs.append(("wall time", str(timedelta(seconds=round(run.state.last_s - run.state.started_s)))))
    proposers = Counter(trial.proposer for trial in run.state.trials.values())
    if proposers:
        costs.append(("proposed by", ", ".join(f"{clean(name)} {count}" for name, count in proposers.most_common())))
    return tuple(costs)
