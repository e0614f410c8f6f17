"""Confidence in the best configuration: noise, interval, the trials it beats beyond noise and those it ties with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cclsearch.core.values import Provenance
from cclsearch.record.state import RunState
from cclsearch.record.trial import Trial, TrialState
from cclsearch.stats.noise import (
    ConfidenceInterval,
    Noise,
    chances_to_be_best,
    confidence_better,
    confidence_interval,
    estimate_noise,
    is_better,
)


@dataclass(frozen=True)
class Certainty:
    """Certainty that the best of the ranked configurations is the best."""

    noise: Noise
    interval: ConfidenceInterval
    """Interval of the best configuration's loss."""
    num_runs: int
    probability: float
    """Probability that it is truly the best of the configurations tried."""
    beaten: tuple[int, ...]
    """First trials of the configurations that it beats with `DEFAULT_CONFIDENCE`, closest first."""
    tied: tuple[int, ...]
    """First trials of the configurations it ties with (differences within noise), closest first."""

    @property
    def has_alternatives(self) -> bool:
        """Whether another configuration was ranked; else there is nothing to be certain of."""
        return bool(self.beaten or self.tied)


def list_spreads(trials: Iterable[Trial]) -> list[float]:
    """The spread inside the run of each ranked trial that has one."""
    return [t.outcome.spread for t in trials if t.loss is not None and t.outcome and t.outcome.spread]


def estimate_certainty(state: RunState, provenance: Provenance) -> Certainty | None:
    """Certainty of the best trial; None without a best or without measurements (a recording has no repeats)."""
    best = state.best
    if best is None or not provenance.is_repeatable:
        return None
    runs = state.losses_by_trial()
    own = runs[best.number]
    groups = [losses for number, losses in runs.items() if number != best.number]
    spreads = list_spreads(state.trials.select(TrialState.ADMITTED))
    noise = estimate_noise(groups, spreads, own=[own]).widened(state.window_errors)
    others = sorted((number for number in runs if number != best.number), key=lambda n: sum(runs[n]) / len(runs[n]))
    beaten = {n for n in others if is_better(own, runs[n], noise)}
    return Certainty(
        noise=noise,
        interval=confidence_interval(own, noise),
        num_runs=len(own),
        probability=chances_to_be_best(runs, noise)[best.number],
        beaten=tuple(n for n in others if n in beaten),
        tied=tuple(n for n in others if n not in beaten),
    )


def compare_with_runner_up(state: RunState, trial: Trial) -> tuple[int, float] | None:
    """Number of the runner-up and the confidence, 0 to 1, that the best trial beats it.

    None if `trial` is not the best one, or nothing else was ranked.
    """
    runs = state.losses_by_trial()
    best = state.best
    if best is None or best.number != trial.number or len(runs) < 2:
        return None
    runner_up = min((n for n in runs if n != trial.number), key=lambda n: sum(runs[n]) / len(runs[n]))
    first, second = runs.pop(trial.number), runs.pop(runner_up)
    spreads = list_spreads((trial, state.trials[runner_up]))
    noise = estimate_noise(list(runs.values()), spreads, own=[first, second]).widened(state.window_errors)
    return runner_up, confidence_better(first, second, noise)
