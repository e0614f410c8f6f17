"""Whether the configurations that ran in public records are in the search space, and which rule refuses the others.

.venv/bin/python benchmarks/space_records.py EXPERTS.csv [--list]

EXPERTS.csv has one published configuration per line (columns: model, architecture, framework, accelerator, degrees,
batch and sequence; `layout_complete_derived` is 1 if none of them is missing). Each gets a card of exactly its
accelerators and work. Landscapes in `benchmarks/landscapes` are checked as their recorded cards under nanotron's and
Megatron's rules.
"""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from cclsearch.card.catalogue import find_by_name
from cclsearch.card.load import load_card
from cclsearch.card.model import Card, KnobDeclaration, ModelArch, make_model
from cclsearch.core.errors import UserError
from cclsearch.core.values import Config, Value
from cclsearch.recording.load import find_recordings, load_recording
from cclsearch.space.build import explain_config, resolve_knobs
from cclsearch.space.framework import Framework, load_framework
from cclsearch.space.knobs import meaning_of
from cclsearch.space.rule import RuleKind

LANDSCAPES = Path(__file__).with_name("landscapes")
FRAMEWORKS = {"Megatron-Bridge": "megatron", "NeMo 1.x (Megatron)": "megatron", "MaxText": "maxtext"}
"""Framework of a record -> ours with the same options. The FSDP of `fms-fsdp` is torchtitan's (FSDP2)."""
DEGREES = {"tp": "tp", "pp": "pp", "cp": "cp", "ep": "ep", "dp_derived": "dp", "vp": "virtual_pipeline"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("experts", type=Path)
    parser.add_argument("--landscapes", type=Path, default=LANDSCAPES, help="folder of recordings")
    parser.add_argument("--list", action="store_true", help="list every configuration that is not in its space")
    args = parser.parse_args()
    with args.experts.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["layout_complete_derived"] == "1"]
    found = [(f"{row['model']} x {row['num_accelerators']}, {row['framework']}", judge_expert(row)) for row in rows]
    show("published expert configurations", found, listed=args.list)
    found = [(name, refused) for name, refused in judge_landscapes(args.landscapes)]
    show("configurations of the landscapes that ran", found, listed=args.list)


def show(title: str, found: list[tuple[str, str]], *, listed: bool) -> None:
    """Print the share in the space and the reasons of the rest."""
    legal = sum(not refused for _, refused in found)
    print(f"{title}: {legal} of {len(found)} in the search space")
    for reason, count in Counter(refused for _, refused in found if refused).most_common():
        print(f"  {count:4} {reason}")
    for name, refused in found if listed else []:
        if refused:
            print(f"  {name}: {refused}")


def judge_expert(row: Mapping[str, str]) -> str:
    """Return the rules that refuse a published configuration; empty if it is in the space of its card."""
    framework = load_framework(FRAMEWORKS.get(row["framework"], "torchtitan"))
    model = find_by_name(row["architecture"])
    if model is None:
        return f"no shape of {row['architecture']}"
    if problem := find_contradiction(row):
        return problem
    card = make_card(row, make_model(model.fields))
    given = {knob: int(row[column]) for column, knob in DEGREES.items() if row[column]}
    # MaxText counts sequences per device; the ranks of a model share those of a data-parallel rank
    ranks = int(row["tp"]) * int(row["pp"]) * int(row["cp"] or 1) if framework.name == "maxtext" else 1
    given |= {"micro_batch_size": round(float(row["micro_batch"]) * ranks)}
    if framework.name == "megatron" and card.arch.moe and given.get("tp", 1) > 1:
        given["sequence_parallel"] = True  # what Megatron needs, not stated by the tables
    return judge(card, framework, given)


def find_contradiction(row: Mapping[str, str]) -> str:
    """Return why no run can have had this layout; empty if one can."""
    stage = int(row["tp"]) * int(row["cp"] or 1) * int(row["dp_derived"])
    if int(row["ep"] or 1) > stage:
        return f"contradicts itself: ep {row['ep']} in pipeline stages of {stage} ranks"
    trained = float(row["micro_batch"]) * int(row["grad_accum"] or 1) * int(row["num_accelerators"])
    if row["framework"] == "MaxText" and "2 devices" not in row["accelerator"] and trained != int(row["global_batch"]):
        return f"contradicts itself: {trained:g} sequences per step, but a global batch of {row['global_batch']}"
    return ""


def make_card(row: Mapping[str, str], arch: ModelArch) -> Card:
    """Return wl2's card with the model, work and accelerators of a record."""
    base, ranks = load_card("wl2"), int(row["num_accelerators"]) * (2 if "2 devices" in row["accelerator"] else 1)
    per_node = 4 if row["accelerator"].startswith(("GB", "TPU")) else 8
    hardware = base.hardware.model_copy(
        update={"num_accelerators": ranks, "accelerators_per_node": min(per_node, ranks), "torus": None}
    )
    work = Config({"global_batch_size": int(row["global_batch"]), "seq_len": int(row["seq_len"])})
    return base.model_copy(update={"model": arch, "hardware": hardware, "work": work, "name": row["model"]})


def judge(card: Card, framework: Framework, given: Mapping[str, Value]) -> str:
    """Return the names of the rules that refuse every configuration with these values; empty if one is in the space.

    A configuration that does the same as another (rules of kind `same`) is in the space as that one.
    A knob that the framework offers only on request is added with its own choices, as `--knob` does.
    """
    known = {knob.name: knob for knob in (*framework.knobs, *framework.optional_knobs)}
    lacking = [name for name, value in given.items() if name not in known and value != meaning_of(name).neutral]
    if lacking:
        return f"{framework.name} has no knob {', '.join(lacking)}"
    extra = [
        KnobDeclaration(name=name, choices=knob.resolve(card, use_fewer=True).choices)
        for name in given
        if (knob := framework.find_optional(name)) is not None and given[name] != meaning_of(name).neutral
    ]
    try:
        knobs = resolve_knobs(card, framework, extra)
    except UserError as error:
        return str(error)
    names = {knob.name for knob in knobs}
    config = {name: value for name, value in given.items() if name in names}
    verdicts = explain_config(card, framework, config, extra)
    return ", ".join(
        f"{v.rule} ({v.detail.split(';')[0]})" if v.rule == "choices" else v.rule
        for v in verdicts
        if v.ok is False and v.kind is not RuleKind.SAME
    )


def judge_landscapes(folder: Path = LANDSCAPES) -> Iterator[tuple[str, str]]:
    """Yield every measured configuration of the landscapes with the rules of its framework that refuse it."""
    for found in find_recordings(folder):
        recording = load_recording(found)
        framework = load_framework("nanotron" if "nanotron" in recording.name else "megatron")
        for row in recording.rows:
            if row.status.value == "ok":
                known = {knob.name for knob in framework.knobs}
                given = {name: value for name, value in row.config.items() if name in known}
                if isinstance(recomputes := given.get("activation_checkpointing"), bool):
                    given["activation_checkpointing"] = "full" if recomputes else "none"
                yield f"{recording.name} {row.config}", judge(recording.card, framework, given)


if __name__ == "__main__":
    main()
