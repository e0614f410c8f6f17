"""Exports trials as CCL-Bench v1 workload cards, each with its evidence: inputs, outputs and traces, secrets masked."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import yaml

from cclsearch.card.model import Card, ModelArch
from cclsearch.core.atomic_file import staging_folder, write_atomically
from cclsearch.core.errors import UserError, writing_to
from cclsearch.core.job_file import JobFileError
from cclsearch.core.redact import MASK, redact
from cclsearch.core.values import Provenance
from cclsearch.launch.contract import CONFIG_FILE, RESULT_FILE, STDERR_FILE, STDOUT_FILE, TRACE_FOLDER
from cclsearch.record.trial import Trial
from cclsearch.report.gather import clean
from cclsearch.report.write import safe_stem
from cclsearch.run.folder import Run
from cclsearch.run.log_masking import mask_pieces
from cclsearch.run.spec import hash_file
from cclsearch.run.trial_folder import ADMISSION_FILE, METRICS_FILE, SCRIPT_FILE
from cclsearch.space.knobs import list_degrees, rank_degrees
from cclsearch.space.table import count_ranks
from cclsearch.tasks.base import task_of

EVIDENCE = (CONFIG_FILE, SCRIPT_FILE, STDOUT_FILE, STDERR_FILE, RESULT_FILE, METRICS_FILE, ADMISSION_FILE)
TEXT_SUFFIXES = (".json", ".jsonl", ".txt", ".log", ".csv", ".yaml", ".yml", ".sh", ".out", ".err")
MANIFEST_FILE = "manifest.json"


def list_left_out(folders: Sequence[Path]) -> list[str]:
    """Return a line for each file of evidence that these cards do not contain, with the reason."""
    manifests = ((folder, json.loads((folder / "evidence" / MANIFEST_FILE).read_text("utf-8"))) for folder in folders)
    return [
        f"left out of {folder.name}: {name} ({facts['left_out']})"
        for folder, manifest in manifests
        for name, facts in manifest["files"].items()
        if "left_out" in facts
    ]


def write_cards(run: Run, trials: Sequence[Trial], folder: Path, *, traces: bool = True) -> list[Path]:
    """Write one folder per trial into `folder`: the card `<name>.yaml`, and `evidence/` with a manifest of hashes.

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
                _write_card(run, trial, stage / target.name, traces=traces)
            for target in targets:
                os.replace(stage / target.name, target)
    return targets


def _write_card(run: Run, trial: Trial, target: Path, *, traces: bool) -> None:
    evidence = target / "evidence"
    evidence.mkdir(parents=True)
    manifest = copy_evidence(run.trial_folder(trial.number), evidence, traces=traces)
    card = make_card(run, trial, manifest)
    text = yaml.safe_dump(card, sort_keys=False, allow_unicode=True, width=120)
    write_atomically(target / f"{target.name}.yaml", text)
    facts = {"run": run.spec.run_id, "trial": trial.number, "provenance": run.spec.provenance.value}
    facts |= {"ledger_result_sha256": trial.result_sha256, "files": manifest}
    write_atomically(evidence / MANIFEST_FILE, json.dumps(facts, indent=1) + "\n")


def make_card(run: Run, trial: Trial, manifest: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The trial as a CCL-Bench v1 card: the fixed workload, the chosen parallel plan of a model, and the metrics."""
    spec, outcome = run.spec, trial.outcome
    plan = {"model_plan_parallelization": _describe_plan(dict(trial.config))} if spec.card.model else {}
    provenance = "" if spec.provenance is Provenance.MEASURED else f" ({spec.provenance.value}: nothing was run here)"
    card: dict[str, Any] = {
        "version": 1,
        "description": clean(f"{spec.card.title}; trial {trial.number} of {spec.run_id}{provenance}"),
        "workload": _describe_workload(spec.card.for_trial(trial.config), count_ranks(trial.config)),
        "Model-executor": {"framework": {"name": clean(spec.framework)}, **plan},
        "metric_source": {"traces": _trace_kinds(manifest)},
        "ccl_search": {
            "run": spec.run_id,
            "trial": trial.number,
            "provenance": spec.provenance.value,
            "config": dict(trial.config),
            "admitted": bool(outcome and outcome.is_ranked),
            "metrics": dict(sorted(outcome.metrics.items())) if outcome else {},
        },
    }
    origin = {"source": spec.card.source, "licence": spec.card.licence}
    return card | {key: clean(text) for key, text in origin.items() if text}


def copy_evidence(source: Path, target: Path, *, traces: bool = True) -> dict[str, dict[str, Any]]:
    """Copy a trial's evidence with secrets masked in text; returns size and SHA-256 of each copy by relative path.

    Links and special files are skipped; binary files that contain a secret are left out, and listed with the reason.
    """
    manifest: dict[str, dict[str, Any]] = {}
    for named, path in _evidence_files(source, traces=traces):
        relative = redact(named).replace(MASK, "secret")
        copy = target / relative
        copy.parent.mkdir(parents=True, exist_ok=True)
        why = _copy_masked(path, copy)
        if why:
            manifest[relative] = {"left_out": why}
            continue
        manifest[relative] = {"bytes": copy.stat().st_size, "sha256": hash_file(copy)}
    return manifest


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
            if path.is_file() and not path.is_symlink():
                yield path.relative_to(source).as_posix(), path


def _copy_masked(source: Path, target: Path) -> str | None:
    """Copy one file; returns None, or why it was left out."""
    try:
        with source.open("rb") as read:
            if source.name.removesuffix(".gz").endswith(TEXT_SUFFIXES):
                with _open_packed(target) if source.name.endswith(".gz") else target.open("wb") as write:
                    write.writelines(masked for _, masked in mask_pieces(read, source))
                return None
            if any(masked != piece for piece, masked in mask_pieces(read, source)):
                return "binary file that contains a secret"  # a binary format breaks if its text gets another length
        shutil.copyfile(source, target)
    except (OSError, EOFError, zlib.error, JobFileError) as error:
        target.unlink(missing_ok=True)
        return f"cannot be read: {clean(str(error))}"
    return None


def _open_packed(target: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.GzipFile(target, "wb", compresslevel=6, mtime=0))


def _describe_model(card: Card, model: ModelArch) -> dict[str, Any]:
    arch = {key: value for key, value in model.model_dump(mode="json").items() if key != "moe" and value is not None}
    if model.moe is not None:
        arch |= model.moe.model_dump(mode="json")
    return {
        "phase": card.phase.value if card.phase else None,
        "moe": model.moe is not None,
        "model_family": clean(card.family),
        "precision": card.precision,
        "model_arch": arch,
    }


def _describe_work(card: Card) -> dict[str, Any]:
    """The work under the names of its fields in a card."""
    names = {field.key or field.name: field.path.rsplit(".", 1)[-1] for field in task_of(card).card_fields}
    return {names.get(name, name): clean(v) if isinstance(v, str) else v for name, v in card.work.items()}


def _describe_workload(card: Card, num_accelerators: int) -> dict[str, Any]:
    hardware = card.hardware
    topology: dict[str, Any] = {}
    if hardware.scale_out_gbps and hardware.scale_up_gbps:
        topology["bandwidth_gbps"] = [hardware.scale_out_gbps, hardware.scale_up_gbps]
    if hardware.torus:
        topology["torus"] = list(hardware.torus)
    kind = "TPU" if hardware.accelerator.startswith("tpu") else "CPU" if hardware.accelerator == "cpu" else "GPU"
    return {
        **({} if card.phase and card.phase.value == card.task else {"task": card.task}),
        **({"model": _describe_model(card, card.model)} if card.model else {}),
        "data": _describe_work(card),
        "hardware": {
            "network_topo": topology,
            "xpu_spec": {
                "type": kind,
                "model": clean(hardware.accelerator),
                "memory_gb": hardware.memory_gib,
                "total_count": num_accelerators,
                "count_per_node": min(num_accelerators, hardware.accelerators_per_node),
            },
        },
    }


def _describe_plan(config: Mapping[str, Any]) -> dict[str, Any]:
    """The parallel degrees under CCL-Bench's names; data parallelism is `dp_shard` if the parameters are sharded."""
    sharded = config.get("zero_stage") == 3 or config.get("fsdp") in (True, 1)
    dp = config.get("dp", 1)
    plan = {"dp_replicate": 1 if sharded else dp, "dp_shard": dp if sharded else 1}
    plan |= {degree: config.get(degree, 1) for degree in rank_degrees() if degree != "dp"}
    plan |= {degree: config[degree] for degree in list_degrees() if degree in config and degree not in rank_degrees()}
    if "micro_batch_size" in config:
        plan["micro_batch"] = config["micro_batch_size"]
    return plan


def _trace_kinds(manifest: Mapping[str, Mapping[str, Any]]) -> list[str]:
    names = [name for name in manifest if name.startswith(f"{TRACE_FOLDER}/")]
    kinds = {"nsys": (".sqlite", ".nsys-rep"), "xplane": (".pb",), "json": (".json", ".json.gz")}
    return [kind for kind, suffixes in kinds.items() if any(name.endswith(suffixes) for name in names)]
