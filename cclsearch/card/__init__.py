"""Workload cards: what is trained, at which batch, on which hardware, with which framework."""
