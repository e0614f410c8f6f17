"""Reads link matrices: from CSV, as this project writes it or as a square table, and from the output of nccl-tests."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import permutations
from pathlib import Path

from cclsearch.core.errors import UserError
from cclsearch.core.numbers import parse_number
from cclsearch.core.text import one_line
from cclsearch.core.yaml_file import validate_mapping
from cclsearch.network.matrix import MAX_ENDPOINTS, LinkMatrix

MAX_BYTES = 256 * 2**20
BANDWIDTH_UNITS = {"gbps": 1.0, "gbit_s": 1.0, "mbit_s": 1e-3, "GB_s": 8.0, "MB_s": 8e-3, "GiB_s": 8 * 1.073741824}
"""Name of a column -> Gbit/s of its unit; GB and MB are decimal."""
LATENCY_UNITS = {"latency_us": 1.0, "latency_ms": 1e3, "latency_s": 1e6}
"""Name of a column -> microseconds of its unit."""
_MARKS = ("places", "places_per_port", "port_gbps", "source")
"""Fields of the matrix that lines `# NAME: VALUE` state."""
_RANK_LINE = re.compile(
    r"#\s+Rank\s+(?P<rank>\d+)\s.*?\bPid\s+\d+\s+on\s+(?P<host>\S+)\s+device\s+(?P<device>\d+)\s*\[[^\]]*\]\s*(?P<name>.*)"
)
_TABLE_LINE = re.compile(r"^\s*\d+\s+\d+\s+\w+\s+\w+\s+-?\d+\s+(?P<out>.+)$")

Pair = tuple[str, str]


def read_links(path: Path) -> LinkMatrix:
    """Return the matrix in a CSV file; UserError names the file and the fault, in one line.

    Either one row per ordered pair (`src,dst,gbps,latency_us`, and `src_node,dst_node` if endpoints share nodes), or a
    square table whose first cell names the unit (`GB_s,a,b`) and that may be followed by one of latencies.
    """
    text = read_text(path)
    marks, rows = _split_lines(text, path)
    if not rows:
        raise UserError(f"{path}: has no rows; it needs a header, such as src,dst,gbps,latency_us")
    return (_read_square if rows[0][0] in BANDWIDTH_UNITS else _read_pairs)(rows, marks, str(path))


def write_links(links: LinkMatrix) -> str:
    """Return the CSV text of a matrix, one row per ordered pair."""
    out = io.StringIO()
    out.write(f"# places: {links.places}\n# places_per_port: {links.places_per_port}\n")
    if links.port_gbps is not None:
        out.write(f"# port_gbps: {links.port_gbps:.6g}\n")
    if links.source:
        out.write(f"# source: {one_line(links.source, 500)}\n")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["src", "dst", "gbps", "latency_us", "src_node", "dst_node"])
    nodes = links.nodes or links.endpoints
    for i, source in enumerate(links.endpoints):
        for j, target in enumerate(links.endpoints):
            if i != j or links.places > 1 or len(links.endpoints) == 1:
                figures = f"{links.gbps[i][j]:.6g}", f"{links.latency_us[i][j]:.6g}"
                writer.writerow([source, target, *figures, nodes[i], nodes[j]])
    return out.getvalue()


def read_text(path: Path) -> str:
    """Return the text of a file of bounded size; UserError if it cannot be read."""
    try:
        if not path.is_file():
            raise UserError(f"there is no file {str(path)!r}")
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"{path}: has more than {MAX_BYTES >> 20} MiB: it is not a table of links")
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def _split_lines(text: str, path: Path) -> tuple[dict[str, str], list[list[str]]]:
    """Return the values of lines `# NAME: VALUE`, and the cells of the other lines."""
    marks, lines = {}, []
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            name, _, value = line.lstrip("# \t").partition(":")
            marks[name.strip()] = value.strip()
        elif line.strip():
            lines.append(line)
    try:
        return marks, [[cell.strip() for cell in row] for row in csv.reader(lines, strict=True)]
    except csv.Error as error:
        raise UserError(f"{path}: is not CSV: {error}") from None


def _read_pairs(rows: list[list[str]], marks: Mapping[str, str], where: str) -> LinkMatrix:
    header = rows[0]
    rate_column, rate_unit = _find_unit(header, BANDWIDTH_UNITS, "bandwidth", where)
    latency_column, latency_unit = _find_unit(header, LATENCY_UNITS, "latency", where)
    missing = [name for name in ("src", "dst") if name not in header]
    if missing:
        raise UserError(f"{where}: the header has no column {missing[0]!r}; it has {one_line(', '.join(header))}")
    rates: dict[Pair, float] = {}
    latencies: dict[Pair, float] = {}
    node_of: dict[str, str] = {}
    for number, cells in enumerate(rows[1:], 2):
        if len(cells) != len(header):
            raise UserError(f"{where}: row {number} has {len(cells)} cells, but the header has {len(header)}")
        row = dict(zip(header, cells, strict=True))
        pair = row["src"], row["dst"]
        if pair in rates:
            raise UserError(f"{where}: row {number} gives the pair {pair[0]!r} to {pair[1]!r} a second time")
        rates[pair] = _read_number(row[rate_column], rate_column, f"{where}: row {number}") * rate_unit
        latencies[pair] = _read_number(row[latency_column], latency_column, f"{where}: row {number}") * latency_unit
        for name, column in (("src", "src_node"), ("dst", "dst_node")):
            node = row.get(column) or row[name]
            if node_of.setdefault(row[name], node) != node:
                raise UserError(f"{where}: row {number} puts {row[name]!r} on {node!r}, an earlier one elsewhere")
    return fill_matrix(rates, latencies, where, node_of=node_of, marks=marks)


def _find_unit(header: Sequence[str], units: Mapping[str, float], what: str, where: str) -> tuple[str, float]:
    found = [name for name in header if name in units]
    if len(found) == 1:
        return found[0], units[found[0]]
    ways = ", ".join(units)
    if found:
        raise UserError(f"{where}: mixes units of {what}: it has the columns {' and '.join(found)}; keep one")
    raise UserError(f"{where}: has no column of {what}; name it by its unit: {ways}")


def _read_number(text: str, column: str, where: str) -> float:
    try:
        return parse_number(text)
    except ValueError:
        raise UserError(f"{where}: {column} must be a number without a unit, not {one_line(text, 40)!r}") from None


def _read_square(rows: list[list[str]], marks: Mapping[str, str], where: str) -> LinkMatrix:
    """Return the matrix of one square table, or of two: bandwidths, then latencies."""
    starts = [k for k, row in enumerate(rows) if row[0] in BANDWIDTH_UNITS or row[0] in LATENCY_UNITS]
    tables = [rows[start:stop] for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True)]
    rates: dict[Pair, float] = {}
    latencies: dict[Pair, float] = {}
    for table in tables:
        names, unit = table[0][1:], table[0][0]
        if len(table) - 1 != len(names) or any(len(row) != len(table[0]) for row in table):
            raise UserError(
                f"{where}: the table of {unit} is not square: {len(names)} columns, {len(table) - 1} rows of"
                f" {', '.join(str(n) for n in sorted({len(row) - 1 for row in table[1:]})) or '0'} values"
            )
        odd = next((row[0] for row, name in zip(table[1:], names, strict=True) if row[0] != name), None)
        if odd is not None:
            raise UserError(f"{where}: rows of the table of {unit} must be in the order of its columns; {odd!r} is not")
        is_rate, factor = unit in BANDWIDTH_UNITS, (BANDWIDTH_UNITS | LATENCY_UNITS)[unit]
        target = rates if is_rate else latencies
        if target:
            kind = "bandwidths" if is_rate else "latencies"
            raise UserError(f"{where}: has two tables of {kind} (mixed units?); keep one")
        for row in table[1:]:
            for name, cell in zip(names, row[1:], strict=True):
                if cell or row[0] != name:
                    target[row[0], name] = _read_number(cell, unit, f"{where}: {row[0]} to {name}") * factor
    if not latencies:
        raise UserError(f"{where}: has no table of latencies; add one whose first cell is latency_us")
    return fill_matrix(rates, latencies, where, marks=marks)


def fill_matrix(
    rates: Mapping[Pair, float],
    latencies: Mapping[Pair, float],
    where: str,
    *,
    node_of: Mapping[str, str] | None = None,
    marks: Mapping[str, str] | None = None,
) -> LinkMatrix:
    """Return the matrix of these pairs in Gbit/s and microseconds; UserError names a missing pair or a bad figure."""
    names = list(dict.fromkeys(name for pair in rates for name in pair))
    if len(names) > MAX_ENDPOINTS:
        raise UserError(f"{where}: has {len(names)} endpoints; at most {MAX_ENDPOINTS} can be read")
    fields: dict[str, object] = {name: value for name, value in (marks or {}).items() if name in _MARKS}
    places = (marks or {}).get("places", "1")
    if not places.isascii() or not places.isdecimal() or int(places) < 1:
        raise UserError(f"{where}: `# places: N` must be a whole number from 1, not {one_line(places, 40)!r}")
    needed = [(a, b) for a in names for b in names if a != b or int(places) > 1]
    for what, given in (("bandwidth", rates), ("latency", latencies)):
        missing = [pair for pair in needed if pair not in given]
        if missing:
            more = f", and {len(missing) - 1} other pairs" if len(missing) > 1 else ""
            raise UserError(f"{where}: the {what} from {missing[0][0]!r} to {missing[0][1]!r} is missing{more}")

    def square(given: Mapping[Pair, float]) -> list[list[float]]:
        return [[given.get((a, b), 0.0) for b in names] for a in names]

    nodes = [(node_of or {}).get(name, name) for name in names]
    fields |= {"endpoints": names, "nodes": nodes if nodes != names else []}
    return validate_mapping(LinkMatrix, {**fields, "gbps": square(rates), "latency_us": square(latencies)}, where)


def read_nccl_tests(paths: Iterable[Path]) -> LinkMatrix:
    """Return the matrix of outputs of nccl-tests: each file is one test over the ranks that its header lists.

    A pair's bandwidth is the best bus bandwidth of the smallest test that it took part in, its latency the time of that
    test's smallest message: with more than two ranks the whole group had them. Both directions get the same.
    """
    tests = sorted((_read_test(path) for path in paths), key=lambda test: -len(test[0]))
    rates: dict[Pair, float] = {}
    latencies: dict[Pair, float] = {}
    node_of: dict[str, str] = {}
    for members, gbps, latency_us in tests:
        node_of |= members
        rates |= dict.fromkeys(permutations(members, 2), gbps)
        latencies |= dict.fromkeys(permutations(members, 2), latency_us)
    of = " and ".join(str(size) for size in sorted({len(members) for members, _, _ in tests}))
    source = f"nccl-tests, {len(tests)} outputs of {of} ranks"
    return fill_matrix(rates, latencies, "nccl-tests", node_of=node_of, marks={"source": source})


def _read_test(path: Path) -> tuple[dict[str, str], float, float]:
    """Return endpoint -> node of the ranks, Gbit/s and microseconds of one output."""
    members: dict[str, str] = {}
    rows: list[tuple[float, float]] = []
    for line in read_text(path).splitlines():
        if rank := _RANK_LINE.search(line):
            members[f"{rank['host']}:{rank['device']}"] = rank["host"]
        elif (row := _TABLE_LINE.match(line)) and len(cells := row["out"].split()) >= 3:
            values = [_read_number(cell, "a figure", str(path)) for cell in cells[:3]]
            rows.append((values[0], values[2]))  # microseconds, GB/s of bus bandwidth
    if len(members) < 2:
        raise UserError(
            f"{path}: lists {len(members)} ranks; the output of nccl-tests names each in a line such as"
            " `#  Rank  0 Group  0 Pid  1 on HOST device  0 [0x01] NAME`"
        )
    if not rows or max(rate for _, rate in rows) <= 0:
        raise UserError(f"{path}: has no row with a bus bandwidth above 0: the test has not run")
    return members, 8 * max(rate for _, rate in rows), rows[0][0]
