"""The fields of a workload card that the engine reads: their paths, kinds and checks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from cclsearch.card.hardware import PRECISIONS
from cclsearch.card.model import LATENT, Inferred
from cclsearch.core.text import one_line
from cclsearch.core.values import Model

_ABSENT_VALUES = frozenset({"", "-", "?", "n/a", "na", "n.a.", "none", "null", "tbd", "todo", "nil", "~"})
MISSING = "is missing"
_PHASES = {"training": "training", "inference": "inference", "serving": "inference"}
# The fastest chip of 2026 has 2e16: a rate above the limit has a wrong unit.
_MAX_FLOPS = 1e18
"""Largest plausible rate, in FLOP/s."""
_UNITS = {"m": 1e6, "million": 1e6, "b": 1e9, "billion": 1e9, "t": 1e12, "trillion": 1e12}
_WITH_UNIT = re.compile(rf"^(\d+(?:\.\d+)?)\s*({'|'.join(_UNITS)})$", re.IGNORECASE | re.ASCII)
_NUMBER = re.compile(r"^[+-]?\d[\d_]*(\.\d+)?([eE][+-]?\d+)?$", re.ASCII)


def is_absent(value: Any) -> bool:
    """Whether a value means "not stated": empty, `N/A`, `TBD`."""
    return value is None or (isinstance(value, str) and value.strip().lower() in _ABSENT_VALUES)


def read_number(value: Any) -> float | None:
    """A finite number above 0, also one that YAML reads as text (`1e3`); None for anything else."""
    if isinstance(value, str) and _NUMBER.match(value.strip()) and len(value) < 40:
        value = float(value.replace("_", ""))
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
        return None
    return float(value) if math.isfinite(value) and value > 0 else None


def _read_list(read: Callable[[Any], Any], most: int | None = None) -> Callable[[Any], Any]:
    """The reader of a list with at most so many values, none of them invalid."""

    def read_all(value: Any) -> tuple[Any, ...] | None:
        found = [read(one) for one in value] if isinstance(value, list) else []
        return tuple(found) if found and found == found[:most] and None not in found else None

    return read_all


def _read_text(value: Any) -> str | None:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return None
    return one_line(str(value), 300) or None


def _read_word(*words: str) -> Callable[[Any], str | None]:
    """The reader of one of these words."""
    return lambda value: value if value in words else None


def _read_precision(value: Any) -> str | None:
    text = (_read_text(value) or "").lower()
    dtype = PRECISIONS.get(text, text)
    return dtype if re.fullmatch(r"[a-z][a-z0-9_+.\-]{1,20}", dtype) else None


def _read_numerics(value: Any) -> str | None:
    """A precision, or a knob and its value that changes the numbers: `kv_cache_dtype=fp8`."""
    text = str(value).strip().lower()
    return text if re.fullmatch(r"[a-z][a-z0-9_]{1,40}=[a-z0-9_+.\-]{1,40}", text) else _read_precision(value)


def _read_rates(value: Any) -> dict[str, float] | None:
    """Rates by dtype; a single number has an empty dtype, which stands for the card's precision."""
    given = {"": value} if not isinstance(value, Mapping) else value
    found = {PRECISIONS.get(str(name).lower(), str(name).lower()): read_number(one) for name, one in given.items()}
    rates = {name: one for name, one in found.items() if one is not None and one <= _MAX_FLOPS}
    return rates if rates and len(rates) == len(found) else None


def _read_parameters(value: Any) -> int | None:
    """A whole number, also with a unit: `8B`, `15.7 billion`."""
    match = _WITH_UNIT.match(value.strip()) if isinstance(value, str) and len(value) < 40 else None
    if match is None:
        return _read_count(value)
    return round(float(match[1]) * _UNITS[match[2].lower()]) or None


def _read_count0(value: Any) -> int | None:
    return 0 if value == 0 and not isinstance(value, bool) else _read_count(value)


def _read_count(value: Any) -> int | None:
    number = read_number(value)
    if number is None or not number.is_integer():
        return None
    return value if isinstance(value, int) else int(number)


class FieldKind(Enum):
    """Kind of value of a field: its words in error messages, a sample for remedies, and its reader.

    A reader returns None for a value of another kind.
    """

    COUNT = ("a whole number above 0", "N", _read_count)
    COUNT0 = ("a whole number, 0 or more", "N", _read_count0)
    NUMBER = ("a number above 0", "N", read_number)
    PARAMETERS = ("a number of parameters, such as 8030261248 or 8B", "N", _read_parameters)
    SWITCH = ("true or false", "true", lambda value: value if isinstance(value, bool) else None)
    TEXT = ("text", "NAME", _read_text)
    PRECISION = ("a dtype such as bf16", "bf16", _read_precision)
    PRECISIONS = ("a list such as [fp8, kv_cache_dtype=fp8]", "[fp8]", _read_list(_read_numerics))
    PHASE = ("training or inference", "training", lambda value: _PHASES.get((_read_text(value) or "").lower()))
    TASK = ("the name of a task", "training", lambda value: (_read_text(value) or "").lower() or None)
    AXES = ("a list of whole numbers", "[4,4]", _read_list(_read_count, 3))
    BALANCE = ("aux_loss, bias or none", "aux_loss", _read_word("aux_loss", "bias", "none"))
    TARGETS = ("all or attention", "all", _read_word("all", "attention"))
    BASE = ("nf4 or int8", "nf4", _read_word("nf4", "int8"))
    RATES = ("a number above 0, or a mapping of dtypes to such numbers", "N", _read_rates)

    def __init__(self, words: str, sample: str, read: Callable[[Any], Any]) -> None:
        self.words, self.sample, self.read = words, sample, read


class FieldProblem(Model):
    """One thing about a field that is missing, impossible or implausible."""

    field: str
    """Dotted path in the card."""
    message: str
    blocking: bool = True
    """Whether the file cannot be used as a card until this is fixed."""
    remedy: str = ""
    """Step that fixes it, for example `--set hidden_size=N`."""
    inferred: Inferred | None = None
    """The value that is used instead, if it is neither the card's nor left out."""

    def __str__(self) -> str:
        return f"{self.field} {self.message}"


@dataclass(frozen=True)
class CardField:
    """One field and its paths in a card: the first one present is read, and `--set` writes to the first."""

    name: str
    kind: FieldKind
    paths: tuple[str, ...]
    required: bool = False
    maximum: float = 1e18
    is_informative: bool = False
    """Whether a card is usable without it, or with an invalid value of it."""
    key: str = ""
    """Name in `Card.work` or `Card.hardware`; the field's own name if it is empty."""

    @property
    def path(self) -> str:
        return self.paths[0]

    @property
    def target(self) -> str:
        """Its name in `Card.work` or `Card.hardware`."""
        return self.key or self.name

    @property
    def remedy(self) -> str:
        """Return how to set it, with a sample value."""
        return f"--set {self.name}={self.kind.sample}"


def _arch(name: str, kind: FieldKind, *also: str, required: bool = False, maximum: float = 1e7) -> CardField:
    names = (name, *also)
    places = ("workload.model.model_arch", "workload.model")
    return CardField(name, kind, tuple(f"{place}.{n}" for place in places for n in names), required, maximum)


def _count_note(name: str, *also: str) -> CardField:
    return replace(_arch(name, FieldKind.PARAMETERS, *also, maximum=1e16), is_informative=True)


_XPU = "workload.hardware.xpu_spec"


def _xpu(
    name: str, kind: FieldKind, *also: str, required: bool = False, maximum: float = 1e18, key: str = ""
) -> CardField:
    return CardField(name, kind, tuple(f"{_XPU}.{each}" for each in also or (name,)), required, maximum, key=key)


_TOPO = "workload.hardware.network_topo"
EXECUTORS = ("Model-executor", "model_executor", "model-executor", "workload.Model-executor")
_FRAMEWORK = tuple(f"{root}.framework" for root in EXECUTORS)

FIELDS: tuple[CardField, ...] = (
    CardField("task", FieldKind.TASK, ("workload.task",)),
    CardField("phase", FieldKind.PHASE, ("workload.model.phase",), required=True),
    CardField("model_family", FieldKind.TEXT, ("workload.model.model_family",), required=True),
    CardField("precision", FieldKind.PRECISION, ("workload.model.precision",), required=True),
    CardField("alternative_precisions", FieldKind.PRECISIONS, ("workload.model.alternative_precisions",)),
    CardField("max_loss_deviation", FieldKind.NUMBER, ("workload.model.max_loss_deviation",), maximum=1),
    CardField("weight_block", FieldKind.COUNT0, ("workload.model.weight_block",), maximum=100_000),
    CardField("moe", FieldKind.SWITCH, ("workload.model.moe",)),
    _arch("num_layers", FieldKind.COUNT, "num_hidden_layers", required=True, maximum=10_000),
    _arch("hidden_size", FieldKind.COUNT, "hidden_dim", required=True),
    _arch("num_heads", FieldKind.COUNT, "num_attention_heads", required=True, maximum=100_000),
    _arch("num_kv_heads", FieldKind.COUNT, "num_key_value_heads", required=True, maximum=100_000),
    _arch("head_dim", FieldKind.COUNT, required=True, maximum=100_000),
    _arch("intermediate_size", FieldKind.COUNT, "ffn_hidden_size", required=True),
    _arch("vocab_size", FieldKind.COUNT, required=True, maximum=1e8),
    _arch("tied_embeddings", FieldKind.SWITCH, "tie_word_embeddings"),
    _arch("gated_mlp", FieldKind.SWITCH),
    *(_arch(name, FieldKind.SWITCH) for name in ("qk_norm", "qkv_bias", "linear_bias", "post_norms")),
    *(
        _arch(name, FieldKind.COUNT)
        for name in (*LATENT, "learned_positions", "sliding_window", "windowed_layers", "index_topk")
    ),
    _arch("mtp_layers", FieldKind.COUNT0, "num_nextn_predict_layers", maximum=100),
    _arch("router_balance", FieldKind.BALANCE),
    _arch("lora_rank", FieldKind.COUNT, maximum=100_000),
    _arch("lora_targets", FieldKind.TARGETS),
    _arch("base_precision", FieldKind.BASE),
    _arch("num_params", FieldKind.PARAMETERS, "total_params", maximum=1e16),
    _count_note("num_params_embedding"),
    _count_note("num_params_active", "num_active_params"),
    _arch("num_experts", FieldKind.COUNT, "n_routed_experts", "num_local_experts", maximum=100_000),
    _arch("top_k", FieldKind.COUNT, "num_experts_per_tok", "moe_top_k", maximum=100_000),
    _arch("expert_intermediate_size", FieldKind.COUNT, "moe_intermediate_size"),
    _arch("num_shared_experts", FieldKind.COUNT0, "n_shared_experts", maximum=100_000),
    _arch("num_dense_layers", FieldKind.COUNT0, "first_k_dense_replace", maximum=10_000),
    _xpu("accelerator", FieldKind.TEXT, "model", required=True),
    _xpu("memory_gb", FieldKind.NUMBER, "memory_gb", "memory_gib", maximum=100_000, key="memory_gib"),
    _xpu("peak_flops", FieldKind.RATES, maximum=1e18),
    _xpu("memory_gb_per_s", FieldKind.NUMBER, maximum=1e6),
    _xpu("scale_up_domain", FieldKind.COUNT, maximum=1_000_000),
    _xpu("nominal", FieldKind.SWITCH),
    _xpu("kernel_tables", FieldKind.TEXT),
    _xpu("total_count", FieldKind.COUNT, required=True, maximum=1_000_000, key="num_accelerators"),
    _xpu("count_per_node", FieldKind.COUNT, required=True, maximum=1_000_000, key="accelerators_per_node"),
    CardField("scale_out_gbps", FieldKind.NUMBER, (f"{_TOPO}.scale_out_gbps",), maximum=1e7),
    CardField("scale_up_gbps", FieldKind.NUMBER, (f"{_TOPO}.scale_up_gbps",), maximum=1e7),
    CardField("torus", FieldKind.AXES, (f"{_TOPO}.torus",)),
    CardField("framework", FieldKind.TEXT, tuple(f"{at}.name" for at in _FRAMEWORK)),
    CardField("framework_version", FieldKind.TEXT, tuple(f"{at}.version" for at in _FRAMEWORK), is_informative=True),
    CardField("recording", FieldKind.TEXT, ("recording",)),
    CardField("description", FieldKind.TEXT, ("description",), is_informative=True),
    CardField("source", FieldKind.TEXT, ("source", "hf_url"), is_informative=True),
    CardField("licence", FieldKind.TEXT, ("licence", "license"), is_informative=True),
)
_BATCH = ("workload.data.batch_size", "workload.data.max-num-seqs")
_SEQUENCE = ("workload.data.seq_len", "workload.data.max-model-len")
WORK_FIELDS = (
    CardField("batch_size", FieldKind.COUNT, _BATCH, required=True, maximum=1e8, key="global_batch_size"),
    CardField("seq_len", FieldKind.COUNT, _SEQUENCE, required=True, maximum=1e8),
)
"""The work of training."""
OTHER_WORK_FIELDS = tuple(
    CardField(name, FieldKind.COUNT, paths, maximum=1e8, is_informative=True)
    for name, paths in (
        ("batch_size", (*_BATCH, "workload.data.max_num_seqs")),
        ("seq_len", (*_SEQUENCE, "workload.data.max_model_len")),
        ("input_len", ("workload.data.input_len", "workload.data.input_length")),
        ("output_len", ("workload.data.output_len", "workload.data.output_length")),
    )
)
"""Fields of inference, and of a task that is not registered; a card need not state them."""
BANDWIDTH_PATH = f"{_TOPO}.bandwidth_gbps"
"""The template's list: [scale-out, scale-up], Gbit/s per accelerator."""
COUNT_FIELDS = ("total_count", "count_per_node")
CHIP_FIELDS = ("accelerator", "memory_gb", "peak_flops", "memory_gb_per_s", "scale_up_domain", "nominal")
MODEL_FIELDS = frozenset(field.name for field in FIELDS if field.path.startswith("workload.model."))
BY_NAME = {field.name: field for field in (*FIELDS, *WORK_FIELDS)}


def note(field: str, message: str, remedy: str = "") -> FieldProblem:
    """A line about a field, by name or path, that leaves the card usable."""
    path = BY_NAME[field].path if field in BY_NAME else field
    return FieldProblem(field=path, message=message, remedy=remedy, blocking=False)


def infer(values: dict[str, Any], name: str, value: Any, source: str) -> FieldProblem:
    """Set a field that the card does not state; returns the note that says so."""
    values[name] = value
    inferred = Inferred(field=name, value=value, source=source)
    return note(name, f"is inferred from {source}").model_copy(update={"inferred": inferred})


def settable_fields(fields: Sequence[CardField]) -> dict[str, str]:
    """Field of `--set` -> path in the card. `name` alone is not accepted as a short name: it is ambiguous."""
    settable = {
        **{path: field.path for field in fields for path in field.paths},
        **{path.rsplit(".", 1)[-1]: field.path for field in fields for path in field.paths if path.count(".") > 1},
        **{name: field.path for field in fields for name in (field.name, field.target)},
        "bandwidth_gbps": BANDWIDTH_PATH,
        BANDWIDTH_PATH: BANDWIDTH_PATH,
        "framework": BY_NAME["framework"].path,
        "model": BY_NAME["accelerator"].path,
    }
    settable.pop("name", None)
    return settable


def look_up(data: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; None if it, or any part of the path, is missing."""
    here: Any = data
    for part in path.split("."):
        if not isinstance(here, Mapping) or part not in here:
            return None
        here = here[part]
    return here


def read_field(data: Mapping[str, Any], field: CardField) -> tuple[Any, FieldProblem | None]:
    """The field's value (None if missing or invalid), and the problem, if any."""
    given = next((v for path in field.paths if not is_absent(v := look_up(data, path))), None)
    if given is None:
        if not field.required:
            return None, None
        raw = next((v for path in field.paths if (v := look_up(data, path)) is not None), None)
        message = MISSING if raw is None else f"{MISSING}: it is {one_line(repr(raw), 40)}"
        return None, FieldProblem(field=field.path, message=message, remedy=field.remedy)
    value = field.kind.read(given)
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and value > field.maximum):
        limit = f" and at most {field.maximum:g}" if value is not None else ""
        message = f"must be {field.kind.words}{limit}, not {one_line(repr(given), 60)}"
        if field.is_informative:
            return None, note(field.path, f"{message}: not used")
        return None, FieldProblem(field=field.path, message=message, remedy=field.remedy)
    return value, None


def read_fields(data: Mapping[str, Any], fields: Sequence[CardField]) -> tuple[dict[str, Any], list[FieldProblem]]:
    """The value of each field that is present and valid, by name, and the problems of the others."""
    read = {field.name: read_field(data, field) for field in fields}
    values = {name: value for name, (value, _) in read.items() if value is not None}
    return values, [problem for _, problem in read.values() if problem is not None]
