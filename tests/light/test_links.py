"""Matrices of measured links: read, refused in one line, and what groups of ranks get from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cclsearch.core.errors import UserError
from cclsearch.network.groups import slowest_chain, slowest_exchange, slowest_ring
from cclsearch.network.matrix import LinkMatrix
from cclsearch.network.read import read_links, read_nccl_tests, write_links

GB = 1e9


def two_nodes(places: int = 4, *, inside: float = 800, between: float = 80, places_per_port: int = 1) -> LinkMatrix:
    """Two nodes with one endpoint each; a place has 100 GB/s inside and 10 GB/s to the other node."""
    return LinkMatrix(
        endpoints=("a", "b"),
        places=places,
        gbps=((inside, between), (between, inside)),
        latency_us=((2, 10), (10, 2)),
        places_per_port=places_per_port,
    )


def uneven() -> LinkMatrix:
    """Four endpoints of one place; every pair has 8 Gbit/s, but c and d only 1."""
    rates = np.full((4, 4), 8.0)
    rates[2, 3] = 1.0
    np.fill_diagonal(rates, 0)
    return LinkMatrix(
        endpoints=("a", "b", "c", "d"),
        gbps=tuple(map(tuple, rates.tolist())),
        latency_us=tuple(map(tuple, (5.0 * (1 - np.eye(4))).tolist())),
    )


def test_a_ring_is_as_fast_as_its_slowest_link() -> None:
    ring = slowest_ring(uneven(), np.array([[0, 1, 2, 3]]), ring_per_port=False)
    around = slowest_ring(uneven(), np.array([[0, 2, 1, 3]]), ring_per_port=False)
    assert (ring.bytes_s, ring.crosses) == (GB / 8, True)
    assert ring.latency_s == pytest.approx(5e-6)
    assert around.bytes_s == GB  # c and d are no neighbours there


def test_of_several_groups_the_slowest_decides() -> None:
    pairs = slowest_ring(uneven(), np.array([[0, 1], [2, 3]]), ring_per_port=True)
    crossed = slowest_ring(uneven(), np.array([[0, 2], [1, 3]]), ring_per_port=True)
    assert (pairs.bytes_s, crossed.bytes_s) == (GB / 8, GB)


def test_members_of_one_node_use_all_ports_if_each_has_a_ring() -> None:
    whole = np.arange(8)[None]
    assert slowest_ring(two_nodes(), whole, ring_per_port=True).bytes_s == 40 * GB
    assert slowest_ring(two_nodes(), whole, ring_per_port=False).bytes_s == 10 * GB
    assert slowest_ring(two_nodes(places_per_port=4), whole, ring_per_port=True).bytes_s == 10 * GB


def test_groups_that_cross_at_once_share_the_ports() -> None:
    strided = np.array([[0, 4], [1, 5], [2, 6], [3, 7]])
    assert slowest_ring(two_nodes(), strided, ring_per_port=True).bytes_s == 10 * GB
    assert slowest_ring(two_nodes(places_per_port=4), strided, ring_per_port=True).bytes_s == 2.5 * GB
    assert slowest_ring(two_nodes(places_per_port=2), strided, ring_per_port=False).bytes_s == 5 * GB
    inside = slowest_ring(two_nodes(places_per_port=4), np.arange(8).reshape(2, 4), ring_per_port=True)
    assert (inside.bytes_s, inside.crosses) == (100 * GB, False)


def test_chains_pass_only_their_own_links() -> None:
    assert slowest_chain(uneven(), np.array([[2, 0, 1, 3]])).bytes_s == GB  # a ring would close over c and d
    assert slowest_ring(uneven(), np.array([[2, 0, 1, 3]]), ring_per_port=False).bytes_s == GB / 8


def test_an_exchange_spends_time_on_every_pair() -> None:
    link = slowest_exchange(uneven(), np.array([[0, 1, 2, 3]]))
    assert link.bytes_s == pytest.approx(3 / (1 / 1 + 1 / 1 + 8 / 1) * GB)  # c sends a third over the slow link
    shared = slowest_exchange(two_nodes(places=2, places_per_port=2), np.array([[0, 1, 2, 3]]))
    assert shared.bytes_s == pytest.approx(3 / (1 / 100 + 2 * 2 / 10) * GB)


def test_a_written_matrix_is_read_the_same(tmp_path: Path) -> None:
    for links in (uneven(), two_nodes(places_per_port=2).model_copy(update={"source": "made up"})):
        path = tmp_path / "links.csv"
        path.write_text(write_links(links))
        assert read_links(path) == links


def test_a_changed_matrix_has_its_own_figures_also_after_the_first_was_used() -> None:
    links, ring = uneven(), np.array([[0, 1, 2]])
    assert slowest_ring(links, ring, ring_per_port=False).bytes_s == GB
    halved = links.changed(gbps=[[rate / 2 for rate in row] for row in links.gbps])
    assert slowest_ring(halved, ring, ring_per_port=False).bytes_s == GB / 2


def test_units_are_converted_by_the_name_of_the_column(tmp_path: Path) -> None:
    path = tmp_path / "links.csv"
    path.write_text("src,dst,GB_s,latency_ms\na,b,2,0.5\nb,a,1,0.25\n")
    assert read_links(path).gbps == ((0.0, 16.0), (8.0, 0.0))
    path.write_text("MB_s,a,b\na,,1000\nb,500,\nlatency_us,a,b\na,,3\nb,4,\n")
    square = read_links(path)
    assert (square.gbps, square.latency_us) == (((0.0, 8.0), (4.0, 0.0)), ((0.0, 3.0), (4.0, 0.0)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no rows"),
        ("src,dst,gbps\na,b,1\n", "no column of latency; name it by its unit: latency_us"),
        ("src,dst,latency_us\na,b,1\n", "no column of bandwidth"),
        ("src,dst,gbps,GB_s,latency_us\na,b,1,2,3\n", "mixes units of bandwidth: it has the columns gbps and GB_s"),
        ("src,dst,gbps,latency_us\na,b,1 GB/s,3\n", "row 2: gbps must be a number without a unit, not '1 GB/s'"),
        ("src,dst,gbps,latency_us\na,b,1,3\n", "the bandwidth from 'b' to 'a' is missing"),
        ("src,dst,gbps,latency_us\na,b,1,3\nb,a,-1,3\n", "gbps from 'b' to 'a' must be above 0, not -1"),
        ("src,dst,gbps,latency_us\na,b,1,3\nb,a,nan,3\n", "gbps from 'b' to 'a' must be above 0, not nan"),
        ("src,dst,gbps,latency_us\na,b,1,-3\nb,a,1,3\n", "latency_us from 'a' to 'b' must be 0 or more, not -3"),
        ("src,dst,gbps,latency_us\na,b,1,3\na,b,1,3\n", "row 3 gives the pair 'a' to 'b' a second time"),
        ("src,dst,gbps,latency_us\na,b,1\n", "row 2 has 3 cells, but the header has 4"),
        ("from,dst,gbps,latency_us\na,b,1,3\n", "no column 'src'"),
        ("gbps,a,b\na,,1\nlatency_us,a,b\na,,1\nb,1,\n", "the table of gbps is not square: 2 columns, 1 rows"),
        ("gbps,a,b\na,,1\nb,1,\nGB_s,a,b\na,,1\nb,1,\n", "two tables of bandwidths"),
        ("gbps,a,b\nb,1,\na,,1\n", "in the order of its columns; 'b' is not"),
        ("gbps,a,b\na,,1\nb,1,\n", "no table of latencies"),
        ("# places: 2\nsrc,dst,gbps,latency_us\na,b,1,3\nb,a,1,3\n", "from 'a' to 'a' is missing, and 1 other pairs"),
        ("# places: x\nsrc,dst,gbps,latency_us\na,b,1,3\nb,a,1,3\n", "places"),
        (
            "src,dst,gbps,latency_us,src_node,dst_node\na,b,1,3,n,n\nb,a,1,3,m,n\n",
            "row 3 puts 'b' on 'm', an earlier one elsewhere",
        ),
    ],
)
def test_a_bad_matrix_is_refused_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "links.csv"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        read_links(path)
    assert words in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


NCCL = """# nThread 1 nGpus 1 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1
#
# Using devices
#  Rank  0 Group  0 Pid  15784 on  {a} device  0 [0009:01:00] NVIDIA GH200 120GB
#  Rank  1 Group  0 Pid  24926 on  {b} device  0 [0009:01:00] NVIDIA GH200 120GB
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
           8             2     float     sum      -1    18.60    0.00    0.00       0    18.67    0.00    0.00       0
   134217728      33554432     float     sum      -1  5871.07   {rate}   {rate}       0  5871.07   22.86   22.86       0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 11.4
"""


def test_outputs_of_nccl_tests_make_a_matrix(tmp_path: Path) -> None:
    paths = []
    for a, b, rate in (("n1", "n2", "22.86"), ("n1", "n3", "22.5"), ("n2", "n3", "2.5")):
        paths.append(tmp_path / f"{a}-{b}.txt")
        paths[-1].write_text(NCCL.format(a=a, b=b, rate=rate))
    links = read_nccl_tests(paths)
    assert links.endpoints == ("n1:0", "n2:0", "n3:0")
    assert links.nodes == ("n1", "n2", "n3")
    assert links.gbps[0][1] == pytest.approx(8 * 22.86)
    assert links.gbps[2][1] == pytest.approx(20)
    assert links.latency_us[0][1] == 18.6
    with pytest.raises(UserError, match=r"from 'n1:0' to 'n3:0' is missing"):
        read_nccl_tests([paths[0], paths[2]])


def test_what_is_not_an_output_of_nccl_tests_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("nothing\n")
    with pytest.raises(UserError, match="lists 0 ranks"):
        read_nccl_tests([path])
    path.write_text("\n".join(NCCL.format(a="x", b="y", rate="1").splitlines()[:9]))
    with pytest.raises(UserError, match="no row with a bus bandwidth above 0"):
        read_nccl_tests([path])
