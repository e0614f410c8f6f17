"""`ccl-search note RUN [TRIAL] TEXT`: a remark on a run or on one of its trials."""

from __future__ import annotations

import argparse

from cclsearch.cli.output import show
from cclsearch.core.errors import UserError
from cclsearch.run.annotations import Annotations, add_note, read_annotations
from cclsearch.run.catalog import find_run
from cclsearch.run.folder import load_run


def run(args: argparse.Namespace) -> None:
    folder = find_run(args.run, args.runs)
    loaded = load_run(folder)
    first, *rest = args.words or [""]
    trial = int(first) if first.isascii() and first.isdecimal() and len(first) < 9 else None
    if trial is not None:
        loaded.find_trial(trial)
        if not rest:
            raise UserError(f"TEXT is missing: the note on trial {trial}")
    if args.words:
        add_note(folder, " ".join(rest if trial is not None else args.words), trial)
    notes = read_annotations(folder).notes
    data = [note.model_dump(mode="json", exclude={"kind"}) for note in notes]
    show(data, Annotations(notes=notes).describe() or ["no notes"], as_json=args.json)
