"""Experiment trackers as views of the ledger: `--log-to mlflow|tensorboard|wandb`, or a tracker of a plugin.

`base.py` reads what the user typed and follows the ledger, and the trackers write. None of them changes a
search: a tracker that is missing, slow or broken costs one line.
"""
