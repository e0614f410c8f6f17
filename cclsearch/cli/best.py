"""`ccl-search best RUN`: the best configuration, with options and job script to run it again."""

from __future__ import annotations

import argparse
import json

from cclsearch.cli import EXIT_FAILED, EXIT_OK
from cclsearch.cli.output import say
from cclsearch.core.errors import UserError
from cclsearch.core.job_file import RECORD_BYTES, read_tail
from cclsearch.core.values import Config
from cclsearch.launch.profile import load_profile
from cclsearch.launch.slurm.by_hand import list_doubts, render_by_hand
from cclsearch.launch.slurm.settings import SlurmSettings
from cclsearch.loop.session import rebuild_space
from cclsearch.plan.hardware import resolve_hardware
from cclsearch.report.kubernetes import render_kubernetes
from cclsearch.report.launch_form import describe_launch, launch_as_json, launch_of_run
from cclsearch.report.patch import write_patch
from cclsearch.report.power import describe_power_limit
from cclsearch.report.summary import best_as_json, closest_as_json, summarize_run
from cclsearch.run.catalog import find_run
from cclsearch.run.folder import load_run
from cclsearch.run.spec import RunSpec
from cclsearch.run.trial_folder import SCRIPT_FILE
from cclsearch.space.framework import load_framework
from cclsearch.space.table import count_ranks


def _render_job(spec: RunSpec, config: Config, name: str) -> str:
    """Return the sbatch script of a configuration with the profile of that name, by default the run's."""
    profile = load_profile(name) if name else spec.profile
    if profile.launcher != "slurm":
        raise UserError(
            f"--sbatch: {profile.name} starts no jobs of Slurm: name a profile that does (--sbatch PROFILE)"
        )
    hardware, _ = resolve_hardware(spec.card, profile)
    spec = spec.model_copy(update={"profile": profile, "card": spec.card.model_copy(update={"hardware": hardware})})
    form = launch_of_run(spec, config)
    settings, per_node = profile.read_settings(SlurmSettings), hardware.accelerators_per_node
    comments, files = form.as_parts()
    places = {need.file: f"${need.env}/{need.file}" for need in load_framework(spec.framework).needs if need.file}
    return render_by_hand(
        settings,
        [places.get(word, word) for word in form.command],
        name=spec.card.name,
        preparation=[
            *(f"# warning: {doubt}" for doubt in list_doubts(settings, per_node)),
            *(line for line in comments if "NODE_RANK" not in line),
            *files,
        ],
        environment=form.environment,
        num_ranks=count_ranks(config),
        ranks_per_node=per_node,
    )


def run(args: argparse.Namespace) -> int:
    loaded = load_run(find_run(args.run, args.runs))
    best = loaded.state.best
    if args.power_limit is not None:
        say(*describe_power_limit(loaded.spec, loaded.state, args.power_limit))
        return EXIT_OK
    if best is not None and args.patch:
        print(write_patch(loaded.spec, rebuild_space(loaded.spec), best.config))
        return EXIT_OK
    if best is not None and args.sbatch is not None:
        print(_render_job(loaded.spec, best.config, args.sbatch), end="")
        return EXIT_OK
    if best is not None and args.kubernetes:
        print(render_kubernetes(loaded.spec, best.config, args.kubernetes), end="")
        return EXIT_OK
    if args.json:
        closest = closest_as_json(loaded.spec, loaded.state)
        without = {"run": loaded.spec.run_id, "trial": None, "closest": closest} if closest else None
        figures = best_as_json(loaded.spec, loaded.state, loaded.folder)
        if figures is not None and best is not None:
            figures["launch"] = launch_as_json(loaded.spec, best.config)
        print(json.dumps(figures or without))
        return EXIT_OK if best else EXIT_FAILED
    say(*summarize_run(loaded.spec, loaded.state, loaded.folder))
    if best is None:
        return EXIT_FAILED
    say(*describe_launch(loaded.spec, best.config))
    script = loaded.trial_folder(best.number) / SCRIPT_FILE
    if loaded.spec.recording is None and script.is_file():
        say(f"job script: {script}\n", read_tail(script, RECORD_BYTES).rstrip())
    return EXIT_OK
