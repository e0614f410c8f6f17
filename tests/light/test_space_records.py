"""Configurations that ran in public records are in their search spaces, and are predicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from paths import ROOT

from cclsearch.card.catalogue import find_by_name
from cclsearch.card.load import load_card
from cclsearch.card.model import Card, KnobDeclaration, make_model
from cclsearch.cli import main
from cclsearch.core.errors import UserError
from cclsearch.core.values import Config, Value
from cclsearch.recording.load import find_recordings, load_recording
from cclsearch.space.build import build_space, explain_config, resolve_knobs
from cclsearch.space.framework import Framework, load_framework
from cclsearch.space.knobs import meaning_of
from cclsearch.space.rule import RuleKind
from cclsearch.stats.closed_form import predict_space


def judge(card: Card, framework: Framework, given: Mapping[str, Value]) -> str:
    """Return the names of the rules that refuse every configuration with these values; empty if one is in the space.

    A configuration that does the same as another (rules of kind `same`) is in the space as that one.
    A knob that the framework offers only on request is added with its own choices, as `--knob` does.
    """
    known = {knob.name: knob for knob in (*framework.knobs, *framework.optional_knobs)}
    lacking = [name for name, value in given.items() if name not in known and value != meaning_of(name).neutral]
    if lacking:
        return f"{framework.name} has no knob {', '.join(lacking)}"
    extra = [
        KnobDeclaration(name=name, choices=knob.resolve(card, use_fewer=True).choices)
        for name in given
        if (knob := framework.find_optional(name)) is not None and given[name] != meaning_of(name).neutral
    ]
    try:
        knobs = resolve_knobs(card, framework, extra)
    except UserError as error:
        return str(error)
    names = {knob.name for knob in knobs}
    config = {name: value for name, value in given.items() if name in names}
    verdicts = explain_config(card, framework, config, extra)
    return ", ".join(
        f"{v.rule} ({v.detail.split(';')[0]})" if v.rule == "choices" else v.rule
        for v in verdicts
        if v.ok is False and v.kind is not RuleKind.SAME
    )


def judge_landscapes() -> Iterator[tuple[str, str]]:
    """Yield every measured configuration of the landscapes with the rules of its framework that refuse it."""
    for found in find_recordings(ROOT / "benchmarks" / "landscapes"):
        recording = load_recording(found)
        framework = load_framework("nanotron" if "nanotron" in recording.name else "megatron")
        for row in recording.rows:
            if row.status.value == "ok":
                known = {knob.name for knob in framework.knobs}
                given = {name: value for name, value in row.config.items() if name in known}
                if isinstance(recomputes := given.get("activation_checkpointing"), bool):
                    given["activation_checkpointing"] = "full" if recomputes else "none"
                yield f"{recording.name} {row.config}", judge(recording.card, framework, given)


MEGATRON_BRIDGE = "NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md"
RECORDS: list[tuple[str, int, int, int, str, dict[str, Any]]] = [
    # accelerators, sequence, batch: Megatron-Bridge (Apache-2.0), docs/performance-summary.md and its archive
    ("deepseek-v3", 256, 4096, 4096, "megatron", {"pp": 2, "virtual_pipeline": 8, "ep": 32, "dp": 128}),
    ("deepseek-v3", 256, 4096, 4096, "megatron", {"pp": 4, "virtual_pipeline": 4, "ep": 64, "dp": 64}),
    ("llama-3.1-405b", 256, 8192, 1536, "megatron", {"tp": 4, "pp": 16, "virtual_pipeline": 8, "dp": 4}),
    ("llama-3.1-405b", 128, 8192, 64, "megatron",
     {"tp": 8, "pp": 8, "cp": 2, "virtual_pipeline": 8, "dp": 1, "sequence_parallel": True}),
    ("llama-3-70b", 64, 8192, 128, "megatron", {"tp": 2, "pp": 4, "virtual_pipeline": 5, "dp": 8}),
    ("qwen3-235b-a22b", 256, 4096, 8192, "megatron", {"pp": 8, "virtual_pipeline": 3, "ep": 32, "dp": 32}),
    ("qwen3-30b-a3b", 8, 4096, 512, "megatron", {"pp": 2, "virtual_pipeline": 12, "ep": 4, "dp": 4}),
    # pytorch/torchtitan (BSD-3), benchmarks: 405B with FSDP 64 and TP 8, later with context parallelism
    ("llama-3.1-405b", 512, 8192, 128, "torchtitan", {"tp": 8, "dp": 64, "zero_stage": 3, "micro_batch_size": 2}),
    ("llama-3.1-405b", 512, 131072, 8, "torchtitan", {"tp": 8, "cp": 8, "dp": 8, "zero_stage": 3}),
]  # fmt: skip


@pytest.mark.parametrize(("model", "ranks", "seq_len", "batch", "framework", "layout"), RECORDS)
def test_a_published_layout_is_in_the_space_of_its_card(model, ranks, seq_len, batch, framework, layout):
    base, known = load_card("wl2"), find_by_name(model)
    hardware = base.hardware.model_copy(update={"num_accelerators": ranks, "accelerators_per_node": 8})
    work = Config({"global_batch_size": batch, "seq_len": seq_len})
    card = base.model_copy(update={"model": make_model(known.fields), "hardware": hardware, "work": work})
    assert judge(card, load_framework(framework), {"micro_batch_size": 1, **layout}) == ""


def test_every_configuration_of_a_landscape_that_ran_is_in_its_space():
    judged = list(judge_landscapes())
    assert len(judged) > 900
    assert [(name, refused) for name, refused in judged if refused] == []


WINNERS: list[dict[str, Any]] = [
    {"tp": 4, "dp": 1, "pp": 3, "micro_batch_size": 4},
    {"tp": 2, "dp": 2, "pp": 3, "micro_batch_size": 1},
]
"""Of cornell-sysphotonics/ccl-bench's agent: 27 layers, 64 experts, batch 8, 12 of 16 accelerators."""


@pytest.mark.parametrize("framework", ["torchtitan", "megatron"])
@pytest.mark.parametrize("winner", WINNERS)
def test_the_winners_of_the_reference_are_in_the_space_of_wl5_and_predicted(winner, framework):
    card = load_card("wl5")
    assert (card.arch.num_layers, card.number("global_batch_size"), card.hardware.num_accelerators) == (27, 8, 16)
    space = build_space(card, load_framework(framework), use_fewer=True)
    match_N = space.matching(winner)
    assert match_N.any()
    assert set(space.num_accelerators_N[match_N].tolist()) == {12}
    prediction = predict_space(card, space)
    assert (prediction.value_N[match_N] > 0).all()
    assert (prediction.fits_N[match_N] > 0.5).any()


def test_the_commands_show_a_winner_on_fewer_accelerators(cli):
    words = ["--workload", "wl5", "--use-fewer", "--config", "tp=4,dp=1,pp=3,micro_batch_size=4"]
    assert "configurations of the search space match" in cli.out(["space", "explain", *words])
    assert "tp=4 dp=1 pp=3" in cli.out(["predict", *words, "--top", "1"])
    assert main(["space", "explain", *[word for word in words if word != "--use-fewer"]]) == 1


def test_what_is_only_unwise_is_predicted_to_be_slow():
    card = load_card("wl2")
    space = build_space(card, load_framework("megatron"))
    prediction = predict_space(card, space)
    best = prediction.value_N[prediction.fits_N > 0.5].min()
    across = space.column("tp").astype(int) > card.hardware.accelerators_per_node
    pp, slots = space.column("pp").astype(int), space.column("dp").astype(int) * space.column("micro_batch_size")
    starved = pp * slots.astype(int) > card.number("global_batch_size")
    assert across.any()
    assert (starved & (pp > 1)).any()
    for unwise in (across, starved & (pp > 1)):
        assert prediction.value_N[unwise & (prediction.fits_N > 0.5)].min() > 1.3 * best
