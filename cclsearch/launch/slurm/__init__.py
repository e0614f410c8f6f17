"""Slurm: one job a trial through `sbatch`, or one step a trial inside a held allocation."""
