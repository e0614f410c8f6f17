"""The message at the end of a search, to a real HTTP server on this machine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from chat import Chat, open_chat
from command_line import run_command

from cclsearch.cli import main

RUN = ["run", "--workload", "wl2", "--budget", "2", "--name", "told", "--quiet"]
SECRET = "very-secret-part"


@pytest.fixture
def chat(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Chat]:
    with open_chat(getattr(request, "param", 200), secret=SECRET) as opened:
        monkeypatch.setenv("TEAM_CHAT", opened.url)
        yield opened


def contents(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("how", ["option", "settings"])
def test_the_chat_gets_the_result_and_its_address_is_in_no_file(project, chat, how, capsys):
    if how == "settings":
        (project / "ccl-search.yaml").write_text("webhook_env: TEAM_CHAT\n")
    assert main([*RUN, *(["--notify", "TEAM_CHAT"] if how == "option" else [])]) == 0
    (text,) = chat.texts
    assert text.startswith("ccl-search told (wl2): the budget is used up")
    assert re.search(r"best: trial \d", text)
    assert str(project) not in text
    output = capsys.readouterr()
    assert SECRET.encode() not in contents(project) + (output.out + output.err).encode()
    assert main(["resume", "told", "--budget", "3", "--quiet", "--notify", "TEAM_CHAT"]) == 0
    assert len(chat.texts) == 2


def test_the_chat_hears_why_a_search_broke_off(project, chat):
    """The disk is full after the search has begun."""
    assert main([*RUN, "--dry-run", "--notify", "TEAM_CHAT"]) == 0
    assert chat.texts == []
    done = run_command(*RUN, "--budget", "40", "--notify", "TEAM_CHAT", max_file_bytes=40_000)
    assert done.returncode == 2, done.stderr
    assert (project / "runs" / "told" / "search.yaml").is_file()
    (text,) = chat.texts
    assert text.startswith("ccl-search told: cannot write to")
    assert "ccl-search resume told" in text


@pytest.mark.parametrize("chat", [500], indirect=True)
def test_a_chat_that_refuses_changes_no_exit_code(project, chat, cli):
    error = cli.err([*RUN, "--notify", "TEAM_CHAT"], 0)
    assert "note: the message may not have arrived: status 500" in error
    assert SECRET not in error


@pytest.mark.parametrize("command", [RUN, ["sweep", "--workload", "wl2", "--budget", "2", "--weights", "0:1:1"]])
@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("TEAM_CHAT", None, "the environment variable is not set"),
        ("TEAM_CHAT", "chat.example/hook", "does not hold an http or https URL"),
        ("https://chat.example/hook/" + SECRET, None, "not the URL"),
        ("TEAM_CHAT;id", None, "takes the name of an environment variable"),
    ],
)
def test_a_message_that_cannot_be_sent_stops_the_search_before_it_begins(
    project, command, variable, value, says, monkeypatch, cli
):
    monkeypatch.delenv("TEAM_CHAT", raising=False)
    if value is not None:
        monkeypatch.setenv("TEAM_CHAT", value)
    error = cli.err([*command, "--notify", variable])
    assert says in error
    assert error.count("\n") == 1
    assert SECRET not in error
    assert not (project / "runs").exists()


def test_offline_refuses_a_chat_on_another_machine(project, monkeypatch, cli):
    monkeypatch.setenv("TEAM_CHAT", f"https://chat.example/hook/{SECRET}")
    error = cli.err([*RUN, "--notify", "TEAM_CHAT", "--offline"])
    assert "leave out --notify" in error
    assert SECRET not in error
    assert not (project / "runs").exists()
