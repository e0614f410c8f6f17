"""The built-in launchers, proposers, providers, metrics, readers and tasks pass the suites of `cclsearch.testing`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trace_writer
import yaml

from cclsearch.plugins import METRICS
from cclsearch.propose.study.choose import list_samplers
from cclsearch.testing import (
    LauncherContract,
    MetricContract,
    ProposerContract,
    ProviderContract,
    ReaderContract,
    TaskContract,
)


@pytest.mark.serial
@pytest.mark.untimed
class TestLocal(LauncherContract):
    profile = {"launcher": "local"}


@pytest.mark.parametrize("proposer", [name for name in list_samplers() if name not in ("gp", "cmaes")])
class TestSamplers(ProposerContract):
    @pytest.fixture(autouse=True)
    def choose(self, proposer: str) -> None:
        self.proposer = proposer  # type: ignore[misc]


@pytest.mark.parametrize("metric", [name for name in METRICS.names() if name in ("comm_time", "comm_volume", "bus_bw")])
class TestMetrics(MetricContract):
    @pytest.fixture(autouse=True)
    def choose(self, metric: str) -> None:
        self.metric = metric  # type: ignore[misc]


class TestKineto(ReaderContract):
    reader = "chrome-json"

    def make_file(self, folder: Path) -> Path:
        path = folder / "rank0.json"
        path.write_text(json.dumps({"traceEvents": trace_writer.gpu_events()}))
        return path


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


class TestOpenAI(ProviderContract):
    provider = "openai"

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
    card: dict[str, Any] = yaml.safe_load((Path(__file__).parent.parent / "workloads" / f"{name}.yaml").read_text())
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
