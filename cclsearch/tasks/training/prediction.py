"""Prediction of a whole space: step time and memory, with their parts, before and after calibration."""

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
"""Share of the device's memory that a job can fill before the allocator gives up."""
EXACT_ROWS = 5000
"""A larger space is predicted without the surrogate of the residual, row by row."""
BLOCK_ROWS = 8192
PRIOR_FILE = Path(__file__).with_name("prior.json")
"""Every fitted constant; written by `benchmarks/fit_prior.py`."""


@dataclass(frozen=True, eq=False)
class Prediction:
    """What the closed forms say of N configurations."""

    time_s_N: Array
    """Seconds per optimizer step."""
    memory_gib_N: Array
    """GiB of the fullest device."""
    fits_N: Array
    """Probability that it fits into the device's memory."""
    time_parts_s: dict[str, Array]
    """Add up to `time_s_N` before the residual's correction."""
    memory_parts_gib: dict[str, Array]


@dataclass(frozen=True)
class Priors:
    """The priors of both models."""

    time: Prior
    memory: Prior
    softness: float
    """Relative width of the border between what fits and what does not."""
    crash: Prior
    """Of failures that memory does not explain: a latent score, above 0 where a trial crashes."""


@cache
def load_priors(path: Path = PRIOR_FILE) -> Priors:
    """The priors in that file."""
    return read_priors(json.loads(path.read_text(encoding="utf-8")))


def read_priors(data: dict[str, Any]) -> Priors:
    """Priors as `prior.json` holds them; a part that the data does not name keeps multiplier 1, loosely."""
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
    """Closed forms of one card over one space; raw parts are computed once and shared by every calibration."""

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
        """Log multipliers -> log seconds per step at these rows."""
        parts = take(self.time_parts, rows)
        return lambda theta: np.asarray(np.log(time.combine_time(parts, theta)))

    def log_memory(self, rows: NDArray[np.int64]) -> RowModel:
        """Log multipliers -> log GiB at these rows."""
        parts = take(self.memory_parts, rows)
        return lambda theta: np.asarray(np.log(memory.combine_memory(parts, theta)))

    @property
    def log_limit(self) -> float:
        """Log of the memory that a job may use of one device, in GiB."""
        return float(np.log(USABLE_MEMORY * self.machine.memory_gib))

    def calibrate_time(self, evidence: CalibrationData, prior: Prior) -> Posterior:
        """Step time given measured step times (log seconds)."""
        return calibrate(self.log_time, self.features, prior, evidence)

    def calibrate_memory(self, evidence: CalibrationData, prior: Prior) -> Posterior:
        """Memory given measured peaks (log GiB) and what fitted or not."""
        return calibrate(self.log_memory, self.features, prior, evidence)


@dataclass(frozen=True, eq=False)
class Calibration:
    """What measurements have made of both models; `CardModel.calibrate_time` and `calibrate_memory` give its parts."""

    time: Posterior
    memory: Posterior


def predict_space(card: Card, space: Space, calibration: Calibration | None = None) -> Prediction:
    """Time and memory of every configuration, with parts; without a calibration, before anything was measured."""
    model = model_of(card, space)
    priors = load_priors()
    theta_time = calibration.time.theta_P if calibration else priors.time.mean_P
    theta_memory = calibration.memory.theta_P if calibration else priors.memory.mean_P
    time_parts_s, memory_parts_gib = _split(model, theta_time, theta_memory)
    log_time = np.log(_add_up(time_parts_s))
    log_memory = np.log(_add_up(memory_parts_gib))
    rows = np.arange(len(space))
    if calibration and len(space) <= EXACT_ROWS:
        log_time, log_memory = calibration.time.marginals(rows)[0], calibration.memory.marginals(rows)[0]
    posterior = calibration.memory if calibration else model.calibrate_memory(no_data(), priors.memory)
    spread = np.sqrt(_variance(posterior, rows) + priors.softness**2)
    return Prediction(
        time_s_N=np.exp(log_time),
        memory_gib_N=np.exp(log_memory),
        fits_N=ndtr((model.log_limit - log_memory) / spread),
        time_parts_s=time_parts_s,
        memory_parts_gib=memory_parts_gib,
    )


def _split(model: CardModel, theta_time: Array, theta_memory: Array) -> tuple[dict[str, Array], dict[str, Array]]:
    """Parts of every configuration, computed a block at a time: a block stays in the processor's cache."""
    size = len(model.layout)
    held: tuple[dict[str, Array], dict[str, Array]] = ({}, {})
    for start in range(0, max(size, 1), BLOCK_ROWS):
        block = slice(start, min(start + BLOCK_ROWS, size))
        layout = model.layout.slice(block)
        split = (
            time.split_time(time.time_parts(model.card, layout, model.machine), theta_time),
            memory.split_memory(memory.memory_parts(model.card, layout, model.machine), theta_memory),
        )
        for whole, part in zip(held, split, strict=True):
            for name, values in part.items():
                whole.setdefault(name, np.empty(size))[block] = values
    return held


def _add_up(parts: dict[str, Array]) -> Array:
    total = np.zeros(len(next(iter(parts.values()))))
    for part in parts.values():
        total += part
    return total


def no_data() -> CalibrationData:
    """Nothing was seen."""
    return CalibrationData(np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0, dtype=np.int8), np.zeros(0))


def _variance(posterior: Posterior, rows: NDArray[np.int64]) -> Array:
    """(N,) variance of the log; of a large space, the median over rows spread through it."""
    if len(rows) <= EXACT_ROWS:
        return posterior.marginals(rows)[1]
    sample = rows[:: max(1, len(rows) // 256)]
    return np.full(len(rows), float(np.median(posterior.marginals(sample)[1])))


_MODELS: WeakKeyDictionary[Space, dict[Card, CardModel]] = WeakKeyDictionary()


def model_of(card: Card, space: Space) -> CardModel:
    """The model of this card over this space; made once for as long as the space lives."""
    held = _MODELS.setdefault(space, {})
    key = card
    if key not in held:
        held[key] = CardModel(card, space)
    return held[key]


def take(parts: Any, rows: NDArray[np.int64]) -> Any:
    """The same parts at these rows only."""
    size = len(next(iter(vars(parts).values())))
    if len(rows) == size and np.array_equal(rows, np.arange(size)):
        return parts
    return type(parts)(**{name: getattr(parts, name)[rows] for name in parts.__dataclass_fields__})
