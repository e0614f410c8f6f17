"""Examine the machine: each check has a finding and, if something is missing, a remedy."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
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
COMMANDS = {
    ("gcloud",): "needed to create TPU slices: install the Google Cloud CLI, or name hosts",
    ("ssh",): "needed for TPU VMs and plain hosts: install an OpenSSH client",
    ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"): (
        "only developers need it, to test report.html: install chromium"
    ),
}
"""Names of a command -> its purpose, and how to get it."""
# A trial leaves logs and, if it is profiled, traces: with less a search would soon stop.
MIN_FREE_GIB = 0.2
"""Free space from which a check passes."""


@dataclass(frozen=True)
class Finding:
    """A check, and whether ccl-search needs it in every case."""

    check: Check
    is_required: bool = False


def examine_machine() -> list[Finding]:
    """Check everything that a search may need from this machine, required things first. Never shows a key's value."""
    temporary = _check_write("temporary folder", Path(tempfile.gettempdir()), "set TMPDIR to a writable folder")
    version = ".".join(map(str, sys.version_info[:3]))
    needed = "Python 3.11 or later is needed: make a virtual environment with one"
    python = Check.of("python", sys.version_info >= (3, 11), f"{version} at {sys.executable}", needed)
    optional = [
        _check_package("torch", "needed for the workloads tiny and tiny-moe: pip install 'ccl-search[torch]'"),
        _check_package("jax", "needed for the workload tiny-jax: pip install 'ccl-search[jax]'"),
        check_gpus(),
        _check_slurm(),
        *(_check_command(names, remedy) for names, remedy in COMMANDS.items()),
        *(_check_key(kind.key_name, f"{word}:MODEL") for word, kind in list_kinds().items() if kind.key_name),
        *(Check.of(f"plugin {p.name}", not p.problem, p.problem or "loaded", p.remedy) for p in load_plugins()),
    ]
    required = [python, _check_runs_folder(), temporary, _check_settings()]
    return [*(Finding(check, is_required=True) for check in required), *(Finding(check) for check in optional)]


def examine_llm(llm: str, effort: str | None) -> Finding:
    """Ask the LLM one small request: whether its key, model, address and form are right, and its price."""
    from cclsearch.loop.llm_agent import check_llm

    try:
        line = check_llm(llm, {"effort": effort}) or ""
    except UserError as error:
        return Finding(
            Check.of("llm", False, one_line(str(error), 400), "correct what the line names"), is_required=True
        )
    is_up = " answers in " in line
    return Finding(Check.of("llm", is_up, line, "a search begins without it, and asks it again"))


def _check_runs_folder() -> Check:
    try:
        folder = project_root() / load_settings().runs
    except UserError as error:
        return Check.of("runs folder", False, str(error), "correct ccl-search.yaml")
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
        return Check.of(name, False, f"{folder}: {error.strerror or error}", remedy)
    if free_gib < MIN_FREE_GIB:
        return Check.of(name, False, f"{folder}: only {free_gib:.2f} GiB free", "free more space")
    return Check.of(name, True, f"{folder} is writable, {free_gib:.0f} GiB free")


def _check_settings() -> Check:
    path = project_root() / SETTINGS_FILE
    try:
        settings = load_settings()
    except UserError as error:
        return Check.of("project", False, str(error), f"correct {path}")
    launcher = f"{path}: launcher {settings.launcher or 'none'}"
    return Check.of("project", True, launcher if path.is_file() else f"{path.parent}: no {SETTINGS_FILE}")


def _check_package(name: str, remedy: str) -> Check:
    """Find a package without importing it: an import takes seconds, and a broken build may end the process."""
    if importlib.util.find_spec(name) is None:
        return Check.of(name, False, "not installed", remedy)
    try:
        return Check.of(name, True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Check.of(name, True, "unknown version")


def check_gpus() -> Check:
    """The GPUs that `nvidia-smi` lists, by name and memory."""
    remedy = "run on a cluster (--launcher NAME), on a recording (--workload wl2) or on the CPU (--workload tiny)"
    if shutil.which("nvidia-smi") is None:
        return Check.of("gpus", False, "no command nvidia-smi", remedy)
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, errors="replace", timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check.of("gpus", False, f"nvidia-smi: {one_line(str(error))}", "repair the driver")
    names = [one_line(line, 60) for line in done.stdout.splitlines() if line.strip()]
    if done.returncode != 0 or not names:
        answer = one_line(done.stderr or done.stdout) or f"exit {done.returncode}"
        return Check.of("gpus", False, f"nvidia-smi: {answer}", remedy)
    return Check.of("gpus", True, ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)))


def _check_slurm() -> Check:
    missing = [command for command in SLURM_COMMANDS if shutil.which(command) is None]
    if "sbatch" in missing:
        remedy = "to use a Slurm cluster, run on its login node with --launcher slurm-generic or your own profile"
        return Check.of("slurm", False, "no command sbatch", remedy)
    found = f"found {', '.join(SLURM_COMMANDS)}; nothing is submitted unless you name a profile"
    lacking = f"found sbatch, but not {', '.join(missing)}"
    remedy = "install Slurm's client commands, or load its module"
    return Check.of("slurm", not missing, lacking if missing else found, remedy)


def _check_command(names: Sequence[str], remedy: str) -> Check:
    """Find the first command, or one of the others that serve as well."""
    path = next((found for name in names if (found := shutil.which(name))), None)
    return Check.of(names[0], path is not None, path or "not found", remedy)


def _check_key(name: str, use: str) -> Check:
    present = bool(os.environ.get(name, "").strip())
    remedy = f"set {name} in the environment to use --llm {use}; without an LLM the strategy alone proposes trials"
    return Check.of(name, present, "set (not shown)" if present else "not set", remedy)
