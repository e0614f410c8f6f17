"""Samplers of others in the search space: moved draws, several values, packages and studies of users."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState
from paths import ROOT

from cclsearch.cli import main
from cclsearch.core.errors import UserError
from cclsearch.core.trust import trust_project
from cclsearch.loop.bench import RecordedTable, replay_search
from cclsearch.loop.sweep import make_pareto_objective
from cclsearch.propose.base import SearchView
from cclsearch.propose.study.choose import list_samplers, make_sampler
from cclsearch.propose.study.parameters import StudyParameters, describe_knob, search_space_distributions
from cclsearch.propose.study.samplers import DRAWN, SpaceSampler, SurrogateSampler
from cclsearch.recording.load import find_recordings, load_recording
from cclsearch.recording.table import RowStatus
from cclsearch.run.folder import load_run
from cclsearch.scoring.objective import Constraint, load_objective
from cclsearch.space.table import Knob, space_from_rows

LANDSCAPE = ROOT / "benchmarks" / "landscapes" / "nanotron-8b-4n"
RECORDING = load_recording(LANDSCAPE)
SPACE = RECORDING.space
MINE = '''
import optuna


class LastChoice(optuna.samplers.BaseSampler):
    """Draws the highest value of every knob."""

    def infer_relative_search_space(self, study, trial):
        return {}

    def sample_relative(self, study, trial, search_space):
        return {}

    def sample_independent(self, study, trial, name, distribution):
        return distribution.high if hasattr(distribution, "high") else distribution.choices[-1]


class Broken(LastChoice):
    def sample_independent(self, study, trial, name, distribution):
        raise RuntimeError("no idea\\nat all")


class NotASampler:
    pass
'''


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ccl-search.yaml").write_text("{}\n")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return tmp_path


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "my_samplers.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.delitem(sys.modules, "my_samplers", raising=False)
    return "my_samplers:LastChoice"


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ((1, 2, 4, 8), IntDistribution(1, 8, log=True)),
        ((0, 1), IntDistribution(0, 1)),
        ((512, 1024, 1536), IntDistribution(512, 1536, step=512)),
        ((8,), IntDistribution(8, 8)),
        ((0, 1, 2, 4, 8), IntDistribution(0, 8)),
        ((0.1, 0.2, 0.3), FloatDistribution(0.1, 0.3)),
        ((False, True), CategoricalDistribution((False, True))),
        (("x", "y"), CategoricalDistribution(("x", "y"))),
    ],
)
def test_a_knob_is_a_distribution_with_its_order_and_its_values(choices, expected):
    assert describe_knob(Knob("some_knob", choices)) == expected


def test_text_with_an_order_is_ordered_for_samplers_and_itself_for_people():
    knob = Knob("activation_checkpointing", ("full", "none", "selective"))
    assert describe_knob(knob, as_positions=True) == IntDistribution(0, 2)
    assert describe_knob(knob) == CategoricalDistribution(("none", "selective", "full"))
    space = space_from_rows((knob,), [{knob.name: value} for value in knob.choices])
    parameters = StudyParameters(space, as_positions=True)
    assert [parameters.encode(space.config(row))[knob.name] for row in range(3)] == [2, 0, 1]
    assert parameters.find_row({knob.name: 1}) == 2


def test_a_draw_is_moved_along_the_order_of_its_knobs():
    knobs = (Knob("tp", (1, 2, 4, 8)), Knob("kind", ("a", "b")))
    rows = [{"tp": 8, "kind": "a"}, {"tp": 2, "kind": "b"}, {"tp": 1, "kind": "a"}]
    parameters = StudyParameters(space_from_rows(knobs, rows))
    free_N = np.ones(3, dtype=bool)
    assert parameters.find_nearest({"tp": 6, "kind": "a"}, free_N) == 0
    assert parameters.find_nearest({"tp": 3, "kind": "b"}, free_N) == 1
    free_N[0] = False
    assert parameters.find_nearest({"tp": 8, "kind": "b"}, free_N) == 1
    assert parameters.find_nearest({"tp": 1.3, "kind": "a"}, free_N) == 2, "one category costs as much as one step"
    with pytest.raises(ValueError, match="free"):
        parameters.find_nearest({"tp": 8}, np.zeros(3, dtype=bool))


def test_a_moved_draw_says_so_in_its_rationale():
    table, proposer, seen = RecordedTable(RECORDING), make_sampler("tpe"), []
    rationales = []
    for trial in range(8):
        [proposal] = proposer.propose(view_of(seen), 1)
        rationales.append(proposal.rationale)
        seen.append(table.ask(trial, SPACE.row(proposal.config), proposal.config))
    moved = [text for text in rationales if "moved to the nearest free configuration from" in text]
    assert len(moved) > 0
    assert all(text.startswith("drawn by the sampler tpe") for text in rationales)


def view_of(seen: list[Any], **fields: Any) -> SearchView:
    return replace(SearchView(RECORDING.card, SPACE, tuple(seen), frozenset(), 15, 0), **fields)


@pytest.mark.parametrize("name", ["tpe", "gp", "cmaes", "nsgaii", "nsgaiii", "qmc"])
def test_a_session_proposes_the_same_as_one_that_begins_anew(name):
    """Whether results came one by one or all at once: also a verdict that changes, and trials of somebody else."""
    table, seen, session = RecordedTable(RECORDING), [], make_sampler(name)
    for trial in range(13):
        if trial == 6:
            seen[2] = replace(seen[2], loss=None if seen[2].loss else 5.0, violation=0.0)
        pending = frozenset({0}) if trial in (8, 9) else frozenset()
        view = view_of(seen, pending=pending)
        [proposal] = session.propose(view, 1)
        assert [p.config for p in make_sampler(name).propose(view, 1)] == [proposal.config], trial
        row = SPACE.row(proposal.config) if trial != 4 else next(iter(np.flatnonzero(~view.taken_N)))
        seen.append(table.ask(trial, row, SPACE.config(row)))
    assert len({o.row for o in seen}) == len(seen)


@pytest.mark.parametrize("name", ["tpe", "gp", "cmaes"])
def test_a_parallel_session_proposes_the_same_as_one_that_begins_anew(name):
    """Trials end in any order, one is lost, one is proposed by somebody else, and a proposal is refused."""
    table, seen, session, running = RecordedTable(RECORDING), {}, make_sampler(name), {}
    for trial in range(1, 15):
        observations = [seen[number] for number in sorted(seen)]
        pending = {"pending": frozenset(running.values()), "pending_trials": tuple(sorted(running.items()))}
        view = view_of(observations, **pending)
        [proposal] = session.propose(view, 1)
        assert [p.config for p in make_sampler(name).propose(view, 1)] == [proposal.config], trial
        if trial == 12:
            continue  # refused: it gets no number
        row = SPACE.row(proposal.config) if trial != 7 else int(np.flatnonzero(~view.taken_N)[0])
        running[trial] = row
        if trial == 10:
            del running[9]  # lost to infrastructure
        ended = [n for n in running if n % 3 == trial % 3 and n < trial]
        for number in ended:
            row = running.pop(number)
            seen[number] = table.ask(number, row, SPACE.config(row))
    assert len(seen) > 5


@pytest.mark.parametrize("name", ["surrogate", "tpe", "gp", "nsgaii", "nsgaiii"])
def test_studies_of_several_values_are_searched(name):
    objective = make_pareto_objective(("step_time_s", "peak_memory_gib"), "training")
    table, proposer, seen = RecordedTable(RECORDING, objective), make_sampler(name), []
    for trial in range(12):
        [proposal] = proposer.propose(view_of(seen, target=objective), 1)
        seen.append(table.ask(trial, SPACE.row(proposal.config), proposal.config))
    assert table.num_duplicates == 0
    assert len({o.row for o in seen}) == 12


def test_a_sampler_for_one_value_refuses_several_in_one_line(cli):
    arguments = ["sweep", "--recording", str(LANDSCAPE), "--objective", "pareto", "--budget", "4", "--name", "s"]
    error = cli.err([*arguments, "--sampler", "cmaes", "--quiet"])
    assert "the sampler 'cmaes' failed" in error
    assert "choose another with --sampler" in error
    assert not Path("runs", "s").exists()


def test_two_trials_in_flight_are_different_and_known_to_the_sampler(monkeypatch):
    studies: list[optuna.Study] = []
    create = optuna.create_study
    monkeypatch.setattr(optuna, "create_study", lambda **given: studies.append(create(**given)) or studies[-1])
    for name in ("tpe", "cmaes", "gp"):
        proposer = make_sampler(name)
        first = proposer.propose(view_of([]), 2)
        rows = [SPACE.row(proposal.config) for proposal in first]
        assert len(set(rows)) == 2
        [third] = proposer.propose(view_of([], pending=frozenset(rows)), 1)
        assert SPACE.row(third.config) not in rows
        states = [trial.state for trial in studies[-1].trials]
        assert states == [TrialState.RUNNING] * 3


def test_a_sampler_of_the_user_searches_and_is_resumed(mine):
    assert main(["run", "--recording", str(LANDSCAPE), "--sampler", mine, "-b", "4", "--name", "r", "--quiet"]) in (
        0,
        1,
    )
    assert main(["resume", "r", "--budget", "6", "--quiet"]) in (0, 1)
    state = load_run(Path("runs/r")).state
    assert [trial.proposer for trial in state.trials.values()] == [mine] * 6
    at_once = replay_search(RECORDING, make_sampler(mine), seed=0, budget=6)
    assert at_once.num_duplicates == 0


def test_a_package_of_optunahub_is_named_by_its_folder(tmp_path, mine):
    package = tmp_path / "registry" / "last_choice"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from .sampler import LastChoice\n\n__all__ = ['LastChoice']\n")
    (package / "sampler.py").write_text(MINE)
    trust_project(package)
    command = ["run", "--recording", str(LANDSCAPE), "-b", "3", "--quiet"]
    assert main([*command, "--sampler", "registry/last_choice", "--name", "a"]) in (0, 1)
    assert load_run(Path("runs/a")).spec.sampler == str(package)
    assert main([*command, "--sampler", "registry/last_choice:LastChoice", "--name", "b"]) in (0, 1)
    ran = [[trial.config for trial in load_run(Path("runs", name)).state.trials.values()] for name in "ab"]
    assert ran[0] == ran[1]


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        ("tpee", "there is no sampler 'tpee' (did you mean 'tpe'?)"),
        ("my_samplers:Missing", "has no sampler 'Missing'"),
        ("my_samplers:NotASampler", "has no sampler 'NotASampler'"),
        ("no.such.module:Sampler", "cannot be imported: ModuleNotFoundError"),
        ("no_such_module:Sampler", "and in PYTHONPATH, not in the working directory"),
        ("optuna.samplers:PartialFixedSampler", "cannot be made with no argument but `seed`: TypeError"),
        ("my_samplers:Broken", "failed: RuntimeError: no idea at all; fix it, or choose another with --sampler"),
        ("empty_folder", "is not an OptunaHub package: it has no __init__.py"),
        ("../x:y;z", "there is no sampler"),
    ],
)
def test_a_sampler_that_cannot_work_is_one_line(sampler, message, mine, tmp_path, cli):
    (tmp_path / "empty_folder").mkdir()
    error = cli.err(["run", "--recording", str(LANDSCAPE), "--sampler", sampler, "-b", "3", "--quiet"]).strip()
    assert message in error
    assert "\n" not in error
    assert not Path("runs").exists(), "a search begins only if its sampler can draw"


def test_bench_takes_every_sampler_and_refuses_one_whose_package_is_missing(monkeypatch, cli, mine):
    bench = ["bench", str(LANDSCAPE), "--seeds", "1", "--budget", "3", "--quiet", "--samplers"]
    assert mine in cli.out([*bench, f"cmaes,{mine}"])
    monkeypatch.setattr("cclsearch.propose.study.choose.find_spec", lambda name: None)
    [line] = cli.err([*bench, "cmaes"]).strip().splitlines()
    assert "needs cmaes, which is not installed: run `pip install cmaes`" in line


def test_bench_follows_links_to_landscapes_also_in_a_cycle(tmp_path):
    folder = tmp_path / "links"
    folder.mkdir()
    (folder / "a").symlink_to(LANDSCAPE)
    (folder / "cycle").symlink_to(folder)
    assert find_recordings(folder) == [folder / "a"]


def test_any_sampler_stays_in_the_space_in_a_study_of_the_user():
    study = optuna.create_study(sampler=SpaceSampler(optuna.samplers.RandomSampler(seed=3), SPACE))
    rows = []
    for _ in range(20):
        trial = study.ask(search_space_distributions(SPACE))
        rows.append(SPACE.row(trial.params))
        study.tell(trial, 1.0)
    assert None not in rows
    assert len(set(rows)) == 20
    assert any(DRAWN in trial.user_attrs for trial in study.trials)
    with pytest.raises(UserError, match="has no knob"):
        study.ask({"colour": CategoricalDistribution(("red", "blue"))})


def test_the_surrogate_samples_a_study_of_several_values_of_the_user():
    objective = make_pareto_objective(("step_time_s", "peak_memory_gib"), "training")
    study = optuna.create_study(
        sampler=SurrogateSampler(RECORDING.card, SPACE, objective=objective), directions=["minimize", "minimize"]
    )
    for _ in range(6):
        trial = study.ask(search_space_distributions(SPACE))
        row = RECORDING.look_up(trial.params)
        if row.status is RowStatus.OK:
            study.tell(trial, [row.metrics[name] for name in objective.metrics])
        else:
            study.tell(trial, state=TrialState.FAIL)
    asked = [study.ask(search_space_distributions(SPACE)) for _ in range(3)]
    assert len({SPACE.row(trial.params) for trial in [*study.trials, *asked]}) == 9


@pytest.mark.parametrize(
    ("objective", "directions", "needed"),
    [
        (None, ["maximize"], ["minimize"]),
        (make_pareto_objective(("step_time_s", "peak_memory_gib"), "training"), ["minimize"], ["minimize", "minimize"]),
        (load_objective("tokens_per_s"), ["minimize"], ["maximize"]),
        (load_objective("composite"), ["maximize"], ["minimize"]),
    ],
)
def test_a_study_in_the_wrong_direction_is_refused(objective, directions, needed):
    sampler = SurrogateSampler(RECORDING.card, SPACE, objective=objective)
    with pytest.raises(UserError, match=re.escape(f"create it with `directions={needed}`")):
        optuna.create_study(sampler=sampler, directions=directions).ask(search_space_distributions(SPACE))
    study = optuna.create_study(sampler=sampler, directions=needed)
    assert SPACE.row(study.ask(search_space_distributions(SPACE)).params) is not None


def test_the_value_of_weighted_metrics_is_their_loss():
    sampler = SurrogateSampler(RECORDING.card, SPACE, objective=load_objective("composite"))
    study = optuna.create_study(sampler=sampler)
    trial = study.ask(search_space_distributions(SPACE))
    trial.set_user_attr("step_time_s", 7.5)
    study.tell(trial, 1.25)
    [seen] = sampler._view(study, study.ask(search_space_distributions(SPACE))._cached_frozen_trial).observations
    assert (seen.loss, seen.metrics["step_time_s"]) == (1.25, 7.5)


@pytest.mark.parametrize("name", ["tpe", "nsgaii", "gp"])
def test_constraints_reach_the_samplers(name):
    bound = Constraint(metric="peak_memory_gib", at_most=40.0)
    limited = load_objective("step_time").model_copy(update={"constraints": (bound,)})
    found = replay_search(RECORDING, make_sampler(name), seed=0, budget=12, objective=limited)
    assert (found.num_trials, found.num_duplicates) == (12, 0)


def test_pruned_trials_and_infrastructure_failures_are_no_crashes_of_their_configuration():
    sampler = SurrogateSampler(RECORDING.card, SPACE)
    study = optuna.create_study(sampler=sampler)
    reported, silent, preempted, asked = (study.ask(search_space_distributions(SPACE)) for _ in range(4))
    reported.report(9.0, 0)
    reported.report(8.0, 1)
    study.tell(reported, state=TrialState.PRUNED)
    study.tell(silent, state=TrialState.PRUNED)
    preempted.set_user_attr("failure_kind", "preempted")
    study.tell(preempted, state=TrialState.FAIL)
    view = sampler._view(study, study.trials[asked.number])
    [seen] = view.observations
    assert (seen.trial, seen.loss, seen.failure, seen.is_pruned) == (0, None, None, True)
    assert seen.value("step_time_s") == 8.0
    assert view.held_back == {SPACE.row(silent.params), SPACE.row(preempted.params)}
    asked.set_user_attr("failure_kind", "no idea")
    study.tell(asked, state=TrialState.FAIL)
    with pytest.raises(UserError, match="trial 3 has the unknown failure_kind 'no idea'; known: out_of_memory"):
        study.ask(search_space_distributions(SPACE))


def test_the_names_of_samplers_begin_with_the_default():
    names = list_samplers()
    assert names[0] == "surrogate"
    assert {"tpe", "gp", "cmaes", "nsgaii", "random", "grid", "heuristic"} < set(names)
    assert not {"default", "pareto"} & set(names)
