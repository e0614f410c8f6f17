"""The Slurm launcher on a real Slurm passes the same contract suite as any other."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from slurm.cluster import start_cluster

from cclsearch.testing import LauncherContract


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """A real Slurm for the tests of this file."""
    with start_cluster():
        yield


class TestSlurm(LauncherContract):
    profile = {"launcher": "slurm", "poll_s": 0.5, "grace_s": 3, "cpu_only": True, "python": sys.executable}
    timeout_s = 8.0
