"""Input and report of a run script of training, beyond the fields of every task."""

from __future__ import annotations

from pydantic import Field

from cclsearch.card.model import ModelArch
from cclsearch.core.values import Count, Number, PositiveCount, Seconds, Value
from cclsearch.launch.contract import TrialInput, TrialResult, digest_results
from cclsearch.scoring.evidence import EvidenceOf


class TrainingInput(TrialInput):
    """`config.json` of training."""

    arch: ModelArch
    work: dict[str, Value] = Field(default={}, exclude=True)
    """Not written: the two numbers have fields of their own."""
    global_batch_size: int
    seq_len: int
    gradient_accumulation: int = Field(ge=1)
    """Derived: global batch / (dp x micro-batch)."""
    warmup_steps: int = 2
    """Optimizer steps before the timed window."""
    timed_steps: int = 5
    """Optimizer steps in the unprofiled timed window."""
    profiled_steps: int = 2
    """Optimizer steps in the separate profiled window; 0 for none."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each pipeline stage, if the configuration does not leave the split to the framework."""
    rank_speeds: tuple[float, ...] = ()
    """Per-rank CPU speed limit, 0 to 1; empty means no limit."""

    @property
    def wants_traces(self) -> bool:
        return self.profiled_steps > 0


class TrainingResult(TrialResult):
    """`result.json` of training; `energy_j` is per optimizer step."""

    global_batch_size: PositiveCount | None = None
    """Sequences per optimizer step that were trained, over all ranks."""
    seq_len: PositiveCount | None = None
    num_layers: PositiveCount | None = None
    num_params: PositiveCount | None = None
    """Parameters of the whole model as built (counted once over all ranks)."""
    step_times_s: tuple[Seconds, ...] = ()
    """Seconds of each optimizer step of the unprofiled timed window, by the slowest rank."""
    timed_window_s: Seconds | None = None
    """Seconds from the start of the first timed step to the end of the last one, by the slowest rank, read from a clock
    other than the step times'; None if it was not measured."""
    warmup_steps: Count = 0
    """Optimizer steps run before that window."""
    precision: str | None = None
    """Precision of the matrix multiplications: `fp32`, `bf16`, ..."""
    losses: tuple[Number, ...] = ()
    """Training loss of each optimizer step in order: warm-up, timed window, profiled window with its own warm-up."""

    def list_digests(self, payload: TrainingInput) -> tuple[str, ...]:
        start = self.warmup_steps
        return (digest_results(self.losses[start : start + len(self.step_times_s)]),)


TrainingEvidence = EvidenceOf[TrainingInput, TrainingResult]
