"""`ccl-search links`: measure the links of a profile's cluster, import a measurement, or show the matrix."""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cclsearch.cli.output import show
from cclsearch.core.atomic_file import write_atomically
from cclsearch.core.content import project_root
from cclsearch.core.errors import UserError, require_writable
from cclsearch.core.text import format_table, plain
from cclsearch.launch.profile import Profile, links_places, load_profile
from cclsearch.network.matrix import LinkMatrix
from cclsearch.network.read import read_links, read_nccl_tests, write_links

if TYPE_CHECKING:
    from cclsearch.checks.links import Placement


def run(args: argparse.Namespace) -> None:
    if args.action in ("place", "what-if"):
        _place(args) if args.action == "place" else _what_if(args)
        return
    profile = load_profile(args.launcher)
    if args.action == "show":
        _show(profile, as_json=args.json)
    else:
        (_measure if args.action == "measure" else _import)(profile, args)


def _measure(profile: Profile, args: argparse.Namespace) -> None:
    from cclsearch.checks.links import measure_links

    ranks = args.ranks or profile.hardware.num_accelerators
    if ranks is None:
        raise UserError(
            f"profile {profile.name} states no hardware.num_accelerators: say how many to measure with --ranks N"
        )
    if ranks < 2:
        raise UserError(f"links are between ranks: --ranks must be at least 2, not {ranks}")
    folder = project_root() / "runs" / f"links-{profile.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if not args.json:
        print(plain(f"measuring {ranks} ranks with profile {profile.name}: {folder}"), flush=True)
    timeout_s = 60 * args.timeout_min
    measured = measure_links(profile, num_ranks=ranks, folder=folder, timeout_s=timeout_s, package=args.package)
    path = _keep(profile, measured.links)
    reduced = (
        f"all-reduce of {size} bytes over all ranks: {seconds * 1e3:.4g} ms, by the matrix {expected * 1e3:.4g} ms"
        for size, seconds, expected in measured.reduced
    )
    lines = [*_table(measured.links), *reduced, _say_written(path, profile)]
    show({**_as_data(measured.links, path), "all_reduce": measured.reduced}, lines, as_json=args.json)


def _import(profile: Profile, args: argparse.Namespace) -> None:
    paths = [Path(name) for name in args.files]
    is_csv = [path.suffix.lower() == ".csv" for path in paths]
    if any(is_csv) and len(paths) > 1:
        raise UserError("`links import` takes one CSV file, or outputs of nccl-tests, not both")
    links = read_links(paths[0]) if any(is_csv) else read_nccl_tests(paths)
    if not links.source:
        links = links.model_copy(update={"source": f"imported from {paths[0].name}"})
    path = _keep(profile, links)
    show(_as_data(links, path), [links.describe(), _say_written(path, profile)], as_json=args.json)


def _say_written(path: Path, profile: Profile) -> str:
    return f"wrote {path}: `predict` and `run` with --launcher {profile.name} use it"


def _place(args: argparse.Namespace) -> None:
    """Print, and write as a rank file, the placement that suits one configuration."""
    from cclsearch.checks.links import KINDS, place_config

    placed = place_config(args.workload, args.launcher, args.config, args.knob)
    best = placed.best
    if args.write is not None:
        require_writable(args.write, "--write")
        write_atomically(args.write, "".join(f"{host}\n" for host in best.hosts))
    data = {"config": dict(best.config), "hosts": best.hosts, "devices": best.devices, "kind": best.kind}
    data |= {"predicted": {each.kind: each.predicted for each in placed.placements}, "unit": placed.unit}
    lines = [str(placed.config)]
    for each in placed.placements:
        order = f" ({each.config['rank_order']})" if "rank_order" in each.config else ""
        lines.append(f"  {each.predicted:.4g} {placed.unit}, {KINDS[each.kind]}{order} (predicted)")
    show(data, [*lines, *_describe_placement(best, args.write)], as_json=args.json)


def _describe_placement(best: Placement, written: Path | None) -> list[str]:
    """Return how to start a job with this placement."""
    lines = [f"best: {best.kind}, {best.config}"]
    consecutive = [host for host, _ in itertools.groupby(best.hosts)]
    one_by_one = len(consecutive) > len(set(consecutive))
    lines.append(f"nodes {'of the ranks' if one_by_one else 'in order'}: {' '.join(consecutive)}")
    if best.devices:
        shown = ",".join(map(str, best.devices))
        lines.append(f"devices of each node: CUDA_VISIBLE_DEVICES={shown} (ROCm: HIP_VISIBLE_DEVICES)")
    if written is not None:
        lines.append(f"wrote {written}: the host of each rank, one a line")
        lines.append(
            f"  Slurm:    SLURM_HOSTFILE={written} srun --distribution=arbitrary --ntasks={len(best.hosts)} ..."
        )
        if not one_by_one:
            lines.append(
                "  torchrun: --node-rank N on the N-th node of the order above, from 0; --master-addr is the first"
            )
    return lines


def _what_if(args: argparse.Namespace) -> None:
    """Print the predictions with other links, for one configuration and for the best one there."""
    from cclsearch.checks.links import predict_on_links

    config, unit, found = predict_on_links(args.workload, args.launcher, args.config, args.knob)
    rows, lines = [], [str(config), "predicted, before calibration by trials:"]
    for each in found:
        rows.append({"links": each.name, "value": each.value, "best_value": each.best_value, "best": dict(each.best)})
        other = "" if each.best == config else f"; best there: {each.best_value:.4g} {unit}, {each.best}"
        lines.append(f"  {each.value:.4g} {unit}  {each.name}{other}")
    data = {"provenance": "predicted", "config": dict(config), "unit": unit, "links": rows}
    show(data, lines, as_json=args.json)


def _show(profile: Profile, *, as_json: bool) -> None:
    links = profile.hardware.links
    if links is None:
        raise UserError(
            f"profile {profile.name} has no measured links: measure them with `ccl-search links measure --launcher"
            f" {profile.name}`, or import them with `ccl-search links import FILE --launcher {profile.name}`"
        )
    path = next(place for place in links_places(profile) if place.is_file())
    show(_as_data(links, path), [*_table(links), str(path)], as_json=as_json)


def _keep(profile: Profile, links: LinkMatrix) -> Path:
    """Write the matrix to the project's launchers/, where it counts before one beside the profile."""
    path = links_places(profile)[0]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, write_links(links))
    return path


def _as_data(links: LinkMatrix, path: Path) -> dict[str, object]:
    fields = {
        name: getattr(links, name)
        for name in ("endpoints", "nodes", "places", "places_per_port", "port_gbps", "gbps", "latency_us")
    }
    return {"path": str(path), "source": links.source, **fields}


SHOWN = 16
"""Number of endpoints up to which the whole matrix is printed."""


def _table(links: LinkMatrix) -> list[str]:
    """Return the matrix in Gbit/s, and the slowest pairs with their latency."""
    names, count = links.endpoints, len(links.endpoints)
    lines = [links.describe()]
    if links.places_per_port > 1:
        port = f" of {links.port_gbps:.4g} Gbit/s" if links.port_gbps is not None else ""
        lines.append(f"{links.places_per_port} neighbouring places of a node share a network port{port}")
    if count <= SHOWN:
        rows = [
            [name, *("-" if i == j and links.places == 1 else f"{links.gbps[i][j]:.4g}" for j in range(count))]
            for i, name in enumerate(names)
        ]
        lines += ["Gbit/s from row to column:", format_table(["", *names], rows, right=range(1, count + 1))]
    pairs = sorted((links.gbps[i][j], i, j) for i in range(count) for j in range(count) if i != j)
    lines.append("slowest pairs:")
    for rate, i, j in pairs[:4]:
        lines.append(f"  {names[i]} to {names[j]}: {rate:.4g} Gbit/s, {links.latency_us[i][j]:.4g} us")
    return lines
