"""Runs for other tools: tables, Optuna studies, CCL-Bench cards."""
