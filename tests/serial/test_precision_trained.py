"""A trial that trains in a precision of the card's alternatives."""

from __future__ import annotations

import json

from cclsearch.card.load import load_card
from cclsearch.cli import main

ALTERNATIVE = "alternative_precisions=[bf16]"


def test_other_numerics_are_refused_if_they_change_the_losses(tmp_path, monkeypatch, cli):
    """bf16 on equal data and weights deviates by more than the 1e-9 that the card allows; the card's fp32 stays."""
    monkeypatch.chdir(tmp_path)
    knobs = ("tp=1", "dp=1", "pp=1", "micro_batch_size=4", "activation_checkpointing=none", "zero_stage=0")
    options = [word for knob in (*knobs, "precision=bf16,fp32") for word in ("--knob", knob)]
    sets = ("--set", ALTERNATIVE, "--set", "max_loss_deviation=1e-9", "--set", "seq_len=32")
    main(["run", "--workload", "tiny", *sets, *options, "--budget", "4", "--name", "guard"])
    refused = "with precision=bf16, its losses have a relative deviation of"
    ledger = (tmp_path / "runs" / "guard" / "ledger.jsonl").read_text()
    assert "at most 1.0e-09 is allowed" in ledger.split(refused)[1][:200]


def test_a_trial_trains_in_its_precision_and_the_report_names_it(tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    knobs = ("tp=1", "dp=1", "pp=1", "micro_batch_size=4", "activation_checkpointing=none", "zero_stage=0")
    options = [word for knob in (*knobs, "precision=bf16") for word in ("--knob", knob)]
    card = ["--workload", "tiny", "--set", ALTERNATIVE, "--set", "seq_len=32"]
    assert main(["run", *card, *options, "--budget", "1", "--name", "half"]) == 0
    data = json.loads((tmp_path / "runs" / "half" / "trials" / "0001" / "config.json").read_text())
    assert (data["precision"], data["config"]["precision"]) == ("bf16", "bf16")
    assert load_card("tiny").precision == "fp32"
    assert "precision=bf16" in cli.out(["status", "half"])
    assert main(["report", "half"]) == 0
    assert "precision" in next((tmp_path / "runs" / "half").rglob("*.html")).read_text()
