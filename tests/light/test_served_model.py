"""What servers keep of a model that its card's shape leaves out, against published figures."""

from __future__ import annotations

import numpy as np
import pytest

from cclsearch.card.arch import count_parameters
from cclsearch.card.catalogue import find_by_name
from cclsearch.card.model import Card, Hardware, ModelArch, make_model
from cclsearch.core.values import Config
from cclsearch.space.table import Knob, space_from_rows
from cclsearch.stats.closed_form import predict_space
from cclsearch.tasks.serving.closed_form.memory import find_least_memory
from cclsearch.tasks.serving.closed_form.replica import read_replica
from cclsearch.tasks.serving.closed_form.served_model import find_served, other_weight_bytes
from cclsearch.tasks.serving.closed_form.steps import kv_numbers


def card_of(name: str, **changes: object) -> Card:
    """Return a card that states what CCL-Bench's template has: no latent attention, no windows."""
    known = find_by_name(name)
    assert known is not None
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
def test_a_token_holds_what_deepseek_ai_states(name: str, bytes_per_token: int) -> None:
    """DeepSeek-AI 2025, "Insights into DeepSeek-V3", table 1: bytes of the KV cache per token in 16 bits."""
    arch = find_served(card_of(name)).arch
    both = 1 if arch.kv_lora_rank else 2
    assert both * kv_numbers(arch) * arch.num_layers * 2 == bytes_per_token


def test_a_card_of_deepseek_has_the_parameters_of_the_model() -> None:
    plain = card_of("deepseek-ai/DeepSeek-R1", num_shared_experts=0, num_dense_layers=0, head_dim=128)
    served = find_served(plain).arch
    assert count_parameters(served) == pytest.approx(671e9, rel=0.005)
    assert served.moe is not None
    assert (served.moe.num_shared_experts, served.moe.num_dense_layers) == (1, 3)


def test_windows_bound_what_half_of_the_layers_hold() -> None:
    served = find_served(card_of("openai/gpt-oss-120b"))
    assert served.held_tokens(4096) == (4096 + 128) / 2
    assert served.held_tokens(100) == 100
    linear = find_served(card_of("Qwen3.5-27B"))
    assert linear.held_tokens(1000) == 1000 * 16 / 64, "48 of 64 layers are linear attention"


def test_a_model_of_that_name_with_other_widths_is_left_as_it_is() -> None:
    card = card_of("openai/gpt-oss-120b", num_layers=12)
    served = find_served(card)
    assert (served.arch, served.windowed_layers) == (card.model, 0)
    mine = card_of("DeepSeek-V3").model_copy(update={"family": "mine"})
    assert find_served(mine).arch.kv_lora_rank is None


def test_only_experts_have_four_bits_in_a_mixture() -> None:
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
def test_weights_are_as_large_as_published_checkpoints(name: str, precision: str, gib: float) -> None:
    card = card_of(name).model_copy(update={"precision": precision})
    space = space_from_rows([Knob("tp", (1, 8))], [{"tp": 1}, {"tp": 8}])
    need = find_least_memory(card, read_replica(card, space), tokens=2048)
    one, eight = need.parts["weights"].tolist()
    assert one == pytest.approx(gib, rel=0.015)
    assert eight == pytest.approx(one / 8)


def test_latent_keys_are_on_every_rank_and_others_are_divided() -> None:
    space = space_from_rows([Knob("tp", (1, 8))], [{"tp": 1}, {"tp": 8}])
    for name, divided in (("DeepSeek-V3", 1), ("meta-llama/Llama-3.1-405B", 8)):
        card = card_of(name)
        cache = find_least_memory(card, read_replica(card, space), tokens=1000).parts["kv_cache"]
        assert cache[0] / cache[1] == pytest.approx(divided)


def test_too_large_a_model_is_predicted_not_to_fit() -> None:
    card = card_of("meta-llama/Llama-3.1-405B")
    work = Config({"input_len": 1024, "output_len": 1024, "concurrency": 8})
    card = card.model_copy(update={"work": work})
    space = space_from_rows([Knob("tp", (4, 8))], [{"tp": 4}, {"tp": 8}])
    prediction = predict_space(card, space)
    assert prediction is not None
    assert prediction.fits_N.tolist() == pytest.approx([0, 0], abs=0.02), "94 GiB of weights on 80"
    prediction = predict_space(card.model_copy(update={"precision": "fp8"}), space)
    assert prediction is not None
    assert prediction.fits_N.tolist() == pytest.approx([0, 1], abs=0.02)


def test_the_shape_of_the_card_itself_is_not_changed() -> None:
    card = card_of("DeepSeek-V3")
    before: ModelArch | None = card.model
    find_served(card)
    assert card.model == before
