"""Export of runs to other tools: tables, Optuna studies, CCL-Bench cards."""
