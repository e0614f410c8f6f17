"""What an LLM that opens the search space gains on real training: `tiny` (torch) and `tiny-jax` on this machine's CPUs.

    python benchmarks/extend.py [--workload tiny] [--devices 2] [--budget 8] [--rounds 5] [--runs FOLDER]

1. A stand-in with an expert's rules (tests/llm/opener.py) searches over the real HTTP protocol with `--extend listed`.
2. Every configuration of the original space runs once, by its run script.
3. The fastest configurations of both run alternately, so that other load of the machine meets them alike; their medians
   are compared. The stand-in is a program: it shows that the mechanism works, not what a live model would ask for.

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

from cclsearch.cli import main  # noqa: E402
from cclsearch.core.values import Config  # noqa: E402
from cclsearch.launch.contract import RESULT_FILE, trial_environment  # noqa: E402
from cclsearch.propose.agent.providers.types import CompletionRequest  # noqa: E402
from cclsearch.record.trial import Trial  # noqa: E402
from cclsearch.run.folder import Run, load_run  # noqa: E402
from cclsearch.run.spec import read_spec  # noqa: E402
from cclsearch.space.build import build_space  # noqa: E402
from cclsearch.space.framework import load_framework  # noqa: E402
from cclsearch.tasks.base import task_of  # noqa: E402

FINALISTS = 3
"""Configurations of the exhaustive run, by their single measurement, that run again: the best of them is its best."""


def search(runs: Path, name: str, command: list[str]) -> Run:
    """The run of that name, started, or continued if it was killed."""
    folder = runs / name
    options = ["--runs", str(runs), "--quiet"]
    known = folder.exists()
    if not known or load_run(folder).state.ended is None:
        main(["resume", name, *options] if known else ["run", *command, "--name", name, *options])
    return load_run(folder)


def measure_all(args: argparse.Namespace, opened: Run) -> dict[Config, float]:
    """Every configuration of the original space -> its step time in one run; kept in a file as it goes."""
    spec = read_spec(opened.folder)
    space = build_space(spec.card, load_framework(spec.framework), spec.knobs, spec.use_fewer)
    path = args.runs / f"{args.workload}-original.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    times: dict[Config, float] = {}
    for config in map(space.config, range(len(space))):
        if str(config) not in known:
            known[str(config)] = measure(opened, config)
            path.write_text(json.dumps(known))
        times[config] = known[str(config)]
    return times


def search_with_opener(args: argparse.Namespace) -> Run:
    """The search with a stand-in that may open the space."""
    opener = Opener(min_trials=1)

    def script(request: CompletionRequest) -> Reaction:
        answer = opener.ask(request)
        return Say(tuple((call.name, call.arguments) for call in answer.calls))

    os.environ["CCL_SEARCH_LLM_API_KEY"] = KEY
    with serve(script) as server:
        llm = ["--llm", f"{server.url}/v1#{MODEL}", "--extend", "listed"]
        return search(args.runs, f"{args.workload}-opened", [*card_options(args), *llm, "--budget", str(args.budget)])


def card_options(args: argparse.Namespace) -> list[str]:
    """The workload on so many devices."""
    count = "workload.hardware.xpu_spec"
    sets = [f"{count}.total_count={args.devices}", f"{count}.count_per_node={args.devices}"]
    return ["-w", args.workload, "-l", "local", *(word for text in sets for word in ("--set", text))]


def measure(run: Run, config: Config) -> float:
    """Median step time of one run of that configuration, in seconds."""
    spec, framework = run.spec, load_framework(run.spec.framework)
    with tempfile.TemporaryDirectory() as folder:
        payload = task_of(spec.card).make_input(spec.card, config, is_measured=False, run_id="extend", trial=1)
        (Path(folder) / "config.json").write_text(payload.model_dump_json())
        added = {**framework.knob_environment(config), **trial_environment(Path(folder), payload)}
        environment = {**os.environ, **spec.profile.environment, **added}
        subprocess.run([sys.executable, framework.script_path], env=environment, check=True, capture_output=True)
        return statistics.median(json.loads((Path(folder) / RESULT_FILE).read_text())["step_times_s"])


def find_fastest(run: Run, count: int) -> list[Trial]:
    """The ranked trials with the lowest step time."""
    ranked = [run.state.trials[number] for number in run.state.ranked]
    return sorted(ranked, key=lambda trial: run.state.trials.loss(trial.number) or 0.0)[:count]


def compare(args: argparse.Namespace, original: dict[Config, float], opened: Run) -> None:
    """Run the fastest of both alternately, and print medians and how they compare."""
    finalists = sorted(original, key=original.__getitem__)[:FINALISTS]
    grown = [trial.config for trial in find_fastest(opened, 2)]
    times: dict[Config, list[float]] = {config: [] for config in (*finalists, *grown)}
    for _ in range(args.rounds):
        for config, found in times.items():
            found.append(measure(opened, config))
    medians = {config: statistics.median(found) for config, found in times.items()}
    best = min(finalists, key=medians.__getitem__)
    winner = min(grown, key=medians.__getitem__)
    state = opened.state
    print(f"{args.workload} on {args.devices} devices, {os.cpu_count()} cores; medians of {args.rounds} rounds")
    print(f"original space: {len(original)} configurations, each run once, {len(finalists)} of them again")
    print(
        f"opened by the stand-in: {opened.spec.space_size} configurations, {len(state.trials)} trials,"
        f" {len(state.trials) - len(state.ranked)} not ranked, {state.num_growths} growth"
    )
    for config in times:
        mark = "(best of the original)" if config == best else "(best of the opened)" if config == winner else ""
        low, high = min(times[config]), max(times[config])
        print(f"  {medians[config]:.4f} s, {low:.4f} to {high:.4f}: {config} {mark}")
    ratios = [own / other for own, other in zip(times[winner], times[best], strict=True)]
    wins = sum(ratio < 1 for ratio in ratios)
    print(f"opened / original: {medians[winner] / medians[best]:.3f}; faster in {wins} of {len(ratios)} rounds")


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
