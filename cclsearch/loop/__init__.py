"""Searches: session, loop and jobs; sweeps and benchmarks of strategies."""
