"""Evaluation of finished trials: metrics, objectives and the admission gate."""
