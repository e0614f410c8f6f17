from pathlib import Path

import pytest

from cclsearch.testing import LauncherContract


class TestKube(LauncherContract):
    @pytest.fixture(autouse=True)
    def cluster(self, tmp_path: Path) -> None:
        self.profile = {"launcher": "kube", "cluster": str(tmp_path / "cluster")}
