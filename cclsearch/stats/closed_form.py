"""The port between a task and the surrogate: closed forms of metrics, and other knowledge before anything runs.

The surrogate minimizes the log of a cost: the metric itself, or its reciprocal if greater is better. A task without a
closed form of a metric gets a constant with a wide prior instead; a Gaussian process then learns the metric.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from cclsearch.card.model import Card
from cclsearch.card.task import TASKS
from cclsearch.core.metrics import MetricInfo
from cclsearch.space.table import Space
from cclsearch.stats.calibration import CalibrationData, ParametricModel, Posterior, Prior, RowModel, calibrate
from cclsearch.stats.kernel import Array, Features, KernelShape, read_features

Rows = NDArray[np.int64]
MemoryHypothesis = frozenset[tuple[str, float]]
"""Multipliers with the log multiplier of one way each: how a framework uses memory (`MemoryForm.undeclared`)."""

EXACT_ROWS = 5000
"""A larger space gets one variance of the memory for all rows instead of one per row."""
LIKELY = 0.5
"""Probability from which a configuration counts as one that fits into memory."""
CRASH = Prior(np.array([-2.2]), np.array([0.4]), KernelShape(0.8, 1.5, 0.2, 0.6, 0.4), noise=1.0, dof=5.0)
"""Prior of failures that memory does not explain: a latent score, above 0 if a trial crashes; about 5 % crash."""
# Any magnitude; one choice of a knob changes it by some tens of percent.
UNKNOWN = Prior(np.zeros(1), np.array([10.0]), KernelShape(0.3, 1.5, 0.2, 0.2), noise=0.03, dof=4.0)
"""Prior of a metric without a closed form."""


@dataclass(frozen=True, eq=False)
class ClosedForm:
    """One metric in closed form: parts with multipliers, which trials calibrate."""

    metric: MetricInfo
    """Always above 0."""
    multipliers: tuple[str, ...]
    """Names of the multipliers, in the order of every vector of log multipliers."""
    prior: Prior
    log_cost: ParametricModel
    """Rows -> log multipliers -> log of the cost."""
    split: Callable[[Array], Mapping[str, Array]] | None = None
    """Log multipliers -> part -> (N,) its share of every row's cost; the parts add up to the cost."""
    parts_key: str = "parts"
    """Key of the parts in JSON output."""
    heading: str = ""
    """Heading of a column of the metric; its unit if empty."""
    unlearned: Prior | None = None
    """The prior without earlier searches, if `prior` comes from them; trials that contradict them favour it."""
    odds: float = 0.0
    """Log odds of `prior` against `unlearned` before any trial."""
    like: str = ""
    """Metric whose surprises a simulated cluster has here too; empty: surprises of its own."""

    def expect(self, rows: Rows) -> Array:
        """(m,) the metric at these rows, in its unit, by the prior means alone."""
        return np.exp(self.metric.sign * self.log_cost(rows)(self.prior.mean_P))

    def predict(self, size: int) -> tuple[Array, Mapping[str, Array]]:
        """(N,) log of the metric in a space of this size, by the prior means alone, and the parts of its cost."""
        if self.split is None:
            return self.metric.sign * self.log_cost(np.arange(size))(self.prior.mean_P), {}
        parts, cost_N = self.split(self.prior.mean_P), np.zeros(size)
        for part in parts.values():
            cost_N += part
        return self.metric.sign * np.log(cost_N), parts


@dataclass(frozen=True, eq=False)
class MemoryForm:
    """Memory of the fullest device in closed form, and its limit."""

    form: ClosedForm
    """Closed form of `peak_memory_gib`, or of a job's least memory."""
    log_limit: float
    """Log of the GiB that a job can use of one device."""
    softness: float = 0.05
    """Relative width of the transition between configurations that fit and that do not."""
    undeclared: Mapping[str, Sequence[tuple[float, float | None]]] = field(default_factory=dict)
    """Multiplier -> (log multiplier, prior probability) of each alternative behaviour that the space does not declare;
    one of them applies to the whole space. None: density of the form's prior.
    """
    # They are too far apart for one normal prior.
    unidentified: frozenset[str] = frozenset()
    """Entries of `undeclared` that stay hypotheses after a measured peak, which determines the others."""
    is_measured: bool = True
    """Whether a trial's peak is this memory; else trials only show whether a configuration fits."""
    probabilities: Mapping[MemoryHypothesis, float] = field(default_factory=dict)
    """Probability of each combination of the undeclared ways, if earlier searches weighed them."""
    determined: frozenset[str] = frozenset()
    """Entries of `undeclared` that peaks of earlier searches determined: hypotheses of `form.unlearned` alone."""

    def weigh_ways(self, name: str, prior: Prior | None = None) -> tuple[float, ...]:
        """Return the weight of each alternative of an undeclared multiplier before trials, up to a common factor.

        `prior` is the multipliers' prior; by default the form's own.
        """
        at, prior = self.form.multipliers.index(name), prior or self.form.prior
        mean, sd = prior.mean_P[at], prior.sd_P[at]
        return tuple(
            float(np.exp(-0.5 * ((value - mean) / sd) ** 2)) if probability is None else probability
            for value, probability in self.undeclared[name]
        )


@dataclass(frozen=True)
class Derived:
    """A metric that is exactly proportional to a predicted one, or to its reciprocal, in each row."""

    base: str
    """A metric with a closed form, or the primary metric."""
    value: Callable[[Array, Rows], Array]
    """(..., m) values of the base and (m,) rows -> (..., m) values of the metric."""
    formula: str = ""
    """Formula with its source, unless it is evident."""


@dataclass(frozen=True, eq=False)
class Cells:
    """Metrics of n pairs of a row and a load: row i of everything is pair i."""

    features: Features
    models: Mapping[str, ParametricModel]
    """Metric -> its log, by the log multipliers."""
    combine: Callable[[Mapping[str, Array], Rows], Array]
    """Metric with a model -> (..., n) its log at n pairs -> (..., n) log of the primary metric's cost."""


@dataclass(frozen=True, eq=False)
class Loads:
    """Closed forms of trials that measure several loads; the cheapest that keeps the limits counts, else the nearest to
    them.
    """

    metric: str
    """Metric that identifies a load."""
    grid: tuple[float, ...]
    """Loads that every trial is expected to measure."""
    priors: Mapping[str, Prior]
    """Metric -> the prior of its model at one load."""
    # It is wider, since the differences between works are not in it.
    transfer: Mapping[str, Prior]
    """Metric, the primary one too -> the prior for learning from searches of other work."""
    multipliers: tuple[str, ...]
    """Names of the multipliers, as `ClosedForm` has them."""
    build: Callable[[Rows, Array], Cells]
    """(n,) rows and (n,) loads -> the metrics of these pairs."""
    measured_NL: NDArray[np.bool_] | None = None
    """Whether a trial of each row measures each load of the grid; None: all do."""


@dataclass(frozen=True, eq=False)
class Predictor:
    """A task's knowledge of one card over one space before anything runs; every part but the features is optional."""

    features: Features
    forms: Mapping[str, ClosedForm] = field(default_factory=dict)
    """Metric -> its closed form."""
    memory: MemoryForm | None = None
    crash: Prior = CRASH
    derived: Mapping[str, Derived] = field(default_factory=dict)
    loads: Loads | None = None
    """None: a trial measures one load."""
    # The simulation takes too long for all rows.
    refine: Callable[[Predictor, Mapping[str, Array], Rows], Predictor] | None = None
    """This predictor, or one with other priors; metric -> log multipliers; rows, the most promising first -> a
    predictor with a simulation of the first rows; None: there is none.
    """
    unlike: str = ""
    """How the card differs from all measurements behind the constants, such as `on gaudi3`; empty if it does not."""
    num_refined: int = 0
    """Rows that such a simulation has refined."""
    rule_of_thumb: Callable[[Sequence[int]], Rows] | None = None
    """Failed rows -> all rows in the order in which a careful engineer tries them; None: the order of the space."""

    def form(self, metric: MetricInfo) -> ClosedForm:
        """Return the closed form of that metric; a constant with a wide prior if there is none."""
        return self.forms.get(metric.name) or ClosedForm(metric, ("level",), UNKNOWN, constant)


def constant(rows: Rows) -> RowModel:
    """Return a model that is one constant for all rows: only the residual depends on the row."""
    return lambda theta: np.broadcast_to(theta[..., :1], (*theta.shape[:-1], len(rows)))


_PREDICTORS: WeakKeyDictionary[Space, dict[Card, Predictor]] = WeakKeyDictionary()


class _PredictingTask(Protocol):
    """The part of `cclsearch.tasks.base.Task` that predicts."""

    def predictor(self, card: Card, space: Space) -> Predictor | None: ...


def ask_predictor(card: Card, space: Space) -> Predictor | None:
    """Return the task's prediction of the card over this space; None if there is none."""
    return cast(_PredictingTask, TASKS.get(card.task)).predictor(card, space)


def predictor_of(card: Card, space: Space) -> Predictor:
    """Return the task's prediction of the card over this space, built once per space object."""
    known = _PREDICTORS.setdefault(space, {})
    if card not in known:
        known[card] = ask_predictor(card, space) or Predictor(read_features(space))
    return known[card]


@dataclass(frozen=True, eq=False)
class Prediction:
    """The primary metric and the memory of N configurations."""

    form: ClosedForm
    value_N: Array
    """The primary metric, in its unit."""
    parts: Mapping[str, Array]
    """Part -> (N,) share of the cost; they add up to the metric, or to its reciprocal if greater is better."""
    memory_gib_N: Array
    """GiB on the fullest device; NaN without a closed form of it."""
    fits_N: Array
    """Probability that it fits into the device's memory; 1 without a closed form of the memory."""
    memory_parts_gib: Mapping[str, Array]
    """Part -> (N,) GiB; they add up to `memory_gib_N`."""
    memory_label: str = ""
    """Description of the memory figure for people, such as `least memory`."""
    interval_2N: Array | None = None
    """Ends of the 80 % interval of the primary metric; None by the priors alone, NaN for rows without."""
    memory_interval_2N: Array | None = None
    others: Mapping[str, Array] = field(default_factory=dict)
    """Other metric with a closed form -> (3, N) its value and the ends of its interval."""
    measured: frozenset[int] = frozenset()
    """Rows whose figures are measurements."""
    theta_P: Array = field(default_factory=lambda: np.zeros(0))
    """Log multipliers of the most likely closed form; empty by the priors alone."""
    over_N: Array | None = None
    """Log of 1 + the excess over the constraints, infinite for a row without their metrics; None: none are known."""

    def order(self, rows: Rows | None = None) -> Rows:
        """Return these rows, or all: first those that are likely to fit, of these the ones that keep the constraints,
        then the ones that break them least, each group best first."""
        rows = np.arange(len(self.value_N)) if rows is None else rows
        over = np.zeros(len(rows)) if self.over_N is None else np.round(self.over_N[rows], 3)
        order = np.lexsort((self.form.metric.sign * self.value_N[rows], over, self.fits_N[rows] < LIKELY))
        return rows[order]

    def origin(self, row: int) -> str:
        """Return `measured` or `predicted`."""
        return "measured" if row in self.measured else "predicted"

    def describe(self, row: int) -> dict[str, float]:
        """Return the figures of one row, as JSON output and tables name them."""
        described = {self.form.metric.name: float(self.value_N[row])}
        described |= _name_interval(self.form.metric.name, self.interval_2N, row)
        if self.memory_parts_gib:
            described |= {"memory_gib": float(self.memory_gib_N[row]), "fits": float(self.fits_N[row])}
            described |= _name_interval("memory_gib", self.memory_interval_2N, row)
        for name, values_3N in self.others.items():
            described |= {name: float(values_3N[0, row]), **_name_interval(name, values_3N[1:], row)}
        return described


def _name_interval(name: str, interval_2N: Array | None, row: int) -> dict[str, float]:
    if interval_2N is None or np.isnan(interval_2N[0, row]):
        return {}
    return {f"{name}_low": float(interval_2N[0, row]), f"{name}_high": float(interval_2N[1, row])}


def predict_space(card: Card, space: Space, predictor: Predictor | None = None) -> Prediction | None:
    """Return the prediction of every configuration by the priors alone; None if the task has no closed form.

    `predictor` is used in place of the task's own.
    """
    predictor, size = predictor or predictor_of(card, space), len(space)
    form = predictor.forms.get(TASKS.get(card.task).primary)
    if form is None:
        return None
    log_value_N, parts = form.predict(size)
    value_N, memory = np.exp(log_value_N), predictor.memory
    if memory is None:
        return Prediction(form, value_N, parts, np.full(size, np.nan), np.ones(size), {})
    log_gib_N, memory_parts_gib = memory.form.predict(size)
    no_data = CalibrationData.measured(np.zeros(0, dtype=np.int64), np.zeros(0))
    posterior = calibrate(memory.form.log_cost, predictor.features, memory.form.prior, no_data)
    spread = np.sqrt(_variance(posterior, np.arange(size)) + memory.softness**2)
    fits_N = ndtr((memory.log_limit - log_gib_N) / spread)
    return Prediction(form, value_N, parts, np.exp(log_gib_N), fits_N, memory_parts_gib, memory.form.metric.words)


def describe_none_fits(card: Card, prediction: Prediction) -> str:
    """Return a line if no configuration is likely to fit into memory, else nothing."""
    if (prediction.fits_N >= LIKELY).any():
        return ""
    least = float(np.nanmin(prediction.memory_gib_N))
    return (
        f"no configuration is likely to fit into memory: the smallest needs about {least:.3g} GiB of each accelerator,"
        f" which has {card.hardware.memory_gib:g} GiB; take more or larger accelerators"
    )


def _variance(posterior: Posterior, rows: Rows) -> Array:
    """(N,) variance of the log; in a large space, the median over a sample of rows."""
    if len(rows) <= EXACT_ROWS:
        return posterior.marginals(rows)[1]
    sample = rows[:: max(1, len(rows) // 256)]
    return np.full(len(rows), float(np.median(posterior.marginals(sample)[1])))
