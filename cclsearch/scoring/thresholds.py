"""The thresholds of the admission rules that apply to every task."""

from __future__ import annotations

from pydantic import Field

from cclsearch.core.values import Model


class Thresholds(Model):
    """Limits that a run must meet to be ranked."""

    max_foreign_share: float = Field(default=0.15, gt=0)
    """Cores that other processes take from the ranks divided by cores that the ranks use, on accelerators."""
    max_foreign_share_cpu: float = Field(default=0.25, gt=0)
    """The same if the ranks compute on those cores; retries and the spread catch the rest."""
    max_clock_difference_s: float = Field(default=600.0, ge=0)
    """Seconds by which a trace's times may lie outside the attempt: clocks of nodes differ, and may be set (Slurm's
    munge allows 300 s). Within it, nonce and content decide."""


DEFAULT = Thresholds()
