"""The evidence about a trial: its inputs, the result of its run script, and the content of its traces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from cclsearch.card.model import Card
from cclsearch.core.values import Model, Provenance
from cclsearch.launch.contract import MemoryKind, TrialInput, TrialResult
from cclsearch.scoring.outcome import AttemptWindow
from cclsearch.scoring.traced import TracedCollective, TracedProducts, TracedRank

Input = TypeVar("Input", bound=TrialInput, covariant=True)
Result = TypeVar("Result", bound=TrialResult, covariant=True)


class TraceEvidence(Model):
    """Data from one trial's traces that the evaluation needs."""

    metrics: dict[str, float] = {}
    """Metric -> value, only those with status `ok`."""
    ranks: tuple[int, ...] = ()
    """Ranks whose trace was read."""
    step_time_s: float | None = None
    """Step time in the traces, profiler on."""
    products: TracedProducts | None = None
    """Matrix products of a step over all ranks; None if the traces have no whole steps."""
    collectives: tuple[TracedCollective, ...] | None = None
    """Collectives of a step over all ranks; None if the traces have no whole steps."""
    origins: dict[int, TracedRank] = {}
    """Rank -> what shows whose trace it is."""
    backend: str = ""
    """Communication backend that the traces name (`nccl`); empty if they name none."""
    format: str = ""
    """Format and device of the traces: `kineto on cpu`."""
    devices: tuple[str, ...] = ()
    """Device names in the traces."""
    diagnosis: tuple[str, ...] = ()
    """Diagnosis of the step time, in sentences."""
    seconds_by_cause: dict[str, float] = {}
    """Seconds of a traced step by cause."""
    notes: tuple[str, ...] = ()
    """One line each: partial files, files that were not read."""

    @property
    def shows_collectives(self) -> bool:
        """Whether traces of this kind always show collectives.

        PyTorch's show those of the backend that they name; a TPU's compiler may fuse them into other rows.
        """
        if self.format.startswith("xla"):
            return self.format != "xla on tpu"
        return bool(self.collectives) or self.backend not in ("", "fake")

    @property
    def digests(self) -> tuple[str, ...]:
        """The hashes of the ranks' traces that have one."""
        return tuple(origin.digest for origin in self.origins.values() if origin.digest)


@dataclass(frozen=True)
class Diagnosed:
    """What limits a trial: sentences, and seconds of its `Task.diagnosed_unit` by cause, which add up to it."""

    sentences: tuple[str, ...] = ()
    seconds_by_cause: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class OtherTrial:
    """What the rules compare with of another measured trial of the same search."""

    number: int
    is_earlier: bool
    """Whether it finished before the trial that is judged."""
    is_ranked: bool
    metrics: Mapping[str, float]
    trace_digests: tuple[str, ...] = ()


@dataclass(frozen=True)
class EvidenceOf(Generic[Input, Result]):
    """Input of the admission rules, by the task's models of `config.json` and `result.json`."""

    payload: Input
    result: Result
    card: Card
    provenance: Provenance
    trace: TraceEvidence | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Derived from result and card."""
    spread: float | None = None
    recorded_sha256: str | None = None
    """SHA-256 of `result.json` in the ledger."""
    found_sha256: str | None = None
    """SHA-256 of the file now."""
    attempt: AttemptWindow | None = None
    """When the attempt ran; None if unknown."""
    others: tuple[OtherTrial, ...] = ()
    """The other finished trials of the search."""

    @property
    def is_measured(self) -> bool:
        """Whether a job really ran."""
        return self.provenance is Provenance.MEASURED

    @property
    def is_on_cpu(self) -> bool:
        """Whether the ranks shared a CPU's cores instead of having an accelerator each."""
        return self.result.memory_kind == MemoryKind.RSS or self.card.hardware.accelerator == "cpu"


Evidence = EvidenceOf[TrialInput, TrialResult]
"""The evidence that the engine reads of a trial of any task."""
