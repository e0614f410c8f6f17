"""What an LLM that opens the search space gains on real training: `tiny` (torch) and `tiny-jax` on this machine's CPUs.

    python benchmarks/extend.py [--workload tiny] [--devices 2] [--budget 8] [--rounds 5] [--runs FOLDER]

1. A stand-in with an expert's rules (tests/llm/opener.py) searches over the real HTTP protocol with `--extend listed`.
2. Every configuration of the original space runs once.
3. The fastest configurations of both run alternately, so that other load of the machine meets them alike.

Each trial is one run of the framework's run script, with its environment; what counts is its fastest step, because a
machine that others use lengthens the rest: admission would refuse such trials, so the search is one of the Python API,
whose measurements are the caller's. The stand-in is a program: it shows that the mechanism works, not what a live model
would ask for.

A run that was killed is continued if the command is given again with the same `--runs`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from llm.opener import Opener  # noqa: E402
from llm.server import KEY, MODEL, Reaction, Say, serve  # noqa: E402

import cclsearch  # noqa: E402
from cclsearch.core.values import Config  # noqa: E402
from cclsearch.launch.contract import RESULT_FILE, trial_environment  # noqa: E402
from cclsearch.launch.profile import load_profile  # noqa: E402
from cclsearch.plan.plan import plan_search  # noqa: E402
from cclsearch.plan.request import SearchRequest  # noqa: E402
from cclsearch.propose.agent.providers.types import CompletionRequest  # noqa: E402
from cclsearch.record.trial import Trial  # noqa: E402
from cclsearch.run.folder import Run, create_run, load_run  # noqa: E402
from cclsearch.run.spec import SearchLimits, read_spec  # noqa: E402
from cclsearch.space.build import build_space  # noqa: E402
from cclsearch.space.framework import load_framework  # noqa: E402
from cclsearch.tasks.base import task_of  # noqa: E402

HARDWARE = "workload.hardware.xpu_spec"
FINALISTS = 3
"""Configurations of the exhaustive run, by their single measurement, that run again: the best of them is its best."""


def measure_all(args: argparse.Namespace, opened: Run) -> dict[Config, float]:
    """Every configuration of the original space -> its step time in one run; kept in a file as it goes."""
    spec = read_spec(opened.folder)
    space = build_space(spec.card, load_framework(spec.framework), spec.knobs, spec.use_fewer)
    path = args.runs / f"{args.workload}-original.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    times: dict[Config, float] = {}
    for config in map(space.config, range(len(space))):
        if str(config) not in known:
            known[str(config)] = measure(opened, config)[0]
            path.write_text(json.dumps(known))
        times[config] = known[str(config)]
    return times


def search_with_opener(args: argparse.Namespace) -> Run:
    """The search with a stand-in that may open the space."""
    opener, folder = Opener(), args.runs / f"{args.workload}-opened"

    def script(request: CompletionRequest) -> Reaction:
        answer = opener.ask(request)
        return Say(tuple((call.name, call.arguments) for call in answer.calls))

    os.environ["CCL_SEARCH_LLM_API_KEY"] = KEY
    with serve(script) as server:
        if not folder.exists():
            request = SearchRequest(
                args.workload,
                SearchLimits(budget=args.budget),
                sets=[
                    f"workload.hardware.xpu_spec.{name}={args.devices}" for name in ("total_count", "count_per_node")
                ],
                threads=1,
                llm=f"{server.url}/v1#{MODEL}",
                llm_options={"extend": "listed"},
                run_id=folder.name,
            )
            create_run(plan_search(request).spec, args.runs)
        cclsearch.resume(folder, lambda config: measure(load_run(folder), Config(config))[0], runs_folder=args.runs)
    return load_run(folder)


def measure(run: Run, config: Config) -> tuple[float, float]:
    """Fastest and median step time in seconds of one run of that configuration, by the framework's run script."""
    spec, framework = run.spec, load_framework(run.spec.framework)
    with tempfile.TemporaryDirectory() as folder:
        payload = task_of(spec.card).make_input(spec.card, config, is_measured=False, run_id="extend", trial=1)
        (Path(folder) / "config.json").write_text(payload.model_dump_json())
        added = {**framework.knob_environment(config), **trial_environment(Path(folder), payload)}
        environment = {**os.environ, **load_profile("local").environment, **added}
        subprocess.run([sys.executable, framework.script_path], env=environment, check=True, capture_output=True)
        steps = json.loads((Path(folder) / RESULT_FILE).read_text())["step_times_s"]
    return min(steps), statistics.median(steps)


def find_fastest(run: Run, count: int) -> list[Trial]:
    """The ranked trials with the lowest step time."""
    ranked = [run.state.trials[number] for number in run.state.ranked]
    return sorted(ranked, key=lambda trial: run.state.trials.loss(trial.number) or 0.0)[:count]


def compare(args: argparse.Namespace, original: dict[Config, float], opened: Run) -> None:
    """Run the fastest of both alternately, and print medians and how they compare."""
    finalists = sorted(original, key=original.__getitem__)[:FINALISTS]
    grown = [trial.config for trial in find_fastest(opened, 2)]
    times: dict[Config, list[tuple[float, float]]] = {config: [] for config in (*finalists, *grown)}
    for _ in range(args.rounds):
        for config, found in times.items():
            found.append(measure(opened, config))
    fastest = {config: statistics.median(one for one, _ in found) for config, found in times.items()}
    medians = {config: statistics.median(one for _, one in found) for config, found in times.items()}
    best, winner = min(finalists, key=fastest.__getitem__), min(grown, key=fastest.__getitem__)
    state = opened.state
    print(f"{args.workload} on {args.devices} devices, {os.cpu_count()} cores; medians of {args.rounds} rounds")
    print(f"original space: {len(original)} configurations, each run once, {len(finalists)} of them again")
    print(
        f"opened by the stand-in: {opened.spec.space_size} configurations, {len(state.trials)} trials,"
        f" {len(state.trials) - len(state.ranked)} not ranked, {state.num_growths} growth"
    )
    print("fastest step and median step, each the median over the rounds:")
    for config in times:
        mark = "(best of the original)" if config == best else "(best of the opened)" if config == winner else ""
        print(f"  {fastest[config]:.4f} s, {medians[config]:.4f} s: {config} {mark}")
    wins = sum(own[0] < other[0] for own, other in zip(times[winner], times[best], strict=True))
    print(
        f"opened / original: {fastest[winner] / fastest[best]:.3f} of the fastest step,"
        f" {medians[winner] / medians[best]:.3f} of the median step; faster in {wins} of {args.rounds} rounds"
    )


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="tiny")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--budget", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", type=Path, default=None)
    args = parser.parse_args()
    args.runs = args.runs or Path(tempfile.mkdtemp(prefix="extend-"))
    opened = search_with_opener(args)
    compare(args, measure_all(args, opened), opened)


if __name__ == "__main__":
    run()
