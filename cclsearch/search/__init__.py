"""Searches: session, loop, jobs, evaluation of finished trials; sweeps and benchmarks of strategies."""
