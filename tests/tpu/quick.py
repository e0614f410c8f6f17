"""A run script for tests of launchers: logs its start, sleeps, and writes a result under the trial contract."""

import json
import os
import sys
import time
from pathlib import Path

process, folder = int(os.environ.get("CCL_PROCESS_ID", "0")), Path(os.environ["CCL_TRIAL_DIR"])
data = json.loads(Path(os.environ["CCL_CONFIG"]).read_text())
with open(os.environ["QUICK_STARTS"], "a") as starts:
    starts.write(f"{os.environ['CCL_JOB_NAME']} {process} {os.environ.get('CCL_COORDINATOR', 'alone')}\n")
print("odd:", os.environ.get("QUICK_ODD", ""), flush=True)
print("secrets:", [name for name in os.environ if "KEY" in name or "TOKEN" in name], flush=True)
print("to stderr", file=sys.stderr, flush=True)
is_first = os.environ["CCL_JOB_NAME"].endswith("-a1")
time.sleep(float(os.environ.get("QUICK_SECONDS", "0.2")) if is_first else 0.2)
if os.environ.get("QUICK_FAIL"):
    raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17 GiB" * (process == 0) or "peer")
(folder / "trace").mkdir(exist_ok=True)
(folder / "trace" / f"note {process}.txt").write_text("as it is")
if process == 0:
    result = {
        "status": "ok",
        "world_size": data["num_ranks"],
        "global_batch_size": data["global_batch_size"],
        "seq_len": data["seq_len"],
        "step_times_s": [0.1] * data["timed_steps"],
        "warmup_steps": data["warmup_steps"],
    }
    partial = folder / "result.part"
    partial.write_text(json.dumps(result))
    partial.replace(folder / "result.json")
