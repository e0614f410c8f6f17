"""The parts of `gpu.py` on traces: what the toolkit says of real traces, beside counts made here without it."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from gpu_machine import LAUNCHERS, Bench
from gpu_search import STEP_TIME, make_trainer
from torch.profiler import ProfilerActivity, profile, schedule

from cclsearch.card.model import Card
from cclsearch.core.values import Config
from cclsearch.launch.contract import trial_environment
from cclsearch.plugins import TASKS
from cclsearch.trace.events import Kind
from cclsearch.trace.names.kernels import ComputeClass
from cclsearch.trace.names.kinds import classify_kernel
from cclsearch.trace.read import open_trace
from cclsearch.trace.score import TraceScore, score_view

STEPS = 4
"""Profiled steps, after one to warm up the profiler."""
RANKS_S = 120.0
ENERGY_S = 5.0
UNCLASSIFIED = 0.05
"""Largest share of kernel time in kernels without a class."""


def check_one_rank(bench: Bench) -> None:
    """Profile the fastest configuration, and the fastest compiled one, and compare with counts made here."""
    ok = {config: row for config, row in bench.table.items() if row["status"] == "ok"}
    if not ok:
        bench.report.skip("traces", "the part `table` did not run")
        return
    for is_compiled in sorted({bool(config["compile"]) for config in ok}):
        config = min((c for c in ok if bool(c["compile"]) == is_compiled), key=lambda c: ok[c][STEP_TIME])
        name = "compiled" if is_compiled else "eager"
        bench.report.note(f"{name}: {config}")
        trainer = make_trainer(bench, config)
        truth = _profile(bench, trainer.run_step, name)
        recomputed = 1 if config["activation_checkpointing"] == "full" else 0
        stored = config["attention"] == "math"
        truth["flops"] = count_flops(bench.card, recomputed_layers=recomputed, stores_probabilities=stored)
        _compare(bench, name, truth)
        del trainer


def count_flops(card: Card, *, recomputed_layers: int = 0, stores_probabilities: bool = False) -> float:
    """Return the matrix FLOP of one optimizer step, counted from the shapes of the model's products.

    A product of (m, k) with (k, n) is 2 m n k, its two gradients as much again each; attention multiplies queries with
    keys and probabilities with values over the whole square of the sequence, its backward pass 2.5 times that (twice if
    the probabilities are stored: the others compute them again). Recomputed layers run forward twice.
    """
    arch, batch, seq = card.arch, card.number("global_batch_size"), card.number("seq_len")
    tokens, width = batch * seq, arch.num_heads * arch.head_dim
    keys = 2 * arch.num_kv_heads * arch.head_dim
    weights = arch.hidden_size * (width + keys) + width * arch.hidden_size
    weights += arch.hidden_size * arch.intermediate_size * (3 if arch.gated_mlp else 2)
    dense, attention = 2.0 * tokens * weights, 4.0 * batch * seq * seq * width
    layer = (3 + recomputed_layers) * dense + (3.5 - 0.5 * stores_probabilities + recomputed_layers) * attention
    return arch.num_layers * layer + 3 * 2.0 * tokens * arch.hidden_size * arch.vocab_size


def _profile(bench: Bench, run_step: Callable[[], object], name: str) -> dict[str, Any]:
    """Write a trace of some steps; return what was measured beside it: periods of steps, and the allocator's peak."""
    for _ in range(2):
        run_step()
    bench.synchronize()
    marks: list[Any] = []
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if bench.is_gpu else [])]
    plan = schedule(wait=0, warmup=1, active=STEPS, repeat=1)
    peak = 0
    with profile(activities=activities, schedule=plan, record_shapes=True, profile_memory=True) as profiler:
        for step in range(1 + STEPS):
            if step == 1 and bench.is_gpu:
                torch.cuda.reset_peak_memory_stats()
            marks.append(_mark(bench))
            run_step()
            if step == 0:
                bench.synchronize()  # otherwise the trace begins with kernels of this step
            if step == STEPS and bench.is_gpu:
                peak = torch.cuda.max_memory_allocated()
            profiler.step()
        bench.synchronize()
    folder = bench.out / "traces" / name
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / "rank0.json.gz"))
    return {"folder": folder, "period_s": inner_period(_periods(bench, marks[1:])), "peak_bytes": peak}


def inner_period(periods_s: list[float]) -> float:
    """Return the median period of the inner steps: the toolkit leaves out the first and the last step."""
    return statistics.median(periods_s[1:])


def _mark(bench: Bench) -> Any:
    if not bench.is_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _periods(bench: Bench, marks: list[Any]) -> list[float]:
    return [a.elapsed_time(b) / 1e3 if bench.is_gpu else b - a for a, b in pairwise(marks)]


def _compare(bench: Bench, name: str, truth: dict[str, Any]) -> None:
    """Check the toolkit's figures of one trace of one rank."""
    report, card = bench.report, bench.card
    score = score_view(open_trace(truth["folder"], card=card))
    events = read_events(truth["folder"] / "rank0.json.gz")
    step = score.value("trace_step_time")
    report.figures[f"{name}: step under the profiler (s)"] = truth["period_s"]
    report.figures[f"{name}: diagnosis"] = list(score.diagnosis.sentences)[:3] if score.diagnosis else []
    tolerance = 0.03 if bench.is_gpu else 0.1  # on a CPU other processes disturb the timer
    report.check_close(f"{name}: step time, beside the device's timer", truth["period_s"], step, tolerance, "s")
    _check_parts(bench, name, score)
    _check_classes(bench, name, events)
    flops = score.metrics["gemm_tflops"]
    per_step = float(str(flops.inputs["flops"])) / flops.n_steps if flops.n_steps else None
    report.check_close(f"{name}: matrix FLOP of a step, beside a count from shapes", truth["flops"], per_step, 0.02)
    _check_mfu(bench, name, score, truth["period_s"])
    if truth["peak_bytes"]:
        peak = score.metrics["peak_memory"].value
        report.check_close(f"{name}: peak memory, beside the allocator's", truth["peak_bytes"], peak, 0.01, "B")
        _check_kernels(bench, name, score, events)


def _check_parts(bench: Bench, name: str, score: TraceScore) -> None:
    names = ("compute_frac", "exposed_comm_frac", "exposed_mem_frac", "idle_frac")
    parts = [score.metrics[part].value for part in names]
    whole = sum(part for part in parts if part is not None) if None not in parts else None
    shown = ", ".join(f"{part} {value:.3f}" for part, value in zip(names, parts, strict=True) if value is not None)
    ok = whole is not None and abs(whole - 1) < 0.005
    bench.report.check(f"{name}: parts of a step add up to 1", "0.995 to 1.005", f"{whole} ({shown})", ok)


def _check_mfu(bench: Bench, name: str, score: TraceScore, period_s: float) -> None:
    mfu = score.metrics["mfu"]
    if mfu.value is None:
        bench.report.skip(f"{name}: MFU", f"{mfu.reason}: {mfu.detail}")
        return
    whole = count_flops(bench.card, stores_probabilities=True)  # by convention the backward pass is twice the forward
    peak = float(str(mfu.inputs["peak_flops"]))
    bench.report.check_close(f"{name}: MFU, beside a count from shapes", whole / period_s / peak, mfu.value, 0.03)


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a Kineto trace, read with the standard library."""
    with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def _check_classes(bench: Bench, name: str, events: Iterable[dict[str, Any]]) -> None:
    """Check the share of kernel time without a class, and write all names with their class and time."""
    times: Counter[str] = Counter()
    for event in events:
        if event.get("cat") == "kernel":
            times[event["name"]] += event["dur"]
    if not times:
        bench.report.skip(f"{name}: kernel classes", "no kernels: a CPU trace has operators only")
        return
    classes = {kernel: _class_of(kernel) for kernel in times}
    lines = [f"{time_us:.1f},{classes[kernel]},{json.dumps(kernel)}" for kernel, time_us in times.most_common()]
    (bench.out / f"kernels-{name.replace(' ', '-')}.csv").write_text("us,class,name\n" + "\n".join(lines) + "\n")
    other = {kernel: time_us for kernel, time_us in times.items() if classes[kernel] == ComputeClass.OTHER.name}
    share = sum(other.values()) / sum(times.values())
    worst = "; ".join(kernel[:80] for kernel, _ in Counter(other).most_common(3))
    bench.report.check(
        f"{name}: kernel time without a class, of {len(times)} kernels", f"at most {UNCLASSIFIED:.0%}",
        f"{share:.1%} {worst}", share <= UNCLASSIFIED,
    )  # fmt: skip


def _class_of(kernel: str) -> str:
    kind, compute = classify_kernel(kernel)
    return compute.name if kind is Kind.COMPUTE else kind.name


def _check_kernels(bench: Bench, name: str, score: TraceScore, events: list[dict[str, Any]]) -> None:
    """Check the busy time of the device against an interval union made here, over the same steps."""
    busy, step = score.metrics["idle_frac"], score.value("trace_step_time")
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in kinds)
    covered, end = 0.0, float("-inf")
    for start, stop in spans:
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    if busy.value is not None and step:
        per_step = covered / 1e6 / STEPS
        bench.report.check_close(
            f"{name}: busy time of a step, beside a union made here", per_step, (1 - busy.value) * step, 0.05, "s"
        )


def check_two_ranks(bench: Bench) -> None:
    """Two data-parallel ranks of the run script share the device: losses as of one rank, one all-reduce a step."""
    batch = bench.card.number("global_batch_size")
    config = {"tp": 1, "dp": 2, "micro_batch_size": batch // 4, "activation_checkpointing": "none", "compile": False,
              "optimizer": "foreach", "attention": "auto"}  # fmt: skip
    payload = TASKS.get("training").make_input(
        bench.card, Config(config), is_measured=True, run_id="two", trial=1, seed=0, nonce="gpu-benchmark"
    )
    folder = bench.out / "traces" / "two-ranks"
    way = _run_ranks(bench, folder, [str(LAUNCHERS / "gpu.py")], payload)
    if way is None:
        return
    report, name, result = bench.report, f"two ranks over {way}", json.loads((folder / "result.json").read_text())
    score = score_view(open_trace(folder, card=bench.card))
    _check_ranks(bench, name, score, folder / "trace")
    alone = make_trainer(bench, Config({**config, "dp": 1}))
    for _ in range(3):
        alone.run_step()
    losses, wanted = result["losses"][:3], [float(loss) for loss in alone.losses]
    close = len(losses) == 3 and all(abs(a - b) < 0.02 for a, b in zip(losses, wanted, strict=True))
    report.check(
        f"{name}: losses of one rank", str([round(x, 4) for x in wanted]), str([round(x, 4) for x in losses]), close
    )
    traced, timed = score.value("trace_step_time"), statistics.median(result["step_times_s"])
    if bench.is_gpu:
        report.check_close(f"{name}: traced step, beside the timed one", timed, traced, 0.5, "s")
    gradients = 4.0 * result["num_params"]  # in an all-reduce of two ranks each link carries the message once
    report.check_close(
        f"{name}: bytes of the gradients' all-reduce", gradients, score.metrics["comm_volume"].value, 0.01, "B"
    )
    report.figures |= {
        f"{name}: step (s)": timed,
        f"{name}: overlap": score.metrics["overlap"].value,
        f"{name}: exposed communication": score.metrics["exposed_comm_frac"].value,
        f"{name}: memory per rank (GiB)": [bytes_ / 2**30 for bytes_ in result["peak_memory_bytes"]],
    }


def _check_ranks(bench: Bench, name: str, score: TraceScore, folder: Path) -> None:
    bench.report.check(
        f"{name}: ranks found", "2 of 2", f"{len(score.ranks)} of {score.world_size}", score.ranks == (0, 1)
    )
    _check_parts(bench, name, score)
    for rank in score.ranks:
        _check_classes(bench, f"{name}, rank {rank}", read_events(folder / f"rank{rank}.json.gz"))


def _run_ranks(bench: Bench, folder: Path, words: list[str], payload: Any) -> str | None:
    """Run two ranks of a program that share the device; return the backend with which they ended well, or None."""
    ways = ("nccl", "gloo") if bench.is_gpu else ("gloo",)
    for way in ways:
        bench.free()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        own = {"CCL_SHARE_GPU": way} if bench.is_gpu else {"CCL_DEVICE": "cpu"}
        own["GLOO_SOCKET_IFNAME"] = "lo"
        own["PYTHONPATH"] = os.pathsep.join([str(LAUNCHERS), os.environ["PYTHONPATH"]])
        (folder / "config.json").write_text(payload.model_dump_json())
        own |= trial_environment(folder, payload)
        failure = _wait_for([sys.executable, *words], own)
        if failure is None:
            bench.report.check("two ranks on one device", "they train", f"over {way}", True)
            return way
        bench.report.note(f"two ranks on one device over {way} failed: {failure}")
    bench.report.check("two ranks on one device", "they train", "they failed", False)
    return None


def _wait_for(words: list[str], own: dict[str, str]) -> str | None:
    """Start two ranks and wait for them; return what the first that failed said, None if both ended well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in ("0", "1"):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks.append(
            subprocess.Popen(
                words, env={**os.environ, **own, **place}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
        )
    deadline = time.monotonic() + RANKS_S
    while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    failed = next((rank for rank in ranks if rank.poll()), None)
    failure = None if all(rank.poll() == 0 for rank in ranks) else f"no end after {RANKS_S:.0f} s"
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
    said = [" ".join(rank.communicate()[1].split())[-400:] for rank in ranks]
    if failed is not None:
        failure = said[ranks.index(failed)] or f"exit code {failed.returncode}"
    return failure


def check_energy(bench: Bench) -> None:
    """Energy by the driver's counter, beside sampled power over the same seconds."""
    energy = sys.modules["energy"]
    counter = energy.open_counter()
    results = [json.loads(path.read_text()) for path in sorted(bench.out.glob("runs/search/trials/*/result.json"))]
    reported = [result.get("energy_j") for result in results]
    if counter is None:
        bench.report.skip("energy of a step", "this device has no counter that can be read")
        bench.report.check("trials that report energy", "none", f"{sum(map(bool, reported))}", not any(reported))
        return
    trainer = make_trainer(bench, min(bench.table, key=lambda config: bench.table[config].get(STEP_TIME, float("inf"))))
    trainer.run_step()
    bench.synchronize()
    watts, stop = [], threading.Event()
    sampler = threading.Thread(
        target=lambda: [watts.append(counter.read_w()) for _ in iter(lambda: stop.wait(0.02), True)]
    )
    sampler.start()
    start_j, started, steps = counter.read_j(), time.monotonic(), 0
    while time.monotonic() - started < ENERGY_S:
        trainer.run_step()
        steps += 1
    bench.synchronize()
    used_j, seconds = counter.read_j() - start_j, time.monotonic() - started
    stop.set()
    sampler.join()
    bench.report.figures |= {"energy of a step (J)": used_j / steps, "power (W)": used_j / seconds}
    if watts:
        expected = statistics.fmean(watts) * seconds
        bench.report.check_close(f"energy over {ENERGY_S:g} s, beside sampled power", expected, used_j, 0.2, "J")
    else:
        bench.report.skip("energy beside sampled power", "the device's power cannot be read")
    bench.report.figures["energy of the search's trials (J per step)"] = reported
    long_enough = [result for result in results if sum(result.get("step_times_s", ())) > 1.1 * energy.MIN_WINDOW_S]
    silent = sum(result.get("energy_j") is None for result in long_enough)
    bench.report.check(
        f"of {len(long_enough)} trials with a window over 0.55 s, those without energy", "0", f"{silent}", not silent
    )


def check_jax(bench: Bench) -> None:
    """Train two layers with JAX on the device in a process of its own, and read its XSpace."""
    folder = bench.out / "traces" / "jax"
    bench.free()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    words = [
        sys.executable,
        str(Path(__file__).with_name("gpu_jax.py")),
        str(folder),
        "small" if bench.small else "full",
    ]
    own = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | ({} if bench.is_gpu else {"JAX_PLATFORMS": "cpu"})
    done = subprocess.run(words, env={**os.environ, **own}, capture_output=True, text=True, timeout=120)
    if "No module named 'jax'" in done.stderr:
        bench.report.skip("JAX", "it is not installed")
        return
    if done.returncode:
        raise RuntimeError(" ".join(done.stderr.split())[-400:])
    truth = json.loads((folder / "truth.json").read_text())
    if bench.is_gpu and truth["platform"] == "cpu":
        bench.report.skip("JAX on the GPU", "this JAX sees no GPU")
        return
    score = score_view(open_trace(folder))
    report = bench.report
    report.figures |= {"JAX": truth["version"], "JAX: device": truth["device"], "JAX: step (s)": truth["period_s"]}
    step, tolerance = score.metrics["trace_step_time"].value, 0.1
    report.check_close("JAX: step time, beside the host's timer", truth["period_s"], step, tolerance, "s")
    _check_parts(bench, "JAX", score)
    flops = score.metrics["gemm_tflops"]
    if flops.value is None:
        report.skip("JAX: matrix FLOP of a step", f"{flops.reason}: {flops.detail}")
        return
    per_step = float(str(flops.inputs["flops"])) / max(1, flops.n_steps)
    report.check_close("JAX: matrix FLOP of a step, beside a count from shapes", truth["flops"], per_step, 0.05)
