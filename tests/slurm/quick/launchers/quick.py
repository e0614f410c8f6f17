"""A run script under the trial contract that trains nothing: its step times are simulated, and it says so."""

import json
import os
import sys
import time
from pathlib import Path


def main() -> int:
    """Sleep a little, then write the result from the head node."""
    trial = json.loads(Path(os.environ["CCL_CONFIG"]).read_text())
    folder = Path(os.environ["CCL_TRIAL_DIR"])
    time.sleep(float(os.environ.get("QUICK_SECONDS", "0.3")))
    if os.environ["CCL_NODE_RANK"] != "0":
        return 0
    with (folder / "launches").open("a") as file:
        file.write(f"{os.environ['SLURM_JOB_ID']}\n")
    result = {
        "status": "ok",
        "simulated": True,
        "world_size": trial["num_ranks"],
        "global_batch_size": trial["global_batch_size"],
        "seq_len": trial["seq_len"],
        "step_times_s": [0.1 * trial["config"]["pp"]] * trial["timed_steps"],
        "warmup_steps": trial["warmup_steps"],
    }
    temporary = folder / ".result.tmp"
    temporary.write_text(json.dumps(result))
    temporary.replace(folder / "result.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
