"""What submitit's public classes do on a real Slurm, and the launcher does not: guarantees of `docs/slurm.md`.

They are why the launcher calls sbatch and queries Slurm itself (`docs/architecture.md`). If a test fails because
submitit keeps the guarantee now, the launcher can submit through it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from paths import TESTS
from slurm.cluster import Cluster, start_cluster
from slurm.trials import make_job

from cclsearch.core.values import FailureKind
from cclsearch.launch.base import JobState
from cclsearch.launch.slurm.job_files import RunScript
from cclsearch.launch.slurm.launcher import SlurmLauncher
from cclsearch.launch.slurm.settings import SlurmSettings

SECRET = "A_SECRET_TOKEN"
SBATCH_S = 4
"""Seconds that the slow sbatch waits before it submits, as one does while the controller does not answer."""
KILLED_SUBMISSION = """
import fcntl, os, sys
from pathlib import Path
sys.path[:0] = {folders!r}
import test_slurm_submitit as tests
folder = Path({folder!r})
if {by_submitit}:
    lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    tests.make_executor(folder).submit(os.getpid)
else:
    tests.make_launcher(folder).submit([tests.make_job(folder, 1, ranks=1, behaviour="ok")])
"""


@pytest.fixture(scope="module")
def bare_cluster() -> Iterator[Cluster]:
    """Yield a Slurm without accounting."""
    with start_cluster("--no-db") as started:
        yield started


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ccl-sl-runs-", ignore_cleanup_errors=True) as made:
        yield Path(made) / "run"


def make_executor(folder: Path, **parameters: Any) -> Any:
    """Return submitit's executor with the launcher's own choices, as far as it has parameters for them."""
    import submitit

    executor = submitit.SlurmExecutor(folder=folder)
    executor.update_parameters(time=2, nodes=1, ntasks_per_node=1, use_srun=False, **parameters)
    return executor


def make_launcher(folder: Path) -> SlurmLauncher:
    settings = SlurmSettings.model_validate({"poll_s": 0.5, "grace_s": 2, "cpu_only": True, "python": sys.executable})
    script = RunScript(TESTS / "slurm" / "trial_script.py", "process", {})
    return SlurmLauncher(settings, script, run_dir=folder)


def wait_until(holds: Callable[[], Any], patience_s: float = 90.0) -> Any:
    deadline = time.monotonic() + patience_s
    while not (found := holds()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return found


def queued(cluster: Cluster, folder: Path) -> list[str]:
    """Return the jobs whose script lies in that folder, ended ones too."""
    lines = cluster.ask("squeue", "--noheader", "--states=all", "--format=%i %o").splitlines()
    return [line.split()[0] for line in lines if str(folder) in line]


def test_submitits_jobs_get_secrets_of_the_searchs_environment(bare_cluster, folder, monkeypatch):
    """Guarantee: "Variables that look like secrets are never passed on"; submitit has no parameter for sbatch's own."""
    monkeypatch.setenv(SECRET, "do-not-pass-on")
    passed_on = folder.parent / "passed-on"
    make_executor(folder / "submitit", setup=[f'printf %s "${SECRET}" >{passed_on}']).submit(os.getpid)
    launcher = make_launcher(folder)
    [handle] = launcher.submit([make_job(folder, 1, ranks=1, behaviour="ok")])
    assert wait_until(lambda: passed_on.exists() and passed_on.read_text()) == "do-not-pass-on"
    wait_until(lambda: launcher.poll([handle])[0].state is JobState.DONE)
    assert SECRET not in json.loads((handle.trial_dir / "seen-0.json").read_text())


@pytest.mark.parametrize("by_submitit", [True, False])
def test_an_sbatch_that_outlives_a_killed_search_keeps_the_lock_only_without_submitit(
    bare_cluster, folder, by_submitit
):
    """Guarantee: "`resume` ... submits none of them twice". submitit's `CommandFunction` closes all descriptors."""
    folder.mkdir()
    slow = start_killed_submission(folder, by_submitit=by_submitit)
    if by_submitit:
        taken = subprocess.run(["flock", "--nonblock", str(folder / "lock"), "true"], check=False).returncode == 0
        assert slow.exists()
        assert taken, "another search could submit while this sbatch still runs"
        wait_until(lambda: queued(bare_cluster, folder))
        return
    launcher = make_launcher(folder)
    [handle] = launcher.submit([make_job(folder, 1, ranks=1, behaviour="ok")])
    assert not slow.exists(), "the second submission waited for the first one's sbatch"
    assert queued(bare_cluster, folder) == [handle.job_id]
    launcher.cancel([handle])


def start_killed_submission(folder: Path, *, by_submitit: bool) -> Path:
    """Kill a process while its sbatch runs; return the file that exists as long as this sbatch does."""
    tools, running = folder / "bin", folder / "sbatch-runs"
    tools.mkdir()
    real = shutil.which("sbatch")
    (tools / "sbatch").write_text(
        f'#!/bin/sh\ntouch "{running}"\nsleep {SBATCH_S}\n"{real}" "$@"\ncode=$?\nrm "{running}"\nexit $code\n'
    )
    (tools / "sbatch").chmod(0o755)
    code = KILLED_SUBMISSION.format(
        folders=[str(TESTS), str(TESTS / "untimed")], folder=str(folder), by_submitit=by_submitit
    )
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PATH": path})
    wait_until(lambda: running.exists() or process.poll() is not None)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    return running


def test_without_accounting_submitit_never_learns_that_a_job_ended(bare_cluster, folder):
    """Guarantee: "it queries `sacct` and `scontrol`; if neither answers, it uses the files"; submitit asks sacct."""
    launcher = make_launcher(folder)
    [handle] = launcher.submit([make_job(folder, 1, ranks=1, behaviour="crash")])
    job = make_executor(folder / "submitit").submit(os._exit, 3)
    wait_until(lambda: launcher.poll([handle])[0].state is JobState.DONE)
    failure = launcher.poll([handle])[0].failure
    assert failure.kind is FailureKind.CRASHED
    wait_until(lambda: f"{job.job_id} FAILED" in bare_cluster.ask("squeue", "--states=all", "--format=%i %T"))
    assert (job.get_info(mode="force"), job.state, job.done(force_check=True)) == ({}, "UNKNOWN", False)
