"""What earlier searches on the same cluster with the same framework leave to the next one, also for another model.

Measured times teach only the same work. What outlives a search is how this framework runs on this cluster: the
calibrated multipliers of the closed forms, and what an LLM wrote about it. Both are frozen into `search.yaml`, with
their origin.
"""

from __future__ import annotations

from cclsearch.core.values import Config, Model


class EarlierSearch(Model):
    """One earlier search, and what its LLM wrote about the framework and the cluster."""

    run_id: str
    workload: str
    trials: int
    """Trials from which the multipliers are learned."""
    insights: tuple[str, ...] = ()
    beliefs: dict[str, str] = {}
    """Part of the primary metric -> how it compared with the prediction, as the LLM said last."""


class LearnedPrior(Model):
    """The prior of one multiplier, in log units."""

    mean: float
    sd: float


class LearnedResidual(Model):
    """How far an earlier trial was from the closed form of its search, in log units."""

    search: int
    """Which search, by its position."""
    share: float
    """Variance of what that search has for itself, relative to the prior's."""
    doublings: float = 0.0
    """Of the number of accelerators, from the next search's to that one's."""
    config: Config
    mean: float
    sd: float


class LearnedWays(Model):
    """How probable it is that the framework uses memory in these ways (`MemoryForm.undeclared`)."""

    log_multipliers: dict[str, float]
    probability: float


class EarlierKnowledge(Model):
    """What a search takes over from earlier ones."""

    searches: tuple[EarlierSearch, ...] = ()
    """The newest first."""
    priors: dict[str, dict[str, LearnedPrior]] = {}
    """Metric with a closed form -> multiplier -> its prior in place of the shipped one."""
    residuals: dict[str, tuple[LearnedResidual, ...]] = {}
    """Metric with a closed form -> what earlier trials show of its residual."""
    ways: tuple[LearnedWays, ...] = ()
    """How probable each combination of ways is that the space does not declare; none if trials measured peaks."""
    odds: dict[str, float] = {}
    """Metric -> log odds, before any trial, that these priors hold for the next search rather than the shipped ones."""

    @property
    def has_insights(self) -> bool:
        """Whether an LLM wrote something."""
        return any(search.insights or search.beliefs for search in self.searches)
