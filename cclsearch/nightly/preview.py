"""Preview of a night for `--dry-run`."""

from __future__ import annotations

import time
from pathlib import Path

from cclsearch.nightly.config import NightlyConfig
from cclsearch.nightly.history import find_runs, pick_bests, read_earlier
from cclsearch.nightly.night import count_wanted, find_unfinished, plan_jobs, show_time
from cclsearch.nightly.prune import prune_evidence
from cclsearch.nightly.share import Spent, find_remaining, split_remaining
from cclsearch.nightly.window import find_window
from cclsearch.run.folder import Standing, load_run


def describe_night(config: NightlyConfig, runs: Path) -> list[str]:
    """Lines about a night that would start now: its deadline, its jobs in order, and the evidence it would remove."""
    plans, jobs = plan_jobs(config), config.all_jobs
    window = find_window(config, runs, time.time())
    until = f"until {show_time(window.deadline_s)}" if window.deadline_s is not None else "without a deadline"
    which = f"continues the interrupted night {window.stamp}" if window.folder.exists() else "a new night from now"
    lines = [f"{config.name}: {which} {until}; {len(plans)} jobs"]
    current_runs = set(window.jobs.values())
    for n, job in enumerate(jobs):
        plan = plans[job.key]
        waiting = sum(other.priority for other in jobs[n:])
        share = split_remaining(find_remaining(config.budget, Spent()), job.priority, waiting)
        trials = min(count_wanted(job), int(share["trials"] or 10**9))
        head = f"{job.key}: {plan.spec.card.name} ({plan.spec.provenance.value}), objective {plan.spec.objective.name}"
        lines.append(f"{head}, priority {job.priority:g}, up to {trials} trials of {len(plan.space)} configurations")
        folders = find_runs(runs, config.name, job.key)
        tonights = runs / window.jobs.get(job.key, "")
        if tonights in folders and load_run(tonights).status is Standing.ENDED:
            lines.append(f"  {tonights.name} has ended")
            continue
        if (latest := find_unfinished(folders, plan)) is not None:
            lines.append(f"  continues {latest.folder.name}, which was interrupted")
            current_runs.add(latest.folder.name)
            continue
        bests = pick_bests(read_earlier(folders, plan.spec), job.start_from)[: max(1, trials // 2)]
        lines += [f"  measures again: {config_}" for config_ in bests]
    pruned = prune_evidence(
        runs, config.name, config.keep, tonight=window.stamp, current_runs=current_runs, dry_run=True
    )
    if pruned.num_trials:
        lines.append(f"removes the evidence of {pruned.num_trials} trials, {pruned.num_bytes / 2**30:.2f} GiB")
    return lines
