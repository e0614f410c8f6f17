"""A job's local files: its record, the bundle for the workers, the logs fetched so far, the unpacked results."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from cclsearch.core import atomic_file, processes
from cclsearch.core.errors import UserError
from cclsearch.core.values import BootMoment, Failure, FailureKind, Model, Stage, TimeLimit
from cclsearch.launch.base import Job
from cclsearch.launch.collect import FAILURES_FOLDER, MEMORY_RAN_OUT, collect_end, explain_timeout
from cclsearch.launch.contract import (
    CONFIG_FILE,
    EVIDENCE_FILE,
    RESULT_FILE,
    STDERR_FILE,
    STDOUT_FILE,
    TRACE_FOLDER,
    trial_environment,
)
from cclsearch.launch.tpu_vm.settings import TpuSettings
from cclsearch.launch.tpu_vm.workers import WorkerAnswer
from cclsearch.space.framework import Framework

RECORD_FILE = "job.json"
START_FILE = "begun.json"
STATUS_FILE = "status.json"
CANCELLED_FILE = "cancelled"
WORKER_PROGRAM = Path(__file__).with_name("worker.py")
BUNDLE_BYTES = 64 * 2**20
RETURN_BYTES = 16 * 2**30
UNPACKED = (RESULT_FILE, EVIDENCE_FILE, TRACE_FOLDER, FAILURES_FOLDER)
"""Names of the files, and of the folders of files, that a worker's archive may contain."""
_SCRIPT_SUFFIXES = (".py", ".txt", ".yml", ".json")


class TpuJobRecord(Model):
    """`job.json` of an attempt's folder: written before anything starts on a worker."""

    run_id: str
    trial: int
    attempt: int
    name: str
    trial_dir: Path
    num_processes: int
    timeout_s: TimeLimit
    token: str = ""
    """The run's token: two runs of the same name may use the same workers."""
    run_inode: str = ""
    """Inode of the run's folder: a copy of the run has another one."""

    @property
    def folder(self) -> Path:
        """Local folder of the attempt's own files."""
        return attempt_folder(self.trial_dir, self.attempt)

    @property
    def remote_name(self) -> str:
        """Name of the attempt's folder on the workers."""
        return f"{self.name}-{self.token}" if self.token else self.name


class TpuStartRecord(Model):
    """`begun.json`: the workers that were asked to start the job, and when."""

    place: str
    """Resource with the workers that run it; empty for plain hosts."""
    moment: BootMoment
    coordinator: str


def attempt_folder(trial_dir: Path, attempt: int) -> Path:
    """Return the local folder of one attempt's own files."""
    return trial_dir / f"tpu-a{attempt}"


def render_run_script(job: Job, framework: Framework, environment: Mapping[str, str], settings: TpuSettings) -> str:
    """Return `run.sh` of a worker; `worker.py` sets the values of one worker (folder, process, coordinator)."""
    if framework.runner != "process":
        raise UserError(
            f"framework {framework.name!r} starts one process per rank (torchrun), but on TPU VMs one process drives"
            " all devices of its host; use a framework with `runner: process` (maxtext, jax-cpu)"
        )
    trial = trial_environment(job.trial_dir, job.payload)
    own = {name: value for name, value in trial.items() if name not in ("CCL_TRIAL_DIR", "CCL_CONFIG")}
    variables = {**environment, **framework.knob_environment(job.payload.config), **own}
    lines = ["#!/bin/bash", f"# trial {job.trial} of {job.run_id}: {job.payload.config}"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in sorted(variables.items())]
    lines += settings.setup
    script = f"scripts/{framework.script_path.name}"
    python = settings.python
    program = f'"$HOME"/{shlex.quote(python[2:])}' if python.startswith("~/") else shlex.quote(python)
    lines.append(f'exec {program} "$(dirname "$0")"/{shlex.quote(script)}')
    return "\n".join(lines) + "\n"


def write_bundle(path: Path, job: Job, framework: Framework, texts: Mapping[str, str]) -> None:
    """Write the archive for the workers: `worker.py` with its imports, `config.json`, scripts' folder, `texts`."""
    files = {name: text.encode() for name, text in texts.items()}
    files["worker.py"] = WORKER_PROGRAM.read_bytes()
    files |= {"cclsearch/__init__.py": b"", "cclsearch/core/__init__.py": b""}
    for module in (processes, atomic_file):
        path_here = Path(str(module.__file__))
        files[f"cclsearch/core/{path_here.name}"] = path_here.read_bytes()
    files["config.json"] = (job.trial_dir / CONFIG_FILE).read_bytes()
    for source in sorted(framework.script_path.parent.iterdir()):
        if source.suffix in _SCRIPT_SUFFIXES and source.is_file():
            files[f"scripts/{source.name}"] = source.read_bytes()
    if sum(map(len, files.values())) > BUNDLE_BYTES:
        raise UserError(f"the files in the folder of {str(framework.script_path)!r} exceed {BUNDLE_BYTES // 2**20} MiB")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o644
            archive.addfile(member, io.BytesIO(data))


def append_logs(folder: Path, process: int, stdout: bytes, stderr: bytes) -> None:
    """Append new log output of a process; the local length counts the fetched bytes."""
    for name, text in (("stdout", stdout), ("stderr", stderr)):
        if text:
            with open(folder / f"w{process}.{name}", "ab") as file:
                file.write(text)


def log_offsets(folder: Path, num_processes: int) -> str:
    """Return `0=STDOUT:STDERR,1=...`, the fetched bytes of each log, as `worker.py` takes it."""
    sizes = {path.name: path.stat().st_size for path in folder.glob("w*.std*")}
    return ",".join(
        f"{process}={sizes.get(f'w{process}.stdout', 0)}:{sizes.get(f'w{process}.stderr', 0)}"
        for process in range(num_processes)
    )


def merge_logs(folder: Path, trial_dir: Path, num_processes: int) -> None:
    """Write `stdout.log` and `stderr.log` from every process's logs; with several, lines name the process."""
    for name, target in (("stdout", STDOUT_FILE), ("stderr", STDERR_FILE)):
        partial = trial_dir / f".{target}.part"
        with open(partial, "wb") as out:
            for process in range(num_processes):
                prefix = b"[rank%d]: " % process if num_processes > 1 else b""
                with contextlib.suppress(OSError), open(folder / f"w{process}.{name}", "rb") as file:
                    out.writelines(prefix + line.rstrip(b"\n") + b"\n" for line in file)
        os.replace(partial, trial_dir / target)


def unpack_results(archives: Mapping[int, Path], trial_dir: Path, scratch: Path) -> None:
    """Unpack traces, failures, evidence and, last of all, `result.json` into the trial's folder.

    The process whose result counts gives the evidence. Raises ValueError if an archive contains other files.
    """
    shutil.rmtree(scratch, ignore_errors=True)
    for process, archive in sorted(archives.items()):
        _unpack(archive, scratch / str(process))
    for process in sorted(archives):
        root = scratch / str(process)
        for source in sorted(path for path in root.rglob("*") if path.is_file()):
            relative = source.relative_to(root)
            if relative.parts[0] in (TRACE_FOLDER, FAILURES_FOLDER):
                _move(source, trial_dir, relative, process)
    for process in sorted(archives):
        if (scratch / str(process) / RESULT_FILE).is_file():
            for name in (EVIDENCE_FILE, RESULT_FILE):
                with contextlib.suppress(FileNotFoundError):
                    os.replace(scratch / str(process) / name, trial_dir / name)
            break
    shutil.rmtree(scratch, ignore_errors=True)


def _move(source: Path, trial_dir: Path, relative: Path, process: int) -> None:
    target = trial_dir / relative
    if target.exists():  # two hosts with the same name: keep both
        target = trial_dir / relative.parts[0] / f"process{process}" / Path(*relative.parts[1:])
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(source, target)


def _unpack(archive: Path, target: Path) -> None:
    """Extract only regular files with known names: a worker's paths are not trusted."""
    total = 0
    try:
        with tarfile.open(archive, "r:gz") as file:
            for member in file:
                parts = PurePosixPath(member.name).parts
                if member.isdir() or not member.isreg():
                    continue
                if not parts or parts[0] not in UNPACKED or ".." in parts:
                    raise ValueError(f"the worker's archive contains {member.name!r}")
                total += member.size
                if total > RETURN_BYTES:
                    raise ValueError(f"the worker's archive exceeds {RETURN_BYTES // 2**30} GiB")
                path = target.joinpath(*parts)
                path.parent.mkdir(parents=True, exist_ok=True)
                content = file.extractfile(member)
                if content is not None:
                    with open(path, "wb") as out:
                        shutil.copyfileobj(content, out)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"the worker's archive could not be read: {error}") from None


def find_failure(record: TpuJobRecord, by_process: Mapping[int, WorkerAnswer]) -> Failure | None:
    """Return why there is no valid result, from the workers' answers and the trial's files; None if there is one."""
    if (record.trial_dir / RESULT_FILE).is_file():
        return None
    if any(answer.reason == "timeout" for answer in by_process.values()):
        return Failure(stage=Stage.RUN, kind=FailureKind.TIMEOUT, message=explain_timeout(record.timeout_s))
    for process, answer in by_process.items():
        if answer.oom:
            return Failure(stage=Stage.RUN, kind=FailureKind.OUT_OF_MEMORY, message=MEMORY_RAN_OUT, rank=process)
    codes = [answer.code for answer in by_process.values() if answer.code and answer.reason == "finished"]
    found = collect_end(record.trial_dir, exit_code=codes[0] if codes else 0)
    return found if isinstance(found, Failure) else None
