"""Slices for tests and the benchmark: hosts over plain SSH, and a fake cloud."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import gcloud
import workers
import yaml

PYTHON_FOLDER = Path(sys.executable).parent
QUICK = {"poll_s": 0.3, "lost_after_s": 4, "delete_patience_s": 60, "python": sys.executable}
"""Settings with short times for loopback slices."""


@dataclass(frozen=True)
class Hosts:
    """Workers over plain SSH, and the profile that names them."""

    workers: list[workers.Worker]
    profile: Path


@contextlib.contextmanager
def open_hosts(folder: Path, count: int, **settings: Any) -> Iterator[Hosts]:
    """Start that many machines; kill them and their processes at the end."""
    key = workers.make_key(folder)
    made = [
        workers.make_worker(folder / f"w{number}", key, number, python_folder=PYTHON_FOLDER) for number in range(count)
    ]
    named = [{"host": w.address, "port": w.port, "user": workers.own_user()} for w in made]
    options = ["StrictHostKeyChecking=no", f"UserKnownHostsFile={folder / 'known_hosts'}"]
    data = {"launcher": "tpu-vm", "hosts": named, "key_file": str(key), "ssh_options": options, **QUICK, **settings}
    profile = folder / "slice.yaml"
    profile.write_text(yaml.safe_dump(data))
    try:
        for machine in made:
            machine.start()
        yield Hosts(made, profile)
    finally:
        for machine in made:
            machine.kill()


@dataclass(frozen=True)
class Cloud:
    """The fake cloud, and the profile that requests a slice from it."""

    folder: Path
    profile: Path

    def set_faults(self, **faults: Any) -> None:
        (self.folder / "faults.json").write_text(json.dumps(faults))

    def set_default_project(self, project: str) -> None:
        """Do what `gcloud config set project` does."""
        with gcloud.open_cloud(self.folder) as cloud:
            cloud.data["default_project"] = project

    def resources(self) -> dict[str, Any]:
        with gcloud.open_cloud(self.folder) as cloud:
            return dict(cloud.resources)

    def num_created(self) -> int:
        with gcloud.open_cloud(self.folder) as cloud:
            return int(cloud.data.get("created", 0))

    def give_slice(self, name: str, accelerator_type: str) -> None:
        """Create a TPU VM; the profile then names it instead of requesting one."""
        program, words = str(self.folder / "gcloud"), ["compute", "tpus", "queued-resources"]
        asked = [f"--node-id={name}", f"--accelerator-type={accelerator_type}", "--runtime-version=v2-alpha-tpuv5-lite"]
        subprocess.run([program, *words, "create", name, *asked], check=True, timeout=120)
        while self.resources()[name]["node"] != "READY":
            subprocess.run([program, *words, "describe", name], check=True, timeout=120, stdout=subprocess.DEVNULL)
        data = yaml.safe_load(self.profile.read_text())
        del data["queued_resource"]
        self.profile.write_text(yaml.safe_dump({**data, "tpu": name}))

    def preempt(self) -> None:
        """Preempt the machines of every active resource, as happens to spot capacity."""
        with gcloud.open_cloud(self.folder) as cloud:
            for name, found in list(cloud.resources.items()):
                if found["state"] == "ACTIVE":
                    gcloud.preempt_node(cloud, name, "SUSPENDED", "PREEMPTED")

    def calls(self) -> list[list[str]]:
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def machines(self) -> list[workers.Worker]:
        return [workers.load_worker(path) for path in sorted((self.folder / "vms").glob("*/w*"))]


@contextlib.contextmanager
def open_cloud(folder: Path, *, accelerator_type: str = "v5litepod-8", **settings: Any) -> Iterator[Cloud]:
    """Make an empty cloud; kill its machines at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    workers.make_key(folder)
    (folder / "cloud.json").write_text(json.dumps({"python_folder": str(PYTHON_FOLDER)}))
    program = folder / "gcloud"
    words = shlex.join([sys.executable, str(Path(gcloud.__file__).resolve()), str(folder)])
    program.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    program.chmod(0o755)
    asked = {"accelerator_type": accelerator_type, "runtime_version": "v2-alpha-tpuv5-lite", "tier": "spot"}
    data = {
        "launcher": "tpu-vm",
        "queued_resource": {**asked, "valid_until": "6h"},
        "zone": "us-central1-a",
        "project": "test",
        "user": workers.own_user(),
        "gcloud": str(program),
        **QUICK,
        **settings,
    }
    profile = folder / "slice.yaml"
    profile.write_text(yaml.safe_dump(data))
    cloud = Cloud(folder, profile)
    try:
        yield cloud
    finally:
        for machine in cloud.machines():
            machine.kill()
