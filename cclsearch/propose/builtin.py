"""Imports the built-in samplers and strategies, so that they register themselves."""

from cclsearch.propose.agent.arbiter import factory  # noqa: F401
from cclsearch.propose.baselines import simple  # noqa: F401
from cclsearch.propose.bayes import pareto_proposer, proposer  # noqa: F401
from cclsearch.propose.study import choose  # noqa: F401
