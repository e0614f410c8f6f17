"""Writes the text of `planted.txt` wherever a job can write; a third of the trials also fail with it."""

from __future__ import annotations

import gzip
import json
import os
import sys
import time
from pathlib import Path

TEXT = Path(__file__).with_name("planted.txt").read_text()


def main() -> None:
    """Print, then write traces and a result, or fail in one of two ways, by the number of the trial."""
    if "--show-launch" in sys.argv:
        form = {"command": ["echo", TEXT], "files": {"planted.txt": TEXT}, "environment": {"PLANTED": TEXT}}
        print(json.dumps({"title": "leaky", "checked": "nothing", **form}))
        return
    folder = Path(os.environ["CCL_TRIAL_DIR"])
    given = json.loads(Path(os.environ["CCL_CONFIG"]).read_text())
    print(TEXT, flush=True)
    print(TEXT, file=sys.stderr, flush=True)
    (folder / "args.yaml").write_text(TEXT)
    write_traces(folder / "trace", given)
    if given["trial"] % 3 == 2:
        (folder / "failures").mkdir()
        failure = {"rank": 0, "time_ns": time.time_ns(), "kind": "crashed", "message": f"RuntimeError: {TEXT}"}
        (folder / "failures" / "rank-0.json").write_text(json.dumps(failure))
        raise RuntimeError(TEXT)
    if given["trial"] % 3 == 0:
        failure = {"stage": "run", "kind": "crashed", "message": TEXT, "rank": 0}
        result = {"status": "failed", "failure": failure}
    else:
        result = describe(given)
    (folder / "result.json.part").write_text(json.dumps(result))
    (folder / "result.json.part").rename(folder / "result.json")


def describe(given: dict) -> dict:
    """Return a result with secrets in each field of text."""
    ranks = given["num_ranks"]
    return {
        "status": "ok",
        "world_size": ranks,
        "global_batch_size": given["global_batch_size"],
        "seq_len": given["seq_len"],
        "num_layers": given["arch"]["num_layers"],
        "warmup_steps": given["warmup_steps"],
        "step_times_s": [0.001 + 0.00001 * step for step in range(given["timed_steps"])],
        "peak_memory_bytes": [2**28] * ranks,
        "devices": ["cpu"] * (ranks - 1) + [TEXT],
        "hosts": [f"https://u:{line}@host" for line in TEXT.splitlines()[:1]] * ranks,
        "versions": {"package": TEXT},
        "extra": {"notes": TEXT},
    }


def write_traces(folder: Path, given: dict) -> None:
    """Write one trace of each rank, with secrets in metadata, names of events and the name of one file."""
    folder.mkdir()
    events = [{"ph": "X", "cat": "cpu_op", "name": TEXT, "ts": 1, "dur": 5, "pid": 1, "tid": 1, "args": {"env": TEXT}}]
    for rank in range(given["num_ranks"]):
        text = json.dumps({"env": TEXT, "distributedInfo": {"rank": rank}, "traceEvents": events})
        (folder / f"rank{rank}.json.gz").write_bytes(gzip.compress(text.encode()))
    (folder / f"command-{TEXT.splitlines()[0]}.json").write_text(json.dumps({"argv": TEXT}))


if __name__ == "__main__":
    main()
