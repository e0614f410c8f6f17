"""The framework that docs/your-framework.md shows is ranked at once; its objective, too."""

from __future__ import annotations

import json
import re
from pathlib import Path

from command_line import run_command
from paths import ROOT

PAGE = (ROOT / "docs" / "your-framework.md").read_text()
BLOCKS = re.findall(r"```(?:yaml|python)\n(.*?)```", PAGE, re.DOTALL)


def test_the_smallest_framework_is_admitted_by_every_rule(project):
    framework, script, objective = BLOCKS
    for folder in ("launchers", "objectives"):
        (project / folder).mkdir()
    (project / "launchers" / "mytrain.framework.yaml").write_text(framework)
    (project / "launchers" / "mytrain.py").write_text(script)
    (project / "objectives" / "quality.yaml").write_text(objective)
    run = ["run", "--workload", "tiny", "--framework", "mytrain", "--set", "total_count=1", "--budget", "2"]
    call(project, *run, "--objective", "quality", "--name", "one", "--quiet")
    best = json.loads(call(project, "best", "one", "--json"))
    assert best["objective_figure"]["name"] == "my_quality"
    verdicts = json.loads(call(project, "admit", "one", "--json"))["trials"]
    broken = {v["rule"]: v["detail"] for trial in verdicts for v in trial["verdicts"] if v["ok"] is False}
    assert broken.keys() <= {"load", "spread"}, broken
    for part in (Path("trials") / "0001", Path("trials") / "0001" / "trace"):
        scored = call(project, "score", str(Path("runs") / "one" / part), "--metric", "tokens_per_s", "--metric", "mfu")
        assert "(--card)" not in scored, "the run has the card"
    seen = {v["rule"] for v in verdicts[0]["verdicts"] if v["ok"]}
    assert seen >= {"warmup", "steps", "ranks_traced", "trace_origin", "trace_time", "training_loss"}


def call(project: Path, *words: str) -> str:
    done = run_command(*words, cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_fields_of_a_policy_program_are_documented():
    from cclsearch.propose.agent.policy import inputs

    page = (ROOT / "docs" / "agent.md").read_text()
    named = set(re.findall(r"`(\w+)`", page))
    assert {*inputs.ARCH_FIELDS, *inputs.MOE_FIELDS} <= named
    source = Path(inputs.__file__).read_text()
    body = source[source.index("def environment_fields") : source.index("def history_records")]
    empty = {"network_topology", "driver_version", "framework_version"}
    assert set(re.findall(r'"(\w+)":', body)) - empty <= named
