"""Runs on a worker: starts the trial's process under a supervisor that outlives the connection, and reports its state.

Standard library only, Python 3.8 or newer; the two modules of the package that it imports are copied with it. Each call
prints one JSON line that begins with `CCL-WORKER `, so that the answers of many workers can share a stream. The folder
belongs to one job and has the copied files; each process keeps its own state in `w<N>/` (`claim.json`, `end.json`,
logs, `trial/`, `out.tar.gz`).
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

from cclsearch.core.atomic_file import write_atomically
from cclsearch.core.processes import boot_clock_s, boot_id, count_oom_kills, find_processes_by_variable, start_ticks

MARK = "CCL-WORKER "
CHUNK_BYTES = 192 * 1024
LINGER_S = 30.0
OUTPUTS = ("result.json", "evidence.jsonl", "failures", "trace")

MAX_JSON_CHARS = 64 * 2**20


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=("start", "status", "stop", "sweep"))
    parser.add_argument("folder")
    parser.add_argument("--process", type=int)
    parser.add_argument("--addresses", default="")
    parser.add_argument("--coordinator", default="")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--offsets", default="")
    args = parser.parse_args()
    folder = Path(args.folder).resolve()
    process = args.process if args.process is not None else find_process(args.addresses.split(","))
    if process is None:
        print("none of this worker's addresses is among " + args.addresses, file=sys.stderr)
        return 3
    answer = {"process": process, **ACTIONS[args.action](folder, folder / f"w{process}", process, args)}
    print(MARK + json.dumps(answer), flush=True)
    return 0


def find_process(addresses: list[str]) -> int | None:
    """Return this worker's index in the list, by the address of the connection or any other own address."""
    own = os.environ.get("SSH_CONNECTION", "").split()[2:3]
    if not (own and own[0] in addresses):
        try:
            own = subprocess.run(["hostname", "-I"], stdout=subprocess.PIPE, timeout=20).stdout.decode().split()
        except (OSError, subprocess.TimeoutExpired):
            own = []
    return next((addresses.index(address) for address in own if address in addresses), None)


def start(folder: Path, own: Path, process: int, args: argparse.Namespace) -> dict[str, Any]:
    """Start this process of the job, only at the first call; kill processes of the run's other attempts."""
    job = read_json(folder / "job.json")
    kill_trial_processes(attempts_pattern(str(folder), job), but=f"{folder}/")
    (own / "trial").mkdir(parents=True, exist_ok=True)
    claim = {"port": choose_port() if process == 0 else 0, **this_moment()}
    if not claim_file(own / "claim.json", claim):
        return read_state(own)
    shutil.copyfile(folder / "config.json", own / "trial" / "config.json")
    if os.fork() == 0:
        detach()
        try:
            supervise(folder, own, process, job, f"{args.coordinator}:{args.port or claim['port']}")
        finally:
            os._exit(0)
    deadline = boot_clock_s() + 20
    while not (own / "supervisor.json").exists() and boot_clock_s() < deadline:
        time.sleep(0.02)
    return read_state(own)


def status(folder: Path, own: Path, process: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the state of this process and its log output beyond the caller's offsets."""
    answer = read_state(own)
    wanted = dict(item.split("=") for item in args.offsets.split(",") if item)
    offsets = wanted.get(str(process), "0:0").split(":")
    for name, offset in zip(("stdout", "stderr"), offsets):  # noqa: B905 (`strict` is not in Python 3.8)
        text, more = read_from(own / name, int(offset))
        answer[name], answer["more"] = base64.b64encode(text).decode(), answer.get("more", False) or more
    return answer


def stop(folder: Path, own: Path, process: int, args: argparse.Namespace) -> dict[str, Any]:
    """End this process of the job and every process that it started."""
    if folder.is_dir():
        own.mkdir(exist_ok=True)
        claim_file(own / "claim.json", {"port": 0, **this_moment(), "void": True})
        (own / "stop").touch()
        kill_trial_processes(re.compile(re.escape(str(own / "trial"))))
        deadline = boot_clock_s() + 15
        while read_state(own)["state"] == "running" and boot_clock_s() < deadline:
            time.sleep(0.05)
    return read_state(own)


def sweep(folder: Path, own: Path, process: int, args: argparse.Namespace) -> dict[str, Any]:
    """Remove the job's files on this worker."""
    shutil.rmtree(own, ignore_errors=True)
    if not any(folder.glob("w[0-9]*")):
        shutil.rmtree(folder, ignore_errors=True)
    return {"state": "absent"}


ACTIONS = {"start": start, "status": status, "stop": stop, "sweep": sweep}


def read_state(own: Path) -> dict[str, Any]:
    """Return the state of the process: absent, running, ended (with exit code and reason), or vanished."""
    claim, end, supervisor = (read_json(own / f"{name}.json") for name in ("claim", "end", "supervisor"))
    if not claim:
        return {"state": "absent"}
    answer = {"port": claim.get("port", 0), "host": socket.gethostname(), "at": claim.get("at", 0)}
    if end:
        return dict(answer, state="ended", code=end["code"], reason=end["reason"], oom=end.get("oom", False))
    if claim.get("void"):
        return dict(answer, state="ended", code=-15, reason="stopped")
    if supervisor:
        alive = supervisor["boot"] == boot_id() and start_ticks(supervisor["pid"]) == supervisor["ticks"]
    else:  # it is being started
        alive = claim.get("boot") == boot_id() and boot_clock_s() - claim.get("boot_s", 0) < 30
    return dict(answer, state="running" if alive else "vanished")


def this_moment() -> dict[str, Any]:
    """Return the moment of a claim: Unix time for people, the boot clock to count from."""
    return {"at": time.time(), "boot": boot_id(), "boot_s": boot_clock_s()}


def supervise(folder: Path, own: Path, process: int, job: dict[str, Any], coordinator: str) -> None:
    """Run the script until it ends, times out or is stopped; pack its files, and write `end.json` last."""
    trial, pid = own / "trial", os.getpid()
    write_json(own / "supervisor.json", {"pid": pid, "ticks": start_ticks(pid), "boot": boot_id()})
    variables = {"CCL_TRIAL_DIR": str(trial), "CCL_CONFIG": str(trial / "config.json"), "CCL_JOB_NAME": job["name"]}
    if job["num_processes"] > 1:
        variables["CCL_PROCESS_ID"] = str(process)
        variables["CCL_NUM_PROCESSES"] = str(job["num_processes"])
        variables["CCL_COORDINATOR"] = coordinator
    dropped = ("SSH_CONNECTION", "SSH_CLIENT", "SSH_AUTH_SOCK", "SSH_ORIGINAL_COMMAND", "SSH_TTY")
    inherited = {name: value for name, value in os.environ.items() if name not in dropped}
    with open(own / "stdout", "wb") as out, open(own / "stderr", "wb") as err:
        oom_before = count_oom_kills()
        script = subprocess.Popen(
            ["/bin/bash", str(folder / "run.sh")],
            cwd=trial,
            env=dict(inherited, **variables),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        reason = watch(script, own, job["timeout_s"])
        kill_trial_processes(re.compile(re.escape(str(trial))))
        code = script.wait()
    oom = code in (-9, 137) and count_oom_kills() > oom_before
    pack(trial, own / "out.tar.gz")
    write_json(own / "end.json", {"code": code, "reason": reason, "oom": oom})


def watch(script: subprocess.Popen[bytes], own: Path, timeout_s: float) -> str:
    """Wait for the script; return why the wait ended."""
    deadline, result_at = boot_clock_s() + timeout_s, None
    while script.poll() is None and not (own / "stop").exists():
        now = boot_clock_s()
        if now > deadline:
            return "timeout"
        if result_at is None and (own / "trial" / "result.json").exists():
            result_at = now
        if result_at is not None and now - result_at > LINGER_S:
            return "lingered"
        time.sleep(0.1)
    return "stopped" if (own / "stop").exists() else "finished"


def pack(trial: Path, target: Path) -> None:
    """Pack the files for the search into one archive."""
    partial = target.with_name(f"{target.name}.part")
    with tarfile.open(partial, "w:gz", compresslevel=1) as archive:
        for name in OUTPUTS:
            if (trial / name).exists():
                archive.add(trial / name, arcname=name)
    partial.replace(target)


def attempts_pattern(folder: str, job: dict[str, Any]) -> re.Pattern[str]:
    """Return the pattern of this run's trial folders; a run whose name only begins like this one's does not match."""
    suffix = "-" + job["token"] if job.get("token") else ""
    start = os.path.join(os.path.dirname(folder), job["run_id"])
    return re.compile(re.escape(start) + r"-t\d+-a\d+" + re.escape(suffix) + r"/w\d+/trial")


def kill_trial_processes(pattern: re.Pattern[str], but: str = "") -> None:
    """Kill every process whose trial folder matches, unless it begins with `but`."""
    deadline = boot_clock_s() + 12
    hard = boot_clock_s() + 2
    while boot_clock_s() < deadline:
        found = find_trial_processes(pattern, but)
        if not found:
            return
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL if boot_clock_s() > hard else signal.SIGTERM)
        time.sleep(0.1)


def find_trial_processes(pattern: re.Pattern[str], but: str = "") -> list[int]:
    """Return the running processes whose trial folder matches, unless it begins with `but`."""
    running = find_processes_by_variable("CCL_TRIAL_DIR", "")
    folders = {pid: variables["CCL_TRIAL_DIR"] for pid, variables in running.items() if pid != os.getpid()}
    return [pid for pid, path in folders.items() if pattern.fullmatch(path) and not (but and path.startswith(but))]


def detach() -> None:
    """Detach from the connection: own session, no terminal, no open stream."""
    os.setsid()
    if os.fork():
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def choose_port() -> int:
    """Return a free port below the range of outgoing connections."""
    for _ in range(200):
        port = random.SystemRandom().randrange(20000, 30000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError("no free port between 20000 and 30000")


def claim_file(path: Path, data: dict[str, Any]) -> bool:
    """Write the file unless it exists; return whether this call wrote it."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    write_json(partial, data)
    try:
        os.link(partial, path)
    except FileExistsError:
        return False
    finally:
        partial.unlink()
    return True


def read_from(path: Path, offset: int) -> tuple[bytes, bool]:
    """Return the next piece of a file from an offset, and whether there is more."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(CHUNK_BYTES), bool(file.read(1))
    except OSError:
        return b"", False


def read_json(path: Path) -> dict[str, Any]:
    """Return the file as a mapping; empty if it is missing, too large, or not a JSON object."""
    with contextlib.suppress(OSError, ValueError), path.open(encoding="utf-8") as file:
        text = file.read(MAX_JSON_CHARS + 1)
        data = json.loads(text) if len(text) <= MAX_JSON_CHARS else None
        return data if isinstance(data, dict) else {}
    return {}


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write the file atomically."""
    write_atomically(path, json.dumps(data))


if __name__ == "__main__":
    sys.exit(main())
