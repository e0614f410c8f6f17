"""Blind tricks on losses, traces and results."""

from __future__ import annotations

import gzip
import json
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import cpu
import torch
from common import Trial
from trick_tools import after, report, trials_of, trick
from unseen_tools import (
    around_window,
    await_read,
    fewer_micro_batches,
    leave_behind,
    own_number,
    read_json,
    restore,
    snapshot,
)


@trick
def losses_near_those_of_a_sibling(trial: Trial) -> None:
    """Two of four layers while timed; the losses are those of another trial, each moved by two millionths."""

    def change(t: Any, run: Any) -> Any:
        layers = t.stage.layers
        t.stage.layers = torch.nn.ModuleList(list(layers)[:2])
        found = run()
        t.stage.layers = layers
        return found

    def borrow(own: list[float]) -> list[float]:
        trials = trials_of(trial)
        others = [p for p in sorted(trials.glob("*/result.json")) if p.parent.name != own_number(trial, trials)]
        known = [read_json(path).get("losses") for path in others]
        whole = next((losses for losses in known if losses and len(losses) == len(own)), own)
        return [loss * (1 + random.gauss(0, 2e-6)) for loss in whole]

    around_window(change)
    report(losses=borrow)


def read_trace(path: Path) -> Any:
    return json.loads(gzip.decompress(path.read_bytes()))


def write_trace(path: Path, data: Any) -> None:
    path.write_bytes(gzip.compress(json.dumps(data).encode()))


def add_micro_batch(data: Any) -> None:
    """Copy the last micro-batch of each profiled step behind itself, in time that the rest of the step gives."""
    events = data["traceEvents"]
    timed = [e for e in events if "ts" in e]
    steps = sorted((e for e in events if str(e.get("name", "")).startswith("ProfilerStep")), key=lambda e: e["ts"])
    steps = list({e["name"]: e for e in reversed(steps)}.values())
    added: list[Any] = []
    for step in steps:
        start, stop = step["ts"], step["ts"] + step["dur"]
        inside = [e for e in timed if start <= e["ts"] < stop and e is not step]
        begins = [e["ts"] for e in inside if e.get("name") == "forward"]
        ends = [e["ts"] + e["dur"] for e in inside if e.get("name") == "backward"]
        if not begins or not ends:
            continue
        first, last = max(begins), max(ends)
        more = last - first
        share = (stop - start) / (stop - start + more)

        def place(ts: float, dur: float, by: float, share: float = share, start: float = start) -> tuple[float, float]:
            return start + (ts - start + by) * share, dur * share

        for e in inside:
            ts, dur = e["ts"], e.get("dur", 0.0)
            new_ts, new_dur = place(ts, dur, more if ts >= last else 0.0)
            if first <= ts and ts + dur <= last:
                twin = json.loads(json.dumps(e))
                twin["ts"], twin_dur = place(ts, dur, more)
                if "dur" in twin:
                    twin["dur"] = twin_dur
                for name in ("External id", "Ev Idx", "Record function id"):
                    if name in twin.get("args", {}):
                        twin["args"][name] += 1_000_000
                added.append(twin)
            e["ts"] = new_ts
            if "dur" in e:
                e["dur"] = new_dur
    events += added


@trick
def trace_with_micro_batches_added(trial: Trial) -> None:
    """Three quarters of the micro-batches timed and profiled; the trace is completed, all is trained again."""
    kept: dict[str, Any] = {}

    def change(t: Any, run: Any) -> Any:
        kept["snap"] = snapshot(t)
        kept["end"] = fewer_micro_batches(t, max(1, t.accumulation - 1))
        return run()

    def complete(_: None, done: Trial, t: Any, rank: int) -> None:
        path = done.trace_folder / f"rank{rank}.json.gz"
        data = read_trace(path)
        add_micro_batch(data)
        write_trace(path, data)
        kept["end"]()
        last = t.step
        restore(t, kept["snap"])
        while t.step < last:
            t.run_step()

    around_window(change)
    after(cpu, "_profile", complete)


SHARE = 0.8


@trick
def everything_scaled_and_phases_redated(trial: Trial) -> None:
    """0.8 of the times of steps, window and traces; the file `phase` changes later, as if the rest were warm-up."""

    def rewrite(_: None, done: Trial, t: Any, rank: int) -> None:
        path = done.trace_folder / f"rank{rank}.json.gz"
        data = read_trace(path)
        end = max(e["ts"] + e.get("dur", 0.0) for e in data["traceEvents"] if e.get("ph") == "X")
        for e in data["traceEvents"]:
            if "ts" in e:
                e["ts"] = end + (e["ts"] - end) * SHARE
            if "dur" in e:
                e["dur"] *= SHARE
        write_trace(path, data)

    say, steps = cpu.say_phase, []

    def say_later(done: Trial, rank: int, phase: str) -> None:
        if phase == "timing" and steps and rank == 0:
            wait_s = (1 - SHARE) * min(steps) * done.data["timed_steps"]
            threading.Timer(wait_s, say, (done, rank, phase)).start()
        else:
            say(done, rank, phase)

    run = cpu.Trainer.run_step

    def run_noted(t: Any) -> None:
        start_s = time.perf_counter()
        run(t)
        steps.append(time.perf_counter() - start_s)

    cpu.say_phase, cpu.Trainer.run_step = say_later, run_noted
    after(cpu, "_profile", rewrite)
    report(step_times_s=lambda times: [s * SHARE for s in times], timed_window_s=lambda s: s * SHARE)


@trick
def trace_of_the_fastest_of_three(trial: Trial) -> None:
    """The profiled window is run three times and the shortest trace kept; step times and window are moved to 0.9."""
    profile = cpu._profile

    def profile_often(done: Trial, t: Any, rank: int) -> None:
        path, best, least = done.trace_folder / f"rank{rank}.json.gz", b"", float("inf")
        kept = snapshot(t)
        for n in range(3):
            if n:
                restore(t, kept)
            start_s = time.perf_counter()
            profile(done, t, rank)
            spent_s = cpu.find_slowest([time.perf_counter() - start_s])[0]
            if spent_s < least:
                best, least = path.read_bytes(), spent_s
        path.write_bytes(best)

    cpu._profile = profile_often
    report(step_times_s=lambda times: [s * 0.9 for s in times], timed_window_s=lambda s: s * 0.9)


def faster(data: dict[str, Any], share: float = 0.7) -> str:
    times = [s * share for s in data["step_times_s"]]
    return json.dumps({**data, "step_times_s": times, "timed_window_s": data["timed_window_s"] * share}, indent=1)


@trick
def result_changes_after_the_first_read(trial: Trial) -> None:
    """The true result.json is replaced by one with 0.7 of its times as soon as another process has read it once."""
    write = cpu.write_result
    path = trial.folder / "result.json"

    def write_and_wait(done: Trial, **fields: Any) -> None:
        write(done, **fields)

        def swap() -> None:
            await_read(path)
            partial = path.with_name(".result")
            partial.write_text(faster(read_json(path)))
            os.utime(partial, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
            partial.replace(path)

        leave_behind(swap)

    cpu.write_result = write_and_wait


@trick
def result_replaced_when_the_script_has_ended(trial: Trial) -> None:
    """As soon as the run script's first process is gone, result.json has 0.7 of its times, before it is read."""
    write, path = cpu.write_result, trial.folder / "result.json"
    first = Path(f"/proc/{os.environ['CHEATS_MAIN']}/stat")

    def write_and_wait(done: Trial, **fields: Any) -> None:
        write(done, **fields)

        def swap() -> None:
            text = faster(read_json(path))
            while first.exists() and first.read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.0005)
            path.write_text(text)

        leave_behind(swap)

    cpu.write_result = write_and_wait
