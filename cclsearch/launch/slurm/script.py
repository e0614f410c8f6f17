"""The sbatch script of one submission: submitit writes the text, and it runs our node program. Pure functions."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cclsearch.core.values import Model
from cclsearch.launch.slurm.settings import Container, SlurmSettings

# For start-up, traces and the end of the processes.
MARGIN_S = 120
"""Seconds requested from Slurm beyond the trial's own limit."""

_SET_ON_THE_NODE = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CCL_JOB_NAME", "CCL_NODE_RANK"),
    *("CCL_NUM_NODES", "CCL_PROCESS_ID", "CCL_NUM_PROCESSES", "CCL_COORDINATOR"),
)
"""Variables that are not in the job spec: the node program and torchrun set them."""


class Shape(Model):
    """The resources requested for a trial; trials with the same shape can share a job array."""

    nodes: int
    gpus_per_node: int
    time_min: int


def choose_shape(num_ranks: int, ranks_per_node: int, timeout_s: float, settings: SlurmSettings) -> Shape:
    """Return the nodes, accelerators per node and minutes that a trial needs."""
    nodes = math.ceil(num_ranks / ranks_per_node)
    per_node = settings.gpus_per_node or ranks_per_node
    if not settings.whole_nodes:
        per_node = min(num_ranks, ranks_per_node)
    minutes = min(settings.time_limit, math.ceil((timeout_s + MARGIN_S) / 60))
    has_gpus = not settings.cpu_only and settings.gpu_request != "none"
    return Shape(nodes=nodes, gpus_per_node=per_node if has_gpus else 0, time_min=minutes)


def render_script(
    shape: Shape,
    settings: SlurmSettings,
    *,
    name: str,
    comment: str,
    folder: Path,
    command: str,
    array_size: int | None = None,
) -> str:
    """Return the text for sbatch: submitit's, without its warning signal, its wckey and its automatic requeue.

    submitit requests a USR2 before the time limit. It kills torch, and NCCL may swallow it: the line is removed, and
    the node program watches the time itself.
    """
    from submitit.slurm import slurm as submitit_slurm

    text: str = submitit_slurm._make_sbatch_string(
        command=command,
        folder=folder,
        job_name=name,
        time=shape.time_min,
        nodes=shape.nodes,
        ntasks_per_node=1,
        comment=comment,
        wckey=None,
        map_count=array_size,
        array_parallelism=array_size or 1,
        setup=_setup_lines(settings),
        use_srun=False,
        stderr_to_stdout=True,
        additional_parameters={
            **_tracking_options(folder, array_size),
            **_resource_options(shape, settings),
            **settings.options,
        },
    )
    return "".join(f"{line}\n" for line in text.splitlines() if not line.startswith("#SBATCH --signal="))


def node_command(host_python: str, program: Path, role: str, path: Path) -> str:
    """Return the script's last line; `exec`, so that Slurm's signals reach the node program."""
    return f"exec {shlex.join([host_python, str(program), role, str(path)])}"


def _tracking_options(folder: Path, array_size: int | None) -> dict[str, Any]:
    """Return the options that the launcher needs to track a job."""
    # `--export=ALL` passes on the few variables that sbatch itself gets: any shorter list makes Slurm run a login shell
    # on the node first, which takes seconds and adds everything that the user's start-up files set.
    return {
        "chdir": folder,
        "output": "slurm-%A_%a.log" if array_size else "slurm-%j.log",
        "no-requeue": True,
        "export": "ALL",
    }


def _resource_options(shape: Shape, settings: SlurmSettings) -> dict[str, Any]:
    """Return the resource options that the profile sets."""
    options: dict[str, Any] = {
        name: getattr(settings, name.replace("-", "_"))
        for name in (
            *("partition", "account", "qos", "constraint", "reservation", "exclude", "nodelist"),
            *("cpus-per-task", "mem"),
        )
    }
    if settings.exclusive:
        options["exclusive"] = True
    if shape.gpus_per_node:
        count = f"{settings.gpu_type}:{shape.gpus_per_node}" if settings.gpu_type else str(shape.gpus_per_node)
        options[settings.gpu_request] = f"gpu:{count}" if settings.gpu_request == "gres" else count
    return {name: value for name, value in options.items() if value is not None}


def _setup_lines(settings: SlurmSettings) -> list[str]:
    """Return the shell lines before the trial: the modules, then the profile's own lines."""
    lines = []
    if settings.modules:
        lines.append("type module >/dev/null 2>&1 || . /etc/profile")
        lines.append(f"module load {shlex.join(settings.modules)} || exit 96")
    return [*lines, *settings.setup]


def mounted_folders(settings: SlurmSettings, run_root: Path, script: Path) -> list[Path]:
    """Return the folders that a container mounts at their own paths: run's trials, run script's folder, scratch."""
    wanted = [run_root, script.parent]
    if settings.scratch is not None:
        wanted.append(Path(settings.scratch).expanduser().absolute())
    return [
        folder
        for index, folder in enumerate(wanted)
        if folder not in wanted[:index] and not any(o in folder.parents for o in wanted)
    ]


def container_prefix(
    settings: SlurmSettings, folders: Sequence[Path], environment: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the words that start the rank's command in the container; empty without a container, and for pyxis."""
    box = settings.container
    if box is None or box.runtime == "pyxis":
        return ()
    mounts = _mounts(box, folders)
    if box.runtime == "shifter":
        volumes = [f"--volume={mount}" for mount in mounts]
        return ("shifter", f"--image={box.image}", *volumes, *box.arguments)
    if box.runtime == "podman-hpc":
        volumes = [f"--volume={mount}" for mount in mounts]
        names = sorted({*environment, *_SET_ON_THE_NODE})
        passed = [f"--env={name}" for name in names]
        return ("podman-hpc", "run", "--rm", "--net=host", "--ipc=host", *volumes, *passed, *box.arguments, box.image)
    binds = [f"--bind={mount}" for mount in mounts]
    return (box.runtime, "exec", *binds, *box.arguments, box.image)


def _mounts(box: Container, folders: Sequence[Path]) -> list[str]:
    """Return `SOURCE:TARGET` of each folder; a mount of the profile with the same target takes precedence."""
    targets = {mount.split(":")[1] for mount in box.mounts if ":" in mount}
    return [*(f"{folder}:{folder}" for folder in folders if str(folder) not in targets), *box.mounts]


def srun_arguments(settings: SlurmSettings, folders: Sequence[Path]) -> tuple[str, ...]:
    """Return srun's arguments: the profile's, its cores (srun no longer takes them from sbatch), pyxis' container."""
    words = list(settings.srun_options)
    if settings.cpus_per_task is not None:
        words.append(f"--cpus-per-task={settings.cpus_per_task}")
    box = settings.container
    if box is not None and box.runtime == "pyxis":
        mounts = ",".join(_mounts(box, folders))
        words += [f"--container-image={box.image}", f"--container-mounts={mounts}", *box.arguments]
    return tuple(words)
