"""Growth of the search space during a search: checked, recorded in the ledger, and the same after a resume."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import search, write_recording
from scripted_launcher import ScriptedLauncher, ran
from scripted_search import open_search

from cclsearch.analysis.report_pages import neighbor_rows
from cclsearch.core.errors import UserError
from cclsearch.core.values import Config
from cclsearch.loop.growth import MAX_GROWTHS, list_openings
from cclsearch.loop.loop import run_search
from cclsearch.loop.session import Changes, Session, begin_or_resume, grow_space, open_session, rebuild_space
from cclsearch.plan.workload import hash_space
from cclsearch.record.event import SpaceGrown, encode_line
from cclsearch.record.ledger import LEDGER_FILE
from cclsearch.record.writer import RunWriter
from cclsearch.report import patch
from cclsearch.run.folder import load_run
from cclsearch.run.spec import read_spec
from cclsearch.space.framework import load_framework
from cclsearch.space.opening import Extend
from cclsearch.space.variables import load_catalogue, refuse_name, refuse_words


@pytest.fixture
def began(project: Path) -> tuple[Path, Session]:
    """Folder and session of a search that has begun and has no trial yet."""
    folder, session = open_search(project, ScriptedLauncher(ran))
    with RunWriter(folder) as writer:
        begin_or_resume(writer, session)
    return folder, session


def test_a_search_continues_over_the_grown_space_and_so_does_a_resume(began):
    folder, session = began
    size = len(session.space)
    with RunWriter(folder) as writer:
        run_search(writer, session)
        session = grow_space(writer, session, {"optimizer": ["fused"]}, why="one kernel for all parameters")
        session = grow_space(writer, session, {"threads": [2]})
    assert len(session.space) == 4 * size
    run = load_run(folder)
    events = [event for event in run.state.reported if isinstance(event, SpaceGrown)]
    assert "one kernel for all parameters" in events[0].text
    assert events[1].choices == {"optimizer": ("for_loop", "fused"), "threads": (1, 2)}, "each names all that has grown"
    assert events[1].neutral == {"optimizer": "for_loop", "threads": 1}
    assert (run.spec.space_size, run.spec.space_sha256) == (len(session.space), hash_space(session.space))
    assert hash_space(rebuild_space(run.spec)) == hash_space(session.space)
    resumed = open_session(folder)
    assert hash_space(resumed.space) == hash_space(session.space)
    with RunWriter(folder) as writer:
        observed = writer.state.trials.observe(resumed.space)
        assert len(observed) == 4
        rows = [resumed.space.config(o.row or 0) for o in observed]
        assert [row["threads"] for row in rows] == [1] * 4, "trials without a knob had its neutral value"
        assert [{**row, **o.config} for row, o in zip(rows, observed, strict=True)] == rows
        begin_or_resume(writer, resumed, Changes(budget=8))
        run_search(writer, replace(resumed, jobs=session.jobs))
        numbers = {resumed.space.row(trial.config) for trial in writer.state.trials.values()}
    assert len(numbers) == 8, "no configuration ran twice, in its old or its new form"


def test_what_the_space_has_already_is_not_offered_again(began):
    folder, session = began
    with RunWriter(folder) as writer:
        session = grow_space(writer, session, {"omp_wait_policy": ["active"], "omp_dynamic": ["true", "false"]})
    openings = list_openings(read_spec(folder), session.space.knobs)
    assert openings["omp_wait_policy"].describe().startswith("omp_wait_policy: passive (further values)")
    assert "omp_dynamic" not in openings
    assert openings["omp_proc_bind"].values == ("close", "spread", "false")


def test_a_recording_cannot_grow(project):
    run = search(write_recording(project / "toy"), "r", budget=2)
    with RunWriter(run.folder) as writer, pytest.raises(UserError, match="is a recording: no choices can be added"):
        grow_space(writer, open_session(run.folder), {"threads": [2]})


CYRILLIC_THREADS = "thr\u0435ads"
REFUSED: list[tuple[str, Any, str]] = [
    ("LD_PRELOAD", ["x"], "a name with 'preload' loads code"),
    ("LD_BIND_NOW", [1], "no one reviewed what 'ld'"),
    ("Ld_Preload", ["x"], "not in the lists"),
    ("PYTHONPATH", [1], "may not be added"),
    ("OMP_NUM_THREADS", [0], "threads cannot be 0"),
    ("GLOO_SOCKET_IFNAME", ["eth0"], "may not be added"),
    ("OMP_TOOL_LIBRARIES", ["x"], "loads code"),
    ("OMP_DISPLAY_ENV; rm", [1], "not in the lists"),
    ("OMP_X\nLD_PRELOAD", [1], "not in the lists"),
    ("../threads", [2], "not in the lists"),
    (CYRILLIC_THREADS, [2], "not in the lists"),
    ("ＯＭＰ_DYNAMIC", ["true"], "not in the lists"),
    ("o\u212a_threads", [2], "not in the lists"),
    ("--dtype", ["bf16"], "not in the lists"),
    ("--grad-reduce-in-fp32", [True], "not in the lists"),
    ("precision", ["bf16"], "part of the work"),
    ("dtype", ["bf16"], "not in the lists"),
    ("global_batch_size", [8], "not in the lists"),
    ("seq_len", [8], "not in the lists"),
    ("seed", [1], "not in the lists"),
    ("tensor_model_parallel_size", [2], "is the knob 'tp'"),
    ("micro_batch", [3], "is the knob 'micro_batch_size'"),
    ("XLA_FLAGS", ["x"], "no one reviewed"),
    ("zero_stage", [2], "no further values"),
    ("config", ["x"], "not in the lists"),
    ("xla_cpu_enable_fast_math", [True], "may not be added"),
    ("threads", [0], "not from 1"),
    ("threads", [-1], "not from 1"),
    ("threads", [1e9], "not from 1"),
    ("threads", [float("nan")], "not finite"),
    ("threads", [float("inf")], "not finite"),
    ("threads", [True], "not a whole number"),
    ("threads", ["2; rm -rf x"], "up to 64 letters"),
    ("threads", [[2]], "not a number"),
    ("threads", [None], "not a number"),
    ("threads", list(range(1, 60)), "at most 8 values"),
    ("threads", [], "give a list"),
    ("threads", "2", "give a list"),
    ("threads", [1], "would stay as it is"),
    ("micro_batch_size", [7], "no further values"),
    ("tp", [3], "no further values"),
    ("omp_wait_policy", ["ACTIVE /lib.so"], "up to 64 letters"),
    ("omp_wait_policy", ["busy"], "is not one of active, passive"),
]


@pytest.mark.parametrize("level", [Extend.LISTED, Extend.ANY])
def test_what_may_not_be_added_is_refused_and_leaves_nothing_behind(began, level):
    folder, session = began
    with RunWriter(folder) as writer:
        before = (folder / LEDGER_FILE).read_bytes()
        for name, values, why in REFUSED:
            with pytest.raises(UserError) as refused:
                grow_space(writer, session, {name: values}, level=level)
            assert "\n" not in str(refused.value)
            assert why in str(refused.value) or (level is Extend.LISTED and "not in the lists" in str(refused.value))
        with pytest.raises(UserError, match="not in the lists"):
            grow_space(writer, session, {"OMP_STACKSIZE": [4]}, level=Extend.LISTED)
        with pytest.raises(UserError, match="does not add"):
            grow_space(writer, session, {"threads": [2]}, level=Extend.OFF)
        assert (folder / LEDGER_FILE).read_bytes() == before
        grown = grow_space(writer, session, {"OMP_STACKSIZE": [4096]}, level=Extend.ANY)
    assert grown.space.find("env_omp_stacksize") is not None


@pytest.mark.parametrize(
    "name",
    [
        *("nccl_net_plugin", "nccl_net", "nccl_tuner_plugin", "nccl_topo_file", "nccl_debug_file", "nccl_conf_file"),
        *("nccl_comm_id", "nccl_socket_ifname", "nccl_ib_hca", "torchinductor_cache_dir", "cuda_injection64_path"),
        *("torchinductor_cudagraph_debug_dir", "cuda_visible_devices", "cuda_cache_path", "cuda_module_loading"),
        *("nvidia_tf32_override", "cublas_allow_tf32", "xla_dump_to", "xla_gpu_cuda_data_dir", "xla_gpu_ptx_file"),
        *("xla_force_host_platform_device_count", "xla_gpu_enable_fast_min_max", "xla_allow_excess_precision"),
        *("xla_cpu_fast_math_honor_nans", "xla_gpu_all_reduce_bf16", "xla_gpu_target_config_filename", "kmp_affinity"),
        *("omp_display_env", "kmp_settings", "omp_"),
        *("cuda_enable_coredump_on_exception", "xla_gpu_pgle_profile_file_or_directory_path", "omp_tool_libraries"),
        *("xla_gpu_unsafe_fallback_to_driver", "xla_gpu_exhaustive_autotune_cache_dir", "torch_nccl_dump_on_timeout"),
    ],
)
def test_a_name_that_says_what_is_forbidden_is_denied_although_no_list_has_it(name):
    assert refuse_name(name)


@pytest.mark.parametrize(
    ("name", "is_denied"),
    [("nccl_p2p_net_chunksize", False), ("xla_gpu_enable_cudnn_layer_norm_fusion2", True), ("omp_stacksize", False)],
)
def test_a_name_that_says_nothing_of_the_kind_is_not_denied(name, is_denied):
    assert bool(refuse_name(name)) == is_denied


SPELLINGS = [
    *("NCCL_BUFFSIZE", "nccl-buffsize", "ncclBuffsize", "Nccl_Buff_Size", "--nccl-buffsize", "env_nccl_buffsize"),
    *("no_nccl_buffsize", "--no-nccl-buffsize", "nonccl_buffsize", "NCCL_DISABLE_BUFFSIZE", "nccl_buffsi"),
    *("env_nccl_nthreads", "NCCL_MIN_NRINGS", "env_nccl_min_nchannels", "flag_xla_gpu_enable_pipelined_all_gather"),
    *("--noxla_gpu_enable_pipelined_all_gather", "xla_gpu_disable_pipelined_all_gather", "XLA-GPU-Pipelined-AllGather"),
    *("PYTORCH_CUDA_ALLOC_CONF", "pytorch_alloc_conf", "CUDA_DEVICE_MAX_CONN", "env_cuda_device_max_connections"),
]


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_reviewed_knob_in_another_spelling_has_its_reviewed_values_or_is_refused(name):
    from cclsearch.card.load import load_card
    from cclsearch.space.opening import find_opening, find_openings, read_values

    framework, card = load_framework("megatron"), load_card("wl2")
    jax = framework.model_copy(update={"libraries": (*framework.libraries, "xla_gpu")})
    for value in (2**40, 7.5, "evil"):
        with pytest.raises(UserError):
            read_values(find_opening(name, find_openings(card, jax, ()), jax, (), level=Extend.ANY), [value])
    with pytest.raises(UserError):
        find_opening(name, {}, jax, (), level=Extend.ANY)


@pytest.mark.parametrize(
    "name",
    [
        *("CUBLAS_EMULATION_STRATEGY", "CUBLAS_FIXEDPOINT_EMULATION_MANTISSA_BIT_COUNT", "CUDA_DISABLE_PERF_BOOST"),
        *("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "NCCL_IB_PKEY", "NCCL__NET", "TORCHINDUCTOR_CUSTOM_PASS"),
        *("xla_gpu_asm_extra_flags", "xla_gpu_simplify_all_fp_conversions", "xla_gpu_autotune_gemm_rtol"),
        *("NCCL_WORD_OF_TOMORROW", "xla_gpu_new_thing", "cuda_", "nccl_7", "NCCL_IB_SL", "KMP_HW_SUBSET"),
    ],
)
def test_a_name_with_a_word_that_no_one_reviewed_is_denied(name):
    assert refuse_name(name.lower())


def test_no_more_threads_than_cores_may_be_added(project):
    from cclsearch.space.opening import find_opening, read_values

    folder, session = open_search(project, ScriptedLauncher(ran))
    spec = read_spec(folder)
    for cores, allowed in ((2, [2]), (96, [2, 96]), (None, [2, 256])):
        hardware = spec.card.hardware.model_copy(update={"host_cores": cores})
        card = spec.card.model_copy(update={"hardware": hardware})
        openings = list_openings(spec.model_copy(update={"card": card}), session.space.knobs)
        assert read_values(openings["threads"], allowed) == tuple(allowed)
        assert openings["threads"].most == (cores or 256)
        framework = load_framework("cpu")
        other = find_opening("OMP_THREAD_LIMIT", openings, framework, (), level=Extend.ANY, cores=cores)
        for opening in (openings["threads"], other):
            with pytest.raises(UserError, match=r"from 1 to|no more threads"):
                read_values(opening, [(cores or 1024) + 1])


def test_no_reviewed_variable_names_a_place_or_the_precision():
    harmless = ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_NET_", "NCCL_IB_", "PYTORCH_CUDA_ALLOC_CONF")
    for name, variable in load_catalogue().variables.items():
        own = (variable.flag or variable.env).lower()
        denied = refuse_words(own)
        assert not denied or denied.startswith("no one reviewed") or variable.env.startswith(harmless), name
        assert name in refuse_name(own), "only with its reviewed values"
        assert all(isinstance(value, bool | int) or value.isalnum() for value in variable.values)


def test_an_opened_variable_reaches_the_job_and_no_other_does():
    jax, cpu = load_framework("jax-cpu"), load_framework("cpu")
    flags = {"xla_cpu_multi_thread_eigen": False, "flag_xla_cpu_small_while_loop": 3, "xla_cpu_vector_width": "default"}
    assert jax.knob_environment(flags) == {
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false --flag".replace("--flag", "--xla_cpu_small_while_loop=3")
    }
    assert cpu.knob_environment(flags) == {}, "no library of this framework has them"
    smuggled = {
        **{"env_ld_preload": "x", "env_omp_tool_libraries": "x", "flag_xla_dump_to": "x", "nccl_algo": "Ring"},
        **{
            "omp_wait_policy": "a b",
            "xla_cpu_vector_width": "1 --xla_dump_to=x",
            "env_omp_x": "a b",
            "LD_PRELOAD": "x",
        },
    }
    assert jax.knob_environment(smuggled) == {} == cpu.knob_environment(smuggled)
    assert cpu.knob_environment({"omp_wait_policy": "active"}) == {"OMP_WAIT_POLICY": "active"}


def test_a_growth_is_bounded(began):
    folder, session = began
    with RunWriter(folder) as writer:
        policies = {"omp_wait_policy": ["active", "passive"], "omp_proc_bind": ["close", "spread", "false"]}
        many = {**policies, "optimizer": ["foreach", "fused"]}
        with pytest.raises(UserError, match="64 times the 180"):
            grow_space(writer, session, {**many, "omp_dynamic": ["true"], "compile": [True]})
        for mib in range(1, 1 + MAX_GROWTHS):
            session = grow_space(writer, session, {"bucket_mib": [mib]})
        with pytest.raises(UserError, match="which is the limit"):
            grow_space(writer, session, {"bucket_mib": [64]})


def test_what_the_user_limited_stays_limited(project):
    from cclsearch.loop.growth import plan_growth
    from cclsearch.plan.plan import plan_search
    from cclsearch.plan.request import SearchRequest
    from cclsearch.run.spec import SearchLimits
    from cclsearch.space.parse import parse_knobs

    request = SearchRequest("tiny", SearchLimits(budget=1), sampler="random", knobs=parse_knobs(["threads=1,2"]))
    with pytest.raises(UserError, match="the choices of threads were given by the card"):
        plan_growth(plan_search(request).spec, None, 0, {"threads": [4]}, level=Extend.LISTED)


def test_divisors_above_the_limit_of_the_framework_file_may_be_added():
    from cclsearch.card.load import load_card
    from cclsearch.space.build import resolve_knobs
    from cclsearch.space.opening import find_opening, find_openings

    small, framework = load_card("wl2"), load_framework("megatron")
    card = small.model_copy(update={"work": Config({**small.work, "global_batch_size": 256})})
    knobs = resolve_knobs(card, framework)
    openings = find_openings(card, framework, knobs)
    assert openings["micro_batch_size"].values == (128, 256)
    assert "tp" not in openings, "its divisors are all there"
    assert openings["cuda_device_max_connections"].refuse(33)
    own = find_opening("NCCL_ALGO", openings, framework, knobs, level=Extend.ANY)
    assert own.knob == "nccl_algo"
    assert own.source == framework.source, "the framework's own declaration comes first"
    assert find_opening("NCCL_MIN_NCHANNELS", openings, framework, knobs, level=Extend.ANY).knob == "nccl_min_ctas"
    without = {name: opening for name, opening in openings.items() if name != "nccl_min_ctas"}
    with pytest.raises(UserError, match="it is nccl_min_ctas, which was reviewed"):
        find_opening("NCCL_MIN_NCHANNELS", without, framework, knobs, level=Extend.ANY)
    assert find_opening("NCCL_MAX_NCHANNELS", openings, framework, knobs, level=Extend.ANY).knob == "nccl_max_ctas"
    for name in ("--fp8-format", "--grad-reduce-in-fp32", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "TORCH_ALLOW_TF32"):
        with pytest.raises(UserError):
            find_opening(name, openings, framework, knobs, level=Extend.ANY)


def edit_ledger(folder: Path, **changes: Any) -> None:
    """Add a growth to a ledger by hand, with a valid checksum."""
    event = {"event": "space_grown", "choices": {}, "space_sha256": "0", "space_size": 1, "time_s": 1.0, **changes}
    text = json.dumps(event, separators=(",", ":")).encode()[:-1]
    with (folder / LEDGER_FILE).open("ab") as file:
        file.write(text + b',"crc":"%08x"}\n' % zlib.crc32(text))


@pytest.mark.parametrize(
    ("choices", "neutral"),
    [
        ({"env_omp_stacksize": ["default", 4]}, {"env_omp_stacksize": "default"}),
        ({"omp_wait_policy": ["default", "busy"]}, {"omp_wait_policy": "default"}),
        ({"threads": [1, 10**6]}, {"threads": 1}),
        ({"threads": [4, 2]}, {"threads": 4}),
        ({"precision": ["fp32", "bf16"]}, {"precision": "fp32"}),
        ({"config": ["a", "b"]}, {"config": "a"}),
        ({"zero_stage": [0, 1, 9]}, {}),
    ],
)
def test_a_hand_edited_growth_ends_a_resume_in_one_line(began, choices, neutral):
    folder, _ = began
    edit_ledger(folder, choices=choices, neutral=neutral)
    with pytest.raises(UserError, match="adds to the search space what may not be added") as refused:
        open_session(folder)
    assert "\n" not in str(refused.value)


@pytest.mark.filterwarnings("ignore::cclsearch.core.errors.DamagedLedger")
@pytest.mark.parametrize(
    "changes",
    [
        {"choices": {"env_ld_preload": ["default", "x"]}},
        {"choices": {"flag_xla_dump_to": ["default", "x"]}},
        {"choices": {"threads": [1, "$(x)"]}},
        {"choices": {"threads": [1, "/lib/x.so"]}},
        {"choices": {"Threads": [1, 2]}},
        {"choices": {"threads\n": [1, 2]}},
        {"choices": {"threads": [1, 2]}, "growth_version": 9},
    ],
)
def test_a_growth_that_no_version_would_write_is_not_used_and_said(began, changes):
    folder, _ = began
    edit_ledger(folder, **changes)
    state = load_run(folder).state
    assert state.growth is None
    assert "space_grown" in state.damage[0]
    assert len(open_session(folder).space) == 180


def test_a_growth_survives_a_kill_between_any_two_bytes(began):
    folder, session = began
    ledger = folder / LEDGER_FILE
    before = ledger.read_bytes()
    with RunWriter(folder) as writer:
        grow_space(writer, session, {"threads": [2]})
    line = ledger.read_bytes()[len(before) :]
    for kept in (0, 1, len(line) // 2, len(line) - 1, len(line)):
        ledger.write_bytes(before + line[:kept])
        opened = open_session(folder)
        assert len(opened.space) in ((360,) if kept == len(line) else (180, 360))
        with RunWriter(folder) as writer:
            again = opened if len(opened.space) == 360 else grow_space(writer, opened, {"threads": [2]})
        assert len(open_session(folder).space) == len(again.space) == 360


def test_a_grown_event_is_written_and_read_alike():
    event = SpaceGrown(choices={"threads": (1, 2)}, neutral={"threads": 1}, space_sha256="0", space_size=2)
    assert b'"neutral":{"threads":1}' in encode_line(event)


def test_levers_are_opened_near_the_best_layouts_and_added_not_multiplied(project, cli, monkeypatch):
    """A simulated search of 10 trials: from trial 7 levers vary, two at once; the ledger opens again as it was."""
    monkeypatch.chdir(project)
    command = ["run", "-w", "wl5", "-l", "simulate", "--framework", "megatron", "--budget", "10", "--quiet"]
    said = cli.out([*command, "--name", "levers"]).partition("not searched: ")[2]
    assert "nccl_algo" in said
    assert "moe_dispatcher" not in said
    folder = project / "runs" / "levers"
    run = load_run(folder)
    growth, layouts = run.state.growth, read_spec(folder).space_size
    assert growth.bases
    assert {"moe_dispatcher", "cuda_graph"} <= set(growth.neutral)
    assert not {"moments_dtype", "grad_reduce_dtype"} & set(growth.neutral), "numerics need the card's leave"
    assert layouts < len(rebuild_space(run.spec)) < 3 * layouts
    lengths = [len(trial.config) for trial in run.state.trials.values()]
    assert lengths[:6] == [min(lengths)] * 6
    assert max(lengths) > min(lengths), "configurations name levers that differ from their defaults"
    best = max(run.state.trials.values(), key=lambda trial: len(trial.config)).config
    assert neighbor_rows(rebuild_space(run.spec), best)
    monkeypatch.setattr(patch, "_try", lambda *_: None)  # each of the others would start the run script
    assert str(best) in patch.write_patch(run.spec, rebuild_space(run.spec), best)
    cli.out([*command, "--sampler", "tpe", "--name", "drawn"])
    assert load_run(project / "runs" / "drawn").state.growth is not None
    cli.out([*command, "--no-levers", "--name", "layouts"])
    assert load_run(project / "runs" / "layouts").state.growth is None
