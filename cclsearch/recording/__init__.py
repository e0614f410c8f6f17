"""Recorded landscapes: measured configurations that a search can replay instead of running jobs."""
