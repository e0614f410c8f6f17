"""A simulated cluster: the closed forms of a task, changed by surprises that are drawn from the cluster's seed.

The surrogate knows the closed forms and their priors. It does not know the draws: this module is used by the
`simulate` launcher and by benchmarks, never by a proposer. Equal seeds give the same cluster for every workload.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from cclsearch.card.model import Card
from cclsearch.card.task import TASKS
from cclsearch.core.errors import UserError
from cclsearch.core.metrics import PEAK_MEMORY
from cclsearch.core.values import Model, Value, format_knob_value
from cclsearch.network.spec import parse_cluster
from cclsearch.space.knobs import canonical_name
from cclsearch.space.table import Space
from cclsearch.stats.closed_form import ClosedForm, MemoryForm, Predictor, Rows, predictor_of

Array = NDArray[np.float64]
ACCIDENTS = ("preempted", "node_failed", "launcher")
"""Kinds of infrastructure failures, equally frequent."""


Width = Annotated[float, Field(ge=0, le=2, strict=True, allow_inf_nan=False)]
"""Standard deviation of a log multiplier."""
Share = Annotated[float, Field(ge=0, le=0.9, strict=True, allow_inf_nan=False)]


class SimulatedSettings(Model):
    """Parameters from which a simulated cluster is drawn."""

    seed: int = Field(default=0, ge=0, strict=True)
    """Seed of the cluster: all surprises follow from it."""
    noise: Width = 0.01
    """Noise of each attempt."""
    surprise_parts: Width = 0.4
    """Surprise of each multiplier of a closed form: a part costs more or less than predicted."""
    surprise_values: Width = 0.1
    """Surprise of each value of each knob."""
    surprise_memory: Width = 0.15
    """Surprise of each multiplier of the memory's closed form."""
    crashes: Share = 0.03
    """Share of configurations that crash."""
    infrastructure_failures: Share = 0.02
    """Share of attempts that fail although the configuration is not at fault."""
    cluster: str = ""
    """The network of the cluster in one line (docs/simulator.md); empty: the two bandwidths of the card's hardware."""

    @field_validator("cluster")
    @classmethod
    def _check_cluster(cls, text: str) -> str:
        return parse_cluster(text).describe() if text else ""

    def describe(self) -> str:
        """Return the seed, and a digest of the other settings if they are not the defaults."""
        changed = self.model_dump_json(exclude_defaults=True, exclude={"seed"})
        digest = hashlib.sha256(changed.encode()).hexdigest()[:6]
        return f"cluster {self.seed}" + (f" with settings {digest}" if changed != "{}" else "")


def _put_on(card: Card, cluster: str) -> Card:
    """Return the card on this network; UserError if it has too few ranks."""
    spec, hardware = parse_cluster(cluster), card.hardware
    if spec.num_ranks < hardware.num_accelerators:
        raise UserError(
            f"the simulated cluster {cluster} has {spec.num_ranks} ranks, but {card.name} needs"
            f" {hardware.num_accelerators}: describe a larger one in the profile's `cluster`"
        )
    return card.model_copy(update={"hardware": hardware.model_copy(update={"cluster": cluster})})


@dataclass(frozen=True)
class SimulatedTrial:
    """Result of one attempt at one configuration; at most one of the failures is set."""

    metrics: dict[str, float]
    """Empty if it failed."""
    needed_gib: float | None = None
    """Memory that it needed, if that is more than a device has."""
    crashed: bool = False
    accident: str | None = None
    """One of `ACCIDENTS`."""


@dataclass(frozen=True, eq=False)
class SimulatedCluster:
    """All configurations of a space on one simulated cluster."""

    settings: SimulatedSettings
    card: Card
    space: Space
    predictor: Predictor

    @classmethod
    def of(cls, settings: SimulatedSettings, card: Card, space: Space) -> SimulatedCluster:
        """Return the cluster; UserError if the card's task has no closed form of its primary metric."""
        if settings.cluster:
            card = _put_on(card, settings.cluster)
        predictor, primary = predictor_of(card, space), TASKS.get(card.task).primary
        if primary not in predictor.forms:
            hardware = card.hardware
            raise UserError(
                f"{card.name} cannot be simulated: its task {card.task!r} has no closed form of {primary}. Its trials"
                f" need {hardware.num_accelerators} x {hardware.accelerator}: choose a cluster profile (`--launcher"
                " slurm-generic`, see `ccl-search launcher list`) or a recording (`--recording FOLDER`)"
            )
        return cls(settings, card, space, predictor)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that a trial reports."""
        return (
            *self._refine(0).forms,
            *([PEAK_MEMORY] if self.predictor.memory and self.predictor.memory.is_measured else []),
        )

    def run(self, row: int, attempt: int) -> SimulatedTrial:
        """Return the result of that attempt at the configuration: always the same."""
        labels = (self.space.config(row).digest, str(attempt))
        chance = self._draw("accident", *labels)
        if chance.random() < self.settings.infrastructure_failures:
            return SimulatedTrial({}, accident=ACCIDENTS[int(chance.integers(len(ACCIDENTS)))])
        rows = np.array([row])
        memory = self.predictor.memory
        needed_gib = None if memory is None else float(self.memory_gib(rows)[0])
        if memory is not None and needed_gib is not None and np.log(needed_gib) > memory.log_limit:
            return SimulatedTrial({}, needed_gib=needed_gib)
        if self.crashes(rows)[0]:
            return SimulatedTrial({}, crashed=True)
        metrics = {}
        for name, form in self._refine(row).forms.items():
            noise = self.settings.noise * float(self._draw("noise", name, *labels).standard_normal())
            metrics[name] = float(self.values(name, rows, form)[0] * np.exp(noise * (form.metric.unit != "fraction")))
        if memory is not None and memory.is_measured and needed_gib is not None:
            metrics[PEAK_MEMORY] = needed_gib
        return SimulatedTrial(metrics)

    def _refine(self, row: int) -> Predictor:
        """Return the predictor with a simulation of this row, which adds metrics; itself if there is none."""
        thetas = {name: form.prior.mean_P for name, form in self.predictor.forms.items()}
        refine = self.predictor.refine
        return self.predictor if refine is None else refine(self.predictor, thetas, np.array([row]))

    def values(self, metric: str, rows: Rows, form: ClosedForm | None = None) -> Array:
        """(n,) the metric of these rows without noise, also of those that fail; `form` is in place of the metric's."""
        form = form or self.predictor.forms[metric]
        log_cost = form.log_cost(rows)(self._multipliers(form, self.settings.surprise_parts))
        for k, knob in enumerate(self.space.knobs if form.metric.unit != "fraction" else ()):
            label = form.like or metric
            effects = np.array([self._effect(label, knob.name, choice) for choice in knob.choices])
            if knob.neutral is not None:  # trials from before the knob was added had its neutral value
                effects -= self._effect(label, knob.name, knob.neutral)
            log_cost = log_cost + effects[self.space.masked_NK[rows, k]]
        return np.asarray(np.exp(form.metric.sign * log_cost))

    def memory_gib(self, rows: Rows) -> Array:
        """(n,) GiB of the fullest device; 0 without a closed form of the memory."""
        memory = self.predictor.memory
        if memory is None:
            return np.zeros(len(rows))
        log_multipliers = self._multipliers(memory.form, self.settings.surprise_memory)
        for name, log_multiplier in self._choose_ways(memory).items():
            log_multipliers[memory.form.multipliers.index(name)] = log_multiplier
        return np.asarray(np.exp(memory.form.log_cost(rows)(log_multipliers)))

    def crashes(self, rows: Rows) -> NDArray[np.bool_]:
        """(n,) whether these rows crash for a reason that nothing predicts."""
        share = self.settings.crashes
        digests = (self.space.config(int(row)).digest for row in rows)
        return np.array([self._draw("crash", digest).random() < share for digest in digests], dtype=bool)

    def succeeds(self, rows: Rows) -> NDArray[np.bool_]:
        """(n,) whether these rows give a figure once the infrastructure works."""
        memory = self.predictor.memory
        fits = np.ones(len(rows), bool) if memory is None else np.log(self.memory_gib(rows)) <= memory.log_limit
        return fits & ~self.crashes(rows)

    def _multipliers(self, form: ClosedForm, width: float) -> Array:
        """(P,) log multipliers: those that the form expects, each with its surprise."""
        drawn = [self._normal("part", form.like or form.metric.name, name) for name in form.multipliers]
        return form.prior.mean_P + width * np.array(drawn)

    def _choose_ways(self, memory: MemoryForm) -> dict[str, float]:
        """Return multiplier -> the log multiplier of the alternative that this cluster's framework uses."""
        chosen = {}
        for name, ways in memory.undeclared.items():
            chances = np.array([1.0 if chance is None else chance for _, chance in ways])
            way = self._draw("way", name).choice(len(ways), p=chances / chances.sum())
            chosen[name] = ways[int(way)][0]
        return chosen

    def _effect(self, metric: str, knob: str, choice: Value) -> float:
        """Log multiplier of one value of one knob."""
        drawn = self._normal("value", metric, canonical_name(knob), format_knob_value(choice))
        return self.settings.surprise_values * drawn

    def _normal(self, *labels: str) -> float:
        return float(self._draw(*labels).standard_normal())

    def _draw(self, *labels: str) -> np.random.Generator:
        """Return random numbers that depend only on the cluster's seed and on these labels."""
        text = "\0".join((str(self.settings.seed), *labels))
        return np.random.default_rng(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]))
