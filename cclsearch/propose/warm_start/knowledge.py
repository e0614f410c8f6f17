"""Knowledge of earlier searches on the same cluster with the same framework, also for another model.

Measured times teach only the same work. How this framework runs on this cluster outlives a search: the calibrated
multipliers of the closed forms, and an LLM's insights. Both are frozen into `search.yaml`, with their origin.
"""

from __future__ import annotations

from cclsearch.core.values import Config, Model


class EarlierSearch(Model):
    """One earlier search, and its LLM's insights on the framework and the cluster."""

    run_id: str
    workload: str
    trials: int
    """Number of trials from which the multipliers are learned."""
    insights: tuple[str, ...] = ()
    beliefs: dict[str, str] = {}
    """Part of the primary metric -> how it compared with the prediction, as the LLM said last."""


class LearnedPrior(Model):
    """The prior of one multiplier, in log units."""

    mean: float
    sd: float


class LearnedResidual(Model):
    """Deviation of an earlier trial from the closed form of its search, in log units."""

    search: int
    """Position of the search."""
    share: float
    """Variance of the search's own part, relative to the prior's."""
    doublings: float = 0.0
    """Doublings of the number of accelerators, from the next search's to that search's."""
    config: Config
    mean: float
    sd: float


class LearnedWays(Model):
    """Probability that the framework uses memory in these ways (`MemoryForm.undeclared`)."""

    log_multipliers: dict[str, float]
    probability: float


class EarlierKnowledge(Model):
    """Knowledge that a search takes over from earlier ones."""

    searches: tuple[EarlierSearch, ...] = ()
    """The newest first."""
    priors: dict[str, dict[str, LearnedPrior]] = {}
    """Metric with a closed form -> multiplier -> its prior in place of the shipped one."""
    residuals: dict[str, tuple[LearnedResidual, ...]] = {}
    """Metric with a closed form -> residuals of earlier trials."""
    ways: tuple[LearnedWays, ...] = ()
    """Probability of each combination of undeclared ways; empty if trials measured peaks."""
    odds: dict[str, float] = {}
    """Metric -> log odds, before any trial, that these priors hold for the next search rather than the shipped ones."""

    @property
    def has_insights(self) -> bool:
        """Whether an LLM wrote something."""
        return any(search.insights or search.beliefs for search in self.searches)
