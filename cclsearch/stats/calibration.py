"""Bayesian calibration of a closed form: log multipliers of its parts under Gaussian priors, plus a Gaussian process
over what the parts cannot express.

The closed form is linear enough in its log multipliers for Gauss-Newton steps, so parts and residual are solved as one
Gaussian model (Rasmussen and Williams 2006, sections 2.7 and 3.4). Timings are told with a Student-t likelihood, by
iterated reweighting (a cluster's hiccups are slow outliers and must not teach); what only fitted or did not fit enters
as a soft threshold, by moment matching (expectation propagation, Minka 2001).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from cclsearch.stats.kernel import Array, Features, KernelShape, kernel, kernel_diagonal

RowModel = Callable[[Array], Array]
"""(P,) log multipliers -> (n,) log of the closed form at some rows; (S, P) -> (S, n)."""
ParametricModel = Callable[[NDArray[np.int64]], RowModel]
"""Rows -> the curve at these rows."""

_STEP = 1e-3
_ROUNDS = 8
_LARGEST_STEP = 1.0
_JITTER = 1e-8


@dataclass(frozen=True, eq=False)
class Prior:
    """What is believed before anything was measured."""

    mean_P: Array
    sd_P: Array
    shape: KernelShape
    noise: float
    """Relative standard deviation of a repeated measurement."""
    dof: float
    """Degrees of freedom of the Student-t noise."""


@dataclass(frozen=True, eq=False)
class CalibrationData:
    """What was seen at n rows: `value_n` where known (log units); elsewhere only on which side of `limit` it lies."""

    rows_n: NDArray[np.int64]
    value_n: Array
    """NaN where only the side is known."""
    censoring_n: NDArray[np.int8]
    """-1 below the limit, +1 above, 0 where the value is known."""
    label_noise_n: Array
    """Probability that the side says nothing (a crash taken for out of memory)."""
    limit: float = 0.0
    softness: float = 0.03
    one_sided: bool = False
    """Whether only values above what was expected may be outliers."""
    noise_n: Array | None = None
    """Relative noise by observation; None for the prior's."""


@dataclass(frozen=True, eq=False)
class Posterior:
    """The calibrated model. Moments at any rows come from `marginals`, whole models from `ensemble`."""

    model: ParametricModel
    prior: Prior
    features: Features
    rows_n: NDArray[np.int64]
    theta_P: Array
    """Log multipliers after calibration."""
    alpha_n: Array
    inverse_nn: Array
    jacobian_nP: Array
    value_n: Array
    residual_inverse_nn: Array
    """Inverse covariance of residual and noise, the multipliers given."""
    weight_n: Array
    """Trust in each observation: 1 is full, near 0 an outlier."""
    log_evidence: float
    """Of the measured values, but for a constant that all models of the same observations share."""

    def marginals(self, rows: NDArray[np.int64]) -> tuple[Array, Array]:
        """(m,) means and (m,) variances at these rows."""
        mean, jacobian = _linearize(self.model(rows), self.theta_P)
        here = self.features.take(rows)
        own = (jacobian**2) @ self.prior.sd_P**2 + kernel_diagonal(here, self.prior.shape)
        if len(self.rows_n) == 0:
            return mean, own
        residual = kernel(here, self.features.take(self.rows_n), self.prior.shape)
        cross = residual + (jacobian * self.prior.sd_P**2) @ self.jacobian_nP.T
        known = np.sum((cross @ self.inverse_nn) * cross, axis=1)
        return mean + residual @ self.alpha_n, np.maximum(own - known, 1e-10)

    def ensemble(self, rows: NDArray[np.int64], normal_SP: Array) -> tuple[Array, Array]:
        """(S, m) means at these rows of S plausible models, and the (m,) variance that each leaves to the residual.

        `normal_SP` are standard normal draws. Unlike `marginals`, each model is the closed form itself and not its
        tangent: a step is never faster than its arithmetic, however uncertain its latencies.
        """
        samples = self.theta_P + normal_SP @ self._theta_root.T
        here = self.features.take(rows)
        left = kernel_diagonal(here, self.prior.shape)
        mean_Sm = self.model(rows)(samples)
        if len(self.rows_n) == 0:
            return mean_Sm, left
        cross = kernel(here, self.features.take(self.rows_n), self.prior.shape)
        error_Sn = self.value_n - self.model(self.rows_n)(samples)
        known = np.sum((cross @ self.residual_inverse_nn) * cross, axis=1)
        return mean_Sm + error_Sn @ self.residual_inverse_nn @ cross.T, np.maximum(left - known, 1e-10)

    @cached_property
    def _theta_root(self) -> Array:
        """(P, P) root of the covariance of the log multipliers after calibration."""
        covariance = np.diag(self.prior.sd_P**2)
        if len(self.rows_n):
            scaled = self.jacobian_nP * self.prior.sd_P**2
            covariance = covariance - scaled.T @ self.inverse_nn @ scaled
        values, vectors = np.linalg.eigh(covariance)
        return np.asarray(vectors * np.sqrt(np.maximum(values, 0.0)))

    def multiplier_sd(self) -> Array:
        """(P,) standard deviation of the log multipliers after calibration."""
        if len(self.rows_n) == 0:
            return self.prior.sd_P
        scaled = self.jacobian_nP * self.prior.sd_P**2
        shrink = np.einsum("np,nm,mp->p", scaled, self.inverse_nn, scaled)
        return np.asarray(np.sqrt(np.maximum(self.prior.sd_P**2 - shrink, 0.0)))


def calibrate(model: ParametricModel, features: Features, prior: Prior, evidence: CalibrationData) -> Posterior:
    """The posterior given what was seen."""
    theta = prior.mean_P.copy()
    n = len(evidence.rows_n)
    if n == 0:
        nothing, square = np.zeros(0), np.zeros((0, 0))
        return Posterior(
            model=model,
            prior=prior,
            features=features,
            rows_n=evidence.rows_n,
            theta_P=theta,
            alpha_n=nothing,
            inverse_nn=square,
            jacobian_nP=np.zeros((0, len(theta))),
            value_n=nothing,
            residual_inverse_nn=square,
            weight_n=nothing,
            log_evidence=0.0,
        )
    here = features.take(evidence.rows_n)
    residual_nn = kernel(here, here, prior.shape)
    curve = model(evidence.rows_n)
    sites = _Sites(evidence, prior)
    variance_P = prior.sd_P**2
    for _ in range(_ROUNDS):
        base, jacobian = _linearize(curve, theta)
        covariance = (jacobian * variance_P) @ jacobian.T + residual_nn
        prior_mean = base + jacobian @ (prior.mean_P - theta)
        inverse = np.linalg.inv(covariance + np.diag(sites.variance_n + _JITTER))
        alpha = inverse @ (sites.target_n - prior_mean)
        step = prior.mean_P + variance_P * (jacobian.T @ alpha) - theta
        theta = theta + step * min(1.0, _LARGEST_STEP / (np.abs(step).max() + 1e-12))
        mean = prior_mean + covariance @ alpha
        variance = np.diag(covariance) - np.einsum("ij,jk,ki->i", covariance, inverse, covariance)
        sites.update(mean, np.maximum(variance, 1e-10))
    residual_inverse = np.linalg.inv(residual_nn + np.diag(sites.variance_n + _JITTER))
    sign, log_det = np.linalg.slogdet(covariance + np.diag(sites.variance_n + _JITTER))
    log_evidence = -0.5 * float((sites.target_n - prior_mean) @ alpha) - 0.5 * float(sign * log_det)
    # a Student-t is a normal whose precision is drawn from a gamma law: distrusting an observation costs its density
    log_evidence += 0.5 * prior.dof * float(np.sum(np.log(sites.weight_n) - sites.weight_n + 1))
    return Posterior(
        model=model,
        prior=prior,
        features=features,
        rows_n=evidence.rows_n,
        theta_P=theta,
        alpha_n=alpha,
        inverse_nn=np.asarray(inverse, dtype=np.float64),
        jacobian_nP=jacobian,
        value_n=sites.target_n,
        residual_inverse_nn=np.asarray(residual_inverse, dtype=np.float64),
        weight_n=sites.weight_n,
        log_evidence=log_evidence,
    )


class _Sites:
    """Gaussian stand-ins for the likelihood of each observation: a target and a variance."""

    def __init__(self, evidence: CalibrationData, prior: Prior) -> None:
        self._evidence = evidence
        self._dof = prior.dof
        n = len(evidence.rows_n)
        noise = np.full(n, prior.noise) if evidence.noise_n is None else evidence.noise_n
        self._noise2 = noise**2
        self._known = evidence.censoring_n == 0
        self.weight_n = np.ones(n)
        self.target_n = np.where(self._known, evidence.value_n, evidence.limit)
        self.variance_n = np.where(self._known, self._noise2, 1e4)

    def update(self, mean_n: Array, variance_n: Array) -> None:
        """Re-weigh measured values by their Student-t weight; move thresholds to match the truncated moments."""
        # a cluster may hold a run up but never speeds one up: only what came slower than expected is doubted
        error = self.target_n - mean_n
        slower = np.maximum(error, 0.0) if self._evidence.one_sided else np.abs(error)
        error2 = slower**2 + np.where(slower > 0, variance_n, 0.0)
        weight = (self._dof + 1) / (self._dof + error2 / self._noise2)
        self.weight_n = np.where(self._known, 0.5 * self.weight_n + 0.5 * np.minimum(weight, 1.0), self.weight_n)
        known_variance = self._noise2 / self.weight_n
        for i in np.flatnonzero(~self._known):
            self._match_threshold(int(i), float(mean_n[i]), float(variance_n[i]))
        self.variance_n = np.where(self._known, known_variance, self.variance_n)

    def _match_threshold(self, i: int, mean: float, variance: float) -> None:
        evidence = self._evidence
        precision = 1 / variance - 1 / self.variance_n[i]
        if precision <= 1e-8:
            return
        cavity_variance = 1 / precision
        cavity_mean = cavity_variance * (mean / variance - self.target_n[i] / self.variance_n[i])
        spread = np.sqrt(cavity_variance + evidence.softness**2)
        side, doubt = float(evidence.censoring_n[i]), float(evidence.label_noise_n[i])
        z = side * (cavity_mean - evidence.limit) / spread
        inside = float(ndtr(z))
        density = float(np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi))
        total = doubt + (1 - doubt) * inside
        slope = (1 - doubt) * density / max(total, 1e-12)
        new_mean = cavity_mean + side * cavity_variance / spread * slope
        curvature = slope * (z + slope)
        new_variance = cavity_variance * (1 - cavity_variance / spread**2 * curvature)
        site_precision = 1 / max(new_variance, 1e-10) - precision
        if site_precision <= 1e-4:
            site_precision = 1e-4
            new_variance = 1 / (precision + site_precision)
        target = (new_mean / new_variance - cavity_mean * precision) / site_precision
        old_precision = 1 / self.variance_n[i]
        mixed = 0.5 * old_precision + 0.5 * site_precision
        self.target_n[i] = (0.5 * old_precision * self.target_n[i] + 0.5 * site_precision * target) / mixed
        self.variance_n[i] = 1 / mixed


def _linearize(curve: RowModel, theta_P: Array) -> tuple[Array, Array]:
    """(n,) values and (n, P) slopes of a curve."""
    size = len(theta_P)
    values = curve(np.vstack([theta_P, theta_P + _STEP * np.eye(size)]))
    return values[0], (values[1:] - values[0]).T / _STEP
