"""Runs the LLM agent and its arbiter over recorded landscapes, with simulated models that see only the requests.

    python benchmarks/agent.py landscapes [--landscapes FOLDER] [--seeds 20]   hybrid with simulated models
    python benchmarks/agent.py finish     [--landscapes FOLDER]                when `finish` would be granted
    python benchmarks/agent.py policies   [--landscapes FOLDER]                the picks of the seed policies
    python benchmarks/agent.py chaos      [--turns 1000]                       a provider that does everything wrong
    python benchmarks/agent.py sandbox                                         every hostile program

No figure is from a live model: the simulated models are programs. Differences are paired by landscape and seed;
intervals are 95 % by bootstrap over landscapes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.stats import chi2

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from llm.players import PLAYERS, Ending, Oracle, Several  # noqa: E402

from cclsearch.core.values import Failure, FailureKind, Stage  # noqa: E402
from cclsearch.propose.agent.agent import Agent  # noqa: E402
from cclsearch.propose.agent.arbiter.proposer import Arbiter  # noqa: E402
from cclsearch.propose.agent.options import AgentOptions, read_seed_program  # noqa: E402
from cclsearch.propose.agent.policy.runner import SandboxRunner  # noqa: E402
from cclsearch.propose.agent.surrogate_table import PLAUSIBLE, make_surrogate_table  # noqa: E402
from cclsearch.propose.base import Observation, Proposer, SearchView  # noqa: E402
from cclsearch.propose.bayes.outlook import MIN_TRIALS  # noqa: E402
from cclsearch.propose.bayes.snapshot import NEGLIGIBLE, find_chances, find_gain_left  # noqa: E402
from cclsearch.propose.bayes.surrogate import CandidatePosterior, fit_posterior  # noqa: E402
from cclsearch.propose.events import LlmTurn  # noqa: E402
from cclsearch.propose.study.choose import make_sampler  # noqa: E402
from cclsearch.recording.load import Recording, find_recordings, load_recording  # noqa: E402

BUDGET = 15
MILESTONES = (3, 5, 10, 15)
NUM_QUANTILES = 7
"""Of the prior of the surrogate's spread."""
PRIOR_DOF = 4.0
"""Of that prior."""
FALLBACK = "fallback"
SEVERAL = "-3"
"""After a player's name: it submits up to three configurations a turn."""
ENDS = "-ends"
"""After a player's name: it asks to finish in every turn."""


@dataclass(frozen=True)
class Played:
    """One search."""

    landscape: str
    who: str
    seed: int
    log_ratio: tuple[float, ...]
    """Log of best over optimum after each trial; an early end keeps its best."""
    num_trials: int
    num_failed: int
    num_turns: int


def play(task: tuple[str, str, int]) -> Played:
    """One search over one landscape: the fallback alone, or hybrid with that simulated model."""
    path, who, seed = task
    recording = load_recording(Path(path))
    fallback: Proposer = make_sampler("default")
    if who == FALLBACK:
        return replay(recording, fallback, who, seed)
    name = who.removesuffix(SEVERAL).removesuffix(ENDS)
    player = Oracle(seed, find_truth(recording)) if name == "oracle" else PLAYERS[name](seed)
    player = Several(player) if who.endswith(SEVERAL) else Ending(player) if who.endswith(ENDS) else player
    agent = Agent(player, options=AgentOptions(anonymous=True))
    return replay(recording, Arbiter(agent, fallback), who, seed)


def find_truth(recording: Recording) -> dict[str, tuple[dict[str, object], float | None]]:
    """Every configuration of a recording with its measured value, for the oracle."""
    configs = [recording.space.config(row) for row in range(len(recording.space))]
    return {config.digest: (dict(config), recording.values[row]) for row, config in enumerate(configs)}


def replay(recording: Recording, proposer: Proposer, who: str, seed: int) -> Played:
    """The search loop without jobs; each row is read once, and only new configurations of the space are accepted."""
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
        proposals = proposer.propose(view, 1)
        events += list(proposer.take_events()) if isinstance(proposer, Arbiter) else []
        if not proposals:
            break
        row = recording.space.row(proposals[0].config)
        assert row is not None, "a configuration outside the search space was proposed"
        assert all(o.row != row for o in seen), "a configuration was proposed again"
        seen.append(observe(recording, trial, row))
    turns = sum(isinstance(event, LlmTurn) for event in events)
    failed = sum(o.loss is None for o in seen)
    return Played(recording.name, who, seed, curve(recording, seen), len(seen), failed, turns)


def observe(recording: Recording, trial: int, row: int) -> Observation:
    """The recorded result of one row."""
    found = recording.rows[row]
    config = recording.space.config(row)
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


def interval(difference_by_landscape: dict[str, list[float]], draws: int = 4000) -> tuple[float, float, float]:
    """Mean paired difference, with its 95 % interval by bootstrap over landscapes."""
    means = np.array([np.mean(values) for values in difference_by_landscape.values()])
    rng = np.random.default_rng(0)
    drawn = means[rng.integers(0, len(means), (draws, len(means)))].mean(axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(means.mean()), float(low), float(high)


def run_landscapes(folder: Path, num_seeds: int, *, players: Sequence[str], workers: int, keep: Path | None) -> None:
    """Run all searches that `keep` does not contain yet, seed by seed, and print the paired figures as Markdown."""
    paths = find_recordings(folder)
    tasks = [(str(p), who, s) for s in range(num_seeds) for p in paths for who in (FALLBACK, *players)]
    played = read_kept(keep)
    done = {(p.landscape, p.who, p.seed) for p in played}
    tasks = [(path, who, seed) for path, who, seed in tasks if (Path(path).name, who, seed) not in done]
    with ProcessPoolExecutor(workers) as pool:
        for one in pool.map(play, tasks, chunksize=5):
            played.append(one)
            if keep:
                with keep.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(one)) + "\n")
    print_figures(played, players)


def read_kept(keep: Path | None) -> list[Played]:
    """The searches of an earlier, interrupted call."""
    if keep is None or not keep.exists():
        return []
    rows = [json.loads(line) for line in keep.read_text(encoding="utf-8").splitlines()]
    return [Played(**{**row, "log_ratio": tuple(row["log_ratio"])}) for row in rows]


def print_figures(played: Sequence[Played], players: Sequence[str]) -> None:
    """Print means, and paired differences from the fallback, over the complete seeds."""
    played = [p for p in played if p.who in {FALLBACK, *players}]
    count = len({p.landscape for p in played}) * (len(players) + 1)
    seeds = [s for s in sorted({p.seed for p in played}) if sum(p.seed == s for p in played) == count]
    played = [p for p in played if p.seed in seeds]
    landscapes = len({p.landscape for p in played})
    print(f"{landscapes} landscapes, {len(seeds)} seeds, {len(played)} searches of {BUDGET} trials\n")
    print("| who | " + " | ".join(f"mean log at {k}" for k in MILESTONES) + " | failed of 15 | turns |")
    print("|---" * (len(MILESTONES) + 3) + "|")
    base = {(p.landscape, p.seed): p for p in played if p.who == FALLBACK}
    for who in (FALLBACK, *players):
        own = [p for p in played if p.who == who]
        logs = [f"{np.mean([p.log_ratio[k - 1] for p in own]):.4f}" for k in MILESTONES]
        failed, turns = np.mean([p.num_failed for p in own]), np.mean([p.num_turns for p in own])
        print(f"| {who} | {' | '.join(logs)} | {failed:.2f} | {turns:.1f} |")
    print("\n| hybrid less fallback | " + " | ".join(f"at {k} (95 %)" for k in MILESTONES) + " |")
    print("|---" * (len(MILESTONES) + 1) + "|")
    for who in players:
        cells = []
        for k in MILESTONES:
            differences: dict[str, list[float]] = {}
            for p in (p for p in played if p.who == who):
                gap = p.log_ratio[k - 1] - base[p.landscape, p.seed].log_ratio[k - 1]
                differences.setdefault(p.landscape, []).append(gap)
            mean, low, high = interval(differences)
            cells.append(f"{mean:+.4f} ({low:+.4f}, {high:+.4f})")
        print(f"| {who} | {' | '.join(cells)} |")


class State(NamedTuple):
    """What the surrogate says after a trial of the fallback."""

    log: float
    """Log of best over optimum."""
    num_measured: int
    num_finished: int
    """With the failed ones."""
    gain: float
    """Expected gain of the trials left; infinite before a trial is ranked."""
    wide_gain: float
    """The same with the surrogate's spread as its prior alone has it."""
    chance: float
    """Largest chance of a configuration to win; 1 before a trial is ranked."""


def run_finish(folder: Path) -> None:
    """Print, as Markdown, when each rule would end the fallback's searches, and how far from the best of all trials."""
    rules: dict[str, Callable[[State], bool]] = {
        "no chance of 2 % to win": lambda at: at.chance < PLAUSIBLE,
        "expected gain of the trials left below 1 %": lambda at: at.gain < NEGLIGIBLE,
        "the same, from five measured trials on (before)": (
            lambda at: at.gain < NEGLIGIBLE and at.num_measured >= MIN_TRIALS
        ),
        "the same, from five finished trials on, failed ones included (the rule)": (
            lambda at: at.gain < NEGLIGIBLE and at.num_finished >= MIN_TRIALS
        ),
        "gain below 1 % with the spread that the prior alone says (Student-t), from the first trial on": (
            lambda at: at.wide_gain < NEGLIGIBLE
        ),
    }
    searches = [replay_states(load_recording(path)) for path in find_recordings(folder)]
    print("| `finish` is granted at | trials | mean log of best over the best of 15 | searches that lose over 0.5 % |")
    print("|---|---|---|---|")
    for name, rule in rules.items():
        ends = [next((n for n, at in enumerate(states) if rule(at)), len(states) - 1) for states in searches]
        lost = [states[end].log - states[-1].log for states, end in zip(searches, ends, strict=True)]
        count = f"{sum(log > 0.005 for log in lost)} of {len(lost)}"
        print(f"| {name} | {np.mean(ends) + 1:.2f} | {np.mean(lost):.4f} | {count} |")


def replay_states(recording: Recording) -> list[State]:
    """The state after each trial of the fallback alone."""
    fallback = make_sampler("default")
    seen: list[Observation] = []
    states: list[State] = []
    for left in range(BUDGET, 0, -1):
        view = SearchView(recording.card, recording.space, tuple(seen), frozenset(), left, 0, next_trial=len(seen) + 1)
        proposals = fallback.propose(view, 1)
        if not proposals:
            break
        row = recording.space.row(proposals[0].config)
        assert row is not None
        seen.append(observe(recording, len(seen) + 1, row))
        posterior = fit_posterior(replace(view, observations=tuple(seen), budget_left=left - 1))
        log, num_measured = curve(recording, seen)[len(seen) - 1], sum(o.loss is not None for o in seen)
        if posterior is None or posterior.best is None:
            states.append(State(log, num_measured, len(seen), math.inf, math.inf, 1.0))
        else:
            chance = float(find_chances(posterior).max())
            gain, wide = find_gain_left(posterior, left - 1), find_wide_gain(posterior, left - 1)
            states.append(State(log, num_measured, len(seen), gain, wide, chance))
    return states


def find_wide_gain(posterior: CandidatePosterior, num_trials: int) -> float:
    """The expected gain of the trials left if no error has narrowed the surrogate's spread: a mean over its prior."""
    quantiles = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
    spreads = np.sqrt(PRIOR_DOF / chi2.ppf(quantiles, PRIOR_DOF))
    return float(np.mean([find_gain_left(replace(posterior, spread=float(s)), num_trials) for s in spreads]))


def run_policies(folder: Path) -> None:
    """Print the pick of each seed policy on each landscape, and the best prediction."""
    print("| policy | picked a row | ran | picked/optimum (gmean of those) | best prediction ran | gmean |")
    print("|---|---|---|---|---|---|")
    recordings = [load_recording(path) for path in find_recordings(folder)]
    views = [SearchView(r.card, r.space, (), frozenset(), BUDGET, 0) for r in recordings]
    first = [
        r.space.row(make_sampler("default").propose(v, 1)[0].config) for r, v in zip(recordings, views, strict=True)
    ]
    predicted = [ratio(r, row) for r, row in zip(recordings, first, strict=True)]
    for name in ("dense", "moe", "composite"):
        rows = []
        for recording, view in zip(recordings, views, strict=True):
            choice = SandboxRunner().choose(read_seed_program(view, name), view, make_surrogate_table(view))
            rows.append(recording.space.row(choice.config) if choice.config else None)
        picked = [ratio(r, row) for r, row in zip(recordings, rows, strict=True)]
        num_picked = sum(row is not None for row in rows)
        print(f"| {name} | {num_picked} of {len(rows)} | {format_ratios(picked)} | {format_ratios(predicted)} |")


def ratio(recording: Recording, row: int | None) -> float | None:
    """Picked over optimum; None if no row was picked or it did not run."""
    time_s = recording.rows[row].metrics.get("step_time_s") if row is not None else None
    return None if time_s is None else time_s / recording.best_value


def format_ratios(ratios: Sequence[float | None]) -> str:
    """Cells of a Markdown table: how many ran, and the geometric mean of their ratios."""
    ran = [value for value in ratios if value is not None]
    return f"{len(ran)} | {float(np.exp(np.mean(np.log(ran)))):.3f}" if ran else "0 | -"


def run_chaos_bench(num_turns: int) -> None:
    """Run the chaos test with the real surrogate and fallback."""
    from llm.chaos import run_chaos

    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = run_chaos(
            num_turns,
            Path(folder),
            seed=5,
            make_fallback=lambda: make_sampler("default"),
            make_table=make_surrogate_table,
        )
    print(f"{report}\n{time.monotonic() - started:.0f} s; every assertion held")


def run_sandbox_bench() -> None:
    """Run every hostile program and print those that returned anything."""
    from llm.hostile import HOSTILE, SLOW

    from cclsearch.propose.agent.policy.sandbox import SandboxError, SandboxLimits, run_policy

    limits = SandboxLimits(time_s=0.5, memory_bytes=48 * 2**20, output_bytes=20_000)

    def attempt(program: str) -> object:
        try:
            return run_policy(program, {"config_space": []}, {}, limits=limits)
        except SandboxError:
            return None

    programs = [*HOSTILE, *SLOW]
    started = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        out = [(program, got) for program, got in zip(programs, pool.map(attempt, programs), strict=True) if got]
    print(
        f"{len(programs)} hostile programs in {time.monotonic() - started:.0f} s; {len(out)} returned something: {out}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The LLM agent with simulated models.")
    names = [name + end for end in ("", SEVERAL, ENDS) for name in PLAYERS]
    parser.add_argument("what", choices=("landscapes", "finish", "policies", "chaos", "sandbox"))
    parser.add_argument("--landscapes", type=Path, default=ROOT / "benchmarks" / "landscapes")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--turns", type=int, default=1000)
    parser.add_argument("--players", nargs="+", default=list(PLAYERS), choices=names)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="file of finished searches, from which an interrupted call continues")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if args.what == "landscapes":
        run_landscapes(args.landscapes, args.seeds, players=args.players, workers=args.workers, keep=args.keep)
    elif args.what == "finish":
        run_finish(args.landscapes)
    elif args.what == "policies":
        run_policies(args.landscapes)
    elif args.what == "chaos":
        run_chaos_bench(args.turns)
    else:
        run_sandbox_bench()


if __name__ == "__main__":
    main()
