"""The run script of vLLM: what it renders and refuses, without vLLM; `make test-vllm` serves with a real one."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from paths import ROOT
from test_serving_live import ARCH, run_script

from cclsearch.card.load import load_card
from cclsearch.card.model import KnobDeclaration
from cclsearch.report.launch_form import make_launch
from cclsearch.space.build import build_space
from cclsearch.space.framework import load_framework
from cclsearch.stats.closed_form import predict_space

LAUNCHERS = ROOT / "launchers"
REQUESTS = [{"arrival_s": 0.0, "input_tokens": 100, "output_tokens": 20}]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(LAUNCHERS))
    return importlib.import_module("vllm_serve")


def make_data(config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    return {"config": config, "precision": "bf16", "seed": 3, "requests": REQUESTS, "arch": ARCH, **changes}


def test_switches_have_two_forms_and_defaults_are_left_out(script):
    config = {"tp": 2, "prefix_caching": False, "enforce_eager": True, "kv_cache_dtype": "auto", "kv_cache_gib": 2}
    assert script.render_options(config) == [
        "--tensor-parallel-size", "2", "--no-enable-prefix-caching", "--enforce-eager",
    ]  # fmt: skip


def test_every_knob_of_the_framework_file_is_rendered(script):
    framework = load_framework("vllm-cpu")
    for knob in (*framework.knobs, *framework.optional_knobs):
        for choice in knob.choices:
            words = script.render_options({knob.name: choice})
            assert words or choice in script.NO_OPTION or knob.name == script.KV_CACHE_GIB


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        ({"colour": "red"}, {}, "vllm has no knob 'colour'"),
        ({"chunked_prefill": False, "max_num_batched_tokens": 64}, {}, "at least 128, which the longest request needs"),
        ({}, {"precision": "fp6"}, "vllm serves bf16, fp16, fp32, fp8, .* weights here, not fp6"),
    ],
)
def test_what_the_script_cannot_serve_is_refused(script, config, changes, message):
    with pytest.raises(script.IllegalConfig, match=message):
        script.render_command(make_data(config, **changes), "MODEL", 8000)


def test_a_model_that_llama_and_mixtral_cannot_build_is_refused(script):
    with pytest.raises(script.IllegalConfig, match="gated_mlp must be true"):
        script.describe_model({**ARCH, "gated_mlp": False}, 64)


def test_the_launch_by_hand_has_the_same_options(script):
    form = script.show_launch(make_data({"max_num_seqs": 4, "kv_cache_gib": 2}))
    assert form.command[:3] == ["vllm", "serve", "MODEL"]
    assert form.command[-2:] == ["--max-num-seqs", "4"]
    assert form.environment == {"VLLM_CPU_KVCACHE_SPACE": "2"}


def test_counters_of_prometheus_are_of_a_load_and_summed_over_engines(script):
    texts = [
        b'# HELP x\nvllm:num_preemptions_total{engine="0"} 3.0\nvllm:num_preemptions_total{engine="1"} 4.0\n'
        b'vllm:cache_config_info{block_size="16",engine="0",kv_cache_size_tokens="5312"} 1.0\n'
        b"vllm:request_queue_time_seconds_sum 5.0\nvllm:request_queue_time_seconds_count 10.0\n",
        b'vllm:num_preemptions_total{engine="0"} 3.0\nvllm:num_preemptions_total{engine="1"} 6.0\n'
        b"vllm:request_queue_time_seconds_sum 6.0\nvllm:request_queue_time_seconds_count 12.0\n",
    ]

    class Server:
        def get(self, path: str) -> bytes:
            return texts.pop(0)

    counters = script.EngineCounters(script.COUNTERS, script.SIZES)
    assert counters.read(Server()) == {"preemptions": 7.0, "queue_mean_s": 0.5, "kv_cache_tokens": 5312.0}
    assert counters.read(Server()) == {"preemptions": 2.0, "queue_mean_s": 0.5}, "what one load added"


def test_without_vllm_the_script_says_where_to_install_it(tmp_path):
    spec = importlib.util.find_spec("vllm")
    if spec is not None and spec.origin is not None:  # tests/vllm is a folder without a module
        pytest.skip("vllm is installed here")
    failure = run_script(tmp_path, LAUNCHERS / "vllm_serve.py")
    assert failure["kind"] == "launcher"
    assert "vllm must be importable by" in failure["message"]
    assert json.dumps(failure).count("pip install vllm") == 1


@pytest.mark.parametrize("name", ["wl1-inference", "wl2-inference", "wl3-inference"])
def test_the_cards_of_inference_have_a_space_a_prediction_and_a_launch(name):
    card = load_card(name)
    framework = load_framework(card.framework)
    space = build_space(card, framework, use_fewer=True)
    assert len(space) > 1000
    assert set(space.num_accelerators_N) == {1, 2, 4}
    assert predict_space(card, space) is not None
    form = make_launch(card, framework.name, space.config(0))
    assert form.command[:2] == ("vllm", "serve")
    assert "/" in form.command[2], "the card names its checkpoint"
    assert "--tensor-parallel-size" in form.command
    assert "1160" in form.command, "1024 tokens in, 128 out and some to spare"


def test_without_chunks_a_step_holds_a_request():
    card = load_card("wl1-inference")
    knobs = [KnobDeclaration(name="chunked_prefill", choices=(True, False)),
             KnobDeclaration(name="max_num_batched_tokens", choices=(1024, 2048))]  # fmt: skip
    space = build_space(card, load_framework("vllm"), extra_knobs=knobs, use_fewer=True)
    unchunked = [c for c in map(space.config, range(0, len(space), 7)) if not c["chunked_prefill"]]
    assert {c["max_num_batched_tokens"] for c in unchunked} == {2048}


def test_a_precision_of_the_card_quantises_as_it_loads(script):
    words = script.render_command(make_data({"precision": "fp8", "tp": 2}, precision="fp8"), "MODEL", 8000)
    assert words[words.index("--quantization") + 1] == "fp8"
    assert words[words.index("--dtype") + 1] == "bfloat16"


def test_nodes_get_their_number_and_the_ports_of_node_0_and_all_but_one_are_headless(script):
    ports = {script.MASTER: 5001, script.REPLICAS: 5002}
    shares = [script.render_nodes(2, node, "10.0.0.1", ports) for node in range(2)]
    assert shares[0] == [
        "--distributed-executor-backend", "mp", "--nnodes", "2", "--node-rank", "0",
        "--master-addr", "10.0.0.1", "--master-port", "5001",
        "--data-parallel-address", "10.0.0.1", "--data-parallel-rpc-port", "5002",
    ]  # fmt: skip
    assert shares[1] == [*shares[0][:5], "1", *shares[0][6:], "--headless"]
    assert script.render_nodes(1, 0, "10.0.0.1", ports) == []


@pytest.mark.parametrize(
    ("config", "ranks", "message"),
    [
        ({"tp": 3, "dp": 3}, 9, None),
        ({"tp": 5}, 5, "5 accelerators on 2 nodes: each node must have as many as the others"),
        ({"tp": 2, "dp": 3}, 6, "a replica has 2 accelerators and each of 2 nodes 3"),
        ({"tp": 4, "dp": 2}, 8, None),
        ({"tp": 4, "pp": 2}, 8, None),
    ],
)
def test_a_launch_over_several_nodes_is_what_vllm_takes(script, config, ranks, message):
    data = make_data(config, num_ranks=ranks, ranks_per_node=4)
    if message is not None:
        with pytest.raises(script.IllegalConfig, match=message):
            script.show_launch(data)
        return
    form = script.show_launch(data)
    assert form.command[form.command.index("--nnodes") + 1] == str(-(-ranks // 4))
    assert form.command[-1] == "--headless"
    assert "Run the command on every node" in form.notes[2]


def test_workers_of_tpus_say_what_their_arrays_hold(monkeypatch):
    """A runner as of tpu-inference, whose `state` is a tree of JAX arrays; here they are on the CPU."""
    jax = pytest.importorskip("jax")
    monkeypatch.syspath_prepend(str(LAUNCHERS))
    worker = importlib.import_module("vllm_worker").DescribesWorker()
    layers = [{"kernel": jax.numpy.zeros((8, 16), "bfloat16"), "scale": jax.numpy.zeros(16)} for _ in range(3)]
    worker.model_runner = SimpleNamespace(state={"layers": layers, "name": "x"}, mesh=None)
    said = worker.ccl_describe()
    assert (said["num_params"], said["dtype"]) == (3 * (8 * 16 + 16), "bfloat16")
    assert said["device"] == jax.local_devices()[0].device_kind


def test_a_tpu_host_has_a_space_and_a_launch():
    card = load_card("wl1-inference", sets=["accelerator=tpu-v6e", "total_count=8", "count_per_node=4"])
    space = build_space(card, load_framework("vllm-tpu"), use_fewer=True)
    assert set(space.num_accelerators_N) == {1, 2, 4}, "of the hosts' 4 each, since several hosts need Ray"
    form = make_launch(card, "vllm-tpu", space.config(0))
    assert "--tensor-parallel-size" in form.command
    assert "--nnodes" not in form.command
