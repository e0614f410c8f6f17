"""Preview of a night for `--dry-run`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from cclsearch.nightly.config import NightlyConfig
from cclsearch.nightly.history import find_runs, is_same_work, pick_bests, read_earlier
from cclsearch.nightly.night import plan_jobs, show_time
from cclsearch.nightly.prune import prune_evidence
from cclsearch.nightly.share import Spent, find_remaining, split_remaining
from cclsearch.nightly.window import NightWindow, find_window
from cclsearch.plan.plan import Plan
from cclsearch.run.folder import Standing, load_run
from cclsearch.run.spec import DEFAULT_BUDGET


def preview_night(config: NightlyConfig, runs: Path, plans: Mapping[str, Plan], window: NightWindow) -> list[str]:
    """One line per job, in the order they would run, and the evidence that would be removed."""
    lines = []
    current_runs = set(window.jobs.values())
    jobs = config.all_jobs
    for n, job in enumerate(jobs):
        plan = plans[job.key]
        waiting = sum(other.priority for other in jobs[n:])
        share = split_remaining(find_remaining(config.budget, Spent()), job.priority, waiting)
        trials = min(job.budget.trials or DEFAULT_BUDGET, int(share["trials"] or 10**9))
        folders = find_runs(runs, config.name, job.key)
        tonights = runs / window.jobs[job.key] if job.key in window.jobs else None
        earlier = read_earlier(folders, plan.spec)
        head = f"{job.key}: {plan.spec.card.name} ({plan.spec.provenance.value}), objective {plan.spec.objective.name}"
        lines.append(f"{head}, priority {job.priority:g}, up to {trials} trials of {len(plan.space)} configurations")
        if tonights in folders and load_run(tonights).status is Standing.ENDED:
            lines.append(f"  {tonights.name} has ended")
            continue
        if folders:
            latest = load_run(folders[-1])
            if latest.status.is_resumable and is_same_work(latest.spec, plan.spec):
                lines.append(f"  continues {latest.folder.name}, which was interrupted")
                current_runs.add(latest.folder.name)
                continue
        bests = pick_bests(earlier, job.start_from)[: max(1, trials // 2)]
        lines += [f"  measures again: {config_}" for config_ in bests]
    pruned = prune_evidence(
        runs, config.name, config.keep, tonight=window.stamp, current_runs=current_runs, dry_run=True
    )
    if pruned.num_trials:
        lines.append(f"removes the evidence of {pruned.num_trials} trials, {pruned.num_bytes / 2**30:.2f} GiB")
    return lines


def describe_night(config: NightlyConfig, runs: Path) -> list[str]:
    """Return what a night would do: the deadline, its jobs, their shares, and the evidence it would remove."""
    plans = plan_jobs(config)
    window = find_window(config, runs, time.time())
    until = f"until {show_time(window.deadline_s)}" if window.deadline_s is not None else "without a deadline"
    which = f"continues the interrupted night {window.stamp}" if window.folder.exists() else "a new night from now"
    head = f"{config.name}: {which} {until}; {len(plans)} jobs"
    return [head, *preview_night(config, runs, plans, window)]
