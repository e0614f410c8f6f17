"""Shared by run scripts of serving and inference: start a server, await its health, send the loads, stop it, report.

Standard library only. The server is a process group of its own, which is ended whatever happens.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from common import (
    CpuClock,
    Trial,
    close_window,
    device_name,
    foreign_cores,
    host_name,
    open_window,
    say_phase,
    status_bytes,
    write_result,
)
from energy import energy_per_step, open_cpu_counter, read_energy
from serving_load import (
    OPENAI,
    UNANSWERED,
    Load,
    Record,
    Target,
    keeps_limits,
    run_load,
    search_concurrency,
    summarize_load,
)
from serving_nodes import Leader, Place, await_end, find_open_port, following, leading

LOG_FILE = "evidence.jsonl"
SERVER_LOG = "server.log"
POLL_S, MOST_POLL_S = 0.02, 0.5
"""Seconds between two looks at a server that starts: more and more."""
STOP_S = 10.0
"""Seconds that a server gets to end by itself."""
GIVE_UP_S = 2.0
"""Seconds in which a server that has lost a node may end by itself: its own reason is the better one."""
_TICKS = os.sysconf("SC_CLK_TCK")


class ServerFailed(Exception):
    """The server did not start, died, or answered wrongly; the message quotes its log."""


def find_port() -> int:
    """Return a port of the loopback interface that is free now."""
    return find_open_port("127.0.0.1")


@dataclass
class Server:
    """A server process with its port and log, and the nodes that run parts of it."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    nodes: Leader = field(default_factory=Leader)
    was_killed: bool = False
    """Whether it was ended because another node's share had ended."""
    log_read: int = 0
    """Bytes of the log from before the present load."""

    def get(self, path: str, timeout_s: float = 5.0) -> bytes | None:
        """Return what the server answers to a GET; None if it does not answer with 200."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            text = answer.read()
            return text if answer.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def begin_load(self) -> None:
        """Note where the log is now: what it said before does not explain an answer of this load."""
        with contextlib.suppress(OSError):
            self.log_read = self.log.stat().st_size

    def quote_log(self, since: int = 0) -> str:
        """Return the last line of the server's log that names an error, else the last, as the end of a message; `since`
        so many bytes."""
        with contextlib.suppress(OSError):
            text = self.log.read_bytes()[since:].decode("utf-8", "replace")
            lines = [line.strip() for line in text.splitlines()]
            said = [line for line in lines if line]
            errors = [line for line in said if "error" in line.lower() and "://" not in line]
            last = next(iter([*errors[-1:], *said[-1:]]), "")
            return f"; its log: {last[:300]}" if last else ""
        return ""

    def require_alive(self, when: str) -> None:
        """Raise ServerFailed if the process has ended by itself, else what another node reported."""
        code = self.process.poll()
        if code is None or self.was_killed:
            self.nodes.require_all()
        if code is not None:
            how = f"signal {-code}" if code < 0 else f"code {code}"
            beside = f"; {self.nodes.lost}" if self.nodes.lost else ""
            raise ServerFailed(f"the server ended with {how} {when}{self.quote_log()}{beside}")

    def await_health(self, limit_s: float, path: str = "/health") -> None:
        """Wait until the server answers; raises ServerFailed if it ends or takes longer than the limit."""
        end_s, pause_s = time.monotonic() + limit_s, POLL_S
        while self.get(path) is None:
            self.require_alive("before it was healthy")
            if time.monotonic() > end_s:
                raise ServerFailed(f"the server was not healthy after {limit_s:g} s{self.quote_log()}")
            time.sleep(pause_s)
            pause_s = min(1.1 * pause_s, MOST_POLL_S)

    def stop(self) -> None:
        """End every process of the server's group."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S)
                break
        self._signal(signal.SIGKILL)

    def give_up(self) -> None:
        """Kill a server that has lost a node and waits for it: requests to it fail now and not at their time limit."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GIVE_UP_S)
            return
        self.was_killed = True
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def require_free_port(self) -> None:
        """Raise ServerFailed if something still listens on the port of the server, which has ended."""
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                raise ServerFailed(f"the server ended, but another process still listens on its port {self.port}")


@dataclass(frozen=True)
class Share:
    """What a node starts of the server."""

    place: Place = field(default_factory=Place)
    ports: Mapping[str, int] = field(default_factory=dict)
    """Free ports of node 0 by what they are for, the same on every node."""
    address: str = "127.0.0.1"
    """Of this node, as the others reach it."""
    port: int = 0
    """A free port of this node, on which node 0 may reach its share; 0 on node 0."""
    others: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    """On node 0: address and `port` of every other node."""


Command = Callable[[int, Share], Sequence[str]]
"""Returns the command of a node's share of the server, which node 0's listens on this port."""


@contextlib.contextmanager
def running(words: Sequence[str], log: Path, port: int, nodes: Leader | None = None) -> Iterator[Server]:
    """Start a process group and end it after the block, also if a signal ends this process."""
    before, server = signal.signal(signal.SIGTERM, _exit_on_signal), None
    try:
        with log.open("wb") as out:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        server = Server(process, port, log, nodes or Leader())
        yield server
    finally:
        if server is not None:
            server.stop()
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def running_server(trial: Trial, command: Command, limit_s: float, port_names: Sequence[str] = ()) -> Iterator[Server]:
    """Start a server on this node and its shares on the others, wait until it is healthy, end all after the block."""
    port, place, ports = find_port(), Place.read(), {name: find_open_port() for name in port_names}
    with leading(place, trial.data.get("nonce", ""), ports) as nodes:
        words = command(port, Share(place, ports, nodes.address, others=nodes.addresses))
        with running(words, trial.folder / SERVER_LOG, port, nodes) as server:
            nodes.watch(server.give_up)
            try:
                server.await_health(limit_s)
                yield server
            finally:
                nodes.end()  # before this node's share: the others must not see it vanish
        server.require_free_port()


def follow_server(trial: Trial, command: Command) -> None:
    """Run this node's share of the server until node 0 ends the trial."""
    place, own = Place.read(), find_open_port()
    with following(place, trial.data.get("nonce", ""), port=own) as (peer, ports):
        port = find_port()
        words, log = command(port, Share(place, ports, peer.address, own)), trial.folder / f"server-{place.node}.log"
        with running(words, log, port) as server:
            await_end(peer, lambda: server.require_alive("during the trial"))
            peer.send(peak_bytes=peak_resident(server))


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


Joules = Mapping[str, float | None]
"""Device -> what its energy counter shows; None if it cannot be read."""


@dataclass
class Report:
    """What was measured so far."""

    loads: list[dict[str, Any]] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)


def measure_loads(
    trial: Trial,
    server: Server,
    target: Target,
    read_stats: Callable[[], Mapping[str, float]],
    read_joules: Callable[[], Joules],
) -> Report:
    """Warm up, then measure the trial's load, or the loads of a search for the largest concurrency; last a second."""
    data, report = trial.data, Report()
    planned, limits = data["requests"], data["limits"]
    seed, prefix = data["seed"], data["shared_prefix_tokens"]
    most = data.get("max_concurrency") or data.get("concurrency")
    say_phase(trial, 0, "warm-up")
    number = data["warmup_requests"]
    warm = [planned[n % len(planned)] for n in range(number)]
    server.begin_load()
    records, _ = run_load(target, Load(0, warm, min(most or 1, number), seed, prefix, is_warm_up=True))
    report.records += _require_answered(server, records)
    say_phase(trial, 0, "timing")

    def send(requests: Sequence[Mapping[str, Any]], concurrency: int | None, **facts: Any) -> list[Record]:
        read_stats()
        before = read_joules()
        server.begin_load()
        number = len(report.loads) + 1
        nonce, may_end = open_window(trial, number), data["arrival"] != "trace"
        load = Load(number - 1, requests, concurrency, seed, prefix, nonce=nonce, may_end=may_end)
        if not load.nonce:  # no search answered: the energy of the wait is not that of the load
            before = read_joules()
        records, window_s = run_load(target, load)
        answers = sorted(records, key=lambda r: r.number)
        close_window(trial, (f"{r.number} {r.output_tokens} {r.token_ids_sha256}" for r in answers), number)
        used = find_used(before, read_joules())
        report.records += _require_answered(server, records)
        energy_j = energy_per_step(used, window_s, 1)
        metrics = dict(read_stats()) | ({} if energy_j is None else {"energy_j": energy_j})
        found: dict[str, Any] = {"window_s": window_s, "metrics": metrics, **facts}
        rate = None if concurrency is not None else len(requests) / max(requests[-1]["arrival_s"], 1e-9)
        found |= {"concurrency": concurrency} if rate is None else {"request_rate": rate}
        found |= {"ended_s": max(r.end_s for r in records)} if any(r.error == UNANSWERED for r in records) else {}
        report.loads.append(found)
        return records

    def measure(concurrency: int | None) -> bool:
        return keeps_limits(summarize_load(send(planned, concurrency), data["num_ranks"]), limits)

    for _ in range(data["repeats"]):
        if data.get("max_concurrency"):
            search_concurrency(data["max_concurrency"], measure)
        else:
            measure(data.get("concurrency"))
    if other := data.get("other"):
        send(other["requests"], other["concurrency"], is_other=True)
    return report


def find_used(before: Joules, after: Joules) -> Joules:
    """Return each device's joules between two readings; None where one of them is missing."""
    used: dict[str, float | None] = {}
    for device in {**before, **after}:
        start, end = before.get(device), after.get(device)
        used[device] = None if start is None or end is None else end - start
    return used


def _require_answered(server: Server, records: list[Record]) -> list[Record]:
    failed = [record for record in records if record.error not in ("", UNANSWERED)]
    if failed:
        time.sleep(0.2)  # a server that dies is given the time to do so
        server.require_alive("under load")
        raise ServerFailed(
            f"{len(failed)} of {len(records)} requests failed, the first with: {failed[0].error}"
            f"{server.quote_log(server.log_read)}"
        )
    return records


def serve_trial(
    trial: Trial,
    command: Command,
    read_stats: Callable[[Server], Mapping[str, float]],
    describe: Callable[[Server], Mapping[str, Any]],
    model: str = "model",
    api: str = OPENAI,
    read_joules: Callable[[Server], Joules] | None = None,
    port_names: Sequence[str] = (),
) -> None:
    """Run one trial: start, measure, stop, then write the request log and `result.json`; on other nodes than the first,
    run their shares of the server until it ends.

    `read_stats` returns what the server reports since it was last called (`preemptions`, `kv_cache_use_peak`), and
    `describe` further fields of the result (`num_params`, `precision`, `peak_memory_bytes`). `read_joules` reads the
    energy counters of the server's devices; without it, those of this host's processors are read, if it is the only
    one. `port_names` are what node 0 needs ports for that the other nodes know (`Share.ports`).
    """
    if (place := Place.read()).node:
        return follow_server(trial, command)
    counter = open_cpu_counter(host=host_name()) if place.num_nodes == 1 else None
    own_joules: Joules = {} if counter is None else {counter.device: None}
    read_own = read_joules or (lambda _: {device: read_energy(counter) for device in own_joules})
    say_phase(trial, 0, "starting")
    limit_s = float(os.environ.get("CCL_TIMEOUT_S", "inf"))
    vocab = trial.data["arch"]["vocab_size"]
    asked_s = time.monotonic()
    with running_server(trial, command, min(0.5 * limit_s, 1800.0), port_names) as server:
        healthy_s = time.monotonic()
        start, server_s = CpuClock.read(), group_cpu_s(server.process.pid)
        target = Target(server.port, vocab, model, timeout_s=min(0.5 * limit_s, 600.0), api=api)
        report = measure_loads(trial, server, target, lambda: read_stats(server), lambda: read_own(server))
        end, measured_s = CpuClock.read(), time.monotonic()
        own_s = end.own_s - start.own_s + group_cpu_s(server.process.pid) - server_s
        described = dict(describe(server))
    if described.get("memory_kind") == "rss":
        described["peak_memory_bytes"] = [*described.get("peak_memory_bytes", ()), *server.nodes.peak_bytes.values()]
    say_phase(trial, 0, "writing")
    text = "".join(json.dumps(asdict(record)) + "\n" for record in report.records).encode()
    (trial.folder / LOG_FILE).write_bytes(text)
    write_result(
        trial,
        world_size=trial.data["num_ranks"],
        loads=report.loads,
        request_log_sha256=hashlib.sha256(text).hexdigest(),
        hosts=[host_name(), *server.nodes.hosts.values()],
        foreign_cpu_cores=foreign_cores(start, end, own_s),
        logical_cores=os.cpu_count(),
        extra={"start_s": f"{healthy_s - asked_s:.2f}", "measuring_s": f"{measured_s - healthy_s:.2f}"},
        **{"devices": [device_name()], **described},
    )


@dataclass
class EngineCounters:
    """Metrics of a load from counters of the server's Prometheus text."""

    names: Mapping[str, tuple[str, ...]]
    """Metric -> one counter, or two whose quotient it is, such as the sum and the count of a histogram."""
    sizes: Mapping[str, str] = field(default_factory=dict)
    """Metric -> pattern of the lines that state it now, with its number as the group; of several engines, the sum."""
    before: dict[str, float] = field(default_factory=dict)

    def read(self, server: Server) -> dict[str, float]:
        """Return the metrics of what happened since the last call; none whose counters the server does not have."""
        lines = (server.get("/metrics") or b"").decode("utf-8", "replace").splitlines()
        added: dict[str, float] = {}
        for counter in {name for names in self.names.values() for name in names}:
            values = [float(x.rpartition(" ")[2]) for x in lines if x.startswith((f"{counter}{{", f"{counter} "))]
            if values:
                added[counter] = sum(values) - self.before.get(counter, 0.0)
                self.before[counter] = sum(values)
        stated = {name: re.findall(pattern, "\n".join(lines), re.MULTILINE) for name, pattern in self.sizes.items()}
        found = {name: sum(map(float, numbers)) for name, numbers in stated.items() if numbers}
        for metric, (counter, *count) in self.names.items():
            divisor = added.get(count[0], 0.0) if count else 1.0
            if counter in added and divisor > 0:
                found[metric] = added[counter] / divisor
        return found


def group_cpu_s(group: int) -> float:
    """Return the CPU seconds that the processes of a group have used."""
    return sum(find_group(group).values())


def peak_resident(server: Server) -> int:
    """Return the sum of the peak resident memory of the server's processes on this node."""
    return sum(status_bytes("VmHWM", process) for process in find_group(server.process.pid))


def find_group(group: int) -> dict[int, float]:
    """Return each process of a group and the CPU seconds that it and its ended children have used."""
    found: dict[int, float] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                words = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(words[2]) == group:
                    found[int(folder.name)] = sum(map(int, words[11:15])) / _TICKS
    return found
