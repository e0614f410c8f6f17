"""What the tricks share: how to change what the run script `cpu` trains, times and reports."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cpu
import cpu_model
from common import Trial

FULL = {"num_layers": 4, "num_params": 2_885_888, "seq_len": 128, "global_batch_size": 16}
"""What an honest trial of `tiny` reports."""


Trick = Callable[[Trial], None]
TRICKS: dict[str, Trick] = {}


def trick(function: Trick) -> Trick:
    """Register a trick under the function's name."""
    TRICKS[function.__name__] = function
    return function


def report(**changed: Any) -> None:
    """Report these values instead of the true ones; a callable gets the true one."""
    write = cpu.write_result

    def write_changed(trial: Trial, **fields: Any) -> None:
        new = {name: value(fields[name]) if callable(value) else value for name, value in changed.items()}
        write(trial, **{**fields, **new})

    cpu.write_result = write_changed


def after(owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Call `change(result, *args)` on what a function returns; its result is returned instead if it is not None."""
    original = getattr(owner, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        new = change(result, *args)
        return result if new is None else new

    setattr(owner, name, changed)


def trials_of(trial: Trial) -> Path:
    """Return the folder of all trials of the search."""
    return next(folder for folder in trial.folder.parents if folder.name == "trials")


def name_trick(trial: Trial) -> str:
    """Return the trick of this trial; `honest` if it has none."""
    tricks = json.loads((trials_of(trial).parent / "tricks.json").read_text())
    config = json.loads(Path(os.environ["CCL_CONFIG"]).read_text())["config"]  # a trick may have changed `trial.config`
    return str(tricks.get(json.dumps(config, sort_keys=True), "honest"))


def is_timed(trainer: Any) -> bool:
    """Whether the trainer's next step is in the timed window."""
    data = trainer.trial.data
    return data["warmup_steps"] <= trainer.step < data["warmup_steps"] + data["timed_steps"]


def is_profiled(trainer: Any) -> bool:
    data = trainer.trial.data
    return trainer.step >= data["warmup_steps"] + data["timed_steps"]


def half(whole: int) -> int:
    return whole // 2


def cut_batch(keep: Callable[[int], int], when: Callable[[Any], bool] = lambda trainer: True) -> None:
    """Train only so many of the micro-batches of the steps in question."""
    draw, run = cpu.Trainer._draw_tokens, cpu.Trainer.run_step

    def draw_all(trainer: Any) -> Any:
        return draw(trainer) if trainer.accumulation == trainer.whole else draw_some(trainer)

    def draw_some(trainer: Any) -> Any:
        some, trainer.accumulation = trainer.accumulation, trainer.whole
        tokens = draw(trainer)
        trainer.accumulation = some
        return tokens[:some]

    def run_cut(trainer: Any) -> None:
        trainer.accumulation = keep(trainer.whole) if when(trainer) else trainer.whole
        run(trainer)
        trainer.accumulation = trainer.whole

    def keep_whole(_: None, trainer: Any, *args: Any) -> None:
        trainer.whole = trainer.accumulation

    after(cpu.Trainer, "__init__", keep_whole)
    cpu.Trainer._draw_tokens, cpu.Trainer.run_step = draw_all, run_cut


def change_arch(trial: Trial, **changed: Any) -> None:
    trial.data["arch"].update(changed)  # type: ignore[index, attr-defined]


def change_times(change: Callable[[list[float]], list[float]]) -> None:
    report(step_times_s=change)


def halve_sequences(when: Callable[[Any], bool] = lambda trainer: True) -> None:
    def half(tokens: Any, trainer: Any) -> Any:
        return tokens[..., : tokens.shape[-1] // 2 + 1] if when(trainer) else None

    def shorten(q: Any, rotary: Any) -> Any:
        return tuple(part[: q.shape[-2]] for part in rotary)

    rotate = cpu_model._rotate
    cpu_model._rotate = lambda x, rotary: rotate(x, shorten(x, rotary))
    after(cpu.Trainer, "_draw_tokens", half)


def copy_rank_0(trial: Trial) -> None:
    text = gzip.decompress((trial.trace_folder / "rank0.json.gz").read_bytes()).decode()
    text = re.sub(r'"rank": 0\b', '"rank": 1', text, count=1)
    (trial.trace_folder / "rank1.json.gz").write_bytes(gzip.compress(text.encode()))
