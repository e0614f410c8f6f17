"""Measures a framework's own training loop by wrapping its function for one optimizer step.

Warm-up, then the unprofiled timed window, then a profiled one: the same for each framework, independent of its own
profiler and logs. Works on accelerators and, for testing, on CPUs. Scripts whose loop is their own call `time_steps`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from common import (
    STEPS_BEFORE_STOP,
    CpuClock,
    EndedEarly,
    PeakMemory,
    Trial,
    close_window,
    device_name,
    foreign_cores,
    host_name,
    is_too_slow,
    open_window,
    package_versions,
    say_phase,
    use_nonce,
    window_clock_s,
    write_result,
)
from energy import EnergyCounter, energy_per_step, open_counter, open_cpu_counter, read_energy


class StepWindow:
    """Counts, times and profiles the steps of this rank; after the last one rank 0 writes `result.json`.

    `read_losses` takes what some steps returned and returns the loss of each, or nothing on ranks that have none. Every
    rank calls it, after the timed steps or the last one, so that no loss is read while steps are timed. `read_work`
    returns what was trained: `global_batch_size`, `seq_len`, `precision`, `num_layers` if known. `count_parameters`
    returns how many parameters this rank counts: each parameter of the whole model is counted by one rank.
    """

    def __init__(
        self,
        trial: Trial,
        *,
        packages: tuple[str, ...],
        read_work: Callable[[], Mapping[str, Any]],
        read_losses: Callable[[list[Any]], list[float]],
        count_parameters: Callable[[], int],
    ) -> None:
        import torch

        self.trial, self.packages, self.read_work, self.read_losses = trial, packages, read_work, read_losses
        self.count_parameters = count_parameters
        data = trial.data
        self.first_timed = int(data["warmup_steps"])
        self.first_profiled = self.first_timed + int(data["timed_steps"])
        self.num_steps = count_steps(trial)
        self.step, self.step_times_s, self.start_s = 0, [], 0.0
        self.timed_window_s = 0.0
        self.status = "ok"
        self.returned: list[Any] = []
        self.timed_losses: list[float] | None = None
        """Of the timed steps, if the search was asked for their nonce."""
        self.on_gpu = torch.cuda.is_available()
        self.memory = None if self.on_gpu else PeakMemory()
        self.peak_bytes = 0
        self.profiler: Any = None
        self.clocks: list[CpuClock] = []
        self.energy: EnergyCounter | None = None
        self.energy_j: list[float | None] = []

    def wrap(self, run_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return the framework's step function with the measurement around it."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.open_step()
            returned = run_step(*args, **kwargs)
            self.close_step(returned)
            return returned

        return run

    def open_step(self) -> None:
        """Begin an optimizer step: a framework without a function for one calls it where its steps meet."""
        import torch

        if self.step == 0:
            self._say("warm-up")
        if self.step == self.first_timed:
            self._synchronize()
            self._say("timing")
            if self.on_gpu:
                torch.cuda.reset_peak_memory_stats()
            self.energy = open_counter() if self.on_gpu else open_cpu_counter(host=host_name())
            torch.distributed.barrier()
            self._read_clocks()
            self._ask_nonce()
            self.timed_window_s = -window_clock_s()
        elif self.step == self.first_profiled:
            self._say("profiling")
            self._start_profiler()
        if self.profiler is not None:
            mark_trace(self.trial)
        self.start_s = time.perf_counter()

    def close_step(self, returned: Any) -> None:
        """End the step; after the last one the result is written."""
        self._synchronize()
        time_s = time.perf_counter() - self.start_s
        if self.first_timed <= self.step < self.first_profiled:
            self.step_times_s.append(time_s)
            if self.step == self.first_profiled - 1:
                self.timed_window_s += window_clock_s()
        self.returned.append(returned)
        if self.profiler is not None:
            self.profiler.step()
        self.step += 1
        if self.step == self.first_profiled:
            self._read_clocks()
            self.peak_bytes = self._read_peak()
            self._close_window()
        if self.step == self.num_steps:
            self._finish()
        elif len(self.step_times_s) == STEPS_BEFORE_STOP and self.step < self.first_profiled:
            self._end_if_too_slow()

    def _end_if_too_slow(self) -> None:
        """Write the result and leave the framework's loop if the first timed steps show that it cannot be the fastest.

        All ranks decide the same.
        """
        if self.trial.data.get("stop_above") is None:
            return
        import torch.distributed as dist

        asked_s = window_clock_s()
        times: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(times, self.step_times_s)
        self.timed_window_s -= window_clock_s() - asked_s
        if is_too_slow(self.trial, [max(step) for step in zip(*times, strict=True)]):
            self.timed_window_s += window_clock_s()
            self._read_clocks()
            self.peak_bytes = self._read_peak()
            self.status = "pruned"
            self._close_window()
            self._finish()
            raise EndedEarly

    def _ask_nonce(self) -> None:
        import torch.distributed as dist

        given = [open_window(self.trial) if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(given)
        use_nonce(self.trial, given[0])
        if not given[0]:  # no search answered: energy and load of the wait are not those of the steps
            self.clocks, self.energy_j = [], []
            self._read_clocks()

    def _close_window(self) -> None:
        """Read the losses of the timed steps and leave their digest, if the search has opened the window."""
        import torch.distributed as dist

        if self.trial.data.get("opens_window"):
            self.timed_losses = self.read_losses(self.returned[self.first_timed :])
            if dist.get_rank() == 0:
                close_window(self.trial, self.timed_losses)

    def _read_all_losses(self) -> list[float]:
        """Return the losses of all steps; those that the window closed with are not computed again."""
        if self.timed_losses is None:
            return self.read_losses(self.returned)
        early, late = self.returned[: self.first_timed], self.returned[self.first_timed + len(self.timed_losses) :]
        return [*self.read_losses(early), *self.timed_losses, *(self.read_losses(late) if late else ())]

    def _say(self, phase: str) -> None:
        import torch

        say_phase(self.trial, torch.distributed.get_rank(), phase)

    def _read_clocks(self) -> None:
        self.clocks.append(CpuClock.read())
        self.energy_j.append(read_energy(self.energy))

    def _synchronize(self) -> None:
        import torch

        if self.on_gpu:
            torch.cuda.synchronize()

    def _read_peak(self) -> int:
        import torch

        return self.memory.peak_bytes() if self.memory is not None else torch.cuda.max_memory_allocated()

    def _start_profiler(self) -> None:
        from torch.profiler import ProfilerActivity, profile, schedule

        plan = schedule(wait=0, warmup=1, active=int(self.trial.data["profiled_steps"]), repeat=1)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])]
        self.profiler = profile(activities=activities, schedule=plan, record_shapes=True, profile_memory=True)
        self.profiler.start()

    def _finish(self) -> None:
        import torch
        import torch.distributed as dist

        rank = dist.get_rank()
        if self.profiler is not None:
            self.profiler.stop()
            self.profiler.export_chrome_trace(str(self.trial.trace_folder / f"rank{rank}.json.gz"))
        report = {
            "step_times_s": self.step_times_s,
            "timed_window_s": self.timed_window_s,
            "losses": self._read_all_losses(),
            "num_params": self.count_parameters(),
            "peak_bytes": self.peak_bytes,
            "device": torch.cuda.get_device_name() if self.on_gpu else device_name(),
            "host": host_name(),
            "own_s": self.clocks[1].own_s - self.clocks[0].own_s,
            "energy": self._read_used_energy(),
        }
        reports: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, report)
        if rank == 0:
            self._write(reports)
        dist.barrier()

    def _read_used_energy(self) -> tuple[str, float | None]:
        """Return the device, and its joules over the timed window, None if unknown."""
        start, end = self.energy_j
        if self.energy is None or start is None or end is None:
            return "", None
        return self.energy.device, end - start

    def _write(self, reports: list[dict[str, Any]]) -> None:
        import torch

        versions = package_versions("torch", *self.packages)
        if self.on_gpu:
            versions["cuda"] = str(torch.version.cuda)
            versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        own_s = sum(report["own_s"] for report in reports if report["host"] == reports[0]["host"])
        write_result(
            self.trial,
            status=self.status,
            world_size=len(reports),
            step_times_s=[max(times) for times in zip(*(r["step_times_s"] for r in reports), strict=True)],
            timed_window_s=max(report["timed_window_s"] for report in reports),
            warmup_steps=self.first_timed,
            num_params=sum(report["num_params"] for report in reports),
            peak_memory_bytes=[report["peak_bytes"] for report in reports],
            memory_kind="device" if self.on_gpu else "rss",
            losses=next((report["losses"] for report in reversed(reports) if report["losses"]), []),
            versions=versions,
            devices=[report["device"] for report in reports],
            hosts=[report["host"] for report in reports],
            foreign_cpu_cores=foreign_cores(*self.clocks, own_s),
            logical_cores=os.cpu_count(),
            energy_j=energy_per_step(
                dict(report["energy"] for report in reports),
                self.clocks[1].wall_s - self.clocks[0].wall_s,
                len(self.step_times_s),
            ),
            **self.read_work(),
        )


def time_steps(
    trial: Trial, run_step: Callable[[], None], find_slowest: Callable[[list[float]], list[float]]
) -> dict[str, Any]:
    """Run the timed window; returns the fields `is_pruned`, `step_times_s` and `timed_window_s` of this rank's report.

    `run_step` returns when the step is done. `find_slowest` returns the seconds of each step by the slowest rank, from
    this rank's: every rank calls it at the same step, and its time is not part of the window.
    """
    step_times_s: list[float] = []
    window_start_s, is_pruned = window_clock_s(), False
    for step in range(1, trial.data["timed_steps"] + 1):
        start_s = time.perf_counter()
        run_step()
        step_times_s.append(time.perf_counter() - start_s)
        if step == STEPS_BEFORE_STOP and trial.data.get("stop_above") is not None:
            asked_s = window_clock_s()
            is_pruned = is_too_slow(trial, find_slowest(step_times_s))
            window_start_s += window_clock_s() - asked_s
        if is_pruned:
            break
    timed_window_s = window_clock_s() - window_start_s
    return {"is_pruned": is_pruned, "step_times_s": step_times_s, "timed_window_s": timed_window_s}


def mark_trace(trial: Trial) -> None:
    """Write the attempt's annotation into the trace that is being recorded."""
    from torch.profiler import record_function

    with record_function(trial.mark):
        pass


def count_steps(trial: Trial) -> int:
    """Return the optimizer steps of a trial: warm-up, timed, and profiled ones with one to warm up the profiler."""
    profiled = int(trial.data["profiled_steps"])
    return int(trial.data["warmup_steps"]) + int(trial.data["timed_steps"]) + (profiled + 1 if profiled else 0)
