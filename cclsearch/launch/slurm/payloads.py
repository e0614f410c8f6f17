"""What a profile and a trial make together: the payload of a job."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cclsearch.core.errors import UserError
from cclsearch.core.values import Failure, Value
from cclsearch.launch.base import Job
from cclsearch.launch.collect import collect_result
from cclsearch.launch.contract import trial_environment
from cclsearch.launch.slurm.payload import NODE_PROGRAM, Payload, attempt_folder
from cclsearch.launch.slurm.script import choose_shape, container_prefix, mounted_folders, srun_arguments
from cclsearch.launch.slurm.settings import SlurmSettings

if TYPE_CHECKING:
    from cclsearch.space.framework import Need


@dataclass(frozen=True)
class Program:
    """The run script that trials run."""

    script: Path | None
    """None only for a launcher that is made to be checked."""
    runner: str
    """`torchrun`, or `process` for a script that starts its own ranks."""
    environment: dict[str, str]
    """The profile's own variables."""
    knob_environment: Callable[[Mapping[str, Value]], dict[str, str]] = lambda _: {}
    """Variables that follow from a configuration (`NCCL_ALGO`)."""
    needs: tuple[Need, ...] = ()
    """What the framework needs on the nodes; without a script, what any framework does."""


def make_payload(job: Job, program: Program, settings: SlurmSettings) -> Payload:
    """The payload of one attempt: absolute paths, no secrets, nothing that depends on where the search runs."""
    if program.script is None:
        raise UserError("a run script is needed to run trials: name a `framework` in the profile or the card")
    trial_dir = job.trial_dir.absolute()
    folder = attempt_folder(trial_dir, job.attempt)
    ranks, per_node = job.payload.num_ranks, job.payload.ranks_per_node
    environment = {
        **program.environment,
        **program.knob_environment(job.payload.config),
        **trial_environment(trial_dir, job.payload),
    }
    script = program.script.absolute()
    folders = mounted_folders(settings, trial_dir.parent, script)
    shape = choose_shape(ranks, per_node, job.timeout_s, settings)
    return Payload(
        run_id=job.run_id,
        trial=job.trial,
        attempt=job.attempt,
        name=job.name,
        trial_dir=trial_dir,
        folder=folder,
        shape=shape,
        nodes=shape.nodes,
        num_ranks=ranks,
        ranks_per_node=min(ranks, per_node),
        runner=program.runner,
        python=settings.default_python(),
        host_python=settings.default_host_python(),
        program=folder / NODE_PROGRAM.name,
        script=script,
        prefix=container_prefix(settings, folders, environment),
        srun_arguments=srun_arguments(settings, folders),
        environment=environment,
        timeout_s=min(job.timeout_s, settings.time_limit * 60.0),
    )


def describe_payload(payload: Payload) -> list[str]:
    """What the job's node program starts on each node, for people who read the script."""
    ranks = [
        f"-m torch.distributed.run --nnodes={payload.nodes} --node-rank=K --nproc-per-node={payload.ranks_per_node} "
        "--master-addr=HEAD --master-port=PORT"
    ]
    words = [*payload.prefix, payload.python, *(ranks if payload.runner == "torchrun" else []), str(payload.script)]
    return [
        f"which runs, by srun as one task on each of {payload.nodes} nodes, for at most {payload.timeout_s:.0f} s:",
        *(f"  {name}={shlex.quote(value)}" for name, value in sorted(payload.environment.items())),
        f"  {' '.join(words)}",
    ]


def classify_trial(trial_dir: Path, exit_code: int | None) -> Failure | None:
    """What the trial's own files say of its end; None where they hold a sound result."""
    found = collect_result(trial_dir, exit_code=exit_code)
    return found if isinstance(found, Failure) else None
