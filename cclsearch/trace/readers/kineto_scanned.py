"""Adds the pieces that the C library scanned to the table under construction, as `kineto.py` adds structs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cclsearch.trace.readers.kineto import KinetoBuilder
from cclsearch.trace.readers.kineto_args import SHAPED_OPS
from cclsearch.trace.readers.kineto_native import GRIDS, NAMES, SHAPES, THREADS, Numbering, PieceScanner, ScannedPiece


class ScannedRows:
    """Appends scanned pieces to a builder, with the builder's numbers of names, threads, shapes, grids and calls."""

    def __init__(self, builder: KinetoBuilder, scanner: PieceScanner) -> None:
        self._builder = builder
        self._scanner = scanner
        rows = builder.rows
        self._names = Numbering(self._number_name)
        self._threads = Numbering(lambda number: rows.threads[scanner.decoded(THREADS, number)])
        self._shapes = Numbering(lambda number: rows.shapes[self._shape_key(number)])
        self._grids = Numbering(lambda number: rows.grids[self._grid_key(number)])
        self._calls = Numbering(self._number_call)

    def add(self, piece: ScannedPiece) -> None:
        """Append the rows of the piece."""
        builder = self._builder
        for category in piece.categories:
            builder.kind_of[category]
        builder.num_bad += piece.raw.bad
        builder.base_us = self._scanner.base_us
        builder.add_metas(piece)
        points = (piece.point_us, piece.point_allocated, piece.point_reserved, piece.point_device)
        builder.add_memory_points(zip(*(column.tolist() for column in points), strict=True))
        if piece.raw.rows:
            self._add_rows(piece)
        builder.check_size()

    def _add_rows(self, piece: ScannedPiece) -> None:
        names = self._names.translate(piece.name)
        threads = self._threads.translate(piece.thread)
        self._builder.add_processes(threads)
        on_device = piece.detail_row
        threads[on_device] = piece.stream[on_device]
        if not self._builder.rows.num_rows:
            self._builder.rows.expect_rows(self._builder.reader.expected_in_all(len(names)))
        first = self._builder.rows.add_rows(
            ts_ns=piece.ts_ns,
            dur_ns=piece.dur_ns,
            kind=piece.kind,
            name_id=names,
            device=piece.device,
            stream=threads,
            corr=piece.corr,
        )
        if len(on_device):
            self._add_details(piece, first)
        if len(piece.shaped_row):
            self._add_shapes(piece, names, first)

    def _add_details(self, piece: ScannedPiece, first: int) -> None:
        builder, rows = self._builder, self._builder.rows
        details = piece.detail_row + np.int32(first)
        builder.add_sizes(details, piece.detail_bytes, piece.detail_blocks, piece.detail_ext)
        with_grid = piece.detail_grid >= 0
        rows.add_sparse("grid_id", details[with_grid], self._grids.translate(piece.detail_grid[with_grid]))
        if not len(piece.call_row):
            return
        rows.add_sparse("coll_id", piece.call_row + np.int32(first), self._calls.translate(piece.call_key))

    def _add_shapes(self, piece: ScannedPiece, names: NDArray[np.int32], first: int) -> None:
        builder = self._builder
        shaped = builder.is_shaped(names[piece.shaped_row])
        at, external = piece.shaped_row[shaped] + np.int32(first), piece.shaped_ext[shaped]
        builder.add_shapes(at, self._shapes.translate(piece.shaped_key[shaped]), external)

    def _number_name(self, number: int) -> int:
        name = self._scanner.decoded(NAMES, number)
        self._scanner.set_shaped(number, bool(SHAPED_OPS.match(name)))
        return self._builder.rows.names[name]

    def _number_call(self, number: int) -> int:
        name, args = self._scanner.call_args[number]
        return self._builder.number_call(int(self._names.translate(np.array([name], np.int32))[0]), args)

    def _shape_key(self, number: int) -> tuple[bytes, ...]:
        return tuple(self._scanner.text(SHAPES, number).split(b"\0")[:-1])

    def _grid_key(self, number: int) -> tuple[bytes, bytes, int | None, int | None]:
        grid, block, registers, shared, _ = self._scanner.text(GRIDS, number).split(b"\0")
        return grid, block, int(registers) if registers else None, int(shared) if shared else None
