"""The admission gate: rule by rule, whether a trial may be ranked. Thresholds: `cclsearch.score.thresholds`.

A rule answers True, False, or None where it does not apply or cannot be told; one False keeps the trial out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from statistics import median

from cclsearch.core.values import Provenance
from cclsearch.score.evidence import Evidence
from cclsearch.score.outcome import Admission, Verdict
from cclsearch.score.work import check_declared_work, check_possible, check_traced_work

LOAD_RULE = "load"
"""The rule that a second run may pass: the run was sound, but something else ran beside it."""

WORK_RULES = frozenset({"work", "world_size", "traced_work"})
"""Rules whose breach means that another job was run than the one asked for."""


def admit(evidence: Evidence) -> Admission:
    """The verdict of every rule over one finished trial, and whether all of them let it through."""
    verdicts = tuple(rule(evidence) for rule in ADMISSION_RULES)
    return Admission(admitted=all(verdict.ok is not False for verdict in verdicts), verdicts=verdicts)


def check_provenance(evidence: Evidence) -> Verdict:
    """Whether the result says of itself what the launcher says of it: measured, recorded or simulated."""
    result = evidence.result
    says = Provenance.SIMULATED if result.simulated else Provenance.RECORDED if result.recorded else Provenance.MEASURED
    if says is not evidence.provenance:
        detail = f"the result says {says.value}, the launcher {evidence.provenance.value}"
        return Verdict(rule="provenance", ok=False, detail=detail)
    meaning = {
        Provenance.MEASURED: "measured: it ran",
        Provenance.RECORDED: "recorded: looked up, nothing ran",
        Provenance.SIMULATED: "simulated: computed by a model, nothing ran",
    }
    return Verdict(rule="provenance", ok=True, detail=meaning[says])


def check_world_size(evidence: Evidence) -> Verdict:
    """Whether as many ranks ran as were asked for."""
    want, got = evidence.payload.num_ranks, evidence.result.world_size
    if got is None:
        ok = False if evidence.is_measured else None
        return Verdict(rule="world_size", ok=ok, detail="the run script did not declare its world size")
    if got != want:
        return Verdict(rule="world_size", ok=False, detail=f"{got} ranks ran where {want} were asked for")
    return Verdict(rule="world_size", ok=True, detail=f"{got} ranks")


def check_steps(evidence: Evidence) -> Verdict:
    """Whether enough optimizer steps were timed."""
    if not evidence.is_measured:
        return Verdict(rule="steps", ok=None, detail=f"{evidence.provenance.value}: no steps were timed here")
    want = max(evidence.payload.timed_steps, evidence.thresholds.min_timed_steps)
    got = len(evidence.result.step_times_s)
    if got < want:
        return Verdict(rule="steps", ok=False, detail=f"{got} steps were timed; at least {want} must be")
    return Verdict(rule="steps", ok=True, detail=f"{got} steps timed")


def check_warmup(evidence: Evidence) -> Verdict:
    """Whether the window was timed after warm-up, and no warm-up step stands in it."""
    if not evidence.is_measured:
        return Verdict(rule="warmup", ok=None, detail=f"{evidence.provenance.value}: no steps were timed here")
    want = max(evidence.payload.warmup_steps, evidence.thresholds.min_warmup_steps)
    got = evidence.result.warmup_steps
    if got < want:
        return Verdict(
            rule="warmup", ok=False, detail=f"{got} warm-up steps; at least {want} must run before the timed ones"
        )
    times = evidence.result.step_times_s
    bound = evidence.thresholds.max_first_step_cpu if evidence.is_on_cpu else evidence.thresholds.max_first_step
    if len(times) >= 3:
        ratio = times[0] / median(times[1:])
        if ratio > bound:
            detail = f"the first timed step took {ratio:.1f} x the others: warm-up was counted (at most {bound:g} x)"
            return Verdict(rule="warmup", ok=False, detail=detail)
    return Verdict(rule="warmup", ok=True, detail=f"{got} warm-up steps")


def check_spread(evidence: Evidence) -> Verdict:
    """Whether the step times agree with each other."""
    if evidence.spread is None:
        return Verdict(rule="spread", ok=None, detail="one step time only")
    bound = evidence.thresholds.max_spread_cpu if evidence.is_on_cpu else evidence.thresholds.max_spread
    detail = f"step times spread by {evidence.spread:.1%}"
    if evidence.spread > bound:
        return Verdict(rule="spread", ok=False, detail=f"{detail}; at most {bound:.0%} is admitted")
    return Verdict(rule="spread", ok=True, detail=detail)


def check_ranks_traced(evidence: Evidence) -> Verdict:
    """Whether the trace of every rank is there and was read."""
    rule = "ranks_traced"
    if not evidence.is_measured:
        return Verdict(rule=rule, ok=None, detail=f"{evidence.provenance.value}: there are no traces")
    if evidence.payload.profiled_steps == 0:
        return Verdict(rule=rule, ok=None, detail="no profiled steps were asked for")
    ranks = set(evidence.trace.ranks) if evidence.trace else set()
    missing = sorted(set(range(evidence.payload.num_ranks)) - ranks)
    if missing:
        return Verdict(rule=rule, ok=False, detail=f"no readable trace of rank {_shorten(missing)}")
    return Verdict(rule=rule, ok=True, detail=f"traces of {len(ranks)} ranks")


def check_devices(evidence: Evidence) -> Verdict:
    """Whether it ran on the accelerator that the frozen inputs name."""
    from cclsearch.card.hardware import match_accelerator

    traced = evidence.trace.devices if evidence.trace else ()
    names = Counter((*evidence.result.devices, *(name for name in traced if match_accelerator(name))))
    if not names:
        return Verdict(rule="devices", ok=None, detail="neither the run script nor the traces name the devices")
    hardware = evidence.card.hardware
    wanted = match_accelerator(hardware.accelerator, hardware.memory_gib)
    if wanted is None:
        return Verdict(rule="devices", ok=None, detail=f"the card's accelerator {hardware.accelerator!r} is not known")
    strange, unknown = [], []
    for name in names:
        found = match_accelerator(name) or match_accelerator(name, hardware.memory_gib)
        if found is None:
            unknown.append(name)
        elif found.name != wanted.name:
            strange.append(f"{name!r} is {found.name}")
    if strange:
        return Verdict(rule="devices", ok=False, detail=f"the inputs name {wanted.name}, but {'; '.join(strange)}")
    if any(wanted.kind != "cpu" and not _is_like(name, wanted.name) for name in unknown):
        return Verdict(
            rule="devices",
            ok=False,
            detail=f"the inputs name {wanted.name}, but it ran on {', '.join(map(repr, unknown))}",
        )
    if unknown and wanted.kind != "cpu":
        return Verdict(rule="devices", ok=None, detail=f"not known: {', '.join(map(repr, unknown))}")
    return Verdict(rule="devices", ok=True, detail=", ".join(names))


def check_load(evidence: Evidence) -> Verdict:
    """Whether foreign load took cores from the ranks; load on cores that the ranks leave idle does not count."""
    result = evidence.result
    if not evidence.is_measured or result.foreign_cpu_cores is None or result.logical_cores is None:
        return Verdict(rule=LOAD_RULE, ok=None, detail="foreign load was not measured")
    ranks_here = max(Counter(result.hosts).values(), default=evidence.payload.num_ranks)
    used = min(ranks_here, result.logical_cores)
    idle = result.logical_cores - used
    taken = max(0.0, result.foreign_cpu_cores - idle)
    detail = (
        f"foreign load {result.foreign_cpu_cores:.2f} of {result.logical_cores} cores, {idle} left idle by the ranks"
    )
    bound = evidence.thresholds
    most = bound.max_foreign_share_cpu if evidence.is_on_cpu else bound.max_foreign_share
    if taken / used > most:
        host = f" on {result.hosts[0]}" if result.hosts else ""
        told = result.extra.get("foreign_processes", "")
        what = f" ({told})" if told else ""
        remedy = f"stop what else runs{host}{what}"
        return Verdict(rule=LOAD_RULE, ok=False, detail=f"{detail}: {taken:.2f} cores taken from the ranks; {remedy}")
    return Verdict(rule=LOAD_RULE, ok=True, detail=detail)


def check_unedited(evidence: Evidence) -> Verdict:
    """Whether `result.json` is still the file that the ledger judged."""
    if evidence.recorded_sha256 is None:
        return Verdict(rule="unedited", ok=None, detail="judged as it came in")
    if evidence.found_sha256 is None:
        return Verdict(rule="unedited", ok=False, detail="result.json is gone; the ledger holds its hash")
    if evidence.found_sha256 != evidence.recorded_sha256:
        return Verdict(rule="unedited", ok=False, detail="result.json was changed after the ledger took its hash")
    return Verdict(rule="unedited", ok=True, detail="result.json has the hash that the ledger holds")


def check_trace_time(evidence: Evidence) -> Verdict:
    """Whether the traced step time is of the order of the declared one: a profiler slows a step."""
    rule, bound = "trace_time", evidence.thresholds
    declared, traced = evidence.metrics.get("step_time_s"), evidence.trace.step_time_s if evidence.trace else None
    if declared is None or traced is None:
        return Verdict(rule=rule, ok=None, detail="the traces tell no step time")
    ratio = traced / declared
    high = bound.max_traced_time_cpu if evidence.is_on_cpu else bound.max_traced_time
    detail = f"{traced:.4g} s in the traces, {ratio:.2f} x the timed {declared:.4g} s"
    if not bound.min_traced_time <= ratio <= high:
        detail = f"{detail}; between {bound.min_traced_time:g} and {high:g} x is admitted"
        return Verdict(rule=rule, ok=False, detail=detail)
    return Verdict(rule=rule, ok=True, detail=detail)


def check_training_loss(evidence: Evidence) -> Verdict:
    """Whether the model really trained: a training loss that is no number is no training."""
    import math

    losses = evidence.result.losses
    if not losses:
        return Verdict(rule="training_loss", ok=None, detail="the run script left no training loss")
    if not all(math.isfinite(loss) for loss in losses):
        return Verdict(rule="training_loss", ok=False, detail="the training loss is not finite")
    return Verdict(rule="training_loss", ok=True, detail=f"{losses[0]:.4f} at the first step")


def _is_like(name: str, accelerator: str) -> bool:
    """Whether an unknown device name at least holds the accelerator's own word (`h100` in `NVIDIA H100 NVL`)."""
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
"""The gate, in the order in which it is shown."""
