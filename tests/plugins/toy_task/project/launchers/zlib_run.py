"""Run script of `zlib`: compresses logs of a fixed size with zlib in threads, and reports throughput and latency."""

import hashlib
import json
import os
import platform
import random
import resource
import socket
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

PASSES = 4
"""The first warms up."""


def make_logs(num_bytes):
    """Return the first `num_bytes` of a web server's log; the same on every machine."""
    draw = random.Random(0)
    lines = [
        f"{draw.randrange(10**6):06d} GET /items/{draw.randrange(10**5)} 200 {draw.randrange(900)} ms\n"
        for _ in range(2000)
    ]
    shortest = min(map(len, lines))
    return "".join(draw.choices(lines, k=num_bytes // shortest + 1)).encode()[:num_bytes]


def compress(chunk, level):
    """Return the compressed chunk and the seconds it took."""
    started = time.perf_counter()
    packed = zlib.compress(chunk, level)
    return packed, time.perf_counter() - started


def compress_all(chunks, workers, level):
    """Return the compressed chunks, the seconds of each, and the seconds of the pass."""
    started = time.perf_counter()
    with ThreadPoolExecutor(workers) as pool:
        done = list(pool.map(compress, chunks, [level] * len(chunks)))
    return [packed for packed, _ in done], [seconds for _, seconds in done], time.perf_counter() - started


def main():
    with open(os.environ["CCL_CONFIG"]) as file:
        given = json.load(file)
    knobs = given["config"]
    data = make_logs(given["work"]["total_mib"] * 2**20)
    size = knobs["chunk_kib"] * 1024
    chunks = [data[start : start + size] for start in range(0, len(data), size)]
    pass_times_s, latencies_s = [], []
    for number in range(PASSES):
        packed, chunk_times_s, seconds = compress_all(chunks, knobs["workers"], knobs["level"])
        if number:
            pass_times_s.append(seconds)
            latencies_s += chunk_times_s
    restored = b"".join(map(zlib.decompress, packed))
    result = {
        "status": "ok",
        "world_size": 1,
        "input_bytes": len(restored),
        "input_sha256": hashlib.sha256(restored).hexdigest(),
        "output_bytes": sum(map(len, packed)),
        "pass_times_s": pass_times_s,
        "latency_p99_s": sorted(latencies_s)[int(0.99 * len(latencies_s))],
        "peak_memory_bytes": [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024],
        "memory_kind": "rss",
        "versions": {"python": platform.python_version(), "zlib": zlib.ZLIB_RUNTIME_VERSION},
        "devices": ["cpu"],
        "hosts": [socket.gethostname()],
    }
    path = os.path.join(os.environ["CCL_TRIAL_DIR"], "result.json")
    with open(path + ".part", "w") as file:
        json.dump(result, file)
    os.replace(path + ".part", path)


if __name__ == "__main__":
    sys.exit(main())
