"""Finds the sampler that `--sampler` names: registered, `MODULE:CLASS`, or the folder of an OptunaHub package."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from cclsearch.core.errors import UserError
from cclsearch.core.registry import describe_broken_plugins
from cclsearch.core.text import guess_name, one_line
from cclsearch.core.trust import require_trust
from cclsearch.propose.base import PROPOSERS, Proposer, ProposerContext, ProposerRole, SearchView
from cclsearch.propose.study.proposer import StudyProposer

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

DEFAULT_SAMPLER = "surrogate"


def list_samplers() -> list[str]:
    """Return the names that `--sampler` takes, the default first."""
    samplers = [name for name in PROPOSERS.names() if PROPOSERS.get(name).role is ProposerRole.SAMPLER]
    return [DEFAULT_SAMPLER, *(name for name in samplers if name != DEFAULT_SAMPLER)]


def list_strategies() -> list[str]:
    """Return the names that `--strategy` takes."""
    return [name for name in PROPOSERS.names() if PROPOSERS.get(name).role is ProposerRole.STRATEGY]


def make_sampler(spec: str, context: ProposerContext | None = None) -> Proposer:
    """Return the proposer that asks the sampler; raises UserError if the sampler or its package is missing."""
    registered = PROPOSERS.find(spec)
    if registered is not None and registered.role is not ProposerRole.STRATEGY:
        return registered.from_context(context or ProposerContext())
    folder = Path(spec.rsplit(":", 1)[0]).expanduser()
    if folder.is_dir():
        name = spec.rsplit(":", 1)[1] if ":" in spec else ""
        return _make_foreign(spec, _choose_class(_load_hub(folder), name, spec))
    module, _, name = spec.rpartition(":")
    if module and name and all(part.isidentifier() for part in (*module.split("."), name)):
        with _explaining(spec):
            loaded = importlib.import_module(module)
        return _make_foreign(spec, _choose_class(loaded, name, spec))
    known = list_samplers()
    raise UserError(
        f"there is no sampler {spec!r}{guess_name(spec, known)}; known: {', '.join(known)}, MODULE:CLASS of a sampler"
        f" that can be imported, or the folder of an OptunaHub package{describe_broken_plugins()}"
    )


def resolve_sampler(spec: str) -> str:
    """Return the sampler as a search keeps it: a folder as an absolute path. Raises UserError if it cannot work."""
    make_sampler(spec)
    path, _, name = spec.partition(":")
    folder = Path(path).expanduser()
    if PROPOSERS.find(spec) is None and folder.is_dir():
        return f"{folder.resolve()}:{name}" if name else str(folder.resolve())
    return spec


def try_sampler(spec: str, view: SearchView) -> None:
    """Raise UserError if a sampler of Optuna or of others cannot draw from the space: no search begins with it."""
    proposer = make_sampler(spec)
    if isinstance(proposer, StudyProposer):
        proposer.propose(view, 1)


def _load_hub(folder: Path) -> ModuleType:
    if not (folder / "__init__.py").is_file():
        raise UserError(f"the folder {str(folder)!r} is not an OptunaHub package: it has no __init__.py")
    resolved = require_trust(folder / "__init__.py", "a sampler").parent
    try:
        import optunahub
    except ImportError:
        raise UserError(
            f"the sampler {str(folder)!r} needs optunahub, which is not installed: run `pip install optunahub`"
        ) from None
    with _explaining(str(folder)):
        module: ModuleType = optunahub.load_local_module(resolved.name, registry_root=str(resolved.parent))
    return module


def _choose_class(module: ModuleType, name: str, spec: str) -> type[BaseSampler]:
    """Return the sampler of that name in a module; without a name the only one that it exports."""
    from optuna.samplers import BaseSampler

    exported = getattr(module, "__all__", None) or [key for key in vars(module) if not key.startswith("_")]
    found = {
        key: value
        for key in ([name] if name else exported)
        if inspect.isclass(value := getattr(module, key, None)) and issubclass(value, BaseSampler)
    }
    if not name:
        found = {key: value for key, value in found.items() if value is not BaseSampler}
    if len(found) != 1:
        what = f"has no sampler {name!r} (a subclass of optuna.samplers.BaseSampler)" if name else (
            f"exports {len(found)} samplers ({', '.join(found) or 'none'}): name one, such as {spec}:CLASS"
        )  # fmt: skip
        raise UserError(f"{spec!r}: the module {module.__name__!r} {what}")
    return next(iter(found.values()))


def _make_foreign(spec: str, sampler: type[BaseSampler]) -> StudyProposer:
    """Return the proposer of a sampler of others; it is made once here, so that a search does not begin without it."""
    make = _constructor(sampler)
    with _explaining(spec, "made with no argument but `seed`"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as when it proposes
        make(0)
    return StudyProposer(spec, make)


def _constructor(sampler: type[BaseSampler]) -> Any:
    """Return a function of the seed that makes the sampler; options that it does not take are left out."""

    def make(seed: int, **options: Any) -> BaseSampler:
        taken = inspect.signature(sampler).parameters
        return sampler(**{name: value for name, value in {"seed": seed, **options}.items() if name in taken})

    return make


@contextlib.contextmanager
def _explaining(spec: str, what: str = "imported") -> Iterator[None]:
    """Turn an exception of others' code into one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = one_line(f"{type(error).__name__}: {error}", 300)
        is_missing = isinstance(error, ModuleNotFoundError) and spec.startswith(error.name or ":")
        where = "; Python looks in what is installed and in PYTHONPATH, not in the working directory" * is_missing
        raise UserError(f"the sampler {spec!r} cannot be {what}: {reason}{where}") from None


@dataclass(frozen=True)
class OptunaFactory:
    """Makes the proposer of one of Optuna's samplers."""

    name: str
    sampler: str
    options: Mapping[str, Any] = field(default_factory=dict)
    has_state: bool = False
    penalize: bool = False
    needs: str = ""
    """Package that Optuna imports for it."""
    role = ProposerRole.SAMPLER

    def from_context(self, context: ProposerContext) -> StudyProposer:
        """Return the proposer; UserError if the package that Optuna needs for the sampler is missing."""
        if self.needs and find_spec(self.needs) is None:
            raise UserError(
                f"the sampler {self.name!r} needs {self.needs}, which is not installed: run `pip install {self.needs}`,"
                f" or use the sampler {DEFAULT_SAMPLER!r}"
            )

        def make(seed: int, **more: Any) -> BaseSampler:
            from optuna import samplers

            return _constructor(getattr(samplers, self.sampler))(seed, **self.options, **more)  # type: ignore[no-any-return]

        return StudyProposer(self.name, make, has_state=self.has_state, penalize=self.penalize)


LIAR = {"constant_liar": True}
"""Options of TPE for several trials at a time."""
QUIET = {"warn_independent_sampling": False}
for _factory in (
    OptunaFactory("tpe", "TPESampler", LIAR),
    OptunaFactory("tpe-penalised", "TPESampler", LIAR, penalize=True),
    OptunaFactory(
        "tpe-multivariate", "TPESampler", LIAR | {"multivariate": True, "n_startup_trials": 5}, penalize=True
    ),
    OptunaFactory("gp", "GPSampler", {"deterministic_objective": False}, penalize=True, needs="torch"),
    OptunaFactory("cmaes", "CmaEsSampler", QUIET, has_state=True, penalize=True, needs="cmaes"),
    # a population of 10 fits budgets of some ten trials; Optuna's default is 50
    OptunaFactory("nsgaii", "NSGAIISampler", {"population_size": 10}, has_state=True),
    OptunaFactory("nsgaiii", "NSGAIIISampler", {"population_size": 10}, has_state=True),
    OptunaFactory("qmc", "QMCSampler", QUIET | {"warn_asynchronous_seeding": False}, has_state=True),
):
    PROPOSERS.register(_factory.name)(_factory)
