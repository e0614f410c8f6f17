"""Reads the JSON of Kineto, scanned in C or parsed in Python, and tells XLA's apart by the head or the first events."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from cclsearch.core.text import one_line
from cclsearch.trace.events import DEVICE_WORK, EventTable, Kind, Reason, rows_of_kinds
from cclsearch.trace.names.kernels import kernel_class
from cclsearch.trace.readers.json_events import EventReader
from cclsearch.trace.readers.json_structs import Meta
from cclsearch.trace.readers.kineto.builder import SHAPED_OPS, KinetoBuilder, plain_args
from cclsearch.trace.readers.kineto.parts import ScanParts
from cclsearch.trace.readers.kineto.scanner import (
    CALLS,
    GRIDS,
    NAMES,
    SHAPES,
    THREADS,
    Numbering,
    PieceScanner,
    ScannedPiece,
    open_scanner,
)
from cclsearch.trace.readers.kineto.table import build_tables
from cclsearch.trace.readers.stream import ByteStream, ReadLimits, TraceError


class ScannedPieces:
    """Appends the pieces of any number of scanners to a builder."""

    def __init__(self, builder: KinetoBuilder) -> None:
        self._builder = builder
        self._rows_of: dict[PieceScanner, ScannedRows] = {}

    def add(self, piece: ScannedPiece) -> None:
        """Append the rows of the piece."""
        if piece.scanner not in self._rows_of:
            self._rows_of[piece.scanner] = ScannedRows(self._builder, piece.scanner)
        for name in self._rows_of[piece.scanner].add(piece):
            kernel_class(name)  # while other threads scan: the table asks for it again


class ScannedRows:
    """Appends the pieces of one scanner to a builder, with its numbers of names, threads, shapes, grids and calls."""

    def __init__(self, builder: KinetoBuilder, scanner: PieceScanner) -> None:
        self._builder = builder
        self._scanner = scanner
        rows = builder.rows
        self._names = Numbering(scanner, NAMES, self._number_name)
        self._threads = Numbering(scanner, THREADS, lambda number: rows.threads[scanner.decoded(THREADS, number)])
        self._shapes = Numbering(
            scanner, SHAPES, lambda number: rows.shapes[tuple(scanner.text(SHAPES, number).split(b"\0")[:-1])]
        )
        self._grids = Numbering(scanner, GRIDS, lambda number: rows.grids[self._grid_key(number)])
        self._calls = Numbering(scanner, CALLS, self._number_call)

    def add(self, piece: ScannedPiece) -> list[str]:
        """Append the rows of the piece; return the names of its kernels that are new to the table."""
        builder = self._builder
        num_known = len(builder.rows.names)
        for category in piece.categories:
            builder.kind_of[category]
        builder.num_bad += piece.raw.bad
        builder.base_us = self._scanner.base_us
        builder.add_metas(piece)
        if len(piece.point_us):
            builder.add_memory_points(piece.point_us, piece.point_allocated, piece.point_reserved, piece.point_device)
        if piece.raw.rows:
            self._add_rows(piece)
        builder.check_size()
        new = list(builder.rows.names)[num_known:] if len(builder.rows.names) > num_known else []
        if not new:
            return new
        kernels = self._names.translate(piece.name[piece.kind == Kind.COMPUTE]) - num_known
        return [new[number] for number in np.flatnonzero(np.bincount(kernels[kernels >= 0])).tolist()]

    def _add_rows(self, piece: ScannedPiece) -> None:
        rows, count = self._builder.rows, piece.raw.rows
        names, threads = self._names.map_of(piece.name), self._threads.map_of(piece.thread)
        process_of = self._builder.process_of_threads()
        processes = np.where(threads < 0, np.int32(0), process_of[threads])
        if not rows.num_rows:
            rows.expect_rows(self._builder.reader.expected_in_all(count))
        first = rows.num_rows
        target = {**rows.extend(count), "process": self._builder.process.extend(count)}
        self._scanner.copy_rows((names, threads, processes), self._builder.host_rows, target)
        self._add_details(piece, np.int32(first))
        if len(piece.shaped_row):
            self._add_shapes(piece, np.int32(first))

    def _add_details(self, piece: ScannedPiece, first: np.int32) -> None:
        builder, rows = self._builder, self._builder.rows
        rows.add_sparse("bytes", piece.size_row + first, piece.size_bytes)
        builder.add_blocks(piece.block_row + first, piece.block_per_sm)
        builder.ext_of_device.append(piece.external_row + first, piece.external_id)
        rows.add_sparse("grid_id", piece.grid_row + first, self._grids.translate(piece.grid_key))
        if len(piece.call_row):
            rows.add_sparse("coll_id", piece.call_row + first, self._calls.translate(piece.call_key))

    def _add_shapes(self, piece: ScannedPiece, first: np.int32) -> None:
        builder = self._builder
        shaped = builder.is_shaped(self._names.translate(piece.name[piece.shaped_row]))
        at, external = piece.shaped_row[shaped] + first, piece.shaped_ext[shaped]
        builder.add_shapes(at, self._shapes.translate(piece.shaped_key[shaped]), external)

    def _number_name(self, number: int) -> int:
        name = self._scanner.decoded(NAMES, number)
        self._scanner.set_shaped(number, bool(SHAPED_OPS.match(name)))
        return self._builder.rows.names[name]

    def _number_call(self, number: int) -> int:
        name, args = self._scanner.call_args[number]
        return self._builder.number_call(int(self._names.translate(np.array([name], np.int32))[0]), args)

    def _grid_key(self, number: int) -> tuple[bytes, bytes, int | None, int | None]:
        grid, block, registers, shared, _ = self._scanner.text(GRIDS, number).split(b"\0")
        return grid, block, int(registers) if registers else None, int(shared) if shared else None


def read_chrome_json(path: Path, limits: ReadLimits) -> tuple[EventTable, ...]:
    """Return one table per process (Kineto) or per device (XLA)."""
    with ByteStream(path, limits) as stream:
        reader = EventReader(stream, limits, scanner=open_scanner())
        builder = KinetoBuilder(reader, limits)
        scanned = ScannedPieces(builder)
        for batch in reader:
            if isinstance(batch, ScanParts):
                batch.scan_all(scanned.add)
            elif builder.base_us is None and is_xla(reader, batch):
                break
            elif isinstance(batch, list):
                builder.add_batch(batch)
            else:
                scanned.add(batch)
        else:
            return _finish(builder, path)
    from cclsearch.trace.readers.xla.read import read_xla_json

    return read_xla_json(path, limits)


def is_xla(reader: EventReader, batch: Iterable[Any]) -> bool:
    """Whether the names of processes are XLA's (`/host:CPU`, `/device:TPU:0`) and the head is not Kineto's."""
    if "schemaVersion" in reader.metadata or "deviceProperties" in reader.metadata:
        return False
    processes = [event for event in batch if isinstance(event, Meta) and event.name == "process_name"]
    return any(str(plain_args(event.args).get("name", "")).startswith(("/host:", "/device:")) for event in processes)


def _finish(builder: KinetoBuilder, path: Path) -> tuple[EventTable, ...]:
    accelerator = builder.unsupported
    unsupported = TraceError(Reason.FORMAT_UNSUPPORTED, f"events of an unsupported accelerator ({accelerator})")
    if not builder.rows.num_rows:
        if accelerator:
            raise unsupported
        reason = Reason.TRACE_TRUNCATED if not builder.reader.complete else Reason.UNREADABLE
        others = ", ".join(repr(one_line(name, 40)) for name, kind in builder.kind_of.items() if name and not kind)
        raise TraceError(reason, f"contains no event of a known kind{f', only {others}' if others else ''}")
    tables = build_tables(builder, source=path.name, is_complete=builder.reader.complete)
    table = tables[0]
    if accelerator and (table.accelerator == "cpu" or not len(rows_of_kinds(table.kind, DEVICE_WORK))):
        raise unsupported
    return tables
