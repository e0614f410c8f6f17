"""Runs the LLM agent and its arbiter over recorded landscapes, with simulated models that see only the requests.

    python benchmarks/agent.py landscapes [--landscapes FOLDER] [--seeds 20]   hybrid with simulated models
    python benchmarks/agent.py forms                                           requests and tokens of each form

No figure is from a live model: the simulated models are programs. Differences are paired by landscape and seed;
intervals are 95 % by bootstrap over landscapes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from llm.players import PLAYERS, Oracle, Several, Written  # noqa: E402
from llm.server import Say, connect, one_by_one, serve  # noqa: E402

from cclsearch.core.values import Failure, FailureKind, Stage  # noqa: E402
from cclsearch.propose.agent.agent import Agent  # noqa: E402
from cclsearch.propose.agent.arbiter.proposer import Arbiter  # noqa: E402
from cclsearch.propose.agent.options import AgentOptions  # noqa: E402
from cclsearch.propose.agent.providers.cost import cost_of  # noqa: E402
from cclsearch.propose.agent.providers.forms import Api, CallForm, Form  # noqa: E402
from cclsearch.propose.agent.providers.spec import find_price  # noqa: E402
from cclsearch.propose.agent.providers.types import Usage  # noqa: E402
from cclsearch.propose.base import Observation, Proposer, SearchView  # noqa: E402
from cclsearch.propose.events import LlmTurn  # noqa: E402
from cclsearch.propose.study.choose import make_sampler  # noqa: E402
from cclsearch.recording.load import Recording, find_recordings, load_recording  # noqa: E402

BUDGET = 15
MILESTONES = (3, 5, 10, 15)
FALLBACK = "fallback"
SEVERAL = "-3"
"""After a player's name: it submits up to three configurations a turn."""
PRICED = "anthropic:claude-opus-5-5"
CALLS = (CallForm.FORCED, CallForm.SCHEMA, CallForm.TEXT)
FORMS = [Form(api=a, call=c) for a in Api for c in CALLS if (a, c) != (Api.MESSAGES, CallForm.SCHEMA)]


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
    name = who.removesuffix(SEVERAL)
    player = Oracle(seed, find_truth(recording)) if name == "oracle" else PLAYERS[name](seed)
    player = Several(player) if who.endswith(SEVERAL) else player
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


def run_landscapes(folder: Path, num_seeds: int, *, players: Sequence[str], workers: int) -> None:
    """Run all searches and print the paired figures as Markdown."""
    paths = find_recordings(folder)
    tasks = [(str(p), who, s) for s in range(num_seeds) for p in paths for who in (FALLBACK, *players)]
    with ProcessPoolExecutor(workers) as pool:
        print_figures(list(pool.map(play, tasks, chunksize=5)), players)


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


def run_forms(recording: Recording) -> None:
    """Search in each form over HTTP with the expert; print requests, tokens (bytes / 3) and cost of one search."""
    price = find_price(PRICED)
    print(f"{recording.name}, at the prices of {PRICED}: {price.describe() if price else ''}, without any cache\n")
    print("| form | requests | tokens in | tokens out | cost |\n|---|---|---|---|---|")
    for form in FORMS:
        with serve(one_by_one(Say())) as server:
            client = connect("anthropic" if form.api is Api.MESSAGES else "compatible", server)
            client.form = form
            model = Written(server, client, PLAYERS["expert"](0))
            arbiter = Arbiter(Agent(model, options=AgentOptions(anonymous=True)), make_sampler("default"))
            replay(recording, arbiter, "expert", 0)
            asked, said = sum(len(json.dumps(body)) for body in server.bodies) // 3, model.num_bytes // 3
        usd = cost_of(Usage(input_tokens=asked, output_tokens=said), price).usd or 0.0
        print(f"| {form.describe()} | {len(server.bodies)} | {asked:,} | {said:,} | ${usd:.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="The LLM agent with simulated models.")
    names = [name + end for end in ("", SEVERAL) for name in PLAYERS]
    parser.add_argument("what", choices=("landscapes", "forms"))
    parser.add_argument("--landscapes", type=Path, default=ROOT / "benchmarks" / "landscapes")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--players", nargs="+", default=list(PLAYERS), choices=names)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if args.what == "landscapes":
        run_landscapes(args.landscapes, args.seeds, players=args.players, workers=args.workers)
    else:
        run_forms(load_recording(ROOT / "workloads" / "recordings" / "nanotron-8b-2n"))


if __name__ == "__main__":
    main()
