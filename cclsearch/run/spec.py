"""The frozen inputs of a search: `search.yaml`."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import yaml
from pydantic import Field

from cclsearch.card.model import Card, KnobDeclaration
from cclsearch.core.atomic_file import write_atomically
from cclsearch.core.errors import UserError, refuse_newer
from cclsearch.core.numbers import MAX_AMOUNT, MAX_TRIALS
from cclsearch.core.values import Config, Model, Provenance
from cclsearch.core.yaml_file import read_yaml, validate_mapping
from cclsearch.launch.profile import Profile
from cclsearch.propose.warm_start.knowledge import EarlierKnowledge
from cclsearch.scoring.objective import Objective

SPEC_FILE = "search.yaml"
SPEC_VERSION = 1
DEFAULT_BUDGET = 15
"""Trials of a search that names no budget."""
DEFAULT_SAMPLER = "surrogate"
DEFAULT_STRATEGY = "hybrid"
"""Decides between LLM and sampler in a search with an LLM that names none."""
SAMPLER = "sampler"
"""The strategy of a search without an LLM."""


class RecordingRef(Model):
    """The recorded landscape that a search replays."""

    name: str
    folder: Path
    sha256: str
    """SHA-256 of its `trials.csv`."""


class SearchLimits(Model, strict=True):
    """Limits of a search; None means no limit."""

    budget: int = Field(ge=1, le=MAX_TRIALS)
    """Trials to spend; infrastructure failures and confirmations do not count."""
    parallel: int = Field(default=1, ge=1)
    confirm: int = Field(default=0, ge=0)
    """Finalists to run once more at the end."""
    trial_timeout_s: float = Field(default=1800.0, gt=0, le=60 * MAX_AMOUNT)
    max_hours: float | None = Field(default=None, gt=0, le=MAX_AMOUNT)
    """Wall time of one session of the search, in hours."""
    max_node_hours: float | None = Field(default=None, gt=0, le=MAX_AMOUNT)
    """Nodes times hours of all attempts, queue time included."""
    max_attempts: int = Field(default=3, ge=1)
    """Attempts at one trial if the infrastructure fails or other processes disturb it."""
    control_every: int = Field(default=0, ge=0)
    """Repeat the best configuration after every so many trials; 0: only if the window of the cluster changes."""
    early_stop: bool = True
    """Whether a trial that is slower than the best one beyond doubt may end early."""
    stop_early: bool = False
    """Whether the surrogate ends the search once no untried configuration is likely to win."""
    keep_going: bool = False
    """Whether the search continues although several configurations in a row ended for the same reason."""
    levers: bool = True
    """Whether the search opens the framework's levers on its best layouts."""


class RunSpec(Model):
    """Everything that a search depends on, frozen at its start."""

    schema_version: int = SPEC_VERSION
    run_id: str
    created: str
    """UTC, ISO 8601."""
    engine_version: str
    command: str = ""
    """The command line that started it; empty if another program did."""
    script_commit: str = ""
    """The git commit of the folder of the user's run script, if it has one."""
    workload: str
    """The workload that the user named; `card.name` differs if a recording is replayed."""
    card: Card
    framework: str
    objective: Objective
    profile: Profile
    recording: RecordingRef | None = None
    provenance: Provenance
    strategy: str
    """`hybrid`, `llm` or a plugin's strategy with an LLM; `sampler` without one."""
    sampler: str = DEFAULT_SAMPLER
    """Proposer beside the LLM, or alone, as `--sampler` names it."""
    llm: str | None = None
    """`anthropic:MODEL`, `openai:MODEL` or a URL; never a key."""
    llm_options: dict[str, str | int | float | bool | None] = {}
    limits: SearchLimits
    seed: int = 0
    use_fewer: bool = False
    """Whether the space includes configurations on fewer accelerators than the card has."""
    knobs: tuple[KnobDeclaration, ...] = ()
    """Knobs that the profile or the user added to the framework's and the card's."""
    bases: tuple[Config, ...] = ()
    """Configurations near which levers vary, once a growth has opened them."""
    learn_from: tuple[str, ...] = ()
    """Folders of earlier runs whose trials warm-start the surrogate."""
    earlier: EarlierKnowledge | None = None
    """Knowledge of earlier searches on the same cluster with the same framework; None if none was used."""
    first: tuple[Config, ...] = ()
    """Configurations to run before the strategy proposes."""
    baseline: Config | None = None
    """The user's configuration to compare with, which runs first and outside the budget."""
    log_to: tuple[str, ...] = ()
    """Trackers that follow the ledger, as `--log-to` names them."""
    space_size: int
    space_sha256: str
    banner: tuple[str, ...] = ()
    """Notes for the user on what runs where."""

    @property
    def proposers(self) -> str:
        """The proposers in words: the sampler of the study, after the LLM if one takes part."""
        llm = f"{self.llm} ({self.strategy}), then " if self.llm else ""
        return f"{llm}sampler {self.sampler}"

    @property
    def simulated_cluster(self) -> str:
        """The simulated cluster, in words; empty if none is. Figures of two clusters are not comparable."""
        if self.provenance is not Provenance.SIMULATED or self.profile.launcher != "simulate":
            return ""
        from cclsearch.stats.simulated import SimulatedSettings  # with closed forms and scipy

        return f"simulated {self.profile.read_settings(SimulatedSettings).describe()}"


def write_spec(folder: Path, spec: RunSpec) -> str:
    """Write the inputs as `search.yaml`; returns the file's SHA-256."""
    text = yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)
    write_atomically(folder / SPEC_FILE, text)
    return hashlib.sha256(text.encode()).hexdigest()


def read_spec(folder: Path) -> RunSpec:
    """Return the frozen inputs of a run folder; raises UserError if they are missing, damaged or of a newer version."""
    path = folder / SPEC_FILE
    if os.path.lexists(path) and not os.path.isfile(path):
        raise UserError(f"{str(path)!r} is not a regular file: restore the {SPEC_FILE} of this run")
    if not os.path.isfile(path):
        raise UserError(f"{str(folder)!r} is not a run folder: it has no {SPEC_FILE}")
    data = read_yaml(path)
    refuse_newer(path, data.get("schema_version"), SPEC_VERSION)
    spec = validate_mapping(RunSpec, data, str(path))
    if spec.profile.source is not None:
        return spec
    return spec.model_copy(update={"profile": spec.profile.model_copy(update={"source": path})})


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
