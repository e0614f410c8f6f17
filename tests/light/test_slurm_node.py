"""The node program, and Slurm's commands, answered by fake commands on the PATH."""

from __future__ import annotations

import ast
import json
import sys
import time
from pathlib import Path

import pytest
from command_line import run_command
from slurm.fake_commands import PROGRAM, FakeSlurm, open_launcher, row
from slurm.trials import make_job

from cclsearch.core.errors import UserError
from cclsearch.core.processes import ProcessIdentity
from cclsearch.core.secrets import redact
from cclsearch.core.values import BootMoment, FailureKind
from cclsearch.launch.base import Handle, JobState, write_model
from cclsearch.launch.slurm import node
from cclsearch.launch.slurm.allocation import AllocationLauncher, StepRecord
from cclsearch.launch.slurm.commands import (
    SlurmRefusal,
    SlurmUnavailable,
    clean_environment,
    expand_ids,
    job_environment,
    parse_duration,
    read_queue,
    run_slurm,
    submit_script,
)
from cclsearch.launch.slurm.job_files import (
    JobSpec,
    Submission,
    classify_trial,
    link_scratch,
    make_job_spec,
    prepare_folder,
    remove_scratch,
)
from cclsearch.launch.slurm.settings import SlurmSettings
from cclsearch.run import trial_folder


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm(tmp_path / "bin", monkeypatch)


def test_the_node_program_needs_only_python_3_8_and_its_standard_library():
    tree = ast.parse(Path(node.__file__).read_text(), feature_version=(3, 8))
    imported = {
        name.split(".")[0]
        for item in ast.walk(tree)
        if isinstance(item, ast.Import | ast.ImportFrom)
        for name in ([item.module] if isinstance(item, ast.ImportFrom) else [alias.name for alias in item.names])
        if name
    }
    assert imported <= sys.stdlib_module_names


def test_only_the_first_job_runs_a_trial(tmp_path):
    assert node.claim(str(tmp_path), "12")
    assert not node.claim(str(tmp_path), "13")
    assert "another job" in node.why_refused(str(tmp_path), "13")
    assert not node.claim(str(tmp_path), "12")  # requeued by an administrator: the search repeats the trial itself
    assert "requeued" in node.why_refused(str(tmp_path), "12")


def test_torchrun_starts_the_ranks_of_each_node():
    spec = {"runner": "torchrun", "python": "py", "script": "s.py", "nodes": 3, "ranks_per_node": 4, "num_ranks": 10}
    shares = [node.rank_command(spec, index, "head", 29500) for index in range(3)]
    assert ["--nproc-per-node=4" in share for share in shares] == [True, True, False]
    assert "--nproc-per-node=2" in shares[2]
    assert all({"--nnodes=3", "--master-addr=head", "--master-port=29500"} <= set(share) for share in shares)
    assert [share[4] for share in shares] == [f"--node-rank={index}" for index in range(3)]


def test_one_process_per_node_gets_its_rank_and_the_coordinator(monkeypatch):
    monkeypatch.setenv("SLURM_JWT", "eyJhbGciOiJIUzI1NiJ9.e30.x")
    spec = {"runner": "process", "name": "r-t0001-a1", "nodes": 3, "environment": {"CCL_TP": "2"}}
    environments = [node.task_environment(spec, index, "head", 29500) for index in range(3)]
    assert [each["CCL_PROCESS_ID"] for each in environments] == ["0", "1", "2"]
    same = ("CCL_NUM_PROCESSES", "CCL_COORDINATOR", "CCL_JOB_NAME", "CCL_TP")
    assert {tuple(each[name] for name in same) for each in environments} == {("3", "head:29500", "r-t0001-a1", "2")}
    assert not [each for each in environments if "SLURM_JWT" in each]
    assert "SLURM_JWT" in node.srun_environment()
    for alone in ({**spec, "nodes": 1}, {**spec, "runner": "torchrun"}):
        assert not {"CCL_PROCESS_ID", "CCL_COORDINATOR"} & set(node.task_environment(alone, 0, "127.0.0.1", 29500))


def test_node_program_and_search_recognize_the_same_secret_names():
    assert node.SECRET == redact.SECRET_NAME
    assert node.NOT_SECRET == redact.NOT_SECRET_NAME


@pytest.mark.parametrize(
    "name",
    [
        *("SLURM_JWT", "AUTHORIZATION", "OPENAI_KEY", "GITHUB_PAT", "MYSQL_PWD", "SLACK_WEBHOOK_URL", "HF_TOKEN"),
        *("HTTP_PROXY_AUTHORISATION", "wandb_api_key"),
    ],
)
def test_a_variable_with_a_secret_name_is_not_passed_to_a_job(name):
    assert redact.is_secret_name(name)
    assert job_environment({name: "x"}) == {}


@pytest.mark.parametrize(
    "name",
    [
        *("PATH", "LD_LIBRARY_PATH", "PWD", "OLDPWD", "SSH_AUTH_SOCK", "XAUTHORITY", "GIT_AUTHOR_NAME", "KEYBOARD"),
        *("SLURM_JOB_ID", "SLURM_CONF", "SLURM_STEP_NODELIST", "NCCL_IB_PKEY", "NCCL_ALGO", "UCX_IB_PKEY"),
        *("TOKENIZERS_PARALLELISM", "MAX_TOKENS", "PATTERN", "MONKEY"),
    ],
)
def test_other_names_are_not_secrets(name):
    assert not redact.is_secret_name(name)


def test_sbatch_gets_slurms_token_and_a_job_does_not(tmp_path, slurm, monkeypatch):
    monkeypatch.setenv("SLURM_JWT", "eyJhbGciOiJIUzI1NiJ9.e30.x")
    slurm.write("sbatch", f"env >{tmp_path}/env; echo Submitted batch job 5")
    assert submit_script(tmp_path / "job.sbatch") == "5"
    assert "SLURM_JWT=" in (tmp_path / "env").read_text()
    assert "SLURM_JWT" not in job_environment()


def test_the_other_nodes_get_the_head_nodes_address(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "31")
    monkeypatch.setenv("SLURMD_NODENAME", "no-such-name-resolves.invalid")
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    monkeypatch.setenv("PATH", str(tmp_path))
    spec = {"nodes": 2, "folder": str(tmp_path)}
    address, port = node.rendezvous(spec, 0)
    assert address == "127.0.0.1"
    assert node.FIRST_PORT <= port < node.FIRST_PORT + node.NUM_PORTS
    assert node.rendezvous(spec, 1) == (address, port)


def test_a_job_inherits_few_variables_and_no_secret():
    outer = {
        "PATH": "/bin",
        "HOME": "/h",
        "OPENAI_API_KEY": "sk-secret",
        "SBATCH_REQUEUE": "1",
        "SBATCH_WCKEY": "w",
        "SBATCH_ACCOUNT": "mine",
        "SQUEUE_FORMAT": "%A",
        "SLURM_JOB_ID": "5",
        "SLURM_CONF": "/etc/slurm.conf",
        "EDITOR": "vi",
    }
    assert job_environment(outer) == {k: outer[k] for k in ("PATH", "HOME", "SBATCH_ACCOUNT", "SLURM_CONF")}
    assert set(clean_environment(outer)) == {"PATH", "HOME", "OPENAI_API_KEY", "SBATCH_ACCOUNT", "SLURM_CONF", "EDITOR"}


def test_a_controller_that_does_not_answer_is_not_a_refusal(slurm):
    slurm.write("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(SlurmUnavailable):
        read_queue()
    slurm.write("squeue", "sleep 30")
    with pytest.raises(SlurmUnavailable, match="no answer"):
        run_slurm(["squeue"], timeout_s=0.3)
    slurm.write("sbatch", "printf 'sbatch: error: bad\\x1b[31m thing\\n' >&2; exit 1")
    with pytest.raises(SlurmRefusal) as refused:
        run_slurm(["sbatch"])
    assert str(refused.value) == "sbatch: error: bad thing"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1-02:03:04", 93784.0), ("02:03:04", 7384.0), ("3:04", 184.0), ("UNLIMITED", None), ("INVALID", None)],
)
def test_slurms_durations(text, seconds):
    assert parse_duration(text) == seconds


def test_one_line_can_list_many_tasks():
    assert expand_ids("12_[0-2,5%4]") == ["12_0", "12_1", "12_2", "12_5"]
    assert (expand_ids("12"), expand_ids("12_3")) == (["12"], ["12_3"])


def test_many_jobs_cost_one_query(tmp_path, slurm):
    """256 jobs, submitted as arrays; the fake commands count their calls."""
    calls, run = tmp_path / "calls", tmp_path / "many"
    slurm.write("sbatch", f"echo sbatch >>{calls}; echo Submitted batch job 9$(grep -c sbatch {calls})")
    slurm.write("scontrol", "echo 'MaxArraySize = 101'")
    slurm.write("squeue", f"echo squeue >>{calls}; cat {slurm.folder}/queue")
    launcher = open_launcher(run, poll_s=0.001)
    handles = launcher.submit([make_job(run, n, ranks=1) for n in range(1, 257)])
    assert calls.read_text().split() == ["sbatch"] * 3
    assert len({handle.job_id for handle in handles}) == 256
    rows = []
    for handle in handles:
        place = Submission.model_validate_json((Path(handle.details["folder"]) / "submission.json").read_text()).folder
        size = len(json.loads((place / "jobs.json").read_text())["jobs"])
        rows.append(row(handle.job_id, "RUNNING", place, f"many-x{size}"))
    slurm.list_jobs(*rows)
    time.sleep(0.01)
    statuses = launcher.poll(handles)
    assert {status.state for status in statuses} == {JobState.RUNNING}
    assert calls.read_text().split().count("squeue") == 1
    (handles[7].trial_dir / "result.json").write_text(json.dumps({"status": "ok"}))
    time.sleep(0.01)
    assert [status.state for status in launcher.poll(handles)].count(JobState.DONE) == 1


def test_a_submit_limit_is_final_unless_queued_jobs_count_against_it(tmp_path, slurm):
    calls = tmp_path / "calls"
    words = "AssocGrpSubmitJobsLimit Job violates accounting/QOS policy (job submit limit, user size)"
    slurm.write("sbatch", f"echo sbatch >>{calls}; echo '{words}' >&2; exit 1")
    slurm.write("squeue", 'case "$*" in *--account=shared*) echo 7;; esac')

    def submit(account: str) -> Handle:
        return open_launcher(account=account).submit([make_job(tmp_path / account, 1, ranks=1)])[0]

    assert submit("shared").job_id == ""
    assert calls.read_text().split() == ["sbatch"]
    with pytest.raises(UserError, match=r"refuses.*frozen"):
        submit("frozen")
    assert calls.read_text().split() == ["sbatch"] * 3


def test_a_step_in_another_shells_allocation_is_found_and_cancelled(tmp_path, slurm, monkeypatch):
    """A search was killed inside `salloc`; a shell outside finds its steps by the recorded allocation."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    run, asked = tmp_path / "killed", tmp_path / "asked"
    launcher = open_launcher(run, AllocationLauncher, in_allocation=True)
    spec = make_job_spec(make_job(run, 1, ranks=1), PROGRAM, launcher.settings)
    prepare_folder(spec)
    elsewhere = ProcessIdentity(1, "another start of another machine", "1")
    step = StepRecord(allocation="77", nodes=("n1",), moment=BootMoment.now(), process=elsewhere, submitted="")
    write_model(spec.folder / "launched.json", step)
    slurm.write("squeue", f'echo "$*" >>{asked}; echo "77.3 {spec.name}"; echo "77.4 other"')
    slurm.write("scancel", f'echo "scancel $*" >>{asked}; echo "{{}}" >{spec.folder}/end.json')
    handles = launcher.find("killed")
    assert [handle.job_id for handle in handles] == [f"77.{spec.name}"]
    assert [status.state for status in launcher.poll(handles)] == [JobState.RUNNING]
    launcher.cancel(handles)
    assert "scancel 77.3" in asked.read_text().splitlines()
    assert "--jobs=77 " in asked.read_text()


def test_runs_of_the_same_name_in_two_projects_have_their_own_folders_on_one_scratch(tmp_path):
    settings = SlurmSettings(cpu_only=True, scratch=str(tmp_path / "scratch"))
    specs = []
    for project in ("a", "b"):
        specs.append(make_job_spec(make_job(tmp_path / project / "night", 1, ranks=1), PROGRAM, settings))
        link_scratch(specs[-1], settings)
    assert specs[0].name == specs[1].name
    mine, others = (spec.trial_dir / "trace" for spec in specs)
    (mine / "rank0.json").write_text("mine")
    assert list(others.iterdir()) == []
    link_scratch(specs[0], settings)
    assert (mine / "rank0.json").read_text() == "mine", "a second call keeps the folder"
    remove_scratch(specs[0], settings)
    assert [path.resolve() for path in (tmp_path / "scratch").glob("*/trace")] == [others.resolve()]
    others.unlink()
    (tmp_path / "precious" / "trace").mkdir(parents=True)
    others.symlink_to(tmp_path / "precious" / "trace")
    remove_scratch(specs[1], settings)
    assert (tmp_path / "precious" / "trace").is_dir(), "a link to any other place is not ours"


def test_a_step_is_known_by_its_folder_and_an_allocation_by_its_submit_time(tmp_path, slurm):
    """Runs of one name in one allocation have steps of other names, and a later job has the allocation's number."""
    slurm.write("scontrol", "echo n1")
    slurm.write("srun", "echo $* >srun.log; sleep 60")
    held = row("77", "RUNNING", "/", "held").replace("9:00", "UNLIMITED")
    names = []
    for project in ("a", "b"):
        slurm.write("squeue", f"case $* in *--steps*) echo ;; *) echo '{held}';; esac")
        run = tmp_path / project / "night"
        launcher = open_launcher(run, AllocationLauncher, in_allocation="77", poll_s=0.001)
        [handle] = launcher.submit([make_job(run, 1, ranks=1)])
        assert launcher.poll([handle])[0].state is JobState.RUNNING
        folder = Path(handle.details["folder"])
        names.append(JobSpec.model_validate_json((folder / "payload.json").read_text()).step_name)
        launcher.cancel([handle])
        launched = StepRecord.model_validate_json((folder / "launched.json").read_text())
        assert launched.submitted == "2026-01-02T03:04:05"
        (folder / "cancelled.json").unlink()
        slurm.write("squeue", f"echo '{held.replace('2026-01-02', '2026-05-05')}'")
        time.sleep(0.01)
        assert launcher.poll([handle])[0].failure.kind is FailureKind.ALLOCATION_ENDED
    assert names[0] != names[1]
    assert all(name.startswith("night-t0001-a1-") for name in names)


def test_failure_files_of_an_attempt_do_not_affect_the_next_one(tmp_path):
    job = make_job(tmp_path / "again", 1, attempt=2)
    failure_file = {"rank": 3, "time_ns": 1, "kind": "crashed", "message": "RuntimeError: of the first attempt"}
    (job.trial_dir / "failures").mkdir()
    (job.trial_dir / "failures" / "rank-00003.json").write_text(json.dumps(failure_file))
    trial_folder.prepare_folder(job, "script")
    (job.trial_dir / "stderr.log").write_text("torch.OutOfMemoryError: CUDA out of memory\n")
    failure = classify_trial(job.trial_dir, 1)
    assert failure.kind is FailureKind.OUT_OF_MEMORY
    assert (job.trial_dir / "attempts" / "1" / "failures" / "rank-00003.json").is_file()


def test_a_job_is_not_resubmitted_after_an_unclear_answer(tmp_path, slurm):
    """sbatch times out after Slurm accepted the job: the queue lists it by its working directory."""
    calls, place = tmp_path / "calls", tmp_path / "place"
    slurm.write("sbatch", f"dirname $1 >{place}; echo sbatch >>{calls}; echo 'Socket timed out' >&2; exit 1")
    slurm.write("squeue", f'echo "{row("41", "PENDING", f"$(cat {place})", "unclear-t0001-a1")}"')
    launcher = open_launcher(poll_s=0.001)
    handles = launcher.submit([make_job(tmp_path / "unclear", 1, ranks=1)])
    assert handles[0].job_id == ""
    for _ in range(3):
        time.sleep(0.01)
        assert launcher.poll(handles)[0].state is JobState.QUEUED
    assert calls.read_text().split() == ["sbatch"]
    assert launcher.find("unclear")[0].job_id == "41"


def test_a_job_that_slurm_forgot_is_explained_by_its_files(tmp_path, slurm):
    slurm.write("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    launcher = open_launcher(grace_s=0.0, poll_s=0.001)
    handle = launcher.submit([make_job(tmp_path / "forgot", 1, ranks=1)])[0]
    folder = Path(handle.details["folder"])
    submission = json.loads((folder / "submission.json").read_text())
    earlier = {"wall_s": submission["moment"]["wall_s"] - 60, "boot_id": "another", "boot_s": 0.0}
    (folder / "submission.json").write_text(json.dumps({**submission, "moment": earlier}))
    (folder / "started.json").write_text(json.dumps({"job_id": "77", "host": "n", "at": 1.0}))
    over = {"job_id": "77", "started_at": 1.0, "ended_at": 2.0, "exit_code": 1, "reason": "finished", "signal": None}
    (folder / "end.json").write_text(json.dumps(over))
    (handle.trial_dir / "stderr.log").write_text("Traceback (most recent call last):\nValueError: seven\n")
    status = launcher.poll([handle])[0]
    assert status.state is JobState.DONE
    assert status.failure.message == "ValueError: seven"


def test_without_slurm_the_check_says_so(monkeypatch, tmp_path):
    done = run_command("launcher", "check", "h100-8", environment={"PATH": str(tmp_path)})
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "NO  commands: not found on the PATH: sbatch, srun, squeue, scancel",
        "    run this on a login node of the cluster",
    ]


def test_a_huge_file_in_place_of_a_record_is_not_read_whole(tmp_path):
    with (tmp_path / "started.json").open("wb") as file:
        file.truncate(node.MAX_JSON_CHARS * 4)
    with pytest.raises(ValueError, match="more than"):
        node.read_json(str(tmp_path / "started.json"))
