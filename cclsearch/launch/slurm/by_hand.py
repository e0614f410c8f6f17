"""The sbatch script of one launch by hand: a whole job of the user's profile, without the search's own programs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cclsearch.launch.slurm.commands import ask_slurm
from cclsearch.launch.slurm.script import (
    choose_shape,
    container_prefix,
    render_script,
    srun_arguments,
)
from cclsearch.launch.slurm.settings import SlurmSettings

_OF_SEARCH = ("#SBATCH --chdir=", "#SBATCH --comment=", "#SBATCH --open-mode=", "export SUBMITIT_EXECUTOR")
"""Beginnings of lines that only a search needs."""
_PLACES = {"NODE_RANK": '"$SLURM_NODEID"', "HEAD_NODE": '"$HEAD_NODE"'}
"""Words of a launch by hand -> what they are in a job."""
_FIND_HEAD = (
    'HEAD_NODE="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
    'export HEAD_NODE="$(scontrol show node "$HEAD_NODE" | grep -o "NodeAddr=[^ ]*" | cut -d= -f2)"',
)
"""Lines that find the address of the first node."""


def render_by_hand(
    settings: SlurmSettings,
    command: Sequence[str],
    *,
    name: str,
    preparation: Sequence[str],
    environment: Mapping[str, str],
    num_ranks: int,
    ranks_per_node: int,
) -> str:
    """Return the text for sbatch: `preparation` runs on the first node, then `command` on each node through srun.

    The job's folder is the one that it is submitted from.
    """
    shape = choose_shape(num_ranks, ranks_per_node, settings.time_limit * 60.0, settings)
    nodes, here = shape.nodes, Path.cwd()
    words = list(command)
    if words[0] in ("torchrun", "python"):
        program = ["-m", "torch.distributed.run"] if words[0] == "torchrun" else []
        words[:1] = [settings.default_python(), *program]
    inner = re.sub("|".join(_PLACES), lambda match: _PLACES[match[0]], shlex.join(words))
    inner = re.sub(r"'(\$[A-Z_]+)(/[^']*)'", r'"\1"\2', inner)
    seen = {**environment, "HEAD_NODE": "", "SLURM_NODEID": ""}
    prefix = container_prefix(settings, [here], seen)
    srun = ["srun", "--kill-on-bad-exit=1", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    srun += [*srun_arguments(settings, [here]), *prefix, "bash", "-c"]
    lines = [
        *preparation,
        *(f"export {name}={shlex.quote(value)}" for name, value in environment.items()),
        *(_FIND_HEAD if nodes > 1 else ()),
        f"{shlex.join(srun)} \\\n  {shlex.quote(f'exec {inner}')}",
    ]
    text = render_script(shape, settings, name=name, comment="", folder=here, command="\n".join(lines))
    return "".join(f"{line}\n" for line in text.splitlines() if not line.startswith(_OF_SEARCH))


_FILLED = frozenset(("partition", "account", "qos", "options", "python", "modules", "setup", "container", "constraint"))
_CORES = frozenset(("cpus-per-task", "cpus-per-gpu", "cores-per-socket", "exclusive"))


def list_doubts(settings: SlurmSettings, ranks_per_node: int) -> Iterator[str]:
    """Yield what a user may have forgotten in a profile, one line each; asks Slurm, if it is there, for GPUs."""
    stated = settings.model_fields_set
    if not stated & _FILLED:
        yield (
            "the profile names no partition, account, python, modules or container: jobs run"
            f" {settings.default_python()} in the cluster's default partition; fill it in (docs/your-cluster.md)"
        )
    if settings.cpus_per_task is None and not settings.exclusive and not _CORES & set(settings.options):
        yield (
            f"the profile has no cpus_per_task: many clusters then give a node's one task, with its {ranks_per_node}"
            " ranks, one core; set the cores of a node, or exclusive: true"
        )
    place = [f"--partition={settings.partition}"] if settings.partition else []
    asks = not settings.cpu_only and settings.gpu_request != "none"
    gres = ask_slurm(["sinfo", "--noheader", "--format=%G", *place]) if asks else None
    if gres is not None and "gpu" not in gres:
        yield f"no node of the partition declares GPUs to Slurm: set gpu_request to none, not {settings.gpu_request}"
