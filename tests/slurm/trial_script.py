"""A run script that ends in any way that a trial can end, by its configuration; standard library only."""

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path


def main() -> int:
    """Behave as the configuration says; rank 0's node writes the result."""
    folder = Path(os.environ["CCL_TRIAL_DIR"])
    config = json.loads(Path(os.environ["CCL_CONFIG"]).read_text())["config"]
    index = int(os.environ["CCL_NODE_RANK"])
    (folder / f"seen-{index}.json").write_text(json.dumps(dict(os.environ)))
    print(f"node {os.environ.get('SLURMD_NODENAME')} index {index} runs {config}", flush=True)
    time.sleep(float(config.get("seconds", 0)))
    return {
        "ok": write_result,
        "quiet": lambda *_: 0,
        "hang": hang,
        "crash": crash,
        "oom": take_memory,
        "hoard": hoard,
        "failed": fail,
        "stubborn": refuse_to_end,
    }[str(config.get("behaviour", "ok"))](folder, index)


def write_result(folder: Path, index: int, status: str = "ok") -> int:
    if index == 0:
        temporary = folder / ".result.tmp"
        temporary.write_text(json.dumps({"status": status, "step_times_s": [0.5, 0.5, 0.5]}))
        temporary.replace(folder / "result.json")
    return 0


def fail(folder: Path, index: int) -> int:
    """Catch SIGTERM and report a failed trial."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(write_result(folder, index, "failed")))
    return hang(folder, index)


def hang(folder: Path, index: int) -> int:
    time.sleep(3600)
    return 0


def refuse_to_end(folder: Path, index: int) -> int:
    """Ignore SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return hang(folder, index)


def crash(folder: Path, index: int) -> int:
    raise RuntimeError("the loss is not a number")


def take_memory(folder: Path, index: int) -> int:
    """Allocate memory until Python raises MemoryError at a limit."""
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    return hoard(folder, index)


def hoard(folder: Path, index: int) -> int:
    """Allocate memory until the process is killed."""
    blocks = []
    while True:
        blocks.append(bytearray(b"x") * (16 << 20))


if __name__ == "__main__":
    sys.exit(main())
