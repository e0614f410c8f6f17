"""The task `training`: optimizer steps of a fixed global batch.

Every layout trains the same weights on the same data, so the losses of all trials agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cclsearch.card.fields import WORK_FIELDS
from cclsearch.card.model import Card
from cclsearch.card.task import TASKS
from cclsearch.core.metrics import PEAK_MEMORY
from cclsearch.core.values import Config, Failure, FailureKind, Stage, Value
from cclsearch.launch.contract import RunStatus, TrialInput, TrialResult
from cclsearch.scoring.agreement import Measure, find_largest
from cclsearch.scoring.derive import relative_spread
from cclsearch.scoring.evidence import Diagnosed
from cclsearch.space.framework import Framework
from cclsearch.space.knobs import rank_degrees
from cclsearch.space.table import Space
from cclsearch.tasks.base import Task
from cclsearch.tasks.training import space_rules  # noqa: F401  importing registers its rules
from cclsearch.tasks.training.admission import ADMISSION_RULES, WORK_RULES
from cclsearch.tasks.training.contract import TrainingEvidence, TrainingInput, TrainingResult
from cclsearch.tasks.training.measurements import METRICS, derive_metrics, median_step_time
from cclsearch.tasks.training.stages import EVEN, SPLIT_KNOB

if TYPE_CHECKING:
    from cclsearch.stats.closed_form import Predictor

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "micro_batches": "micro-batches per optimizer step and data-parallel rank (gradient accumulation)",
        "scale": "the whole step, every part of it alike",
        "gemm": "matrix multiplications of the layers",
        "attention": "attention kernels",
        "elementwise": "kernels limited by memory bandwidth: norms, activations, residuals",
        "recompute": "forward passes repeated by activation checkpointing",
        "vocabulary": "output projection and loss, on the last pipeline stage",
        "imbalance": "how much that stage delays the other stages",
        "launch": "host time to launch kernels, which overlaps with the device's work",
        "tp scale up, tp scale out": "tensor-parallel collectives in a node, and between nodes: bytes over bandwidth",
        "tp wait": "latency of each of these collectives; tp wait staged: more of it, if there are pipeline stages too",
        "launch and latency": "what launch, tp wait and p2p wait add to a step",
        "bubble": "fill and drain of the pipeline",
        "p2p (point to point), p2p wait": "transfers between pipeline stages: bytes over bandwidth, and delay of each",
        "dp (data parallel)": "reduction of gradients and gathering of sharded weights, as far as it is exposed",
        "dp overlap": "the share of it that the backward pass hides",
    }
)
"""Name in tables, predictions and corrections -> its meaning."""
ADAM_BYTES = {
    True: "bf16 weights, fp32 gradients, fp32 master weights and two fp32 moments: 18 bytes",
    False: "fp32 weights, gradients and two moments: 16 bytes",
}
"""Whether the work is in 16 bits -> the bytes that `memory.py` counts per parameter."""

MIN_PROFILER_SLOWDOWN = 1.5
"""Traced step time over the timed one from which a diagnosis says so: an H200 that waited for its host had 2.2."""


def describe_assumptions(card: Card) -> str:
    """Return the closed forms' assumptions for undeclared behaviour, in one line."""
    is_16_bit = card.precision not in {"fp32", "float32", "tf32"}
    return (
        f"assumed by the closed form unless a knob says otherwise: Adam with {ADAM_BYTES[is_16_bit]} per parameter; "
        "1F1B pipeline schedule without interleaving; no activation recomputation; gradients reduced once a step, "
        "overlapped with the last backward pass. If neither a knob nor the framework's file says it, the trials teach "
        "whether ranks shard optimizer states, split the sequence or recompute activations, and the bytes of "
        "gradients. The framework may do otherwise"
    )


class SameLosses:
    """Compares the loss of each optimizer step between the trials of one search and precision."""

    rule = "same_losses"
    values = "losses"
    deviation = "relative deviation"
    max_deviation = 0.0025  # DeepSeek-V3 Technical Report, section 3.3: FP8 stays below 0.25 % of BF16's loss
    tolerated = frozenset({"load", "spread", "constraints"})

    def read(self, payload: TrainingInput, result: TrainingResult) -> tuple[float, ...]:
        losses = result.losses[: count_steps(payload) + 1]  # torch's profiler has a step of its own to warm up
        return losses if all(map(math.isfinite, losses)) else ()

    def kind(self, payload: TrainingInput) -> str:
        return payload.precision

    def count_known(self, payload: TrainingInput) -> int:
        return payload.warmup_steps

    def bound(self, framework: Framework, kind: str) -> float | None:
        return framework.same_losses.bound(kind)

    def measure(self, framework: Framework, kind: str) -> Measure:
        return find_largest

    def find_missing(self, framework: Framework, payload: TrainingInput, num_values: int) -> str:
        want = count_steps(payload)
        if self.bound(framework, payload.precision) is None or num_values >= want:
            return ""
        found = f"the run script reported the losses of {num_values} of {want} steps"
        return f"{found}, but {framework.name} declares a bound for them"

    def explain(self, framework: Framework, payload: TrainingInput) -> str:
        why = framework.same_losses.none
        return f"{framework.name} promises no bound: {why}" if why else f"{framework.name} declares no bound"

    def describe_value(self, payload: TrainingInput, index: int, value: float) -> str:
        return f"{value:.6g} at step {index + 1} ({name_window(payload, index)})"


def count_steps(payload: TrainingInput) -> int:
    """Return the optimizer steps whose losses a run script reports: warm-up, timed and profiled ones."""
    return payload.warmup_steps + payload.timed_steps + payload.profiled_steps


def name_window(payload: TrainingInput, index: int) -> str:
    """Return the window of the step with that index, from 0: `warm-up`, `timed` or `profiled`."""
    if index < payload.warmup_steps:
        return "warm-up"
    return "timed" if index < payload.warmup_steps + payload.timed_steps else "profiled"


class TrainingTask(Task):
    """Trains a decoder-only transformer; the time of a step is measured."""

    name = "training"
    metrics = METRICS
    primary = "step_time_s"
    rate = "tokens_per_s"
    objective = "step_time"
    sweep = "composite"
    highlights = ("tokens_per_s", "tokens_per_s_per_accelerator", "mfu", "peak_memory_gib")
    efficiency = ("tokens_per_s_per_accelerator", "mfu")
    causes = ("overlap", "mfu")
    compared = (
        "overlap", "compute_frac", "exposed_comm_frac", "idle_frac", "comm_wait_frac", "compute_imbalance",
        "pipeline_bubble", "num_accelerators",
    )  # fmt: skip
    per_accelerator = (
        "num_accelerators", "tokens_per_s_per_accelerator", "accelerator_seconds_per_mtoken", "energy_j_per_mtoken",
    )  # fmt: skip
    card_fields = WORK_FIELDS
    rules = (
        *("num_accelerators", "tp_divides_heads", "tp_divides_kv_heads", "pp_at_most_layers", "accumulation_whole"),
        *("ep_divides_experts", "ep_inside_stage"),
    )
    numbers = MappingProxyType(
        {"global_batch": lambda card: card.number("global_batch_size"), "seq_len": lambda card: card.number("seq_len")}
    )
    tuned = "how a large language model's training is split over accelerators"
    agent_metrics = ("mfu",)
    agent_names = NAMES
    unit_of_work = "step"
    input = TrainingInput
    result = TrainingResult
    admission_rules = ADMISSION_RULES
    agreement = SameLosses()
    work_rules = WORK_RULES
    ends_early = True
    load_effects = frozenset({"spread", "warmup", "step_times", "trace_time"})

    def agent_columns(self, card: Card, space: Space) -> Mapping[str, Sequence[float]]:
        from cclsearch.tasks.training.layout import read_layout

        return {"micro_batches": read_layout(card, space).accumulation.tolist()}

    def make_input(self, card: Card, config: Config, *, is_measured: bool, **fields: Any) -> TrialInput:
        batch, seq_len = card.number("global_batch_size"), card.number("seq_len")
        own: dict[str, Any] = {
            "global_batch_size": batch,
            "seq_len": seq_len,
            "gradient_accumulation": max(1, batch // (config.as_int("dp") * config.as_int("micro_batch_size"))),
            "profiled_steps": 2 if is_measured else 0,
        }
        if is_measured:
            own |= _find_unlike(card, config)
        return super().make_input(card, config, is_measured=is_measured, **own, **fields)

    def make_result(self, card: Card, metrics: Mapping[str, float], **fields: Any) -> TrialResult:
        """As the base class; of the row's own metrics, those that follow from step time and memory are left out.

        A recording did its card's work; a function of the caller does not declare its work.
        """
        own = {metric.name for metric in METRICS} - {PEAK_MEMORY}
        if fields["status"] is RunStatus.OK and not fields.get("caller"):
            fields |= {name: card.number(name) for name in ("global_batch_size", "seq_len")}
        if self.primary in metrics:
            fields["step_times_s"] = (metrics[self.primary],)
        return super().make_result(card, {name: v for name, v in metrics.items() if name not in own}, **fields)

    def find_failure(self, result: TrialResult) -> Failure | None:
        assert isinstance(result, TrainingResult)
        if median_step_time(result) is not None:
            return None
        times = ", ".join(f"{t:g}" for t in result.step_times_s[:5])
        found = f"they are {times}" if times else "there are none"
        message = f"the run script reported success, but its step times must be finite and above 0: {found}"
        return Failure(stage=Stage.SCORE, kind=FailureKind.CRASHED, message=message)

    def diagnose(self, evidence: TrainingEvidence) -> Diagnosed:  # type: ignore[override]
        """As for every task, and whether the profiler made the traced steps unlike the timed ones."""
        diagnosed = super().diagnose(evidence)
        timed, traced = evidence.metrics.get("step_time_s"), evidence.trace.step_time_s if evidence.trace else None
        if not timed or not traced or traced <= MIN_PROFILER_SLOWDOWN * timed:
            return diagnosed
        text = f"The profiler slows this trial: its traced steps take {traced / timed:.1f} times the timed ones"
        return replace(diagnosed, sentences=(f"{text}, so part of its idle time is not its own.", *diagnosed.sentences))

    def measure(self, evidence: TrainingEvidence) -> tuple[dict[str, float], float | None]:  # type: ignore[override]
        return derive_metrics(evidence), relative_spread(evidence.result.step_times_s)

    def predictor(self, card: Card, space: Space) -> Predictor:
        """Closed forms of step time and memory."""
        from cclsearch.tasks.training.prediction import make_predictor

        return make_predictor(card, space)

    def count_units(self, payload: TrialInput) -> int | None:
        """The optimizer steps: warm-up, timed, and profiled ones with one to warm up the profiler."""
        assert isinstance(payload, TrainingInput)
        profiled = payload.profiled_steps
        return payload.warmup_steps + payload.timed_steps + (profiled + 1 if profiled else 0)

    def saved_s(self, payload: TrialInput, result: TrialResult, primary: float) -> float:
        """The steps that did not run, of the median time."""
        assert isinstance(result, TrainingResult)
        return ((self.count_units(payload) or 0) - result.warmup_steps - len(result.step_times_s)) * primary

    def describe_work(self, card: Card) -> str:
        """The work of a step: `64 x 4096 tokens/step`."""
        return f"{card.work['global_batch_size']} x {card.work['seq_len']} tokens/step"

    def describe_primary(self) -> str:
        return "seconds per optimizer step at the fixed work"

    def describe_for_agent(self, card: Card) -> list[str]:
        work = f"global batch {card.number('global_batch_size')} sequences of {card.number('seq_len')} tokens"
        return [f"fixed work: {work}", describe_assumptions(card)]

    def policy_inputs(self, card: Card) -> dict[str, Value]:
        """The names that published policies read."""
        return {"batch_size": card.number("global_batch_size"), "seq_len": card.number("seq_len")}

    def seed_policy(self, card: Card) -> str:
        return "moe" if card.arch.moe else "dense"


def _find_unlike(card: Card, config: Config) -> dict[str, tuple[Any, ...]]:
    """Return the ranks' input for unlike links, accelerators or stages."""
    found: dict[str, tuple[Any, ...]] = {}
    if card.hardware.links is not None:
        from cclsearch.tasks.training.staged import find_places

        found["places"] = find_places(card, config)
    if config.get(SPLIT_KNOB, EVEN) != EVEN:
        from cclsearch.tasks.training.staged import find_layers

        found["stage_layers"] = find_layers(card, config)
    speeds = [group.speed for group in card.hardware.groups for _ in range(group.num_accelerators)]
    if card.hardware.chip.kind == "cpu" and min(speeds, default=1.0) < 1:
        ranks = math.prod(config.as_int(degree) for degree in rank_degrees())
        found["rank_speeds"] = tuple(speeds[place] for place in found.get("places") or range(ranks))
    return found


TASKS.register("training")(TrainingTask())
