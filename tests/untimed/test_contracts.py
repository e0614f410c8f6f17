"""The built-in launchers, proposers, providers, metrics, readers and tasks pass the suites of `cclsearch.testing`."""

from __future__ import annotations

import gzip
import importlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import trace_writer
import yaml
from paths import ROOT, TESTS
from rocprof_writer import rocprof_document, training_process
from test_trace_fuzz import CHAKRA

from cclsearch.core.registry import Registry
from cclsearch.plugins import LAUNCHERS, METRICS, PROPOSERS, PROVIDERS, READERS, TASKS
from cclsearch.propose.study.choose import list_samplers
from cclsearch.testing import (
    LauncherContract,
    MetricContract,
    ProposerContract,
    ProviderContract,
    ReaderContract,
    TaskContract,
)


class TestLocal(LauncherContract):
    profile = {"launcher": "local"}


@pytest.mark.parametrize("proposer", list_samplers())
class TestSamplers(ProposerContract):
    @pytest.fixture(autouse=True)
    def choose(self, proposer: str) -> None:
        self.proposer = proposer  # type: ignore[misc]


RECORDED = TESTS / "recorded"
NEED_A_CARD = {"allocation_ratio", "hfu", "mfu", "mfu_causal", "resource_efficiency", "scaling_efficiency"}
NEED_A_CARD |= {"bw_util", "tokens_per_s", "tokens_per_s_per_device", "compute_bound_frac", "memory_bound_frac"}
NEED_OTHER_EVENTS = {"gemm_tflops", "op_calls", "op_flops", "peak_memory", "wave_balance", "hockney_fit"}
NEED_OTHER_EVENTS |= {"moe_balance", "moe_frac", "pipeline_bubble"}
NEED_A_LOG = {"output_tokens_per_s", "requests_per_s", "tpot", "ttft"}


@pytest.mark.parametrize("metric", METRICS.names())
class TestMetrics(MetricContract):
    @pytest.fixture(autouse=True)
    def choose(self, metric: str) -> None:
        self.metric = metric  # type: ignore[misc]
        self.has_value = metric not in NEED_A_CARD | NEED_OTHER_EVENTS | NEED_A_LOG  # type: ignore[misc]


def write_file(reader: str, folder: Path) -> Path:
    """Write a trace in the format of that reader, as a profiler names it."""
    execution, tpu = RECORDED / "gloo-execution2", RECORDED / "jax-cpu2"
    if reader == "chrome-json":
        return trace_writer.write_kineto(folder / "rank0.json", {"traceEvents": trace_writer.gpu_events()})
    if reader == "nsys-sqlite":
        return trace_writer.write_nsys(folder / "report1.sqlite")
    if reader == "xspace":
        return Path(shutil.copy(next(tpu.rglob("*.xplane.pb")), folder))
    if reader == "pytorch-et":
        path = folder / "execution_rank0.json"
        path.write_bytes(gzip.decompress((execution / "execution_rank0.json.gz").read_bytes()))
        return path
    if reader == "rocprofiler-json":
        path = folder / "results.json"
        path.write_text(json.dumps(rocprof_document(training_process())))
        return path
    assert reader == "chakra-et", f"no file for the reader {reader!r}"
    path = folder / "chakra.0.et"
    path.write_bytes(CHAKRA)
    return path


@pytest.mark.parametrize("reader", [name for name in READERS.names() if name != "unsupported"])
class TestReaders(ReaderContract):
    """`unsupported` only names formats that cannot be read."""

    @pytest.fixture(autouse=True)
    def choose(self, reader: str) -> None:
        self.reader = reader  # type: ignore[misc]

    def make_file(self, folder: Path) -> Path:
        return write_file(self.reader, folder)


class TestAnthropic(ProviderContract):
    provider = "anthropic"

    def answer_body(self, text: str, calls: tuple[tuple[str, dict[str, Any]], ...]) -> bytes:
        content: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
        content += [
            {"type": "tool_use", "id": f"c{n}", "name": name, "input": given} for n, (name, given) in enumerate(calls)
        ]
        body = {"type": "message", "role": "assistant", "content": content}
        body |= {"stop_reason": "tool_use" if calls else "end_turn", "usage": {"input_tokens": 10, "output_tokens": 5}}
        return json.dumps(body).encode()


@pytest.mark.parametrize("provider", ["openai", "compatible"])
class TestOpenAI(ProviderContract):
    @pytest.fixture(autouse=True)
    def choose(self, provider: str) -> None:
        self.provider = provider  # type: ignore[misc]

    def answer_body(self, text: str, calls: tuple[tuple[str, dict[str, Any]], ...]) -> bytes:
        made = [
            {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
            for n, (name, given) in enumerate(calls)
        ]
        message = {"role": "assistant", "content": text, **({"tool_calls": made} if made else {})}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if made else "stop"}
        usage = {"prompt_tokens": 10, "completion_tokens": 5}
        return json.dumps({"object": "chat.completion", "choices": [choice], "usage": usage}).encode()


def card_of(name: str) -> dict[str, Any]:
    """Return a shipped card as YAML gives it."""
    card: dict[str, Any] = yaml.safe_load((ROOT / "workloads" / f"{name}.yaml").read_text())
    return card


class TestTraining(TaskContract):
    task = "training"
    card = card_of("wl5")
    config = {"tp": 4, "pp": 1, "dp": 4, "ep": 4, "micro_batch_size": 1}
    metrics = {"step_time_s": 1.5}


class TestServing(TaskContract):
    task = "serving"
    card = card_of("tiny-serving")
    config = {"tp": 1}
    metrics = {"output_tokens_per_s_per_accelerator": 120.0, "ttft_p99_s": 0.02}


class TestInference(TaskContract):
    task = "inference"
    card = card_of("wl1-inference")
    config = {"tp": 4}
    metrics = {"output_tokens_per_s_per_accelerator": 900.0, "batch_latency_s": 2.5}


def built_in(registry: Registry[Any]) -> set[str]:
    """Names without those that other tests register in this process."""
    entries = {name: registry.get(name) for name in registry.names()}
    modules = {name: getattr(entry, "__module__", type(entry).__module__) for name, entry in entries.items()}
    return {name for name, module in modules.items() if module.startswith("cclsearch.")}


def test_every_built_in_part_is_in_a_suite():
    """A new one fails here until it is, or until it is named with the reason."""
    searched = {"default", "hybrid", "llm", "pareto"}  # strategies, and what others contain: in the tests of searches
    assert built_in(PROPOSERS) - set(list_samplers()) == searched
    apart = {"mcp"}  # an agent outside of the search: tests/untimed/test_mcp.py
    assert built_in(PROVIDERS) - apart == {"anthropic", "openai", "compatible"}
    command = {"command"}  # its trials are the caller's: tests/untimed/test_command.py
    assert built_in(TASKS) - command == {each.task for each in (TestTraining, TestServing, TestInference)}
    runs_scripts = {name for name in built_in(LAUNCHERS) if getattr(LAUNCHERS.get(name), "runs_scripts", True)}
    assert runs_scripts == {"local", "slurm", "tpu-vm"}, "the others run no script, and have tests of their own"


def test_launchers_share_what_the_page_says():
    """Each name exists; each module is used by the launchers of Slurm and of TPU VMs."""
    root = ROOT
    page = (root / "docs" / "extending.md").read_text().split("## What launchers share")[1].split("\n## ")[0]
    used = {
        place: "".join(path.read_text() for path in (root / "cclsearch" / "launch" / place).glob("*.py"))
        for place in ("slurm", "tpu_vm")
    }
    rows = re.findall(r"(?m)^\| (`cclsearch[^|]*) \| (.*) \|$", page)
    assert len(rows) == 7
    for modules, names in rows:
        found = [importlib.import_module(name) for name in re.findall(r"`([\w.]+)`", modules)]
        for name in re.findall(r"`(\w+)`", names):
            assert any(hasattr(module, name) for module in found), name
        for module in found:
            lacking = [place for place, text in used.items() if f"from {module.__name__} import" not in text]
            assert lacking == [] or module.__name__ == "cclsearch.launch.environment", (module.__name__, lacking)
