"""Unattended nights: several searches, a deadline, and a comparison with earlier nights."""
