"""Power limits and clocks as knobs: real processes, a recorded tree of RAPL's files, a simulated NVIDIA driver."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from paths import TESTS
from test_energy import powercap  # noqa: F401  a fixture
from trials import LAUNCHERS
from waiting import wait_until

from cclsearch.card.load import load_card
from cclsearch.core.errors import UserError
from cclsearch.launch.profile import profile_from_mapping
from cclsearch.plan.hardware import check_power_knobs
from cclsearch.report.launch_form import make_launch
from cclsearch.space.build import resolve_knobs
from cclsearch.space.framework import load_framework
from cclsearch.space.parse import parse_knob

SCRIPT = """
import sys, time
from pathlib import Path
from common import run_rank
def train(trial):
    Path(trial.folder / "runs").touch()
    how = (trial.folder / "how").read_text()
    if how == "raises":
        raise ValueError("trouble")
    if how == "waits":
        time.sleep(600)
sys.exit(run_rank(train))
"""


@pytest.fixture
def rapl(powercap: Path) -> Path:  # noqa: F811
    """The tree with limits of 150 W for each package, of which each allows 200 W."""
    for zone in ("intel-rapl:0", "intel-rapl:1"):
        for number, name, limit in ((0, "short_term", 180_000_000), (1, "long_term", 150_000_000)):
            for file, value in (("name", name), ("power_limit_uw", limit), ("max_power_uw", 200_000_000)):
                (powercap / zone / f"constraint_{number}_{file}").write_text(f"{value}\n")
    return powercap


def read_limits(rapl: Path) -> list[int]:
    """Watts of every limit in the tree: short and long term of package 0, then of package 1."""
    texts = [path.read_text() for path in sorted(rapl.glob("*/constraint_*_power_limit_uw"))]
    return [int(text or 0) // 1_000_000 for text in texts]  # empty for a moment: plain files stand for sysfs


FREE, CAPPED = [180, 150, 180, 150], [180, 90, 180, 90]


class Runs:
    """Starts run scripts with these knobs on one host."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder, self.environment = folder, environment

    def start(self, config: dict[str, Any], how: str = "ends", **data: Any) -> subprocess.Popen[str]:
        trial = self.folder / f"trial-{time.monotonic_ns()}"
        trial.mkdir()
        (trial / "config.json").write_text(json.dumps({"config": config, "accelerator": "cpu", **data}))
        (trial / "how").write_text(how)
        (trial / "script.py").write_text(SCRIPT)
        self.trial = trial
        environment = {
            **os.environ, "PYTHONPATH": str(LAUNCHERS), "CCL_CONFIG": str(trial / "config.json"),
            "CCL_TRIAL_DIR": str(trial), "CCL_POWER_RECORDS": str(self.folder / "records"), **self.environment,
        }  # fmt: skip
        command = [sys.executable, str(trial / "script.py")]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def await_start(self) -> None:
        wait_until(lambda: (self.trial / "runs").exists())

    @property
    def failure(self) -> dict[str, Any]:
        return dict(json.loads((self.trial / "failures" / "rank-00000.json").read_text()))


@pytest.mark.parametrize(
    ("how", "end", "code"),
    [("ends", None, 0), ("raises", None, 1), ("waits", signal.SIGTERM, -15), ("waits", signal.SIGKILL, -9)],
)
def test_limits_hold_during_a_trial_and_are_restored_whatever_ends_it(tmp_path, rapl, how, end, code):
    runs = Runs(tmp_path, CCL_POWERCAP=str(rapl))
    script = runs.start({"power_cap_w": 90}, how)
    if end is not None:
        runs.await_start()
        assert read_limits(rapl) == CAPPED, "the long-term limit of each package"
        script.send_signal(end)
    assert script.wait(30) == code
    wait_until(lambda: read_limits(rapl) == FREE)
    wait_until(lambda: not (tmp_path / "records" / "left.json").exists())


def test_what_a_killed_supervisor_left_is_restored_by_the_next_trial_even_without_the_knob(tmp_path, rapl):
    runs = Runs(tmp_path, CCL_POWERCAP=str(rapl))
    script = runs.start({"power_cap_w": 90}, "waits")
    runs.await_start()
    children = Path(f"/proc/{script.pid}/task/{script.pid}/children").read_text().split()
    (supervisor,) = [int(child) for child in children if b"power_caps" in Path(f"/proc/{child}/cmdline").read_bytes()]
    os.kill(supervisor, signal.SIGKILL)
    script.kill()
    script.wait(30)
    assert read_limits(rapl) == CAPPED
    assert runs.start({"micro_batch_size": 1}).wait(30) == 0
    assert read_limits(rapl) == FREE
    assert not (tmp_path / "records" / "left.json").exists()


def test_a_second_trial_on_the_node_does_not_change_what_the_first_holds(tmp_path, rapl):
    runs = Runs(tmp_path, CCL_POWERCAP=str(rapl))
    first = runs.start({"power_cap_w": 90}, "waits")
    runs.await_start()
    second = runs.start({"power_cap_w": 60})
    assert second.wait(30) == 1
    assert runs.failure["message"].endswith("another trial on this node holds its devices at a power limit or clock")
    assert runs.start({"micro_batch_size": 1}).wait(30) == 0, "a trial without the knob is not concerned"
    assert read_limits(rapl) == CAPPED
    first.terminate()
    first.wait(30)
    wait_until(lambda: read_limits(rapl) == FREE)


@pytest.mark.parametrize(
    ("config", "kind", "words"),
    [
        ({"power_cap_w": 900}, "illegal_config", "power_cap_w 900 is above the 200 W of intel-rapl:0"),
        ({"gpu_clock_mhz": 1000}, "illegal_config", "gpu_clock_mhz: a processor is not a GPU"),
    ],
)
def test_what_a_processor_cannot_do_is_refused_in_one_line(tmp_path, rapl, config, kind, words):
    runs = Runs(tmp_path, CCL_POWERCAP=str(rapl))
    assert runs.start(config).wait(30) == 1
    assert (runs.failure["kind"], runs.failure["message"].split(": ", 1)[1]) == (kind, words)
    assert read_limits(rapl) == FREE
    assert not (runs.trial / "runs").exists(), "nothing ran"


def test_a_host_without_limits_fails_as_a_missing_requirement(tmp_path):
    runs = Runs(tmp_path, CCL_POWERCAP=str(tmp_path / "none"))
    assert runs.start({"power_cap_w": 90}).wait(30) == 1
    assert runs.failure["kind"] == "launcher"
    assert "no processor package has a power limit" in runs.failure["message"]


def test_limits_that_may_not_be_written_are_a_missing_requirement(tmp_path, rapl):
    path = rapl / "intel-rapl:1" / "constraint_1_power_limit_uw"
    readable = path.read_text()
    path.unlink()
    path.symlink_to("/proc/self/mountinfo")  # readable; writing it is refused, also to root
    (rapl / "intel-rapl:1" / "constraint_1_name").write_text("long_term")
    assert readable
    runs = Runs(tmp_path, CCL_POWERCAP=str(rapl))
    assert runs.start({"power_cap_w": 90}).wait(30) == 1
    assert runs.failure["kind"] == "launcher"
    assert "power_cap_w cannot be set" in runs.failure["message"]
    assert int((rapl / "intel-rapl:0" / "constraint_1_power_limit_uw").read_text()) == 150_000_000


@pytest.fixture
def gpus(tmp_path: Path) -> tuple[Runs, Path]:
    """A host with two GPUs at 700 W whose clocks are not locked, and the file that shows what is set."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler for the simulated driver")
    source, library = (TESTS / "fake_nvml.c"), tmp_path / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    state = tmp_path / "gpus"
    state.write_text("700000 700000 0 0\n")
    return Runs(tmp_path, LD_LIBRARY_PATH=str(tmp_path), FAKE_NVML=str(state)), state


def test_gpus_are_set_and_restored(gpus):
    runs, state = gpus
    script = runs.start({"power_cap_w": 400, "gpu_clock_mhz": 1200}, "waits", accelerator="h100")
    runs.await_start()
    assert state.read_text() == "400000 400000 1200 1200\n"
    script.kill()
    wait_until(lambda: state.read_text() == "700000 700000 0 0\n")
    said = script.communicate(timeout=30)[0]
    assert "power: GPU-0 400 W, GPU-0 1200 MHz, GPU-1 400 W, GPU-1 1200 MHz" in said


def test_only_the_gpus_that_the_trial_sees_are_set(gpus):
    runs, state = gpus
    runs.environment["CUDA_VISIBLE_DEVICES"] = "GPU-1"
    script = runs.start({"power_cap_w": 400}, "waits", accelerator="h100")
    runs.await_start()
    assert state.read_text() == "700000 400000 0 0\n"
    script.terminate()
    wait_until(lambda: state.read_text() == "700000 700000 0 0\n")
    runs.environment["CUDA_VISIBLE_DEVICES"] = "MIG-5"
    assert runs.start({"power_cap_w": 400}, accelerator="h100").wait(30) == 1
    assert "a part of a GPU (MIG) has no power limit" in runs.failure["message"]


def test_gpus_that_may_not_be_set_or_cannot_be_set_so_are_refused(gpus):
    runs, state = gpus
    assert runs.start({"power_cap_w": 100}, accelerator="h100").wait(30) == 1
    assert runs.failure["kind"] == "illegal_config"
    assert "power_cap_w 100 is outside the 200 to 700 W of GPU-0" in runs.failure["message"]
    runs.environment["FAKE_NVML_ROOT"] = "0"
    assert runs.start({"gpu_clock_mhz": 1200}, accelerator="h100").wait(30) == 1
    assert runs.failure["kind"] == "launcher"
    assert "nvmlDeviceSetGpuLockedClocks: no permission; root may set it" in runs.failure["message"]
    assert state.read_text() == "700000 700000 0 0\n"


PROFILE = {"launcher": "local", "allow_power_caps": True}


@pytest.mark.parametrize(
    ("framework", "knob", "profile", "message"),
    [
        ("cpu", "power_cap_w=90", {"launcher": "local"}, "does not allow it: add `allow_power_caps: true`"),
        ("cpu", "gpu_clock_mhz=900", PROFILE, "knob 'gpu_clock_mhz': cpu is not a gpu"),
        ("cpu", "power_cap_w=90,-5", PROFILE, "takes default or whole numbers from 1 to 100000, not -5"),
        ("links-probe", "power_cap_w=90", PROFILE, "the run script of 'links-probe' does not set it"),
        ("cpu", "power_cap_w=default,90", PROFILE, None),
    ],
)
def test_a_search_sets_power_only_if_profile_script_and_devices_allow_it(framework, knob, profile, message):
    card, found = load_card("tiny"), load_framework(framework)
    knobs = resolve_knobs(card, found, [parse_knob(knob)])
    where = profile_from_mapping(profile, name="mine")
    if message is None:
        check_power_knobs(card, found, knobs, where)
        return
    with pytest.raises(UserError, match=message):
        check_power_knobs(card, found, knobs, where)


def test_the_command_refuses_the_knob_in_one_line(project, cli):
    (project / "launchers").mkdir()
    (project / "launchers" / "mine.yaml").write_text("launcher: local\nknobs: [{name: power_cap_w, choices: [90]}]\n")
    error = cli.err(["run", "-w", "tiny", "-l", "mine", "-b", "1"])
    assert error.count("\n") == 1
    assert "add `allow_power_caps: true`" in error


def test_the_launch_by_hand_says_how_to_set_the_same():
    card = load_card("wl1-inference")
    form = make_launch(card, "vllm", {"tp": 4, "power_cap_w": 400, "gpu_clock_mhz": 1200})
    assert form.notes[0] == "Before it, as root on each node: nvidia-smi -pl 400."
    assert form.notes[1] == "Before it, as root on each node: nvidia-smi -lgc 1200."
