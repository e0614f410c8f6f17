"""Judges a finished trial: its result and traces become an outcome, compared with the other trials."""
