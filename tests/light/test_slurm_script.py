"""What a Slurm profile may contain, and the job script that it makes."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from cclsearch.core.content import list_profiles
from cclsearch.core.errors import UserError
from cclsearch.launch.profile import load_profile, make_launcher, profile_from_mapping
from cclsearch.launch.slurm import by_hand
from cclsearch.launch.slurm.allocation import AllocationLauncher
from cclsearch.launch.slurm.launcher import SlurmLauncher
from cclsearch.launch.slurm.script import (
    choose_shape,
    container_prefix,
    mounted_folders,
    node_command,
    render_script,
    srun_arguments,
)
from cclsearch.launch.slurm.settings import SlurmSettings, read_minutes

GOLDEN = """\
#!/bin/bash

# Parameters
#SBATCH --account=m1234_g
#SBATCH --chdir='/runs/a b/slurm-a1'
#SBATCH --comment='ccl-search run=r trial=1 attempt=1'
#SBATCH --constraint='gpu&hbm80g'
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --export=ALL
#SBATCH --gres=gpu:a100:4
#SBATCH --job-name=r-t0001-a1
#SBATCH --licenses=scratch:1
#SBATCH --no-requeue
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
#SBATCH --partition=gpu
#SBATCH --qos=regular
#SBATCH --time=12

# setup
type module >/dev/null 2>&1 || . /etc/profile
module load cuda/12.4 'odd name' || exit 96
source /shared/venv/bin/activate

# command
export SUBMITIT_EXECUTOR=slurm
exec /shared/python '/runs/a b/node.py' batch '/runs/a b/jobs.json'
"""


def test_the_script_of_a_profile_with_every_option():
    settings = SlurmSettings.model_validate(
        {
            "partition": "gpu",
            "account": "m1234_g",
            "qos": "regular",
            "constraint": "gpu&hbm80g",
            "gpu_request": "gres",
            "gpu_type": "a100",
            "cpus_per_task": 64,
            "exclusive": True,
            "modules": ["cuda/12.4", "odd name"],
            "setup": ["source /shared/venv/bin/activate"],
            "options": {"licenses": "scratch:1"},
        }
    )
    text = render_script(
        choose_shape(10, 4, 600, settings),
        settings,
        name="r-t0001-a1",
        comment="ccl-search run=r trial=1 attempt=1",
        folder=Path("/runs/a b/slurm-a1"),
        command=node_command("/shared/python", Path("/runs/a b/node.py"), "batch", Path("/runs/a b/jobs.json")),
    )
    assert text == GOLDEN
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_an_array_writes_one_log_per_task_and_requests_no_gpus_if_cpu_only():
    settings = SlurmSettings(cpu_only=True)
    shape = choose_shape(4, 2, 60, settings)
    text = render_script(shape, settings, name="r-x3", comment="c", folder=Path("/r"), command="true", array_size=3)
    lines = text.splitlines()
    assert "#SBATCH --array=0-2%3" in lines
    assert "#SBATCH --output=slurm-%A_%a.log" in lines
    assert not [line for line in lines if "gpu" in line or "wckey" in line or "signal" in line]


@pytest.mark.parametrize(
    ("ranks", "per_node", "whole", "nodes", "gpus"),
    [(16, 4, True, 4, 4), (2, 8, True, 1, 8), (2, 8, False, 1, 2), (9, 4, True, 3, 4), (9, 4, False, 3, 4)],
)
def test_a_trial_requests_the_nodes_that_its_ranks_need(ranks, per_node, whole, nodes, gpus):
    shape = choose_shape(ranks, per_node, 1200, SlurmSettings(whole_nodes=whole, time_limit=30))
    assert (shape.nodes, shape.gpus_per_node, shape.time_min) == (nodes, gpus, 22)


def test_no_trial_requests_more_time_than_the_profile_allows():
    assert choose_shape(1, 1, 36000, SlurmSettings(time_limit=30)).time_min == 30


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("30", 30), ("02:00:00", 120), ("1-12:00:00", 2160), ("10:30", 11), ("2-0", 2880), (45, 45), ("1-02:30", 1590)],
)
def test_slurms_time_formats(text, minutes):
    assert read_minutes(text) == minutes


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("partition", "gpu\n#SBATCH --wrap=evil"),
        ("account", "-A other"),
        ("qos", ""),
        ("constraint", "a\x00b"),
        ("time_limit", "soon"),
        ("setup", ["echo one\necho two"]),
        ("modules", ["--help"]),
        ("options", {"job-name": "mine"}),
        ("options", {"--licenses": "x"}),
        ("options", {"licenses": "x\ny"}),
        ("options", {"wait": True}),
        ("options", {"clusters": "other"}),
        ("options", {"M": "other"}),
        ("srun_options", ["rm -rf /"]),
        ("container", {"runtime": "docker", "image": "x"}),
        ("container", {"runtime": "apptainer", "image": "-x"}),
        ("max_jobs", 0),
        ("gpus_per_node", 0),
        ("no_such_field", 1),
    ],
)
def test_a_field_that_could_inject_options_is_refused(field, value):
    profile = profile_from_mapping({"launcher": "slurm", "framework": "cpu", field: value}, name="mine")
    with pytest.raises(UserError, match=field):
        make_launcher(profile)


@pytest.mark.parametrize(
    "environment", [{"HF_TOKEN": "hf_abcdefghijklmnopqrstuv"}, {"A B": "1"}, {"X": "one\ntwo"}, {"MY_API_KEY": "x"}]
)
def test_an_environment_with_a_secret_or_bad_name_is_refused(environment):
    with pytest.raises(UserError, match="environment"):
        profile_from_mapping({"launcher": "slurm", "environment": environment}, name="mine")


@pytest.mark.parametrize("name", ["slurm-generic", "perlmutter", "h100-8"])
def test_the_shipped_profiles_are_valid(name):
    assert name in list_profiles()
    launcher = make_launcher(load_profile(name), framework="megatron")
    assert isinstance(launcher, SlurmLauncher)
    assert launcher.settings.time_limit == 30


def test_a_held_allocation_has_its_own_launcher_class():
    profile = profile_from_mapping({"launcher": "slurm", "framework": "cpu", "in_allocation": 77}, name="mine")
    launcher = make_launcher(profile)
    assert isinstance(launcher, AllocationLauncher)
    assert launcher.allocation == "77"


@pytest.mark.parametrize(
    ("runtime", "head"),
    [
        ("apptainer", ("apptainer", "exec", "--bind=/runs:/runs", "--bind=/d:/d", "--nv", "i.sif")),
        ("shifter", ("shifter", "--image=i.sif", "--volume=/runs:/runs", "--volume=/d:/d", "--nv")),
        ("pyxis", ()),
    ],
)
def test_each_container_runtime_gets_its_own_command(runtime, head):
    fields: dict[str, Any] = {"runtime": runtime, "image": "i.sif", "mounts": ["/d:/d"], "arguments": ["--nv"]}
    settings = SlurmSettings.model_validate({"container": fields, "cpus_per_task": 8})
    assert container_prefix(settings, [Path("/runs")], {"CCL_TP": "2"}) == head
    words = srun_arguments(settings, [Path("/runs")])
    assert "--cpus-per-task=8" in words
    assert ("--container-image=i.sif" in words) is (runtime == "pyxis")
    assert (settings.default_python(), settings.default_host_python()) == ("python3", "python3")


def test_a_container_mounts_trials_run_script_and_scratch_once_each():
    fields = {"container": {"runtime": "pyxis", "image": "i", "mounts": ["/other:/repo/launchers"]}, "scratch": "/s/me"}
    settings = SlurmSettings.model_validate(fields)
    folders = mounted_folders(settings, Path("/p/runs/r/trials"), Path("/site/scripts/mine.py"))
    assert "--container-mounts=/p/runs/r/trials:/p/runs/r/trials,/site/scripts:/site/scripts,/s/me:/s/me" in (
        srun_arguments(settings, folders)[-1].removesuffix(",/other:/repo/launchers")
    )
    assert mounted_folders(settings, Path("/s/me/runs/trials"), Path("/s/me/mine.py")) == [Path("/s/me")]
    own_mount = srun_arguments(settings, mounted_folders(settings, Path("/s/me/t"), Path("/repo/launchers/cpu.py")))
    assert own_mount[-1] == "--container-mounts=/s/me:/s/me,/other:/repo/launchers"


def test_podman_gets_each_variable_by_name():
    settings = SlurmSettings.model_validate({"container": {"runtime": "podman-hpc", "image": "i"}})
    words = container_prefix(settings, [Path("/runs")], {"CCL_TP": "2"})
    assert words[:2] == ("podman-hpc", "run")
    assert {"--env=CCL_TP", "--env=RANK", "--volume=/runs:/runs"} <= set(words)
    assert words[-1] == "i"


@pytest.mark.parametrize(
    ("fields", "gres", "doubts"),
    [
        ({}, "gpu:8", ["names no partition", "no cpus_per_task"]),
        ({"partition": "gpu", "cpus_per_task": 64}, "gpu:h100:8(S:0-1)", []),
        ({"partition": "gpu", "options": {"cpus-per-gpu": 8}}, None, []),
        ({"partition": "gpu", "exclusive": True}, "(null)", ["no node of the partition declares GPUs to Slurm"]),
        ({"partition": "gpu", "exclusive": True, "gpu_request": "none"}, "(null)", []),
    ],
)
def test_what_a_profile_leaves_open_is_a_warning(fields, gres, doubts, monkeypatch):
    monkeypatch.setattr(by_hand, "ask_slurm", lambda command: gres)
    said = list(by_hand.list_doubts(SlurmSettings(**fields), 8))
    assert len(said) == len(doubts)
    assert all(doubt in line for doubt, line in zip(doubts, said, strict=True))
