"""What a report shows, as plain data: no page, no chart and no table looks at a ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cclsearch.core.values import Value, format_config

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
    """What the objective shows to people; None unless it is ranked."""
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
    """Folder of its evidence, relative to the run's."""
    wall_s: float | None = None
    """From proposal to end, waiting in a queue included; None while it runs and where nothing ran."""
    turn: int | None = None

    @property
    def config_text(self) -> str:
        return format_config(self.config)

    @property
    def step_time_s(self) -> float | None:
        """Seconds per step, of a trial that is ranked."""
        return self.metrics.get("step_time_s") if self.state == RANKED else None

    @property
    def accelerator_hours(self) -> float | None:
        if self.wall_s is None:
            return None
        return self.wall_s * self.metrics.get("num_accelerators", self._degrees()) / 3600

    def _degrees(self) -> float:
        product = 1
        for degree in ("tp", "dp", "pp"):
            product *= int(self.config.get(degree, 1))
        return float(product)


@dataclass(frozen=True)
class Neighbor:
    """A configuration that differs from the winner in one or two knobs."""

    change: str
    """`tp 2 → 4, dp 8 → 4`."""
    ratio: float
    """Its step time over the winner's."""
    trial: int | None
    """None where it is predicted and was not run."""


@dataclass(frozen=True)
class RunPage:
    """One run."""

    run_id: str
    workload: str
    card: str
    title: str
    model: str
    work: str
    """What must agree for two runs to compare: model, global batch, sequence length, precision."""
    hardware: str
    accelerator: str
    framework: str
    provenance: str
    """`measured`, `recorded` or `simulated`."""
    objective: str
    score_label: str
    greater_is_better: bool
    standing: str
    """`ended`, `running`, ..., with the reason."""
    banner: tuple[str, ...]
    trials: tuple[TrialRow, ...]
    best: int | None
    baseline: int | None
    facts: tuple[tuple[str, str], ...]
    """Label and figure, for the head of the page."""
    confidence: tuple[str, ...] = ()
    interval: tuple[float, float] | None = None
    """Of the best trial's loss, where it can be told."""
    neighbors: tuple[Neighbor, ...] = ()
    costs: tuple[tuple[str, str], ...] = ()
    remarks: tuple[tuple[str, str], ...] = ()
    """Topic and text of what the search noted."""
    created: str = ""

    @property
    def best_trial(self) -> TrialRow | None:
        return next((trial for trial in self.trials if trial.number == self.best), None)

    @property
    def baseline_trial(self) -> TrialRow | None:
        return next((trial for trial in self.trials if trial.number == self.baseline), None)

    @property
    def mark(self) -> str:
        """` (recorded)` where nothing was measured here; empty where it was."""
        return "" if self.provenance == "measured" else f" ({self.provenance})"
