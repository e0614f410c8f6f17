"""Settings, names and records of the `tpu-vm` launcher, without a worker."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import tarfile
from pathlib import Path

import pytest

from cclsearch.core import atomic_file, processes
from cclsearch.core.errors import UserError
from cclsearch.launch.base import Handle
from cclsearch.launch.profile import make_launcher, profile_from_mapping
from cclsearch.launch.tpu_vm import worker
from cclsearch.launch.tpu_vm.gcloud import (
    Gcloud,
    GcloudError,
    GcloudWorkerGroup,
    explain_refusal,
    has_label_name,
    make_label,
    make_token,
    name_resource,
)
from cclsearch.launch.tpu_vm.job import unpack_results
from cclsearch.launch.tpu_vm.settings import TpuSettings


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"hosts": ["a"], "environment": {"HF_TOKEN": "x"}}, "secret"),
        ({"hosts": ["-oProxyCommand=x"]}, "dash"),
        ({"hosts": ["a"], "remote_dir": "x; rm -rf /"}, "remote_dir"),
        ({"hosts": ["a"], "ssh_options": ["StrictHostKeyChecking no"]}, "NAME=VALUE"),
        ({"hosts": ["a"], "tpu": "b", "zone": "z"}, "exactly one"),
        ({"tpu": "my-slice"}, "zone"),
        ({"tpu": "My Slice", "zone": "z"}, "lower-case"),
        ({"hosts": ["a", "a"]}, "once"),
    ],
)
def test_invalid_profile_fields_are_refused(fields, says):
    with pytest.raises(UserError, match=says):
        make_launcher(profile_from_mapping({"launcher": "tpu-vm", **fields}, name="p"))


@pytest.mark.parametrize("run_id", ["r", "WL.2_x-20260101-120000-ab12", "9" * 80, "a" * 80, "_."])
def test_resource_names_are_valid_and_differ_between_runs(tmp_path, run_id):
    tokens = [make_token(tmp_path / name) for name in ("one", "two")]
    assert make_token(tmp_path / "one") == tokens[0]
    names = [name_resource(run_id, token, 17) for token in tokens]
    label = make_label(run_id, tokens[0])
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", names[0])
    assert re.fullmatch(r"[a-z][-_a-z0-9]{0,62}", label)
    assert [has_label_name(label, name) for name in (*names, f"{label}-two-g1")] == [True, False, False]


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "trace/../../x", "other/file"])
def test_archive_with_unexpected_paths_is_not_unpacked(tmp_path, name):
    archive = tmp_path / "w0.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        member = tarfile.TarInfo(name)
        member.size = 1
        file.addfile(member, io.BytesIO(b"x"))
    with pytest.raises(ValueError, match="archive contains"):
        unpack_results({0: archive}, tmp_path / "trial", tmp_path / "scratch")
    assert not (tmp_path / "trial").exists()


@pytest.mark.parametrize(
    ("said", "permanent"),
    [
        ("ERROR: (gcloud) RESOURCE_EXHAUSTED: Quota limit 'TPUV5sLitepod' has been exceeded. Limit: 0", True),
        ("ERROR: (gcloud) PERMISSION_DENIED: Permission 'tpu.nodes.create' denied", True),
        ("ERROR: (gcloud) RESOURCE_EXHAUSTED: There is no more capacity in the zone", False),
        ("ERROR: (gcloud) UNAVAILABLE: The service is currently unavailable", False),
        ("ERROR: (gcloud) There was a problem refreshing your current auth tokens: invalid_grant: Bad Request", True),
        ("ERROR: (gcloud) There was a problem refreshing your current auth tokens: Connection timed out", False),
    ],
)
def test_permanent_errors_are_distinguished_from_temporary_ones(said, permanent):
    error = GcloudError(explain_refusal(f"Request issued\n{said}\nmore", 1), said)
    assert error.is_permanent is permanent
    assert str(error).startswith("(gcloud)")


@pytest.mark.parametrize("answer", ["[" * 200_000, "7", "[7]", '{"state": 7, "networkEndpoints": 7}', "", "\0" * 9])
def test_an_answer_of_gcloud_that_cannot_be_used_is_an_unknown_state_or_an_error_of_gcloud(tmp_path, answer):
    (tmp_path / "answer").write_text(answer)
    tool = tmp_path / "gcloud"
    tool.write_text(f"#!/bin/sh\ncat {tmp_path}/answer\n")
    tool.chmod(0o755)
    gcloud = Gcloud(TpuSettings.model_validate({"tpu": "n", "zone": "z", "gcloud": str(tool)}))
    with contextlib.suppress(GcloudError):
        assert gcloud.list_queued() == []
        assert str(gcloud.describe_node("n")["state"]) in ("UNKNOWN", "7")
        assert GcloudWorkerGroup(gcloud, "n", gcloud.describe_node("n")).addresses == ()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[" * 9, "the record of job j cannot be used: job.json: the file: Invalid JSON"),
        (None, "the files of job j are"),
    ],
)
def test_a_record_that_cannot_be_used_is_told_from_a_missing_one(tmp_path, content, says):
    launcher = make_launcher(profile_from_mapping({"launcher": "tpu-vm", "hosts": ["a"]}, name="p"), run_dir=tmp_path)
    if content is not None:
        (tmp_path / "tpu-a1").mkdir()
        (tmp_path / "tpu-a1" / "job.json").write_text(content)
    [status] = launcher.poll([Handle(launcher="tpu-vm", job_name="j", job_id="j", trial_dir=tmp_path)])
    assert status.failure.message.startswith(says)


def test_a_worker_reads_no_huge_file_in_place_of_a_record(tmp_path):
    path = tmp_path / "job.json"
    path.write_text("{" + " " * worker.MAX_JSON_CHARS + "}")
    assert worker.read_json(path) == {}


def test_what_runs_on_a_worker_needs_only_python_3_8():
    newer = {"Self", "StrEnum", "TypeAlias", "ParamSpec", "assert_never", "override", "batched", "pairwise", "UTC"}
    for module in (worker, processes, atomic_file):
        tree = ast.parse(Path(module.__file__).read_text(), feature_version=(3, 8))
        imported = {name.name for item in tree.body if isinstance(item, ast.ImportFrom) for name in item.names}
        assert not imported & newer
