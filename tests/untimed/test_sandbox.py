"""No program escapes from the sandbox, and each failure is reported within its limits."""

from __future__ import annotations

import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from llm.hostile import HOSTILE, SLOW

from cclsearch.propose.agent.policy.sandbox import SandboxError, SandboxLimits, run_policy

PATIENT = SandboxLimits(time_s=60.0)
"""The limits count wall time, also that in which a busy machine runs something else."""
TIGHT = SandboxLimits(time_s=0.4, memory_bytes=48 * 2**20, output_bytes=20_000)
INPUT = ({"config_space": [{"key": "tp", "type": "int", "choices": [1, 2], "description": ""}]}, {"total_gpus": 2})


def run(program: str, limits: SandboxLimits | None = None) -> dict[str, object]:
    return run_policy(program, *INPUT, limits=limits or PATIENT)


def test_an_ordinary_program_runs():
    program = """
import math, itertools, functools, collections, json, re
from typing import Any

def generate_config(workload: dict, environment: dict[str, Any]) -> dict:
    tps = [t for knob in workload["config_space"] if knob["key"] == "tp" for t in knob["choices"]]
    best = max(itertools.product(tps, [True, False]), key=lambda pair: (pair[0], not pair[1]))
    return {"tp": best[0], "activation_checkpointing": best[1], "lr": math.sqrt(4), "kernel": f"flash{2}"}
"""
    expected = {"tp": 2, "activation_checkpointing": False, "lr": 2.0, "kernel": "flash2"}
    assert run(program) == expected


def test_a_program_with_a_third_parameter_gets_the_history():
    program = "def generate_config(workload, environment, history: list[dict]):\n    return {'tp': len(history)}"
    assert run_policy(program, *INPUT, [{"score": 1.0}]) == {"tp": 1}


@pytest.mark.parametrize(
    "head",
    [
        "workload: dict,\n    environment: dict,\n    history: list[dict],\n",
        "workload, environment, *, history=None",
        "*, workload, environment, history=(), **more",
        "environment, workload, history",
        "w, e, past_runs",
        "w, e, history=None, /",
        "w, e, history: list = list()",
    ],
)
def test_every_signature_with_a_history_gets_it(head):
    names = [part.split(":")[0].split("=")[0].strip() for part in head.replace("*", "").split(",")]
    past = next(name for name in names if name in {"history", "past_runs"})
    program = f"def generate_config({head}):\n    return {{'tp': len({past})}}"
    assert run_policy(program, *INPUT, [{"score": 1.0}]) == {"tp": 1}


def test_a_program_runs_as_a_module_that_is_imported():
    program = """
def generate_config(workload, environment):
    tps = workload["config_space"][0]["choices"]
    first = next(t for t in tps if t > 1)
    none = next((t for t in tps if t > 99), None)
    pair = next(zip(tps, map(str, tps)))
    return {"tp": first, "none": none, "pair": f"{pair[1]}{next(iter(tps))}"}


if __name__ == "__main__":
    import argparse
    print(generate_config({}, {}))
"""
    assert run(program) == {"tp": 2, "pair": "11"}
    assert run(program.replace("\n", "\r\n")) == {"tp": 2, "pair": "11"}


def test_the_same_program_gives_the_same_configuration():
    program = "import random\ndef generate_config(w, e):\n    return {'tp': random.randint(1, 10**9)}"
    assert run(program) == run(program)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ("yield 1", "yield"),
        ("x = 1\n    del x", "del"),
        ("import statistics", "statistics"),
        ("import heapq", "heapq"),
        ("g = (x for x in [1, 2])\n    return {'tp': next(g)}", "next"),
        ("import numpy", "the sandbox runs a subset of Python"),
        ("return 1 / 0", "ZeroDivisionError"),
        ("return {'tp': None}", "None"),
        ("return [1]", "must return a dict"),
        ("return {'tp': [1]}", "plain number"),
        ("return {'tp': float('nan')}", "plain number"),
        ("return workload['no_such_field']", "no_such_field"),
    ],
)
def test_error_names_the_mistake(body, word):
    with pytest.raises(SandboxError, match=word):
        run(f"def generate_config(workload, environment):\n    {body}")


def test_program_without_the_function_is_refused():
    for program in ("x = 1", "", "def generate(workload, environment):\n    return {}"):
        with pytest.raises(SandboxError, match="defines no function generate_config"):
            run(program)
    assert run("pick = lambda w, e: {'tp': 2}\ngenerate_config = pick") == {"tp": 2}


def test_no_hostile_program_escapes(tmp_path, monkeypatch):
    canary = tmp_path / "canary.txt"
    canary.write_text("canary-in-a-file")
    monkeypatch.setenv("CCL_CANARY_API_KEY", "canary-in-the-environment")
    before = set(tmp_path.iterdir())
    # `benchmarks/agent.py` runs them all.
    chosen = [text for i, text in enumerate(HOSTILE) if i % 4]
    programs = [text.replace("CANARY_PATH", str(canary)) for text in chosen]
    assert len(set(programs)) >= 200

    def attempt(program: str) -> str:
        try:
            return f"returned {run(program, TIGHT)}"
        except SandboxError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        outputs = list(pool.map(attempt, programs))
    assert not [text for text in outputs if "canary-in" in text]
    assert not [(program, text) for program, text in zip(programs, outputs, strict=True) if text.startswith("returned")]
    assert all(text.strip() and len(text) <= 1600 for text in outputs)
    assert set(tmp_path.iterdir()) == before
    assert canary.read_text() == "canary-in-a-file"
    deadline = time.monotonic() + 60
    while leftovers() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert leftovers() == []


def leftovers() -> list[str]:
    """Processes of the sandbox that still run: children of this process, and interpreters without their parent."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        is_child = "sandbox_child.py" in command and int(parent) == os.getpid()
        is_orphan = command.endswith("monty subprocess ") and int(parent) == 1
        if state != "Z" and (is_child or is_orphan):
            found.append(command)
    return found


@pytest.mark.parametrize("program", SLOW, ids=range(len(SLOW)))
def test_an_endless_program_ends_at_its_limit(program):
    with pytest.raises(SandboxError):
        run(program, TIGHT)


def test_binary_or_too_long_program_is_refused_without_running():
    for program in ("def generate_config(w, e): return {}\0", "#" * 100_000):
        with pytest.raises(SandboxError, match="at most"):
            run(program)


def test_lone_surrogates_and_deep_nesting_are_failures_not_crashes():
    deep = "x = " + "(" * 5000 + "1" + ")" * 5000
    sums = "x = " + "+".join(itertools.repeat("1", 20_000))
    for program in ("x = '\ud800'", deep, sums, "x = " + "-" * 20_000 + "1"):
        with pytest.raises(SandboxError):
            run(program)
