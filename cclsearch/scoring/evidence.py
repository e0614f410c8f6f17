"""The evidence about a trial: its inputs, the result of its run script, and the content of its traces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from cclsearch.card.model import Card
from cclsearch.core.values import Model, Provenance
from cclsearch.launch.contract import MemoryKind, TimedWindow, TrialInput, TrialResult
from cclsearch.scoring.outcome import AttemptWindow


class TracedProducts(Model):
    """The matrix products of one step, over all ranks; recomputation included."""

    flops: float
    """FLOPs of the kernels with recorded shapes or costs."""
    by_shapes: bool = True
    """Whether shapes give them exactly; otherwise the compiler's costs."""
    batched_flops: float = 0.0
    """The part of `flops` in batched products: attention, and experts that are computed in one call."""
    attended_rows: float | None = None
    """Query rows of the backward attention kernels, summed: sequences x heads x positions x layers. Recomputation does
    not repeat them. None if no such kernel has shapes."""
    attention_batches: tuple[int, ...] = ()
    """Different numbers of sequences per call of PyTorch's attention operators."""
    seen_s: float
    """Seconds of the kernels behind `flops`."""
    hidden_s: float
    """Seconds of kernels without shapes that may compute matrix products."""
    compute_s: float
    """Seconds of all compute."""
    hidden_flops: float | None = None
    """Upper bound of the FLOPs in `hidden_s`; None if the rate is unknown."""
    seconds_by_precision: dict[str, float] = {}
    """Seconds of matrix products by precision (`bf16`, `fp32`), where shapes or kernel names show it."""

    @property
    def hidden_share(self) -> float:
        """Share of the compute time in kernels that may compute matrix products, but have no shapes."""
        return self.hidden_s / self.compute_s if self.compute_s else 1.0


class TracedCollective(Model):
    """Calls of one collective operation over groups of one kind, per step."""

    kind: str
    """A `CollectiveKind`."""
    axis: str = ""
    """The group's name in the framework (`mesh_dp`); empty if the trace has none."""
    group_size: int | None = None
    precision: str = ""
    """Precision of its elements, as cards name it (`bf16`); empty if the trace does not say."""
    calls: float
    """Over all ranks."""
    elements: float | None = None
    """Elements of the input, over all calls and ranks; None if a call does not say."""


class TracedRank(Model):
    """Evidence that one rank's trace is this attempt's."""

    nonces: tuple[str, ...] = ()
    """Nonces of attempts in its annotations."""
    start_s: float | None = None
    """First and last event, in Unix time; None if the trace has no absolute times."""
    end_s: float | None = None
    digest: str = ""
    """Hash of the durations of its device events: two runs never have the same. Empty if there are too few."""


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
    """Rank -> evidence that its trace is this attempt's."""
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

        PyTorch's show them for the backend that they name; a TPU's compiler may fuse them into other rows.
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
    """The limits of a trial: sentences, and seconds of its `Task.diagnosed_unit` by cause, which add up to it."""

    sentences: tuple[str, ...] = ()
    seconds_by_cause: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class OtherTrial:
    """The part of another measured trial of the same search that the rules compare with."""

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
    is_sealed: bool = False
    """Whether it was judged before, and has the hashes that the ledger has."""
    attempt: AttemptWindow | None = None
    """Times of the attempt; None if unknown."""
    others: tuple[OtherTrial, ...] = ()
    """The other finished trials of the search."""

    @property
    def is_measured(self) -> bool:
        """Whether a job really ran."""
        return self.provenance is Provenance.MEASURED

    @property
    def windows(self) -> tuple[TimedWindow, ...]:
        """The timed windows that the search saw open and close; empty unless it saw all."""
        timed = self.attempt.timed if self.attempt else ()
        return timed if all(window.nonce and window.seconds is not None for window in timed) else ()

    @property
    def is_on_cpu(self) -> bool:
        """Whether the ranks shared a CPU's cores instead of having an accelerator each."""
        return self.result.memory_kind == MemoryKind.RSS or self.card.hardware.accelerator == "cpu"


Evidence = EvidenceOf[TrialInput, TrialResult]
"""The evidence that the engine reads of a trial of any task."""
