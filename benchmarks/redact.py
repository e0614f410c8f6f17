"""Measures how fast secrets are masked: MB/s of processor time for each kind of log, and of hostile lines.

`--before FOLDER` also measures the checkout in that folder, line by line as its logs were masked, and prints the ratio.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

_LOGS: dict[str, Callable[[int], str]] = {
    "training lines": lambda i: (
        f"2024-05-06 12:34:{i % 60:02d}.789 [rank{i % 8}]: step {i} loss=2.{i:06d} grad_norm: 1.23{i} "
        f"tokens_per_s: {i * 7} tokens=4096 lr=1.0e-04"
    ),
    "NCCL INFO lines": lambda i: (
        f"node{i % 4}:12{i % 99:02d}:13 [{i % 8}] NCCL INFO Channel {i % 32:02d}/0 : {i % 8}[{i % 8}] -> "
        f"{(i + 1) % 8}[{(i + 1) % 8}] via P2P/CUMEM/read"
    ),
    "tracebacks": lambda i: (
        f'  File "/opt/env/lib/python3.11/site-packages/torch/nn/modules/module.py", line {i}, in _call_impl\n'
        f"    return forward_call(*args, **kwargs)\nKeyError: 'layers.{i}.attention.key.weight'"
    ),
    "progress bars": lambda i: f"\r{i % 100:3d}%|{'#' * (i % 40):40}| {i}/100000 [00:{i % 60:02d}<01:00, 3.14it/s]",
    "JSON lines": lambda i: (
        f'{{"step": {i}, "loss": 2.{i:05d}, "num_tokens": 4096, "learning_rate": 0.0001, "host": "node{i % 64}"}}'
    ),
}
_HOSTILE = ("token=", "eyJ", "-----BEGIN PRIVATE KEY-----", "eyJ_", "cookie:", "token='", "authorization:")
_MEASURE = """
import sys, time
from cclsearch.core.redact import redact
lines = sys.stdin.read().splitlines(keepends=True)
size, start = 0, time.process_time()
for line in lines:
    redact(line)
    size += len(line)
    if time.process_time() - start > 2:
        break
print(size / (time.process_time() - start) / 1e6)
"""


def main() -> int:
    """Print a table of MB/s."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="folder of another checkout")
    parser.add_argument("--lines", type=int, default=20_000)
    options = parser.parse_args()
    for kind, line in _LOGS.items():
        text = "".join(line(i) + "\n" for i in range(options.lines))
        now, before = _measure(text), ""
        if options.before:
            value = _measure_before(text, options.before)
            before = f"  before {value:5.2f} MB/s  {now / value:6.1f} x"
        print(f"{kind:30} {now:7.1f} MB/s{before}")
    for piece in _HOSTILE:
        sizes = [_measure(piece * (kib * 1024 // len(piece))) for kib in (64, 256, 1024)]
        print(f"{piece!r:30} " + ", ".join(f"{value:.2f}" for value in sizes) + " MB/s in a line of 64, 256, 1024 KiB")
    return 0


def _measure(text: str) -> float:
    from cclsearch.core.redact import Masker

    data, masker = text.encode(), Masker()
    start = time.process_time()
    masker.mask(data)
    return len(data) / (time.process_time() - start) / 1e6


def _measure_before(text: str, folder: Path) -> float:
    answer = subprocess.run(
        [sys.executable, "-c", _MEASURE], input=text, text=True, capture_output=True, check=True, cwd=folder
    )
    return float(answer.stdout)


if __name__ == "__main__":
    sys.exit(main())
