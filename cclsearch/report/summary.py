"""The result of a search in sentences: the best configuration, its confidence, what it beats, and its evidence."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cclsearch.core.text import count_of, one_line
from cclsearch.core.values import Provenance
from cclsearch.record.event import Purpose
from cclsearch.record.state import RunState
from cclsearch.record.trial import Trial
from cclsearch.report.certainty import Certainty, estimate_certainty
from cclsearch.report.terminal import format_step_time
from cclsearch.run.catalog import name_run
from cclsearch.run.spec import RunSpec
from cclsearch.score.objective import Objective


@dataclass(frozen=True)
class Summary:
    """The result of a search: plain data for the terminal, `best --json` and the nightly summary."""

    run_id: str
    provenance: Provenance
    best: Trial | None
    lines: tuple[str, ...]


def summarize_run(spec: RunSpec, state: RunState, folder: Path) -> Summary:
    """Summarize the search in its present state."""
    best = state.best
    lines = [*(_best_lines(spec, state, folder, best) if best else _no_best_lines(state))]
    lines += _failure_lines(state)
    lines.append(f"evidence: {folder}")
    return Summary(spec.run_id, spec.provenance, best, tuple(lines))


def best_as_json(spec: RunSpec, state: RunState, folder: Path) -> dict[str, Any] | None:
    """What `best --json` prints: run, trial, config, figures, confidence, evidence, provenance; None without a best."""
    best = state.best
    if best is None:
        return None
    certainty = estimate_certainty(state, spec.provenance)
    metrics = best.outcome.metrics if best.outcome else {}
    return {
        "run": spec.run_id,
        "trial": best.number,
        "config": dict(best.config),
        "step_time_s": metrics.get("step_time_s"),
        "tokens_per_s": metrics.get("tokens_per_s"),
        "tokens_per_s_per_accelerator": metrics.get("tokens_per_s_per_accelerator"),
        "mfu": metrics.get("mfu"),
        "peak_memory_gib": metrics.get("peak_memory_gib"),
        "num_accelerators": metrics.get("num_accelerators"),
        "objective": spec.objective.name,
        "loss": best.loss,
        "evidence": str(folder / "trials" / f"{best.number:04d}"),
        "provenance": spec.provenance.value,
        "confidence": _certainty_as_json(certainty) if certainty else None,
    }


def _certainty_as_json(certainty: Certainty) -> dict[str, Any]:
    interval = certainty.interval
    return {
        "chance_best": certainty.probability,
        "runs": certainty.num_runs,
        "loss_interval": [interval.low, interval.high],
        "interval_confidence": interval.confidence,
        "noise": certainty.noise.relative,
        "noise_measured": certainty.noise.is_measured,
        "beaten": list(certainty.beaten),
        "tied": list(certainty.tied),
    }


def summarize_as_json(spec: RunSpec, state: RunState, folder: Path) -> str:
    """The end of a search as one JSON line; `best` is null if no trial was ranked."""
    best = best_as_json(spec, state, folder)
    ended = state.ended or state.stopped
    finished = state.ended is not None
    return json.dumps({"event": "summary", "best": best, "ended": finished, "reason": ended.reason if ended else None})


def _best_lines(spec: RunSpec, state: RunState, folder: Path, best: Trial) -> list[str]:
    assert best.outcome is not None
    metrics = best.outcome.metrics
    mark = "" if spec.provenance is Provenance.MEASURED else f" ({spec.provenance.value})"
    lines = [f"best: trial {best.number}  {best.config}"]
    if spec.objective.metrics != ("step_time_s",):
        lines.append(f"      {describe_figure(spec.objective, best)}{mark}")
    lines.append(f"      step time {metrics['step_time_s']:.4g} s{mark}")
    extras = [
        (f"{metrics['tokens_per_s']:,.0f} tokens/s", "tokens_per_s"),
        (
            f"{metrics.get('tokens_per_s_per_accelerator', 0):,.0f} tokens/s per accelerator",
            "tokens_per_s_per_accelerator",
        ),
        (f"MFU {metrics.get('mfu', 0):.1%}", "mfu"),
        (f"peak memory {metrics.get('peak_memory_gib', 0):.3g} GiB", "peak_memory_gib"),
    ]
    figures = [text for text, name in extras if name in metrics]
    if figures:
        lines.append("      " + ", ".join(figures))
    if best.rationale:
        lines.append(f"proposed by {best.proposer}: {one_line(best.rationale, 300)}")
    lines += [f"diagnosis: {one_line(text, 300)}" for text in best.outcome.diagnosis[:3]]
    lines += [f"confidence: {text}" for text in describe_confidence(spec, state, best, folder)]
    lines += _comparison_lines(spec, state, best)
    return lines


def describe_figure(objective: Objective, trial: Trial) -> str:
    """The figure of a ranked trial under the objective, with name and unit; for a Pareto objective each metric's."""
    if not objective.is_multi:
        better = " (greater is better)" if objective.is_weighted else ""
        return f"{objective.score_label} {objective.score_from_loss(trial.loss or math.nan):.4g}{better}"
    assert trial.outcome is not None
    values = (trial.outcome.metrics[term.metric] * term.scale for term in objective.terms)
    return ", ".join(
        f"{t.metric} {v:.4g} {t.unit or ''}".rstrip() for t, v in zip(objective.terms, values, strict=True)
    )


def describe_confidence(spec: RunSpec, state: RunState, best: Trial, folder: Path) -> list[str]:
    """The probability that the best is truly the best of what was tried, its interval, and the trials it ties with."""
    certainty = estimate_certainty(state, spec.provenance)
    if certainty is None:
        how = spec.provenance.value
        return [f"unknown: the figure is {how} and no run can confirm it; the noise of its source is unknown"]
    noise, interval = certainty.noise, certainty.interval
    basis = (
        f"measured, repeats: {noise.num_repeats}" if noise.is_measured else "assumed: no configuration ran twice yet"
    )
    ends = sorted(spec.objective.score_from_loss(loss) for loss in (interval.low, interval.high))
    probability = f"{certainty.probability:.0%} probability of being the best configuration tried"
    lines = [
        f"{probability if certainty.beaten or certainty.tied else 'only one configuration was ranked'};"
        f" {interval.confidence:.0%} interval of {_format_range(spec.objective, *ends)}"
        f" from {count_of(certainty.num_runs, 'run')};"
        f" run-to-run noise {noise.relative:.1%} ({basis})"
    ]
    if certainty.tied:
        shown = ", ".join(
            f"{number} ({_compare_step_time(state.trials[number], best)})" for number in certainty.tied[:3]
        )
        more = f" and {len(certainty.tied) - 3} more" if len(certainty.tied) > 3 else ""
        trials = f"trial{'s' * (len(certainty.tied) > 1)} {shown}{more}"
        lines.append(f"ties with {trials}: within noise ({certainty.confidence:.0%} confidence)")
    if certainty.num_runs == 1:
        lines.append(f"ran once; `ccl-search resume {name_run(folder)} --confirm 2` runs the finalists again")
    return lines


def _format_range(objective: Objective, low: float, high: float) -> str:
    if objective.is_weighted:
        return f"{objective.score_label}: {low:.4g} to {high:.4g}"
    name, unit = objective.terms[0].metric.replace("step_time_s", "the step time"), objective.terms[0].unit or ""
    return f"{name}: {low:.4g} {unit}".rstrip() + f" to {high:.4g} {unit}".rstrip()


def _comparison_lines(spec: RunSpec, state: RunState, best: Trial) -> list[str]:
    ranked = [t for t in state.trials.values() if t.loss is not None and t.purpose is Purpose.SEARCH]
    others = sorted((t for t in ranked if t.config != best.config), key=lambda trial: trial.loss or 0.0)
    if not others:
        return ["no other configuration was ranked, so there is nothing to compare the best with"]
    difference = _compare_step_time(others[0], best)
    certainty, timed = estimate_certainty(state, spec.provenance), spec.objective.metrics == ("step_time_s",)
    if certainty is None and timed:
        difference = f"{format_step_time(best)} -> {format_step_time(others[0])}, {difference[len('step time ') :]}"
    runner_up = f"runner-up: trial {others[0].number} ({difference})"
    if certainty is None:
        how = f"{len(others) + 1} {spec.provenance.value}"
        lines = [f"{f'lowest of {how} step times' if timed else f'best of {how} configurations'}; {runner_up}"]
    else:
        share = f"{len(certainty.beaten)} of {len(others)} other configurations"
        lines = [f"better than {share} beyond noise ({certainty.confidence:.0%} confidence); {runner_up}"]
    if state.baseline is not None and state.baseline.config != best.config:
        is_tied = timed and certainty is not None and state.baseline.number in certainty.tied
        lines.append(_compare_with_baseline(best, state.baseline, is_tied=is_tied))
    return lines


def _compare_with_baseline(best: Trial, baseline: Trial, *, is_tied: bool) -> str:
    ratio = _time_ratio(baseline, best)
    times = f"trial {baseline.number}: {format_step_time(baseline)} -> {format_step_time(best)}"
    if is_tied:
        less = f"{abs(1 - 1 / ratio):.2%} {'less' if ratio >= 1 else 'more'}"
        return f"within noise of the baseline ({times}, {less}; {baseline.config})"
    faster = f"{ratio:.3g}x faster" if ratio >= 1.1 else f"{ratio - 1:.2%} faster" if ratio >= 1 else "not faster"
    return f"{faster} than the baseline ({times}; {baseline.config})"


def _compare_step_time(other: Trial, best: Trial) -> str:
    ratio = _time_ratio(other, best)
    if math.isnan(ratio):
        return "no step time"
    if ratio >= 1.1:
        return f"step time {ratio:.3g}x as long"
    return f"step time {abs(ratio - 1):.2%} {'longer' if ratio >= 1 else 'shorter'}"


def _time_ratio(other: Trial, best: Trial) -> float:
    """Step time of another trial divided by that of the best; NaN if one of them has none."""
    theirs, ours = (trial.outcome.metrics.get("step_time_s") if trial.outcome else None for trial in (other, best))
    return theirs / ours if theirs and ours else math.nan


def _no_best_lines(state: RunState) -> list[str]:
    if not state.trials:
        return ["no trial has run yet"]
    reasons = Counter(
        reason
        for trial in state.trials.values()
        if trial.outcome and trial.outcome.admission and trial.outcome.failure is None
        for reason in trial.outcome.admission.reasons
    )
    if not any(trial.is_finished for trial in state.trials.values()):
        return ["no trial has finished yet"]
    lines = ["no trial was admitted, so there is no best configuration"]
    return lines + [f"not admitted: {count} x {one_line(reason, 300)}" for reason, count in reasons.most_common(3)]


def _failure_lines(state: RunState) -> list[str]:
    kinds: Counter[str] = Counter()
    example: dict[str, str] = {}
    for trial in state.trials.values():
        failure = trial.outcome.failure if trial.outcome else None
        if failure:
            kinds[failure.kind.describe()] += 1
            example.setdefault(failure.kind.describe(), f"trial {trial.number}: {one_line(failure.message, 160)}")
    return [f"failed: {count} x {kind} ({example[kind]})" for kind, count in kinds.most_common()]
