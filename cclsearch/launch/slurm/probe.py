"""The program of `launcher check` on a compute node: checks torch, its devices, one all-reduce, frameworks' needs."""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
from pathlib import Path
from typing import Any


def main() -> int:
    """Write the findings to `result.json` in the check's folder; return the exit code of this rank."""
    folder = Path(os.environ["CCL_TRIAL_DIR"])
    found: dict[str, Any] = {
        "status": "ok",
        "node": os.environ.get("SLURMD_NODENAME", socket.gethostname()),
        "python": platform.python_version(),
        "sees_script": os.path.isfile(os.environ.get("CCL_CHECKED_SCRIPT", "")),
        "token": (folder / "token").read_text(encoding="utf-8"),
        "needs": read_needs(json.loads((folder / "needs.json").read_text(encoding="utf-8"))),
    }
    try:
        import torch
    except ImportError as error:
        found["torch_error"] = f"{type(error).__name__}: {error}"
    else:
        found["torch"] = str(torch.__version__)
        found["devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        found.update(_reduce(torch))
    if int(os.environ.get("RANK", "0")) == 0:
        temporary = folder / ".result.json"
        temporary.write_text(json.dumps(found), encoding="utf-8")
        temporary.replace(folder / "result.json")
    return 0


def read_needs(needs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return variable -> its value here (None if not set), and whether the needed file is in the folder it names."""
    found = {}
    for need in needs:
        value = os.environ.get(need["env"])
        is_met = value is not None and (need["file"] is None or (Path(value) / need["file"]).is_file())
        found[need["env"]] = {"value": value, "is_met": is_met}
    return found


def _reduce(torch: Any) -> dict[str, str]:
    """Run one all-reduce, with NCCL if there are accelerators, else with gloo."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    try:
        import torch.distributed as dist

        dist.init_process_group(backend)
        if backend == "nccl":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        value = torch.ones(1, device="cuda" if backend == "nccl" else "cpu")
        dist.all_reduce(value)
        reached = int(value.item())
        dist.destroy_process_group()
    except Exception as error:  # foreign code: its message is the answer
        return {"backend": backend, "reduce_error": f"{type(error).__name__}: {error}"}
    return {"backend": backend, "reduced_over": str(reached)}


if __name__ == "__main__":
    sys.exit(main())
