"""The trackers that come with the package; each imports its own package when it begins to write."""

from cclsearch.tracking import mlflow_tracker, tensorboard_tracker, wandb_tracker

__all__ = ["mlflow_tracker", "tensorboard_tracker", "wandb_tracker"]
