"""What judging a finished trial says: frozen, and kept in the ledger as it is."""

from __future__ import annotations

from cclsearch.core.values import Failure, Model, Provenance


class Verdict(Model):
    """One rule of the admission gate over one trial."""

    rule: str
    ok: bool | None
    """None where the rule does not apply, or cannot be told from what is there."""
    detail: str


class Admission(Model):
    """Whether a trial may be ranked."""

    admitted: bool
    verdicts: tuple[Verdict, ...]

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it may not, one line a rule; empty where admitted."""
        return tuple(f"{v.rule}: {v.detail}" for v in self.verdicts if v.ok is False)


class Outcome(Model):
    """A trial's end: scored (a `loss` and no `failure`) or failed (a `failure` and no `loss`)."""

    provenance: Provenance
    failure: Failure | None = None
    admission: Admission | None = None
    """None where the trial failed before anything could be judged."""
    loss: float | None = None
    """What the objective minimises; None unless scored and admitted (a Pareto objective has the first metric here)."""
    metrics: dict[str, float] = {}
    """`step_time_s` (median of the unprofiled window), `tokens_per_s`, `tokens_per_s_per_accelerator`, `mfu`,
    `num_accelerators`, `peak_memory_gib`, what objective and traces add. Only what was measured is there."""
    spread: float | None = None
    """Relative spread (median absolute deviation x 1.4826 / median) of the step times."""
    notes: tuple[str, ...] = ()
    """One line each: partial traces, what could not be checked."""
    diagnosis: tuple[str, ...] = ()
    """Where the step's time goes, in sentences, from the traces."""
    seconds_by_cause: dict[str, float] = {}
    """Seconds of a traced step by cause; adds up to `trace_step_time`."""

    @property
    def is_ranked(self) -> bool:
        return self.loss is not None and self.admission is not None and self.admission.admitted
