"""Fuzzes the trace scanner in C: built with the address and undefined-behaviour sanitizers, compared with Python.

    python tests/fuzz_native.py [--seconds 180] [--seed 0] [--traces FOLDER]

Written traces, or pieces of the folder's real ones, are damaged at random (odd values, members twice, cut and copied
text, broken bytes) and read in blocks of several sizes, by C in one and in two threads and by Python alone: tables and
reports must be equal. Every text is also scanned as one piece of exactly its length. The exit code is 1 if a table
differs or a sanitizer stops the process.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS / "light")]

SANITIZED = ("-std=c11", "-O1", "-g", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer")
BLOCKS = (700, 2000, 9000, 1 << 19)


MAX_EVENTS = 250
"""Events in a piece of a real trace: it is read three times in each round."""


def fuzz(library: Path, seconds: float, seed: int, traces: Path | None = None) -> dict[str, int]:
    """Return how many damaged traces were read, and how many of their tables differ."""
    import trace_writer as write
    from test_trace_native import rich_events, with_long_times
    from trace_mutations import difference, mutate

    from cclsearch.trace.files.find import TraceFile
    from cclsearch.trace.read import read_file
    from cclsearch.trace.readers import json_events
    from cclsearch.trace.readers.json_structs import TimePrefix
    from cclsearch.trace.readers.kineto import scanner
    from cclsearch.trace.readers.stream import ReadLimits

    scanner.library_path = lambda: library
    document = write.kineto_document(rich_events())
    texts = [write.layout_kineto(document), json.dumps(document, ensure_ascii=False), json.dumps(document, indent=1)]
    texts += [json.dumps(document, separators=(",", ":")), with_long_times(texts[0])]
    texts = _real_texts(traces, random.Random(seed)) if traces else texts
    pieces = [_events_of(text) for text in texts]
    counts = {"traces": 0, "pieces": 0, "accepted": 0, "differences": 0}
    scan = scanner.PieceScanner.scan

    def count(self: scanner.PieceScanner, *arguments: object) -> bool:
        accepted = scan(self, *arguments)  # type: ignore[arg-type]
        counts["pieces"] += 1
        counts["accepted"] += accepted
        return accepted

    scanner.PieceScanner.scan = count  # type: ignore[method-assign]
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as scratch:
        while time.monotonic() < end:
            draw = random.Random(seed + counts["traces"])
            which = draw.randrange(len(texts))
            data = mutate(texts[which], draw)
            path = Path(scratch) / "rank0_trace.json"
            path.write_bytes(data)
            json_events.BLOCK_BYTES = draw.choice(BLOCKS)
            answers = []
            for switch, threads in (("0", 1), ("1", 1), ("1", 2)):
                os.environ[scanner.SWITCH] = switch
                file = TraceFile(path, path.name, "chrome-json", "kineto")
                answers.append(read_file(file, limits=ReadLimits(threads=threads)))
            expected, expected_report = answers[0]
            for tables, report in answers[1:]:
                same = report == expected_report and len(tables) == len(expected)
                if not same or any(difference(*pair) for pair in zip(tables, expected, strict=True)):
                    counts["differences"] += 1
                    print(f"seed {seed + counts['traces']} differs", file=sys.stderr)
            piece = bytearray(mutate(pieces[which], draw))
            if piece:
                scanner.PieceScanner().scan(piece, 0, len(piece), TimePrefix.find(bytes(piece)))
            counts["traces"] += 1
    return counts


def _real_texts(folder: Path, draw: random.Random) -> list[str]:
    """Return some consecutive events of each Kineto trace below a folder, four times, laid out as Kineto does."""
    import trace_writer as write

    texts = []
    for path in sorted(folder.glob("**/rank*.json*")):
        document = json.loads((gzip.decompress if path.suffix == ".gz" else bytes)(path.read_bytes()))
        events = document.get("traceEvents", ())
        for _ in range(4 if len(events) else 0):
            start = draw.randrange(max(1, len(events) - MAX_EVENTS))
            texts.append(write.layout_kineto({**document, "traceEvents": events[start : start + MAX_EVENTS]}))
    return texts


def _events_of(text: str) -> str:
    """Return the bracket and the events of a trace, without the bracket that closes the list."""
    start = text.index("[", text.index('"traceEvents"'))
    _, end = json.JSONDecoder().raw_decode(text, start)
    return text[start : end - 1].rstrip()


def main() -> int:
    """Compile with sanitizers, fuzz in a process that loads them, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--traces", type=Path, help="folder with real Kineto traces to damage")
    parser.add_argument("--library", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.library:
        print(json.dumps(fuzz(arguments.library, arguments.seconds, arguments.seed, arguments.traces)))
        return 0
    from cclsearch.trace.readers.native.build import compile_scanner

    with tempfile.TemporaryDirectory() as scratch:
        library = Path(scratch) / "kineto_scan.so"
        problem = compile_scanner(library, (*SANITIZED, *SANITIZERS))
        if problem:
            raise SystemExit(problem)
        return _run(library, arguments)


def _run(library: Path, arguments: argparse.Namespace) -> int:
    runtime = subprocess.run(["cc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    env = {
        **os.environ,
        "LD_PRELOAD": runtime.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONMALLOC": "malloc",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, __file__, "--library", str(library), "--seconds", str(arguments.seconds)]
    command += ["--seed", str(arguments.seed), *(("--traces", str(arguments.traces)) if arguments.traces else ())]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(f"the fuzzed process ended with exit code {done.returncode}", file=sys.stderr)
        return 1
    counts = json.loads(done.stdout.strip().splitlines()[-1])
    print(
        f"{arguments.seconds:.0f} s, seed {arguments.seed}: {counts['traces']} damaged traces, {counts['pieces']}"
        f" pieces scanned with the address and undefined-behaviour sanitizers, {counts['accepted']} accepted, no"
        f" report of a sanitizer, {counts['differences']} tables differ from Python's"
    )
    return 1 if counts["differences"] else 0


if __name__ == "__main__":
    sys.exit(main())
