"""Runs the LLM agent and its arbiter over recorded landscapes, with simulated models that see only the requests.

python benchmarks/agent.py landscapes [--landscapes FOLDER] [--seeds 20]   hybrid with simulated models
python benchmarks/agent.py corrections [--landscapes FOLDER]              a planted correction, true or wrong
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from llm.players import PLAYERS, Oracle  # noqa: E402

from cclsearch.core.values import Failure, FailureKind, Stage, format_knob_value  # noqa: E402
from cclsearch.propose.agent.agent import Agent  # noqa: E402
from cclsearch.propose.agent.arbiter.proposer import Arbiter  # noqa: E402
from cclsearch.propose.agent.options import AgentOptions  # noqa: E402
from cclsearch.propose.base import Observation, Proposer, SearchView  # noqa: E402
from cclsearch.propose.bayes.surrogate import fit_posterior  # noqa: E402
from cclsearch.propose.events import Correction, LlmTurn  # noqa: E402
from cclsearch.propose.study.choose import make_sampler  # noqa: E402
from cclsearch.recording.load import Recording, find_recordings, load_recording  # noqa: E402

BUDGET = 15
MILESTONES = (3, 5, 10, 15)
FALLBACK = "fallback"
AFTER = 3  # trials after which a correction is planted
PLANTED = ("none", "true", "wrong")


@dataclass(frozen=True)
class Played:
    """One search."""

    landscape: str
    who: str
    seed: int
    log_ratio: tuple[float, ...]
    """Log of best over optimum after each trial; an early end keeps its best."""
    num_failed: int
    num_turns: int


def play(task: tuple[str, str, int]) -> Played:
    """One search over one landscape: the fallback alone, or hybrid with that simulated model."""
    path, who, seed = task
    recording = load_recording(Path(path))
    fallback: Proposer = make_sampler("default")
    if who == FALLBACK:
        return replay(recording, fallback, who, seed)[0]
    player = Oracle(seed, find_truth(recording)) if who == "oracle" else PLAYERS[who](seed)
    agent = Agent(player, options=AgentOptions(anonymous=True))
    return replay(recording, Arbiter(agent, fallback), who, seed)[0]


def find_truth(recording: Recording) -> dict[str, tuple[dict[str, object], float | None]]:
    """Every configuration of a recording with its measured value, for the oracle."""
    configs = [recording.space.config(row) for row in range(len(recording.space))]
    return {config.digest: (dict(config), recording.values[row]) for row, config in enumerate(configs)}


def replay(
    recording: Recording, proposer: Proposer, who: str, seed: int, planted: Correction | None = None
) -> tuple[Played, SearchView]:
    """The search loop without jobs; each row is read once, and only new configurations of the space are accepted.

    A planted correction is said after trial `AFTER`; the second result is the view then.
    """
    seen: list[Observation] = []
    events: list[object] = []
    for trial in range(1, BUDGET + 1):
        view = SearchView(
            card=recording.card,
            space=recording.space,
            observations=tuple(seen),
            pending=frozenset(),
            budget_left=BUDGET - trial + 1,
            seed=seed,
            events=tuple(events),  # type: ignore[arg-type]
            next_trial=trial,
        )
        if trial == AFTER + 1:
            if planted:
                turn = LlmTurn(turn=1, corrections=(planted,), num_seen=AFTER, last_seen=AFTER)
                view = replace(view, events=(turn,))
                events.append(turn)
            then = view
        proposals = proposer.propose(view, 1)
        events += list(proposer.take_events()) if isinstance(proposer, Arbiter) else []
        if not proposals:
            break
        row = recording.space.row(proposals[0].config)
        assert row is not None, "a configuration outside the search space was proposed"
        assert all(o.row != row for o in seen), "a configuration was proposed again"
        seen.append(observe(recording, trial, row))
    turns, failed = sum(isinstance(event, LlmTurn) for event in events), sum(o.loss is None for o in seen)
    return Played(recording.name, who, seed, curve(recording, seen), failed, turns), then


def observe(recording: Recording, trial: int, row: int) -> Observation:
    """The recorded result of one row."""
    found, config = recording.rows[row], recording.space.config(row)
    if found.metrics.get("step_time_s") is None:
        kind = FailureKind.OUT_OF_MEMORY if found.status == "oom" else FailureKind.CRASHED
        failure = Failure(stage=Stage.RUN, kind=kind, message=f"recorded as {found.status}")
        return Observation(trial, config, row, None, failure=failure)
    return Observation(trial, config, row, recording.values[row], metrics=found.metrics)


def curve(recording: Recording, seen: Sequence[Observation]) -> tuple[float, ...]:
    """Log of best over optimum after each trial; before a success, that of the slowest row."""
    best = max(value for value in recording.values if value is not None)
    logs = []
    for trial in range(BUDGET):
        if trial < len(seen):
            best = min(best, seen[trial].loss or best)
        logs.append(float(np.log(best / recording.best_value)))
    return tuple(logs)


def run_landscapes(folder: Path, num_seeds: int, *, players: Sequence[str], workers: int) -> None:
    """Run all searches and print means over all tables and seeds."""
    names, paths = (FALLBACK, *players), find_recordings(folder)
    with ProcessPoolExecutor(workers) as pool:
        tasks = [(str(path), who, seed) for seed in range(num_seeds) for path in paths for who in names]
        played = list(pool.map(play, tasks, chunksize=5))
    heads = " | ".join(f"mean log at {k}" for k in MILESTONES)
    print(f"| who | {heads} | failed of 15 | turns |\n|---|---|---|---|---|---|---|")
    for who in names:
        own = [p for p in played if p.who == who]
        logs = [f"{np.mean([p.log_ratio[k - 1] for p in own]):.4f}" for k in MILESTONES]
        failed, turns = np.mean([p.num_failed for p in own]), np.mean([p.num_turns for p in own])
        print(f"| {who} | {' | '.join(logs)} | {failed:.2f} | {turns:.1f} |")


def plant(task: tuple[str, int]) -> list[tuple[float, float, float]]:
    """Of each kind of correction: the error of the prediction after `AFTER` trials with it as recorded, with it as
    certain, and the first trial within 1 % of the optimum.
    """
    path, seed = task
    recording, found = load_recording(Path(path)), []
    plain, then = replay(recording, make_sampler("default"), "none", seed)
    true = find_truth_of(recording, then)
    wrong = true.model_copy(update={"factor": 1 / true.factor})
    for kind, planted in zip(PLANTED, (None, true, wrong), strict=True):
        played = plain if planted is None else replay(recording, make_sampler("default"), kind, seed, planted)[0]
        turn = (LlmTurn(turn=1, corrections=(planted,), last_seen=AFTER),) if planted else ()
        views = replace(then, events=turn), replace(then, supposed=(planted,) if planted else ())
        errors = [float(np.mean(np.abs(list(read_errors(recording, view).values())))) for view in views]
        within = next((n for n, log in enumerate(played.log_ratio, 1) if log < 0.01), BUDGET + 1)
        found.append((errors[0], errors[1], float(within)))
    return found


def read_errors(recording: Recording, view: SearchView) -> dict[int, float]:
    """Log of measured over predicted of the open rows within a factor of two of the optimum."""
    posterior = fit_posterior(view)
    assert posterior is not None
    predicted = dict(zip(posterior.rows_m.tolist(), posterior.value_m.tolist(), strict=True))
    values = {row: value for row, value in enumerate(recording.values) if value and value < 2 * recording.best_value}
    return {row: float(np.log(values[row] / predicted[row])) for row in values.keys() & predicted.keys()}


def find_truth_of(recording: Recording, view: SearchView) -> Correction:
    """What an expert could know: of the factors of all values of knobs, the one after which the errors are least."""
    logs: dict[str, list[float]] = {}
    for row, log in read_errors(recording, view).items():
        for name, value in recording.space.config(row).items():
            logs.setdefault(f"{name}={format_knob_value(value)}", []).append(log)
    ideas = [Correction(part=part, factor=float(np.exp(np.median(own)))) for part, own in logs.items()]

    def find_error(idea: Correction) -> float:
        return float(np.mean(np.abs(list(read_errors(recording, replace(view, supposed=(idea,))).values()))))

    return min(ideas, key=find_error)


def run_corrections(folder: Path, num_seeds: int, workers: int) -> None:
    """Print errors and first trials within 1 %, means over all tables and seeds."""
    tasks = [(str(path), seed) for path in find_recordings(folder) for seed in range(num_seeds)]
    with ProcessPoolExecutor(workers) as pool:
        found = np.array(list(pool.map(plant, tasks)))
    print("| correction | mean error | if certain | trials to within 1 % |\n|---|---|---|---|")
    for kind, row in zip(PLANTED, found.mean(axis=0), strict=True):
        print(f"| {kind} | {row[0]:.4f} | {row[1]:.4f} | {row[2]:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description="The LLM agent with simulated models.")
    parser.add_argument("what", choices=("landscapes", "corrections"))
    parser.add_argument("--landscapes", type=Path, default=ROOT / "benchmarks" / "landscapes")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--players", nargs="+", default=list(PLAYERS), choices=list(PLAYERS))
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    if args.what == "landscapes":
        run_landscapes(args.landscapes, args.seeds, players=args.players, workers=args.workers)
    else:
        run_corrections(args.landscapes, args.seeds, args.workers)


if __name__ == "__main__":
    main()
