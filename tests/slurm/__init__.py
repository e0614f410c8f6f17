"""A real Slurm for the tests, and trials that end in every way there is."""
