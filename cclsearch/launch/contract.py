"""The trial contract between launcher and run script (`docs/trial-contract.md` describes it for script authors).

The script gets `CCL_TRIAL_DIR`, `CCL_CONFIG` (path of `config.json`) and one `CCL_<KNOB>` variable per knob. It writes
traces of every rank to `trace/`, and last `result.json` by atomic rename: its presence is the completion signal.
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
    """Status that the run script reports."""

    OK = "ok"
    FAILED = "failed"


class TrialInput(Model):
    """`config.json`: the input of a run script, written by the engine."""

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
    """Product of the degrees of parallelism."""
    ranks_per_node: int = Field(ge=1)
    warmup_steps: int = 2
    """Optimizer steps before the timed window."""
    timed_steps: int = 5
    """Optimizer steps in the unprofiled timed window."""
    profiled_steps: int = 2
    """Optimizer steps in the separate profiled window; 0 for none."""
    seed: int = 0
    """Seed of weights and data; the same in every trial."""


class TrialResult(Model):
    """`result.json`: what ran, as measured by the run script."""

    schema_version: int = 1
    status: RunStatus
    failure: Failure | None = None
    """The reason if status is `failed`."""
    world_size: int | None = None
    global_batch_size: int | None = None
    """Sequences per optimizer step that were trained, over all ranks."""
    seq_len: int | None = None
    num_layers: int | None = None
    num_params: int | None = None
    """Parameters of the whole model as built (counted once over all ranks)."""
    step_times_s: tuple[float, ...] = ()
    """Seconds of each optimizer step of the unprofiled timed window, by the slowest rank."""
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
    """CPU cores that other processes used during the timed window; None if unknown."""
    logical_cores: int | None = None
    """Logical cores of the host that measured `foreign_cpu_cores`."""
    energy_j: float | None = None
    """Energy in joules of all accelerators per optimizer step, if power is recorded."""
    metrics: dict[str, float] = {}
    """Other measurements of the script, by name."""
    recorded: bool = False
    """Whether it comes from a table of earlier measurements: nothing ran."""
    simulated: bool = False
    """Whether a model of the hardware computed it: nothing ran."""
    extra: dict[str, str] = {}


def trial_environment(trial_dir: Path, payload: TrialInput) -> dict[str, str]:
    """Return the `CCL_*` variables of one trial; booleans are `1` and `0`.

    Launchers add the variables listed in docs/trial-contract.md.
    """
    variables = {"CCL_TRIAL_DIR": str(trial_dir), "CCL_CONFIG": str(trial_dir / CONFIG_FILE)}
    for knob, value in payload.config.items():
        variables[f"CCL_{knob.upper()}"] = str(int(value)) if isinstance(value, bool) else str(value)
    return variables
