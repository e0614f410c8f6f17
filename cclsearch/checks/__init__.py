"""Checks of this machine and of policy programs."""
