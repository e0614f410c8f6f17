"""Imports the built-in strategies, so that they register themselves."""

from cclsearch.propose.baselines import optuna_baselines, simple  # noqa: F401
from cclsearch.propose.bayes import pareto_proposer, proposer  # noqa: F401
