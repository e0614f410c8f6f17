"""Contract suites, as pytest classes, for a launcher, proposer, LLM provider, metric, trace reader or task.

A package subclasses the suite of its part in a file of its tests, and pytest runs the suite's tests on it:

    from cclsearch.testing import ProposerContract

    class TestMine(ProposerContract):
        proposer = "mine"

The built-in ones pass the same suites. `docs/extending.md` says what each suite needs; pytest must be installed.
"""

from __future__ import annotations

from cclsearch.testing.launchers import LauncherContract
from cclsearch.testing.metrics import MetricContract, write_example_trace
from cclsearch.testing.proposers import ProposerContract
from cclsearch.testing.providers import ProviderContract
from cclsearch.testing.readers import ReaderContract
from cclsearch.testing.tasks import TaskContract

__all__ = [
    "LauncherContract",
    "MetricContract",
    "ProposerContract",
    "ProviderContract",
    "ReaderContract",
    "TaskContract",
    "write_example_trace",
]
