"""What a trial is judged by: its inputs, what the run script reported, and what its traces tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cclsearch.card.model import Card
from cclsearch.core.values import Model, Provenance
from cclsearch.launch.contract import TrialInput, TrialResult
from cclsearch.score.thresholds import DEFAULT, Thresholds


class TraceEvidence(Model):
    """What the trace toolkit read from one trial's traces, as far as judging needs it."""

    metrics: dict[str, float] = {}
    """Metric -> value, only those that are `ok`."""
    ranks: tuple[int, ...] = ()
    """Ranks whose trace was read."""
    step_time_s: float | None = None
    """Step time in the traces, profiler on."""
    flops_per_step: float | None = None
    """FLOPs of the matrix multiplications of one step over all ranks, recomputation included, from shapes."""
    flops_coverage: float | None = None
    """Share of the compute time that those take: little where custom kernels hide their shapes."""
    devices: tuple[str, ...] = ()
    """Device names that the traces tell."""
    diagnosis: tuple[str, ...] = ()
    """Where the step's time goes, in sentences."""
    seconds_by_cause: dict[str, float] = {}
    """Seconds of a traced step by cause."""
    notes: tuple[str, ...] = ()
    """One line each: partial files, what was not read."""


@dataclass(frozen=True)
class Evidence:
    """All that the rules of the admission gate look at."""

    payload: TrialInput
    result: TrialResult
    card: Card
    provenance: Provenance
    trace: TraceEvidence | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """As derived from result and card."""
    spread: float | None = None
    recorded_sha256: str | None = None
    """SHA-256 of `result.json` as the ledger holds it."""
    found_sha256: str | None = None
    """SHA-256 of the file as it is now."""
    thresholds: Thresholds = DEFAULT

    @property
    def is_measured(self) -> bool:
        """Whether something really ran."""
        return self.provenance is Provenance.MEASURED

    @property
    def is_on_cpu(self) -> bool:
        """Whether the ranks shared a CPU's cores instead of having an accelerator each."""
        return self.result.memory_kind == "rss" or self.card.hardware.accelerator == "cpu"
