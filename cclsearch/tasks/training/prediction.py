"""Predictions for training: step time and memory of a whole space in closed form, with their parts and priors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cclsearch.card.arch import tokens_per_step
from cclsearch.card.model import PRECISION, Card
from cclsearch.core.metrics import PEAK_MEMORY
from cclsearch.core.values import format_knob_value
from cclsearch.space.framework import find_levers
from cclsearch.space.table import Space
from cclsearch.stats.calibration import Prior, RowModel
from cclsearch.stats.closed_form import ClosedForm, Derived, MemoryForm, Predictor
from cclsearch.stats.columns import take_rows
from cclsearch.stats.kernel import KernelShape, read_features
from cclsearch.tasks.machine import Machine, read_machine
from cclsearch.tasks.training import memory, staged, time
from cclsearch.tasks.training.layout import PARTIAL_SHARE, Array, Layout, read_layout
from cclsearch.tasks.training.measured_on import describe_unlike
from cclsearch.tasks.training.measurements import METRICS, MFU_FORMULA, THROUGHPUT, find_mfu, find_throughput

STEP_TIME = "step_time_s"
USABLE_MEMORY = 0.95
"""Share of the device's memory that a job can use before the allocator fails."""
CAUTIOUS_MEMORY = 0.9
"""Share of the device's memory that the rule of thumb plans with."""
# A block stays in the processor's cache.
BLOCK_ROWS = 8192
"""Number of rows predicted at once."""
PRIOR_FILE = Path(__file__).with_name("prior.json")
"""All fitted constants; written by `benchmarks/fit_prior.py`."""
# The weights of the last three are the defaults of seven frameworks, with one more of each: all kept in HF Trainer,
# axolotl, nanotron and Megatron-LM, in part in torchtitan, none in TRL's `SFTConfig` and LLaMA-Factory.
UNDECLARED = {
    "unsharded": ((0.0, 0.3), (-5.0, 0.7)),
    "replicated": ((0.0, 0.4), (-5.0, 0.6)),
    "gradients": ((0.0, None), (float(np.log(0.5)), None)),
    "kept": ((0.0, 0.5), (float(np.log(1 - PARTIAL_SHARE)), 0.2), (-5.0, 0.3)),
}
"""Alternative behaviours of frameworks: optimizer states replicated or sharded, sequences replicated or sharded,
gradients of 4 or 2 bytes, activations all kept, recomputed in part (fused attention keeps no matrix either), or
recomputed (`MemoryForm.undeclared`).
"""


@dataclass(frozen=True)
class Priors:
    """The fitted priors of time and memory."""

    time: Prior
    memory: Prior
    softness: float
    """Relative width of the transition between configurations that fit and that do not."""


@cache
def load_priors(path: Path = PRIOR_FILE) -> Priors:
    """Return the priors in the file."""
    return read_priors(json.loads(path.read_text(encoding="utf-8")))


def read_priors(data: dict[str, Any]) -> Priors:
    """Return the priors from data in the format of `prior.json`; every multiplier must be in it."""
    return Priors(
        time=_read_prior(data["time"], time.MULTIPLIERS),
        memory=_read_prior(data["memory"], memory.MULTIPLIERS),
        softness=float(data["softness"]),
    )


def _read_prior(data: dict[str, Any], names: Sequence[str]) -> Prior:
    return Prior(
        mean_P=np.array([data["log_multipliers"][name][0] for name in names]),
        sd_P=np.array([data["log_multipliers"][name][1] for name in names]),
        shape=KernelShape(**data["residual"]),
        noise=float(data["noise"]),
        dof=float(data["dof"]),
    )


def expect_measured_links(prior: Prior) -> Prior:
    """Return the prior of step times over measured links: messages take the time of the measured rates."""
    # The shipped multipliers of messages compare collectives with the nominal bandwidths of a catalogue, which no
    # collective reaches; a measured bandwidth is what a message really gets.
    mean_P = prior.mean_P.copy()
    scale = mean_P[time.MULTIPLIERS.index("scale")]  # it also multiplies the messages
    mean_P[[time.MULTIPLIERS.index(name) for name in time.LINK_MULTIPLIERS]] = -scale
    return replace(prior, mean_P=mean_P)


def make_predictor(card: Card, space: Space, priors: Priors | None = None) -> Predictor:
    """Return the predictor of a card over a space, with these priors or the shipped ones."""
    priors = priors or load_priors()
    layout, machine = read_layout(card, space), read_machine(card)
    is_measured = card.hardware.links is not None
    time_prior = expect_measured_links(priors.time) if is_measured else priors.time
    metrics = {metric.name: metric for metric in METRICS}
    times, sizes = _in_each_precision(card, staged.staged_time), _in_each_precision(card, staged.staged_memory)
    steps = PartsModel(times, time.combine_time, time.split_time, layout, _log_effects(card, space, 0))
    peaks = PartsModel(sizes, memory.combine_memory, memory.split_memory, layout, _log_effects(card, space, 1))
    step_time = ClosedForm(
        metrics[STEP_TIME], time.MULTIPLIERS, time_prior, steps.log_cost, steps.split, "time_parts_s", "s/step"
    )
    peak = ClosedForm(metrics[PEAK_MEMORY], memory.MULTIPLIERS, priors.memory, peaks.log_cost, peaks.split)
    log_limit, undeclared = float(np.log(USABLE_MEMORY * machine.memory_gib)), _find_undeclared(layout)
    return Predictor(
        features=read_features(space),
        forms={STEP_TIME: step_time},
        memory=MemoryForm(
            *(peak, log_limit, priors.softness, undeclared, frozenset({"kept"})),
        ),
        unlike=describe_unlike(card),
        derived=_derive_all(card, layout, space.num_accelerators_N),
        rule_of_thumb=lambda failed: order_by_thumb(
            layout, machine.node, memory.combine_memory(peaks.parts, priors.memory.mean_P) / machine.memory_gib, failed
        ),
    )


def _derive_all(card: Card, layout: Layout, ranks_N: NDArray[np.int64]) -> dict[str, Derived]:
    """Return throughput and, with a known peak, MFU as functions of the step time."""
    derived = {metric: _derive(metric, card, ranks_N) for metric in THROUGHPUT}
    rates = [find_mfu(card.for_trial({PRECISION: precision}), 1.0) for precision in card.precisions]
    if None not in rates:
        mfu_of_rate = np.array(rates, dtype=np.float64)[layout.precision.astype(np.int64)]
        per_accelerator = derived["tokens_per_s_per_accelerator"].value
        derived["mfu"] = Derived(
            STEP_TIME, lambda time_s, rows: per_accelerator(time_s, rows) * mfu_of_rate[rows], MFU_FORMULA
        )
    return derived


def _derive(metric: str, card: Card, ranks_N: NDArray[np.int64]) -> Derived:
    """Return a metric of `find_throughput` as a function of the step time at the card's work."""
    work = card.number("global_batch_size"), tokens_per_step(card)
    return Derived(STEP_TIME, lambda time_s, rows: find_throughput(time_s, ranks_N[rows], *work)[metric])


def _in_each_precision(card: Card, make: Callable[[Card, Layout, Machine], Any]) -> Callable[[Layout], Any]:
    """Return the function layout -> parts of its configurations, each in its own precision."""
    cards = [card.for_trial({PRECISION: precision}) for precision in card.precisions]
    machines = [read_machine(one) for one in cards]

    def compute(at: Layout) -> Any:
        made = [make(one, at, machine) for one, machine in zip(cards, machines, strict=True)]
        return staged.pick(made, at.precision.astype(np.int64))

    return compute


class PartsModel:
    """One closed form over a layout: its parts are computed once for all calibrations."""

    def __init__(
        self,
        compute: Callable[[Layout], Any],
        combine: Callable[[Any, Array], Array],
        split: Callable[[Any, Array], Mapping[str, Array]],
        layout: Layout,
        log_effects_N: Array,
    ) -> None:
        self._compute, self._combine, self._split, self._layout = compute, combine, split, layout
        self._log_effects_N = log_effects_N

    @cached_property
    def parts(self) -> Any:
        """The parts of every configuration, before multipliers."""
        return self._compute(self._layout)

    def log_cost(self, rows: NDArray[np.int64]) -> RowModel:
        """Return the model log multipliers -> log cost at these rows."""
        parts, log_effects = select_rows(self.parts, rows), self._log_effects_N[rows]
        return lambda theta: np.asarray(np.log(self._combine(parts, theta)) + log_effects)

    def split(self, theta_P: Array) -> dict[str, Array]:
        """Return part -> (N,) its share of the cost, computed block by block."""
        size = len(self._layout)
        parts: dict[str, Array] = {}
        for start in range(0, max(size, 1), BLOCK_ROWS):
            block = slice(start, min(start + BLOCK_ROWS, size))
            for name, values in self._split(self._compute(take_rows(self._layout, block)), theta_P).items():
                parts.setdefault(name, np.empty(size))[block] = values * np.exp(self._log_effects_N[block])
        return parts


def _log_effects(card: Card, space: Space, which: int) -> Array:
    """(N,) log of the published effects of levers on step time (0) or peak memory (1)."""
    levers, total = find_levers(card.framework), np.zeros(len(space))
    for k, knob in enumerate(space.knobs):
        effect = levers[knob.name].effect if knob.name in levers else {}
        factors = [effect.get(format_knob_value(choice), (1.0, 1.0))[which] for choice in knob.choices]
        total += np.log(factors)[space.codes_NK[:, k]]
    return total


def _find_undeclared(at: Layout) -> dict[str, tuple[tuple[float, float | None], ...]]:
    """Return the entries of `UNDECLARED` that the space leaves open and that change a configuration of it."""
    is_open = {
        "unsharded": not at.declares_sharding and bool(np.any(at.replicas > 1)),
        "kept": not at.declares_recomputation,
        "replicated": not at.declares_sequence_parallel and bool(np.any((at.tp > 1) & (at.recompute < 1))),
    }
    ways = {name: ways for name, ways in UNDECLARED.items() if is_open.get(name, True)}
    if at.gradient_bytes is not None:
        ways["gradients"] = ((float(np.log(at.gradient_bytes / 4)), None),)
    return ways


def order_by_thumb(at: Layout, node: int, filled: Array, failed: Sequence[int]) -> NDArray[np.int64]:
    """Return the rows by the rule of thumb: TP inside the node, little model parallelism, large micro-batches.

    `filled` is the share of its memory that the fullest device needs. Configurations that need at least as much as the
    smallest failed one come late.
    """
    fits, inside = filled <= CAUTIOUS_MEMORY, at.tp <= node
    needs_more = filled >= min((filled[row] for row in failed), default=np.inf)
    return np.lexsort((at.recompute, -at.micro_batch, at.pp, at.tp * at.pp, needs_more, ~inside, ~fits))


def select_rows(parts: Any, rows: NDArray[np.int64]) -> Any:
    """Return the same parts at these rows only."""
    size = len(next(iter(vars(parts).values())))
    if len(rows) == size and np.array_equal(rows, np.arange(size)):
        return parts
    return take_rows(parts, rows)
