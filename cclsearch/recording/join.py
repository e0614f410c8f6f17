"""Join recordings of the same work on different numbers of accelerators into one, with that number as a dimension.

The result is a table that the replay launcher reads like any other."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path

import yaml

from cclsearch.card.model import Card
from cclsearch.card.task import TASKS
from cclsearch.core.atomic_file import write_atomically
from cclsearch.core.errors import UserError
from cclsearch.core.metrics import PEAK_MEMORY
from cclsearch.core.yaml_file import read_yaml
from cclsearch.recording.load import Recording, load_recording


def find_family(folder: Path) -> list[Recording]:
    """The recording in `folder` and those beside it of the same work and accelerator, by number of accelerators."""
    first = load_recording(folder)
    others = [path.parent for path in sorted(folder.resolve().parent.glob("*/trials.csv"))]
    found = [first]
    for other in others:
        if other == folder.resolve() or not (other / "card.yaml").is_file():
            continue
        recording = load_recording(other)
        if _is_same_work(recording.card, first.card):
            found.append(recording)
    return sorted(found, key=lambda r: (r.card.hardware.num_accelerators, r.name))


def join_recordings(recordings: Sequence[Recording], into: Path) -> Path:
    """Write the recordings as one under `into` and return its folder. The same recordings give the same folder.

    Raises UserError if their work or their knobs differ.
    """
    if len(recordings) < 2:
        raise UserError(f"joining needs at least two recordings, not {len(recordings)}")
    for recording in recordings[1:]:
        if not _is_same_work(recordings[0].card, recording.card):
            raise UserError(
                f"recordings {recordings[0].name!r} and {recording.name!r} cannot be joined: work, model, precision,"
                " accelerator and framework must be the same"
            )
    table = _join_tables(recordings)
    card = _join_cards(recordings)
    digest = hashlib.sha256((table + card).encode()).hexdigest()[:8]
    counts = [recording.card.hardware.num_accelerators for recording in recordings]
    shared = os.path.commonprefix([recording.name for recording in recordings])  # noqa: RUF071 names, not paths
    stem = shared.rstrip("-_.") or "joined"
    folder = into / f"{stem}-{min(counts)}to{max(counts)}-{digest}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "trials.csv", table)
        write_atomically(folder / "card.yaml", card)
    except OSError as error:
        raise UserError(f"cannot write the joined recording {str(folder)!r}: {error.strerror}") from None
    return folder


def _join_tables(recordings: Sequence[Recording]) -> str:
    knobs = list(dict.fromkeys(knob.name for r in recordings for knob in r.space.knobs))
    shared = [name for name in knobs if all(r.space.has(name) for r in recordings)]
    if shared != knobs:
        missing = sorted(set(knobs) - set(shared))
        raise UserError(f"recordings cannot be joined: knob {missing[0]!r} is not in all of them")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    known = [name for recording in recordings for row in recording.rows for name in row.metrics]
    metrics = list(dict.fromkeys([recordings[0].primary.name, PEAK_MEMORY, *known]))
    writer.writerow([*knobs, "status", *metrics])
    for recording in recordings:
        for row in recording.rows:
            values = [json.dumps(v) if isinstance(v, bool) else v for v in (row.config[knob] for knob in knobs)]
            figures = [repr(row.metrics[name]) if name in row.metrics else "" for name in metrics]
            writer.writerow([*values, row.status, *figures])
    return text.getvalue()


def _join_cards(recordings: Sequence[Recording]) -> str:
    largest = max(recordings, key=lambda r: r.card.hardware.num_accelerators)
    data = read_yaml(largest.folder / "card.yaml")
    names = ", ".join(recording.name for recording in recordings)
    counts = sorted({recording.card.hardware.num_accelerators for recording in recordings})
    work = TASKS.get(largest.card.task).describe_work(largest.card)
    size = f"{counts[0]} to {counts[-1]} {largest.card.hardware.accelerator}"
    data["description"] = f"{largest.card.family} on {size}, {work}; recordings {names} as one"
    return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True))


def _is_same_work(one: Card, other: Card) -> bool:
    """Whether two cards differ only in the number of accelerators."""
    # Part of a node does not show the size of a node, so it is compared too.
    small, large = sorted((one.hardware, other.hardware), key=lambda hardware: hardware.num_accelerators)
    fits = small.accelerators_per_node == min(large.accelerators_per_node, small.num_accelerators)
    return fits and _work_of(one) == _work_of(other)


def _work_of(card: Card) -> tuple[object, ...]:
    hardware = card.hardware
    return (card.task, card.model, card.work, card.precision, card.framework, hardware.accelerator, hardware.memory_gib)
