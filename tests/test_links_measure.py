"""Links measured for real: gloo between network namespaces with shaped links. Needs root; else it is skipped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.shaped_links import can_shape, shaped
from cclsearch.cli import main
from cclsearch.launch.profile import load_profile

pytestmark = pytest.mark.serial


def write_profile(project: Path, names: list[str], *, per_node: int = 1) -> None:
    folder = project / "launchers"
    folder.mkdir(exist_ok=True)
    (folder / "shaped.yaml").write_text(
        f"launcher: local\nnetwork_namespaces: [{', '.join(names)}]\nenvironment: {{OMP_NUM_THREADS: 1}}\n"
        f"namespaces_per_node: {per_node}\n"
        f"hardware: {{num_accelerators: {len(names)}, accelerators_per_node: {per_node}}}\n"
    )


@pytest.mark.skipif(not can_shape(), reason="needs root and ip, tc and network namespaces")
def test_a_slow_pair_is_measured_and_avoided(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert links is not None
    assert links.gbps[1][2] < 0.04
    times = {}
    for order in ("given", "links"):
        config = f"tp=1,dp=4,pp=1,micro_batch_size=4,activation_checkpointing=none,zero_stage=0,host_order={order}"
        command = ["predict", "-w", "tiny", "-l", "shaped", "--knob", "host_order=given,links", "--config", config]
        assert main([*command, "--json"]) == 0
        times[order] = json.loads(capsys.readouterr().out)["configurations"][0]["step_time_s"]
    assert times["links"] < times["given"] / 2
    assert main(["links", "show", "--launcher", "shaped"]) == 0
    assert f"{names[1]}:0 to {names[2]}:0" in capsys.readouterr().out.split("slowest pairs:")[1]


@pytest.mark.skipif(not can_shape(), reason="needs root and ip, tc and network namespaces")
def test_devices_of_one_node_are_ordered_by_their_links(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four namespaces stand for the devices of one node: 0-2 and 1-3 are fast, all other pairs slow."""
    rates = [[400.0 if (i + j) % 2 == 0 else 20.0 for j in range(4)] for i in range(4)]
    with shaped(rates) as names:
        write_profile(project, names, per_node=4)
        assert main(["links", "measure", "--launcher", "shaped", "--json"]) == 0
        measured = json.loads(capsys.readouterr().out)
        assert measured["nodes"] == [names[0]] * 4
        assert measured["endpoints"] == [f"{names[0]}:{k}" for k in range(4)]
        config = "tp=2,dp=2,pp=1,micro_batch_size=4,activation_checkpointing=none,zero_stage=0"
        seconds = {}
        for order in ("given", "links"):
            knobs = [f"--knob={each}" for each in (*config.split(","), f"device_order={order}")]
            assert main(["run", "-w", "tiny", "-l", "shaped", "--budget", "1", "--name", order, *knobs]) in (0, 1)
            capsys.readouterr()
            trial = project / "runs" / order / "trials" / "0001"
            assert main(["show", order, "1", "--json"]) == 0
            seconds[order] = json.loads(capsys.readouterr().out)["metrics"]["step_time_s"]
            if order == "links":
                said = (trial / "stdout.log").read_text()
                places = json.loads(said.split("places of the ranks: ")[1].split("\n")[0])
                assert {places[0] % 2, places[1] % 2} in ({0}, {1}), "tensor parallelism over a fast pair"
    assert seconds["links"] < seconds["given"] / 1.3


def test_what_cannot_be_measured_is_one_line(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["links", "show", "--launcher", "local"]) == 2
    assert "profile local has no measured links" in capsys.readouterr().err
    assert main(["links", "measure", "--launcher", "local"]) == 2
    assert "states no hardware.num_accelerators" in capsys.readouterr().err
    assert main(["links", "measure", "--launcher", "local", "--ranks", "1"]) == 2
    assert "--ranks must be at least 2" in capsys.readouterr().err
    assert main(["links", "import", "--launcher", "local"]) == 2
    assert "needs a CSV file" in capsys.readouterr().err
    write_profile(project, ["nosuchnamespace"])
    assert main(["links", "measure", "--launcher", "shaped", "--ranks", "2"]) == 2
    assert "the links were not measured" in capsys.readouterr().err


def test_an_imported_matrix_is_kept_with_the_profile(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "mine.csv").write_text("GB_s,a,b\na,,1\nb,2,\nlatency_us,a,b\na,,3\nb,4,\n")
    assert main(["links", "import", "mine.csv", "--launcher", "local"]) == 0
    assert "8 to 16 Gbit/s, from: imported from mine.csv" in capsys.readouterr().out
    assert (project / "launchers" / "local.links.csv").is_file()
    assert main(["links", "show", "--launcher", "local", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gbps"] == [[0.0, 8.0], [16.0, 0.0]]
