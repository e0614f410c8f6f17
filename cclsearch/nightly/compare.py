"""Comparison of tonight with earlier nights: improved, unchanged, regressed, or infrastructure trouble."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import Field

from cclsearch.core.secrets.redact import is_secret_name
from cclsearch.core.text import count_of, one_line
from cclsearch.core.values import Config, Model
from cclsearch.launch.profile import Profile
from cclsearch.nightly.history import Night, NightFigure, RankedRun, mean_of, read_surroundings
from cclsearch.record.event import RetryKind
from cclsearch.record.trial import Trial, TrialState
from cclsearch.report.figures import MAX_SHARE
from cclsearch.run.closest import find_closest
from cclsearch.scoring.outcome import Outcome
from cclsearch.stats.noise import Noise, confidence_better, estimate_noise
from cclsearch.tasks.base import task_of

REFERENCE_NIGHTS = 5
"""A configuration is compared with its runs on this many of the latest nights that ran it."""
MAX_CHANGES = 8


class NightVerdict(StrEnum):
    """Verdict on one job's night, in the order in which summaries list them."""

    REGRESSED = "regressed"
    """A configuration is worse than on earlier nights, or fails although it ran before."""
    TROUBLE = "infrastructure trouble"
    NO_RESULT = "no result"
    IMPROVED = "improved"
    FIRST = "first"
    """No earlier night ran the same work."""
    UNCHANGED = "unchanged"


class Change(Model):
    """One configuration: tonight compared with earlier nights, in values of the figure."""

    config: Config
    before: float
    """Mean of its runs on the latest earlier nights."""
    now: float | None
    """None if it fails now."""
    ratio: float | None
    loss_ratio: float | None = Field(default=None, exclude=True)
    """Ratio of the compared values, of which less is better: above 1 if it is worse now."""
    confidence: float
    """Confidence, 0 to 1, that it is worse now."""
    runs_before: int
    runs_now: int
    why: tuple[str, ...] = ()
    """Other changes: versions, nodes, causes in the traces."""


@dataclass(frozen=True)
class Comparison:
    """Result of comparing a job's night with earlier ones."""

    verdict: NightVerdict
    text: str
    """One sentence."""
    worse: tuple[Change, ...] = ()
    better: tuple[Change, ...] = ()
    same: tuple[Change, ...] = ()
    """Configurations that also ran on earlier nights and did not change."""
    noise: Noise | None = None


def compare_night(
    tonight: Night, earlier: Sequence[Night], *, tolerance: float, confidence: float, ending: str = ""
) -> Comparison:
    """Compare tonight with earlier nights of the same work; `earlier` starts with the oldest."""
    lost = tonight.ends[TrialState.LOST]
    if not tonight.samples and lost:
        others = "".join(f", {part}" for part in _count_unjudged(tonight))
        text = f"{count_of(lost, 'trial')} failed because of the infrastructure{others}, and no trial was ranked"
        return Comparison(NightVerdict.TROUBLE, _join(text, ending))
    noise = estimate_night_noise(tonight, earlier)
    changes = compare_configs(tonight, earlier, noise)
    failing = find_newly_failing(tonight, earlier)
    sure = 1 - (1 - confidence) / max(len(changes), 1)
    worse = [c for c in changes if c.loss_ratio and c.loss_ratio > 1 + tolerance and c.confidence >= sure]
    better = [c for c in changes if c.loss_ratio and c.loss_ratio < 1 - tolerance and 1 - c.confidence >= sure]
    same = tuple(c for c in changes if c not in worse and c not in better)
    worse = [*failing, *worse]
    if not tonight.samples and not worse:
        verdict = NightVerdict.TROUBLE if last_infrastructure_failure(tonight.unfinished) else NightVerdict.NO_RESULT
        return Comparison(verdict, _join(describe_unranked(tonight), ending), noise=noise)
    verdict, text = _decide_verdict(tonight, earlier, worse, better, noise, tolerance=tolerance, confidence=confidence)
    return Comparison(verdict, text, tuple(worse), tuple(better), same, noise)


def describe_unranked(tonight: Night) -> str:
    """Say why a night has no result: counts of refused, failed and unfinished trials, each with its latest reason."""
    parts = []
    closest = find_closest(tonight.run.spec.objective, tonight.run.state)
    if tonight.refused:
        why = "" if closest else f" ({describe_refusal(tonight.refused[-1])})"
        parts.append(f"{len(tonight.refused)} not admitted{why}")
    if tonight.failed and (outcome := tonight.failed[-1].outcome) is not None and outcome.failure is not None:
        failure = outcome.failure
        parts.append(f"{len(tonight.failed)} failed ({failure.kind.value}: {one_line(failure.message, 120)})")
    parts += _count_unjudged(tonight)
    if tonight.unfinished:
        lost = last_infrastructure_failure(tonight.unfinished)
        why = f" ({one_line(lost, 160)}; no other attempt finished)" if lost else ""
        parts.append(f"{len(tonight.unfinished)} did not finish{why}")
    text = f"no trial was ranked: {', '.join(parts)}" if parts else "no trial was ranked"
    return f"{text}; {closest.text}" if closest else text


def _count_unjudged(tonight: Night) -> list[str]:
    """Count trials that failed neither for their own reasons nor because of the infrastructure."""
    if not (count := tonight.ends[TrialState.UNJUDGED]):
        return []
    return [f"{count} not judged because of an error of ccl-search (`admit --write` judges again)"]


def last_infrastructure_failure(unfinished: Sequence[Trial]) -> str | None:
    """Reason of the latest infrastructure failure among these trials; None if there is none."""
    lost = (RetryKind.FAILURE, RetryKind.ALLOCATION_ENDED)
    reasons = [retry.reason for trial in unfinished for retry in trial.retries if retry.kind in lost]
    return reasons[-1] if reasons else None


def describe_refusal(trial: Trial) -> str:
    """Say why a trial that ran was not admitted, in one line."""
    admission = trial.outcome.admission if trial.outcome else None
    reasons = admission.reasons if admission else ()
    return one_line(reasons[0] if reasons else "no figure", 160)


def estimate_night_noise(tonight: Night, earlier: Sequence[Night]) -> Noise:
    """Return the noise of one run, from repeats inside nights and from a configuration's changes between earlier
    nights.

    Each difference between neighboring nights counts once, so that one lasting change does not hide the next.
    """
    # Tonight's difference from earlier nights is what is evaluated, so it does not count as noise.
    groups = [[s.value for s in samples] for night in (*earlier, tonight) for samples in night.samples.values()]
    for config in {config for night in earlier for config in night.samples}:
        means = [mean_of(night.samples[config]) for night in earlier if config in night.samples]
        groups += [[one, other] for one, other in zip(means[::2], means[1::2], strict=False)]
    return estimate_noise([], own=groups)  # each is compared with its own earlier nights


def compare_configs(tonight: Night, earlier: Sequence[Night], noise: Noise) -> list[Change]:
    """The change of each configuration that ran tonight and before; its confidence says that it is worse now."""
    changes = []
    for config, samples in tonight.samples.items():
        before = find_reference(config, earlier)
        if before:
            sure = confidence_better([s.value for s in before], [s.value for s in samples], noise)
            why = find_changes(config, tonight, earlier)
            changes.append(_make_change(tonight.figure, config, before, samples, sure, why))
    return changes


def _make_change(
    figure: NightFigure,
    config: Config,
    earlier: Sequence[RankedRun],
    tonight: Sequence[RankedRun],
    confidence: float,
    why: tuple[str, ...],
) -> Change:
    old, new = mean_of(earlier), mean_of(tonight) if tonight else None
    before, now = figure.show(old), None if new is None else figure.show(new)
    return Change(
        config=config,
        before=before,
        now=now,
        ratio=None if now is None or not before else now / before,
        loss_ratio=None if new is None or not old else _divide(new, old),
        confidence=confidence,
        runs_before=len(earlier),
        runs_now=len(tonight),
        why=why,
    )


def find_reference(config: Config, earlier: Sequence[Night]) -> list[RankedRun]:
    """Runs of the configuration on the latest nights that ran it."""
    nights = [night for night in earlier if config in night.samples][-REFERENCE_NIGHTS:]
    return [sample for night in nights for sample in night.samples[config]]


def find_newly_failing(tonight: Night, earlier: Sequence[Night]) -> list[Change]:
    """Return configurations that now fail for their own reasons, and ran on the latest night that tried them."""
    found = []
    for config, trial in tonight.failures.items():
        tried = [night for night in earlier if config in night.samples or config in night.failures]
        if not tried or config not in tried[-1].samples:
            continue
        before, failure = find_reference(config, earlier), trial.outcome.failure if trial.outcome else None
        why = f"fails now: {failure.kind.value}: {one_line(failure.message, 200)}" if failure else "fails now"
        found.append(_make_change(tonight.figure, config, before, (), 1.0, (why,)))
    return found


def find_changes(config: Config, tonight: Night, earlier: Sequence[Night]) -> tuple[str, ...]:
    """Changes in a configuration's surroundings since the latest night that ran it."""
    before = next((night for night in reversed(earlier) if config in night.samples), None)
    if before is None:
        return ()
    lines = []
    engines = before.run.spec.engine_version, tonight.run.spec.engine_version
    if engines[0] != engines[1]:
        lines.append(f"ccl-search {engines[0]} → {engines[1]}")
    old, new = (read_surroundings(night.samples[config][-1]) for night in (before, tonight))
    if old and new:
        lines += [f"{name} {change}" for name, change in _list_differences(old, new, "unknown")]
    lines += compare_profiles(before.run.spec.profile, tonight.run.spec.profile)
    lines = lines[:MAX_CHANGES]
    old_trial, new_trial = (night.run.state.trials[night.samples[config][-1].trial] for night in (before, tonight))
    unit = task_of(tonight.run.spec.card).diagnosed_unit
    return (*lines, *_compare_causes(old_trial.outcome, new_trial.outcome, unit))


def compare_profiles(before: Profile, now: Profile) -> list[str]:
    """Differences of the launcher's profile: fields and variables of its jobs; for a secret only that it changed."""
    old, new = ({**profile.settings, **profile.environment} for profile in (before, now))
    return [f"the launcher's {name} {change}" for name, change in _list_differences(old, new, "unset")]


def _list_differences(old: Mapping[str, Any], new: Mapping[str, Any], absent: str) -> Iterator[tuple[str, str]]:
    """Yield the name of each value that changed, and the change; of a secret only that it did."""
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            values = [one_line(str(facts.get(name, absent)), 80) for facts in (old, new)]
            yield one_line(name, 40), "changed" if is_secret_name(name) else f"{values[0]} → {values[1]}"


def _compare_causes(old: Outcome | None, new: Outcome | None, unit: str) -> list[str]:
    """Return the causes whose time in a unit (`Task.diagnosed_unit`) grew or shrank most."""
    before, now = ({} if outcome is None else outcome.seconds_by_cause for outcome in (old, new))
    if not before or not now:
        return []
    moved = {cause: now.get(cause, 0.0) - before.get(cause, 0.0) for cause in before.keys() | now.keys()}
    total = sum(before.values())
    largest = sorted((c for c in moved if abs(moved[c]) >= 0.02 * total), key=lambda c: -abs(moved[c]))[:3]
    return [f"{c.replace('_', ' ')} {before.get(c, 0.0):.4g} s → {now.get(c, 0.0):.4g} s of a {unit}" for c in largest]


def _decide_verdict(
    tonight: Night,
    earlier: Sequence[Night],
    worse: Sequence[Change],
    better: Sequence[Change],
    noise: Noise,
    *,
    tolerance: float,
    confidence: float,
) -> tuple[NightVerdict, str]:
    figure = tonight.figure
    faster, slower = ("faster", "slower") if figure.metric.is_time else ("better", "worse")
    if worse:
        most = max(worse, key=lambda change: change.loss_ratio or math.inf)
        return NightVerdict.REGRESSED, _describe_regression(most, len(worse), f"{slower} than on", figure.name)
    best = tonight.best
    assert best is not None
    nights = [night for night in earlier if night.samples]
    if not nights:
        return NightVerdict.FIRST, "nothing to compare with"
    # dict.fromkeys keeps the order in which they ran: among equals the first one counts, as a set would not ensure
    pooled = dict.fromkeys(config for night in nights for config in night.samples)
    best_before = min(pooled, key=lambda config: mean_of(find_reference(config, nights)))
    if best != best_before and best not in pooled:
        old = [s.value for s in tonight.samples.get(best_before) or find_reference(best_before, nights)]
        new = [s.value for s in tonight.samples[best]]
        before, now = sum(old) / len(old), mean_of(tonight.samples[best])
        sure, ratio = confidence_better(new, old, noise), _divide(now, before)
        if sure >= confidence and ratio < 1 - tolerance:
            values = _show_change(figure.name, figure.show(before), figure.show(now), sure)
            return NightVerdict.IMPROVED, f"{best} is {faster} than the best so far ({best_before}): {values}"
    if better:
        most = min(better, key=lambda change: change.loss_ratio or 1.0)
        values = _show_change(figure.name, most.before, most.now or math.nan, 1 - most.confidence)
        return NightVerdict.IMPROVED, f"{most.config} is {faster} than on earlier nights: {values}"
    text = f"the best is {best}"
    if noise.is_measured:
        text += f"; run-to-run noise {noise.relative:.1%}"
    if best_before not in tonight.samples:
        refused = [trial for trial in tonight.refused if trial.config == best_before]
        ran = f"ran again but is not admitted ({describe_refusal(refused[-1])})" if refused else "was not run again"
        text += f"; the best of earlier nights {ran}, so this night cannot show a regression of it"
    return NightVerdict.UNCHANGED, text


def _describe_regression(change: Change, count: int, slower_than_on: str, figure: str) -> str:
    also = f", and {count - 1} more" if count > 1 else ""
    why = f" ({'; '.join(change.why)})" if change.why else ""
    if change.now is None:
        return f"{change.config} ran on earlier nights but fails now{also}{why}"
    values = _show_change(figure, change.before, change.now, change.confidence)
    return f"{change.config} is {slower_than_on} earlier nights: {values}{also}{why}"


def _show_change(figure: str, before: float, now: float, confidence: float) -> str:
    sure = "more than 99.9%" if confidence >= MAX_SHARE else f"{confidence:.1%}"
    return f"{figure} {before:.4g} -> {now:.4g} ({now / before:.3f}x), {sure} confidence"


def _divide(now: float, before: float) -> float:
    """Ratio of a compared value to before: above 1 if it is worse, also for values below 0 (less is better)."""
    return now / before if before > 0 else 1.0 + (now - before) / (abs(before) or 1.0)


def _join(text: str, ending: str) -> str:
    return f"{text}; {one_line(ending, 200)}" if ending else text
