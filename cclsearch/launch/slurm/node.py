"""The node program: starts one trial on compute nodes from its job spec. Standard library only, Python 3.8 or newer.

`node.py batch JOBS.json` is the program of the job script (or of a step in a held allocation): it claims its attempt,
starts one task per node through srun, watches the time limit and writes `end.json`. `node.py task PAYLOAD.json` is
such a task: it finds the head node's address, starts torchrun (or the bare script) and writes `node-<k>.json`.
`node.py again PAYLOAD.json` runs a trial once more, by hand, in a separate folder next to the trial's files.

It is run by its path and imports nothing of the package, so login and compute nodes may have different versions.
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
import uuid
from collections.abc import Sequence
from typing import Any

MAX_JSON_CHARS = 64 * 2**20
SECRET = re.compile(
    r"(?i)(api[_-]?key|secret|token|passw(or)?d|passphrase|credential|private[_-]?key|auth|jwt|webhook|bearer|cookie"
    r"|conn(ection)?[_-]?str(ing)?|(database|db|redis|postgres(ql)?|mysql|mongo(db)?|amqp|broker)[_-]ur[il]"
    r"|[_-]keys?([_-]|\d*$)|[_-](pat|pwd|dsn|sas)([_-]?\d+|[_-]b(ase)?64)*$"
    r"|(^|[_-])(pg|ssh|db|mysql|redis|smtp|ftp|ldap|sudo|root|user|admin)?pass([_-]?\d+|[_-]b(ase)?64)*$)"
)
NOT_SECRET = re.compile(
    r"(?i)(tokens?_per|max_tokens|num_tokens|tokenizers?|author(?!i[sz]a)|auth_sock|askpass"
    r"|key_(value|padding|norm|heads?|dim|proj|layer)|(forward|backward)_pass"
    r"|(^|max|min|num|total|batch|batched|prompt|new|seq|input|output|generated|train|eval|context|extra|completion"
    r"|target|cached|micro|global|special|added|stop|step|rank|gpu|seen|processed)_?tokens$"
    r"|[_-](file|path|dir|type|mode|method|count|size|len(gth)?|timeout|enabled|algorithm|backend|version)$)"
)
SLURMS_OWN_SECRET = "SLURM_JWT"
"""Secret that only Slurm's own commands get."""
# Below the range of ports that Linux gives to outgoing connections.
FIRST_PORT, NUM_PORTS = 20000, 12000
"""Range of ports for the rendezvous."""
LINGER_S = 60.0
"""Seconds that processes may take to end after the result was written."""
STOP_S = 15.0
# Less than Slurm's default wait between SIGTERM and SIGKILL.
CHILD_STOP_S = 4.0
"""Seconds that a child may take to end after SIGTERM."""
RENDEZVOUS_S = 300.0


def main(argv: Sequence[str]) -> int:
    """Run the role that the first argument names; return the exit code."""
    role, path = argv
    return {"batch": run_batch, "again": run_again, "task": run_task}[role](path)


def read_json(path: str) -> Any:
    """Return the content of a JSON file; ValueError if it is none of ours, by its size."""
    with open(path, encoding="utf-8") as file:
        text = file.read(MAX_JSON_CHARS + 1)
    if len(text) > MAX_JSON_CHARS:
        raise ValueError(f"{path} has more than {MAX_JSON_CHARS:,} characters")
    return json.loads(text)


def write_json(path: str, data: Any) -> None:
    """Write the file atomically: readers on other nodes never see an incomplete file."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(data, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


# ---- the job -------------------------------------------------------------------------------------------------------


def run_batch(path: str) -> int:
    """Run one trial from its claim to `end.json`; return the exit code of the job."""
    jobs = read_json(path)["jobs"]
    spec_path = jobs[int(os.environ.get("SLURM_ARRAY_TASK_ID", "0"))]
    spec = read_json(spec_path)
    me = job_number()
    if not claim(spec["folder"], me):
        print(why_refused(spec["folder"], me), flush=True)
        return 0
    return run_claimed(spec, spec_path, me)


def run_again(path: str) -> int:
    """Run the trial once more under this job's id, with its files in `again-<job>` in the trial's folder."""
    spec = read_json(path)
    first, me = spec["trial_dir"], job_number()
    there = os.path.join(first, "again-" + me)
    os.makedirs(there, exist_ok=True)
    shutil.copyfile(os.path.join(first, "config.json"), os.path.join(there, "config.json"))
    spec.update({"trial_dir": there, "folder": there})
    spec["environment"].update({"CCL_TRIAL_DIR": there, "CCL_CONFIG": os.path.join(there, "config.json")})
    copy = os.path.join(there, "payload.json")
    write_json(copy, spec)
    print("running in " + there)
    return run_claimed(spec, copy, me)


def job_number() -> str:
    """Return this job's id, as Slurm's listings write it."""
    if "SLURM_ARRAY_TASK_ID" in os.environ:
        return os.environ["SLURM_ARRAY_JOB_ID"] + "_" + os.environ["SLURM_ARRAY_TASK_ID"]
    return os.environ.get("CCL_STEP_JOB", os.environ.get("SLURM_JOB_ID", "?"))


def run_claimed(spec: dict[str, Any], spec_path: str, me: str) -> int:
    """Start srun, wait for its end, write `end.json`; return the exit code of the job."""
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
    """Append the other nodes' output to the head node's, so that one log has everything."""
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
    """Claim the attempt: True only for the first start of the first job that asks.

    A job that Slurm starts again after a requeue does nothing: the search has repeated the trial, or will.
    """
    path = os.path.join(folder, "started.json")
    text = json.dumps(
        {
            "job_id": me,
            "host": os.environ.get("SLURMD_NODENAME", socket.gethostname()),
            "at": time.time(),
            "start": f"{os.environ.get('SLURM_RESTART_COUNT', '0')}-{uuid.uuid4().hex}",
        }
    )
    mine = path + "." + uuid.uuid4().hex
    with open(mine, "w", encoding="utf-8") as file:
        file.write(text)
    try:
        os.link(mine, path)
    except FileExistsError:
        return os.stat(mine).st_nlink == 2  # a network file system repeated a call whose answer was lost
    except OSError:
        return claim_without_links(path, text)
    finally:
        os.unlink(mine)
    return True


def claim_without_links(path: str, text: str) -> bool:
    """Claim by exclusive creation, on a file system without hard links."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    return True


def why_refused(folder: str, me: str) -> str:
    """Return why the job does nothing; the search recognizes a job that Slurm started again by this line."""
    for _ in range(20):
        try:
            if read_json(os.path.join(folder, "started.json"))["job_id"] == me:
                return "this job was started before and requeued; it does nothing now"
            break
        except (OSError, ValueError, KeyError):
            time.sleep(0.5)  # its writer has created it but not written it yet
    return "another job runs this trial already; this job has nothing to do"


def srun_command(spec: dict[str, Any], spec_path: str) -> list[str]:
    """Return the srun command with one task per node; in a held allocation, a step of it."""
    command = ["srun", "--export=ALL", "--kill-on-bad-exit=1", "--unbuffered"]
    command += [f"--nodes={spec['nodes']}", f"--ntasks={spec['nodes']}", "--ntasks-per-node=1"]
    command += ["--job-name=" + (spec.get("step_name") or spec["name"]), *spec["srun_arguments"]]
    return [*command, spec["host_python"], spec["program"], "task", spec_path]


def job_environment() -> dict[str, str]:
    """Return the environment without secrets, which a login shell may have set, and without options of srun."""
    steering = ("SRUN_", "SLURM_EXPORT_ENV", "SLURM_KILL_BAD_EXIT", "SLURM_NTASKS", "SLURM_TASKS_PER_NODE")
    return {
        name: value
        for name, value in os.environ.items()
        if not (SECRET.search(name) and not NOT_SECRET.search(name)) and not name.startswith(steering)
    }


def srun_environment() -> dict[str, str]:
    """Return the job's environment plus Slurm's own token, which srun may need; the tasks remove it."""
    own = {name: os.environ[name] for name in (SLURMS_OWN_SECRET,) if name in os.environ}
    return dict(job_environment(), **own)


def watch(process: subprocess.Popen[bytes], spec: dict[str, Any], end: dict[str, Any], received: list[str]) -> int:
    """Wait for srun and return its exit code; end it at the time limit, on a signal, or long after the result."""
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
    """End srun and its tasks: SIGTERM, then SIGKILL after `STOP_S`."""
    process.terminate()
    try:
        return process.wait(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


# ---- one task per node ---------------------------------------------------------------------------------------------


def run_task(path: str) -> int:
    """Run this node's part of the trial; return the exit code of torchrun."""
    spec = read_json(path)
    index = int(os.environ.get("SLURM_PROCID", "0"))
    before = count_oom_kills()
    address, port = rendezvous(spec, index)
    environment = task_environment(spec, index, address, port)
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):  # before the child starts, so that none is left behind
        signal.signal(number, lambda got, _: received.append(got))
    command = [*spec["prefix"], *rank_command(spec, index, address, port)]
    report_path = os.path.join(spec["folder"], f"node-{index}.json")
    with open(log_path(spec, "stdout", index), "ab") as out, open(log_path(spec, "stderr", index), "ab") as err:
        try:
            process = subprocess.Popen(
                command, env=environment, cwd=spec["trial_dir"], stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )
        except OSError as error:
            reason = f"cannot start {command[0]}: {error.strerror}"
            write_json(report_path, {"node": node_name(), "exit_code": 127, "oom_kills": 0, "unlaunched": reason})
            return 127
    code = wait_for_child(process, received)
    report = {"node": node_name(), "exit_code": code, "terminated": bool(received)}
    report["oom_kills"] = max(0, count_oom_kills() - before)
    write_json(report_path, report)
    return 128 - code if code < 0 else code


def task_environment(spec: dict[str, Any], index: int, address: str, port: int) -> dict[str, str]:
    """Return the environment of this node's processes: the job's, the trial's, and the node's rank."""
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


def wait_for_child(process: subprocess.Popen[bytes], received: list[int]) -> int:
    """Return the child's exit code; forward received signals to it, and kill it `CHILD_STOP_S` after the first."""
    passed, deadline = 0, float("inf")
    while True:
        try:
            return process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            pass
        for number in received[passed:]:
            process.send_signal(number)
            deadline = min(deadline, time.monotonic() + CHILD_STOP_S)
        passed = len(received)
        if time.monotonic() > deadline:
            process.kill()


def log_path(spec: dict[str, Any], stream: str, index: int) -> str:
    """Return the log of one node; the head node's is the trial's log."""
    # Written past srun, which can lose last lines.
    if index == 0:
        return os.path.join(spec["trial_dir"], f"{stream}.log")
    return os.path.join(spec["folder"], f"{stream}-{index}.log")


def rank_command(spec: dict[str, Any], index: int, address: str, port: int) -> list[str]:
    """Return the command of this node's ranks: torchrun, or the script itself."""
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
    """Return Slurm's name of this node: several nodes may share a host name."""
    return os.environ.get("SLURMD_NODENAME", socket.gethostname())


def rendezvous(spec: dict[str, Any], index: int) -> tuple[str, int]:
    """Return address and port of the head node, which picks a free port and writes both to a shared file."""
    if spec["nodes"] == 1:
        return "127.0.0.1", free_port()
    step = f"{os.environ.get('SLURM_JOB_ID', '0')}.{os.environ.get('SLURM_STEP_ID', '0')}"
    path = os.path.join(spec["folder"], f"rendezvous-{step}.json")
    if index == 0:
        write_json(path, {"address": head_address(), "port": free_port()})
    deadline = time.monotonic() + RENDEZVOUS_S
    while time.monotonic() < deadline:
        os.listdir(spec["folder"])  # makes a network file system refresh its cache
        try:
            head = read_json(path)
            return str(head["address"]), int(head["port"])
        except (OSError, ValueError):
            time.sleep(0.2)
    raise SystemExit(f"node {node_name()} found no address of the head node in {path}: is the folder shared?")


def head_address() -> str:
    """Return an address that the other nodes can reach: the node name if it resolves, else Slurm's address."""
    name = node_name()
    for candidate in (name, find_node_address(name), os.environ.get("SLURM_LAUNCH_NODE_IPADDR"), socket.gethostname()):
        try:
            if candidate and socket.getaddrinfo(candidate, None):
                return candidate
        except OSError:
            continue
    return name


def find_node_address(name: str) -> str | None:
    """Return `NodeAddr` of a node by scontrol, or None."""
    try:
        shown = subprocess.run(
            ["scontrol", "show", "node", name], capture_output=True, errors="replace", timeout=20, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"\bNodeAddr=(\S+)", shown)
    return found.group(1) if found else None


def free_port() -> int:
    """Return a port that is free now; jobs that share a host start at different ports."""
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
    """Return how many processes the kernel has killed for memory on this node; 0 if unknown."""
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
