"""The Slurm launcher on a real Slurm passes the same contract suite as any other."""

from __future__ import annotations

import sys

import pytest

from cclsearch.testing import LauncherContract


@pytest.mark.usefixtures("cluster")
class TestSlurm(LauncherContract):
    profile = {"launcher": "slurm", "poll_s": 0.5, "grace_s": 3, "cpu_only": True, "python": sys.executable}
    timeout_s = 8.0
