"""Nights that nobody watches: several searches, a deadline, and what changed since the last."""
