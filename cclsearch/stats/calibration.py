"""Bayesian calibration of a closed form: Gaussian priors on the log multipliers of its parts, and a Gaussian process on
the residual that the parts cannot express.

The closed form is close enough to linear in its log multipliers for Gauss-Newton steps, so parts and residual are
solved as one Gaussian model (Rasmussen and Williams 2006, sections 2.7 and 3.4) by Cholesky factors (algorithm 2.1).
Times have a Student-t likelihood, by iterated reweighting: a cluster's hiccups are slow outliers and must not distort
the fit. Censored observations (it fitted, or did not) are soft thresholds, by moment matching (expectation
propagation, Minka 2001).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import LinAlgError, cho_solve, cholesky, solve_triangular
from scipy.special import ndtr, softmax

from cclsearch.stats.kernel import Array, Features, KernelShape, kernel, kernel_diagonal

RowModel = Callable[[Array], Array]
"""(P,) log multipliers -> (n,) log of the closed form at fixed rows; (S, P) -> (S, n)."""
ParametricModel = Callable[[NDArray[np.int64]], RowModel]
"""Rows -> the closed form at these rows."""

# The error of a forward difference is about as large as its step, far below the noise of a measurement (1e-2).
_DERIVATIVE_STEP = 1e-3
"""Step of a derivative, in log units."""
# Later rounds change no multiplier by more than its standard deviation.
_NUM_ROUNDS = 8
"""Rounds of linearizing and reweighting."""
# A factor of e: the linearization is valid no further.
MAX_STEP = 1.0
"""Log units by which a multiplier may change in one round."""
# The next one is used if rounding leaves a matrix with no factor; variances of the noise are above.
_JITTERS = (1e-8, 1e-6, 1e-4)
"""Additions to a diagonal."""
# Rounding may leave a variance of 0 or less at a row that was measured often.
MIN_VARIANCE = 1e-10
"""Smallest variance of a prediction."""
# 100 log units, so it carries no information.
_UNINFORMED_VARIANCE = 1e4
"""Variance of a censored observation before its first update."""
MIN_PRECISION = 1e-4
"""Smallest precision of a censored observation: the information of `_UNINFORMED_VARIANCE`."""
MIN_CAVITY_PRECISION = 1e-8
"""Precision below which an observation has all the information, and no cavity to update from."""
# Without it, two updates may alternate.
_DAMPING = 0.5
"""Part taken of each update of expectation propagation and of the weights."""
MAX_TRUSTED_NOISE = 2.0
"""Noise of an observation, relative to the prior's, up to which its error tests the model's predictions."""
_TINY = 1e-12
"""Keeps a quotient finite."""


@dataclass(frozen=True, eq=False)
class KnownResidual:
    """The residual in other work: m noisy observations of it, in log units."""

    features: Features
    """Features in the coordinates of the model's features."""
    value_m: Array
    variance_m: Array


@dataclass(frozen=True, eq=False)
class Prior:
    """The model before any measurement."""

    mean_P: Array
    sd_P: Array
    shape: KernelShape
    noise: float
    """Relative standard deviation between repeats of a measurement."""
    dof: float
    """Degrees of freedom of the Student-t noise."""
    known: KnownResidual | None = None

    def residual_covariance(self, left: Features, right: Features) -> Array:
        """(n, m) covariance of the residual between two sets of rows, given other work's residuals."""
        found = kernel(left, right, self.shape)
        return found if self.known is None else found - self._explain(left).T @ self._explain(right)

    def residual_variance(self, rows: Features) -> Array:
        """(n,) variance of the residual, given other work's residuals."""
        found = kernel_diagonal(rows, self.shape)
        return found if self.known is None else found - np.sum(self._explain(rows) ** 2, axis=0)

    def expect_residual(self, rows: Features) -> Array:
        """(n,) expected residual, given other work's residuals."""
        if self.known is None:
            return np.zeros(len(rows))
        return np.asarray(_solve(self._factor_mm, self.known.value_m) @ self._explain(rows))

    def _explain(self, rows: Features) -> Array:
        """(m, n) covariance with other work's residuals, times the inverse of its factor."""
        assert self.known is not None
        return _solve(self._factor_mm, kernel(self.known.features, rows, self.shape))

    @cached_property
    def _factor_mm(self) -> Array:
        assert self.known is not None
        return _factorize(kernel(self.known.features, self.known.features, self.shape), self.known.variance_m)


@dataclass(frozen=True, eq=False)
class CalibrationData:
    """Observations at n rows: `value_n` if measured (log units), else only whether it is below or above `limit`."""

    rows_n: NDArray[np.int64]
    value_n: Array
    """NaN for a censored observation."""
    censoring_n: NDArray[np.int8]
    """-1 censored, below the limit; +1 censored, above it; 0 measured."""
    label_noise_n: Array
    """Probability that a censored observation carries no information (a crash mistaken for out of memory)."""
    limit: float = 0.0
    softness: float = 0.03
    """Standard deviation of the limit, in log units."""
    one_sided: bool = False
    """Whether only values above the expected one can be outliers."""
    noise_n: Array | None = None
    """Relative noise of each observation; None: the prior's."""

    @classmethod
    def measured(
        cls, rows_n: NDArray[np.int64], value_n: Array, *, one_sided: bool = False, noise_n: Array | None = None
    ) -> CalibrationData:
        """Return data in which every value is measured."""
        zeros = np.zeros(len(rows_n))
        return cls(rows_n, value_n, zeros.astype(np.int8), zeros, one_sided=one_sided, noise_n=noise_n)


@dataclass(frozen=True, eq=False)
class Posterior:
    """The calibrated model: `marginals` gives moments at any rows, `ensemble` draws whole models."""

    model: ParametricModel
    prior: Prior
    features: Features
    rows_n: NDArray[np.int64]
    theta_P: Array
    """Posterior mean of the log multipliers."""
    alpha_n: Array
    factor_nn: Array
    """Lower Cholesky factor of the covariance of the observations."""
    jacobian_nP: Array
    value_n: Array
    residual_factor_nn: Array
    """Lower Cholesky factor of the covariance of residual plus noise, given the multipliers."""
    weight_n: Array
    """Student-t weight of each observation: 1 full weight, near 0 an outlier."""
    variance_n: Array
    """Variance of the noise of each observation, with its weight; for a censored one, of its approximation."""
    noise_n: Array
    """Standard deviation of the noise of each observation before its weight; NaN for a censored one."""
    log_evidence: float
    """Log evidence of the observations, up to a constant shared by all models of the same observations."""

    def marginals(self, rows: NDArray[np.int64]) -> tuple[Array, Array]:
        """(m,) means and (m,) variances at these rows."""
        mean, jacobian = _linearize(self.model(rows), self.theta_P)
        here = self.features.take(rows)
        own = (jacobian**2) @ self.prior.sd_P**2 + self.prior.residual_variance(here)
        residual = self.prior.residual_covariance(here, self.features.take(self.rows_n))
        cross = residual + (jacobian * self.prior.sd_P**2) @ self.jacobian_nP.T
        known = np.sum(_solve(self.factor_nn, cross.T) ** 2, axis=0)
        mean = mean + self.prior.expect_residual(here) + residual @ self.alpha_n
        return mean, np.maximum(own - known, MIN_VARIANCE)

    def ensemble(self, rows: NDArray[np.int64], normal_SP: Array) -> tuple[Array, Array]:
        """(S, m) means at these rows of S models drawn from the posterior, and (m,) variance of each model's residual.

        `normal_SP` are standard normal draws. Unlike `marginals`, each model is the closed form itself and not its
        linearization: a step is never faster than its arithmetic, however uncertain its latencies.
        """
        samples = self.theta_P + normal_SP @ self._theta_root.T
        here, seen = self.features.take(rows), self.features.take(self.rows_n)
        left = self.prior.residual_variance(here)
        mean_Sm = self.model(rows)(samples) + self.prior.expect_residual(here)
        cross = self.prior.residual_covariance(here, seen)
        error_Sn = self.value_n - self.model(self.rows_n)(samples) - self.prior.expect_residual(seen)
        half_nm = _solve(self.residual_factor_nn, cross.T)
        mean_Sm = mean_Sm + _solve(self.residual_factor_nn, error_Sn.T).T @ half_nm
        return mean_Sm, np.maximum(left - np.sum(half_nm**2, axis=0), MIN_VARIANCE)

    def leave_one_out_error(self) -> Array:
        """(n,) value minus its prediction from the others (Rasmussen and Williams 2006, equation 5.12)."""
        inverse_root = _solve(self.factor_nn, np.eye(len(self.factor_nn)))
        return np.asarray(self.alpha_n / np.maximum(np.sum(inverse_root**2, axis=0), _TINY))

    @cached_property
    def spread(self) -> float:
        """True errors over the predicted standard deviations, by leave-one-out errors: 1 without any.

        A Student-t with `prior.dof` degrees of freedom is a normal whose variance has a scaled inverse chi-squared
        prior that counts as so many observations; this is its update by the squared standardized errors (Gelman et al.,
        Bayesian Data Analysis, section 2.6) of the observations with little noise: others do not test the model.
        """
        inverse_root = _solve(self.factor_nn, np.eye(len(self.factor_nn)))
        error_n = self.alpha_n / np.sqrt(np.maximum(np.sum(inverse_root**2, axis=0), _TINY))
        trusted = error_n[np.nan_to_num(self.noise_n, nan=np.inf) <= MAX_TRUSTED_NOISE * self.prior.noise]
        total = self.prior.dof + float(np.sum(trusted**2))
        return float(np.sqrt(total / (self.prior.dof + len(trusted))))

    @cached_property
    def _theta_root(self) -> Array:
        """(P, P) square root of the posterior covariance of the log multipliers."""
        # The symmetric root is unique. Eigenvectors alone change with rounding, and so with the processor, in sign, and
        # entirely if variances are equal; the drawn models would change with them.
        half_nP = _solve(self.factor_nn, self.jacobian_nP * self.prior.sd_P**2)
        covariance = np.diag(self.prior.sd_P**2) - half_nP.T @ half_nP
        values, vectors = np.linalg.eigh(covariance)
        return np.asarray((vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T)

    def multiplier_sd(self) -> Array:
        """(P,) posterior standard deviation of the log multipliers."""
        shrink = np.sum(_solve(self.factor_nn, self.jacobian_nP * self.prior.sd_P**2) ** 2, axis=0)
        return np.asarray(np.sqrt(np.maximum(self.prior.sd_P**2 - shrink, 0.0)))

    def model_variance(self) -> Array:
        """(n,) posterior variance of the model at the observations that its multipliers leave, the residual aside."""
        scaled_nP = self.jacobian_nP * self.prior.sd_P**2
        known = np.sum(_solve(self.factor_nn, self.jacobian_nP @ scaled_nP.T) ** 2, axis=0)
        return np.asarray(np.maximum(np.sum(self.jacobian_nP * scaled_nP, axis=1) - known, 0.0))


def weigh_hypotheses(
    fits: Sequence[Posterior], scores: Sequence[float], least: float
) -> tuple[tuple[Posterior, ...], Array]:
    """Return the hypotheses whose weight is at least `least`, from these log probabilities up to a constant."""
    weight_h = softmax(scores)
    kept = np.flatnonzero(weight_h >= least)
    return tuple(fits[h] for h in kept.tolist()), weight_h[kept] / weight_h[kept].sum()


def calibrate(model: ParametricModel, features: Features, prior: Prior, evidence: CalibrationData) -> Posterior:
    """Return the posterior, given the observations."""
    theta = prior.mean_P.copy()
    here = features.take(evidence.rows_n)
    residual_nn, residual_n = prior.residual_covariance(here, here), prior.expect_residual(here)
    row_model = model(evidence.rows_n)
    sites = _Sites(evidence, prior)
    variance_P = prior.sd_P**2
    for _ in range(_NUM_ROUNDS):
        base, jacobian = _linearize(row_model, theta)
        covariance = (jacobian * variance_P) @ jacobian.T + residual_nn
        prior_mean = base + jacobian @ (prior.mean_P - theta) + residual_n
        factor = _factorize(covariance, sites.variance_n)
        alpha = cho_solve((factor, True), sites.target_n - prior_mean, check_finite=False)
        step = prior.mean_P + variance_P * (jacobian.T @ alpha) - theta
        theta = theta + step * min(1.0, MAX_STEP / (np.abs(step).max() + _TINY))
        mean = prior_mean + covariance @ alpha
        variance = np.diag(covariance) - np.sum(_solve(factor, covariance) ** 2, axis=0)
        sites.update(mean, np.maximum(variance, MIN_VARIANCE))
    last, error_n = _factorize(covariance, sites.variance_n), sites.target_n - prior_mean
    half_log_det = float(np.sum(np.log(np.diag(last))))
    # a Student-t is a normal whose precision has a gamma distribution: a low weight costs that density
    log_evidence = 0.5 * prior.dof * float(np.sum(np.log(sites.weight_n) - sites.weight_n + 1)) - half_log_det
    if evidence.censoring_n.any():
        weighed = cho_solve((last, True), error_n, check_finite=False)
        variance = np.diag(covariance) - np.sum(_solve(last, covariance) ** 2, axis=0)
        log_evidence += sites.log_scale(prior_mean + covariance @ weighed, np.maximum(variance, MIN_VARIANCE))
    else:
        weighed = alpha
    log_evidence -= 0.5 * float(error_n @ weighed)
    return Posterior(
        model=model,
        prior=prior,
        features=features,
        rows_n=evidence.rows_n,
        theta_P=theta,
        alpha_n=alpha,
        factor_nn=factor,
        jacobian_nP=jacobian,
        value_n=sites.target_n,
        residual_factor_nn=_factorize(residual_nn, sites.variance_n),
        weight_n=sites.weight_n,
        variance_n=sites.variance_n,
        noise_n=sites.noise_n,
        log_evidence=log_evidence,
    )


def _factorize(covariance_nn: Array, variance_n: Array) -> Array:
    """Return the lower Cholesky factor of covariance plus noise; raises LinAlgError if it has none."""
    for jitter in _JITTERS:
        try:
            return np.asarray(cholesky(covariance_nn + np.diag(variance_n + jitter), lower=True, check_finite=False))
        except LinAlgError:
            if jitter == _JITTERS[-1]:
                raise
    raise AssertionError("no jitter")


def _solve(factor_nn: Array, right_nm: Array) -> Array:
    """(n, m) the lower factor's inverse times the right side."""
    return np.asarray(solve_triangular(factor_nn, right_nm, lower=True, check_finite=False))


class _Sites:
    """Gaussian approximations of each observation's likelihood: a target and a variance."""

    def __init__(self, evidence: CalibrationData, prior: Prior) -> None:
        self._evidence = evidence
        self._dof = prior.dof
        n = len(evidence.rows_n)
        noise = np.full(n, prior.noise) if evidence.noise_n is None else evidence.noise_n
        self._noise2 = noise**2
        self._measured = evidence.censoring_n == 0
        self.noise_n = np.where(self._measured, noise, np.nan)
        self.weight_n = np.ones(n)
        self.target_n = np.where(self._measured, evidence.value_n, evidence.limit)
        self.variance_n = np.where(self._measured, self._noise2, _UNINFORMED_VARIANCE)

    def update(self, mean_n: Array, variance_n: Array) -> None:
        """Reweight measured values by their Student-t weight; match the truncated moments of censored ones."""
        # a cluster can slow a run down but not speed it up: with `one_sided`, only values above the mean lose weight
        error = self.target_n - mean_n
        excess = np.maximum(error, 0.0) if self._evidence.one_sided else np.abs(error)
        error2 = excess**2 + np.where(excess > 0, variance_n, 0.0)
        weight = (self._dof + 1) / (self._dof + error2 / self._noise2)
        self.weight_n = np.where(self._measured, _damp(self.weight_n, np.minimum(weight, 1.0)), self.weight_n)
        measured_variance = self._noise2 / self.weight_n
        self.variance_n = np.where(self._measured, measured_variance, self.variance_n)
        if not self._measured.all():
            self._match_thresholds(np.flatnonzero(~self._measured), mean_n, variance_n)

    def log_scale(self, mean_n: Array, variance_n: Array) -> float:
        """Return the log of the factors that make the approximations of the censored observations as probable as these
        are, given the posterior moments at them (Rasmussen and Williams 2006, equation 3.65).
        """
        at, precision, cavity_mean, z = self._find_cavities(np.flatnonzero(~self._measured), mean_n, variance_n)
        label_noise = self._evidence.label_noise_n[at]
        scale = (label_noise + (1 - label_noise) * ndtr(z)) * np.sqrt(1 / precision + self.variance_n[at])
        gap2 = (cavity_mean - self.target_n[at]) ** 2 / (1 / precision + self.variance_n[at])
        return float(np.sum(np.log(np.maximum(scale, _TINY)) + 0.5 * gap2))

    def _find_cavities(
        self, censored: NDArray[np.int64], mean_n: Array, variance_n: Array
    ) -> tuple[NDArray[np.int64], Array, Array, Array]:
        """Return the censored observations that have a cavity (the other observations' belief): with its precision, its
        mean, and how many standard deviations it is on the observed side.
        """
        precision = 1 / variance_n[censored] - 1 / self.variance_n[censored]
        at, precision = censored[precision > MIN_CAVITY_PRECISION], precision[precision > MIN_CAVITY_PRECISION]
        cavity_mean = (mean_n[at] / variance_n[at] - self.target_n[at] / self.variance_n[at]) / precision
        spread = np.sqrt(1 / precision + self._evidence.softness**2)
        side = self._evidence.censoring_n[at].astype(np.float64)
        return at, precision, cavity_mean, side * (cavity_mean - self._evidence.limit) / spread

    def _match_thresholds(self, censored: NDArray[np.int64], mean_n: Array, variance_n: Array) -> None:
        """Match the truncated moments of these censored observations; all of them at once, as none uses another's."""
        evidence = self._evidence
        at, precision, cavity_mean, z = self._find_cavities(censored, mean_n, variance_n)
        old_precision, cavity_variance = 1 / self.variance_n[at], 1 / precision
        spread = np.sqrt(cavity_variance + evidence.softness**2)
        side, label_noise = evidence.censoring_n[at].astype(np.float64), evidence.label_noise_n[at]
        density = np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi)
        total = label_noise + (1 - label_noise) * ndtr(z)
        slope = (1 - label_noise) * density / np.maximum(total, _TINY)
        new_mean = cavity_mean + side * cavity_variance / spread * slope
        curvature = slope * (z + slope)
        new_variance = cavity_variance * (1 - cavity_variance / spread**2 * curvature)
        site_precision = np.maximum(1 / np.maximum(new_variance, MIN_VARIANCE) - precision, MIN_PRECISION)
        new_variance = np.where(site_precision == MIN_PRECISION, 1 / (precision + site_precision), new_variance)
        target = (new_mean / new_variance - cavity_mean * precision) / site_precision
        mixed = _damp(old_precision, site_precision)
        self.target_n[at] = _damp(old_precision * self.target_n[at], site_precision * target) / mixed
        self.variance_n[at] = 1 / mixed


def _damp(old: Array, new: Array) -> Array:
    return np.asarray((1 - _DAMPING) * old + _DAMPING * new)


def _linearize(row_model: RowModel, theta_P: Array) -> tuple[Array, Array]:
    """Return (n,) values and (n, P) derivatives of the model at these log multipliers."""
    size = len(theta_P)
    values = row_model(np.vstack([theta_P, theta_P + _DERIVATIVE_STEP * np.eye(size)]))
    return values[0], (values[1:] - values[0]).T / _DERIVATIVE_STEP
