"""Policy programs: their inputs, their run in the sandbox, and the configuration that they choose."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from cclsearch.card.arch import count_parameters
from cclsearch.card.model import Card, ModelArch
from cclsearch.core.text import one_line
from cclsearch.core.values import Config, Value
from cclsearch.propose.agent.policy.knob_aliases import find_choice, find_knob
from cclsearch.propose.agent.policy.sandbox import SandboxError, SandboxLimits, run_policy
from cclsearch.propose.agent.prompt.surrogate_table import SurrogateTable
from cclsearch.propose.agent.tools.configs import format_config, nearest_rows
from cclsearch.propose.base import Observation, SearchView
from cclsearch.space.table import Space

ARCH_FIELDS = (
    *("num_layers", "num_heads", "num_kv_heads", "num_params"),
    *("hidden_size", "head_dim", "intermediate_size", "vocab_size"),
)
MOE_FIELDS = ("num_experts", "top_k", "expert_intermediate_size")
"""Fields of a model that published policies read; of a dense model, the latter are None."""


@dataclass(frozen=True)
class PolicyChoice:
    """The configuration that a program chose, or the reason why there is none."""

    config: Config | None
    problem: str = ""
    """Reason why there is no configuration, for the program's author."""
    note: str = ""
    """Knobs that were left out or filled in."""
    named: Config | None = None
    """The knobs that it named, if they match no configuration of the search space."""


class PolicyRunner(Protocol):
    """Runs policy programs for `ToolHandlers`."""

    def choose(self, program: str, view: SearchView, table: SurrogateTable) -> PolicyChoice: ...


class SandboxRunner:
    """Runs policy programs in the sandbox."""

    def __init__(self, limits: SandboxLimits | None = None) -> None:
        self._limits = limits or SandboxLimits()

    def choose(self, program: str, view: SearchView, table: SurrogateTable) -> PolicyChoice:
        """The configuration that the program chooses; it may be an old one."""
        try:
            raw = run_policy(program, *policy_inputs(view), limits=self._limits)
        except SandboxError as error:
            return PolicyChoice(None, str(error))
        return read_choice(view.space, raw, [int(row) for row in table.order])


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


def read_choice(space: Space, raw: dict[str, Any], preferred: list[int]) -> PolicyChoice:
    """The configuration that a program's dictionary means.

    Knobs of other search spaces are left out, and knobs that it does not name are filled in from the most promising
    configuration that matches it; the note lists both.
    """
    named: dict[str, Value] = {}
    ignored: list[str] = []
    for key, value in raw.items():
        knob = find_knob(space, key)
        if knob is None:
            ignored.append(one_line(str(key), 40))
            continue
        choice = find_choice(knob, value)
        if choice is None:
            got = one_line(repr(value), 60) + ("" if key == knob.name else f" (as {one_line(key, 40)!r})")
            return PolicyChoice(None, f"{knob.name} must be one of {list(knob.choices)}; got {got}")
        if named.get(knob.name, choice) != choice:
            return PolicyChoice(None, f"{knob.name} is given twice, as {named[knob.name]!r} and as {choice!r}")
        named[knob.name] = choice
    if not named:
        keys = ", ".join(knob.name for knob in space.knobs)
        return PolicyChoice(None, f"the program named no knob of this search space; the knobs are {keys}")
    filled = _fill(space, named, preferred)
    missing = [knob.name for knob in space.knobs if knob.name not in named and len(knob.choices) > 1]
    notes = [f"left out: {', '.join(ignored[:8])}"] if ignored else []
    added = ", ".join(f"{name}={filled[name]}" for name in missing) if filled else ""
    notes += [f"{added} {'was' if len(missing) == 1 else 'were'} added"] if added else []
    if filled is None:
        near = "; ".join(format_config(space, space.config(row)) for row in nearest_rows(space, named, preferred))
        chosen = Config(named)
        problem = f"not in the search space: {chosen}. Nearest untried configurations: {near or 'none'}"
        return PolicyChoice(None, problem, named=chosen)
    return PolicyChoice(filled, note="; ".join(notes))


def _fill(space: Space, named: dict[str, Value], preferred: list[int]) -> Config | None:
    match_N = space.matching(named)
    row = next((row for row in [*preferred, *np.flatnonzero(match_N).tolist()] if match_N[row]), None)
    return None if row is None else space.config(row)


def _describe_status(o: Observation) -> str:
    if o.loss is not None:
        return "success"
    return "ended early" if o.is_pruned else "constraint violated" if o.is_valid else "error"
