"""A run script under the trial contract: a formula's step times, a trace of each rank, and two ways to go wrong."""

import gzip
import json
import os
import sys
from pathlib import Path


def main() -> int:
    """Leave a trace and a result; one configuration runs out of memory, another is disturbed at its first attempt."""
    folder = Path(os.environ["CCL_TRIAL_DIR"])
    trial = json.loads(Path(os.environ["CCL_CONFIG"]).read_text())
    config = trial["config"]
    if config["tp"] == 1 and config["micro_batch_size"] == 4:
        (folder / "failures").mkdir(exist_ok=True)
        failure = {"rank": 1, "time_ns": 1, "kind": "out_of_memory", "message": "MyOutOfMemory: 25 of 24 GiB"}
        (folder / "failures" / "rank-1.json").write_text(json.dumps(failure))
        return 1
    step_s = float(os.environ["MINE_BASE_S"]) * config["tp"] + 0.02 / config["micro_batch_size"]
    step_s += 0.01 * (os.environ["MINE_OVERLAP"] == "0")
    (folder / "trace").mkdir(exist_ok=True)
    for rank in range(trial["num_ranks"]):
        trace = gzip.compress(json.dumps(make_trace(rank, trial["num_ranks"], step_s)).encode(), mtime=0)
        (folder / "trace" / f"rank{rank}.json.gz").write_bytes(trace)
    disturbed = config["tp"] == 2 and os.environ["CCL_JOB_NAME"].endswith("-a1")
    result = {
        "status": "ok",
        "world_size": trial["num_ranks"],
        "global_batch_size": trial["global_batch_size"],
        "seq_len": trial["seq_len"],
        "step_times_s": [step_s, 1.01 * step_s, step_s, 0.99 * step_s, step_s],
        "warmup_steps": trial["warmup_steps"],
        "peak_memory_bytes": [(2 + config["micro_batch_size"]) << 30] * trial["num_ranks"],
        "memory_kind": "device",
        "foreign_cpu_cores": 2.0 if disturbed else 0.0,
        "logical_cores": 2,
        "metrics": {"noise_db": 30.0 + config["micro_batch_size"]},
    }
    partial = folder / "result.part"
    partial.write_text(json.dumps(result))
    partial.replace(folder / "result.json")
    return 0


def make_trace(rank: int, num_ranks: int, step_s: float) -> dict:
    """Two steps, each with a matrix product of half the step and a pause."""
    step_us = 1e6 * step_s
    events = []
    for step in range(2):
        at = {"ph": "X", "pid": 1, "tid": 1, "ts": 1000 + step * step_us}
        events.append({**at, "cat": "user_annotation", "name": f"ProfilerStep#{step}", "dur": step_us})
        events.append({**at, "cat": "cpu_op", "name": "aten::mm", "dur": step_us / 2})
    distributed = {"backend": "gloo", "rank": rank, "world_size": num_ranks}
    return {"schemaVersion": 1, "distributedInfo": distributed, "traceEvents": events}


if __name__ == "__main__":
    sys.exit(main())
