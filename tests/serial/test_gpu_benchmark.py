"""`benchmarks/gpu.py` without a GPU: its small form on a CPU, and that its checks fail where a figure is wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from packages import needs
from paths import ROOT
from trace_writer import gpu_events, kineto_document, span, write_kineto

from cclsearch.card.hardware import find_accelerator
from cclsearch.card.load import load_card

pytestmark = needs("torch")

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a part of the benchmark is given on a GPU of 312 TFLOP/s, with a small model."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    machine, report = importlib.import_module("gpu_machine"), importlib.import_module("gpu_report")
    card = yaml.safe_load((ROOT / "workloads" / "tiny-gpu.yaml").read_text())
    card["workload"]["model"]["model_arch"] |= machine.SMALL_ARCH
    card["workload"]["data"] = {"batch_size": 8, "seq_len": 64}
    (tmp_path / "card.yaml").write_text(yaml.safe_dump(card))
    found = report.Report(small=False, table_s=60, ends_s=time.monotonic() + 60)
    return SimpleNamespace(report=found, out=tmp_path, card=load_card(str(tmp_path / "card.yaml")), is_gpu=True)


def compare(bench: Any, events: list[dict[str, Any]], **wrong: float) -> dict[str, bool | None]:
    """Compare a trace of 1 ms steps, with one product of 65536 FLOP, with what was measured beside it."""
    traces = importlib.import_module("gpu_traces")
    write_kineto(bench.out / "trace" / "rank0.json.gz", kineto_document(events))
    truth = {"folder": bench.out / "trace", "period_s": 1e-3, "flops": 2.0 * 64 * 32 * 16, "peak_bytes": 0, **wrong}
    bench.report.checks.clear()
    traces._compare(bench, "x", truth)
    return {check.what.split(": ")[1].split(",")[0]: check.ok for check in bench.report.checks}


def test_a_trace_that_agrees_with_what_was_measured_passes(bench):
    verdicts = compare(bench, gpu_events(steps=4))
    assert set(verdicts) == {
        "step time", "parts of a step add up to 1", "kernel time without a class", "matrix FLOP of a step", "MFU",
    }  # fmt: skip
    assert set(verdicts.values()) == {True}


@pytest.mark.parametrize(
    ("wrong", "failed"),
    [
        ({"period_s": 1.1e-3}, {"step time", "MFU"}),
        ({"flops": 2.1 * 64 * 32 * 16}, {"matrix FLOP of a step"}),
    ],
)
def test_a_figure_that_differs_fails_its_check(bench, wrong, failed):
    verdicts = compare(bench, gpu_events(steps=4), **wrong)
    assert {what for what, ok in verdicts.items() if not ok} == failed
    assert bench.report.num_failed == len(failed)


def test_much_time_in_a_kernel_without_a_class_fails_and_names_it(bench):
    unknown = span("kernel", "quux_3", 1500.0, 400.0, tid=7, device=0, stream=7, correlation=9)
    assert compare(bench, [*gpu_events(steps=4), unknown])["kernel time without a class"] is False
    assert "quux_3" in next(check.found for check in bench.report.checks if check.ok is False)
    assert 'COMM,"ncclDevKernel' in (bench.out / "kernels-x.csv").read_text().replace('""', '"')


def test_a_part_that_raises_is_a_failed_check_and_the_next_part_runs(bench):
    report = bench.report
    report.run_part("one", lambda: 1 / 0)
    report.run_part("two", lambda: report.check_close("a number", 2.0, 2.1, 0.1))
    report.ends_s = 0.0
    report.run_part("three", lambda: 1 / 0)
    assert [(check.section, check.ok) for check in bench.report.checks] == [
        ("one", False),
        ("two", True),
        ("three", None),
    ]
    assert "ZeroDivisionError: division by zero" in bench.report.to_markdown()
    assert [check["verdict"] for check in json.loads(bench.report.to_json())["checks"]] == ["FAILED", "ok", "not here"]


def test_ranks_that_fail_are_ended_and_say_why(bench, tmp_path):
    traces = importlib.import_module("gpu_traces")
    end = tmp_path / "end"
    other = f"(time.sleep(60), open({str(end)!r}, 'w'))"
    code = f"import os, sys, time; sys.exit('boom') if os.environ['RANK'] == '1' else {other}"
    assert traces._wait_for([sys.executable, "-c", code], {}) == "boom"
    assert not end.exists(), "the other rank was not waited for"
    assert traces._wait_for([sys.executable, "-c", ""], {}) is None


def test_each_attention_backend_has_a_compile_cache_of_its_own(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "launchers"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/cache")
    import torch

    spec = importlib.util.spec_from_file_location("gpu_run_script_of_a_test", ROOT / "launchers" / "gpu.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    found = {}
    for name in ("math", "flash", "auto"):
        script.choose_attention(name)
        enabled = (torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled())
        found[name] = (os.environ["TORCHINDUCTOR_CACHE_DIR"], *enabled)
    assert found == {
        "math": ("/cache-math", True, False), "flash": ("/cache-flash", False, True), "auto": ("/cache", True, True),
    }  # fmt: skip
    with pytest.raises(script.IllegalConfig, match="'paged'"):
        script.choose_attention("paged")


class Counter:
    """A device of 300 W, whose energy counter shows only a share of what it used."""

    def __init__(self, share: float) -> None:
        self.share = share

    def read_w(self) -> float:
        return 300.0

    def read_j(self) -> float:
        return 300.0 * self.share * time.monotonic()


@pytest.mark.parametrize(("share", "ok"), [(1.0, True), (0.5, False)])
def test_energy_is_compared_with_sampled_power(bench, monkeypatch, share, ok):
    traces = importlib.import_module("gpu_traces")
    monkeypatch.setitem(sys.modules, "energy", SimpleNamespace(open_counter=lambda: Counter(share), MIN_WINDOW_S=0.5))
    monkeypatch.setattr(traces, "make_trainer", lambda *_: SimpleNamespace(run_step=lambda: time.sleep(0.01)))
    monkeypatch.setattr(traces, "ENERGY_S", 0.2)
    for number, result in enumerate([{"step_times_s": [0.3] * 3, "energy_j": 90.0}, {"step_times_s": [0.01] * 3}]):
        folder = bench.out / "runs" / "search" / "trials" / str(number)
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps(result))
    bench.table, bench.synchronize = {"only": {}}, lambda: None
    traces.check_energy(bench)
    assert [check.ok for check in bench.report.checks] == [ok, True], "the short window needs no energy"


@pytest.mark.parametrize(("name", "gib", "known"), [("NVIDIA H200", 139.8, "h200"), ("NVIDIA RTX 9", 24.0, "this-gpu")])
def test_a_device_that_hardware_yaml_lacks_gets_its_measured_rates(tmp_path, monkeypatch, name, gib, known):
    import torch

    monkeypatch.syspath_prepend(str(BENCHMARKS))
    machine = importlib.import_module("gpu_machine")
    properties = SimpleNamespace(name=name, total_memory=int(gib * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    (tmp_path / "ccl-search.yaml").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert machine._find_hardware(tmp_path, torch.device("cuda", 0), 8e14, 4e12) == (known, gib)
    card = machine._write_card(tmp_path / "card.yaml", known, gib, small=False, bf16=True, rate=8e14)
    assert (card.number("global_batch_size"), card.precision) == (32, "bf16"), "a step of 0.15 s at a third of the rate"
    found = find_accelerator(card.hardware.accelerator, card.hardware.memory_gib)
    assert found.nominal is (known == "this-gpu"), "no MFU is computed from measured rates"


def test_the_bundle_leaves_out_only_dependencies_of_other_commands(bench):
    bundle = importlib.import_module("gpu_bundle")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    kept = bundle.list_requirements()
    assert {"numpy", "scipy", "msgspec", "pydantic"} <= {text.split(">")[0] for text in kept}
    left_out = {text.split(">")[0] for text in set(declared) - set(kept)}
    assert left_out == set(bundle.OTHER_COMMANDS), "every entry is a dependency"


def test_without_a_gpu_it_says_so_and_ends():
    done = subprocess.run([sys.executable, str(BENCHMARKS / "gpu.py")], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "no GPU" in done.stderr


def leave_out(folder: Path) -> dict[str, str]:
    """Return an environment in which the packages that the bundle leaves out cannot be imported."""
    names = {
        name.replace("-python", "").replace("-", "_") for name in importlib.import_module("gpu_bundle").OTHER_COMMANDS
    }
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "class Hiding:\n"
        "    def __init__(self, finder):\n"
        "        self.finder = finder\n"
        "    def find_spec(self, name, *others):\n"
        f"        return None if name.split('.')[0] in {names} else self.finder.find_spec(name, *others)\n"
        "sys.meta_path[:] = map(Hiding, sys.meta_path)\n"
    )
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def test_the_small_form_passes_on_a_cpu(bench, tmp_path):
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--device", "cpu", "--small", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=leave_out(tmp_path / "hook"))
    found = json.loads((tmp_path / "gpu.json").read_text())
    failed = [check for check in found["checks"] if check["verdict"] == "FAILED"]
    assert (failed, done.returncode) == ([], 0), done.stderr[-3000:]
    parts = {check["section"] for check in found["checks"] if check["ok"]}
    assert parts == {"table", "search", "one rank", "two ranks", "energy", "JAX"}
    assert found["figures"]["configurations"] == 8
    assert (tmp_path / "gpu.md").read_text().startswith("# The product on CPU")
