"""The policy programs of a search, in versions: `policies/v001.py` ... in the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cclsearch.core.errors import UserError
from cclsearch.core.secrets.redact import redact
from cclsearch.core.trust import find_code
from cclsearch.core.values import Value
from cclsearch.propose.agent.memory.history import past_turns
from cclsearch.propose.base import SearchView

POLICIES_FOLDER = "policies"


def freeze_seed(options: Mapping[str, Value | None]) -> dict[str, Value | None]:
    """The options, with the text of `seed_policy` (a name or a path) in `seed_program`; raises UserError."""
    name = options.get("seed_policy")
    if not name:
        return dict(options)
    return {**options, "seed_program": read_policy(str(name))}


def read_policy(name: str) -> str:
    """Return the text of a policy program, given by its name or its path; raises UserError if it cannot be read."""
    path = find_code(POLICIES_FOLDER, name, ".py")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the policy {str(path)!r}: {error}") from None


class PolicyStore:
    """The programs of one run; without a folder, none is kept."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder / POLICIES_FOLDER if folder else None

    def add(self, program: str) -> int | None:
        """Write a program; returns its version, None without a folder."""
        if self._folder is None:
            return None
        self._folder.mkdir(parents=True, exist_ok=True)
        version = max(self._versions(), default=0) + 1
        text = redact(program).encode("utf-8", "replace").decode()
        (self._folder / f"v{version:03d}.py").write_text(text, encoding="utf-8")
        return version

    def best(self, view: SearchView, seed: str) -> tuple[str, str]:
        """Return the program whose configuration measured best, with a note that names it; before any has, the seed."""
        losses = {o.config.digest: o.loss for o in view.observations if o.loss is not None}
        scored = [
            (losses[item.config.digest], turn.policy)
            for turn in past_turns(view.events)
            for item in turn.submitted
            if turn.policy is not None and item.config.digest in losses
        ]
        for loss, version in sorted(scored, key=lambda pair: pair[0] or 0.0):
            text = self._read(version)
            if text is not None:
                return text, f" (version {version}, loss {loss:.5g})"
        return seed, " (the seed policy; not measured as a program)"

    def _versions(self) -> list[int]:
        assert self._folder is not None
        stems = (path.stem[1:] for path in self._folder.glob("v*.py"))
        return [int(stem) for stem in stems if stem.isdigit()]

    def _read(self, version: int | None) -> str | None:
        if self._folder is None or version is None:
            return None
        path = self._folder / f"v{version:03d}.py"
        return path.read_text(encoding="utf-8") if path.is_file() else None
