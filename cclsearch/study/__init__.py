"""The Optuna study of a run: a view of its ledger in `study.log`, for optuna-dashboard and for Optuna itself."""
