"""Every way in which a job of the Slurm launcher ends, provoked on a real Slurm; a part of `slurm.py`."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurm.cluster import Cluster, start_cluster
from slurm.trials import make_job
from slurm_jobs import follow, make_launcher, name_end, wait_for

from cclsearch.launch.base import Handle, JobStatus


def part_ends(folder: Path, _: argparse.Namespace) -> list[str]:
    """Each kind of end provoked on the real Slurm, with cgroups so that memory limits are enforced."""
    rows = ["| provoked | reported as | s after the cause |", "| --- | --- | ---: |"]
    with start_cluster("--cgroup") as cluster:
        for provoke in (
            *(_end_memory, _end_own_limit, _end_crash, _end_silence, _end_scancel, _end_preemption, _end_drain),
            *(_end_down, _end_power, _end_held, _end_slurm_limit),
        ):
            what, since, status, reported = provoke(cluster, folder)
            rows.append(f"| {what} | {name_end(status)} | {reported - since:.1f} |")
            print(rows[-1], flush=True)
            cluster.up("--cgroup")
    return rows


End = tuple[str, float, JobStatus | None, float]


def _provoke(
    what: str, folder: Path, act: Callable[[Handle], None], *, settings: dict[str, Any] | None = None, **job: Any
) -> End:
    run = folder / re.sub(r"\W+", "-", what)[:40]
    launcher = make_launcher(run, **(settings or {}))
    handle = launcher.submit([make_job(run, 1, **job)])[0]
    if job.get("behaviour") in {"hang", "failed"} or job.get("seconds"):
        wait_for(handle.trial_dir / "seen-0.json")
    since = time.time()
    act(handle)
    end = follow(launcher, [handle], limit_s=150).get(handle.job_name)
    if end is None:
        launcher.cancel([handle])
    return what, since, end[1] if end else None, end[0] if end else time.time()


def _end_memory(_: Cluster, folder: Path) -> End:
    return _provoke(
        *("over its memory (--mem=300M, cgroup)", folder, lambda _: None),
        settings={"mem": "300M"},
        **{"behaviour": "hoard", "ranks": 2},
    )


def _end_own_limit(_: Cluster, folder: Path) -> End:
    return _provoke("over the trial's own limit of 10 s", folder, lambda _: None, behaviour="hang", timeout_s=10)


def _end_slurm_limit(cluster: Cluster, folder: Path) -> End:
    def shorten(handle: Handle) -> None:
        cluster.ask("scontrol", "update", f"jobid={handle.job_id}", "timelimit=1")

    return _provoke("over Slurm's time limit of 1 min", folder, shorten, behaviour="hang", timeout_s=900)


def _end_crash(_: Cluster, folder: Path) -> End:
    return _provoke("an exception in one rank of two", folder, lambda _: None, behaviour="crash")


def _end_silence(_: Cluster, folder: Path) -> End:
    return _provoke("exit code 0 without a result", folder, lambda _: None, behaviour="quiet")


def _end_scancel(cluster: Cluster, folder: Path) -> End:
    return _provoke("scancel by someone", folder, lambda h: _ask(cluster, "scancel", h.job_id), behaviour="hang")


def _end_preemption(cluster: Cluster, folder: Path) -> End:
    def urgent(_: Handle) -> None:
        _ask(cluster, "sbatch", "-p", "urgent", "--exclusive", "-N4", "--wrap", "sleep 1")

    return _provoke("preemption by a higher partition", folder, urgent, behaviour="failed")


def _end_drain(cluster: Cluster, folder: Path) -> End:
    def drain(_: Handle) -> None:
        _ask(cluster, "scontrol", "update", "nodename=node1", "state=drain", "reason=test")

    settings = {"nodelist": "node1"}
    return _provoke("a node drained under it", folder, drain, settings=settings, behaviour="ok", seconds=4, ranks=1)


def _end_down(cluster: Cluster, folder: Path) -> End:
    def down(_: Handle) -> None:
        _ask(cluster, "scontrol", "update", "nodename=node2", "state=down", "reason=test")

    return _provoke(
        "a node set down by the administrator", folder, down, settings={"nodelist": "node[2-3]"}, behaviour="hang"
    )


def _end_power(cluster: Cluster, folder: Path) -> End:
    settings = {"nodelist": "node[3-4]"}
    return _provoke(
        "a node's slurmd and all its processes killed", folder, lambda _: cluster.fail_node("node4"),
        settings=settings, behaviour="failed",
    )  # fmt: skip


def _end_held(cluster: Cluster, folder: Path) -> End:
    blocker = cluster.ask("sbatch", "--parsable", "--exclusive", "-w", "node2", "--wrap", "sleep 100").strip()
    try:
        return _provoke(
            *("held while it waits", folder, lambda h: _ask(cluster, "scontrol", "hold", h.job_id)),
            settings={"nodelist": "node2"},
            **{"behaviour": "ok", "ranks": 1},
        )
    finally:
        _ask(cluster, "scancel", blocker)


def _ask(cluster: Cluster, *command: str) -> None:
    cluster.ask(*command)
