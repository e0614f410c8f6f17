"""The Python API: its names and their page, searches with a function of the caller, its notebook."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from paths import ROOT

import cclsearch
from cclsearch.cli import main
from cclsearch.core.values import Provenance
from cclsearch.launch.contract import RESULT_FILE, RunStatus
from cclsearch.scoring.admission import check_provenance
from cclsearch.scoring.evidence import Evidence
from cclsearch.tasks.base import task_of

PAGE = (ROOT / "docs" / "python-api.md").read_text()
NOTEBOOK = ROOT / "docs" / "notebooks" / "search.ipynb"


def measure(config: dict[str, Any]) -> float:
    return 0.2 + 0.1 * config["dp"] + 0.01 * config["micro_batch_size"]


def test_every_name_is_offered_documented_and_has_a_docstring():
    table = "\n".join(line.split(" | ")[0] for line in PAGE.splitlines() if line.startswith("| "))
    documented = set(re.findall(r"`(\w+)", table))
    assert sorted(set(cclsearch.__all__) ^ documented) == []
    assert dir(cclsearch) == sorted(cclsearch.__all__)
    values = {name: getattr(cclsearch, name) for name in cclsearch.__all__}
    functions = [name for name, value in values.items() if callable(value)]
    assert len(functions) > 8
    assert [name for name in functions if not values[name].__doc__] == []
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = cclsearch.nothing  # type: ignore[attr-defined]


def test_the_page_names_every_argument():
    for name in ("search", "resume", "open_run", "load_card", "build_space", "predict", "read_traces", "score"):
        shown = re.search(rf"`{name}\(([^)]*)\)` \|", PAGE)
        assert shown is not None, name
        wanted = list(inspect.signature(getattr(cclsearch, name)).parameters)
        assert re.findall(r"(\w+)(?:=[^,]+)?(?:, |$)", shown[1]) == wanted, name


def test_type_checkers_see_the_names_that_are_loaded_lazily():
    tree = ast.parse((ROOT / "cclsearch" / "__init__.py").read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed == {name: f"cclsearch.{module}" for name, module in cclsearch._HOMES.items()}
    assert sorted(typed) == sorted(cclsearch.__all__)
    assert (ROOT / "cclsearch" / "py.typed").is_file()


def test_functions_of_the_api_are_functions_whatever_module_is_imported_before():
    code = (
        "import cclsearch, cclsearch.loop.loop, cclsearch.scoring.evaluate; from cclsearch.loop import loop;"
        "print(cclsearch.search.__module__, cclsearch.score.__module__, loop.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["cclsearch.api.searching", "cclsearch.api.traces", "cclsearch.loop.loop"]


def test_import_loads_nothing_else():
    code = "import sys; old = set(sys.modules); import cclsearch; print(sorted(set(sys.modules) - old))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['__future__', 'cclsearch']"


def test_the_examples_of_the_page_run(project):
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) >= 4
    for block in blocks:
        exec(compile(block, "python-api.md", "exec"), names)
    assert names["result"].provenance == "caller-measured"


def test_the_notebook_runs_and_has_no_outputs(project):
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    names: dict[str, Any] = {}
    for cell in code:
        exec(compile("".join(cell["source"]), NOTEBOOK.name, "exec"), names)
    assert len(names["more"].to_frame()) == 10
    assert names["more"].best is not None


def test_a_search_with_a_function_ranks_and_says_what_was_not_checked(project):
    seen: list[dict[str, Any]] = []

    def remember(config: dict[str, Any]) -> dict[str, float]:
        seen.append(config)
        return {"step_time_s": measure(config), "peak_memory_gib": 1.5, "mine": 3}

    result = cclsearch.search("tiny", remember, budget=4, constraints=["peak_memory_gib <= 2"], name="own")
    frame = result.to_frame()
    assert len(seen) == len(frame) == 4
    assert list(frame["metric.step_time_s"]) == pytest.approx([measure(config) for config in seen])
    assert set(frame["provenance"]) == {"caller-measured"}
    assert result.best.loss == pytest.approx(min(map(measure, seen)))
    assert result.best.metrics["peak_memory_gib"] == 1.5
    assert result.best.metrics["mine"] == 3
    for text in (result.summary(), result.report()):
        assert "admission rules were not checked: work, world_size" in text
        assert "caller-measured" in text
    shown = result._repr_html_()
    assert shown.count("<iframe") == 1
    assert "srcdoc=" in shown
    assert 'src="http' not in result.report()
    verdicts = result.run.state.trials[1].outcome.verdicts  # type: ignore[union-attr]
    assert {v.rule: v.ok for v in verdicts}["work"] is None, "the function declares no work"
    assert main(["resume", "own", "--budget", "5"]) == 2
    assert main(["admit", "own"]) == 0


def test_a_step_time_that_the_accelerators_cannot_reach_is_not_ranked(project):
    result = cclsearch.search("wl2", lambda config: 1e-6, budget=5, name="fast")
    assert result.best is None
    assert result.status == "stopped", "three in a row failed for the same reason"
    assert "possible" in result.summary()


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (None, "step_time_s must be a finite number"),
        ("0.5", "step_time_s must be a finite number"),
        (True, "step_time_s must be a finite number"),
        (float("nan"), "step_time_s must be a finite number"),
        (-1.0, "a number above 0"),
        (0, "a number above 0"),
        ({"loss": 3.0}, "it must be step_time_s or a mapping with it"),
        ({"step_time_s": 1.0, "other": [1, 2]}, "other must be a finite number"),
        ({"step_time_s": 1.0, 3: 1.0}, "the name of a metric must be a text"),
        ({"step_time_s": 1.0, "peak_memory_gib": -2.0}, "peak_memory_bytes"),
    ],
)
def test_what_is_no_measurement_is_a_failed_trial(project, returned, text):
    result = cclsearch.search("tiny", lambda config: returned, budget=1)
    [reason] = result.to_frame()["reason"]
    assert text in reason
    assert "measure(config) returned" in reason
    assert result.best is None


def test_an_exception_is_a_failed_trial_with_its_root(project, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "sk-verysecret-0123456789abcdef")
    outofmemory = type("OutOfMemoryError", (RuntimeError,), {"__module__": "torch"})
    raised = iter([MemoryError("no room"), outofmemory("CUDA out of memory."), Odd("sk-verysecret-0123456789abcdef")])

    def fail(config: dict[str, Any]) -> float:
        raise RuntimeError("the step failed") from next(raised)

    try:
        raise KeyError("of the caller, which is no cause")
    except KeyError:
        result = cclsearch.search("tiny", fail, budget=3, name="fails")
    frame = result.to_frame()
    assert list(frame["failure_kind"]) == ["out_of_memory", "out_of_memory", "crashed"]
    assert "MemoryError: no room" in frame["reason"][0]
    assert "Odd" in frame["reason"][2]
    logs = [path.read_text() for path in sorted(result.folder.glob("trials/*/stderr.log"))]
    assert len(logs) == 3
    assert "RuntimeError: the step failed" in logs[0]
    everything = "".join(p.read_text(errors="replace") for p in result.folder.rglob("*") if p.is_file())
    assert "verysecret" not in everything


class Odd(Exception):
    """Has no name that ends as those of errors."""


def test_several_calls_run_at_a_time(project):
    together = threading.Barrier(3, timeout=20)

    def wait(config: dict[str, Any]) -> float:
        together.wait()
        return measure(config)

    result = cclsearch.search("tiny", wait, budget=6, parallel=3)
    assert list(result.to_frame()["state"]) == ["ranked"] * 6
    assert result.status == "ended"


@pytest.mark.parametrize("parallel", [1, 2])
def test_ctrl_c_keeps_what_finished_and_resume_runs_the_rest(project, parallel):
    calls: list[dict[str, Any]] = []

    def interrupt(config: dict[str, Any]) -> float:
        calls.append(config)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
        return measure(config)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as raised:
        cclsearch.search("tiny", interrupt, budget=5, parallel=parallel, name="stopped")
    assert "cclsearch.resume('stopped', measure)" in "".join(raised.value.__notes__)
    assert signal.getsignal(signal.SIGINT) is before
    stopped = cclsearch.open_run("stopped")
    assert stopped.status == "stopped"
    num_finished = sum(stopped.to_frame()["state"] == "ranked")
    assert num_finished >= 2 - (parallel - 1)
    result = cclsearch.resume("stopped", interrupt)
    assert list(result.to_frame()["state"]) == ["ranked"] * 5
    assert len(calls) <= 6, "no finished trial runs again"
    assert result.status == "ended"


def test_a_killed_search_is_resumed(project):
    program = (
        "import cclsearch, os\n"
        "calls = []\n"
        "def measure(config):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 3: os._exit(9)\n"
        "    return 1.0 + config['dp']\n"
        "cclsearch.search('tiny', measure, budget=4, parallel=PARALLEL, name='killed')\n"
    ).replace("PARALLEL", "2")
    done = subprocess.run([sys.executable, "-c", program], cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 9, done.stderr
    assert cclsearch.open_run("killed").status == "killed"
    result = cclsearch.resume("killed", measure)
    assert list(result.to_frame()["state"]) == ["ranked"] * 4


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"measure": 3}, "measure must be a function"),
        ({"measure": measure, "launcher": "local"}, "exclude each other"),
        ({"measure": measure, "budget": 0}, "budget: input should be greater than or equal to 1, not 0"),
        ({"measure": measure, "parallel": True}, "parallel: input should be a valid integer, not True"),
        ({"measure": measure, "max_hours": 0}, "max_hours: input should be greater than 0, not 0"),
        ({"measure": measure, "max_hours": "1"}, "max_hours: input should be a valid number"),
        ({"measure": measure, "seed": -1}, "seed must be a whole number from 0"),
        ({"measure": measure, "knobs": {"tp": "12"}}, "must be a list of plain values"),
        ({"measure": measure, "knobs": {"tp": [None]}}, "must be a list of plain values"),
        ({"measure": measure, "knobs": {"nonsense": [1]}}, "nonsense"),
        ({"measure": measure, "baseline": {"tp": 3}}, "tp"),
        ({"measure": measure, "objective": "nothing"}, "nothing"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(project, options, text):
    with pytest.raises(cclsearch.UserError, match=re.escape(text)):
        cclsearch.search("tiny", **options)
    assert list(project.glob("runs/*")) == []


def test_a_profile_cannot_name_a_function(project, capsys):
    (project / "launchers").mkdir()
    (project / "launchers" / "mine.yaml").write_text("launcher: in-process\n")
    assert main(["run", "-w", "tiny", "--launcher", "mine"]) == 2
    assert "--launcher mine: only `cclsearch.search(card, measure)`" in capsys.readouterr().err
    assert list(project.glob("runs/*")) == []


def test_a_job_cannot_claim_that_a_function_measured_it():
    card = cclsearch.load_card("tiny")
    config = cclsearch.build_space(card).config(0)
    payload = task_of(card).make_input(card, config, is_measured=True, run_id="x", trial=1)
    result = task_of(card).make_result(card, {"step_time_s": 1.0}, status=RunStatus.OK, caller=True)
    assert check_provenance(Evidence(payload, result, card, Provenance.MEASURED, None)).ok is False
    assert check_provenance(Evidence(payload, result, card, Provenance.CALLER, None)).ok is True


def test_figures_of_a_function_are_not_learned_from_by_a_search_of_another_kind(project):
    cclsearch.search("tiny", measure, budget=2, name="own")
    with pytest.raises(cclsearch.UserError, match="provenance"):
        cclsearch.search("tiny", launcher="simulate", learn_from=["own"])
    again = cclsearch.search("tiny", measure, budget=1, learn_from=["own"], confirm=1, name="again")
    assert len(again.to_frame()) == 2, "one trial and its confirmation"
    assert (again.folder / "trials" / "0002" / RESULT_FILE).is_file()


def test_cards_are_names_files_mappings_or_cards():
    by_name = cclsearch.load_card("tiny")
    path = ROOT / "workloads" / "tiny.yaml"
    assert cclsearch.load_card(path) == by_name
    assert cclsearch.load_card(by_name) is by_name
    assert cclsearch.load_card("wl2", {"batch_size": 64}).work["global_batch_size"] == 64
    with pytest.raises(cclsearch.UserError, match="workload"):
        cclsearch.load_card({"nothing": 1})
    with pytest.raises(cclsearch.UserError, match="not 3"):
        cclsearch.load_card(3)  # type: ignore[arg-type]
    assert len(cclsearch.build_space("tiny", knobs={"tp": [1]})) < len(cclsearch.build_space("tiny"))


def test_predictions_are_those_of_the_command_line(cli):
    frame = cclsearch.predict("wl2", {"tp": 2}, top=3)
    shown = cli.json(["predict", "-w", "wl2", "--config", "tp=2", "--top", "3", "--json"])["configurations"]
    assert list(frame["step_time_s"]) == [each["step_time_s"] for each in shown]
    assert set(frame["provenance"]) == {"simulated"}
    with pytest.raises(cclsearch.UserError, match="tp"):
        cclsearch.predict("wl2", {"tp": 3})


def test_traces_are_scored(capsys):
    trace = ROOT / "tests" / "recorded" / "gloo-ddp2"
    view = cclsearch.read_traces(trace)
    scored = cclsearch.score(view, ["trace_step_time"])
    assert main(["score", str(trace), "--metric", "trace_step_time", "--json"]) == 0
    assert scored.value("trace_step_time") == json.loads(capsys.readouterr().out)["trace_step_time"]["value"]
    with pytest.raises(cclsearch.UserError, match="nonsense"):
        cclsearch.score(trace, ["nonsense"])
