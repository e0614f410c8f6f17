"""Blind tricks on serving: on the server (unseen_server.py), on the client and its log, and on what is around them."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import os
import signal
import time
from typing import Any

import cpu_serving
import serving_load
import serving_run
from common import Trial
from serving_load import Load, Record
from serving_tool import trick
from unseen_serving_tools import around_load, change_times, report, trials_of, use_server


@trick
def answers_prepared(trial: Trial) -> None:
    """The server computes all answers of the loads before it is healthy; then it only waits, half as long as a step."""
    use_server("prepared+no_compute")


@trick
def half_the_layers_prepared(trial: Trial) -> None:
    """Two of four layers are computed under load; the tokens sent are right: they were computed before."""
    use_server("prepared+half_the_layers")


@trick
def prompts_cut_prepared(trial: Trial) -> None:
    """The last quarter of each prompt is computed under load; the tokens sent are right: they were computed before."""
    use_server("prepared+prompts_cut")


@trick
def first_token_prepared(trial: Trial) -> None:
    """The first token of each answer was computed before and is sent at once; all others are computed honestly."""
    use_server("prepared+first_token")


@trick
def every_token_twice(trial: Trial) -> None:
    """Half of the tokens are computed, each is sent twice, the second half a step later; no ids are sent."""
    use_server("every_token_twice")


@trick
def hashes_of_a_sibling(trial: Trial) -> None:
    """The same, with hashes of the answers that another trial of the run has logged."""
    use_server("every_token_twice")
    borrow_hashes(trial)


def borrow_hashes(trial: Trial) -> None:
    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    own = trial.folder.relative_to(trials_of(trial)).parts[0]
    for path in sorted(trials_of(trial).glob(f"*/{serving_run.LOG_FILE}")):
        if path.parent.name != own:
            for line in path.read_text().splitlines():
                each = json.loads(line)
                if each["token_ids_sha256"]:
                    known.setdefault((each["load"], each["is_warm_up"], each["number"]), each)
    answered = serving_run._require_answered

    def fill(server: Any, records: list[Record]) -> list[Record]:
        for record in answered(server, records):
            twin = known.get((record.load, record.is_warm_up, record.number))
            if twin is not None:
                record.first_token_id, record.token_ids_sha256 = twin["first_token_id"], twin["token_ids_sha256"]
        return records

    serving_run._require_answered = fill


@trick
def short_prompts_sent(trial: Trial) -> None:
    """The client sends the last third of each prompt and logs the whole length, with hashes of another trial."""
    make = serving_load.make_body
    serving_load.make_body = lambda target, prompt, tokens: make(target, prompt[-max(1, len(prompt) // 3) :], tokens)
    borrow_hashes(trial)


@trick
def equal_prompts_sent(trial: Trial) -> None:
    """Every prompt is cut from one: all but the first are in the prefix cache. Hashes of another trial."""
    make, kept = serving_load.make_body, {}

    def make_equal(target: Any, prompt: list[int], tokens: int) -> Any:
        if len(prompt) > len(kept.get("prompt", ())):
            kept["prompt"] = [*kept.get("prompt", ()), *prompt[len(kept.get("prompt", ())) :]]
        return make(target, kept["prompt"][: len(prompt)], tokens)

    serving_load.make_body = make_equal
    use_server("prefix_stats_hidden")
    borrow_hashes(trial)


@trick
def prefixes_warmed(trial: Trial) -> None:
    """The load's own prompts are sent before it, for one token each, to a KV cache of 64 MiB instead of 8."""
    use_server("large_cache+prefix_stats_hidden")

    def change(run: Any, target: Any, load: Load) -> Any:
        short = [{**request, "output_tokens": 1, "arrival_s": 0.0} for request in load.requests]
        run(target, dataclasses.replace(load, requests=short, concurrency=8))
        return run(target, load)

    around_load(change)


@trick
def knobs_of_the_best(trial: Trial) -> None:
    """The server has two threads, 16 sequences and prefix caching, whatever the configuration asks for."""
    use_server("best_knobs+prefix_stats_hidden")


@trick
def second_server_hidden(trial: Trial) -> None:
    """Two servers, the second in a session of its own, share the requests behind a proxy; one is declared."""
    use_server("proxy")


@trick
def slow_requests_sent_again(trial: Trial) -> None:
    """The slowest quarter of the requests is sent again, one by one; these times replace the first."""

    def change(run: Any, target: Any, load: Load) -> Any:
        records, window_s = run(target, load)
        slowest = sorted(records, key=lambda r: r.arrival_s - r.end_s)[: len(records) // 4]

        async def send(record: Record, body: bytes) -> Record:
            again, start_s = dataclasses.replace(record, token_times_s=[]), time.perf_counter()
            now_s = lambda: record.sent_s + time.perf_counter() - start_s  # noqa: E731
            await serving_load._stream(target, body, again, now_s)
            again.end_s = again.token_times_s[-1]
            return again

        for record in slowest:
            asked = load.requests[record.number]
            prompt = serving_load.draw_prompt(load, record.number, asked["input_tokens"], target.vocab_size)
            body = json.dumps(serving_load.make_body(target, prompt, asked["output_tokens"])).encode()
            again = asyncio.run(send(record, body))
            if again.end_s < record.end_s:
                records[records.index(record)] = again
        last_s = max(record.end_s for record in records)
        return records, min(window_s, last_s + 0.002)

    around_load(change)


@trick
def best_of_three_loads(trial: Trial) -> None:
    """Each load is sent three times, and the log has the one with the shortest window."""

    def change(run: Any, target: Any, load: Load) -> Any:
        return min((run(target, load) for _ in range(3)), key=lambda found: found[1])

    around_load(change)


@trick
def head_start(trial: Trial) -> None:
    """The log begins 15 % of the load late: what was sent or answered before counts as at the start."""

    def change(run: Any, target: Any, load: Load) -> Any:
        records, window_s = run(target, load)
        late_s = 0.15 * window_s
        for record in records:
            floor = iter(range(1, 1_000_000))
            change_times(record, lambda s, floor=floor: s - late_s if s > late_s else next(floor) * 1e-5)
            record.sent_s = max(record.arrival_s, record.sent_s)
            record.token_times_s.sort()
            record.end_s = record.token_times_s[-1]
        return records, window_s - late_s

    around_load(change)


class SlowClock:
    """The module `time` with clocks that run at a share of their speed between `begin` and `end`."""

    CLOCK_MONOTONIC = time.CLOCK_MONOTONIC

    def __init__(self, share: float) -> None:
        self.share, self.start_s, self.lost_s = share, 0.0, 0.0

    def begin(self) -> None:
        self.start_s = time.clock_gettime(time.CLOCK_MONOTONIC)

    def clock_gettime(self, clock: int = time.CLOCK_MONOTONIC) -> float:
        now_s = time.clock_gettime(time.CLOCK_MONOTONIC)
        return self.start_s + (now_s - self.start_s) * self.share

    perf_counter = monotonic = clock_gettime


@trick
def load_clock_slowed(trial: Trial) -> None:
    """The clocks of the load generator run at 0.7 of their speed; what they lose counts as the server's start."""
    clock = SlowClock(0.7)
    lost: list[float] = []

    def change(run: Any, target: Any, load: Load) -> Any:
        clock.begin()
        start_s = time.monotonic()
        serving_load.time = clock
        try:
            found = run(target, load)
        finally:
            serving_load.time = time
        lost.append(0.3 * (time.monotonic() - start_s))
        return found

    def move(extra: dict[str, str]) -> dict[str, str]:
        start_s, measuring_s = float(extra["start_s"]), float(extra["measuring_s"])
        return {**extra, "start_s": f"{start_s + sum(lost):.2f}", "measuring_s": f"{measuring_s - sum(lost):.2f}"}

    around_load(change)
    report(extra=move)


@trick
def more_clients_than_said(trial: Trial) -> None:
    """Twice the clients send the load; the log shows half as many, each request in half of its time."""

    def change(run: Any, target: Any, load: Load) -> Any:
        said = load.concurrency or 1
        records, window_s = run(target, dataclasses.replace(load, concurrency=2 * said))
        free = [0.0] * said
        for record in sorted(records, key=lambda r: r.number):
            seat = free.index(min(free))
            start_s, sent_s = free[seat] + 2e-4, record.sent_s
            change_times(record, lambda s, start_s=start_s, sent_s=sent_s: start_s + max(0.0, s - sent_s) / 2)
            free[seat] = record.end_s
        share = (window_s - 0.003) / max(free)
        for record in records:
            change_times(record, lambda s: s * share)
        return records, window_s

    around_load(change)


@trick
def slow_requests_swapped(trial: Trial) -> None:
    """The token times of the slowest tenth are copies of those of a fast request of the same length, slightly moved."""

    def change(run: Any, target: Any, load: Load) -> Any:
        records, window_s = run(target, load)
        order = sorted(records, key=lambda r: (r.end_s - r.sent_s) / max(1, r.output_tokens))
        for slow in order[-max(1, len(order) // 10) :]:
            fast = min(order[: len(order) // 2], key=lambda r: abs(r.output_tokens - slow.output_tokens))
            steps = [s - fast.sent_s for s in fast.token_times_s]
            while len(steps) < slow.output_tokens:
                steps.append(steps[-1] + (steps[-1] - steps[0]) / max(1, len(steps) - 1))
            slow.token_times_s = [slow.sent_s + s * 1.003 for s in steps[: slow.output_tokens]]
            slow.end_s = slow.token_times_s[-1]
        return records, window_s

    around_load(change)


@trick
def server_goes_on_in_the_dark(trial: Trial) -> None:
    """The server sends the tokens of a step before it has computed them (prepared), and computes later."""
    use_server("prepared+sent_before_computed")


@trick
def log_changes_after_the_first_read(trial: Trial) -> None:
    """Log and result have 0.7 of their times as soon as another process has read the log once."""
    write = serving_run.write_result
    log, path = trial.folder / serving_run.LOG_FILE, trial.folder / "result.json"

    def swap() -> None:
        lines = []
        for line in log.read_text().splitlines():
            each = json.loads(line)
            for name in ("arrival_s", "sent_s", "end_s"):
                each[name] *= 0.7
            each["token_times_s"] = [s * 0.7 for s in each["token_times_s"]]
            lines.append(json.dumps(each) + "\n")
        text = "".join(lines).encode()
        data = json.loads(path.read_text())
        loads = [{**load, "window_s": load["window_s"] * 0.7} for load in data["loads"]]
        changed = {**data, "loads": loads, "request_log_sha256": hashlib.sha256(text).hexdigest()}
        await_read(str(log))
        log.write_bytes(text)
        path.write_text(json.dumps(changed, indent=1))

    def write_and_wait(done: Trial, **fields: Any) -> None:
        write(done, **fields)
        leave_behind(swap)

    serving_run.write_result = write_and_wait


def await_read(path: str) -> None:
    import ctypes

    libc = ctypes.CDLL(None)
    watch = libc.inotify_init()
    libc.inotify_add_watch(watch, path.encode(), 0x10)  # IN_CLOSE_NOWRITE
    os.read(watch, 4096)


def leave_behind(work: Any, life_s: int = 30) -> None:
    """Run something in a daemon that outlives the trial, for at most so many seconds."""
    if child := os.fork():
        os.waitpid(child, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.alarm(life_s)
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    os.closerange(3, 4096)
    try:
        work()
    finally:
        os._exit(0)


assert cpu_serving.SERVER.is_file()
