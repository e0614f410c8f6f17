"""Outcome of a finished trial: frozen, and recorded in the ledger."""

from __future__ import annotations

from pydantic import ConfigDict

from cclsearch.core.values import Failure, Model, Provenance
from cclsearch.launch.contract import TimedWindow

MAX_DRIFT_S = 5.0
"""Seconds by which wall clock and boot clock may differ over an attempt."""
CONSTRAINTS_RULE = "constraints"
"""The last verdict of a trial whose objective has constraints."""
EARLY_STOP_RULE = "early_stop"
"""The verdict of a trial that ended early because it is slower than the best one beyond doubt."""
LOAD_RULE = "load"
"""The admission rule that a retry may satisfy: the run was valid, but other processes used its CPUs."""


class Verdict(Model):
    """Result of one admission rule for one trial."""

    rule: str
    ok: bool | None
    """None if the rule does not apply, or cannot be checked with the available evidence."""
    detail: str


class Admission(Model):
    """Result of the admission gate for one trial."""

    admitted: bool
    verdicts: tuple[Verdict, ...]

    @property
    def reasons(self) -> tuple[str, ...]:
        """Violated rules, one line each; empty if admitted."""
        return tuple(f"{v.rule}: {v.detail}" for v in self.verdicts if v.ok is False)


class AttemptWindow(Model):
    """Times of an attempt, by the clocks of the machine that runs the search."""

    started_s: float
    """Unix time of its submission."""
    ended_s: float
    """Unix time when its end was seen."""
    elapsed_s: float
    """Seconds between the two, by a clock that nothing sets."""
    timed: tuple[TimedWindow, ...] = ()
    """Its timed windows, in order; empty if the run script opens none."""

    @property
    def is_clock_steady(self) -> bool:
        """Whether the wall clock ran steadily: only then can its times be compared with others."""
        return abs(self.ended_s - self.started_s - self.elapsed_s) < MAX_DRIFT_S


class ClusterWindow(Model):
    """Place and time of a trial: figures of one window of a cluster can be compared without a control."""

    day: str
    """UTC date."""
    hosts: tuple[str, ...] = ()
    """Names of the nodes, sorted."""
    allocation: str = ""
    """Identifier of the allocation that the trial ran in; empty if each job has its own."""
    block: int = 0
    """Number of controls before it, if they are repeated every so many trials."""

    def __str__(self) -> str:
        """`2026-11-22 on n1 and n2, allocation 4711`."""
        nodes = f" on {' and '.join(self.hosts)}" if 0 < len(self.hosts) <= 2 else f" on {len(self.hosts)} nodes"
        allocation = f", allocation {self.allocation}" if self.allocation else ""
        block = f", after control {self.block}" if self.block else ""
        return f"{self.day}{nodes if self.hosts else ''}{allocation}{block}"


class Outcome(Model):
    """A finished trial: scored (`loss` without `failure`) or failed (`failure` without `loss`)."""

    model_config = ConfigDict(allow_inf_nan=False)

    provenance: Provenance
    failure: Failure | None = None
    admission: Admission | None = None
    """None if the trial failed before it could be evaluated."""
    loss: float | None = None
    """Value that the objective minimizes (Pareto: of the first metric); None unless scored and admitted."""
    metrics: dict[str, float] = {}
    """Metrics of the task and the traces, and others that the run script reports. Only measured ones are present."""
    loads: tuple[dict[str, float], ...] = ()
    """The surrogate's observations of each load, if the trial measured several; `metrics` are of the load that counts.
    """
    violation: float = 0.0
    """Excess over the objective's constraints, if nothing else keeps it from being ranked; else 0."""
    spread: float | None = None
    """Relative spread (median absolute deviation x 1.4826 / median) of the primary metric in the run."""
    saved_s: float | None = None
    """Estimated seconds of the job that ending it early saved; None if it ran to its end."""
    fingerprint: tuple[float, ...] = ()
    """Values that trials of equal work have in common, in order (training: the loss of each step)."""
    notes: tuple[str, ...] = ()
    """One line each: partial traces, skipped checks."""
    diagnosis: tuple[str, ...] = ()
    """Limits of the trial (`Task.diagnose`), in sentences."""
    seconds_by_cause: dict[str, float] = {}
    """Seconds of the task's `diagnosed_unit` by cause; of a traced step, they add up to its mean."""
    attempt: AttemptWindow | None = None
    """Times of the last attempt; None if nothing ran."""
    window: ClusterWindow | None = None
    """Window in which it ran; None if nothing was measured."""
    evidence_sha256: str = ""
    """Hash of the files besides `result.json` that it was judged by (`hash_evidence`); empty if there were none."""
    trace_digests: tuple[str, ...] = ()
    """Hash of the content of each rank's trace: no other trial may have the same."""

    @property
    def nonce(self) -> str:
        """The nonce that chose the data of its timed window; empty if there was none."""
        timed = self.attempt.timed if self.attempt else ()
        return timed[0].nonce if timed else ""

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """The verdicts of the admission gate; none if it failed before."""
        return self.admission.verdicts if self.admission else ()

    def find_verdict(self, rule: str) -> Verdict | None:
        """The verdict of that rule, if there is one."""
        return next((verdict for verdict in self.verdicts if verdict.rule == rule), None)

    @property
    def is_pruned(self) -> bool:
        """Whether it ended early: its metrics are of a part of the measurement."""
        return self.saved_s is not None

    @property
    def is_ranked(self) -> bool:
        return self.loss is not None and self.admission is not None and self.admission.admitted
