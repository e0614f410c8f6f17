"""The stub of a cluster: `apply`, `list`, `delete` of pods, and a kubelet process for each pod that runs it.

python -m kube_launcher.cluster FOLDER/NAME     (the kubelet of one pod; `apply` starts it)
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

Pod = dict[str, Any]
STOPPED_S = 10.0


class StubCluster:
    """Pods as folders with `pod.json` (the manifest) and `status.json` (the kubelet's)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def apply(self, pod: Pod) -> None:
        """Create a pod; one of that name must not exist."""
        place = self.folder / pod["metadata"]["name"]
        place.mkdir(parents=True)
        write_json(place / "pod.json", pod)
        write_json(place / "status.json", {"phase": "Pending"})
        subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(place)],
            env={"PATH": os.defpath},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def list(self, **labels: str) -> list[Pod]:
        """Return the pods with these labels, each with its status."""
        pods = []
        for path in sorted(self.folder.glob("*/pod.json")):
            with contextlib.suppress(OSError, ValueError):
                pod = json.loads(path.read_text())
                if labels.items() <= pod["metadata"]["labels"].items():
                    pods.append({**pod, "status": json.loads((path.parent / "status.json").read_text())})
        return pods

    def delete(self, name: str) -> None:
        """Delete a pod and wait until it has ended; nothing happens if there is none."""
        place = self.folder / name
        if not place.is_dir():
            return
        (place / "deleted").touch()
        deadline = time.monotonic() + STOPPED_S
        while time.monotonic() < deadline:
            if json.loads((place / "status.json").read_text())["phase"] in ("Succeeded", "Failed"):
                return
            time.sleep(0.05)
        raise TimeoutError(f"pod {name} has not ended after {STOPPED_S:g} s")


def write_json(path: Path, value: Any) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.replace(path)


def run_pod(place: Path) -> None:
    """Run the container of a pod until it ends, is deleted or is over its deadline."""
    spec = json.loads((place / "pod.json").read_text())["spec"]
    [container] = spec["containers"]
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    with open(container["stdout"], "wb") as out, open(container["stderr"], "wb") as err:
        process = subprocess.Popen(
            container["command"], cwd=container["workingDir"], env=environment, stdout=out, stderr=err,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    write_json(place / "status.json", {"phase": "Running"})
    deadline, reason = time.monotonic() + spec["activeDeadlineSeconds"], ""
    while process.poll() is None and not reason:
        if (place / "deleted").exists():
            reason = "Deleted"
        elif time.monotonic() > deadline:
            reason = "DeadlineExceeded"
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    phase = "Succeeded" if code == 0 and not reason else "Failed"
    write_json(place / "status.json", {"phase": phase, "reason": reason, "exitCode": code})


if __name__ == "__main__":
    run_pod(Path(sys.argv[1]))
