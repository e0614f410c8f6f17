"""Tags and notes that people add to a run, also while it is searched: in a file beside the ledger, append-only.

The ledger has one writer, who holds the run's lock; this file is appended to without it, one synced line at a time.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pydantic import ValidationError

from cclsearch.core.errors import UserError
from cclsearch.core.job_file import JobFileError, open_to_append, read_job_bytes
from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import one_line, plain
from cclsearch.core.values import Model, Number

ANNOTATIONS_FILE = "annotations.jsonl"
MAX_BYTES = 4 * 2**20
MAX_NOTE = 2000
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+-]{0,39}")


class AnnotationKind(StrEnum):
    """Kind of a line: it adds a tag or a note, or removes a tag."""

    TAG = "tag"
    UNTAG = "untag"
    NOTE = "note"


class Annotation(Model):
    """One line of the file."""

    kind: AnnotationKind
    text: str
    trial: int | None = None
    """The trial that a note is about; None for the whole run."""
    time_s: Number


@dataclass(frozen=True)
class Annotations:
    """Tags and notes that people added to a run."""

    tags: tuple[str, ...] = ()
    notes: tuple[Annotation, ...] = ()

    def describe(self) -> list[str]:
        """The tags and the notes, one line each, as plain text."""
        return ([f"tags: {', '.join(self.tags)}"] if self.tags else []) + [
            f"note{'' if note.trial is None else f' on trial {note.trial}'}: {one_line(note.text, MAX_NOTE)}"
            for note in self.notes
        ]


def read_annotations(folder: Path) -> Annotations:
    """Return the tags and notes of a run; a line that is none, such as one that a kill cut short, is left out."""
    try:
        data = read_job_bytes(folder / ANNOTATIONS_FILE, MAX_BYTES)
    except (OSError, JobFileError):
        return Annotations()
    tags: dict[str, None] = {}
    notes = []
    for line in data.split(b"\n"):
        with contextlib.suppress(ValidationError):
            found = Annotation.model_validate_json(line)
            if found.kind is AnnotationKind.NOTE:
                notes.append(found)
            elif found.kind is AnnotationKind.UNTAG:
                tags.pop(found.text, None)
            elif _TAG.fullmatch(found.text):
                tags[found.text] = None
    return Annotations(tuple(tags), tuple(notes))


def add_tags(folder: Path, tags: Sequence[str], *, remove: bool = False) -> None:
    """Add tags to a run, or remove them; UserError, and nothing is written, if one is not a tag or is not there."""
    present = read_annotations(folder).tags
    for tag in tags:
        if not _TAG.fullmatch(tag):
            known = "1 to 40 letters, digits and ._:+-, beginning with a letter or digit"
            raise UserError(f"{one_line(tag, 60)!r} is not a tag: a tag has {known}")
        if redact(tag) != tag:
            raise UserError("one of the tags looks like a secret: nothing was written")
        if remove and tag not in present:
            raise UserError(f"the run has no tag {tag!r}; its tags: {', '.join(present) or 'none'}")
    kind = AnnotationKind.UNTAG if remove else AnnotationKind.TAG
    changed = [tag for tag in dict.fromkeys(tags) if remove or tag not in present]
    _append(folder, [Annotation(kind=kind, text=tag, time_s=time.time()) for tag in changed])


def add_note(folder: Path, text: str, trial: int | None = None) -> None:
    """Add a note to a run or to one of its trials; secrets are masked. UserError if it is empty or too long."""
    clean = " ".join(plain(redact(text)).split())
    if not clean:
        raise UserError("the note is empty")
    if len(clean) > MAX_NOTE:
        raise UserError(f"the note has {len(clean):,} characters, more than the {MAX_NOTE:,} allowed")
    _append(folder, [Annotation(kind=AnnotationKind.NOTE, text=clean, trial=trial, time_s=time.time())])


def _append(folder: Path, added: Sequence[Annotation]) -> None:
    path, data = folder / ANNOTATIONS_FILE, "".join(f"{line.model_dump_json()}\n" for line in added).encode()
    try:
        with open_to_append(path) as file:
            size = file.seek(0, os.SEEK_END)
            if size + len(data) > MAX_BYTES:
                raise UserError(f"{str(path)!r} would have more than {MAX_BYTES >> 20} MiB")
            is_torn = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
            file.write(b"\n" * is_torn + data)
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(f"cannot write to {str(path)!r}: {error.strerror or error}") from None
