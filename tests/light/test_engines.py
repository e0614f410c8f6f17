"""The run scripts of SGLang and TensorRT-LLM: what they render and refuse; no engine is installed for these tests."""

from __future__ import annotations

import http.server
import importlib
import json
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml
from paths import ROOT

from cclsearch.card.load import load_card
from cclsearch.report.launch_form import make_launch
from cclsearch.space.build import build_space
from cclsearch.space.framework import load_framework
from cclsearch.stats.closed_form import predict_space

LAUNCHERS = ROOT / "launchers"
REQUESTS = [{"arrival_s": 0.0, "input_tokens": 100, "output_tokens": 20}]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(LAUNCHERS))
    return importlib.import_module


def make_data(config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    return {"config": config, "precision": "bf16", "seed": 3, "requests": REQUESTS, **changes}


@pytest.mark.parametrize(("name", "first"), [("sglang", "python"), ("trtllm", "trtllm-serve")])
@pytest.mark.parametrize("workload", ["wl1-inference", "wl3-inference"])
def test_a_card_has_a_space_a_prediction_and_a_launch_under_every_engine(name, first, workload):
    card, framework = load_card(workload), load_framework(name)
    space = build_space(card, framework, use_fewer=True)
    assert len(space) > 500
    assert set(space.num_accelerators_N) == {1, 2, 4}
    assert predict_space(card, space) is not None
    form = make_launch(card, name, space.config(len(space) // 2))
    assert form.command[0] == first
    assert "1160" in form.command


@pytest.mark.parametrize(("name", "script"), [("sglang", "sglang_serve"), ("trtllm", "trtllm_serve")])
def test_every_knob_of_a_framework_file_is_rendered(name, script, load):
    framework, module = load_framework(name), load(script)
    for knob in (*framework.knobs, *framework.optional_knobs):
        choices = knob.choices if isinstance(knob.choices, tuple) else (1, 2)
        forms = {str(module.show_launch(make_data({knob.name: choice}))) for choice in choices}
        assert len(forms) == len(choices), f"{knob.name}: two choices render the same launch"


def test_sglang_on_several_nodes_has_one_replica_in_whole_stages(load):
    module = load("sglang_serve")
    assert module.render_nodes(2, 1, "10.0.0.1:5001") == [
        "--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "10.0.0.1:5001",
    ]  # fmt: skip
    form = module.show_launch(make_data({"tp": 4, "pp": 2}, num_ranks=8, ranks_per_node=4))
    assert form.command[-2:] == ["--dist-init-addr", "HEAD_NODE:29501"]
    for config, ranks, message in (
        ({"tp": 4, "dp": 2}, 8, "dp must be 1 on 2 nodes, but it is 2"),
        ({"tp": 2, "pp": 3}, 6, "pp 3 on 2 nodes: one must divide the other"),
    ):
        with pytest.raises(module.IllegalConfig, match=message):
            module.show_launch(make_data(config, num_ranks=ranks, ranks_per_node=4))


def test_switches_of_sglang_that_disable_are_given_for_false(load):
    words = load("sglang_serve").render_options(
        {"prefix_caching": False, "async_scheduling": True, "mixed_chunk": True, "compile": False, "ep": 2}
    )
    assert words == ["--disable-radix-cache", "--enable-mixed-chunk", "--expert-parallel-size", "2"]


APART = {
    "devices": 8, "prefill_workers": 2, "prefill_gpus_per_worker": 2, "decode_workers": 1, "decode_gpus_per_worker": 4,
}  # fmt: skip


def test_sglang_apart_is_a_router_before_servers_on_their_nodes(load):
    module = load("sglang_disagg")
    form = module.show_launch(make_data({**APART, "kv_connector": "nixl"}, num_ranks=8, ranks_per_node=4))
    assert form.command[3:] == [
        "--pd-disaggregation", "--prefill", "http://NODE_1:8100", "8998", "--prefill", "http://NODE_1:8101", "8999",
        "--decode", "http://NODE_0:8102", "--host", "127.0.0.1", "--port", "8000",
    ]  # fmt: skip
    first, second, third = (note.partition(": ")[2].split() for note in form.notes[:3])
    assert form.notes[2].startswith("Before, on node 0: python -m sglang.launch_server --model-path MODEL")
    for words, mode, gpus, port in ((first, "prefill", "2", "8100"), (second, "prefill", "2", "8101"),
                                    (third, "decode", "4", "8102")):  # fmt: skip
        assert words[words.index("--disaggregation-mode") + 1] == mode
        assert words[words.index("--tensor-parallel-size") + 1] == gpus
        assert words[words.index("--port") + 1] == port
        assert words[words.index("--disaggregation-transfer-backend") + 1] == "nixl"
    assert "--base-gpu-id" not in first
    assert second[second.index("--base-gpu-id") + 1] == "2"
    assert second[second.index("--disaggregation-bootstrap-port") + 1] == "8999"
    with pytest.raises(module.IllegalConfig, match="kv_connector must be mooncake or nixl, not 'pigeon'"):
        module.show_launch(make_data({**APART, "kv_connector": "pigeon"}))


def test_sglang_apart_has_a_space_and_a_prediction():
    sets = ["workload.hardware.xpu_spec.total_count=8", "workload.hardware.xpu_spec.count_per_node=4"]
    card, framework = load_card("wl1-inference", sets=sets), load_framework("sglang-disagg")
    space = build_space(card, framework, use_fewer=True)
    assert {"workers_add_up", "workers_fit_machines"} <= set(space.rules)
    assert set(space.column("prefill_gpus_per_worker")) == {1, 2, 4}, "a server is on one machine"
    assert predict_space(card, space) is not None


def test_the_file_of_trtllm_is_yaml_with_its_sections(load):
    config = {"tp": 4, "prefix_caching": False, "kv_cache_dtype": "fp8", "dp_attention": True, "speculative": "NGram",
              "async_scheduling": False, "max_graph_size": 64, "moe_backend": "auto"}  # fmt: skip
    form = load("trtllm_serve").show_launch(make_data(config))
    assert yaml.safe_load(form.files["extra.yaml"]) == {
        "enable_attention_dp": True,
        "kv_cache_config": {"enable_block_reuse": False, "dtype": "fp8"},
        "cuda_graph_config": {"max_batch_size": 64},
        "disable_overlap_scheduler": True,
        "speculative_config": {"decoding_type": "NGram", "max_draft_len": 4},
    }
    assert form.command[-2:] == ["--extra_llm_api_options", "extra.yaml"]


@pytest.mark.parametrize("script", ["sglang_serve", "trtllm_serve"])
def test_what_a_script_cannot_serve_is_refused(script, load):
    module = load(script)
    with pytest.raises(module.IllegalConfig, match="has no knob 'colour'"):
        module.show_launch(make_data({"colour": "red"}))
    message = {
        "trtllm_serve": "which has 4 accelerators; the configuration needs 8",
        "sglang_serve": "5 accelerators on 2 nodes: each node must have as many as the others",
    }
    ranks = 8 if script == "trtllm_serve" else 5
    with pytest.raises(module.IllegalConfig, match=message[script]):
        module.show_launch(make_data({}, num_ranks=ranks, ranks_per_node=4))


def test_a_checkpoint_is_a_folder_and_its_parameters_are_counted(tmp_path, monkeypatch, load):
    module = load("serving_model")
    for named, why in (("", "it is not set"), (str(tmp_path), "has no config.json")):
        monkeypatch.setenv("CCL_MODEL_PATH", named)
        with pytest.raises(module.MissingRequirement, match=why):
            module.find_checkpoint()
    (tmp_path / "config.json").write_text("{}")
    assert module.find_checkpoint() == tmp_path
    assert module.count_checkpoint(tmp_path) is None
    for number, shape in enumerate(([3, 4], [5])):
        header = json.dumps(
            {"w": {"dtype": "BF16", "shape": shape, "data_offsets": [0, 8]}, "__metadata__": {}}
        ).encode()
        (tmp_path / f"{number}.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert module.count_checkpoint(tmp_path) == 17
    (tmp_path / "0.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(module.MissingRequirement, match="is not a safetensors file"):
        module.count_checkpoint(tmp_path)


ABORTED: list[int] = []


class Generate(http.server.BaseHTTPRequestHandler):
    """Answers like SGLang's `/generate` with `--incremental-streaming-output`: two tokens an event."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200 if self.path == "/generate" else 404)
        self.end_headers()
        if asked["input_ids"][-1:] == ABORTED:
            reason = {"type": "abort", "message": "Input length exceeds the maximum allowed length"}
            event: dict[str, Any] = {"output_ids": [0], "meta_info": {"completion_tokens": 1, "finish_reason": reason}}
            self.wfile.write(f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode())
            return
        count, sent = asked["sampling_params"]["max_new_tokens"], 0
        while sent < count:
            ids = list(range(sent, min(sent + 2, count)))
            sent += len(ids)
            event = {"output_ids": ids, "meta_info": {"completion_tokens": sent, "finish_reason": None}}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Generate)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()


def test_what_sglang_aborts_is_an_error_though_it_counts_a_token(port, load, monkeypatch):
    module = load("serving_load")
    planned = [{"arrival_s": 0.0, "input_tokens": 7, "output_tokens": 5}]
    asked = module.Load(0, planned, 1, seed=1)
    monkeypatch.setattr(sys.modules[__name__], "ABORTED", module.draw_prompt(asked, 0, 7, 100)[-1:])
    (record,), _ = module.run_load(module.Target(port, 100, timeout_s=20, api=module.SGLANG), asked)
    assert record.error == "BadAnswer: aborted: Input length exceeds the maximum allowed length"


def test_a_server_that_never_answers_is_an_error_after_the_time_of_a_request(load):
    module = load("serving_load")
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        target = module.Target(deaf.getsockname()[1], 100, timeout_s=0.2)
        planned = [{"arrival_s": 0.0, "input_tokens": 7, "output_tokens": 5}]
        (record,), _ = module.run_load(target, module.Load(0, planned, 1, seed=1))
    assert record.error == "no whole answer after 0.2 s"


def test_the_load_generator_asks_sglangs_own_interface(port, load):
    module = load("serving_load")
    planned = [{"arrival_s": 0.0, "input_tokens": 7, "output_tokens": 5}] * 3
    target = module.Target(port, 100, timeout_s=20, api=module.SGLANG)
    records, _ = module.run_load(target, module.Load(0, planned, 2, seed=1))
    assert [record.error for record in records] == [""] * 3
    assert {(r.output_tokens, len(r.token_times_s), r.first_token_id) for r in records} == {(5, 5, 0)}


QUANTIZED = {
    "mxfp4": ({"quant_method": "mxfp4"}, {"w_blocks": ("U8", [2, 8, 16]), "w_scales": ("U8", [2, 8])}, 512),
    "awq": ({"quant_method": "awq", "bits": 4}, {"a.qweight": ("I32", [8, 2]), "a.qzeros": ("I32", [1, 2])}, 128),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"},
              {"a.weight": ("U8", [4, 8]), "a.weight_scale": ("F8_E4M3", [4, 1]), "b.bias": ("BF16", [4])}, 68),
    "int4": ({"quant_method": "compressed-tensors", "config_groups": {"0": {"weights": {"num_bits": 4}}}},
             {"a.weight_packed": ("I32", [4, 2]), "a.weight_shape": ("I64", [2])}, 64),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]},
            {"a.weight": ("F8_E4M3", [4, 8]), "a.weight_scale_inv": ("F32", [1, 1])}, 32),
}  # fmt: skip


@pytest.mark.parametrize("precision", QUANTIZED)
def test_a_checkpoint_as_published_is_served_as_it_is_and_counted_by_its_weights(
    load, tmp_path, monkeypatch, precision
):
    config, tensors, weights = QUANTIZED[precision]
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    header = json.dumps({name: {"dtype": kind, "shape": shape} for name, (kind, shape) in tensors.items()}).encode()
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    module = load("serving_model")
    monkeypatch.setenv(module.MODEL, str(tmp_path))
    assert module.describe_checkpoint(precision) == {"num_params": weights, "precision": precision}
    other = "fp8" if precision != "fp8" else "mxfp4"
    assert module.describe_checkpoint(other)["precision"] in ("4 bits", "8 bits"), "another precision was asked"
    for engine in ("vllm_serve", "sglang_serve"):
        words = load(engine).render_command(make_data({}, precision=precision), str(tmp_path), 1)
        assert "--quantization" not in words, "the checkpoint itself says how it is quantized"
    assert "--quantization" in load("vllm_serve").render_command(make_data({}, precision="fp8"), "org/name", 1)
