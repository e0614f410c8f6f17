"""The class of a kernel from its name: real names of public engines and traces, and a user's own table."""

from __future__ import annotations

import csv

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import ROOT, TESTS

from cclsearch.core.errors import UserError
from cclsearch.trace.files.cache import current_version
from cclsearch.trace.names.kernels import (
    CLASSES,
    MAX_ARGUMENTS,
    MAX_NAME,
    VARIABLE,
    check_classes,
    kernel_class,
    kernel_family,
    load_classes,
    split_kernel_name,
)

NAMES = TESTS / "kernel_names.csv"
SAID_BY_CONTEXT_ONLY = {
    "_sparse_splitk_bf16_split_kernel",
    "_sparse_splitk_bf16_combine_kernel",
    "wide_qkv_kernel",
    "_active_token_update_kernel",
}
"""Names that do not say what the kernel does: they are listed as unknown, not guessed."""


def test_names_of_public_sources_have_the_class_that_their_source_states():
    with NAMES.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len({row["name"] for row in rows}) >= 500
    assert {row["class"] for row in rows} == set(CLASSES)
    assert all(row["source"] for row in rows)
    wrong = {row["name"]: (row["class"], found) for row in rows if (found := kernel_class(row["name"])) != row["class"]}
    assert wrong == {row["name"]: (row["class"], "other") for row in rows if row["name"] in SAID_BY_CONTEXT_ONLY}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport", "communication"),
        ("dpsk::ep::intranode::dispatch", "communication"),
        ("MEMORY_COPY_HOST_TO_DEVICE", "memory"),
        ("MEMORY_COPY_DEVICE_TO_DEVICE.kd", "memory"),
        ("triton_red_fused__to_copy_add_flash_attention_forward_mul_3", "reduction"),
        ("MIOpenBatchNormFwdTrainSpatial.kd", "norm"),
        ("void fft2d_r2c_32x32<float, false, 0u, false>(float2*, float const*, cudnn::reduced_divisor)", "convolution"),
        ("hadacore::hadamard_transform_kernel", "other"),
        ("_gemma_fused_add_rmsnorm_kernel", "norm"),
        ("void dpsk::grouped_gemm::dense_kernel<128, 64>(int)", "gemm"),
        (
            "void at::native::multi_tensor_apply_kernel<TensorListMetadata<1>, at::native::LpNormFunctor<float> >(x)",
            "reduction",
        ),
        ("void at::native::(anonymous namespace)::compute_grad_weight<float, long>(long const*)", "embedding"),
        ("void at::native::(anonymous namespace)::krn_partial_segment_offset<long>(long*)", "embedding"),
        ("void at::native::(anonymous namespace)::krn_partials_per_segment<long>(long*)", "embedding"),
        ("void bounds_check_indices_kernel<long, false>(at::GenericPackedTensorAccessor<long, 1ul>)", "embedding"),
        ("void fbgemm_gpu::_offsets_range_cuda_kernel<int>(long, long, int const*, int*)", "embedding"),
        ("", "other"),
        ("\x00<<<(((", "other"),
    ],
)
def test_names_that_contain_words_of_another_class(name, found):
    assert kernel_class(name) == found


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        (
            "void vllm::rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*, long)",
            "vllm::rms_norm_kernel",
            "c10::BFloat16, 8",
        ),
        ("void (anonymous namespace)::store<(bool)1>((anonymous namespace)::P) [clone .kd]", "store", "(bool)1"),
        ("std::enable_if<((8)>(0)), void>::type a::b<int>(int)", "a::b", "int"),
        ("_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi64EEEvPT0_", "aiter::add_rmsnorm_quant_kernel", ""),
        ("_ZN2ck12_GLOBAL__N_16kernelINS_4GemmEEEv", "ck::kernel", "Gemm"),
        ("loop_convert_fusion.kd", "loop_convert_fusion", ""),
        ("_ZN", "_ZN", ""),
        ("_Z999x", "x", ""),
        ("a<b<c", "a", "b<c"),
        ("", "", ""),
    ],
)
def test_a_name_is_split_from_its_return_type_arguments_and_parameters(text, name, arguments):
    found = split_kernel_name(text)
    assert (found.name, found.arguments) == (name, arguments)


@pytest.mark.parametrize(
    ("text", "family"),
    [
        (
            "void ck_tile::kentry<ck_tile::gfx950_t, 1, ck_tile::FmhaFwdKernel<P<int> > >(X) [clone .kd]",
            "ck_tile::kentry<ck_tile::FmhaFwdKernel>",
        ),
        (
            "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<M<2, 3> > > >(P)",
            "cutlass::device_kernel<flash::FlashAttnFwdSm90>",
        ),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm>(P)", "cutlass::Kernel2<cutlass_80_tensorop_s1688gemm>"),
        ("triton_poi_fused_add_17", "triton_poi_fused_add"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD (Device -> Device)"),
    ],
)
def test_a_family_names_the_operation_of_a_wrapper(text, family):
    assert kernel_family(text) == family


def test_lines_of_a_user_come_before_ours(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    before = current_version()
    table = tmp_path / "mine.csv"
    table.write_text("class,pattern\nattention,^my_secret_kernel\nmoe,ncclDevKernel\n", encoding="utf-8")
    check_classes(table)
    assert kernel_class("my_secret_kernel_7") == "other"
    monkeypatch.setenv(VARIABLE, str(table))
    assert kernel_class("my_secret_kernel_7") == "attention"
    assert kernel_class("ncclDevKernel_AllReduce") == "moe"
    assert kernel_class("nvjet_tst_64x64") == "gemm"
    assert current_version() != before, "columns that were cached with other classes must not be used"


def test_a_table_in_the_project_is_used(tmp_path, monkeypatch):
    (tmp_path / "kernel_classes.csv").write_text("class,match,pattern,source\nrope,last,^zz_,us\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert kernel_class("ns::zz_1") == "rope"


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (b"pattern\nx\n", "its first line must name the columns class and pattern"),
        (b"", "its first line must name"),
        (b"class,pattern\nmatmul,x\n", "there is no kernel class 'matmul'"),
        (b"class,pattern\ngemm,(x\n", "is not a regular expression"),
        (b"class,pattern\ngemm,\n", "the pattern is empty"),
        (b"class,match,pattern\ngemm,somewhere,x\n", "match must be last, name, qualified or all"),
        (b"\xff\xfe\x00", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_malformed_table_is_one_line_that_says_what_is_wrong(tmp_path, table, says):
    path = tmp_path / "mine.csv"
    if table is not None:
        path.write_bytes(table)
    with pytest.raises(UserError, match=says):
        check_classes(path)


def test_the_table_names_a_source_for_every_line():
    path = ROOT / "cclsearch" / "trace" / "rules" / "kernel_classes.csv"
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(load_classes().rules)
    assert all(row["source"] for row in rows)


@given(st.text(max_size=300) | st.from_regex(r"(void )?[_a-zA-Z:<>() ,0-9.\[\]]{0,200}", fullmatch=True))
@settings(max_examples=150, deadline=None)
def test_any_text_has_a_class_and_a_family(text):
    assert kernel_class(text) in CLASSES
    assert len(kernel_family(text)) <= 120
    assert len(split_kernel_name(text).arguments) <= MAX_ARGUMENTS


def test_a_name_of_any_length_is_cut_before_it_is_searched():
    found = split_kernel_name("triton_red_fused_" + "mean_" * 100_000)
    assert len(found.all) <= MAX_NAME
    assert kernel_class("triton_red_fused_" + "mean_" * 100_000) == "reduction"


def test_a_search_does_not_begin_with_a_malformed_table(project, cli):
    (project / "kernel_classes.csv").write_text("class,pattern\ngemm,(\n", encoding="utf-8")
    assert "is not a regular expression" in cli.err(["run", "--workload", "wl2", "--budget", "1"])
    assert not (project / "runs").exists()
