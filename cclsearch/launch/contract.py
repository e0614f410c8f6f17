"""The trial contract between launcher and run script (`docs/trial-contract.md` tells it to authors of run scripts).

The script gets `CCL_TRIAL_DIR`, `CCL_CONFIG` (path of `config.json`) and one typed `CCL_<KNOB>` variable a knob. It
leaves `result.json` by atomic rename, whose presence is the completion signal, and traces of every rank in `trace/`.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from pydantic import Field

from cclsearch.card.model import ModelArch
from cclsearch.core.values import Config, Failure, Model

RESULT_FILE = "result.json"
CONFIG_FILE = "config.json"
TRACE_FOLDER = "trace"
STDOUT_FILE = "stdout.log"
STDERR_FILE = "stderr.log"


class RunStatus(StrEnum):
    """What the run script says of itself."""

    OK = "ok"
    FAILED = "failed"


class TrialInput(Model):
    """`config.json`: all that a run script needs, written by the engine."""

    schema_version: int = 1
    run_id: str
    trial: int
    config: Config
    arch: ModelArch
    global_batch_size: int
    seq_len: int
    precision: str
    gradient_accumulation: int = Field(ge=1)
    """Derived: global batch / (dp x micro-batch)."""
    num_ranks: int = Field(ge=1)
    """tp x dp x pp."""
    ranks_per_node: int = Field(ge=1)
    warmup_steps: int = 2
    """Optimizer steps before the timed window."""
    timed_steps: int = 5
    """Optimizer steps in the unprofiled timed window."""
    profiled_steps: int = 2
    """Optimizer steps in the separate profiled window; 0 for none."""
    seed: int = 0
    """Seed of weights and data: the same in every trial."""


class TrialResult(Model):
    """`result.json`: what really happened, as the run script saw it."""

    schema_version: int = 1
    status: RunStatus
    failure: Failure | None = None
    """Why, where status is `failed`."""
    world_size: int | None = None
    global_batch_size: int | None = None
    """Sequences per optimizer step that were really trained, over all ranks."""
    seq_len: int | None = None
    num_layers: int | None = None
    num_params: int | None = None
    """Parameters of the whole model as built (counted once over all ranks)."""
    step_times_s: tuple[float, ...] = ()
    """Seconds of each optimizer step of the unprofiled timed window, slowest rank."""
    warmup_steps: int = 0
    """Optimizer steps run before that window."""
    peak_memory_bytes: tuple[int, ...] = ()
    """Peak memory by rank."""
    memory_kind: str = "device"
    """`device` (allocator of the accelerator), `rss` (resident set of a CPU process) or `compiled` (XLA's plan)."""
    losses: tuple[float, ...] = ()
    """Training loss of the first optimizer steps."""
    versions: dict[str, str] = {}
    """Package -> version of what ran (torch, nccl, jax, framework, python, driver)."""
    devices: tuple[str, ...] = ()
    """Device name by rank."""
    hosts: tuple[str, ...] = ()
    """Host name by rank."""
    foreign_cpu_cores: float | None = None
    """Cores that other processes kept busy during the timed window; None where it cannot be told."""
    logical_cores: int | None = None
    """Logical cores of the host that measured `foreign_cpu_cores`."""
    energy_j: float | None = None
    """Energy of all accelerators per optimizer step, where power is recorded."""
    metrics: dict[str, float] = {}
    """Anything else the script measured, by name."""
    recorded: bool = False
    """Taken from a table of earlier measurements: nothing ran."""
    simulated: bool = False
    """Computed by a model of the hardware: nothing ran."""
    extra: dict[str, str] = {}


def trial_environment(trial_dir: Path, payload: TrialInput) -> dict[str, str]:
    """The `CCL_*` variables of one trial; booleans are `1` and `0`. Nothing else is ever put there by the engine."""
    variables = {"CCL_TRIAL_DIR": str(trial_dir), "CCL_CONFIG": str(trial_dir / CONFIG_FILE)}
    for knob, value in payload.config.items():
        variables[f"CCL_{knob.upper()}"] = str(int(value)) if isinstance(value, bool) else str(value)
    return variables
