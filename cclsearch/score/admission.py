"""The admission gate: the rules that decide whether a trial is ranked. Thresholds: `cclsearch.score.thresholds`.

A rule returns True, False, or None if it does not apply or cannot be checked; one False excludes the trial.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from statistics import median

from cclsearch.core.values import Provenance
from cclsearch.score.evidence import Evidence
from cclsearch.score.outcome import LOAD_RULE, Admission, Verdict
from cclsearch.score.work import check_declared_work, check_possible, check_traced_work

WORK_RULES = frozenset({"work", "world_size", "traced_work"})
"""Rules whose violation means that the job did not do the requested work."""


def admit(evidence: Evidence) -> Admission:
    """The verdict of every rule on one finished trial; it is admitted unless a rule is violated."""
    verdicts = tuple(rule(evidence) for rule in ADMISSION_RULES)
    return Admission(admitted=all(verdict.ok is not False for verdict in verdicts), verdicts=verdicts)


def check_provenance(evidence: Evidence) -> Verdict:
    """Whether result and launcher agree on the provenance: measured, recorded or simulated."""
    result = evidence.result
    claimed = (
        Provenance.SIMULATED if result.simulated else Provenance.RECORDED if result.recorded else Provenance.MEASURED
    )
    if claimed is not evidence.provenance:
        detail = f"the result says {claimed.value}, the launcher {evidence.provenance.value}"
        return Verdict(rule="provenance", ok=False, detail=detail)
    meaning = {
        Provenance.MEASURED: "measured: the job ran",
        Provenance.RECORDED: "recorded: looked up, no job ran",
        Provenance.SIMULATED: "simulated: computed by a model, no job ran",
    }
    return Verdict(rule="provenance", ok=True, detail=meaning[claimed])


def check_world_size(evidence: Evidence) -> Verdict:
    """Whether the requested number of ranks ran."""
    want, got = evidence.payload.num_ranks, evidence.result.world_size
    if got is None:
        ok = False if evidence.is_measured else None
        return Verdict(rule="world_size", ok=ok, detail="the run script did not declare its world size")
    if got != want:
        return Verdict(rule="world_size", ok=False, detail=f"{got} ranks ran, but {want} were requested")
    return Verdict(rule="world_size", ok=True, detail=f"{got} ranks")


def check_steps(evidence: Evidence) -> Verdict:
    """Whether enough optimizer steps were timed."""
    if not evidence.is_measured:
        return Verdict(rule="steps", ok=None, detail=f"{evidence.provenance.value}: no steps were timed here")
    want = max(evidence.payload.timed_steps, evidence.thresholds.min_timed_steps)
    got = len(evidence.result.step_times_s)
    if got < want:
        return Verdict(rule="steps", ok=False, detail=f"{got} steps were timed; at least {want} are required")
    return Verdict(rule="steps", ok=True, detail=f"{got} steps timed")


def check_warmup(evidence: Evidence) -> Verdict:
    """Whether warm-up steps ran before the timed window, and none is inside it."""
    if not evidence.is_measured:
        return Verdict(rule="warmup", ok=None, detail=f"{evidence.provenance.value}: no steps were timed here")
    want = max(evidence.payload.warmup_steps, evidence.thresholds.min_warmup_steps)
    got = evidence.result.warmup_steps
    if got < want:
        return Verdict(
            rule="warmup", ok=False, detail=f"{got} warm-up steps; at least {want} are required before the timed ones"
        )
    times = evidence.result.step_times_s
    bound = evidence.thresholds.max_first_step_cpu if evidence.is_on_cpu else evidence.thresholds.max_first_step
    if len(times) >= 3:
        ratio = times[0] / median(times[1:])
        if ratio > bound:
            detail = (
                f"the first timed step took {ratio:.1f} x the others: a warm-up step was timed (at most {bound:g} x)"
            )
            return Verdict(rule="warmup", ok=False, detail=detail)
    return Verdict(rule="warmup", ok=True, detail=f"{got} warm-up steps")


def check_spread(evidence: Evidence) -> Verdict:
    """Whether the spread of the step times is small enough."""
    if evidence.spread is None:
        return Verdict(rule="spread", ok=None, detail="only one step time")
    bound = evidence.thresholds.max_spread_cpu if evidence.is_on_cpu else evidence.thresholds.max_spread
    detail = f"the spread of the step times is {evidence.spread:.1%}"
    if evidence.spread > bound:
        return Verdict(rule="spread", ok=False, detail=f"{detail}; at most {bound:.0%} is allowed")
    return Verdict(rule="spread", ok=True, detail=detail)


def check_ranks_traced(evidence: Evidence) -> Verdict:
    """Whether the trace of every rank was found and read."""
    rule = "ranks_traced"
    if not evidence.is_measured:
        return Verdict(rule=rule, ok=None, detail=f"{evidence.provenance.value}: there are no traces")
    if evidence.payload.profiled_steps == 0:
        return Verdict(rule=rule, ok=None, detail="no profiled steps were requested")
    ranks = set(evidence.trace.ranks) if evidence.trace else set()
    missing = sorted(set(range(evidence.payload.num_ranks)) - ranks)
    if missing:
        return Verdict(rule=rule, ok=False, detail=f"no readable trace of rank {_shorten(missing)}")
    return Verdict(rule=rule, ok=True, detail=f"traces of {len(ranks)} ranks")


def check_devices(evidence: Evidence) -> Verdict:
    """Whether the trial ran on the accelerator of the frozen inputs."""
    from cclsearch.card.hardware import match_accelerator

    traced = evidence.trace.devices if evidence.trace else ()
    names = Counter((*evidence.result.devices, *(name for name in traced if match_accelerator(name))))
    if not names:
        return Verdict(rule="devices", ok=None, detail="neither the run script nor the traces name the devices")
    hardware = evidence.card.hardware
    wanted = match_accelerator(hardware.accelerator, hardware.memory_gib)
    if wanted is None:
        return Verdict(rule="devices", ok=None, detail=f"the card's accelerator {hardware.accelerator!r} is unknown")
    different, unknown = [], []
    for name in names:
        found = match_accelerator(name) or match_accelerator(name, hardware.memory_gib)
        if found is None:
            unknown.append(name)
        elif found.name != wanted.name:
            different.append(f"{name!r} is {found.name}")
    if different:
        return Verdict(rule="devices", ok=False, detail=f"the inputs name {wanted.name}, but {'; '.join(different)}")
    if any(wanted.kind != "cpu" and not _is_like(name, wanted.name) for name in unknown):
        return Verdict(
            rule="devices",
            ok=False,
            detail=f"the inputs name {wanted.name}, but it ran on {', '.join(map(repr, unknown))}",
        )
    if unknown and wanted.kind != "cpu":
        return Verdict(rule="devices", ok=None, detail=f"unknown devices: {', '.join(map(repr, unknown))}")
    return Verdict(rule="devices", ok=True, detail=", ".join(names))


def check_load(evidence: Evidence) -> Verdict:
    """Whether other processes took cores from the ranks; load on cores that the ranks leave idle does not count."""
    result = evidence.result
    if not evidence.is_measured or result.foreign_cpu_cores is None or result.logical_cores is None:
        return Verdict(rule=LOAD_RULE, ok=None, detail="the CPU load from other processes was not measured")
    ranks_here = max(Counter(result.hosts).values(), default=evidence.payload.num_ranks)
    used = min(ranks_here, result.logical_cores)
    idle = result.logical_cores - used
    taken = max(0.0, result.foreign_cpu_cores - idle)
    load = f"other processes use {result.foreign_cpu_cores:.2f} of {result.logical_cores} cores"
    detail = f"{load}, and the ranks need {used if idle else f'all {used}'}"
    bound = evidence.thresholds
    most = bound.max_foreign_share_cpu if evidence.is_on_cpu else bound.max_foreign_share
    if taken / used > most:
        host = f" on {result.hosts[0]}" if result.hosts else ""
        listed = result.extra.get("foreign_processes", "")
        detail += f": {taken:.2f} cores taken from the ranks" if idle else ""
        remedy = f"Stop them{host}{f' ({listed})' if listed else ''}"
        return Verdict(rule=LOAD_RULE, ok=False, detail=f"{detail}. {remedy}")
    return Verdict(rule=LOAD_RULE, ok=True, detail=detail)


def check_unedited(evidence: Evidence) -> Verdict:
    """Whether `result.json` is still the file whose hash is in the ledger."""
    if evidence.recorded_sha256 is None:
        return Verdict(rule="unedited", ok=None, detail="evaluated when the trial finished")
    if evidence.found_sha256 is None:
        return Verdict(rule="unedited", ok=False, detail="result.json is missing, but its hash is in the ledger")
    if evidence.found_sha256 != evidence.recorded_sha256:
        return Verdict(
            rule="unedited", ok=False, detail="result.json was changed after its hash was recorded in the ledger"
        )
    return Verdict(rule="unedited", ok=True, detail="result.json has the hash recorded in the ledger")


def check_trace_time(evidence: Evidence) -> Verdict:
    """Whether traced and declared step time are of the same order (a profiler slows a step down)."""
    rule, bound = "trace_time", evidence.thresholds
    declared, traced = evidence.metrics.get("step_time_s"), evidence.trace.step_time_s if evidence.trace else None
    if declared is None or traced is None:
        return Verdict(rule=rule, ok=None, detail="the traces have no step time")
    ratio = traced / declared
    high = bound.max_traced_time_cpu if evidence.is_on_cpu else bound.max_traced_time
    detail = f"traced step time {traced:.4g} s, {ratio:.2f}x the timed {declared:.4g} s"
    if not bound.min_traced_time <= ratio <= high:
        detail = f"{detail}; between {bound.min_traced_time:g} and {high:g}x is allowed"
        return Verdict(rule=rule, ok=False, detail=detail)
    return Verdict(rule=rule, ok=True, detail=detail)


def check_training_loss(evidence: Evidence) -> Verdict:
    """Whether the training loss is finite."""
    import math

    losses = evidence.result.losses
    if not losses:
        return Verdict(rule="training_loss", ok=None, detail="the run script reported no training loss")
    if not all(math.isfinite(loss) for loss in losses):
        return Verdict(rule="training_loss", ok=False, detail="the training loss is not finite")
    return Verdict(rule="training_loss", ok=True, detail=f"{losses[0]:.4f} at the first step")


def _is_like(name: str, accelerator: str) -> bool:
    """Whether an unknown device name contains the accelerator's name (`h100` in `NVIDIA H100 NVL`)."""
    return accelerator.split("-")[0] in name.lower()


def _shorten(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


ADMISSION_RULES: tuple[Callable[[Evidence], Verdict], ...] = (
    check_provenance,
    check_declared_work,
    check_world_size,
    check_steps,
    check_warmup,
    check_spread,
    check_ranks_traced,
    check_trace_time,
    check_traced_work,
    check_possible,
    check_training_loss,
    check_devices,
    check_load,
    check_unedited,
)
"""The rules of the gate, in display order."""
