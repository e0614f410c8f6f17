"""The message of a night to a chat, and a night that cannot be written."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, cast

import pytest
from command_line import run_command
from nights import BASE, DECIDE, night, write
from scripted_launcher import failed

from cclsearch.cli import main
from cclsearch.core.values import FailureKind
from cclsearch.tracking.webhook import _SameHost


class _Chat(BaseHTTPRequestHandler):
    received: list[dict[str, Any]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.received.append(json.loads(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def test_the_chat_gets_the_message_and_its_url_is_in_no_file(
    nightly_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HTTPServer(("127.0.0.1", 0), _Chat) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/hook/very-secret-part"
        monkeypatch.setenv("NIGHT_HOOK", url)
        summary = night(code=0, webhook_env="NIGHT_HOOK", name="n1")
        server.shutdown()
    assert "1 job: 1 without an earlier night" in _Chat.received[-1]["text"]
    assert summary.notes == ()
    content = b"".join(p.read_bytes() for p in nightly_project.rglob("*") if p.is_file())
    assert b"very-secret-part" not in content


def test_a_night_that_cannot_be_written_is_trouble_and_the_chat_gets_a_message(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {"workload": "wl2", "launcher": "replay", "name": "a", "budget": {"trials": 2}}
    write(jobs=[job], webhook_env="NIGHT_HOOK")
    with HTTPServer(("127.0.0.1", 0), _Chat) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("NIGHT_HOOK", f"http://127.0.0.1:{server.server_address[1]}/hook")
        # inputs, ledgers and pages are larger; a lock and the state of a running night are not
        done = run_command("nightly", "nightly.yaml", "--once", max_file_bytes=2_000)
        server.shutdown()
    assert done.returncode == 4, done.stderr
    assert "cannot write" in done.stderr
    assert "Traceback" not in done.stderr
    assert "cannot write" in _Chat.received[-1]["text"]


class _Moved(BaseHTTPRequestHandler):
    """Sends every message to another host, and repeats the address in its answer."""

    asked: list[str] = []

    def do_POST(self) -> None:
        self.asked.append(self.headers["Host"])
        self.send_response(307, f"moved {self.path}")
        self.send_header("Location", f"http://localhost:{self.server.server_address[1]}{self.path}")
        self.end_headers()
        self.wfile.write(self.path.encode())

    do_GET = do_POST

    def log_message(self, *args: object) -> None:
        pass


def test_a_redirect_of_the_chat_to_another_host_is_not_followed_and_its_answer_is_not_shown(
    nightly_project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with HTTPServer(("127.0.0.1", 0), _Moved) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("NIGHT_HOOK", f"http://127.0.0.1:{server.server_address[1]}/hook/very-secret-part")
        summary = night(code=0, webhook_env="NIGHT_HOOK")
        server.shutdown()
    assert summary.notes[-1] == "the message may not have arrived: status 307"
    assert [host.split(":")[0] for host in _Moved.asked] == ["127.0.0.1"]
    output = capsys.readouterr()
    kept = b"".join(path.read_bytes() for path in nightly_project.rglob("*") if path.is_file())
    assert b"very-secret-part" not in kept + (output.out + output.err).encode()


@pytest.mark.parametrize(
    ("target", "is_followed"),
    [
        ("http://chat.example/hook", False),
        ("https://chat.example/moved", True),
        ("https://chat.example:444/hook", False),
        ("https://chat.example@other.example/hook", False),
        ("//other.example/hook", False),
    ],
)
def test_a_chat_is_followed_only_over_https_on_the_same_host(target: str, is_followed: bool) -> None:
    from email.message import Message
    from io import BytesIO
    from urllib.request import Request

    request, headers = Request("https://chat.example/hook"), cast(Any, Message())
    new = _SameHost().redirect_request(request, BytesIO(), 302, "Found", headers, target)
    assert (new is not None) == is_followed


def test_an_unreachable_chat_is_a_note_and_not_a_failure(
    nightly_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHT_HOOK", "http://127.0.0.1:1/very-secret-part")
    summary = night(code=0, webhook_env="NIGHT_HOOK")
    assert "may not have arrived" in summary.notes[-1]
    kept = Path("runs") / "nights" / "nightly" / summary.night
    for name in ("summary.json", "summary.md", "report.html"):
        assert "may not have arrived" in (kept / name).read_text()
    assert "very-secret-part" not in summary.notes[-1]
    monkeypatch.setenv("NIGHT_HOOK", "file:///etc/passwd")
    assert "is not an http" in night(code=0, webhook_env="NIGHT_HOOK").notes[-1]


def test_a_webhooks_url_is_a_secret_in_messages_and_jobs(
    nightly_project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cclsearch.launch.environment import inherited_environment

    url = "https://chat.example/hook/very-hidden-part"
    monkeypatch.setenv("CHAT_ADDRESS", url + "\n")
    DECIDE.append(lambda job: failed(FailureKind.CRASHED).model_copy(update={"message": f"no answer from {url}"}))
    write(webhook_env="CHAT_ADDRESS", jobs=[{**BASE["jobs"][0], "objective": f"no {url}"}])
    assert main(["nightly", "nightly.yaml"]) == 2
    output = capsys.readouterr()
    assert "very-hidden-part" not in output.out + output.err
    assert "CHAT_ADDRESS" not in inherited_environment()
    monkeypatch.setattr("cclsearch.nightly.run.send_webhook", lambda variable, text: None)
    summary = night(code=1, webhook_env="CHAT_ADDRESS", jobs=BASE["jobs"])
    assert "very-hidden-part" not in summary.model_dump_json()
    content = b"".join(p.read_bytes() for p in Path("runs").rglob("*") if p.is_file())
    assert b"very-hidden-part" not in content
