"""Predictions of aiconfigurator for the configurations and loads of measured tables, for benchmarks/serving.py --peer.

    PYTHON_OF_ITS_ENVIRONMENT benchmarks/serving_peer.py FOLDER OUT.csv

It runs in an environment with `aiconfigurator` (tried: 0.12.0), whose kernel tables it uses (`cli_estimate`, database
mode SILICON, else HYBRID); `silicon_sample.csv`, which holds the measured rows, is not read. A row whose estimate
fails has no figures.
"""

from __future__ import annotations

import contextlib
import csv
import io
import logging
import sys
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from aiconfigurator.cli.api import cli_estimate  # type: ignore[import-not-found]
from aiconfigurator_core.sdk import perf_database  # type: ignore[import-not-found]

QUANT = {"fp4": "nvfp4", "fp8": "fp8_block", "bf16": "bfloat16"}


def estimate(card: dict[str, Any], row: dict[str, str]) -> tuple[float, float] | None:
    """TTFT and TPOT in seconds, as predicted; None if it cannot."""
    workload = card["workload"]
    model, system = workload["model"]["model_family"], workload["hardware"]["xpu_spec"]["model"].removeprefix("nvidia_")
    tp, pp, ep = int(row["tp"]), int(row["pp"]), int(row["ep"])
    ranks = max(1, int(row["num_gpus"]) // (tp * pp))
    is_moe = bool(workload["model"]["moe"])
    moe_ep = max(1, ep) if is_moe else 1
    quant: dict[str, str] = {}
    if "gpt-oss" not in model and row["precision"] in QUANT:
        name = QUANT[row["precision"]] if is_moe or row["precision"] != "fp8" else "fp8"
        quant = {"gemm_quant_mode": name, **({"moe_quant_mode": name} if is_moe else {})}
    for mode in ("SILICON", "HYBRID"):
        try:
            found = cli_estimate(
                model, system, backend_name=row["backend"], database_mode=mode, isl=int(workload["data"]["input_len"]),
                osl=int(workload["data"]["output_len"]), batch_size=max(1, int(row["concurrency"]) // ranks),
                tp_size=tp, pp_size=pp, attention_dp_size=ranks,
                moe_ep_size=moe_ep, moe_tp_size=max(1, tp * ranks // moe_ep), **quant,
            )  # fmt: skip
            return found.ttft / 1e3, found.tpot / 1e3
        except Exception as error:
            print(f"{row['backend']} {model} {system} {mode}: {type(error).__name__}: {error}"[:160], file=sys.stderr)
    return None


def main() -> None:
    logging.disable(logging.CRITICAL)
    # it reads hundreds of YAML files at each call to list the versions that it knows
    perf_database.get_supported_databases = cache(perf_database.get_supported_databases)
    folder, out = map(Path, sys.argv[1:3])
    keys = ("backend", "precision", "tp", "pp", "ep", "num_gpus", "concurrency")
    with out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["table", *keys, "ttft_s", "tpot_s"])
        for path in sorted(folder.glob("srv-*/landscape.csv")):
            if path.parent.name.startswith("srv-disagg"):
                continue
            card = yaml.safe_load(path.with_name("card.yaml").read_text())
            with path.open(newline="") as lines:
                for row in csv.DictReader(lines):
                    with contextlib.redirect_stdout(io.StringIO()):
                        found = estimate(card, row)
                    writer.writerow([path.parent.name, *(row[key] for key in keys), *(found or ("", ""))])


if __name__ == "__main__":
    main()
