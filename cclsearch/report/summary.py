"""The result of a search in sentences: the best configuration, its confidence, what it beats, and its evidence."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cclsearch.core.content import trial_folder
from cclsearch.core.metrics import NUM_ACCELERATORS
from cclsearch.core.text import count_of, one_line
from cclsearch.core.values import Provenance, format_config
from cclsearch.propose.events import NOTHING_LEFT, Note
from cclsearch.record.event import Purpose
from cclsearch.record.state import RunState
from cclsearch.record.trial import Trial, TrialState, describe_counts
from cclsearch.report.certainty import Certainty, estimate_certainty
from cclsearch.report.figures import ObjectiveFigure, find_figure, format_share, format_value, name_value, name_values
from cclsearch.report.terminal import SOURCES
from cclsearch.run.catalog import name_run
from cclsearch.run.closest import find_closest
from cclsearch.run.spec import RunSpec
from cclsearch.run.usage import describe_saved, describe_usage, find_node_hour_limit
from cclsearch.scoring.outcome import CONSTRAINTS_RULE
from cclsearch.space.framework import find_framework
from cclsearch.stats.noise import DEFAULT_CONFIDENCE, Noise
from cclsearch.tasks.base import task_of

ONLY_ONE = "only one configuration was admitted: nothing to compare with"


OTHER_LOAD_DOUBT, OTHER_LOAD_SDS = 0.05, 3.0
"""A trial is better on the second load if it is by this share, and by so many times the noise of a run."""


def summarize_run(spec: RunSpec, state: RunState, folder: Path) -> list[str]:
    """The result of the search in its present state, for the terminal."""
    best = state.best
    if best:
        lines = [*_best_lines(spec, state, folder, best), *_refusal_lines(state)]
    else:
        lines = _no_best_lines(spec, state)
    counted = [describe_counts(state.trials.counts)] if state.trials else []
    usage = describe_usage(spec, state)
    used = [usage] if usage and find_node_hour_limit(spec, state) is not None else []
    saved = [text] if (text := describe_saved(spec, state)) else []
    return [*lines, *counted, *saved, *_failure_lines(state), *used, f"evidence: {folder}"]


def best_as_json(spec: RunSpec, state: RunState, folder: Path) -> dict[str, Any] | None:
    """The output of `best --json`: run, trial, figures, confidence, evidence, provenance; None without a best."""
    best = state.best
    if best is None:
        return None
    certainty = estimate_certainty(state, spec.provenance)
    metrics = best.outcome.metrics if best.outcome else {}
    task, figure = task_of(spec.card), find_figure(spec)
    return {
        "run": spec.run_id,
        "trial": best.number,
        "config": dict(best.config),
        **{name: metrics.get(name) for name in (task.primary, *task.highlights, NUM_ACCELERATORS)},
        "objective": spec.objective.name,
        "objective_figure": {"name": figure.metric.name, "unit": figure.metric.unit, "value": figure.value(best)},
        "loss": best.loss,
        "evidence": str(trial_folder(folder, best.number)),
        "provenance": spec.provenance.value,
        "confidence": _certainty_as_json(certainty) if certainty else None,
    }


def closest_as_json(spec: RunSpec, state: RunState) -> dict[str, Any] | None:
    """The trial closest to constraints that no trial satisfies, with its violation; None if there is none."""
    closest = find_closest(spec.objective, state)
    if closest is None:
        return None
    metrics = closest.trial.outcome.metrics if closest.trial.outcome else {}
    return {
        "trial": closest.trial.number,
        "config": dict(closest.trial.config),
        **{name: metrics.get(name) for name in spec.objective.needed_metrics},
        "violation": closest.violation,
        "text": closest.text,
    }


def _certainty_as_json(certainty: Certainty) -> dict[str, Any]:
    interval = certainty.interval
    return {
        "chance_best": certainty.probability if certainty.has_alternatives else None,
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
    best, closest = best_as_json(spec, state, folder), closest_as_json(spec, state)
    end = state.ended or state.stopped
    facts = {"event": "summary", "best": best, "ended": bool(state.ended), "reason": end.reason if end else None}
    more = {"closest": closest, "damage": state.damage}
    return json.dumps(facts | {name: value for name, value in more.items() if value})


def _best_lines(spec: RunSpec, state: RunState, folder: Path, best: Trial) -> list[str]:
    assert best.outcome is not None
    metrics, task = best.outcome.metrics, task_of(spec.card)
    mark = spec.provenance.mark
    by = f" by {find_figure(spec).metric.words}" if spec.objective.is_multi else ""
    lines = [f"best{by}: trial {best.number}  {best.config}"]
    if spec.objective.metrics != (task.primary,):
        lines.append(f"      {describe_figure(spec, best)}{mark}")
    if not spec.objective.is_multi or task.primary not in spec.objective.metrics:
        lines.append(f"      {task.primary_metric.words} {ObjectiveFigure(task.primary_metric).format(best)}{mark}")
    figures = [name_value(task.metric(name), metrics[name]) for name in task.highlights if name in metrics]
    if figures:
        lines.append("      " + ", ".join(figures))
    lines += _describe_scope(spec, state, best)
    if best.rationale:
        lines.append(f"proposed by {SOURCES.get(best.proposer, best.proposer)}: {one_line(best.rationale, 300)}")
    lines += [f"diagnosis: {one_line(text, 300)}" for text in best.outcome.diagnosis[:3]]
    lines += [f"confidence: {text}" for text in describe_confidence(spec, state, best, folder)]
    lines += [f"drift: {text}" for text in describe_drift(state)]
    lines += [f"second load: {text}" for text in describe_other_load(spec, state)]
    lines += [
        f"timed window: {text}" for text in _describe_again(state, best, task.agreement.rule if task.agreement else "")
    ]
    left = [event.text for event in state.reported if isinstance(event, Note) and event.topic == NOTHING_LEFT]
    lines += [f"outlook: {text.split(':')[0]}" for text in left[:1]]
    lines += _comparison_lines(spec, state, best)
    return lines


def _describe_scope(spec: RunSpec, state: RunState, best: Trial) -> Iterator[str]:
    """Yield by which numerics the best trial differs from the card, and which knobs no trial varied."""
    framework = find_framework(spec.framework)
    if framework is None or spec.recording is not None:
        return
    own = framework.undo_numerics(spec.card, best.config)
    if changes := {name: value for name, value in best.config.items() if own[name] != value}:
        yield f"numerics: {format_config(changes)}; the card's: {format_config({name: own[name] for name in changes})}"
    searched = {knob.name for knob in (*spec.knobs, *spec.card.knobs)}.union(
        state.growth.choices if state.growth else ()
    )
    if missing := [knob.name for knob in framework.list_optional(spec.card) if knob.name not in searched]:
        yield f"not searched: {', '.join(missing)} (`ccl-search space` shows the --knob that adds each)"


def _describe_again(state: RunState, best: Trial, rule: str) -> Iterator[str]:
    """Yield which trials computed the best one's timed window again, and how their results compare."""
    for trial in [state.trials[n] for n, brief in state.trials.briefs.items() if brief.recomputes == best.number]:
        verdict = trial.outcome.find_verdict(rule) if trial.outcome else None
        if verdict and verdict.ok is not None:
            yield f"trial {trial.number} computed it again: {one_line(verdict.detail, 200)}"


def describe_figure(spec: RunSpec, trial: Trial) -> str:
    """The figure of a ranked trial under the objective, with name and unit; for a Pareto objective each metric's."""
    objective = spec.objective
    if not objective.is_multi:
        figure = find_figure(spec)
        better = " (greater is better)" if figure.metric.greater_is_better else ""
        return f"{figure.metric.words} {figure.format(trial)}{better}"
    assert trial.outcome is not None
    shown = []
    for term in objective.terms:
        info = task_of(spec.card).metric(term.metric)
        info = info.model_copy(update={"unit": term.unit})
        shown.append(name_value(info, trial.outcome.metrics[term.metric] * term.scale))
    return ", ".join(shown)


def describe_confidence(spec: RunSpec, state: RunState, best: Trial, folder: Path) -> list[str]:
    """The probability that the best is truly the best of the tried ones, its interval, and the trials it ties with."""
    certainty = estimate_certainty(state, spec.provenance)
    if certainty is None:
        why = "; the noise of its source is unknown" if spec.provenance is Provenance.RECORDED else ""
        return [f"unknown: the figure is {spec.provenance.value} and no run can confirm it{why}"]
    noise, interval, figure = certainty.noise, certainty.interval, find_figure(spec)
    ends = sorted(spec.objective.score_from_loss(loss) for loss in (interval.low, interval.high))
    between = " to ".join(format_value(figure.metric, end) for end in ends)
    probability = f"{format_share(certainty.probability)} probability of being the best configuration tried"
    lines = [
        f"{probability if certainty.has_alternatives else ONLY_ONE};"
        f" {interval.confidence:.0%} interval of the {figure.metric.words}: {between}"
        f" from {count_of(certainty.num_runs, 'run')};"
        f" run-to-run noise {noise.relative:.1%} ({_describe_basis(noise)})"
    ]
    if outliers := state.list_outliers():
        trials = f"trial{'s' * (len(outliers) > 1)} {', '.join(map(str, outliers))}"
        lines.append(f"not compared: {trials}, which most runs of the same configuration contradict (an outlier)")
    if certainty.tied:
        shown = ", ".join(f"{number} ({figure.compare(state.trials[number], best)})" for number in certainty.tied[:3])
        more = f" and {len(certainty.tied) - 3} more" if len(certainty.tied) > 3 else ""
        trials = f"trial{'s' * (len(certainty.tied) > 1)} {shown}{more}"
        lines.append(f"ties with {trials}: within noise ({DEFAULT_CONFIDENCE:.0%} confidence)")
    if spec.provenance is Provenance.CALLER:
        lines.append(describe_unchecked(best))
    if certainty.num_runs == 1 and spec.provenance is Provenance.MEASURED:
        lines.append(f"ran once; `ccl-search resume {name_run(folder)} --confirm 2` runs the finalists again")
    return lines


def _describe_basis(noise: Noise) -> str:
    """Basis of the noise: the repeats, or an assumption."""
    if noise.is_measured:
        basis = f"measured, repeats: {noise.num_repeats}"
    else:
        basis = "assumed: no " + "other " * (noise.num_outliers > 0) + "configuration ran twice yet"
    out = count_of(noise.num_outliers, "configuration")
    return basis + (f"; left out: {out} whose runs differ by far more" if noise.num_outliers else "")


def describe_unchecked(best: Trial) -> str:
    """Name the admission rules that could not be checked of a trial measured by a function of the caller."""
    unchecked = [verdict.rule for verdict in best.outcome.verdicts if verdict.ok is None] if best.outcome else []
    return (
        "measured by the caller: no run script declares what ran and no trace shows it, so these admission"
        f" rules were not checked: {', '.join(unchecked)}"
    )


def describe_drift(state: RunState) -> list[str]:
    """Compare each window of the cluster with the first, by repeated configurations; empty for one window."""
    windows = state.windows.names
    lines, unknown = [], []
    for index, window in list(enumerate(windows))[1:]:
        trials = state.windows.trials_in(index)
        if not trials:
            continue
        ratio = state.window_ratio(trials[0])
        if not ratio.num_pairs:
            unknown += trials
            continue
        low, high = ratio.interval
        found = f"{ratio.ratio:.3g}x the time or cost of {windows[0]}"
        if not ratio.is_difference:
            found = f"{'no difference from' if ratio.is_no_difference else 'no clear difference from'} {windows[0]}"
        basis = f"95% interval {low:.3g}x to {high:.3g}x from {count_of(ratio.num_pairs, 'repeated configuration')}"
        compared = f"{count_of(len(trials), 'trial')} of {window} compared after division by {ratio.ratio:.3g}"
        lines.append(f"{window}: {found} ({basis}); {compared}, figures are shown as measured")
    if unknown:
        shown = f"trial{'s' * (len(unknown) > 1)} {', '.join(map(str, unknown[:5]))}{', ...' * (len(unknown) > 5)}"
        lines.append(
            f"unknown for {shown}: no configuration ran both in their windows and before; compared as measured"
        )
    if lines and state.controls:
        lines.append(f"{count_of(len(state.controls), 'control')} ran outside the budget")
    return lines


def describe_other_load(spec: RunSpec, state: RunState) -> list[str]:
    """Figure of the best on the second load that each trial measured, and the trial that is better there, if any."""
    metric, best = task_of(spec.card).other_metric(spec.card), state.best
    if metric is None or best is None:
        return []
    ranked = ((t.number, t.outcome.metrics) for t in state.trials.select(TrialState.ADMITTED) if t.outcome)
    found = {number: metrics[metric.name] for number, metrics in ranked if metric.name in metrics}
    own = found.get(best.number)
    if own is None:
        return []
    first = min(found, key=lambda number: metric.sign * found[number])
    gain = found[first] / own if metric.greater_is_better else own / found[first]
    certainty = estimate_certainty(state, spec.provenance)
    doubt = max(OTHER_LOAD_DOUBT, 0.0 if certainty is None else certainty.noise.relative * OTHER_LOAD_SDS)
    of_best = f"{metric.words} {format_value(metric, own)}"
    if gain <= 1 + doubt:
        return [f"{of_best}; no trial is better there by more than {doubt:.0%}"]
    return [
        f"warning: trial {best.number} is not the best there ({of_best}): trial {first} is {gain:.3g} times better"
        f" ({format_value(metric, found[first])}; {state.trials[first].config})"
    ]


def _comparison_lines(spec: RunSpec, state: RunState, best: Trial) -> list[str]:
    own, briefs = (Purpose.SEARCH, Purpose.BASELINE), state.trials.briefs
    same = briefs[best.number].config_key
    others = [n for n, b in briefs.items() if b.loss is not None and b.purpose in own and b.config_key != same]
    if not others:
        return [*([] if spec.provenance.is_repeatable else [ONLY_ONE]), *_own_baseline_lines(state, best)]
    figure = find_figure(spec)
    second = state.trials[min(others, key=lambda number: briefs[number].loss or 0.0)]
    metric, difference = figure.metric, figure.compare(second, best)
    certainty, is_single = estimate_certainty(state, spec.provenance), len(spec.objective.metrics) == 1
    if certainty is None and is_single:
        values = f"{figure.format(best)} -> {figure.format(second)}"
        difference = f"{values}, {difference.removeprefix(metric.words + ' ')}"
    runner_up = f"runner-up: trial {second.number} ({difference})"
    if certainty is None:
        how = f"{len(others) + 1} {spec.provenance.value}"
        end = "highest" if metric.greater_is_better else "lowest"
        among = f"{end} of {how} {name_values(metric)}" if is_single else f"best of {how} configurations"
        lines = [f"{among}; {runner_up}"]
    else:
        share = f"{len(certainty.beaten)} of {len(certainty.beaten) + len(certainty.tied)} other configurations"
        lines = [f"better than {share} beyond noise ({DEFAULT_CONFIDENCE:.0%} confidence); {runner_up}"]
    lines += _own_baseline_lines(state, best)
    if state.baseline is not None and state.baseline.config != best.config:
        is_tied = is_single and certainty is not None and state.baseline.number in certainty.tied
        lines.append(_compare_with_baseline(best, state, figure, is_tied=is_tied))
    return lines


def _own_baseline_lines(state: RunState, best: Trial | None) -> list[str]:
    """State of the user's baseline if the comparison does not say it: it failed, or nothing is better."""
    own = state.own_baseline
    if own is None or own.outcome is None:
        return []
    if own.loss is None:
        failure = own.outcome.failure
        violated = next((v.detail for v in own.outcome.verdicts if v.ok is False), "an admission rule refused it")
        why = f"{failure.kind.describe()}: {one_line(failure.message, 160)}" if failure else one_line(violated, 160)
        return [f"your baseline has no result (trial {own.number}, {why}; {own.config}): nothing compares with it"]
    same = best is not None and own.config == best.config
    return [f"your baseline (trial {own.number}) is the best configuration tried"] if same else []


def _compare_with_baseline(best: Trial, state: RunState, figure: ObjectiveFigure, *, is_tied: bool) -> str:
    """Compare the best with the baseline: the user's own, or the first trial if it was ranked."""
    baseline = state.baseline
    assert baseline is not None
    name = "your baseline" if baseline.purpose is Purpose.BASELINE else "the first ranked trial"
    values = f"trial {baseline.number}: {figure.format(baseline)} -> {figure.format(best)}"
    theirs, ours = figure.value(baseline), figure.value(best)
    if is_tied and theirs and ours:
        less = f"{abs(1 - ours / theirs):.2%} {'less' if theirs >= ours else 'more'}"
        text = f"within noise of {name} ({values}, {less}; {baseline.config})"
    else:
        gain = figure.describe_gain(baseline, best)
        text = f"{gain} than {name} ({values}; {baseline.config})" if gain else f"{name}: {values}"
    if baseline.purpose is Purpose.BASELINE:
        return text
    first = min(n for n in state.trials if state.trials.briefs[n].is_search)
    why = f"; trial {baseline.number} is the first that was ranked, trial {first} was not"
    return text if baseline.number == first or state.trials[first].loss is not None else text + why


def _no_best_lines(spec: RunSpec, state: RunState) -> list[str]:
    if not state.trials:
        return ["no trial has run yet"]
    if not state.trials.finish_order:
        return ["no trial has finished yet"]
    closest = find_closest(spec.objective, state)
    lines = [closest.text if closest else "no trial was admitted, so there is no best configuration"]
    if closest:  # its text has the figures
        lines.append(
            f"not admitted: {sum(map(_violates, state.trials.select(TrialState.REFUSED)))} x {CONSTRAINTS_RULE}"
        )
    return lines + _own_baseline_lines(state, None) + _refusal_lines(state, with_constraints=closest is None)


def _violates(trial: Trial) -> bool:
    """Whether the trial ran and violates a constraint of the objective."""
    verdict = trial.outcome.find_verdict(CONSTRAINTS_RULE) if trial.outcome else None
    return verdict is not None and verdict.ok is False


def _refusal_lines(state: RunState, *, with_constraints: bool = False) -> list[str]:
    """One line per rule that keeps finished trials from being ranked; the constraints only if asked for."""
    refused: Counter[str] = Counter()
    example: dict[str, str] = {}
    for trial in state.trials.select(TrialState.REFUSED):
        for verdict in trial.outcome.verdicts if trial.outcome and trial.recomputes is None else ():
            if verdict.ok is False and (with_constraints or verdict.rule != CONSTRAINTS_RULE):
                refused[verdict.rule] += 1
                example.setdefault(verdict.rule, f"trial {trial.number}: {one_line(verdict.detail, 200)}")
    return [f"not admitted: {count} x {rule} ({example[rule]})" for rule, count in refused.items()]


def _failure_lines(state: RunState) -> list[str]:
    kinds = Counter(brief.failure for brief in state.trials.briefs.values() if brief.failure)
    lines = []
    for kind, count in kinds.most_common():
        first = next(number for number, brief in state.trials.briefs.items() if brief.failure is kind)
        outcome = state.trials[first].outcome
        message = one_line(outcome.failure.message, 160) if outcome and outcome.failure else ""
        lines.append(f"failed: {count} x {kind.describe()} (trial {first}: {message})")
    return lines
