"""Secrets that a job prints and writes wherever it can are in no file, page, export, prompt or message of a search."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote

import pytest
import yaml
from chat import open_chat
from examples_of_patterns import list_branches, make_example
from llm.players import Expert
from llm.server import KEY, MODEL, Reaction, Say, serve
from paths import TESTS
from report_pages import unpack_charts
from test_redact import KEY_LINES, RANDOM, SECRET_TEXTS

from cclsearch.cli import main
from cclsearch.core.secrets import redact as redact_module
from cclsearch.core.secrets.redact import SECRET_NAME, is_secret_name
from cclsearch.propose.agent.providers.types import CompletionRequest

LAUNCHERS = TESTS / "secrets" / "launchers"
RULES = yaml.safe_load((Path(redact_module.__file__).parent / "secret_formats.yaml").read_text("utf-8"))


def make_names() -> tuple[str, ...]:
    """A name of a variable for every alternative of `SECRET_NAME`, and some for each that has alternatives itself."""
    names: set[str] = set()
    for branch in list_branches(SECRET_NAME.pattern):
        made = [make_example(branch, Random(f"{branch} {n}")).upper().replace("-", "_") for n in range(4)]
        found = {name for part in made for name in (part, f"MY_{part}", f"MY{part}") if is_secret_name(name)}
        assert found, f"no name for {branch}"
        names |= set(sorted(found)[:3])
    return tuple(sorted(names))


NAMES = ("MY_SERVICE_TOKEN", "DB_PASS", "OPENAI_KEY_1", "SENTRY_DSN", "X_CONNECTION_STRING", "SSH_PRIVATE_KEY")
NAMES = tuple(dict.fromkeys((*NAMES, *make_names())))


def value_of(name: str) -> str:
    """A value without any format, by which nothing but the environment makes it known."""
    return "word-" + hashlib.sha256(name.encode()).hexdigest()[:30] + "/end"


def make_formats() -> list[tuple[str, str]]:
    """For every rule of `secret_formats.yaml`: what is before a secret, and a secret."""
    random = Random(17)
    return [
        (
            "https://" * ("keep" in rule) + make_example(rule.get("keep", ""), random),
            make_example(rule["secret"], random),
        )
        for rule in RULES
    ]


def plant() -> tuple[str, list[str]]:
    """Return a text with secrets, by name, by format, and coded, and what of it may be found nowhere."""
    marks = [hashlib.sha256(text.encode()).hexdigest()[:32] for text in SECRET_TEXTS]
    shaped = [text.replace(RANDOM, mark) for text, mark in zip(SECRET_TEXTS, marks, strict=True)]
    values = [value_of(name) for name in NAMES]
    coded = [form for value in values for form in (base64.b64encode(value.encode()).decode(), quote(value, safe=""))]
    first = "hf_" + marks[0]
    formats = make_formats()
    lines = [
        first,
        *(f"a {before}{secret} b" for before, secret in formats),
        *(f"said {value} twice" for value in values),
        *(f"x {form}" for form in coded),
        *shaped,
        *KEY_LINES,
    ]
    lasting = [secret[-12:] for _, secret in formats]  # what is before the secret, or its prefix, may stay
    return "\n".join(lines) + "\n", [
        *lasting,
        *marks,
        *values,
        *(form.rstrip("=")[:-2] for form in coded),
        *KEY_LINES[1:-1],
    ]


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    with open_chat(secret=KEY) as opened:
        monkeypatch.setenv("NIGHT_HOOK", opened.url)
        yield opened.bodies


def search(name: str) -> list[str]:
    """Run a search with an LLM behind a local server; returns the prompts."""
    expert = Expert()

    def script(request: CompletionRequest) -> Reaction:
        return Say(tuple((call.name, call.arguments) for call in expert.ask(request).calls))

    with serve(script) as server:
        words = ["run", "-w", "tiny", "--framework", "leaky", "--launcher", "leaky", "--budget", "4", "--keep-going"]
        assert main([*words, "--llm", f"{server.url}/v1#{MODEL}", "--name", name]) in (0, 1)
        assert server.requests
        return [json.dumps(body) for body in server.bodies]


def read_all(folder: Path) -> dict[str, str]:
    """Each file under a folder, unpacked, with its name; coded forms may be split over JSON strings, not over files."""
    found = {}
    for path in (path for path in folder.rglob("*") if path.is_file()):
        data = path.read_bytes()
        content = gzip.decompress(data) if path.suffix == ".gz" else data
        text = content.decode("utf-8", "replace")
        charts = unpack_charts(text) if path.suffix == ".html" else ""
        assert charts or path.suffix != ".html" or "packed-charts" not in text
        found[path.relative_to(folder).as_posix()] = f"{path.name}\n{text}\n{charts}"
    return found


def test_what_a_job_leaks_is_found_nowhere(project, chat, monkeypatch, capsys):
    text, secrets = plant()
    monkeypatch.setenv("CCL_SEARCH_LLM_API_KEY", KEY)
    for name in NAMES:
        monkeypatch.setenv(name, value_of(name))
    shutil.copytree(LAUNCHERS, project / "launchers")
    (project / "launchers" / "planted.txt").write_text(text)
    outputs: dict[str, str] = {f"prompt {number}": body for number, body in enumerate(search("r"))}
    job: dict[str, Any] = {"workload": "tiny", "framework": "leaky", "launcher": "leaky", "name": "n"}
    night = {"webhook_env": "NIGHT_HOOK", "jobs": [{**job, "budget": {"trials": 1}}]}
    (project / "nightly.yaml").write_text(json.dumps(night))
    main(["nightly", "nightly.yaml", "--once"])
    assert chat
    outputs |= {f"message {number}": body.decode() for number, body in enumerate(chat)}
    commands = [["status", "r", "--json"], *([word, "r"] for word in ("report", "status", "best", "admit", "resume"))]
    commands += [["show", "r", trial, *more] for trial in "123" for more in ([], ["--json"])]
    commands += [["export", "r", "--to", form] for form in ("csv", "parquet", "optuna")]
    commands += [["export", "r", "--to", "ccl-bench", "--trials", "all"], ["replay-turns", "r", "--json"]]
    codes = {" ".join(command): main(command) for command in commands}
    assert [name for name, code in codes.items() if code not in (0, 1)] == []
    shown = capsys.readouterr()
    outputs |= {"stdout": shown.out, "stderr": shown.err, **read_all(project / "runs")}
    found = {where: [secret for secret in secrets if secret in content] for where, content in outputs.items()}
    assert {where: leaked for where, leaked in found.items() if leaked} == {}
    traces = [path for path in outputs if path.startswith("r/trials") and "/trace/rank" in path]
    assert traces, "evidence is kept"
    assert "[secret]" in outputs["r/trials/0001/stdout.log"]
    assert "export PLANTED=" in outputs["stdout"], "the launch that the script states is printed"
