"""A run folder: whether its search ended, still runs or was killed."""

from __future__ import annotations

from cclsearch.cli import main
from cclsearch.record.ledger import LEDGER_FILE
from cclsearch.record.writer import RunWriter
from cclsearch.run.folder import load_run

REPLAY = ["run", "--workload", "wl2", "--launcher", "replay"]


def test_a_run_is_ended_running_or_killed(project):
    assert main([*REPLAY, "--budget", "2", "--name", "r", "--quiet"]) == 0
    folder = project / "runs" / "r"
    assert load_run(folder).status == "ended"
    with RunWriter(folder):
        assert load_run(folder).status == "running"
    ledger = folder / LEDGER_FILE
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-1]))
    assert load_run(folder).status == "killed"
