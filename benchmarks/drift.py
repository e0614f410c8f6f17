"""Regret of searches on recorded landscapes while a simulated cluster drifts, with controls and without.

Everything is simulated: a recorded loss, times a run-to-run noise of 1 %, times the factor of the window. The factor
changes once, half-way through the budget. Regret is the recorded loss of the configuration that the search calls the
best, over the lowest one tried or not, minus 1.

    python benchmarks/drift.py --seeds 3 --budget 16
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cclsearch.core.values import Config, Failure, FailureKind, Provenance, Stage
from cclsearch.evaluation.control import correct_observations, propose_control
from cclsearch.plan.plan import plan_search
from cclsearch.plan.request import SearchRequest
from cclsearch.propose.base import SearchView
from cclsearch.propose.study.choose import make_sampler
from cclsearch.record.event import Purpose, SearchStarted, TrialFinished, TrialProposed
from cclsearch.record.writer import RunWriter
from cclsearch.recording.load import Recording, load_recording
from cclsearch.recording.table import RowStatus
from cclsearch.run.spec import RunSpec, SearchLimits
from cclsearch.scoring.outcome import Admission, ClusterWindow, Outcome

NOISE = 0.01
LANDSCAPES = Path(__file__).parent / "landscapes"
SCENARIOS = {
    "no drift, one window": (1.0, 1.0, False),
    "no drift, two windows": (1.0, 1.0, True),
    "then 1.1x slower": (1.0, 1.1, True),
    "then 1.3x slower": (1.0, 1.3, True),
    "then 1.3x faster": (1.3, 1.0, True),
}
"""Scenario -> factor of the first and second half, and whether the halves are different windows."""


@dataclass(frozen=True)
class Found:
    """Result of one search."""

    regret: float
    num_controls: int


def search(recording: Recording, spec: RunSpec, scenario: str, *, has_controls: bool, seed: int) -> Found:
    """Run one simulated search with the default strategy."""
    first, second, is_moved = SCENARIOS[scenario]
    noise, budget = np.random.default_rng(seed), spec.limits.budget
    truth = {row.config: row.metrics[recording.primary.name] for row in recording.rows if row.status is RowStatus.OK}
    proposer = make_sampler("default")
    with tempfile.TemporaryDirectory() as folder, RunWriter(Path(folder)) as writer:
        writer.record(SearchStarted(time_s=1.0, run_id="drift", engine_version="", spec_sha256=""))
        state = writer.state
        while state.num_spent < budget:
            control = propose_control(spec, state)
            config = control.config if control else _propose(recording, spec, writer, proposer, seed)
            if config is None:
                break
            number, is_late = writer.next_trial, state.num_spent >= budget // 2
            purpose = Purpose.CONTROL if control else Purpose.SEARCH
            proposed = TrialProposed(time_s=1.0, trial=number, config=config, proposer="simulated", purpose=purpose)
            writer.record(proposed)
            window = ClusterWindow(day="2026-01-01", hosts=("n2" if is_late and is_moved else "n1",))
            factor = (second if is_late else first) * float(np.exp(noise.normal(0.0, NOISE)))
            outcome = _measure(recording, config, truth, factor, window if has_controls else None)
            writer.record(TrialFinished(time_s=1.0, trial=number, attempt=1, outcome=outcome))
        best = state.best
        regret = truth[best.config] / min(truth.values()) - 1 if best else float("inf")
        return Found(regret, state.num_controls)


def _propose(recording: Recording, spec: RunSpec, writer: RunWriter, proposer: Any, seed: int) -> Config | None:
    view = SearchView(
        card=recording.card,
        space=recording.space,
        observations=correct_observations(writer.state.trials.observe(recording.space), spec, writer.state),
        pending=frozenset(),
        budget_left=spec.limits.budget - writer.state.num_spent,
        seed=seed,
    )
    return next((proposal.config for proposal in proposer.propose(view, 1)), None)


def _measure(
    recording: Recording, config: Config, truth: dict[Config, float], factor: float, window: ClusterWindow | None
) -> Outcome:
    if config not in truth:
        failure = Failure(stage=Stage.RUN, kind=FailureKind.CRASHED, message="recorded as failed")
        return Outcome(provenance=Provenance.MEASURED, failure=failure)
    name, loss = recording.primary.name, truth[config] * factor
    admission = Admission(admitted=True, verdicts=())
    metrics = {name: loss}
    return Outcome(provenance=Provenance.MEASURED, admission=admission, loss=loss, metrics=metrics, window=window)


def load(budget: int) -> Iterator[tuple[Recording, RunSpec]]:
    """The landscapes whose primary metric is a cost, each with the inputs of a measured search on it."""
    for folder in sorted(path.parent for path in LANDSCAPES.glob("*/trials.csv")):
        recording = load_recording(folder)
        if recording.primary.greater_is_better:
            continue
        request = SearchRequest(str(folder / "card.yaml"), SearchLimits(budget=budget), recording=str(folder))
        spec = plan_search(request).spec.model_copy(update={"provenance": Provenance.MEASURED})
        yield recording, spec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--budget", type=int, default=16)
    args = parser.parse_args()
    pairs = list(load(args.budget))
    print(f"simulated: {len(pairs)} landscapes x {args.seeds} seeds, budget {args.budget}, noise {NOISE:.0%}")
    print("| scenario | mean regret without controls | with controls | worst without | with | controls per search |")
    print("| --- | --- | --- | --- | --- | --- |")
    for scenario in SCENARIOS:
        found = {
            has: [
                search(recording, spec, scenario, has_controls=has, seed=seed)
                for recording, spec in pairs
                for seed in range(args.seeds)
            ]
            for has in (False, True)
        }
        means = [f"{np.mean([f.regret for f in found[has]]):.2%}" for has in (False, True)]
        worst = [f"{max(f.regret for f in found[has]):.1%}" for has in (False, True)]
        controls = f"{np.mean([f.num_controls for f in found[True]]):.1f}"
        print(f"| {' | '.join((scenario, *means, *worst, controls))} |", flush=True)


if __name__ == "__main__":
    main()
