"""Architectures of published models by hub address, name or shape; `models.csv` has their numbers and sources."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from cclsearch.card.families import load_families

MODELS_FILE = Path(__file__).with_name("models.csv")
# The catalogue's own counts are within 2 % of the counts of its shapes.
TOLERANCE = 0.03
"""Relative difference of two parameter counts that no note mentions."""
NARROWER = (0.01, 0.0)
"""Narrower tolerances, tried in order while several models of the same layers match."""
MAX_OF_ANOTHER_KIND = 0.2
"""Relative difference from a plain transformer's count above which a model has layers of another kind."""

_HUB = re.compile(r"(?:hugging\s?face\.co|hf\.co)/(?:models/)?([\w.\-]+/[\w.\-]+)", re.IGNORECASE)
_HUB_ID = re.compile(r"[\w.\-]+/[\w.\-]+")
_PARTS = re.compile(r"\d+x\d+b|\d+(?:\.\d+)?[bm](?![a-z])|[a-z]+|\d+(?:\.\d+)*")
"""Parts of a name: sizes (`8b`, `8x7b`), words, versions."""
_VARIANTS = ("instruct", "chat", "base", "hf", "it", "fp8", "bf16", "fp16", "awq", "gptq", "int4", "int8", "nvfp4")
"""Endings of names that leave the shape as it is: fine-tuned or quantized."""
_SIZE = re.compile(r"^\d+(?:\.\d+)?[bm]$|^\d+x\d+b$")


@dataclass(frozen=True)
class KnownModel:
    """One published model, with the fields of a card that describe its shape."""

    name: str
    aliases: tuple[str, ...]
    fields: Mapping[str, int | bool]
    """Field of a card -> value. Latent attention is described as attention with heads of `v_head_dim`."""
    num_params: int | None
    """Published or counted parameters."""
    shape_note: str
    """Parts of the model that the fields leave out."""
    source: str
    latent: Mapping[str, int]
    """Fields of latent attention (`kv_lora_rank`, `head_dim` with the rotary part, ...); empty for plain attention."""
    windowed_layers: int
    """Layers whose attention sees the last `window` tokens; 0 for linear attention, which keeps no keys."""
    window: int
    features: Mapping[str, bool | str | int] = field(default_factory=dict)
    """Norms, biases, windows and balance of the router, as fields of a card."""

    @property
    def shape(self) -> frozenset[tuple[str, int | bool]]:
        """The fields as a value that can be compared."""
        return frozenset(self.fields.items())


@cache
def load_models() -> tuple[KnownModel, ...]:
    """Every model of the catalogue."""
    with MODELS_FILE.open(encoding="utf-8", newline="") as file:
        return tuple(_read_row(row) for row in csv.DictReader(file))


def find_by_address(text: str) -> KnownModel | None:
    """The model at a hub address (`https://huggingface.co/ORG/NAME`, also a page of it) or of a hub id."""
    match = _HUB.search(text) or _HUB_ID.fullmatch(text.strip())
    if match is None:
        return None
    hub_id = match.group(match.lastindex or 0)
    return find_by_name(hub_id) or find_by_name(hub_id.split("/")[-1])


def find_by_name(name: str) -> KnownModel | None:
    """The model of that name; case, spaces, `_`, `-` and endings such as `-instruct` do not matter."""
    key = name.lower()
    for _ in range(3):
        found = _names().get(_key(key)) or _names().get(_key(key, dots=False))
        if found is not None:
            return found
        shorter = re.sub(rf"[\s_.\-]+(?:{'|'.join(_VARIANTS)})(?:[\s_.\-]+dynamic)?$", "", key)
        if shorter == key:
            return None
        key = shorter
    return None


def find_like(name: str) -> list[KnownModel]:
    """Models whose names begin like this one and contain all its parts in order (`deepseek-llama-8b`, `mixtral`)."""
    wanted = _split(name)
    if not wanted or len(wanted[0]) < 3:
        return []
    return [model for model in load_models() if any(_contains(_split(each), wanted) for each in _all_names(model))]


def names_a_size(name: str) -> bool:
    """Whether a name says how large the model is, and has two more parts: enough to identify one among others."""
    parts = re.split(r"[\s_\-/]+", name.lower())
    return len(parts) >= 3 and any(_SIZE.match(part) for part in parts)


def agrees_in_size(name: str, model: KnownModel) -> bool:
    """Whether the size in a name, if it has one (`16b`), is near the model's (`deepseek-v2-16b` is not DeepSeek-V2)."""
    sizes = [float(part[:-1]) * 1e9 for part in _split(name) if re.fullmatch(r"\d+(?:\.\d+)?b", part)]
    return not sizes or model.num_params is None or any(0.6 < model.num_params / size < 1.7 for size in sizes)


def find_by_shape(stated: Mapping[str, int]) -> list[KnownModel]:
    """Models with every stated field; empty if too little is stated to identify one.

    That is a parameter count with layers and heads, or at least five fields of the shape.
    """
    shape = {"num_layers", "num_heads"} <= set(stated)
    if not shape or not ("num_params" in stated or len(stated) >= 5):
        return []
    found = [model for model in load_models() if not differences(model, stated)]
    for tolerance in NARROWER if "num_params" in stated else ():
        if len({model.shape for model in found}) > 1:
            found = [m for m in found if abs(stated["num_params"] / (m.num_params or 1) - 1) <= tolerance]
    return found


def differences(model: KnownModel, stated: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Field -> (stated value, the model's), for each that differs; a parameter count if it differs by over 3 %."""
    found = {
        name: (value, int(model.fields[name]))
        for name, value in stated.items()
        if name in model.fields and value != model.fields[name]
    }
    counted = stated.get("num_params")
    if counted and model.num_params and abs(counted / model.num_params - 1) > TOLERANCE:
        found["num_params"] = (counted, model.num_params)
    return found


def _read_row(row: Mapping[str, str]) -> KnownModel:
    numbers = {name: int(row[name]) for name in row if row[name].isdecimal()}
    expert = numbers.get("expert_ffn", 0)
    fields: dict[str, int | bool] = {
        "num_layers": numbers["layers"],
        "hidden_size": numbers["hidden"],
        "num_heads": numbers["heads"],
        "num_kv_heads": numbers["kv_heads"],
        "head_dim": numbers.get("v_head_dim") or numbers["head_dim"],
        "intermediate_size": numbers.get("ffn") or expert,
        "vocab_size": numbers["vocab"],
        "tied_embeddings": row["tied"] == "1",
        "gated_mlp": row["gated"] == "1",
    }
    if numbers.get("num_experts"):
        every = numbers.get("moe_layer_step", 1)
        fields |= {
            "num_experts": numbers["num_experts"],
            "top_k": numbers["top_k"],
            "expert_intermediate_size": expert,
            "num_shared_experts": numbers.get("shared_expert_ffn", 0) // expert,
            "num_dense_layers": numbers["layers"] - numbers["layers"] // every
            if every > 1
            else numbers.get("dense_layers_first", 0),
        }
    is_latent = "v_head_dim" in numbers
    latent = ("head_dim", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim")
    notes = (row["shape_note"], "latent attention is described as plain attention" if is_latent else "")
    return KnownModel(
        name=row["name"],
        aliases=tuple(filter(None, (row["hf_id"], *row["aliases"].split("|")))),
        fields=fields,
        num_params=numbers.get("params_total"),
        shape_note="; ".join(filter(None, notes)),
        source=row["source"],
        latent={name: numbers[name] for name in latent if name in numbers} if "kv_lora_rank" in numbers else {},
        windowed_layers=numbers.get("windowed_layers", 0),
        window=numbers.get("window", 0),
        features=_list_features(row["family"], numbers),
    )


def _list_features(family: str, numbers: Mapping[str, int]) -> Mapping[str, bool | str | int]:
    """The features of its family that need no number, and its windows."""
    found = load_families().find(family)
    has = {name: value for name, value in (found.has if found else {}).items() if name != "learned_positions"}
    if not (numbers.get("windowed_layers") and numbers.get("window")):
        return has
    return {**has, "sliding_window": numbers["window"], "windowed_layers": numbers["windowed_layers"]}


def _all_names(model: KnownModel) -> Iterable[str]:
    return {name for alias in (model.name, *model.aliases) for name in (alias, alias.split("/")[-1])}


@cache
def _names() -> dict[str, KnownModel]:
    """Key of a name -> its model; a key without dots only if that leaves one model (not OPT 1.3B and 13B)."""
    exact = {_key(name): model for model in load_models() for name in _all_names(model)}
    loose: dict[str, set[str]] = {}
    for key, model in exact.items():
        loose.setdefault(key.replace(".", ""), set()).add(model.name)
    bare = {key.replace(".", ""): model for key, model in exact.items()}
    return {key: model for key, model in bare.items() if len(loose[key]) == 1} | exact


def _key(name: str, *, dots: bool = True) -> str:
    key = re.sub(r"[^a-z0-9.]", "", name.lower())
    key = re.sub(r"\.(?!\d)|(?<!\d)\.", "", key)
    return key if dots else key.replace(".", "")


def _split(name: str) -> list[str]:
    return _PARTS.findall(name.lower())


def _contains(whole: list[str], wanted: list[str]) -> bool:
    """Whether all wanted parts are in the whole, in order, and the first is its first."""
    if not whole or whole[0] != wanted[0]:
        return False
    rest = iter(whole)
    return all(part in rest for part in wanted)
