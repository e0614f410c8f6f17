"""Strategies to compare with: random, grid, heuristic, and Optuna's own samplers."""
