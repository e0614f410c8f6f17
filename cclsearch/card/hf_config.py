"""The model of a workload card from the `config.json` of a Hugging Face model; `families.yaml` has its families."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from cclsearch.card.arch import count_parameters
from cclsearch.card.catalogue import MAX_OF_ANOTHER_KIND, find_by_name, find_by_shape
from cclsearch.card.families import Family, load_families
from cclsearch.card.fields import BY_NAME, read_number
from cclsearch.card.infer import EXPERTS, SHAPE
from cclsearch.card.model import LATENT, make_model
from cclsearch.core.errors import UserError
from cclsearch.core.job_file import JobFileError, read_job_json
from cclsearch.core.text import guess_name, one_line
from cclsearch.core.yaml_file import read_yaml

CONFIG_FILE = "config.json"
CHECKPOINTS = Path(__file__).with_name("checkpoints.yaml")
"""Formats and blocks of quantized checkpoints."""
MAX_BYTES = 4 * 2**20
_NESTED = ("text_config", "language_config", "llm_config")
"""Sections with the language model of a model with vision."""
_ATTENDS = {
    **dict.fromkeys(("full_attention", "indexed_attention", "deepseek_sparse_attention"), False),
    **dict.fromkeys(("sliding_attention", "chunked_attention"), True),
}
"""Kinds of layers in `layer_types` -> whether they see a window only."""
_SHAPES = re.compile(
    "layer|window|expert|moe|sparse|dense|lora|rank|mamba|ssm|conv|linear_|hybrid|pattern|index|nextn|mtp|altup|laurel"
    "|shared|block|cross|local|global|gate|gating|period|expand|heads|_dim$|intermediate|bias|attn_|attention_type|hc_"
)
"""Names of settings that may change the shape of layers: a file with one that is not read is refused."""


def make_hf_card(path: Path) -> dict[str, Any]:
    """A card with the model of that config.json, or of the folder with it; fields that it does not state are empty."""
    model = read_hf_model(path)
    xpu = dict.fromkeys(("model", "memory_gb", "total_count", "count_per_node"))
    return {
        "version": 1,
        "description": model["model_family"],
        "workload": {
            "model": {"phase": "training", **model},
            "data": dict.fromkeys(("batch_size", "seq_len")),
            "hardware": {"network_topo": {"bandwidth_gbps": None}, "xpu_spec": {"type": "GPU", **xpu}},
        },
        "Model-executor": {"framework": {"name": None}},
    }


def read_hf_model(path: Path) -> dict[str, Any]:
    """The section `workload.model` of a card for a config.json, or for the folder with it.

    Raises UserError that names the file, and each field that is missing or that a card cannot describe.
    """
    file = path / CONFIG_FILE if path.is_dir() else path
    config = _read_config(file)
    nested: Mapping[str, Any] = next((config[name] for name in _NESTED if isinstance(config.get(name), Mapping)), {})
    whole = ("_name_or_path", "quantization_config")
    config = {**({} if nested else config), **nested, **{k: config[k] for k in whole if k in config}}
    name = str(config.get("_name_or_path") or "") or file.absolute().parent.name
    called = one_line(str(config.get("model_type", "")).strip(), 40)
    family = load_families().find(called)
    reader = _Reader(config, family or Family(), file)
    if family is None:
        reader.refuse(_explain(called, name, reader.read_shape()))
    arch = reader.read()
    model = make_model(arch)
    dtype = one_line(str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"), 20)
    return {
        "moe": model.moe is not None,
        "model_family": one_line((name or called).rstrip("/").split("/")[-1], 80),
        "precision": {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(dtype, "bf16"),
        **_read_quantization(config, file),
        "model_arch": {"num_params": count_parameters(model.model_copy(update={"mtp_layers": None})), **arch},
    }


def _read_quantization(config: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return precision and blocks of a quantized checkpoint, the narrowest of several; empty if it is not quantized."""
    if not (given := config.get("quantization_config")):
        return {}
    text = json.dumps(given, sort_keys=True).lower()
    formats = read_yaml(CHECKPOINTS)["formats"]
    precision = next((each["precision"] for each in formats if re.search(each["config"], text)), None)
    if precision is None:
        raise UserError(f"{file}: quantization_config {one_line(text, 80)!r} is not known: write the card by hand")
    blocks = re.search(r'"(?:weight_block_size|block_structure)": \[(\d+)|"group_size": (\d+)', text)
    block = int(blocks[1] or blocks[2]) if blocks and precision != "mxfp4" else 0
    return {"precision": precision, "weight_block": block}


def _explain(called: str, name: str, shape: Mapping[str, int]) -> str:
    """Say why no card describes the family, and which row of the catalogue has the model."""
    known, way = load_families(), "describe it (docs/your-model.md)"
    why = next(
        (f"has {what}, which a card cannot describe" for what, names in known.refused.items() if called in names), ""
    )
    found = find_by_name(name) or next(iter(find_by_shape(shape)), None)
    if found is not None:
        share = count_parameters(make_model(found.fields)) / (found.num_params or 1)
        way = f"`model_family: {found.name}` takes its shape from the catalogue of models"
        if abs(share - 1) > MAX_OF_ANOTHER_KIND:
            way = f"the catalogue's {found.name} has {found.shape_note or 'other layers'} too: no card describes it"
    return f"model_type {called!r} {why or f'is not known{guess_name(called, known.families)}'}: {way}"


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = read_job_json(file.resolve(), MAX_BYTES)  # a model's folder may have links to its files
    except OSError as error:
        raise UserError(f"{str(file)!r}: cannot be read: {error.strerror or error}") from None
    except JobFileError as error:
        raise UserError(f"{str(file)!r}: {one_line(str(error), 160)}") from None
    if not isinstance(config, dict):
        raise UserError(f"{str(file)!r}: must be an object of settings, not {type(config).__name__}")
    return config


class _Reader:
    """Reads the fields of `model_arch` from one config.json."""

    def __init__(self, config: Mapping[str, Any], family: Family, file: Path) -> None:
        self.config, self.family, self.file = config, family, file
        self.layers = self.count("num_layers") or 0
        if self.layers > BY_NAME["num_layers"].maximum:
            self.refuse(f"has {self.layers} layers, more than {BY_NAME['num_layers'].maximum}")

    def read(self) -> dict[str, Any]:
        """Return the fields; raises UserError for a setting that they cannot express."""
        self._refuse_unread()
        found = {name: self.count(name) for name in SHAPE}
        heads, hidden = found["num_heads"], found["hidden_size"]
        if self.config.get("multi_query") and not self.config.get("new_decoder_architecture"):
            found["num_kv_heads"] = 1
        found["num_kv_heads"] = found["num_kv_heads"] or heads
        derived = hidden // heads if heads and hidden and hidden % heads == 0 else None
        found["head_dim"] = found["head_dim"] or self.family.head_dim or derived
        latent = self._latent()
        if latent:
            found |= {"head_dim": latent.pop("head_dim"), "num_kv_heads": heads}
        experts = self._experts()
        if experts and "intermediate_size_mlp" in self.config:
            found["intermediate_size"] = self.count_of("intermediate_size_mlp")
        default = 4 * hidden if hidden and not self.family.gated else experts.get("expert_intermediate_size")
        found["intermediate_size"] = found["intermediate_size"] or default
        missing = [load_families().names[name][0] for name, value in found.items() if value is None]
        if missing:
            self.refuse(f"has no {', '.join(missing)}, so it does not say the model's shape")
        tied = self.config.get("tie_word_embeddings")
        switches = {
            "tied_embeddings": tied if isinstance(tied, bool) else self.family.tied,
            "gated_mlp": self.family.gated,
        }
        return {**found, **switches, **experts, **latent, **self._features()}

    def read_shape(self) -> dict[str, int]:
        """Return the fields of `SHAPE` that the file states, by the card's names."""
        return {name: value for name in SHAPE if (value := self.count(name)) is not None}

    def refuse(self, why: str) -> NoReturn:
        """Raise UserError that names the file."""
        raise UserError(f"{self.file}: {why}")

    def count(self, name: str) -> int | None:
        """The number of the first of this field's settings that is given and not 0."""
        return next(filter(None, map(self.count_of, load_families().names[name])), None)

    def count_of(self, key: str) -> int | None:
        """A setting that is a whole number, or a list of equal ones; None if it is absent or 0."""
        value = self.config.get(key)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        if value is None or value == 0:
            return None
        number = read_number(value)
        if number is None or not number.is_integer() or number > 1e9:
            self.refuse(f"{key} must be a whole number, not {one_line(repr(value), 40)}")
        return int(number or 0)

    def per_layer(self, key: str) -> list[Any] | None:
        """A setting that is a list with a value for each layer; None for another value."""
        value = self.config.get(key)
        if isinstance(value, list) and len(value) != self.layers:
            self.refuse(f"{key} has {len(value)} values for {self.layers} layers")
        return value if isinstance(value, list) else None

    def _refuse_unread(self) -> None:
        known = load_families().read_names()
        for key, value in self.config.items():
            same = isinstance(value, list) and all(each == value[0] for each in value)
            plain = value[0] if same and value else value
            if key in known or not _SHAPES.search(key) or plain in (None, 0, 1, "", [], {}) or isinstance(plain, float):
                continue
            what = f"{key} {one_line(repr(value), 60)} may change the layers, and a card has no field for it"
            self.refuse(f"{what}: describe the model (docs/your-model.md), or remove the setting if it has no effect")

    def _latent(self) -> dict[str, Any]:
        """Latent attention as the card's fields; empty without it."""
        found = {name: self.count(name) for name in (*LATENT, "qk_nope_head_dim")}
        if found["kv_lora_rank"] is None:
            return {}
        nope, rope = found.pop("qk_nope_head_dim"), found["qk_rope_head_dim"]
        if not (nope and rope and found["v_head_dim"]):
            self.refuse("has kv_lora_rank, but not qk_nope_head_dim, qk_rope_head_dim and v_head_dim")
        given = {name: value for name, value in found.items() if value is not None}
        return {"head_dim": (nope or 0) + (rope or 0), **given}

    def _experts(self) -> dict[str, int]:
        """The expert fields; empty for a dense model."""
        found = {name: self.count(name) for name in EXPERTS[:3]}
        if not self.family.moe or (found["num_experts"] or 2) < 2:
            return {}
        experts = {name: value for name, value in found.items() if value is not None}
        missing = [load_families().names[name][0] for name in EXPERTS[:3] if name not in experts]
        if missing:
            self.refuse(f"has no {', '.join(missing)}, so it does not describe its experts")
        width = experts["expert_intermediate_size"]
        shared = width if "intermediate_size_mlp" in self.config else self.count("shared_width")
        if shared and shared % width:
            self.refuse(f"has a shared expert of width {shared}, no multiple of the experts' width, {width}")
        experts["num_shared_experts"] = shared // width if shared else self.count("num_shared_experts") or 0
        dense = self.layers - sum(self._list_sparse())
        return {**experts, "num_dense_layers": dense} if dense else experts

    def _list_sparse(self) -> Iterator[bool]:
        """Whether each layer has experts."""
        config = self.config
        if (kinds := self.per_layer("mlp_layer_types") or self.per_layer("moe_layer_freq")) is not None:
            return (kind not in ("dense", 0) for kind in kinds)
        moe, dense = (
            set(map(str, value if isinstance(value := config.get(key), list) else ()))
            for key in ("moe_layers", "mlp_only_layers")
        )
        if moe:
            return (str(index) in moe for index in range(self.layers))
        stated = [key for key in load_families().names["num_dense_layers"] if isinstance(config.get(key), int)]
        first = self.count("num_dense_layers") or (0 if stated else self.family.dense_first)
        step, end = self.count("moe_step") or 1, self.count("moe_end") or self.layers
        return (first <= i <= end and (i + 1) % step == 0 and str(i) not in dense for i in range(self.layers))

    def _features(self) -> dict[str, Any]:
        """Norms, biases, windows, router and positions; those that the model does not have are left out."""
        found: dict[str, Any] = dict(self.family.has)
        for key, feature in load_families().switches.items():
            if isinstance(self.config.get(key), bool):
                found[feature] = self.config[key]
        if found.get("learned_positions"):
            found["learned_positions"] = self.count("learned_positions")
        windowed = sum(self._list_windowed())
        if windowed:
            found |= {"sliding_window": self.count("sliding_window"), "windowed_layers": windowed}
        found |= {name: self.count(name) for name in ("mtp_layers", "index_topk")}
        return {name: value for name, value in found.items() if value}

    def _list_windowed(self) -> Iterator[bool]:
        """Whether each layer sees a window of tokens only."""
        kinds = self.per_layer("layer_types")
        if kinds is not None and (other := sorted({str(k) for k in kinds} - set(_ATTENDS))):
            number = sum(kind in other for kind in kinds)
            self.refuse(
                f"{number} of {len(kinds)} layers are {one_line(', '.join(other), 60)}: a card has no such field"
            )
        window = self.count("sliding_window")
        if window is None or self.config.get("use_sliding_window") is False:
            return iter(())
        if kinds is not None:
            return (_ATTENDS[kind] for kind in kinds)
        every = self.family.full_every
        if (pattern := self.config.get("sliding_window_pattern")) and isinstance(pattern, str):
            every = len(pattern)
        elif given := self.count("window_pattern"):
            every = given
        start = self.count("window_start") or 0 if "use_sliding_window" in self.config else 0
        return (index >= start and (not every or (index + 1) % every != 0) for index in range(self.layers))
