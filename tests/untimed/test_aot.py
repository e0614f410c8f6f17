"""`predict --aot`: memory from the TPU compiler or a clear error, and never that of another device."""

from __future__ import annotations

import importlib.util
import json

import pytest

from cclsearch.card.load import load_card
from cclsearch.core.errors import UserError
from cclsearch.core.values import Config
from cclsearch.tasks.training.aot import compile_memory, find_topology, require_compiler

HAS_COMPILER = importlib.util.find_spec("libtpu") is not None and importlib.util.find_spec("jax") is not None
CONFIG = Config(tp=2, dp=2, ep=1, micro_batch_size=4, activation_checkpointing="none")


def test_a_card_without_a_tpu_slice_needs_a_topology():
    card = load_card("tiny-jax")
    assert find_topology(card, "v5e:2x2") == "v5e:2x2"
    with pytest.raises(UserError, match="not a TPU slice"):
        find_topology(card, "")
    with pytest.raises(UserError, match="v5e:2x2"):
        find_topology(card, "v5e-4; rm")


def test_the_cards_slice_is_its_topology():
    card = load_card("tiny-jax")
    hardware = card.hardware.model_copy(update={"accelerator": "tpu-v5p", "torus": (2, 2, 1)})
    assert find_topology(card.model_copy(update={"hardware": hardware}), "") == "v5p:2x2x1"


def test_a_configuration_that_does_not_fill_the_slice_is_not_compiled():
    found = compile_memory(load_card("tiny-jax"), Config(tp=1, dp=2, micro_batch_size=4), "v5e:2x2")
    assert found.total_gib is None
    assert "4 chips" in found.refused


@pytest.mark.skipif(HAS_COMPILER, reason="the compiler is installed")
def test_the_error_of_a_missing_compiler_names_the_package():
    with pytest.raises(UserError, match=r"ccl-search\[tpu\]"):
        require_compiler()


def test_memory_of_another_device_is_not_accepted():
    from cclsearch.tasks.training.aot import _read

    sizes = {f"{part}_bytes": 2**30 for part in ("arguments", "temporary", "output", "aliased", "code")}
    assert _read({**sizes, "device": "cpu"}, "v5e:2x2").total_gib is None
    assert _read({**sizes, "device": "TPU v5 lite"}, "v5e:2x2").total_gib == pytest.approx(3.0)


@pytest.mark.skipif(not HAS_COMPILER, reason="libtpu is not installed (pip install 'ccl-search[tpu]')")
def test_compiled_memory_contains_weights_and_moments():
    card = load_card("tiny-jax")
    plain = compile_memory(card, CONFIG, "v5e:2x2")
    less = compile_memory(card, Config({**CONFIG, "activation_checkpointing": "full"}), "v5e:2x2")
    assert plain.total_gib is not None, plain.refused
    assert less.total_gib is not None, less.refused
    assert plain.parts_gib["arguments"] == pytest.approx(less.parts_gib["arguments"], rel=0.01)
    assert plain.parts_gib["arguments"] * 2**30 > 3 * 4 * 1e6, json.dumps(plain.parts_gib)
