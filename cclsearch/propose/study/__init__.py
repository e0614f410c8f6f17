"""Optuna studies over the search space: they ask the surrogate or another sampler, and tell it every result."""
