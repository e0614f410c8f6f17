"""Slurm: one `sbatch` job per trial, or one step per trial inside an allocation that the user holds."""
