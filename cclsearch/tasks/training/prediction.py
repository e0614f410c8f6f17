"""Predicts step time and memory of a whole space, with their parts; calibrates both on measurements."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from cclsearch.card.model import Card
from cclsearch.space.table import Space
from cclsearch.stats.calibration import CalibrationData, Posterior, Prior, RowModel, calibrate
from cclsearch.stats.kernel import Features, KernelShape, read_features
from cclsearch.tasks.training import memory, time
from cclsearch.tasks.training.layout import Array, Layout, read_layout
from cclsearch.tasks.training.machine import Machine, read_machine

USABLE_MEMORY = 0.95
"""Share of the device's memory that a job can use before the allocator fails."""
EXACT_ROWS = 5000
"""A larger space gets one variance for all rows instead of one per row."""
BLOCK_ROWS = 8192
"""Rows predicted at once: a block stays in the processor's cache."""
PRIOR_FILE = Path(__file__).with_name("prior.json")
"""All fitted constants; written by `benchmarks/fit_prior.py`."""


@dataclass(frozen=True, eq=False)
class Prediction:
    """Predicted time and memory of N configurations."""

    time_s_N: Array
    """Seconds per optimizer step."""
    memory_gib_N: Array
    """GiB on the fullest device."""
    fits_N: Array
    """Probability that it fits into the device's memory."""
    time_parts_s: dict[str, Array]
    """Part -> (N,) seconds; they add up to `time_s_N`."""
    memory_parts_gib: dict[str, Array]
    """Part -> (N,) GiB; they add up to `memory_gib_N`."""


@dataclass(frozen=True)
class Priors:
    """The priors of time, memory and crashes."""

    time: Prior
    memory: Prior
    softness: float
    """Relative width of the transition between configurations that fit and that do not."""
    crash: Prior
    """Of failures that memory does not explain: a latent score, above 0 if a trial crashes."""


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
        crash=_read_prior(data["crash"], ("rate",)),
    )


def _read_prior(data: dict[str, Any], names: Sequence[str]) -> Prior:
    return Prior(
        mean_P=np.array([data["log_multipliers"][name][0] for name in names]),
        sd_P=np.array([data["log_multipliers"][name][1] for name in names]),
        shape=KernelShape(**data["residual"]),
        noise=float(data["noise"]),
        dof=float(data["dof"]),
    )


class CardModel:
    """The closed forms of one card over one space; their parts are computed once for all calibrations."""

    def __init__(self, card: Card, space: Space) -> None:
        self.card = card
        self.space = space

    @cached_property
    def machine(self) -> Machine:
        return read_machine(self.card)

    @cached_property
    def layout(self) -> Layout:
        return read_layout(self.card, self.space)

    @cached_property
    def features(self) -> Features:
        return read_features(self.space)

    @cached_property
    def time_parts(self) -> time.TimeParts:
        return time.time_parts(self.card, self.layout, self.machine)

    @cached_property
    def memory_parts(self) -> memory.MemoryParts:
        return memory.memory_parts(self.card, self.layout, self.machine)

    def log_time(self, rows: NDArray[np.int64]) -> RowModel:
        """Return the model log multipliers -> log seconds per step at these rows."""
        parts = select_rows(self.time_parts, rows)
        return lambda theta: np.asarray(np.log(time.combine_time(parts, theta)))

    def log_memory(self, rows: NDArray[np.int64]) -> RowModel:
        """Return the model log multipliers -> log GiB at these rows."""
        parts = select_rows(self.memory_parts, rows)
        return lambda theta: np.asarray(np.log(memory.combine_memory(parts, theta)))

    @property
    def log_limit(self) -> float:
        """Log of the GiB that a job can use of one device."""
        return float(np.log(USABLE_MEMORY * self.machine.memory_gib))

    def calibrate_time(self, evidence: CalibrationData, prior: Prior) -> Posterior:
        """Return the posterior of the step time, given measured step times (log seconds)."""
        return calibrate(self.log_time, self.features, prior, evidence)

    def calibrate_memory(self, evidence: CalibrationData, prior: Prior) -> Posterior:
        """Return the posterior of the memory, given measured peaks (log GiB) and which trials fitted."""
        return calibrate(self.log_memory, self.features, prior, evidence)


def predict_space(card: Card, space: Space) -> Prediction:
    """Return time and memory of every configuration, with parts, by the priors alone (nothing measured)."""
    model = model_of(card, space)
    priors = load_priors()
    time_parts_s, memory_parts_gib = _split_all(model, priors.time.mean_P, priors.memory.mean_P)
    log_time = np.log(_sum_parts(time_parts_s))
    log_memory = np.log(_sum_parts(memory_parts_gib))
    posterior = model.calibrate_memory(no_data(), priors.memory)
    spread = np.sqrt(_variance(posterior, np.arange(len(space))) + priors.softness**2)
    return Prediction(
        time_s_N=np.exp(log_time),
        memory_gib_N=np.exp(log_memory),
        fits_N=ndtr((model.log_limit - log_memory) / spread),
        time_parts_s=time_parts_s,
        memory_parts_gib=memory_parts_gib,
    )


def _split_all(model: CardModel, theta_time: Array, theta_memory: Array) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the time and memory parts of every configuration, computed block by block."""
    size = len(model.layout)
    parts: tuple[dict[str, Array], dict[str, Array]] = ({}, {})
    for start in range(0, max(size, 1), BLOCK_ROWS):
        block = slice(start, min(start + BLOCK_ROWS, size))
        layout = model.layout.slice(block)
        split = (
            time.split_time(time.time_parts(model.card, layout, model.machine), theta_time),
            memory.split_memory(memory.memory_parts(model.card, layout, model.machine), theta_memory),
        )
        for whole, part in zip(parts, split, strict=True):
            for name, values in part.items():
                whole.setdefault(name, np.empty(size))[block] = values
    return parts


def _sum_parts(parts: dict[str, Array]) -> Array:
    total = np.zeros(len(next(iter(parts.values()))))
    for part in parts.values():
        total += part
    return total


def no_data() -> CalibrationData:
    """Return data without any observation."""
    return CalibrationData(np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0, dtype=np.int8), np.zeros(0))


def _variance(posterior: Posterior, rows: NDArray[np.int64]) -> Array:
    """(N,) variance of the log; in a large space, the median over a sample of rows."""
    if len(rows) <= EXACT_ROWS:
        return posterior.marginals(rows)[1]
    sample = rows[:: max(1, len(rows) // 256)]
    return np.full(len(rows), float(np.median(posterior.marginals(sample)[1])))


_MODELS: WeakKeyDictionary[Space, dict[Card, CardModel]] = WeakKeyDictionary()


def model_of(card: Card, space: Space) -> CardModel:
    """Return the model of this card over this space, built once per space object."""
    models = _MODELS.setdefault(space, {})
    if card not in models:
        models[card] = CardModel(card, space)
    return models[card]


def select_rows(parts: Any, rows: NDArray[np.int64]) -> Any:
    """Return the same parts at these rows only."""
    size = len(next(iter(vars(parts).values())))
    if len(rows) == size and np.array_equal(rows, np.arange(size)):
        return parts
    return type(parts)(**{name: getattr(parts, name)[rows] for name in parts.__dataclass_fields__})
