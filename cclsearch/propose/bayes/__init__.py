"""Bayesian optimization over the search space: a surrogate on top of the closed-form prediction."""
