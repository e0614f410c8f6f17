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

from cclsearch.card.model import Card
from cclsearch.predict import memory, time
from cclsearch.predict.calibrate import Curve, Evidence, Posterior, Prior, calibrate
from cclsearch.predict.features import Features, KernelShape, read_features
from cclsearch.predict.layout import Array, Layout, read_layout
from cclsearch.predict.machine import Machine, read_machine
from cclsearch.space.table import Space

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
        freedom=float(data["freedom"]),
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

    def log_time(self, rows: NDArray[np.int64]) -> Curve:
        """Log multipliers -> log seconds per step at these rows."""
        parts = take(self.time_parts, rows)
        return lambda theta: np.asarray(np.log(time.combine_time(parts, theta)))

    def log_memory(self, rows: NDArray[np.int64]) -> Curve:
        """Log multipliers -> log GiB at these rows."""
        parts = take(self.memory_parts, rows)
        return lambda theta: np.asarray(np.log(memory.combine_memory(parts, theta)))

    @property
    def log_limit(self) -> float:
        """Log of the memory of one device in GiB."""
        return float(np.log(0.95 * self.machine.memory_gib))

    def calibrate_time(self, evidence: Evidence, prior: Prior) -> Posterior:
        """Step time given measured step times (log seconds)."""
        return calibrate(self.log_time, self.features, prior, evidence)

    def calibrate_memory(self, evidence: Evidence, prior: Prior) -> Posterior:
        """Memory given measured peaks (log GiB) and what fitted or not."""
        return calibrate(self.log_memory, self.features, prior, evidence)


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
    return type(parts)(**{name: getattr(parts, name)[rows] for name in parts.__dataclass_fields__})
