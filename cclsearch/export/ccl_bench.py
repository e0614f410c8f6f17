"""Exports trials as entries of CCL-Bench: the card of its template, the traces, the launch, and masked evidence."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from cclsearch.card.arch import count_parts
from cclsearch.card.hardware import match_accelerator
from cclsearch.card.model import Card, Hardware, ModelArch
from cclsearch.core.atomic_file import staging_folder, write_atomically
from cclsearch.core.errors import UserError, writing_to
from cclsearch.core.job_file import JobFileError
from cclsearch.core.secrets.redact import MASK, redact
from cclsearch.core.values import Provenance
from cclsearch.launch.contract import CONFIG_FILE, RESULT_FILE, STDERR_FILE, STDOUT_FILE, TRACE_FOLDER
from cclsearch.record.trial import Trial
from cclsearch.report.launch_form import launch_of_run
from cclsearch.report.page import safe_stem
from cclsearch.report.rows import clean, read_record
from cclsearch.run.folder import Run
from cclsearch.run.log_masking import mask_pieces
from cclsearch.run.spec import hash_file
from cclsearch.run.trial_folder import ADMISSION_FILE, METRICS_FILE, SCRIPT_FILE
from cclsearch.space.framework import load_framework
from cclsearch.space.knobs import list_degrees, rank_degrees
from cclsearch.space.table import count_ranks
from cclsearch.tasks.base import task_of

EVIDENCE = (CONFIG_FILE, SCRIPT_FILE, STDOUT_FILE, STDERR_FILE, RESULT_FILE, METRICS_FILE, ADMISSION_FILE)
TEXT_SUFFIXES = (".json", ".jsonl", ".txt", ".log", ".csv", ".yaml", ".yml", ".sh", ".out", ".err")
EVIDENCE_FOLDER, MANIFEST_FILE = "evidence", "manifest.json"
_RANK_TRACE = re.compile(r"rank(\d+)\.json(\.gz)?")


def list_left_out(folders: Sequence[Path]) -> list[str]:
    """Return a line for each file of evidence that these folders do not contain, with the reason."""
    manifests = (
        (folder, json.loads((folder / EVIDENCE_FOLDER / MANIFEST_FILE).read_text("utf-8"))) for folder in folders
    )
    return [
        f"left out of {folder.name}: {name} ({facts['left_out']})"
        for folder, manifest in manifests
        for name, facts in manifest["files"].items()
        if "left_out" in facts
    ]


def copy_evidence(source: Path, target: Path, *, traces: bool = True) -> dict[str, dict[str, Any]]:
    """Copy a trial's evidence with secrets masked in text; returns size and SHA-256 of each copy by relative path.

    Records go to `evidence/`, traces to the folder itself under the names that CCL-Bench's tools look for. Links and
    special files are skipped; binary files that contain a secret are left out, and listed with the reason.
    """
    manifest: dict[str, dict[str, Any]] = {}
    for named, path in _evidence_files(source, traces=traces):
        relative = redact(_place(named)).replace(MASK, "secret")
        copy = target / relative
        copy.parent.mkdir(parents=True, exist_ok=True)
        why = "another file has this name" if copy.exists() else _copy_masked(path, copy)
        if why:
            manifest.setdefault(relative, {"left_out": why})
        else:
            manifest[relative] = {"bytes": copy.stat().st_size, "sha256": hash_file(copy)}
    return manifest


def trace_kinds(manifest: Mapping[str, Mapping[str, Any]], *, is_tpu: bool) -> list[str]:
    """Return CCL-Bench's names of the kinds of traces that were copied."""
    names = [name for name, facts in manifest.items() if "/" not in name and "left_out" not in facts]
    of_xla = ["json_tpu", "tpu_profiler"] if is_tpu else []
    kinds = {".sqlite": ["nsys"], ".nsys-rep": ["nsys"], ".pb": ["xplane"], ".trace.json": of_xla, ".json": ["json"]}
    found = (next((kinds[end] for end in kinds if name.endswith(end)), []) for name in names)
    return list(dict.fromkeys(kind for each in found for kind in each))


def _place(named: str) -> str:
    """Return where a file of a trial's folder goes."""
    if not named.startswith(f"{TRACE_FOLDER}/"):
        return f"{EVIDENCE_FOLDER}/{named}"
    name = named.rsplit("/", 1)[-1]
    if rank := _RANK_TRACE.fullmatch(name):
        return f"kineto_trace_{int(rank[1])}.json"
    return name.removesuffix(".gz") if name.endswith(".json.gz") else name


def _evidence_files(source: Path, *, traces: bool) -> Iterator[tuple[str, Path]]:
    for name in EVIDENCE:
        if (source / name).is_file() and not (source / name).is_symlink():
            yield name, source / name
    root = source / TRACE_FOLDER
    if not traces or not root.is_dir() or root.is_symlink():
        return
    for folder, folders, files in os.walk(root, followlinks=False):
        folders.sort()
        for name in sorted(files):
            path = Path(folder) / name
            if name.startswith("."):  # a cache of the reader
                continue
            if path.is_file() and not path.is_symlink():
                yield path.relative_to(source).as_posix(), path


def _copy_masked(source: Path, target: Path) -> str | None:
    """Copy one file; returns None, or why it was left out."""
    try:
        with source.open("rb") as read:
            if source.name.removesuffix(".gz").endswith(TEXT_SUFFIXES):
                packed = target.name.endswith(".gz")
                with gzip.GzipFile(target, "wb", 6, mtime=0) if packed else target.open("wb") as write:
                    write.writelines(masked for _, masked in mask_pieces(read, source))
                return None
            if any(masked != piece for piece, masked in mask_pieces(read, source)):
                return "binary file that contains a secret"  # a binary format breaks if its text gets another length
        shutil.copyfile(source, target)
    except (OSError, EOFError, zlib.error, JobFileError) as error:
        target.unlink(missing_ok=True)
        return f"cannot be read: {clean(str(error))}"
    return None


LAUNCH_FILE, COUNT_FILE = "launch.sh", "gpu_count.txt"
"""Written beside the card; CCL-Bench's `gpu_step_score` reads the number of accelerators from the second."""
EXECUTOR = "Model-executor"
_OF_COMMUNICATION = ("NCCL_", "RCCL_", "GLOO_", "UCX_", "UCC_", "FI_", "OFI_", "MPI_", "OMPI_", "NVSHMEM_", "IBV_")
_VENDORS = ("nvidia_", "amd_", "tpu_")
_STEPS = ("warmup_steps", "timed_steps", "profiled_steps")


def write_entries(run: Run, trials: Sequence[Trial], folder: Path, *, traces: bool = True) -> list[Path]:
    """Write one folder per trial into `folder`: the card `<name>.yaml`, traces, `launch.sh`, and `evidence/`.

    Returns the folders. Raises UserError, and creates none, if one of them exists or cannot be written.
    """
    prefix = f"{safe_stem(run.spec.card.name)}-{safe_stem(run.spec.run_id)}"
    targets = [folder / f"{prefix}-t{trial.number:04d}" for trial in trials]
    with writing_to(folder):
        existing = next((target for target in targets if target.exists()), None)
        if existing is not None:
            raise UserError(f"{str(existing)!r} exists already: name another folder with --out")
        folder.mkdir(parents=True, exist_ok=True)
        with staging_folder(folder) as stage:
            for trial, target in zip(trials, targets, strict=True):
                _write_entry(run, trial, stage / target.name, traces=traces)
            for target in targets:
                os.replace(stage / target.name, target)
    return targets


def _write_entry(run: Run, trial: Trial, target: Path, *, traces: bool) -> None:
    (target / EVIDENCE_FOLDER).mkdir(parents=True)
    manifest = copy_evidence(run.trial_folder(trial.number), target, traces=traces)
    card = make_entry(run, trial, manifest)
    text = yaml.safe_dump(card, sort_keys=False, allow_unicode=True, width=120)
    write_atomically(target / f"{target.name}.yaml", text)
    write_atomically(target / COUNT_FILE, f"{count_ranks(trial.config)}\n")
    with contextlib.suppress(UserError):  # no run script of its framework is here
        write_atomically(
            target / LAUNCH_FILE, redact(f"#!/bin/sh\n{launch_of_run(run.spec, trial.config).as_shell()}\n")
        )
    facts = {"run": run.spec.run_id, "trial": trial.number, "provenance": run.spec.provenance.value}
    facts |= {"ledger_result_sha256": trial.result_sha256, "files": manifest}
    write_atomically(target / EVIDENCE_FOLDER / MANIFEST_FILE, json.dumps(facts, indent=1) + "\n")


def make_entry(run: Run, trial: Trial, manifest: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The trial as a card of CCL-Bench's template, with the other fields of the workload's card; null if unknown."""
    spec, outcome = run.spec, trial.outcome
    folder = run.trial_folder(trial.number)
    made, asked = read_record(folder / RESULT_FILE) or {}, read_record(folder / CONFIG_FILE) or {}
    versions = {str(name): clean(str(text)) for name, text in (made.get("versions") or {}).items()}
    is_measured = spec.provenance is Provenance.MEASURED
    card = spec.card.for_trial(trial.config)
    what = spec.provenance.value if spec.provenance.is_repeatable else f"{spec.provenance.value}: nothing was run here"
    provenance = "" if is_measured else f" ({what})"
    steps = sum(int(asked.get(name) or 0) for name in _STEPS) if is_measured else None
    address = card.source if "huggingface.co/" in card.source else None
    entry = {
        "version": 1,
        "description": clean(f"{card.title}; trial {trial.number} of {spec.run_id}{provenance}"),
        "hf_url": address and clean(address),
        "trace_url": None,
        "contributor": None,
        "contact": None,
        "workload": _describe_workload(card, count_ranks(trial.config), steps, is_measured, versions),
        EXECUTOR: _describe_executor(run, trial, versions, is_measured),
    }
    kept = _unfold(card.template)
    for name in ("trace_url", "contributor", "contact", "metric_source"):  # of the card's author, not of this trial
        kept.pop(name, None)
    is_tpu = card.hardware.chip.kind == "tpu"
    own = {
        "metric_source": {"traces": trace_kinds(manifest, is_tpu=is_tpu), "metrics_specific_trace": []},
        "ccl_search": {
            "run": spec.run_id,
            "trial": trial.number,
            "provenance": spec.provenance.value,
            "config": dict(trial.config),
            "admitted": bool(outcome and outcome.is_ranked),
            "metrics": dict(sorted(outcome.metrics.items())) if outcome else {},
        },
    }
    origin = {"source": card.source, "licence": card.licence}
    return _merge(kept, entry) | own | {key: clean(text) for key, text in origin.items() if text}


def _describe_workload(
    card: Card, num_accelerators: int, steps: int | None, is_measured: bool, versions: Mapping[str, str]
) -> dict[str, Any]:
    names = {field.key or field.name: field.path.rsplit(".", 1)[-1] for field in task_of(card).card_fields}
    data: dict[str, Any] = {names.get(k, k): clean(v) if isinstance(v, str) else v for k, v in card.work.items()}
    if card.model is not None:
        data["dataset"] = "synthetic" if is_measured else None  # run scripts draw their tokens from the seed
    return {
        **({} if card.phase and card.phase.value == card.task else {"task": card.task}),
        **({"model": _describe_model(card, card.model, steps)} if card.model else {}),
        "data": data,
        "hardware": _describe_hardware(card, num_accelerators, versions),
    }


def _describe_model(card: Card, model: ModelArch, steps: int | None) -> dict[str, Any]:
    parts = count_parts(model)
    arch: dict[str, Any] = {"num_params": parts.total, "num_params_embedding": parts.embedding}
    arch |= {key: v for key, v in model.model_dump(mode="json").items() if key != "moe" and v is not None}
    if model.moe is not None:
        arch |= model.moe.model_dump(mode="json")
    phase = card.phase.value if card.phase else None
    return {
        "phase": phase,
        "moe": model.moe is not None,
        "granularity": "model_fwd_bwd_pass" if phase == "training" else "model_fwd" if phase else None,
        "model_family": clean(card.family),
        "precision": card.precision,
        "epochs": 1 if steps else None,
        "iteration": steps,
        "model_arch": arch,
    }


def _describe_hardware(card: Card, num_accelerators: int, versions: Mapping[str, str]) -> dict[str, Any]:
    hardware = card.hardware
    known = hardware.scale_out_gbps is not None and hardware.scale_up_gbps is not None
    topology: dict[str, Any] = {"topology": "torus" if hardware.torus else None}
    topology["bandwidth_gbps"] = [hardware.scale_out_gbps, hardware.scale_up_gbps] if known else None
    topology |= {name: getattr(hardware, name) for name in ("scale_out_gbps", "scale_up_gbps") if not known}
    topology |= {"torus": list(hardware.torus)} if hardware.torus else {}
    stated = {"peak_flops": hardware.peak_flops and dict(hardware.peak_flops)}
    stated |= {name: getattr(hardware, name) for name in ("memory_gb_per_s", "scale_up_domain")}
    driver = next((f"{name}_{versions[name]}" for name in ("cuda", "rocm", "hip", "driver") if name in versions), None)
    return {
        "network_topo": topology,
        "xpu_spec": {
            "type": hardware.chip.kind.upper(),
            "model": clean(_name_accelerator(hardware)),
            "memory_gb": hardware.memory_gib,
            "total_count": num_accelerators,
            "count_per_node": min(num_accelerators, hardware.accelerators_per_node),
            **{name: value for name, value in stated.items() if value is not None},
            **({"nominal": True} if hardware.nominal else {}),
        },
        "driver_version": driver,
    }


def _name_accelerator(hardware: Hardware) -> str:
    """CCL-Bench's name of the accelerator (`nvidia_a100`, `tpu_v4`), if it and the memory size mean this one here."""
    names = (name for name in hardware.chip.aliases if name.startswith(_VENDORS))
    matches = ((name, match_accelerator(name, hardware.memory_gib)) for name in names)
    return next((n for n, found in matches if found and found.name == hardware.accelerator), hardware.accelerator)


def _describe_executor(run: Run, trial: Trial, versions: Mapping[str, str], is_measured: bool) -> dict[str, Any]:
    spec, config = run.spec, trial.config
    try:
        framework = load_framework(spec.framework)
    except UserError:  # a recording may name a framework that has no file
        framework = None
    version = versions.get(framework.package or "") if framework else None
    on_cpu = spec.card.hardware.chip.kind == "cpu"
    library, communication = _name_library(versions, on_cpu=on_cpu)
    environment = {**spec.profile.environment, **(framework.knob_environment(config) if framework else {})}
    chosen = {
        k: redact(f"{k}={v}").partition("=")[2] for k, v in environment.items() if k.startswith(_OF_COMMUNICATION)
    }
    compiled = config.get("compile", False)
    compiler = "xla" if "jax" in versions else "torch.compile" if compiled else "plain_pytorch"
    return {
        "framework": {
            "name": clean(spec.framework),
            **({"version": version} if version else {}),
            "compiler_tool_selection": compiler if {"jax", "torch"} & set(versions) else None,
        },
        **({"model_plan_parallelization": _describe_plan(dict(config))} if spec.card.model else {}),
        "communication_library": {
            "name": library,
            "version": communication,
            "env": {name: clean(value) for name, value in chosen.items()} if is_measured and chosen else None,
        },
        "protocol_selection": ["tcp"] if library == "Gloo" else None,
    }


def _name_library(versions: Mapping[str, str], *, on_cpu: bool) -> tuple[str | None, str | None]:
    """Name and version of the collectives' library; Gloo, which torch uses on CPUs, has no version of its own."""
    if "nccl" in versions:
        return ("RCCL" if {"rocm", "hip"} & set(versions) else "NCCL"), versions["nccl"]
    return ("Gloo", None) if on_cpu and "torch" in versions else (None, None)


def _describe_plan(config: Mapping[str, Any]) -> dict[str, Any]:
    """The parallel degrees under CCL-Bench's names; data parallelism is `dp_shard` if the parameters are sharded."""
    sharded = config.get("zero_stage") == 3 or config.get("fsdp") in (True, 1)
    dp = config.get("dp", 1)
    plan = {"dp_replicate": 1 if sharded else dp, "dp_shard": dp if sharded else 1}
    plan |= {name: config[name] for name in ("dp_replicate", "dp_shard") if name in config}
    plan |= {degree: config.get(degree, 1) for degree in rank_degrees() if degree != "dp"}
    plan |= {degree: config.get(degree, 1) for degree in list_degrees() if degree not in rank_degrees()}
    return plan | {"pp_mb": config.get("micro_batch_size")}


def _unfold(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of a card whose fields are kept by dotted path; all executors' are under one name."""
    root: dict[str, Any] = {}
    for path, value in flat.items():
        parts = path.removeprefix("workload.Model-executor.").split(".")
        if len(parts) < path.count(".") + 1:
            parts = [EXECUTOR, *parts]
        if parts[0].lower().replace("_", "-") == EXECUTOR.lower():
            parts[0] = EXECUTOR
        at = root
        for part in parts[:-1]:
            step = at.setdefault(part, {})
            at = step if isinstance(step, dict) else {}
        at[parts[-1]] = value
    unfolded: dict[str, Any] = _list_numbered(root)
    return unfolded


def _list_numbered(value: Any) -> Any:
    """The value with each mapping of 0, 1, ... as a list."""
    if not isinstance(value, dict):
        return value
    items = {name: _list_numbered(item) for name, item in value.items()}
    return list(items.values()) if items and list(items) == [str(i) for i in range(len(items))] else items


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both; of two values for a field the second counts, unless it is null."""
    merged = {**above, **{name: value for name, value in below.items() if name not in above}}
    for name, value in above.items():
        kept = below.get(name)
        if isinstance(value, Mapping):
            merged[name] = _merge(kept if isinstance(kept, Mapping) else {}, value)
        elif value is None:
            merged[name] = kept
    return merged
