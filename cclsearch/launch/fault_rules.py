"""The patterns of `faults.yaml`, compiled, and the phrases that a project adds in its own file of that name."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cclsearch.core.content import project_root
from cclsearch.core.errors import UserError
from cclsearch.core.text import plain
from cclsearch.core.values import FailureKind, Model
from cclsearch.core.yaml_file import read_yaml

FAULTS_FILE = "faults.yaml"
"""Name of the project's file: class -> list of phrases, which are plain text in any case."""
MAX_LABELS = 8
"""Labels that are stripped from one line."""
REFUSALS_FILE = Path(__file__).with_name("refusals.yaml")


class FaultClass(Model):
    """What a line means; `faults.yaml` lists the classes."""

    name: str
    kind: FailureKind
    level: int
    bad_node: bool = False
    ends_job: bool = False


@dataclass(frozen=True)
class FaultRules:
    """Compiled patterns; each of the faults is tried only on lines with its cue."""

    cues: tuple[str, ...]
    prefixes: tuple[re.Pattern[str], ...]
    places: tuple[re.Pattern[str], ...]
    ignored: tuple[re.Pattern[str], ...]
    warnings: re.Pattern[str]
    faults: Mapping[str, tuple[tuple[FaultClass, re.Pattern[str]], ...]]
    """Cue -> the patterns that need it."""
    phrases: tuple[tuple[FaultClass, str], ...] = ()
    """The project's own, in lower case; they come first."""

    def find_cues(self, lowered: str) -> list[str]:
        """Return the cues in a line in lower case; the project's phrases are cues, too."""
        return [cue for cue in self.cues if cue in lowered]

    def peel(self, line: str) -> tuple[dict[str, str], str]:
        """Return the labels in front of a line (rank, task, local, node, pid), the innermost of each, and the rest."""
        line = plain(line) if "\x1b" in line else line
        labels: dict[str, str] = {}
        at = 0
        for _ in range(MAX_LABELS):
            found = next((m for pattern in self.prefixes if (m := pattern.match(line, at)) and m.end() > at), None)
            if found is None:
                break
            labels |= {name: value for name, value in found.groupdict().items() if value}
            at = found.end()
        return labels, line[at:]

    def classify(self, text: str, cues: Iterable[str] | None = None) -> FaultClass | None:
        """Return the class of a text without labels: of several, the one with the lowest level; None if none fits.

        A lost peer counts before the communication that it broke.
        """
        lowered = text.lower()
        own = next((known for known, phrase in self.phrases if phrase in lowered), None)
        if own is not None or any(pattern.search(text) for pattern in self.ignored):
            return own or CLASSES["ignored"]
        rows = (row for cue in (self.find_cues(lowered) if cues is None else cues) for row in self.faults.get(cue, ()))
        found = {known.name for known, pattern in rows if pattern.search(text)}
        if "peer" in found:
            found.discard("communication")
        return min((known for name, known in CLASSES.items() if name in found), key=lambda c: c.level, default=None)

    def locate(self, text: str) -> dict[str, str]:
        """Return rank and node that a text names itself."""
        matches = (pattern.search(text) for pattern in reversed(self.places))
        return {name: value for m in matches if m is not None for name, value in m.groupdict().items() if value}


@dataclass(frozen=True)
class Refusal:
    """What an answer of a scheduler or a cloud means (`refusals.yaml`), and what to do."""

    means: str
    remedy: str


def read_refusals(service: str, text: str) -> list[Refusal]:
    """Return what a refusal of `slurm`, `gcloud` or `ssh` means; the first decides."""
    return [refusal for pattern, refusal in _list_refusals(service) if pattern.search(text)]


@functools.cache
def _list_refusals(service: str) -> tuple[tuple[re.Pattern[str], Refusal], ...]:
    return tuple(
        (re.compile(pattern, re.IGNORECASE), Refusal(means, remedy[0] if remedy else ""))
        for pattern, means, _, *remedy in read_yaml(REFUSALS_FILE)[service]
    )


def compile_rules(data: Mapping[str, Any]) -> FaultRules:
    """Return the rules of `faults.yaml`'s content."""
    faults: dict[str, list[tuple[FaultClass, re.Pattern[str]]]] = {}
    for name, rows in data["faults"].items():
        for pattern, _ in rows:
            words = re.sub(r"\\(.)", r"\1", pattern).lower()
            for cue in (cue for cue in data["cues"] if cue in words):
                faults.setdefault(cue, []).append((CLASSES[name], re.compile(pattern, re.IGNORECASE)))
    return FaultRules(
        cues=tuple(data["cues"]),
        prefixes=tuple(re.compile(pattern) for pattern, _ in data["prefixes"]),
        places=tuple(re.compile(pattern, re.IGNORECASE) for pattern, _ in data["places"]),
        ignored=tuple(re.compile(pattern, re.IGNORECASE) for pattern, _ in data["ignored"]),
        warnings=re.compile(data["warnings"]),
        faults={cue: tuple(rows) for cue, rows in faults.items()},
    )


_DATA = read_yaml(Path(__file__).with_name(FAULTS_FILE))
CLASSES = {name: FaultClass(name=name, **fields) for name, fields in _DATA["classes"].items()}
shipped_rules = functools.cache(functools.partial(compile_rules, _DATA))
"""Returns the package's own patterns."""


def project_rules() -> FaultRules:
    """Return the package's patterns with the phrases of the project's `faults.yaml`; UserError if one is wrong."""
    path = project_root() / FAULTS_FILE
    return add_phrases(shipped_rules(), read_yaml(path), str(path)) if path.is_file() else shipped_rules()


def add_phrases(rules: FaultRules, data: Mapping[str, Any], where: str) -> FaultRules:
    """Return the rules with a project's phrases; UserError names the wrong entry."""
    phrases = []
    for name, texts in data.items():
        if name not in CLASSES:
            raise UserError(f"{where}: {name!r} must be one of {', '.join(CLASSES)}")
        if not isinstance(texts, list) or not all(isinstance(text, str) and text.strip() for text in texts):
            raise UserError(f"{where}: {name} must be a list of texts, not {texts!r:.100}")
        phrases += [(CLASSES[name], text.lower()) for text in texts]
    return replace(rules, cues=(*rules.cues, *(phrase for _, phrase in phrases)), phrases=tuple(phrases))
