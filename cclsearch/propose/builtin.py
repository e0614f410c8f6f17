"""Imports the strategies that come with the engine, so that they register themselves."""

from cclsearch.propose.baselines import optuna_baselines, simple  # noqa: F401
from cclsearch.propose.bayes import pareto_proposer, proposer  # noqa: F401
