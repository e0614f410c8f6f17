"""Tricks on what is timed, and on the times that are reported."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import Any

import cpu
import step_window
from common import Trial
from trick_tools import change_times, cut_batch, half, halve_sequences, is_timed, report, trick


@trick
def one_step(trial: Trial) -> None:
    """One timed step."""
    change_times(lambda times: times[:1])


@trick
def one_step_five_times(trial: Trial) -> None:
    """One timed step, written down five times."""
    change_times(lambda times: times[:1] * 5)


@trick
def minimum_for_all(trial: Trial) -> None:
    """The minimum, reported for every step."""
    change_times(lambda times: [min(times)] * len(times))


@trick
def minimum_with_noise(trial: Trial) -> None:
    """The minimum with random digits, reported for every step."""
    change_times(lambda times: [min(times) * random.uniform(1.0, 1.01) for _ in times])


@trick
def arithmetic_times(trial: Trial) -> None:
    """Step times on a straight line."""
    change_times(lambda times: [0.8 * min(times) + 2**-10 * n for n in range(len(times))])


@trick
def rounded_times(trial: Trial) -> None:
    """Step times rounded to one digit, downwards."""

    def round_down(times: list[float]) -> list[float]:
        unit = 10.0 ** math.floor(math.log10(min(times)))
        return [round((int(time_s / unit) + (n == 0)) * unit, 9) for n, time_s in enumerate(times)]

    change_times(round_down)


@trick
def half_the_time(trial: Trial) -> None:
    """Half of each step time."""
    change_times(lambda times: [time_s / 2 for time_s in times])


@trick
def third_of_the_time(trial: Trial) -> None:
    """A third of each step time."""
    change_times(lambda times: [time_s / 3 for time_s in times])


@trick
def tenth_of_the_time(trial: Trial) -> None:
    """A tenth of each step time."""
    change_times(lambda times: [time_s / 10 for time_s in times])


@trick
def cpu_time(trial: Trial) -> None:
    """CPU time of the process instead of wall time."""

    class Clock:
        perf_counter = staticmethod(time.process_time)

    step_window.time = Clock


@trick
def warmup_timed(trial: Trial) -> None:
    """Warm-up steps are reported as timed ones, the first left out as the slowest."""
    trial.data["timed_steps"] += 1  # type: ignore[index, operator]
    trial.data["warmup_steps"] = 0  # type: ignore[index]
    report(warmup_steps=2, step_times_s=lambda times: times[1:])


@trick
def half_while_timed(trial: Trial) -> None:
    """Half of the sequences while timed, all of them while profiled."""
    cut_batch(half, when=is_timed)


@trick
def short_while_timed(trial: Trial) -> None:
    """Half of each sequence while timed, all of it while profiled."""
    halve_sequences(when=is_timed)


@trick
def accumulation_cut_while_timed(trial: Trial) -> None:
    """One micro-batch while timed, all of them while profiled."""
    cut_batch(lambda whole: 1, when=is_timed)


@trick
def steps_skipped(trial: Trial) -> None:
    """Every second timed step does nothing; all report the mean."""
    run = cpu.Trainer.run_step

    def run_some(trainer: Any) -> None:
        if is_timed(trainer) and trainer.step % 2:
            trainer.losses.append(trainer.losses[-1])
            trainer.step += 1
        else:
            run(trainer)

    cpu.Trainer.run_step = run_some
    change_times(lambda times: [sum(times) / len(times) * random.uniform(0.97, 1.03) for _ in times])


def slow_down(clock: Callable[[], float]) -> Callable[[], float]:
    start_s = clock()
    return lambda: start_s + (clock() - start_s) / 2


@trick
def slow_clock(trial: Trial) -> None:
    """Python's clocks run at half speed."""
    for name in ("time", "monotonic", "perf_counter"):
        setattr(time, name, slow_down(getattr(time, name)))


@trick
def time_of_one_micro_batch(trial: Trial) -> None:
    """The time of one micro-batch is reported as that of a step."""
    change_times(lambda times: [time_s / trial.data["gradient_accumulation"] for time_s in times])


@trick
def update_not_timed(trial: Trial) -> None:
    """Reduction and update are left out of the step times."""
    update, spent = cpu.Trainer._update, []

    def update_untimed(trainer: Any) -> None:
        start_s = time.perf_counter()
        update(trainer)
        spent.append((is_timed(trainer), time.perf_counter() - start_s))

    def subtract(times: list[float]) -> list[float]:
        return [time_s - out_s for time_s, out_s in zip(times, [s for timed, s in spent if timed], strict=True)]

    cpu.Trainer._update = update_untimed
    change_times(subtract)


@trick
def times_of_the_fastest_rank(trial: Trial) -> None:
    """Each step's time is that of the fastest rank."""
    write = cpu._write_report

    def write_fastest(done: Trial, reports: list[dict[str, Any]]) -> None:
        fastest = [min(times) for times in zip(*(r["step_times_s"] for r in reports), strict=True)]
        write(done, [{**each, "step_times_s": fastest} for each in reports])

    cpu._write_report = write_fastest


@trick
def steps_not_waited_for(trial: Trial) -> None:
    """No step is waited for: the last one takes the time of all."""

    def move(times: list[float]) -> list[float]:
        short = [time_s / 100 for time_s in times[:-1]]
        return [*short, sum(times) - sum(short)]

    change_times(move)


@trick
def time_moved_to_two_steps(trial: Trial) -> None:
    """Three steps report half of their time, the other two the rest."""

    def move(times: list[float]) -> list[float]:
        short = [time_s / 2 for time_s in times[:3]]
        return [*short, *(time_s + sum(short) / 2 for time_s in times[3:])]

    change_times(move)


@trick
def half_the_time_and_window(trial: Trial) -> None:
    """Half of each step time, and half of the timed window."""
    half_the_time(trial)
    report(timed_window_s=lambda time_s: time_s / 2)
