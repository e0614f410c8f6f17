"""The inputs of programs that an LLM writes: the workload, the hardware and the finished trials, as plain values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cclsearch.card.arch import count_parameters
from cclsearch.card.model import Card, ModelArch
from cclsearch.propose.base import Observation, SearchView
from cclsearch.space.table import Space

ARCH_FIELDS = (
    *("num_layers", "num_heads", "num_kv_heads", "num_params"),
    *("hidden_size", "head_dim", "intermediate_size", "vocab_size"),
)
MOE_FIELDS = ("num_experts", "top_k", "expert_intermediate_size")
"""Fields of a model that published policies read; of a dense model, the latter are None."""


def hide_origin(view: SearchView) -> SearchView:
    """The view without the card's fields that name the workload's origin."""
    blank = dict.fromkeys(("name", "title", "family", "framework", "source", "licence"), "")
    return replace(view, card=view.card.model_copy(update=blank))


def policy_inputs(view: SearchView) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """The inputs `workload`, `environment` and `history` of a program, with the fields that published policies read."""
    return workload_fields(view), environment_fields(view.card, view.space), history_records(view)


def workload_fields(view: SearchView) -> dict[str, Any]:
    """The workload as one flat mapping, with `config_space`."""
    card = view.card
    return {
        "name": card.name,
        "model_family": card.family,
        "phase": card.phase.value if card.phase else card.task,
        "moe": card.model is not None and card.model.moe is not None,
        "precision": card.precision,
        **(_model_fields(card.model) if card.model else {}),
        **view.task.policy_inputs(card),
        "run_script": None,
        "trace_dir": None,
        "config_space": [
            {
                "key": knob.name,
                "type": type(knob.choices[0]).__name__,
                "choices": list(knob.choices),
                "description": knob.description,
            }
            for knob in view.space.knobs
        ],
    }


def _model_fields(arch: ModelArch) -> dict[str, Any]:
    found = {name: getattr(arch, name) for name in ARCH_FIELDS}
    found["num_params"] = arch.num_params or count_parameters(arch)
    return found | {name: getattr(arch.moe, name, None) for name in MOE_FIELDS}


def environment_fields(card: Card, space: Space) -> dict[str, Any]:
    """The hardware as one flat mapping; `min_gpus` is the fewest that a configuration of the search space uses."""
    hardware = card.hardware
    return {
        "gpu_model": hardware.accelerator,
        "gpu_memory_gb": hardware.memory_gib,
        "total_gpus": hardware.num_accelerators,
        "min_gpus": int(space.num_accelerators_N.min()),
        "gpus_per_node": hardware.accelerators_per_node,
        "intra_node_bandwidth_gbps": hardware.scale_up_gbps,
        "inter_node_bandwidth_gbps": hardware.scale_out_gbps,
        "network_topology": "",
        "driver_version": "",
        "framework": card.framework,
        "framework_version": "",
    }


def history_records(view: SearchView) -> list[dict[str, Any]]:
    """Finished trials, for a program with a third parameter `history`."""
    return [
        {
            "config": dict(o.config),
            "metrics": dict(o.metrics),
            "score": o.loss,
            "status": _describe_status(o),
        }
        for o in view.observations[-100:]
    ]


def _describe_status(o: Observation) -> str:
    if o.loss is not None:
        return "success"
    return "ended early" if o.is_pruned else "constraint violated" if o.is_valid else "error"
