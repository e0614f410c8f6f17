"""What fine-tuning trains and keeps, read from knobs that spaces name in their own way."""

from __future__ import annotations

import numpy as np
import pytest

from cclsearch.card.load import load_card
from cclsearch.space.table import Knob, Space, space_from_rows
from cclsearch.stats.closed_form import predict_space
from cclsearch.tasks.training.layout import FOUR_BIT_BYTES, find_base_bytes, find_frozen, find_fused_loss


def space_of(name: str, *choices: object) -> Space:
    return space_from_rows([Knob(name, choices), Knob("dp", (1,))], [{name: choice, "dp": 1} for choice in choices])


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("method", ("full", "lora")),
        ("peft", (False, True)),
        ("use_lora", ("false", "true")),
        ("tuning", ("sft", "qlora")),
    ],
)
def test_adapters_are_known_by_the_name_of_the_knob_or_its_choice(name, choices):
    assert find_frozen(space_of(name, *choices)).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("name", ["kernel", "explorative", "method"])
def test_words_that_only_contain_the_letters_are_not_adapters(name):
    assert find_frozen(space_of(name, "exploration", "flora_kernel")).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("base_quantisation", ("none", "nf4")),
        ("quantization", ("none", "gptq4")),
        ("load_in_4bit", (False, True)),
        ("method", ("lora", "qlora")),
    ],
)
def test_four_bit_weights_are_known_by_their_formats(name, choices):
    assert find_base_bytes(space_of(name, *choices)).tolist() == [0.0, FOUR_BIT_BYTES]


def test_precision_of_the_linear_layers_quantises_no_weights():
    assert not find_base_bytes(space_of("linear_layers", "bf16", "fp8", "fp4")).any()


@pytest.mark.parametrize("name", ["liger", "fused_linear_cross_entropy"])
def test_fused_losses_are_known_by_their_names(name):
    assert find_fused_loss(space_of(name, False, True)).tolist() == [0.0, 1.0]


def test_adapters_take_less_memory_than_full_fine_tuning_and_quantised_weights_still_less():
    """As measured in fms-acceleration's benchmarks of an 8B model: full 65, LoRA 43, NF4 42, with Liger 21 GiB."""
    knobs = [
        Knob("dp", (4,)),
        Knob("micro_batch_size", (4,)),
        Knob("activation_checkpointing", ("full",)),
        Knob("method", ("full", "lora")),
        Knob("base_quantisation", ("none", "nf4")),
        Knob("liger", (False, True)),
    ]
    each = [("full", "none", False), ("lora", "none", False), ("lora", "nf4", False), ("lora", "nf4", True)]
    rows = [
        {"dp": 4, "micro_batch_size": 4, "activation_checkpointing": "full"}
        | {"method": method, "base_quantisation": bits, "liger": fused}
        for method, bits, fused in each
    ]
    predicted = predict_space(load_card("wl2"), space_from_rows(knobs, rows))
    assert np.all(np.diff(predicted.memory_gib_N) < -1)
    assert predicted.value_N[1] < predicted.value_N[0], "no gradients of the base weights"
