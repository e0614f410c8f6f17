"""Optuna studies over the search space: the surrogate or another sampler is asked, and is told every result."""
