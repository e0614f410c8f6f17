"""Links measured for real: gloo between network namespaces with shaped links. Needs root; else it is skipped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.shaped_links import can_shape, shaped
from cclsearch.cli import main
from cclsearch.launch import network_namespaces
from cclsearch.launch.profile import load_profile


def write_profile(project: Path, names: list[str]) -> None:
    folder = project / "launchers"
    folder.mkdir(exist_ok=True)
    (folder / "shaped.yaml").write_text(
        f"launcher: local\nnetwork_namespaces: [{', '.join(names)}]\nenvironment: {{OMP_NUM_THREADS: 1}}\n"
        f"hardware: {{num_accelerators: {len(names)}, accelerators_per_node: 1}}\n"
    )


@pytest.mark.skipif(not can_shape(), reason="needs root and ip, tc and network namespaces")
def test_a_slow_pair_is_measured_and_avoided(project, capsys, cli):
    rates = [[200.0] * 4 for _ in range(4)]
    rates[1][2] = rates[2][1] = 20.0
    with shaped(rates) as names:
        write_profile(project, names)
        assert main(["links", "measure", "--launcher", "shaped", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["endpoints"] == [f"{name}:0" for name in names]
    for i in range(4):
        for j in range(4):
            if i != j:
                assert measured["gbps"][i][j] == pytest.approx(rates[i][j] / 1000, rel=0.6)
    _, seconds, expected = measured["all_reduce"][-1]
    assert seconds == pytest.approx(expected, rel=0.5)
    links = load_profile("shaped").hardware.links
    assert links.gbps[1][2] < 0.04
    times = {}
    for order in ("given", "links"):
        config = f"tp=1,dp=4,pp=1,micro_batch_size=4,activation_checkpointing=none,zero_stage=0,host_order={order}"
        command = ["predict", "-w", "tiny", "-l", "shaped", "--knob", "host_order=given,links", "--config", config]
        times[order] = cli.json([*command, "--json"])["configurations"][0]["step_time_s"]
    assert times["links"] < times["given"] / 2
    assert main(["links", "show", "--launcher", "shaped"]) == 0
    assert f"{names[1]}:0 to {names[2]}:0" in capsys.readouterr().out.split("slowest pairs:")[1]


SAY = """
import json, os, subprocess
address = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout.split()[0]
names = "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "CCL_NODE_NAME"
with open(f"{os.environ['OUT']}/{os.environ['RANK']}", "w") as file:
    json.dump([address, *(os.environ[name] for name in names)], file)
"""


@pytest.mark.skipif(not can_shape(), reason="needs root and ip, tc and network namespaces")
def test_namespaces_are_the_devices_of_a_node(tmp_path):
    """Two nodes of two namespaces; the ranks of the first node are on its devices 1 and 0."""
    (tmp_path / "say.py").write_text(SAY)
    with shaped([[100.0] * 4 for _ in range(4)]) as names:
        words = ["ranks=4", "per_node=2", "namespaces_per_node=2", "places=1,0,3,2", f"namespaces={','.join(names)}"]
        command = [sys.executable, network_namespaces.__file__, str(tmp_path / "say.py"), *words]
        assert subprocess.run(command, env={**os.environ, "OUT": str(tmp_path)}, check=False).returncode == 0
    said = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(4)]
    assert [each[0] for each in said] == ["10.201.0.2", "10.201.0.1", "10.201.0.4", "10.201.0.3"]
    assert [each[1:4] for each in said] == [["0", "2", "0"], ["1", "2", "0"], ["0", "2", "1"], ["1", "2", "1"]]
    assert [each[4] for each in said] == [names[0], names[0], names[2], names[2]]


def test_what_cannot_be_measured_is_one_line(project, cli):
    assert "profile local has no measured links" in cli.err(["links", "show", "--launcher", "local"])
    assert "states no hardware.num_accelerators" in cli.err(["links", "measure", "--launcher", "local"])
    assert "--ranks must be at least 2" in cli.err(["links", "measure", "--launcher", "local", "--ranks", "1"])
    assert "the following arguments are required: FILE" in cli.err(["links", "import", "--launcher", "local"])
    write_profile(project, ["nosuchnamespace"])
    assert "the links were not measured" in cli.err(["links", "measure", "--launcher", "shaped", "--ranks", "2"])


def test_an_imported_matrix_is_kept_with_the_profile(project, capsys, cli):
    (project / "mine.csv").write_text("GB_s,a,b\na,,1\nb,2,\nlatency_us,a,b\na,,3\nb,4,\n")
    assert main(["links", "import", "mine.csv", "--launcher", "local"]) == 0
    assert "8 to 16 Gbit/s, from: imported from mine.csv" in capsys.readouterr().out
    assert (project / "launchers" / "local.links.csv").is_file()
    assert cli.json(["links", "show", "--launcher", "local", "--json"])["gbps"] == [[0.0, 8.0], [16.0, 0.0]]
