"""The evidence about a trial: its inputs, the result of its run script, and the content of its traces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from cclsearch.card.model import Card
from cclsearch.core.values import Model, Provenance
from cclsearch.launch.contract import MemoryKind, TrialInput, TrialResult

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
    flops_per_step: float | None = None
    """FLOPs of the matrix multiplications of one step over all ranks, recomputation included, from shapes."""
    flops_coverage: float | None = None
    """Share of the compute time with known FLOPs: small if custom kernels hide their shapes."""
    devices: tuple[str, ...] = ()
    """Device names in the traces."""
    diagnosis: tuple[str, ...] = ()
    """Diagnosis of the step time, in sentences."""
    seconds_by_cause: dict[str, float] = {}
    """Seconds of a traced step by cause."""
    notes: tuple[str, ...] = ()
    """One line each: partial files, files that were not read."""


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
