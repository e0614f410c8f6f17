"""Writes Perfetto's trace format packet by packet (`protos/perfetto/trace/trace_packet.proto`).

Every sequence of packets has its own table of names, which its first packets define. Slices of a track must nest, so
those that overlap get further tracks of the same name, which Perfetto's UI shows as one group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import IO

from cclsearch.trace.export.protobuf import (
    bytes_field,
    fixed64_field,
    present_uint_field,
    text_field,
    uint_field,
)

MAX_NAME_CHARS = 1000
_NAMES_PER_PACKET = 500
_MAX_NOTES_KEPT = 10_000
"""Encoded annotations that are used again: classes, steps and groups repeat, bytes of copies seldom."""
_BEGIN, _END, _COUNTER = 1, 2, 4
"""`TrackEvent.Type`."""
_CLEARED, _NEEDS_STATE = 1, 2
"""`TracePacket.SequenceFlags`: the table of names starts here, or is used."""


class Unit(IntEnum):
    """`CounterDescriptor.Unit`."""

    COUNT = 2
    BYTES = 3


@dataclass(frozen=True, slots=True)
class Slice:
    """One span on a track, in ns."""

    start_ns: int
    end_ns: int
    name: int
    """Number of the name in the sequence's table."""
    flows_out: tuple[int, ...] = ()
    """Ids of the arrows that begin here, unique in the file."""
    flow_in: int = 0
    notes: tuple[tuple[int, int | str], ...] = ()
    """(number of the name, value)."""


class PacketSequence:
    """Packets of one rank: one process in Perfetto, with its tracks."""

    def __init__(self, file: IO[bytes], number: int, process: str, *, tracks: Iterator[int]) -> None:
        self._file = file
        self._sequence = uint_field(10, number)
        self._event_end = present_uint_field(13, _NEEDS_STATE) + self._sequence
        self._notes: dict[tuple[int, int | str], bytes] = {}
        self._tracks = tracks
        self._names: dict[str, int] = {}
        self._note_names: dict[str, int] = {}
        self._process = next(tracks)
        self._write(present_uint_field(13, _CLEARED))
        descriptor = uint_field(1, number) + text_field(6, process[:MAX_NAME_CHARS]) + uint_field(3, number)
        self._write(bytes_field(60, uint_field(1, self._process) + bytes_field(3, descriptor)))

    def _write(self, body: bytes) -> None:
        self._file.write(bytes_field(1, body + self._sequence))

    def number_names(self, names: Iterable[str]) -> list[int]:
        """Return the number of each name in the sequence's table, to which new names are added."""
        return _add_names(names, self._names, lambda body: self._write_names(2, body))

    def number_note_names(self, names: Iterable[str]) -> list[int]:
        """Return the number of each name of an annotation."""
        return _add_names(names, self._note_names, lambda body: self._write_names(3, body))

    def _write_names(self, field: int, entries: Iterable[bytes]) -> None:
        body = b"".join(bytes_field(field, entry) for entry in entries)
        self._write(bytes_field(12, body) + present_uint_field(13, _NEEDS_STATE))

    def add_slices(self, track: str, slices: Iterable[Slice]) -> None:
        """Write a track, and further ones of the same name for slices that overlap without nesting."""
        lanes: list[tuple[bytes, list[int]]] = []
        for item in sorted(slices, key=lambda item: (item.start_ns, -item.end_ns)):
            for head, open_ends in lanes:
                while open_ends and open_ends[-1] <= item.start_ns:
                    self._end(head, open_ends.pop())
                if not open_ends or open_ends[-1] >= item.end_ns:
                    break
            else:
                head, open_ends = uint_field(11, self._add_track(track)), []
                lanes.append((head, open_ends))
            self._begin(head, item)
            open_ends.append(item.end_ns)
        for head, open_ends in lanes:
            while open_ends:
                self._end(head, open_ends.pop())

    def _begin(self, track: bytes, item: Slice) -> None:
        event = present_uint_field(9, _BEGIN) + track + uint_field(10, item.name)
        for flow in item.flows_out:
            event += fixed64_field(47, flow)
        if item.flow_in:
            event += fixed64_field(48, item.flow_in)
        for note in item.notes:
            event += self._notes.get(note) or self._encode_note(note)
        self._event(item.start_ns, event)

    def _encode_note(self, note: tuple[int, int | str]) -> bytes:
        name, value = note
        encoded = text_field(6, value) if isinstance(value, str) else present_uint_field(4, value)
        encoded = bytes_field(4, uint_field(1, name) + encoded)
        if len(self._notes) < _MAX_NOTES_KEPT:
            self._notes[note] = encoded
        return encoded

    def _end(self, track: bytes, time_ns: int) -> None:
        self._event(time_ns, present_uint_field(9, _END) + track)

    def _event(self, time_ns: int, event: bytes) -> None:
        self._file.write(
            bytes_field(1, present_uint_field(8, max(time_ns, 0)) + bytes_field(11, event) + self._event_end)
        )

    def _add_track(self, name: str, more: bytes = b"") -> int:
        track = next(self._tracks)
        self._write(bytes_field(60, uint_field(1, track) + uint_field(5, self._process) + text_field(2, name) + more))
        return track

    def add_counter(self, name: str, unit: Unit, points: Iterable[tuple[int, int]]) -> None:
        """Write a counter: its value from each time (ns) on."""
        track = uint_field(11, self._add_track(name, bytes_field(8, uint_field(3, unit))))
        for time_ns, value in points:
            self._event(time_ns, present_uint_field(9, _COUNTER) + track + present_uint_field(30, value))


def _add_names(names: Iterable[str], known: dict[str, int], write: Callable[[list[bytes]], None]) -> list[int]:
    numbers, entries = [], []
    for name in names:
        name = name[:MAX_NAME_CHARS] or "(no name)"
        if name not in known:
            known[name] = len(known) + 1
            entries.append(uint_field(1, known[name]) + text_field(2, name))
        numbers.append(known[name])
        if len(entries) >= _NAMES_PER_PACKET:
            write(entries)
            entries = []
    if entries:
        write(entries)
    return numbers
