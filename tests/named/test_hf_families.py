"""`card from-hf` counts the parameters that transformers builds, or refuses: `make test-families`."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cclsearch.card.catalogue import MODELS_FILE
from cclsearch.card.hf_config import read_hf_model
from cclsearch.core.errors import UserError

transformers = pytest.importorskip("transformers")
COLUMNS = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "vocab_size": "vocab",
    "intermediate_size": "ffn",
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), "num_experts"),
    "num_experts_per_tok": "top_k",
    "moe_intermediate_size": "expert_ffn",
    "shared_expert_intermediate_size": "shared_expert_ffn",
    "first_k_dense_replace": "dense_layers_first",
    **{name: name for name in ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim")},
}


def make_published() -> Iterator[tuple[str, Any]]:
    """Each model of the catalogue as a configuration of its family in transformers."""
    for row in csv.DictReader(MODELS_FILE.open(encoding="utf-8", newline="")):
        if row["family"] not in transformers.CONFIG_MAPPING:
            continue
        kind = transformers.CONFIG_MAPPING[row["family"]]
        numbers = {name: int(text) for name, text in row.items() if text.isdecimal()}
        fields: dict[str, Any] = {name: numbers[column] for name, column in COLUMNS.items() if column in numbers}
        fields.setdefault("intermediate_size", numbers.get("expert_ffn"))
        shared = numbers.get("shared_expert_ffn", 0) // numbers.get("expert_ffn", 1)
        fields |= {"tie_word_embeddings": row["tied"] == "1", "n_shared_experts": shared}
        if "kv_lora_rank" in fields:
            fields |= {"qk_nope_head_dim": numbers["head_dim"] - numbers["qk_rope_head_dim"]}
            fields.setdefault("q_lora_rank", None)
        else:
            fields["head_dim"] = numbers["head_dim"]
        known = {*kind().to_dict(), *getattr(kind, "attribute_map", {})}
        yield (
            row["name"],
            lambda kind=kind, fields=fields, known=known: kind(
                **{name: value for name, value in fields.items() if name in known}
            ),
        )


def make_defaults() -> Iterator[tuple[str, Any]]:
    """The default configuration of every decoder family."""
    for name in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        yield name, transformers.CONFIG_MAPPING[name]


@pytest.mark.parametrize(("make", "least"), [(make_published, 140), (make_defaults, 70)])
def test_every_family_is_counted_within_1_percent_or_refused(make, least, tmp_path: Path):
    import torch

    counts, wrong = Counter[str](), []
    for name, make_config in make():
        try:
            config = make_config().get_text_config(decoder=True)
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config)
        except Exception as error:  # transformers cannot build what it configures
            counts[f"not built: {type(error).__name__}"] += 1
            continue
        built = sum({id(p): p.numel() for p in model.parameters()}.values())
        (tmp_path / "config.json").write_text(
            json.dumps(config.to_diff_dict() | {"model_type": config.model_type}, default=str)
        )
        try:
            counted = read_hf_model(tmp_path / "config.json")["model_arch"]["num_params"]
        except UserError:
            counts["refused"] += 1
            continue
        counts["right"] += abs(counted / built - 1) <= 0.01
        wrong += [] if abs(counted / built - 1) <= 0.01 else [(name, built, counted)]
    print(counts, wrong)
    assert not wrong
    assert counts["right"] >= least
