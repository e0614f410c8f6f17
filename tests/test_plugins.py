"""Plugins: an entry point that imports a module which has moved is answered in one line."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from cclsearch.core.errors import UserError
from cclsearch.plugins import MOVED, Registry


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Make a package with one module of this source and an entry point for it importable."""
    (folder / "their_plugin.py").write_text(source)
    info = folder / "their_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[cclsearch]\ntheirs = their_plugin\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "their_plugin", raising=False)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("from cclsearch.errors import TrialError", "it is `cclsearch.core.errors` now"),
        ("from cclsearch.propose.base import Remark", "docs/renames.md of the repository lists new names"),
    ],
)
def test_a_plugin_that_imports_a_moved_name_is_answered_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, says: str
) -> None:
    install(tmp_path, monkeypatch, source)
    with pytest.raises(UserError, match="the plugin 'their_plugin' needs an update") as error:
        Registry("metric").names()
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_an_error_inside_a_plugin_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "import no_such_module_at_all")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        Registry("metric").names()


def test_modules_that_have_moved_are_where_the_message_says() -> None:
    for old, new in MOVED.items():
        assert importlib.util.find_spec(new) is not None
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(old)
