"""A fake `gcloud compute tpus` whose TPU VMs are real sshd processes on loopback addresses.

    python gcloud.py FOLDER compute tpus queued-resources create NAME --node-id=NAME --accelerator-type=... ...

It accepts only documented flags. `FOLDER/cloud.json` contains the resources, `FOLDER/faults.json` the errors to
simulate, `FOLDER/calls.jsonl` the calls. Each `describe` advances the state: a request waits, is provisioned and
becomes active when its machines listen. For tests only.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import workers

CHIPS_A_HOST = 4


class Refusal(Exception):
    """What the real program prints after `ERROR: (gcloud...)`."""


class Cloud:
    """All resources of the fake cloud; open it with `open_cloud`, which locks it."""

    def __init__(self, folder: Path, data: dict[str, Any], faults: dict[str, Any]) -> None:
        self.folder, self.data, self.faults = folder, data, faults
        self.project: str | None = None
        """The project of the command; None for all."""

    @property
    def default_project(self) -> str:
        """The project set by `gcloud config set project`."""
        return str(self.data.get("default_project", "test"))

    @property
    def resources(self) -> dict[str, Any]:
        return self.data.setdefault("resources", {})

    def find(self, name: str) -> dict[str, Any]:
        if name not in self.resources or self.project not in (None, self.resources[name]["project"]):
            raise Refusal(f"NOT_FOUND: Resource 'projects/test/locations/z/queuedResources/{name}' was not found")
        return self.resources[name]

    def machines(self, name: str) -> list[workers.Worker]:
        return [workers.load_worker(path) for path in sorted((self.folder / "vms" / name).glob("w*"))]


@contextlib.contextmanager
def open_cloud(folder: Path) -> Iterator[Cloud]:
    """Lock and read the cloud; save changes at the end."""
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        data, faults = (_read(folder / name) for name in ("cloud.json", "faults.json"))
        cloud = Cloud(folder, data, faults)
        try:
            yield cloud
        finally:
            for name, content in (("cloud.json", cloud.data), ("faults.json", cloud.faults)):
                partial = folder / f"{name}.part"
                partial.write_text(json.dumps(content, indent=1))
                partial.replace(folder / name)


def create(cloud: Cloud, args: argparse.Namespace) -> object:
    if cloud.faults.get("create"):
        raise Refusal(cloud.faults["create"].pop(0))
    if args.name in cloud.resources:
        raise Refusal(f"ALREADY_EXISTS: Resource '{args.name}' already exists")
    chips = int(args.accelerator_type.rpartition("-")[2])
    hosts = -(-chips // (CHIPS_A_HOST * (2 if args.accelerator_type.startswith(("v4", "v5p")) else 1)))
    labels = dict(pair.split("=", 1) for pair in args.labels.split(",")) if args.labels else {}
    cloud.data["created"] = cloud.data.get("created", 0) + 1
    cloud.resources[args.name] = {
        "state": "WAITING_FOR_RESOURCES",
        "node": "CREATING",
        "hosts": hosts,
        "labels": labels,
        "spot": args.spot,
        "project": cloud.project,
        "looks": cloud.faults.get("waiting_looks", 1),
    }
    return None


def advance(cloud: Cloud, name: str) -> None:
    """Advance the state by one step: waiting, provisioning, active; deleting, gone."""
    found = cloud.resources[name]
    if found["state"] == "WAITING_FOR_RESOURCES" and cloud.faults.get("stock_out"):
        found.update(state="FAILED", message=cloud.faults["stock_out"].pop(0))
    elif found["state"] == "WAITING_FOR_RESOURCES":
        found["looks"] -= 1
        found["state"] = "PROVISIONING" if found["looks"] <= 0 else found["state"]
    elif found["state"] == "PROVISIONING":
        key = workers.make_key(cloud.folder)
        for number in range(found["hosts"]):
            folder = cloud.folder / "vms" / name / f"w{number}"
            python = Path(cloud.data["python_folder"])
            workers.make_worker(folder, key, number, python_folder=python).start()
        found.update(state="ACTIVE", node="READY")
    elif found["state"] == "DELETING":
        del cloud.resources[name]


def describe_queued(cloud: Cloud, args: argparse.Namespace) -> object:
    if cloud.faults.get("describe"):
        raise Refusal(cloud.faults["describe"].pop(0))
    cloud.find(args.name)
    advance(cloud, args.name)
    return _show(args.name, cloud.find(args.name))


def list_queued(cloud: Cloud, args: argparse.Namespace) -> object:
    if cloud.faults.get("list"):
        raise Refusal(cloud.faults["list"].pop(0))
    return [_show(name, found) for name, found in cloud.resources.items() if found["project"] == cloud.project]


def get_project(cloud: Cloud, args: argparse.Namespace) -> object:
    return cloud.default_project


def delete(cloud: Cloud, args: argparse.Namespace) -> object:
    found = cloud.find(args.name)
    if cloud.faults.get("delete"):
        raise Refusal(cloud.faults["delete"].pop(0))
    if found["state"] == "ACTIVE" and not args.force:
        raise Refusal("FAILED_PRECONDITION: the queued resource has nodes; use --force")
    preempt_node(cloud, args.name, "DELETING", "DELETING")
    return None


def preempt_node(cloud: Cloud, name: str, state: str, node: str) -> None:
    cloud.find(name).update(state=state, node=node)
    for machine in cloud.machines(name):
        machine.kill()


def describe_node(cloud: Cloud, args: argparse.Namespace) -> object:
    found = cloud.find(args.name)
    endpoints = [{"ipAddress": machine.address, "port": 8470} for machine in cloud.machines(args.name)]
    return {
        "name": f"projects/test/locations/z/nodes/{args.name}",
        "state": found["node"],
        "networkEndpoints": endpoints,
    }


def ssh(cloud: Cloud, args: argparse.Namespace) -> int:
    user, machines = _reach(cloud, args.name)
    chosen = range(len(machines)) if args.worker == "all" else [int(number) for number in args.worker.split(",")]
    running = []
    for number in chosen:
        options = [*_options(cloud, args.ssh_key_file), "-p", str(machines[number].port), *args.ssh_flag, "-T"]
        command = ["ssh", *options, f"{user}@{machines[number].address}", "--", args.command]
        running.append((number, subprocess.Popen(command, stdin=subprocess.DEVNULL)))
    failed = [number for number, process in running if process.wait()]
    for number in failed:
        print(f"##### Command execution on worker {number} failed with exit status.", file=sys.stderr)
    return 1 if failed else 0


def scp(cloud: Cloud, args: argparse.Namespace) -> int:
    *sources, target = args.paths
    remote = next(path for path in args.paths if ":" in path)
    user, machines = _reach(cloud, remote.partition(":")[0])
    if args.worker == "all" and remote != target:
        raise Refusal("argument --worker: only one worker can be copied from")
    for number in range(len(machines)) if args.worker == "all" else [int(args.worker)]:
        machine = machines[number]
        paths = [f"{user}@{machine.address}:{p.partition(':')[2]}" if ":" in p else p for p in (*sources, target)]
        options = [*_options(cloud, args.ssh_key_file), "-P", str(machine.port), *args.scp_flag, "-q"]
        if subprocess.run(["scp", *options, "--", *paths], stdin=subprocess.DEVNULL).returncode:
            return 1
    return 0


def _reach(cloud: Cloud, target: str) -> tuple[str, list[workers.Worker]]:
    user, _, name = target.rpartition("@")
    if cloud.find(name)["node"] != "READY":
        raise Refusal(f"TPU {name} is not in state READY: {cloud.find(name)['node']}")
    return user or workers.own_user(), cloud.machines(name)


def _options(cloud: Cloud, key: str | None) -> list[str]:
    known = cloud.folder / "google_compute_known_hosts"
    return ["-i", key or str(cloud.folder / "key"), "-oStrictHostKeyChecking=no", f"-oUserKnownHostsFile={known}"]


def _show(name: str, found: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = {"state": found["state"]}
    if "message" in found:
        state["failedData"] = {"error": {"code": 8, "message": found["message"]}}
    spec = {"nodeId": name, "parent": "projects/test/locations/z", "node": {"labels": found["labels"]}}
    return {
        "name": f"projects/test/locations/z/queuedResources/{name}",
        "state": state,
        "tpu": {"nodeSpec": [spec]},
    }


def parse(words: list[str]) -> argparse.Namespace:
    """Parse the documented flags of each command; any other is an error."""
    everywhere = argparse.ArgumentParser(add_help=False)
    for flag in ("--zone", "--project", "--format"):
        everywhere.add_argument(flag)
    everywhere.add_argument("--quiet", action="store_true")
    parser = argparse.ArgumentParser(prog="gcloud", allow_abbrev=False)
    commands = parser.add_subparsers(required=True)

    def add(group: str, name: str, function: object) -> argparse.ArgumentParser:
        made = commands.add_parser(f"{group} {name}", parents=[everywhere], allow_abbrev=False)
        made.set_defaults(function=function)
        return made

    made = add("queued-resources", "create", create)
    made.add_argument("name")
    for flag in ("node-id", "accelerator-type", "runtime-version"):
        made.add_argument(f"--{flag}", required=True)
    for flag in ("labels", "valid-until-duration", "network", "subnetwork", "service-account"):
        made.add_argument(f"--{flag}")
    for flag in ("spot", "reserved", "internal-ips", "async"):
        made.add_argument(f"--{flag}", action="store_true")
    add("queued-resources", "describe", describe_queued).add_argument("name")
    add("queued-resources", "list", list_queued)
    made = add("queued-resources", "delete", delete)
    made.add_argument("name")
    for flag in ("force", "async"):
        made.add_argument(f"--{flag}", action="store_true")
    add("tpu-vm", "describe", describe_node).add_argument("name")
    for name, function in (("ssh", ssh), ("scp", scp)):
        made = add("tpu-vm", name, function)
        made.add_argument("name") if name == "ssh" else made.add_argument("paths", nargs="+")
        made.add_argument("--worker", default="0")
        made.add_argument(f"--{name}-flag", action="append", default=[])
        made.add_argument("--ssh-key-file")
        made.add_argument("--internal-ip", action="store_true")
        if name == "ssh":
            made.add_argument("--command", required=True)
    if words[:3] == ["config", "get-value", "project"]:
        return argparse.Namespace(function=get_project, project=None, format=None)
    if words[:2] != ["compute", "tpus"]:
        raise SystemExit(f"ERROR: (gcloud) Invalid choice: {words[:1]}")
    return parser.parse_args([" ".join(words[2:4]), *words[4:]])


def main() -> int:
    folder, words = Path(sys.argv[1]), sys.argv[2:]
    with open(folder / "calls.jsonl", "a") as calls:
        calls.write(json.dumps(words) + "\n")
    args = parse(words)
    try:
        with open_cloud(folder) as cloud:
            cloud.project = args.project or cloud.default_project
            if cloud.faults.get("login"):
                raise Refusal(cloud.faults["login"])
            if args.function not in (ssh, scp):
                answer = args.function(cloud, args)
                if answer is not None:
                    print(json.dumps(answer) if args.format == "json" else answer)
                return 0
        return int(args.function(cloud, args))
    except Refusal as refusal:
        print(f"ERROR: (gcloud.{'.'.join(words[:4])}) {refusal}", file=sys.stderr)
        return 1


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(path.read_text()))
    return {}


if __name__ == "__main__":
    sys.exit(main())
