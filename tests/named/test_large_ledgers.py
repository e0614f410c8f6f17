"""Ledgers of 25,000 and 250,000 trials: `status` and `best` end in little memory, and print their CPU time.

The ledgers repeat the trials of a search over a recording, each with a loss and a configuration of its own.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from cclsearch.cli import main
from cclsearch.record.ledger import LEDGER_FILE


def write_run(base: Path, folder: Path, num_trials: int) -> None:
    """Write a run with that many trials from the finished trials of `base`."""
    folder.mkdir()
    spec = (base / "search.yaml").read_text()
    (folder / "search.yaml").write_text(spec.replace(f"run_id: {base.name}", f"run_id: {folder.name}"))
    head, *events = (json.loads(line) for line in (base / LEDGER_FILE).read_bytes().splitlines())
    groups: dict[int, list[dict]] = {}
    for event in events:
        if "trial" in event:
            groups.setdefault(event["trial"], []).append(event)
    draw, finished = random.Random(0), [group for group in groups.values() if "outcome" in group[-1]]
    with (folder / LEDGER_FILE).open("wb") as file:
        write_line(file, {**head, "run_id": folder.name})
        for trial in range(1, num_trials + 1):
            factor = draw.uniform(1, 2)
            for event in finished[trial % len(finished)]:
                changed = {**event, "trial": trial}
                if "config" in event:
                    changed["config"] = {**event["config"], "micro_batch_size": trial}
                if "outcome" in event and event["outcome"]["loss"] is not None:
                    changed["outcome"] = {**event["outcome"], "loss": event["outcome"]["loss"] * factor}
                write_line(file, changed)


def write_line(file, event: dict) -> None:
    event.pop("crc", None)
    data = json.dumps(event, separators=(",", ":"), ensure_ascii=False).encode()[:-1]
    file.write(data + b',"crc":"%08x"}\n' % zlib.crc32(data))


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    (folder / "ccl-search.yaml").write_text("{}\n")
    before = Path.cwd()
    os.chdir(folder)
    for name, launcher in (("recorded", "replay"), ("simulated", "simulate")):
        search = f"run -w wl2 -b 12 --launcher {launcher} --sampler random --name {name} --quiet"
        assert main(search.split()) == 0
    yield folder
    os.chdir(before)


@pytest.mark.parametrize(("base", "num_trials"), [("recorded", 25_000), ("simulated", 25_000), ("simulated", 250_000)])
def test_status_and_best_of_a_large_ledger_end_in_little_memory(project, base, num_trials):
    run = project / "runs" / f"{base}-{num_trials}"
    write_run(project / "runs" / base, run, num_trials)
    for command in ("status", "best"):
        done = subprocess.run(
            ["/usr/bin/time", "-f", "%U %M", sys.executable, "-m", "cclsearch", command, run.name],
            cwd=project, capture_output=True, text=True, check=True, timeout=1200,
        )  # fmt: skip
        cpu_s, kib = done.stderr.split()[-2:]
        print(f"{command} of {num_trials:,} trials ({base}): {cpu_s} s of CPU, {int(kib) >> 10} MiB")
        assert f"of {num_trials} trials admitted" in done.stdout
        assert int(kib) < 500 << 10
