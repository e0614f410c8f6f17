"""What a search found, in words: the best, how sure it is, what it beat, and where the evidence lies."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cclsearch.core.text import one_line
from cclsearch.core.values import Provenance
from cclsearch.record.event import Purpose
from cclsearch.record.state import RunState
from cclsearch.record.trial import Trial
from cclsearch.report.certainty import Certainty, estimate_certainty
from cclsearch.run.catalog import name_run
from cclsearch.run.spec import RunSpec
from cclsearch.score.objective import Objective


@dataclass(frozen=True)
class Summary:
    """The end of a search; plain data for the terminal, `best --json` and the night."""

    run_id: str
    provenance: Provenance
    best: Trial | None
    lines: tuple[str, ...]


def summarize_run(spec: RunSpec, state: RunState, folder: Path) -> Summary:
    """The summary of a search as it stands."""
    best = state.best
    lines = [*(_best_lines(spec, state, folder, best) if best else _no_best_lines(state))]
    lines += _failure_lines(state)
    lines.append(f"evidence: {folder}")
    return Summary(spec.run_id, spec.provenance, best, tuple(lines))


def best_as_json(spec: RunSpec, state: RunState, folder: Path) -> dict[str, Any] | None:
    """What `best --json` prints: run, trial, config, figures, how sure, evidence, provenance; None without a best."""
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
        "chance_best": certainty.chance,
        "runs": certainty.num_runs,
        "loss_interval": [interval.low, interval.high],
        "interval_confidence": interval.confidence,
        "noise": certainty.noise.relative,
        "noise_measured": certainty.noise.is_measured,
        "beaten": list(certainty.beaten),
        "tied": list(certainty.tied),
    }


def summarize_as_json(spec: RunSpec, state: RunState, folder: Path) -> str:
    """The end of a search as one JSON line: `best` is null where there is none."""
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
    told = [text for text, name in extras if name in metrics]
    if told:
        lines.append("      " + ", ".join(told))
    if best.rationale:
        lines.append(f"why it was tried: {one_line(best.rationale, 300)} ({best.proposer})")
    lines += [f"where its step goes: {one_line(text, 300)}" for text in best.outcome.diagnosis[:3]]
    lines += [f"how sure: {text}" for text in describe_confidence(spec, state, best, folder)]
    lines += _beaten_lines(state, best, spec.provenance)
    return lines


def describe_figure(objective: Objective, trial: Trial) -> str:
    """A ranked trial's figure under the objective, with its name and unit; of several metrics each one's."""
    if not objective.is_multi:
        better = " (greater is better)" if objective.is_weighted else ""
        return f"{objective.score_label} {objective.score_from_loss(trial.loss or math.nan):.4g}{better}"
    assert trial.outcome is not None
    values = (trial.outcome.metrics[term.metric] * term.scale for term in objective.terms)
    told = (f"{t.metric} {v:.4g} {t.unit or ''}".rstrip() for t, v in zip(objective.terms, values, strict=True))
    return ", ".join(told)


def describe_confidence(spec: RunSpec, state: RunState, best: Trial, folder: Path) -> list[str]:
    """How likely the best is truly the best of what was tried, what it cannot be told from, and what says so."""
    certainty = estimate_certainty(state, spec.provenance)
    if certainty is None:
        how = spec.provenance.value
        return [f"its figure is {how}, read once: no run can confirm it; the noise of its source is unknown"]
    noise, interval = certainty.noise, certainty.interval
    basis = f"measured from {noise.num_repeats} repeats" if noise.is_measured else "assumed: nothing was repeated yet"
    ends = sorted(spec.objective.score_from_loss(loss) for loss in (interval.low, interval.high))
    lines = [
        f"{certainty.chance:.0%} likely the best of what was tried; run {certainty.num_runs} x,"
        f" {interval.confidence:.0%} interval of {spec.objective.score_label}: {ends[0]:.4g} to {ends[1]:.4g};"
        f" run-to-run noise {noise.relative:.1%} ({basis})"
    ]
    if certainty.tied:
        shown = ", ".join(f"{number} ({_ratio(state.trials[number], best)})" for number in certainty.tied[:3])
        more = f" and {len(certainty.tied) - 3} more" if len(certainty.tied) > 3 else ""
        lines.append(f"not beyond the noise ({certainty.confidence:.0%}): it cannot be told from trial {shown}{more}")
    if certainty.num_runs == 1:
        lines.append(f"run once: `ccl-search resume {name_run(folder)} --confirm 2` runs the finalists again")
    return lines


def _beaten_lines(state: RunState, best: Trial, provenance: Provenance) -> list[str]:
    ranked = [t for t in state.trials.values() if t.loss is not None and t.purpose is Purpose.SEARCH]
    others = sorted((t for t in ranked if t.config != best.config), key=lambda trial: trial.loss or 0.0)
    if not others:
        return ["it beat nothing: no other trial was ranked"]
    first = min(ranked, key=lambda trial: trial.number)
    next_one = f"next is trial {others[0].number} ({_ratio(others[0], best)})"
    certainty = estimate_certainty(state, provenance)
    if certainty is None:
        lines = [f"it beat {len(others)} other configuration{'s' * (len(others) > 1)}; {next_one}"]
    else:
        beaten, sure = len(certainty.beaten), f"{certainty.confidence:.0%}"
        lines = [f"it beat {beaten} of {len(others)} other configurations beyond the noise ({sure} sure); {next_one}"]
    if first.config != best.config:
        lines.append(f"against the first trial, {first.config}: {_ratio(first, best)}")
    return lines


def _ratio(other: Trial, best: Trial) -> str:
    assert other.outcome is not None
    assert best.outcome is not None
    theirs, ours = other.outcome.metrics.get("step_time_s"), best.outcome.metrics.get("step_time_s")
    if not theirs or not ours:
        return "no step time"
    ratio = theirs / ours
    if ratio >= 1.1:
        return f"{ratio:.3g} x its step time"
    return f"its step takes {abs(ratio - 1):.2%} {'longer' if ratio >= 1 else 'less'}"


def _no_best_lines(state: RunState) -> list[str]:
    if not state.trials:
        return ["nothing ran yet"]
    reasons = Counter(
        reason
        for trial in state.trials.values()
        if trial.outcome and trial.outcome.admission and trial.outcome.failure is None
        for reason in trial.outcome.admission.reasons
    )
    lines = ["no trial was admitted, so there is no best configuration"]
    return lines + [f"not admitted ({count} x): {one_line(reason, 300)}" for reason, count in reasons.most_common(3)]


def _failure_lines(state: RunState) -> list[str]:
    kinds: Counter[str] = Counter()
    example: dict[str, str] = {}
    for trial in state.trials.values():
        failure = trial.outcome.failure if trial.outcome else None
        if failure:
            kinds[failure.kind.value] += 1
            example.setdefault(failure.kind.value, f"trial {trial.number}: {one_line(failure.message, 160)}")
    return [f"failed: {count} x {kind} ({example[kind]})" for kind, count in kinds.most_common()]
