"""Compiles `kineto_scan.c`; run when the package is installed, or by `python -m cclsearch.trace.readers.native.build`.

It is a plain shared library that is called through ctypes: it needs no Python headers, and one build serves every
Python of a platform. This file imports only the standard library, because the build hook runs it before the
dependencies are there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("kineto_scan.c")
TARGET = SOURCE.with_suffix(".so")
FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra")
TIMEOUT_S = 300


def compile_scanner(target: Path = TARGET, flags: tuple[str, ...] = FLAGS) -> str:
    """Write the shared library; return "" or one line that says why it could not be built."""
    names = (os.environ.get("CC"), "cc", "gcc", "clang")
    compiler = next((found for name in names if name and (found := shutil.which(name))), None)
    if compiler is None:
        return "no C compiler found"
    if sys.maxsize < 2**32:
        return "it needs a 64-bit Python"
    temporary = target.with_suffix(f".{os.getpid()}.tmp")
    command = [compiler, *flags, "-o", str(temporary), str(SOURCE)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if done.returncode == 0:
            os.replace(temporary, target)
            return ""
        return (done.stderr.strip().splitlines() or ["the compiler failed"])[0]
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        temporary.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(compile_scanner() or None)
