"""Prints size and speed of `score --perfetto`, and checks the files with Perfetto's own protobuf classes.

    python benchmarks/perfetto.py TRACE... [--protos PYTHON]

PYTHON is an interpreter with the package `perfetto` (its generated classes). With it, every packet is decoded by them:
known fields only, each slice on a described track with a defined name, begins and ends balanced and in order.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cclsearch.trace.export.perfetto import export_perfetto
from cclsearch.trace.read import read_traces
from cclsearch.trace.view import TraceView

CHECK = """
import sys
from google.protobuf.unknown_fields import UnknownFieldSet
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace
data = open(sys.argv[1], "rb").read()
trace = Trace.FromString(data)
tracks, names, depth, last, wrong = set(), set(), {}, {}, 0
for packet in trace.packet:
    wrong += sum(len(UnknownFieldSet(part)) for part in (packet, packet.track_event, packet.track_descriptor))
    if packet.HasField("track_descriptor"):
        tracks.add(packet.track_descriptor.uuid)
    names |= {(packet.trusted_packet_sequence_id, entry.iid) for entry in packet.interned_data.event_names}
    if packet.HasField("track_event"):
        event = packet.track_event
        track = event.track_uuid
        begins, ends = event.type == event.TYPE_SLICE_BEGIN, event.type == event.TYPE_SLICE_END
        depth[track] = depth.get(track, 0) + begins - ends
        wrong += track not in tracks or depth[track] < 0 or packet.timestamp < last.get(track, 0)
        wrong += begins and (packet.trusted_packet_sequence_id, event.name_iid) not in names
        last[track] = packet.timestamp
wrong += sum(depth.values())
print(f"{len(trace.packet)} packets, {len(tracks)} tracks, {wrong} wrong")
"""


def main(arguments: list[str]) -> int:
    """Print a line for each trace; 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--protos", metavar="PYTHON", default="")
    args = parser.parse_args(arguments)
    print("| trace | rows | CPU time | per row | file | bytes per row | decoded by Perfetto's classes |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    good = True
    with tempfile.TemporaryDirectory() as folder:
        for path in args.traces:
            trace = TraceView(read_traces(path, use_cache=False))
            rows = sum(len(view.table) for view in trace.ranks.values())
            target = Path(folder) / "timeline.pftrace"
            started = time.process_time()
            export_perfetto(trace, target)
            took, size = time.process_time() - started, target.stat().st_size
            found = "not checked"
            if args.protos:
                done = subprocess.run([args.protos, "-c", CHECK, str(target)], capture_output=True, text=True)
                found = done.stdout.strip() or done.stderr.strip().splitlines()[-1]
                good &= found.endswith(" 0 wrong")
            columns = (
                rows,
                f"{took:.2f} s",
                f"{1e6 * took / rows:.1f} us",
                f"{size / 1e6:.2f} MB",
                f"{size / rows:.0f}",
            )
            print(f"| {path.name} | {' | '.join(map(str, columns))} | {found} |")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
