"""Copies the evidence of a trial (inputs, outputs, traces) with secrets masked, and lists each file with its hash."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cclsearch.core.job_file import JobFileError
from cclsearch.core.secrets.redact import MASK, redact
from cclsearch.launch.contract import CONFIG_FILE, RESULT_FILE, STDERR_FILE, STDOUT_FILE, TRACE_FOLDER
from cclsearch.report.rows import clean
from cclsearch.run.log_masking import mask_pieces
from cclsearch.run.spec import hash_file
from cclsearch.run.trial_folder import ADMISSION_FILE, METRICS_FILE, SCRIPT_FILE

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
