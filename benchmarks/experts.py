"""Compares predicted with published step times and peaks of training configurations: the figures of `experts.md`.

    python benchmarks/experts.py EXPERTS.csv MODELS.csv [--landscapes FOLDER ...]

EXPERTS.csv has one published configuration a row, MODELS.csv one architecture. Every complete row becomes a card and a
configuration, and is predicted before any measurement. For the rows of one repository the constants are fitted without
that repository, from `prior_guess.json`, the other repositories' rows and the landscapes.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cclsearch.card.model import Card, Hardware, KnobDeclaration, ModelArch, MoEArch
from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line
from cclsearch.core.values import Config, Value
from cclsearch.core.yaml_file import read_yaml
from cclsearch.recording.load import find_recordings, load_recording
from cclsearch.space.build import explain_config
from cclsearch.space.framework import load_framework
from cclsearch.space.table import Knob, Space, space_from_rows
from cclsearch.stats.closed_form import LIKELY
from cclsearch.tasks.training.prediction import Priors, load_priors, make_predictor, read_priors

CHECKPOINTING = ("none", "selective", "0.6", "0.8", "full")
"""What a source may have used that does not say it: nothing, what is cheap, shares of the activations, everything."""
TABLE = read_yaml(Path(__file__).with_suffix(".yaml"))
"""What the columns of the table mean, and what of it no space has."""


@dataclass(frozen=True)
class Published:
    """One published configuration."""

    number: int
    """Line of the table, the heading being 1."""
    source: str
    card: Card
    configs: tuple[Config, ...]
    """One, or one for each kind of recomputation if the source does not state it."""
    step_time_s: float
    """NaN if only the peak is known."""
    label: str
    peak_gib: float
    """NaN if unknown."""
    row: Mapping[str, str] = field(compare=False)
    """The line of the table."""

    @property
    def space(self) -> Space:
        knobs = [Knob(name, tuple(dict.fromkeys(c[name] for c in self.configs))) for name in self.configs[0]]
        return space_from_rows(knobs, self.configs)


def read_published(experts: Path, models: Path, *, peaks: bool = False) -> list[Published]:
    """Return the complete rows of the table; with `peaks`, those with a peak whose layout is known instead."""
    with models.open(encoding="utf-8", newline="") as file:
        archs = {row["name"]: row for row in csv.DictReader(file)}
    with experts.open(encoding="utf-8", newline="") as file:
        rows = [(n, row) for n, row in enumerate(csv.DictReader(file), 2) if _is_wanted(row, peaks)]
    return [_read_row(number, row, archs[row["architecture"]]) for number, row in rows]


def _is_wanted(row: Mapping[str, str], peaks: bool) -> bool:
    if peaks:
        return bool(row["memory_per_device"] and row["architecture"] and row["micro_batch"])
    return row["layout_complete_derived"] == "1"


def _read_row(number: int, row: Mapping[str, str], model: Mapping[str, str]) -> Published:
    accelerator = _accelerator(row["accelerator"])
    ranks, degrees = int(row["num_accelerators"]), {n: int(float(row[n] or 1)) for n in ("tp", "pp", "cp", "ep")}
    # a TPU7x chip has two devices and one name: chips are counted
    dp = max(ranks // (degrees["tp"] * degrees["pp"] * degrees["cp"]), 1)
    batch = int(float(row["global_batch"] or float(row["micro_batch"]) * dp))
    if row["framework"] == "MaxText":
        micro_batch = max(batch // (dp * int(float(row["grad_accum"] or 1))), 1)
    else:
        micro_batch = max(int(float(row["micro_batch"])), 1)
    config: dict[str, Value] = {
        **degrees,
        "dp": dp,
        "micro_batch_size": micro_batch,
        "virtual_pipeline": int(float(row["vp"] or 1)) if degrees["pp"] > 1 else 1,
        "zero_stage": _zero_stage(row),
        "sequence_parallel": degrees["tp"] > 1,
    }
    if row["phase"] == "lora":
        config["method"] = "lora"
    if row["framework"] == "torchtitan":
        config["compile"] = "compile" in row["other_flags"]
    if row["fsdp_zero"].lower() == "hsdp":
        config["dp_replicate"] = max(dp // _per_node(accelerator, ranks), 1)
    configs = tuple(Config({**config, "activation_checkpointing": kind}) for kind in _checkpointing(row))
    seconds = float(row["step_time_s"] or row["step_time_s_derived"] or "nan")
    label = f"{row['model']} {row['accelerator']} x{ranks} {row['precision']}"
    card = _make_card(row, model, accelerator, ranks, batch)
    return Published(
        number, row["source_repo"], card, configs, seconds, label, _peak_gib(row["memory_per_device"]), row
    )


def _peak_gib(text: str) -> float:
    found = re.match(r"([\d.]+) (GiB|GB)", text)
    return float(found[1]) * (1e9 / 2**30 if found[2] == "GB" else 1.0) if found else float("nan")


def _make_card(row: Mapping[str, str], model: Mapping[str, str], accelerator: str, ranks: int, batch: int) -> Card:
    hardware = Hardware(
        accelerator=accelerator,
        num_accelerators=ranks,
        accelerators_per_node=_per_node(accelerator, ranks),
        memory_gib=96 if "96GB" in row["accelerator"] else TABLE["memory_gib"][accelerator],
    )
    network = re.search(r"network (\d+) Gbps", row["other_flags"])
    if network:
        hardware = hardware.model_copy(update={"scale_out_gbps": float(network[1])})
    return Card(
        name=f"row-{row['model']}",
        title=row["model"],
        family=row["architecture"],
        model=_make_arch(model),
        work=Config({"global_batch_size": batch, "seq_len": int(float(row["seq_len"]))}),
        precision=_precision(row["precision"]),
        hardware=hardware,
        framework=row["framework"].lower(),
    )


def _make_arch(row: Mapping[str, str]) -> ModelArch:
    """Return the shape.

    Where the columns do not count up to the model's parameters (hybrids), the widths of experts and of the other layers
    are those that have the stated parameters, total and active; few layers of attention become few heads in all layers.
    """
    number = {name: int(float(value)) for name, value in row.items() if re.fullmatch(r"\d+(\.\d+)?", value or "")}
    layers, hidden, heads, kv = (number[name] for name in ("layers", "hidden", "heads", "kv_heads"))
    kinds = {kind: int(n) for n, kind in re.findall(r"(\d+) (mamba|attention|moe)", row["attention_pattern"])}
    hybrid = row["family"] == "nemotron_h"
    mixtures = layers // number.get("moe_layer_step", 1)
    if hybrid:  # the pattern of the family's smallest model if the row has none
        mixtures, attention = kinds.get("moe", layers * 23 // 52), kinds.get("attention", layers * 6 // 52)
        heads, kv = max(round(heads * attention / layers), 1), max(round(kv * attention / layers), 1)
    matrices = 3 if row["gated"] != "0" else 2
    ffn, expert = number.get("ffn") or number.get("expert_ffn", 0), number.get("expert_ffn", 0)
    used = 2 * number["vocab"] * hidden + 2 * layers * hidden * number["head_dim"] * (heads + kv)
    shared = number.get("shared_expert_ffn", 0)
    if expert and "params_from_shape" not in number:
        idle = mixtures * (number["num_experts"] - number["top_k"]) * matrices * hidden
        expert = max(round((number["params_total"] - number["params_active"]) / idle), 1)
        used += mixtures * matrices * hidden * (expert * number["top_k"] + shared)
        ffn = max(round((number["params_active"] - used) / (max(layers - mixtures, 1) * matrices * hidden)), 1)
    moe = None
    if expert:
        moe = MoEArch(
            num_experts=number["num_experts"],
            top_k=number["top_k"],
            expert_intermediate_size=expert,
            num_shared_experts=round(shared / expert),
            num_dense_layers=max(number.get("dense_layers_first", 0), layers - mixtures),
        )
    latent = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim")
    return ModelArch(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=number["head_dim"],
        intermediate_size=ffn,
        vocab_size=number["vocab"],
        tied_embeddings=row["tied"] == "1",
        gated_mlp=row["gated"] != "0",
        moe=moe,
        num_params=number.get("params_total"),
        **{n: number[n] for n in latent if n in ModelArch.model_fields and number.get(n)},
    )


def _accelerator(name: str) -> str:
    text = name.lower()
    if text.startswith("tpu"):
        return "tpu-v7" if text.startswith("tpu7x") else "tpu-" + re.findall(r"v\d+[a-z]", text)[0]
    key = re.split(r"[ -]", text)[0]
    return "a100-80" if key == "a100" else key


def _per_node(accelerator: str, ranks: int) -> int:
    return min(ranks, ranks if accelerator.startswith("tpu") else TABLE["per_node"].get(accelerator, 8))


def _precision(text: str) -> str:
    lower = text.lower()
    return next(short for name, short in TABLE["dtypes"].items() if name in lower)


def _zero_stage(row: Mapping[str, str]) -> int:
    """Megatron's tables run the distributed optimizer (stage 1) unless they say FSDP; torch and JAX shard weights."""
    text = row["fsdp_zero"].lower()
    if "fsdp" in text or "hsdp" in text:
        return 3
    return 1 if text or "Megatron" in row["framework"] else 3


def _checkpointing(row: Mapping[str, str]) -> tuple[str, ...]:
    text = row["activation_checkpointing"].lower()
    if "custom" in text or "offload" in text:
        return (*CHECKPOINTING, "offload")
    if not text:
        return CHECKPOINTING
    if "none" in text:
        return ("none",)
    if re.search(r"moe(,|$)", text):  # whole MoE layers, most of the activations
        return ("0.6",)
    return ("full",) if "full" in text else ("selective",)


def choose_row(row: Published, priors: Priors) -> int:
    """Return the configuration that is taken: the fastest that is predicted to fit, else the smallest."""
    predictor = make_predictor(row.card, row.space, priors)
    assert predictor.memory is not None
    log_gib, _ = predictor.memory.form.predict(len(row.configs))
    fitting = np.flatnonzero(log_gib <= predictor.memory.log_limit)
    log_time, _ = predictor.forms["step_time_s"].predict(len(row.configs))
    return int(fitting[np.argmin(log_time[fitting])]) if len(fitting) else int(np.argmin(log_gib))


def predict_one(row: Published, priors: Priors) -> float:
    """Return the predicted seconds per step of the configuration that is taken."""
    form = make_predictor(row.card, row.space, priors).forms["step_time_s"]
    return float(np.exp(form.predict(len(row.configs))[0][choose_row(row, priors)]))


def predict_held_out(published: Sequence[Published], recordings: Sequence[Any]) -> list[float]:
    """Return the predicted seconds of each row, by constants that are fitted without any row of its source."""
    from fit_prior import fit_prior

    sources = dict.fromkeys(row.source for row in published)
    priors = {
        source: read_priors(fit_prior(recordings, [row for row in published if row.source != source]))
        for source in sources
    }
    return [predict_one(row, priors[row.source]) for row in published]


def find_error(predicted: Sequence[float], published: Sequence[Published]) -> tuple[float, float]:
    """Return the median of |predicted / published - 1|, and the median of predicted / published."""
    ratio = np.array([p / row.step_time_s for p, row in zip(predicted, published, strict=True)])
    return float(np.median(np.abs(ratio - 1))), float(np.median(ratio))


def print_table(columns: Mapping[str, Sequence[float]], published: Sequence[Published]) -> None:
    """Print the median error and the median ratio of each prediction, of all rows and by repository and accelerator."""
    print(f"{'median error and predicted / published':<44}{'rows':>5}" + "".join(f"{name:>22}" for name in columns))
    groups: dict[str, list[int]] = {"all": list(range(len(published)))}
    for find in (lambda row: row.source, lambda row: row.card.hardware.accelerator):
        for n, row in enumerate(published):
            groups.setdefault(find(row), []).append(n)
    for name, rows in groups.items():
        errors = [find_error([values[n] for n in rows], [published[n] for n in rows]) for values in columns.values()]
        cells = "".join(f"{f'{error:.3f}  {ratio:.2f}':>22}" for error, ratio in errors)
        print(f"{name:<44}{len(rows):>5}{cells}")


def print_memory(published: Sequence[Published], peaks: Sequence[Published]) -> None:
    """Print how many published runs are predicted not to fit, and errors of published peaks, which fitted nothing."""
    priors = load_priors()
    lost = [row for row in published if predict_memory(row, priors)[1] < LIKELY]
    print(f"\nran, and predicted not to fit: {len(lost)} of {len(published)}")
    ratios = {row: predict_memory(row, priors)[0] / row.peak_gib for row in peaks}
    for source in ("all", *dict.fromkeys(row.source for row in peaks)):
        own = np.array([ratio for row, ratio in ratios.items() if source in {"all", row.source}])
        error, ratio = np.median(np.abs(own - 1)), np.median(own)
        print(f"peaks of {source:<35}{len(own):>5}{f'{error:.3f}  {ratio:.2f}':>22}")


def predict_memory(row: Published, priors: Priors) -> tuple[float, float]:
    """Return the expected GiB of the configuration that is taken, and the probability that it fits."""
    from cclsearch.propose.bayes.feasibility import fit_feasibility

    at = np.array([choose_row(row, priors)])
    gib, fits, _ = fit_feasibility(make_predictor(row.card, row.space, priors), ()).predict(at)
    return float(gib[0]), float(fits[0])


def find_missing(row: Published) -> str:
    """Return why no space, extended by `--knob` and `alternative_precisions`, has a row; empty if one has it."""
    stated, reasons = " ".join(row.row.values()).lower(), []
    if found := [why for pattern, why in TABLE["missing"].items() if re.search(pattern.lower(), stated)]:
        return str(found[0])
    framework = load_framework(TABLE["frameworks"].get(row.row["framework"], "megatron"))
    texts, given = TABLE["precisions"].items(), row.row["precision"].lower()
    precision = next((name for part, name in texts if re.search(part, given)), row.card.precision)
    levers = {k: v for part, own in TABLE["levers"].items() if part in row.row["other_flags"] for k, v in own.items()}
    numerics = tuple(
        f"{knob.name}={levers[knob.name]}" for knob in framework.levers if knob.numerics & (knob.name in levers)
    )
    card = row.card.model_copy(update={"precision": precision, "alternative_precisions": numerics})
    for config in row.configs:
        asked = {k.name: {**config, **levers}[k.name] for k in framework.all_knobs if k.name in {**config, **levers}}
        extra = [KnobDeclaration(name=name, choices=(value,)) for name, value in asked.items()]
        try:
            framework.require_buildable(card)
            reasons.append(", ".join(v.rule for v in explain_config(card, framework, asked, extra) if v.ok is False))
        except UserError as error:
            return one_line(str(error), 110)
    return min(reasons, key=len)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experts", type=Path)
    parser.add_argument("models", type=Path)
    parser.add_argument("--landscapes", type=Path, nargs="+", default=[])
    args = parser.parse_args()
    published = read_published(args.experts, args.models)
    recordings = [load_recording(path) for folder in args.landscapes for path in find_recordings(folder)]
    columns = {"source left out": predict_held_out(published, recordings)}
    print_table(columns, published)
    counts = Counter(map(find_missing, published))
    print(f"\nin the default or extended space of a shipped framework: {counts.pop('')} of {len(published)}")
    print("\n".join(f"{count:>5}  {why}" for why, count in counts.most_common()))
    print_memory(published, read_published(args.experts, args.models, peaks=True))


if __name__ == "__main__":
    main()
