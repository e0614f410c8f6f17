"""A whole search over the order of devices, with really trained trials over shaped links. Needs root; else skipped."""

from __future__ import annotations

import json

import pytest
from trials import copy_framework

from benchmarks.shaped_links import CUBE, can_shape, shaped
from cclsearch.cli import main
from cclsearch.core.trust import confirm
from cclsearch.network.matrix import LinkMatrix
from cclsearch.network.read import write_links
from cclsearch.record.ledger import LEDGER_FILE, fold_ledger

pytestmark = [pytest.mark.skipif(not can_shape(), reason="needs root and ip, tc and namespaces")]


def test_a_search_ends_with_the_devices_paired_where_their_links_are_faster(project):
    """Two double links, 0-3 and 1-2, as in a DGX-1: stages of two tensor-parallel ranks belong there."""
    pytest.importorskip("torch")
    copy_framework(project / "launchers", "calm")
    with shaped(CUBE) as names:
        links = LinkMatrix(
            endpoints=tuple(names),
            nodes=("a",) * 4,
            gbps=tuple(tuple(rate / 1e3 for rate in row) for row in CUBE),
            latency_us=((50.0,) * 4,) * 4,
        )
        (project / "launchers" / "cube.links.csv").write_text(write_links(links))
        (project / "launchers" / "cube.yaml").write_text(
            f"launcher: local\nnetwork_namespaces: [{', '.join(names)}]\nnamespaces_per_node: 4\n"
            "environment: {OMP_NUM_THREADS: 1}\nhardware: {num_accelerators: 4, accelerators_per_node: 4}\n"
        )
        confirm(project)
        knobs = ["device_order=given,links", "tp=2", "dp=1", "pp=2", "micro_batch_size=16", "zero_stage=0"]
        knobs += ["activation_checkpointing=none"]
        words = ["run", "-w", "tiny", "--framework", "calm", "-l", "cube", "--sampler", "grid", "-b", "2"]
        words += ["--name", "r", "--set", "workload.data.seq_len=16"]
        words += [word for knob in knobs for word in ("--knob", knob)]
        assert main(words) == 0
    state = fold_ledger(project / "runs" / "r" / LEDGER_FILE)
    assert {trial.config["device_order"] for trial in state.trials.values()} == {"given", "links"}
    searched = [state.trials[number] for number, brief in state.trials.briefs.items() if brief.is_search]
    assert [trial.loss is not None for trial in searched] == [True, True], "both were admitted"
    assert state.best.config["device_order"] == "links"
    ran = json.loads((project / "runs" / "r" / "trials" / f"{state.best.number:04}" / "config.json").read_text())
    assert {frozenset(ran["places"][:2]), frozenset(ran["places"][2:])} == {frozenset({0, 3}), frozenset({1, 2})}
