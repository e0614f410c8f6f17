"""`ccl-search ui` over runs that somebody else wrote, and with clients that only hold connections open."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import ROOT, TESTS
from starlette.testclient import TestClient
from waiting import wait_until

from cclsearch.core.job_file import JobFileError, only_inside, open_inside, open_job_file
from cclsearch.core.processes import ProcessIdentity
from cclsearch.record.ledger import LEDGER_FILE
from cclsearch.ui.app import make_app
from cclsearch.ui.guard import TOKEN_HEADER, Permissions
from cclsearch.ui.run_index import RunEntry, RunView

EXAMPLE = ROOT / "runs" / "example-wl2"
BASE = "http://127.0.0.1:8090"
SECRET = "PRIVATE-DIARY"


@pytest.fixture
def runs(project: Path) -> Path:
    """A folder with a run that is as it should be."""
    shutil.copytree(EXAMPLE, project / "runs" / "good")
    return project / "runs"


@pytest.fixture
def client(runs: Path) -> TestClient:
    return TestClient(make_app(runs, Permissions(notes=True, start=True, token="t")), base_url=BASE)


def add_run(runs: Path, name: str) -> Path:
    return Path(shutil.copytree(EXAMPLE, runs / name))


LINKS = ["trial folder", "trials", "turns", "trace", "file", "hard link", "run", "ledger", "inputs", "folder inside"]


@pytest.mark.parametrize("what", LINKS)
def test_no_page_opens_what_is_not_a_regular_file_of_the_run(runs, client, what):
    private = runs.parent / "private"
    shutil.copytree(EXAMPLE, private)
    for folder in (private / "trials" / "0002", private / "turns", private):
        folder.mkdir(exist_ok=True)
        (folder / "diary.txt").write_text(SECRET)
    (private / "turns" / "0001.json").write_text(SECRET)
    spec = (private / "search.yaml").read_text().replace("title: ", f"title: {SECRET}", 1)
    (private / "search.yaml").write_text(spec)
    shutil.copytree(TESTS / "recorded" / "gloo-ddp2", private / "trace")
    run = add_run(runs, "bad")
    trial = run / "trials" / "0002"
    places = {
        "trial folder": (trial, private),
        "trials": (run / "trials", private / "trials"),
        "turns": (run / "turns", private / "turns"),
        "trace": (trial / "trace", private / "trace"),
        "file": (trial / "diary.txt", private / "diary.txt"),
        "run": (run, private),
        "ledger": (run / LEDGER_FILE, private / LEDGER_FILE),
        "inputs": (run / "search.yaml", private / "search.yaml"),
        "folder inside": (trial / "sub", private),
    }
    if what == "hard link":
        os.link(private / "diary.txt", trial / "diary.txt")
    else:
        place, target = places[what]
        shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
        place.symlink_to(target)
    names = ("diary.txt", "sub/diary.txt", "turns/0001.json")
    files = [f"/runs/bad/trials/2/files/{head}{name}" for head in ("trials/0002/", "") for name in names]
    pages = ["/", "/runs/bad", "/runs/bad/trials/2", "/runs/bad/trials/2/metrics", "/leaderboard", *files]
    for path in pages:
        answer = client.get(path)
        assert answer.status_code in (200, 404), path
        assert SECRET not in answer.text, path
        assert "diary.txt" not in answer.text, path
    assert "has no traces" in client.get("/runs/bad/trials/2/metrics").text or what in ("run", "ledger", "inputs")
    assert '<a href="/runs/good">' in client.get("/").text
    if what == "run":
        refused = client.post("/change/tag", json={"run": "bad", "text": "x"}, headers={TOKEN_HEADER: "t"})
        assert "is a link to another folder" in refused.json()["error"]
        assert not (private / "annotations.jsonl").exists()


def test_a_folder_that_becomes_a_link_after_it_was_looked_at_is_not_followed(runs):
    trial = runs / "good" / "trials" / "0002"
    with only_inside(runs):
        assert open_job_file(trial / "config.json").read()
        trial.rename(runs / "aside")
        trial.symlink_to(runs / "aside")
        with pytest.raises(JobFileError, match="reached through a link"):
            open_job_file(trial / "config.json")
        with pytest.raises(OSError, match="symbolic links"):
            open_inside(trial / ".." / "0001" / "config.json", os.O_RDONLY)
    assert open_job_file(trial / "config.json").read(), "elsewhere a folder may be a link, such as to a scratch disk"


@pytest.mark.parametrize("time_s", [1e300, -1e18, 253402300800.0])
def test_absurd_times_harm_only_their_own_lines(runs, client, time_s):
    ledger = add_run(runs, "bad") / LEDGER_FILE
    *kept, last = ledger.read_bytes().splitlines(keepends=True)
    event = {name: value for name, value in json.loads(last).items() if name != "crc"} | {"time_s": time_s}
    text = json.dumps(event, separators=(",", ":")).encode()[:-1]
    ledger.write_bytes(b"".join([*kept, text + b',"crc":"%08x"}\n' % zlib.crc32(text)]))  # with a right checksum
    page = client.get("/")
    assert page.status_code == 200
    assert {"/runs/good", "/runs/bad"} <= set(re.findall(r'href="(/runs/[^"/]+)"', page.text))
    assert "time_s: Input should be" in client.get("/runs/bad").text


def test_a_ledger_without_line_ends_is_one_bad_line_however_large_it_is(runs, client, cli):
    ledger = add_run(runs, "bad") / LEDGER_FILE
    with ledger.open("ab") as file:
        file.truncate(20 * 2**30)  # sparse
    wait_until(lambda: '<a href="/runs/good">' in client.get("/").text, 10)  # each request reads for a moment
    assert "more than the 67,108,864 allowed" in client.get("/runs/bad").text
    assert "5 of 5 trials" in cli.out(["status", "bad"])


@pytest.mark.parametrize("place", ["entry", "row", "board"])
def test_an_error_of_ours_in_one_run_leaves_the_others_shown(runs, client, place, monkeypatch, capsys):
    add_run(runs, "bad")
    kind, name = {"entry": (RunView, "entry"), "row": (RunEntry, "hardware"), "board": (RunEntry, "work")}[place]
    real = getattr(kind, name)

    def fail(self: RunView | RunEntry) -> object:
        if self.folder.name == "bad":
            raise ZeroDivisionError("of this run")
        return real(self) if place == "entry" else (real.func if place == "board" else real.fget)(self)

    monkeypatch.setattr(kind, name, fail if place == "entry" else property(fail))
    page = client.get("/").text
    assert '<a href="/runs/good">' in page
    assert ("cannot be read: ZeroDivisionError: of this run" in page) == (place != "board")
    assert "/runs/good/trials/5" in client.get("/leaderboard").text
    assert "ZeroDivisionError: of this run" in capsys.readouterr().err, "our error is not hidden"


READER = """
import sys, time
file = open(sys.argv[1] + "/ledger.jsonl")
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("named", ["unrelated", "reads the ledger"])
def test_stop_interrupts_no_process_that_does_not_write_to_the_run(runs, client, named):
    run = runs / "good"
    code = READER if named == "reads the ledger" else READER.replace("file = ", "")[1:].replace("open(", "str(")
    victim = subprocess.Popen([sys.executable, "-c", code, str(run)], stdout=subprocess.PIPE, text=True)
    try:
        assert victim.stdout.readline() == "ready\n"
        found = ProcessIdentity.of(victim.pid)
        place = {"host": socket.gethostname(), "boot": found.boot, "pid_ns": found.pid_ns, "purpose": "search"}
        (run / "lock").write_text(json.dumps({**place, "pid": victim.pid, "start": found.start, "held": False}))
        refused = client.post("/change/stop", json={"run": "good"}, headers={TOKEN_HEADER: "t"}).json()
        assert "does not write to this run: it was not stopped" in refused["error"]
        with pytest.raises(subprocess.TimeoutExpired):
            victim.wait(0.5)
    finally:
        victim.kill()
        victim.wait()


SERVER = """
import sys, time
from cclsearch.cli import main
from cclsearch.ui import app, pages
app.IDLE_S = 1.0
shown = pages.Pages.nights
pages.Pages.nights = lambda *_: print("busy", flush=True) or time.sleep(600)
sys.exit(main(["ui", "--port", "0", "--allow-start"]))
"""


@pytest.fixture
def server(runs: Path) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """Port and process of a server whose page of nights never ends, and that closes idle connections after 1 s."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        yield int(re.search(r":(\d+)/", process.stdout.readline())[1]), process
    finally:
        process.kill()
        process.wait()


def connect(port: int, request: bytes, receive_bytes: int = 0) -> socket.socket:
    client = socket.socket()
    if receive_bytes:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.settimeout(20)
    client.connect(("127.0.0.1", port))
    client.sendall(request)
    return client


HEAD = b"GET %s HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /change/note HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900\r\nx-ccl-token: "


def test_ctrl_c_ends_the_server_while_a_page_is_stuck(server):
    port, process = server
    with connect(port, HEAD % b"/nights" + b"\r\n"):
        assert process.stdout.readline() == "busy\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=15) == 0


def is_closed(client: socket.socket) -> bool:
    """Whether the server has closed the connection; what it sent before is read first."""
    client.settimeout(0.05)
    try:
        return client.recv(65536) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_clients_that_send_or_read_nothing_are_let_go_and_streams_are_not(server):
    port, process = server
    half, silent = connect(port, HEAD % b"/" + b"X: "), connect(port, b"")
    after = connect(port, HEAD % b"/start" + b"\r\n" + HEAD % b"/")
    slow = connect(port, POST + b"t\r\n\r\n")
    stream = connect(port, HEAD % b"/events" + b"\r\n")
    deaf = connect(port, (HEAD % b"/static/charts.js" + b"\r\n") * 8, 2048)
    stream.settimeout(1)
    for client in (half, silent, after, slow):
        wait_until(lambda client=client: is_closed(client))
    wait_until(lambda: count_connections(process.pid, port) == 1)
    assert not is_closed(stream)
    for client in (half, silent, after, slow, stream, deaf):
        client.close()


def count_connections(pid: int, port: int) -> int:
    """Return how many connections the server holds."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(link)))
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] != "0A" and row[9] in inodes for row in rows)
