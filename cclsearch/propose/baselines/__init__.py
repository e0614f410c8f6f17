"""Strategies to compare with: random, heuristic and Optuna's own samplers."""
