"""Plugins: one that cannot be imported is named in one line and left out; everything else works."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from command_line import run_command

from cclsearch import plugins
from cclsearch.core import registry as registries
from cclsearch.core.errors import BrokenPlugin, UserError
from cclsearch.core.registry import Plugin, Registry, load_plugins


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Make a package with one module of this source and an entry point for it importable."""
    (folder / "their_plugin.py").write_text(source)
    info = folder / "their_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[cclsearch]\ntheirs = their_plugin\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "their_plugin", raising=False)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Registry[object]:
    """An empty registry, in a process that has loaded no plugin yet; plugins register in it as `plugins.FRESH`."""
    monkeypatch.setattr(registries, "_REGISTRIES", [])
    monkeypatch.setattr(registries, "_PLUGINS", {})
    monkeypatch.setattr(registries, "_has_begun", False)
    registry: Registry[object] = Registry("metric", needs=("unit",))
    monkeypatch.setattr(plugins, "FRESH", registry, raising=False)
    return registry


THING = "from cclsearch import plugins\nclass Thing:\n    unit = 's'\nplugins.FRESH.register('thing')(Thing)\n"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("from cclsearch.errors import TrialError", "it needs an update: No module named .cclsearch.errors"),
        ("from cclsearch.propose.base import Remark", "it needs an update: cannot import name .Remark"),
        ("import no_such_module_at_all", "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
        ("1 / 0", "ZeroDivisionError"),
        ("raise SystemExit('bye')", "SystemExit: bye"),
        ("def broken(:", "SyntaxError"),
        ("raise RuntimeError('two\\nlines \\x1b[31mred')", "RuntimeError: two lines"),
        (
            "from cclsearch import plugins; plugins.FRESH.register('empty')(3)",
            "TypeError: the metric 'empty' has no unit",
        ),
        ("from cclsearch import plugins; plugins.FRESH.register('thing')(str)", "has no unit"),
    ],
)
def test_a_broken_plugin_warns_once_and_is_left_out_as_a_whole(tmp_path, monkeypatch, fresh, source, says):
    install(tmp_path, monkeypatch, THING + source)
    fresh.register("ours")(type("Ours", (), {"unit": "s"}))
    with pytest.warns(BrokenPlugin, match=f"plugin their-plugin .their_plugin. is left out: .*{says}") as caught:
        assert fresh.names() == ["ours"]
    assert len(caught) == 1
    assert "\n" not in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other: Registry[object] = Registry("launcher")
        assert other.names() == []
        assert other.find("thing") is None
    with pytest.raises(UserError, match=r"no metric 'thing'.*the plugin their-plugin .* was left out"):
        fresh.get("thing")


def test_a_good_plugin_is_found_and_listed(tmp_path, monkeypatch, fresh):
    install(tmp_path, monkeypatch, THING)
    assert fresh.names() == ["thing"]
    assert load_plugins() == [Plugin("their-plugin (their_plugin)")]
    with pytest.raises(UserError, match=r"no metric 'thong' \(did you mean 'thing'"):
        fresh.get("thong")


def test_a_plugin_that_takes_a_built_in_name_is_left_out(tmp_path, monkeypatch, fresh):
    (tmp_path / "built_in.py").write_text(THING.replace("Thing", "BuiltIn"))
    install(tmp_path, monkeypatch, THING)
    late: Registry[object] = Registry("metric", {"thing": "built_in"}, needs=("unit",))
    monkeypatch.setattr(plugins, "FRESH", late)
    with pytest.warns(BrokenPlugin, match="the metric 'thing' is built in: another name is needed"):
        assert late.names() == ["thing"]
    assert "built_in" not in sys.modules, "a name is known without its module"
    assert getattr(late.get("thing"), "__name__", "") == "BuiltIn"


@pytest.mark.parametrize("name", plugins.__all__)
def test_built_in_names_are_those_that_their_modules_register(name):
    registry: Registry[object] = getattr(plugins, name)
    assert len(registry.entries()) == len(registry.names()) > (0 if registry.kind != "trial metric" else -1)
    assert sorted(registry._entries) == registry.names(), "no built-in module registers a name that is not listed"


def test_a_plugin_may_be_the_first_to_import_what_is_built_in(tmp_path, monkeypatch):
    """A failed plugin must not take the built-in entries away that its own imports registered."""
    install(tmp_path, monkeypatch, "import cclsearch.propose.baselines.simple\n1 / 0")
    code = "from cclsearch.plugins import LAUNCHERS, PROPOSERS; LAUNCHERS.names(); print('random' in PROPOSERS.names())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(plugins.__file__).parent.parent}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.strip() == "True"
    assert done.stderr.count("is left out: ZeroDivisionError") == 1


@pytest.mark.parametrize(
    ("arguments", "exit_code"),
    [
        (["accelerators"], 0),
        (["score", "--help"], 0),
        (["score", "--list"], 0),
        (["doctor"], 0),
        (["score", "--metric", "nope", "."], 2),
    ],
)
def test_commands_work_beside_a_broken_plugin(tmp_path, arguments, exit_code):
    with pytest.MonkeyPatch.context() as patch:
        install(tmp_path, patch, "raise RuntimeError('it is broken')")
    path = f"{tmp_path}:{Path(plugins.__file__).parent.parent}"
    done = run_command(*arguments, environment={"PYTHONPATH": path})
    assert done.returncode == exit_code, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("ccl-search: the plugin their-plugin (their_plugin) is left out: ") <= 1
    assert ("is left out" in done.stderr) == (arguments[-1] not in ("accelerators", "--help"))
