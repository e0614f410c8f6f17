"""Refuse files of other profilers by name: each message says what the file is and how to get a readable trace."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class UnsupportedFormat:
    """A format by its file's name."""

    name: re.Pattern[str]
    message: str


def _format(name: str, message: str) -> UnsupportedFormat:
    return UnsupportedFormat(re.compile(name, re.IGNORECASE), message)


UNSUPPORTED = (
    _format(
        r"\.(pftrace|perfetto-trace)(\.gz)?$",
        "a Perfetto trace; of rocprofv3, record with --output-format json, else read what it was made from",
    ),
    _format(
        r"_(kernel|hip_api|hip_runtime_api|hsa_api|memory_copy|marker_api|rccl_api)_trace\.csv$",
        "rocprofv3's table of one domain; record with --output-format json",
    ),
    _format(r"\.otf2$", "an OTF2 archive; of rocprofv3, record with --output-format json"),
    _format(r"\.ncu-rep$", "a report of Nsight Compute, which has no timeline; record with nsys profile"),
    _format(r"\.qdstrm$", "an unfinished Nsight Systems report; run QdstrmImporter, then nsys export --type sqlite"),
    _format(r"\.ntff$", "a profile of AWS Neuron; its devices are not supported"),
    _format(
        r"(?<!\.xplane)\.pb(\.gz)?$",
        "a protocol buffer, but not an XSpace by its name; if it is one, rename it to NAME.xplane.pb",
    ),
)


def find_unsupported(name: str) -> UnsupportedFormat | None:
    """Return the format of a file with this name; None if it is not in the table."""
    return next((known for known in UNSUPPORTED if known.name.search(name)), None)
