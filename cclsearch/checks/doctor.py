"""Examines the machine: each check says what it found and, if something is missing, what to do."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cclsearch.core.content import project_root
from cclsearch.core.errors import UserError
from cclsearch.core.registry import load_plugins
from cclsearch.core.settings import SETTINGS_FILE, load_settings
from cclsearch.core.text import one_line
from cclsearch.launch.base import Check
from cclsearch.propose.agent.providers.kind import list_kinds

COMMAND_TIMEOUT_S = 20.0
SLURM_COMMANDS = ("sbatch", "squeue", "scancel", "sacct")
BROWSERS = ("chromium-browser", "google-chrome", "google-chrome-stable")


@dataclass(frozen=True)
class Finding:
    """A check, and whether ccl-search needs it in every case."""

    check: Check
    is_required: bool = False


def examine_machine() -> list[Finding]:
    """Check everything that a search may need from this machine, required things first. Never shows a key's value."""
    temporary = _check_write("temporary folder", Path(tempfile.gettempdir()), "set TMPDIR to a writable folder")
    required = [_check_python(), _check_runs_folder(), temporary, _check_settings()]
    browser = "only developers need it, to test report.html: install chromium"
    optional = [
        _check_package("torch", "needed for the workloads tiny and tiny-moe: pip install 'ccl-search[torch]'"),
        _check_package("jax", "needed for the workload tiny-jax: pip install 'ccl-search[jax]'"),
        check_gpus(),
        _check_slurm(),
        _check_command("gcloud", "needed to create TPU slices: install the Google Cloud CLI, or name hosts"),
        _check_command("ssh", "needed for TPU VMs and plain hosts: install an OpenSSH client"),
        _check_command("chromium", browser, *BROWSERS),
        *(_check_key(kind.key_name, f"{word}:MODEL") for word, kind in list_kinds().items() if kind.key_name),
        *_check_plugins(),
    ]
    return [*(Finding(check, is_required=True) for check in required), *(Finding(check) for check in optional)]


def _check_python() -> Check:
    version, ok = ".".join(map(str, sys.version_info[:3])), sys.version_info >= (3, 11)
    remedy = "" if ok else "Python 3.11 or later is needed: make a virtual environment with one"
    return Check(name="python", ok=ok, detail=f"{version} at {sys.executable}", remedy=remedy)


def _check_runs_folder() -> Check:
    try:
        folder = project_root() / load_settings().runs
    except UserError as error:
        return Check(name="runs folder", ok=False, detail=str(error), remedy="correct ccl-search.yaml")
    remedy = f"make {str(folder)!r} writable, or choose another folder with --runs FOLDER"
    return _check_write("runs folder", folder, remedy)


def _check_write(name: str, folder: Path, remedy: str) -> Check:
    """Write and remove a small file in the folder, or in the nearest existing folder above it."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".ccl-search-") as file:
            file.write(b"x")
        free_gib = shutil.disk_usage(existing).free / 2**30
    except OSError as error:
        return Check(name=name, ok=False, detail=f"{folder}: {error.strerror or error}", remedy=remedy)
    if free_gib < 0.2:
        return Check(name=name, ok=False, detail=f"{folder}: only {free_gib:.2f} GiB free", remedy="free more space")
    return Check(name=name, ok=True, detail=f"{folder} is writable, {free_gib:.0f} GiB free")


def _check_settings() -> Check:
    path = project_root() / SETTINGS_FILE
    try:
        settings = load_settings()
    except UserError as error:
        return Check(name="project", ok=False, detail=str(error), remedy=f"correct {path}")
    detail = (
        f"{path}: launcher {settings.launcher or 'none'}" if path.is_file() else f"{path.parent}: no {SETTINGS_FILE}"
    )
    return Check(name="project", ok=True, detail=detail)


def _check_package(name: str, remedy: str) -> Check:
    """Find a package without importing it: an import takes seconds, and a broken build may end the process."""
    if importlib.util.find_spec(name) is None:
        return Check(name=name, ok=False, detail="not installed", remedy=remedy)
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = "unknown version"
    return Check(name=name, ok=True, detail=version)


def check_gpus() -> Check:
    """The GPUs that `nvidia-smi` lists, by name and memory."""
    remedy = "run on a cluster (--launcher NAME), on a recording (--workload wl2) or on the CPU (--workload tiny)"
    if shutil.which("nvidia-smi") is None:
        return Check(name="gpus", ok=False, detail="no command nvidia-smi", remedy=remedy)
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check(name="gpus", ok=False, detail=f"nvidia-smi: {one_line(str(error))}", remedy="repair the driver")
    names = [one_line(line, 60) for line in done.stdout.splitlines() if line.strip()]
    if done.returncode != 0 or not names:
        answer = one_line(done.stderr or done.stdout) or f"exit {done.returncode}"
        return Check(name="gpus", ok=False, detail=f"nvidia-smi: {answer}", remedy=remedy)
    kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return Check(name="gpus", ok=True, detail=kinds)


def _check_slurm() -> Check:
    missing = [command for command in SLURM_COMMANDS if shutil.which(command) is None]
    if not missing:
        detail = f"found {', '.join(SLURM_COMMANDS)}; nothing is submitted unless you name a profile"
        return Check(name="slurm", ok=True, detail=detail)
    if "sbatch" in missing:
        remedy = "to use a Slurm cluster, run on its login node with --launcher slurm-generic or your own profile"
        return Check(name="slurm", ok=False, detail="no command sbatch", remedy=remedy)
    detail = f"found sbatch, but not {', '.join(missing)}"
    return Check(name="slurm", ok=False, detail=detail, remedy="install Slurm's client commands, or load its module")


def _check_plugins() -> list[Check]:
    """One line per installed plugin; none if there is none."""
    return [
        Check.of(f"plugin {plugin.name}", not plugin.problem, plugin.problem or "loaded", plugin.remedy)
        for plugin in load_plugins()
    ]


def _check_command(name: str, remedy: str, *others: str) -> Check:
    """Find the command, or one of the others that serve as well."""
    path = next((found for command in (name, *others) if (found := shutil.which(command))), None)
    return Check(name=name, ok=path is not None, detail=path or "not found", remedy="" if path else remedy)


def _check_key(name: str, use: str) -> Check:
    present = bool(os.environ.get(name, "").strip())
    remedy = f"set {name} in the environment to use --llm {use}; without an LLM the strategy alone proposes trials"
    return Check(
        name=name, ok=present, detail="set (not shown)" if present else "not set", remedy="" if present else remedy
    )
