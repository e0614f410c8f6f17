"""The launcher of TPU VMs, on machines behind a real sshd, passes the same contract suite as any other."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import slices
import workers
import yaml

from cclsearch.testing import LauncherContract


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slices.Cloud]:
    """One machine that `gcloud` of the tests creates, with an sshd of its own."""
    why = workers.find_sshd_problem()
    if why is not None and os.environ.get("CCL_REQUIRE_SSHD") == "1":
        pytest.fail(f"CCL_REQUIRE_SSHD=1, but {why}")
    if why is not None:
        pytest.skip(why)
    with slices.open_cloud(tmp_path_factory.mktemp("cloud"), accelerator_type="v5litepod-4") as opened:
        yield opened


class TestTpuVm(LauncherContract):
    @pytest.fixture(autouse=True)
    def choose(self, cloud: slices.Cloud) -> None:
        self.profile = yaml.safe_load(cloud.profile.read_text())  # type: ignore[misc]
