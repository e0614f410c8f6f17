"""The root failure in logs of many launchers and libraries, and what each pattern is for."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cclsearch.core.errors import UserError
from cclsearch.core.values import FailureKind
from cclsearch.launch import fault_rules, log_reader
from cclsearch.launch.fault_rules import CLASSES, FaultRules, add_phrases, compile_rules, read_refusals, shipped_rules
from cclsearch.launch.log_reader import LogReader, read_log, read_logs

HERE = Path(__file__).parent
LOGS: list[dict[str, Any]] = yaml.safe_load((HERE / "failure_logs.yaml").read_text())
LINES: dict[str, list[str]] = yaml.safe_load((HERE / "failure_lines.yaml").read_text())
DATA: dict[str, Any] = yaml.safe_load(Path(fault_rules.__file__).with_name("faults.yaml").read_text())
LABELS = {
    "srun --label": ("{}: ", 37),
    "srun --label over torch": ("{}: [rank{}]: ", 37),
    "torchrun --tee": ("[trainer{}|5]:", 37),
    "torch of 2024": (
        "[rank{}]:[E922 19:07:21.891247234 ProcessGroupNCCL.cpp:1870] [PG ID 0 PG GUID 0(tp) Rank 5] ",
        37,
    ),
    "mpirun --tag-output": ("[1,{}]<stderr>: ", 37),
    "pdsh": ("gpu-b07: [rank{}]: ", 37),
    "Ray": ("(Worker pid=77, ip=10.0.0.9) [rank{}]: ", 37),
    "kubectl": ("2026-01-05T10:00:00.123456789Z stderr F [rank{}]: ", 37),
    "colours": ("\x1b[36m(Worker rank={} pid=77)\x1b[0m ", 37),
}


def explain(case: dict[str, Any], rules: FaultRules | None = None) -> str:
    """What is wrong in the answer to a case; empty if nothing is."""
    found, want = read_log(case["log"], rules), case["want"]
    if found is None:
        return "no failure was found"
    got = {"kind": found.kind.value, "rank": found.rank, "node": found.node, "bad_node": found.blames_node}
    wrong = {name: got[name] for name in got if got[name] != want.get(name, False if name == "bad_node" else got[name])}
    says = want.get("says", "")
    is_said = found.message.startswith(says[1:]) if says.startswith("^") else says in found.message
    return f"{wrong or ''} {'' if is_said else found.message}".strip()


@pytest.mark.parametrize("case", LOGS, ids=lambda case: case["id"])
def test_the_root_failure_of_a_log_is_found(case):
    assert not explain(case)


def test_each_log_has_a_public_source_and_a_name_of_its_own():
    assert len({case["id"] for case in LOGS}) == len(LOGS) > 75
    assert all(re.match(r"https?://|[\w.-]+/[\w.-]+#\d+", case["from"]) for case in LOGS)


@pytest.mark.parametrize("label", LABELS)
def test_a_label_of_a_launcher_hides_no_line(label):
    form, rank = LABELS[label]
    for name, lines in LINES.items():
        for line in lines:
            found = read_log(f"step 1\n{form.format(rank, rank)}{line}\n[rank2]: step 2\n")
            assert found is not None, line
            assert (found.fault.name, found.rank) == (name, rank), line


def test_running_out_of_memory_is_never_called_anything_else():
    others = [line for name, lines in LINES.items() if CLASSES[name].level > 0 for line in lines]
    for line in LINES["out_of_memory"]:
        text = "\n".join((*others, f"[rank5]: {line}", *others))
        assert read_log(text).kind is FailureKind.OUT_OF_MEMORY, line


def test_a_cause_counts_before_its_consequences_in_any_order():
    chance = random.Random(7)
    for name in ("node", "crashed", "communication"):
        later = [x for other, lines in LINES.items() if CLASSES[other].level > CLASSES[name].level for x in lines]
        for line in LINES[name]:
            mixed = [line, *chance.sample(later, 12)]
            if CLASSES[name].level < 2:
                chance.shuffle(mixed)
            assert read_log("\n".join(mixed)).fault.name == name, line


def needed_by(rules: FaultRules, row: str) -> bool:
    """Whether a log or a line is read wrongly without the row."""
    pattern = re.compile(row, re.IGNORECASE | re.MULTILINE)
    is_fault = any(row == other[0] for rows in DATA["faults"].values() for other in rows)
    if any(explain(case, rules) for case in LOGS if not is_fault or pattern.search(case["log"])):
        return True
    lines = [(name, line) for name, lines in LINES.items() for line in lines if pattern.search(line)]
    return any((found := read_log(line, rules)) is None or found.fault.name != name for name, line in lines)


def mutants() -> list[tuple[str, dict[str, Any]]]:
    found = []
    for part in ("prefixes", "places", "ignored"):
        for row in DATA[part]:
            found.append((row[0], DATA | {part: [r for r in DATA[part] if r is not row]}))
    for name, rows in DATA["faults"].items():
        for row in rows:
            found.append((row[0], DATA | {"faults": DATA["faults"] | {name: [r for r in rows if r is not row]}}))
    return found


def test_each_pattern_is_needed_by_a_log_and_names_its_source():
    idle = [row for row, data in mutants() if not needed_by(compile_rules(data), row)]
    assert not idle
    rows = [
        *DATA["prefixes"],
        *DATA["places"],
        *DATA["ignored"],
        *(row for rows in DATA["faults"].values() for row in rows),
    ]
    assert all(len(row) == 2 and len(row[1]) > 5 for row in rows)


def test_no_pattern_can_take_longer_than_its_line():
    rows = [
        *DATA["prefixes"],
        *DATA["places"],
        *DATA["ignored"],
        *(row for rows in DATA["faults"].values() for row in rows),
    ]
    assert not [row[0] for row in rows if re.search(r"(?<!\\)\.[*+]|[*+]\)[*+]", row[0])]


LONG = {
    "ordinary": lambda n: [f"[rank{i % 64}]: step {i} loss {i * 0.37:.4f}" for i in range(n)],
    "tracebacks": lambda n: [
        line
        for i in range(n // 3)
        for line in (f"[rank{i % 64}]: Traceback (most recent call last):", '[rank1]:   File "t.py"', "ValueError: x")
    ],
    "reports": lambda n: [f"srun: error: n{i}: task {i}: Exited with exit code 1" for i in range(n)],
    "one line": lambda n: ["out of memor " * (3 * n)],
    "labels": lambda n: ["0: " * n + "error"],
}


@pytest.mark.parametrize("kind", LONG)
def test_the_work_grows_with_the_log_and_not_faster(tmp_path, kind):
    def count(lines: list[str]) -> tuple[int, int]:
        path = tmp_path / "stderr.log"
        path.write_text("\n".join(lines))
        readers: list[LogReader] = []
        read_logs([path], make=lambda: readers.append(LogReader(shipped_rules())) or readers[-1])
        return readers[0].examined_chars, path.stat().st_size

    work, size = count(LONG[kind](3000))
    more, larger = count(LONG[kind](12000))
    assert work <= size
    assert more <= larger
    assert more <= 1.1 * work * larger / size + 10_000


def test_memory_does_not_grow_with_the_ranks_of_a_log(monkeypatch):
    monkeypatch.setattr(log_reader, "MAX_STREAMS", 100)
    reader = LogReader(shipped_rules())
    for i in range(1000):
        reader.feed(f"[rank{i}]: RuntimeError:")
    assert len(reader.streams) <= 101


def test_a_project_adds_phrases_of_its_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ccl-search.yaml").touch()
    (tmp_path / "faults.yaml").write_text("out_of_memory: [pool is dry]\nignored: [harmless]\nnode: [tray 7 is wet]\n")
    assert read_log("E: the POOL is dry\n").kind is FailureKind.OUT_OF_MEMORY
    assert read_log("RuntimeError: harmless, and out of memory\n") is None
    assert read_log("tray 7 is wet\n").blames_node


@pytest.mark.parametrize(
    ("text", "words"), [("oom: [a]", "'oom' must be one of out_of_memory"), ("node: a", "node must be a list of texts")]
)
def test_a_wrong_phrase_is_refused_by_name(text, words):
    with pytest.raises(UserError, match=re.escape(words)):
        add_phrases(shipped_rules(), yaml.safe_load(text), "faults.yaml")


@pytest.mark.parametrize(
    ("service", "text", "means", "remedy"),
    [
        (
            "slurm",
            "Cannot find GPU specification, ... in a GPU partition, partition: gpu",
            "final",
            "gpu_request: gres",
        ),
        ("slurm", "sbatch: unrecognized option '--gpus-per-node=8'", "final", "gpu_request: gres"),
        ("slurm", "Invalid generic resource (gres) specification", "final", "`gpu_type`"),
        ("slurm", "Requested reservation is invalid", "final", "`reservation`"),
        ("slurm", "Requested time limit is invalid (missing or exceeds some limit)", "final", "`time_limit`"),
        ("slurm", "Invalid feature specification", "final", "`constraint`"),
        ("slurm", "Incompatible versions of client and server code", "final", "another version"),
        ("slurm", "RPC rate limit exceeded for user 1000, per minute", "temporary", ""),
        ("gcloud", "Quota exceeded for quota metric 'CreateNode' and limit 'CreateNode per minute'", "temporary", ""),
        ("gcloud", "Quota limit 'TPUV6EPerProject' has been exceeded. Limit: 0 in region us-east5.", "final", ""),
        ("gcloud", "NOT_FOUND: Reservation not found", "final", ""),
        ("gcloud", "There is no more capacity in the zone; quota is not the reason", "temporary", ""),
        ("gcloud", "NOT_FOUND: node n1 was not found", "not_found", ""),
        ("ssh", "user@host: Permission denied (publickey).", "final", ""),
    ],
)
def test_a_refusal_has_a_meaning_and_a_remedy(service, text, means, remedy):
    first = read_refusals(service, text)[0]
    assert first.means == means
    assert remedy in first.remedy
