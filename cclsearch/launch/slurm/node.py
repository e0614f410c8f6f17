"""What a compute node runs: starts one trial from a JSON file. Standard library only, Python 3.8 or newer.

`node.py batch JOBS.json` is the job script's program (or that of a step in a held allocation): it claims its entry,
starts one task a node through srun, watches the time and leaves `end.json`. `node.py task PAYLOAD.json` is such a
task: it finds the head node's address, starts torchrun (or the bare script) and leaves `node-<k>.json`.
`node.py again PAYLOAD.json` runs a trial once more, by hand, in a folder of its own beside the trial's files.

It runs by its path and imports nothing of the package, so that login and compute nodes may hold different versions.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

SECRET = re.compile(
    r"(?i)(api[_-]?key|secret|token|passw(or)?d|credential|private[_-]?key|auth|jwt|webhook|[_-](key|pat|pwd)$)"
)
NOT_SECRET = re.compile(r"(?i)(tokens?_per|max_tokens|num_tokens|tokenizers?|author(?!i[sz]a)|auth_sock|tokens$)")
SLURMS_OWN_SECRET = "SLURM_JWT"
"""Only Slurm's own commands get it."""
FIRST_PORT, NUM_PORTS = 20000, 12000
"""Below the range from which outgoing connections take theirs."""
LINGER_S = 60.0
"""How long processes may take to end once the result is there."""
STOP_S = 15.0
CHILD_STOP_S = 4.0
"""Less than Slurm's usual patience between its first signal and its last."""
RENDEZVOUS_S = 300.0


def main(argv: Sequence[str]) -> int:
    """Run the role that the first word names; returns the exit code."""
    role, path = argv
    return {"batch": run_batch, "again": run_again, "task": run_task}[role](path)


def read_json(path: str) -> Any:
    """What a JSON file holds."""
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def write_json(path: str, data: Any) -> None:
    """Written whole or not at all: readers on other nodes never see half a file."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(data, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


# ---- the job -------------------------------------------------------------------------------------------------------


def run_batch(path: str) -> int:
    """One trial from its claim to `end.json`; returns the exit code of the job."""
    jobs = read_json(path)["jobs"]
    spec_path = jobs[int(os.environ.get("SLURM_ARRAY_TASK_ID", "0"))]
    spec = read_json(spec_path)
    me = job_number()
    if not claim(spec["folder"], me):
        print("another job runs this trial already: nothing to do here")
        return 0
    return run_claimed(spec, spec_path, me)


def run_again(path: str) -> int:
    """The trial once more under this job's own number: its files lie in `again-<job>` beside the first run's."""
    spec = read_json(path)
    first, me = spec["trial_dir"], job_number()
    there = os.path.join(first, "again-" + me)
    os.makedirs(there, exist_ok=True)
    shutil.copyfile(os.path.join(first, "config.json"), os.path.join(there, "config.json"))
    spec.update({"trial_dir": there, "folder": there})
    spec["environment"].update({"CCL_TRIAL_DIR": there, "CCL_CONFIG": os.path.join(there, "config.json")})
    copy = os.path.join(there, "payload.json")
    write_json(copy, spec)
    print("runs in " + there)
    return run_claimed(spec, copy, me)


def job_number() -> str:
    """This job's number, as Slurm's listings write it."""
    if "SLURM_ARRAY_TASK_ID" in os.environ:
        return os.environ["SLURM_ARRAY_JOB_ID"] + "_" + os.environ["SLURM_ARRAY_TASK_ID"]
    return os.environ.get("CCL_STEP_JOB", os.environ.get("SLURM_JOB_ID", "?"))


def run_claimed(spec: dict[str, Any], spec_path: str, me: str) -> int:
    """Start srun, follow it to its end, write `end.json`."""
    folder = spec["folder"]
    end: dict[str, Any] = {"job_id": me, "started_at": time.time(), "reason": "finished", "signal": None}
    received: list[str] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _: received.append(signal.Signals(got).name))
    try:
        command, environment = srun_command(spec, spec_path), srun_environment()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
        end["exit_code"] = watch(process, spec, end, received)
    except OSError as error:
        print(f"cannot start srun: {error}", flush=True)
        end.update({"exit_code": 127, "reason": "unlaunched"})
    merge_node_logs(spec)
    end["ended_at"] = time.time()
    write_json(os.path.join(folder, "end.json"), end)
    return 0 if end["exit_code"] == 0 else 1


def merge_node_logs(spec: dict[str, Any]) -> None:
    """Append the other nodes' output to the head node's, so that one log tells all."""
    for index in range(1, spec["nodes"]):
        for stream in ("stdout", "stderr"):
            source = log_path(spec, stream, index)
            try:
                with open(source, "rb") as part, open(log_path(spec, stream, 0), "ab") as whole:
                    shutil.copyfileobj(part, whole)
                os.unlink(source)
            except OSError:
                continue


def claim(folder: str, me: str) -> bool:
    """Whether this job is the one that runs the trial: the first to say so; a requeued job finds its own claim."""
    path = os.path.join(folder, "started.json")
    text = json.dumps(
        {"job_id": me, "host": os.environ.get("SLURMD_NODENAME", socket.gethostname()), "at": time.time()}
    )
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        for _ in range(20):
            try:
                return bool(read_json(path)["job_id"] == me)
            except (ValueError, KeyError):
                time.sleep(0.5)  # its writer is between creating and filling it
        return False
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    return True


def srun_command(spec: dict[str, Any], spec_path: str) -> list[str]:
    """srun with one task a node; in a held allocation, as a step of it."""
    command = ["srun", "--export=ALL", "--kill-on-bad-exit=1", "--unbuffered"]
    command += [f"--nodes={spec['nodes']}", f"--ntasks={spec['nodes']}", "--ntasks-per-node=1"]
    command += ["--job-name=" + spec["name"], *spec["srun_arguments"]]
    return [*command, spec["host_python"], spec["program"], "task", spec_path]


def job_environment() -> dict[str, str]:
    """The environment without secrets that a login shell may have put there, and without what would steer srun."""
    steering = ("SRUN_", "SLURM_EXPORT_ENV", "SLURM_KILL_BAD_EXIT", "SLURM_NTASKS", "SLURM_TASKS_PER_NODE")
    return {
        name: value
        for name, value in os.environ.items()
        if not (SECRET.search(name) and not NOT_SECRET.search(name)) and not name.startswith(steering)
    }


def srun_environment() -> dict[str, str]:
    """The job's, and what srun itself may need to be let in; the tasks take that away again."""
    own = {name: os.environ[name] for name in (SLURMS_OWN_SECRET,) if name in os.environ}
    return dict(job_environment(), **own)


def watch(process: subprocess.Popen[bytes], spec: dict[str, Any], end: dict[str, Any], received: list[str]) -> int:
    """The exit code of srun; ends it when the time is up, when told to, or when the result has long been there."""
    deadline = time.monotonic() + spec["timeout_s"]
    result = os.path.join(spec["trial_dir"], "result.json")
    seen_at = None
    while True:
        try:
            return process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            pass
        now = time.monotonic()
        if seen_at is None and os.path.exists(result):
            seen_at = now
        if received:
            end["reason"], end["signal"] = "signal", received[0]
        elif seen_at is not None and now - seen_at > LINGER_S:
            end["reason"] = "lingered"
        elif seen_at is None and now > deadline:
            end["reason"] = "timeout"
        else:
            continue
        return stop_step(process)


def stop_step(process: subprocess.Popen[bytes]) -> int:
    """End srun and its tasks: a second interrupt within a second ends the step at once."""
    process.terminate()
    try:
        return process.wait(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


# ---- one task a node -----------------------------------------------------------------------------------------------


def run_task(path: str) -> int:
    """This node's share of the trial; returns the exit code of torchrun."""
    spec = read_json(path)
    index = int(os.environ.get("SLURM_PROCID", "0"))
    before = count_oom_kills()
    address, port = rendezvous(spec, index)
    environment = task_environment(spec, index, address, port)
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _: told.append(got))  # before there is a child: none is left behind
    command = [*spec["prefix"], *rank_command(spec, index, address, port)]
    place = os.path.join(spec["folder"], f"node-{index}.json")
    with open(log_path(spec, "stdout", index), "ab") as out, open(log_path(spec, "stderr", index), "ab") as err:
        try:
            process = subprocess.Popen(
                command, env=environment, cwd=spec["trial_dir"], stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )
        except OSError as error:
            said = f"cannot start {command[0]}: {error.strerror}"
            write_json(place, {"node": node_name(), "exit_code": 127, "oom_kills": 0, "unlaunched": said})
            return 127
    code = wait_for_child(process, told)
    report = {"node": node_name(), "exit_code": code, "terminated": bool(told)}
    report["oom_kills"] = max(0, count_oom_kills() - before)
    write_json(place, report)
    return 128 - code if code < 0 else code


def task_environment(spec: dict[str, Any], index: int, address: str, port: int) -> dict[str, str]:
    """What this node's processes get: the job's, the trial's, and where they are among the nodes."""
    environment = dict(job_environment(), **spec["environment"])
    environment["CCL_JOB_NAME"] = spec["name"]
    environment.update({"CCL_NODE_RANK": str(index), "CCL_NUM_NODES": str(spec["nodes"])})
    if spec["runner"] == "torchrun":
        return environment
    environment.update({"MASTER_ADDR": address, "MASTER_PORT": str(port)})
    if spec["nodes"] > 1:
        environment.update({"CCL_PROCESS_ID": str(index), "CCL_NUM_PROCESSES": str(spec["nodes"])})
        environment["CCL_COORDINATOR"] = address + ":" + str(port)
    return environment


def wait_for_child(process: subprocess.Popen[bytes], told: list[int]) -> int:
    """The child's exit code; what this process is told is passed on, and after some patience the child is killed."""
    passed, deadline = 0, float("inf")
    while True:
        try:
            return process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            pass
        for number in told[passed:]:
            process.send_signal(number)
            deadline = min(deadline, time.monotonic() + CHILD_STOP_S)
        passed = len(told)
        if time.monotonic() > deadline:
            process.kill()


def log_path(spec: dict[str, Any], stream: str, index: int) -> str:
    """One writer a file, past srun, which loses last words: the head node's is the trial's own log."""
    if index == 0:
        return os.path.join(spec["trial_dir"], f"{stream}.log")
    return os.path.join(spec["folder"], f"{stream}-{index}.log")


def rank_command(spec: dict[str, Any], index: int, address: str, port: int) -> list[str]:
    """torchrun for this node's ranks, or the script itself."""
    if spec["runner"] != "torchrun":
        return [spec["python"], spec["script"]]
    per_node = spec["ranks_per_node"]
    ranks = min(per_node, spec["num_ranks"] - index * per_node)
    return [
        spec["python"],
        "-m",
        "torch.distributed.run",
        f"--nnodes={spec['nodes']}",
        f"--node-rank={index}",
        f"--nproc-per-node={ranks}",
        "--master-addr=" + address,
        f"--master-port={port}",
        "--max-restarts=0",
        spec["script"],
    ]


def node_name() -> str:
    """This node, as Slurm calls it: several may share a host name."""
    return os.environ.get("SLURMD_NODENAME", socket.gethostname())


def rendezvous(spec: dict[str, Any], index: int) -> tuple[str, int]:
    """Address and port of the head node: it chooses a free port and writes both down for the others."""
    if spec["nodes"] == 1:
        return "127.0.0.1", free_port()
    step = f"{os.environ.get('SLURM_JOB_ID', '0')}.{os.environ.get('SLURM_STEP_ID', '0')}"
    path = os.path.join(spec["folder"], f"rendezvous-{step}.json")
    if index == 0:
        write_json(path, {"address": head_address(), "port": free_port()})
    deadline = time.monotonic() + RENDEZVOUS_S
    while time.monotonic() < deadline:
        os.listdir(spec["folder"])  # makes a network file system look again
        try:
            told = read_json(path)
            return str(told["address"]), int(told["port"])
        except (OSError, ValueError):
            time.sleep(0.2)
    raise SystemExit(f"node {node_name()} never saw the head node's address in {path}: is the folder shared?")


def head_address() -> str:
    """Where the other nodes reach this one: its node name where that resolves, else what Slurm knows of it."""
    name = node_name()
    for candidate in (name, find_node_address(name), os.environ.get("SLURM_LAUNCH_NODE_IPADDR"), socket.gethostname()):
        try:
            if candidate and socket.getaddrinfo(candidate, None):
                return candidate
        except OSError:
            continue
    return name


def find_node_address(name: str) -> str | None:
    """`NodeAddr` of a node, or None."""
    try:
        shown = subprocess.run(
            ["scontrol", "show", "node", name], capture_output=True, text=True, timeout=20, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"\bNodeAddr=(\S+)", shown)
    return found.group(1) if found else None


def free_port() -> int:
    """A port that is free now; jobs that share a host start looking at different ones."""
    start = int(re.sub(r"\D", "", os.environ.get("SLURM_JOB_ID", "")) or os.getpid())
    start = start * 37 + int(re.sub(r"\D", "", os.environ.get("SLURM_STEP_ID", "")) or 0) * 7
    for offset in range(NUM_PORTS):
        port = FIRST_PORT + (start + offset) % NUM_PORTS
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise SystemExit(f"no free port on {node_name()}")


def count_oom_kills() -> int:
    """Processes that the kernel has killed for memory on this node so far; 0 where it does not say."""
    count = 0
    for path in ["/proc/vmstat", *glob.glob("/sys/fs/cgroup/memory.events")]:
        try:
            with open(path) as file:
                found = re.search(r"^oom_kill (\d+)", file.read(), re.MULTILINE)
        except OSError:
            continue
        count = max(count, int(found.group(1)) if found else 0)
    return count


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
