"""The contract of a trace reader: it claims its own files, and refuses broken ones with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np

from cclsearch.trace.events import EventTable, Reason
from cclsearch.trace.readers.base import READERS, Reader
from cclsearch.trace.readers.stream import ReadLimits, TraceError

HEAD_BYTES = 4096
_FOREIGN = {
    "empty": b"",
    "notes.txt": b"only a text\n",
    "image.png": b"\x89PNG\r\n\x1a\n" + bytes(64),
    "settings.yaml": b"launcher: local\n",
    "result.json": b'{"status": "ok", "metrics": {}}',
}


class ReaderContract:
    """Subclass it, set `reader`, and write a good file in `make_file`."""

    reader: ClassVar[str]
    """The registered name."""

    def make_file(self, folder: Path) -> Path:
        """Write a trace of the format with at least one event, and return its path."""
        raise AssertionError(f"{type(self).__name__} must have `make_file`")

    def open(self) -> Reader:
        """Return a new reader."""
        return READERS.get(self.reader)()

    def read(self, path: Path) -> tuple[EventTable, ...]:
        """Return the tables of a file."""
        return self.open().read(path, ReadLimits())

    def test_it_claims_its_own_files_only(self, tmp_path: Path) -> None:
        """A reader that claims files of other formats hides them from their own readers."""
        path = self.make_file(tmp_path)
        assert self.open().claims(path, path.read_bytes()[:HEAD_BYTES])
        for name, content in _FOREIGN.items():
            assert not self.open().claims(tmp_path / name, content), f"it claims {name}"

    def test_its_tables_are_sound(self, tmp_path: Path) -> None:
        """Columns of one length, no negative duration, one table per rank, and the reader's format."""
        tables = self.read(self.make_file(tmp_path))
        assert tables, "a file with events has a table"
        assert sum(len(table.ts_ns) for table in tables) > 0
        ranks = [table.rank for table in tables if table.rank >= 0]
        assert len(set(ranks)) == len(ranks)
        for table in tables:
            lengths = {len(column) for column in (table.ts_ns, table.dur_ns, table.kind, table.name_id, table.stream)}
            assert len(lengths) == 1
            assert (table.dur_ns >= 0).all()
            assert table.name_id.max() < len(table.names)

    def test_reading_twice_gives_the_same(self, tmp_path: Path) -> None:
        """Nothing depends on the time of reading."""
        path = self.make_file(tmp_path)
        for one, other in zip(self.read(path), self.read(path), strict=True):
            assert np.array_equal(one.ts_ns, other.ts_ns)
            assert list(one.names) == list(other.names)

    def test_a_broken_file_has_a_reason(self, tmp_path: Path) -> None:
        """Cut at several places, or full of noise: `TraceError` with a reason, or tables that say what is missing."""
        path = self.make_file(tmp_path)
        whole = path.read_bytes()
        noise = bytes(np.random.default_rng(0).integers(0, 256, 2000, dtype=np.uint8))
        for content in (b"", whole[: len(whole) // 2], whole[:-1], whole[:40] + noise, noise):
            path.write_bytes(content)
            refused = self._refuse(path)
            if refused is not None:
                assert isinstance(refused.reason, Reason)
                assert refused.message
                assert "\n" not in refused.message

    def _refuse(self, path: Path) -> TraceError | None:
        try:
            self.read(path)
        except TraceError as error:
            return error
        return None
