"""The content of a report as plain data: pages, charts and tables read this and never a ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cclsearch.core.values import Value, format_config
from cclsearch.space.table import count_ranks

RANKED, NOT_ADMITTED, FAILED, RUNNING = "ranked", "not admitted", "failed", "running"
CONFIRMATION = "confirmation"


@dataclass(frozen=True)
class AdmissionCheck:
    """One rule of the admission gate over one trial."""

    rule: str
    ok: bool | None
    detail: str


@dataclass(frozen=True)
class TrialRow:
    """One trial. All text is plain: no control characters, no secrets."""

    number: int
    config: Mapping[str, Value]
    proposer: str
    rationale: str
    purpose: str
    state: str
    """`ranked`, `not admitted`, `failed` or `running`."""
    reason: str = ""
    """Why it is not ranked."""
    failure_kind: str = ""
    score: float | None = None
    """The figure of the objective as shown to people; None unless the trial is ranked."""
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    spread: float | None = None
    expected_step_time_s: float | None = None
    expected_memory_gib: float | None = None
    checks: tuple[AdmissionCheck, ...] = ()
    notes: tuple[str, ...] = ()
    diagnosis: tuple[str, ...] = ()
    seconds_by_cause: Mapping[str, float] = field(default_factory=dict)
    evidence: str = ""
    """Folder of the trial's evidence, relative to the run folder."""
    wall_s: float | None = None
    """Seconds from proposal to end, queue time included; None while the trial runs or if nothing ran."""
    turn: int | None = None

    @property
    def config_text(self) -> str:
        return format_config(self.config)

    @property
    def step_time_s(self) -> float | None:
        """Seconds per step of a ranked trial, else None."""
        return self.metrics.get("step_time_s") if self.state == RANKED else None

    @property
    def accelerator_hours(self) -> float | None:
        if self.wall_s is None:
            return None
        return self.wall_s * self.metrics.get("num_accelerators", count_ranks(self.config)) / 3600


@dataclass(frozen=True)
class Neighbor:
    """A configuration that differs from the winner in one or two knobs."""

    change: str
    """`tp 2 → 4, dp 8 → 4`."""
    ratio: float
    """Its step time divided by the winner's."""
    trial: int | None
    """None if it was predicted and not run."""


@dataclass(frozen=True)
class RunPage:
    """One run of a report."""

    run_id: str
    workload: str
    card: str
    title: str
    model: str
    work: str
    """What two runs must share to be compared: model, global batch size, sequence length, precision."""
    hardware: str
    accelerator: str
    framework: str
    provenance: str
    """`measured`, `recorded` or `simulated`."""
    objective: str
    score_label: str
    greater_is_better: bool
    status: str
    """`ended`, `running`, ..., with the reason."""
    banner: tuple[str, ...]
    trials: tuple[TrialRow, ...]
    best: int | None
    baseline: int | None
    facts: tuple[tuple[str, str], ...]
    """Label and figure at the head of the page."""
    confidence: tuple[str, ...] = ()
    interval: tuple[float, float] | None = None
    """Interval of the best trial's loss; None if it is unknown."""
    neighbors: tuple[Neighbor, ...] = ()
    costs: tuple[tuple[str, str], ...] = ()
    notes: tuple[tuple[str, str], ...] = ()
    """Topic and text of the search's notes."""
    created: str = ""

    @property
    def best_trial(self) -> TrialRow | None:
        return next((trial for trial in self.trials if trial.number == self.best), None)

    @property
    def baseline_trial(self) -> TrialRow | None:
        return next((trial for trial in self.trials if trial.number == self.baseline), None)

    @property
    def mark(self) -> str:
        """` (recorded)` or ` (simulated)` if the figures were not measured here; else empty."""
        return "" if self.provenance == "measured" else f" ({self.provenance})"
