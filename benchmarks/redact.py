"""Measures how fast secrets are masked: MB/s of processor time for each kind of log, and of hostile lines.

Logs are masked in pieces, as a search does it, with no secret in the environment and with twenty. `--before FOLDER`
also measures the checkout in that folder, line by line as its logs were masked; `--peer PYTHON` detect-secrets in that
interpreter's environment, which finds secrets line by line and masks nothing. Ratios are of this run. `--logs FILE...`
measures files in place of the made lines.
"""

from __future__ import annotations

import argparse
import hashlib
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
_NAMES = ("token", "api_key", "password", "secret")
_PEER = """
import sys, time
from detect_secrets.core.scan import scan_line
from detect_secrets.settings import default_settings
lines = sys.stdin.read().splitlines()
with default_settings():
    list(scan_line(lines[0]))
    size, start = 0, time.process_time()
    for line in lines:
        list(scan_line(line))
        size += len(line) + 1
        if time.process_time() - start > 2:
            break
print(size / (time.process_time() - start) / 1e6)
"""
_MEASURE = """
import sys, time
from cclsearch.core.secrets.redact import redact
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
    parser.add_argument("--peer", type=Path, help="Python that has detect-secrets")
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--logs", type=Path, nargs="+", help="text files to measure")
    options = parser.parse_args()
    for kind, text in _texts(options).items():
        now = _measure(text)
        others = [f"{now:7.1f} MB/s, with 20 secrets {_measure(text, 20):7.1f}"]
        if options.before:
            others.append(_compare("before", now, _run([sys.executable, "-c", _MEASURE], text, options.before)))
        if options.peer:
            others.append(_compare("detect-secrets", now, _run([str(options.peer), "-c", _PEER], text, None)))
        print(f"{kind:24}" + "  ".join(others))
    for piece in _HOSTILE:
        sizes = [_measure(piece * (kib * 1024 // len(piece))) for kib in (64, 256, 1024)]
        print(f"{piece!r:30} " + ", ".join(f"{value:.2f}" for value in sizes) + " MB/s in a line of 64, 256, 1024 KiB")
    return 0


def _texts(options: argparse.Namespace) -> dict[str, str]:
    if options.logs:
        return {path.name: path.read_text("utf-8", "replace") for path in options.logs}
    return {kind: "".join(line(i) + "\n" for i in range(options.lines)) for kind, line in _LOGS.items()}


def _compare(what: str, now: float, other: float) -> str:
    return f"{what} {other:5.2f} MB/s ({now / other:.1f}x)"


def _measure(text: str, secrets: int = 0) -> float:
    """MB/s of the faster of three passes."""
    from cclsearch.core.secrets.redact import Masker
    from cclsearch.run.log_masking import PIECE_BYTES

    data = text.encode()
    masker = Masker({f"{_NAMES[i % 4]}_{i}": hashlib.sha256(b"%d" % i).hexdigest()[:40] for i in range(secrets)})
    pieces = [data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES)]
    taken = []
    for _ in range(3):
        start = time.process_time()
        for piece in pieces:
            masker.mask(piece)
        taken.append(time.process_time() - start)
    return len(data) / min(taken) / 1e6


def _run(command: list[str], text: str, folder: Path | None) -> float:
    answer = subprocess.run(command, input=text, text=True, capture_output=True, check=True, cwd=folder)
    return float(answer.stdout)


if __name__ == "__main__":
    sys.exit(main())
