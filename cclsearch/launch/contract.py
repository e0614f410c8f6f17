"""The trial contract between launcher and run script (`docs/trial-contract.md` describes it for script authors).

The script gets `CCL_TRIAL_DIR`, `CCL_CONFIG` (path of `config.json`) and one `CCL_<KNOB>` variable per knob. It writes
traces, if its task wants them, to `trace/`, and last `result.json` by atomic rename: its presence is the completion
signal. The models have what every task has; a task with further fields has subclasses of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Protocol, cast

from pydantic import ConfigDict, Field, StrictBool

from cclsearch.card.model import Card, ModelArch
from cclsearch.card.task import TASKS
from cclsearch.core.values import Config, Count, Failure, Joules, Model, NotNegative, Number, PositiveCount, Value

RESULT_FILE = "result.json"
CONFIG_FILE = "config.json"
DEVICES_VARIABLE = "CCL_RANK_DEVICES"
"""Device of each rank of a node, if it differs from the local rank's."""
TRACE_FOLDER = "trace"
EVIDENCE_FILE = "evidence.jsonl"
"""Single measurements, one per line, from which the task computes metrics itself; only if the task asks for them."""
STDOUT_FILE = "stdout.log"
STDERR_FILE = "stderr.log"
PHASE_FILE = "phase"
"""One word of `TrialPhase`, if the run script writes it; only for people who watch."""
NONCE_MARK = "ccl-search::"
"""Start of the annotation in a trace that names the attempt: the attempt's nonce follows."""


class TrialPhase(StrEnum):
    """Phase of a run script's work."""

    STARTING = "starting"
    WARM_UP = "warm-up"
    TIMING = "timing"
    PROFILING = "profiling"
    WRITING = "writing"
    """It writes traces and result."""


class MemoryKind(StrEnum):
    """Measurement of peak memory."""

    DEVICE = "device"
    """By the allocator of the accelerator."""
    RSS = "rss"
    """Resident set of a CPU process."""
    COMPILED = "compiled"
    """XLA's plan."""


class RunStatus(StrEnum):
    """Status that the run script reports."""

    OK = "ok"
    FAILED = "failed"
    PRUNED = "pruned"
    """It measured enough to show that it is slower than `stop_above`, and ended early."""


class TrialInput(Model):
    """`config.json`: the input of a run script, written by the engine."""

    schema_version: int = 1
    run_id: str
    trial: int
    config: Config
    arch: ModelArch | None = None
    """The card's model, if it has one."""
    work: dict[str, Value] = {}
    """The card's numbers of the task, by name."""
    precision: str
    num_ranks: int = Field(ge=1)
    """Product of the degrees of parallelism."""
    ranks_per_node: int = Field(ge=1)
    accelerator: str = ""
    """The card's accelerator (`h100`, `cpu`)."""
    seed: int = 0
    """Seed of weights and data; the same in every trial."""
    places: tuple[int, ...] = ()
    """Place of each rank on the nodes, `ranks_per_node` places a node; empty: rank r has place r."""
    nonce: str = ""
    """Random text of this attempt, which the run script writes into its traces; empty if nothing runs."""
    stop_above: float | None = None
    """A script may end early, with status `pruned`, if each of its first measurements of the task's primary metric is
    above this: the configuration is slower than the best one beyond doubt. None: it runs to its end."""

    options: tuple[str, ...] = ()
    """Words that the precision and knobs of the framework file add to the framework's options (`adds`)."""
    opens_window: bool = False
    """Whether the search answers when the script opens a timed window (docs/trial-contract.md)."""

    @property
    def wants_traces(self) -> bool:
        """Whether every rank must write a trace."""
        return False

    @property
    def moves_nodes(self) -> bool:
        """Whether `places` needs more than one order of devices for all nodes."""
        return bool(self.places) and not self.devices

    @property
    def devices(self) -> tuple[int, ...]:
        """Device of each rank of a node, if `places` changes their order and no more; else empty."""
        size = self.ranks_per_node
        starts = range(0, len(self.places), size)
        nodes = [tuple(place - start for place in self.places[start : start + size]) for start in starts]
        keeps = all(0 <= device < size for node in nodes for device in node)
        alike = all(node == nodes[0][: len(node)] for node in nodes)
        return nodes[0] if nodes and keeps and alike else ()


class TimedWindow(Model):
    """A timed window of an attempt, as the search saw it; without a nonce, the search did not run when it opened."""

    nonce: str = ""
    """Chooses the data of the window; it was drawn when the window opened."""
    opened_ns: int = 0
    """When the nonce was given, by the clock of the file system."""
    seconds: float | None = None
    """From then until the script left the digest; None if it left none. Negative: it did not wait for the nonce."""
    digest: str = ""
    """SHA-256 of what the script computed in the window, left when it closed."""


class TrialEnd(Model):
    """The part of `result.json`, for every task, that says how the run ended."""

    model_config = ConfigDict(extra="ignore")

    schema_version: PositiveCount = 1
    status: RunStatus
    failure: Failure | None = None
    """The reason if status is `failed`."""


class TrialResult(TrialEnd):
    """`result.json`: the run as its script measured it."""

    model_config = ConfigDict(extra="forbid")

    world_size: PositiveCount | None = None
    peak_memory_bytes: tuple[Count, ...] = ()
    """Peak memory by rank."""
    memory_kind: MemoryKind = MemoryKind.DEVICE
    versions: dict[str, str] = {}
    """Package -> version in the run (torch, nccl, jax, framework, python, driver)."""
    devices: tuple[str, ...] = ()
    """Device name by rank."""
    hosts: tuple[str, ...] = ()
    """Host name by rank."""
    foreign_cpu_cores: NotNegative | None = None
    """CPU cores that other processes used during the measurement; None if unknown."""
    logical_cores: PositiveCount | None = None
    """Logical cores of the host that measured `foreign_cpu_cores`."""
    energy_j: Joules | None = None
    """Energy in joules of all accelerators per unit of the task's work, if power is recorded."""
    # Bounded, since the ledger keeps them.
    metrics: dict[Annotated[str, Field(max_length=200)], Number] = Field(default={}, max_length=1000)
    """Measurements of the script, by name, that have no field of their own."""
    recorded: StrictBool = False
    """Whether a table of earlier measurements gave it: nothing ran."""
    simulated: StrictBool = False
    """Whether a model of the hardware computed it: nothing ran."""
    caller: StrictBool = False
    """Whether a function of the caller of the Python API measured it: no run script ran."""
    extra: dict[str, str] = {}

    def list_digests(self, payload: Any) -> tuple[str, ...]:
        """Return the digest of each timed window's results; of a task that proves no work, none."""
        return ()


def digest_results(results: Iterable[object]) -> str:
    """Return the SHA-256 of the results of a timed window, as `launchers/common.py` computes it."""
    return hashlib.sha256("\n".join(map(str, results)).encode()).hexdigest()


def trial_environment(trial_dir: Path, payload: TrialInput) -> dict[str, str]:
    """Return the `CCL_*` variables of one trial; booleans are `1` and `0`.

    Launchers add the variables listed in docs/trial-contract.md.
    """
    variables = {"CCL_TRIAL_DIR": str(trial_dir), "CCL_CONFIG": str(trial_dir / CONFIG_FILE)}
    if payload.nonce:
        variables["CCL_NONCE"] = payload.nonce
    if payload.devices:
        variables[DEVICES_VARIABLE] = ",".join(map(str, payload.devices))
    for knob, value in payload.config.items():
        variables[f"CCL_{knob.upper()}"] = str(int(value)) if isinstance(value, bool) else str(value)
    return variables


class _MakesResults(Protocol):
    """The part of `cclsearch.tasks.base.Task` that launchers without a run script need."""

    def make_result(self, card: Card, metrics: Mapping[str, float], **fields: Any) -> TrialResult: ...


def make_result(card: Card, metrics: Mapping[str, float], **fields: Any) -> TrialResult:
    """Return the `result.json` of a script of the card's task that measured these metrics; see `Task.make_result`."""
    return cast(_MakesResults, TASKS.get(card.task)).make_result(card, metrics, **fields)
