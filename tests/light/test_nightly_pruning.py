"""What a night deletes of earlier ones, and what it keeps."""

from __future__ import annotations

import json
from pathlib import Path

from nights import night, run_stopped

from cclsearch.run.folder import load_run


def test_pruning_does_not_touch_a_run_that_tonight_continued(nightly_project: Path) -> None:
    interrupted = run_stopped(1, start="22:00 UTC")
    summary = night(keep={"nights": 1})
    assert summary.jobs[0].resumed
    assert summary.pruned.trials == 0
    trials = Path("runs") / str(summary.jobs[0].run) / "trials"
    assert len(list(trials.glob("*/result.json"))) == 6
    night(keep={"nights": 2})
    assert len(list(trials.glob("*/result.json"))) == 6
    assert night(keep={"nights": 2}).pruned.nights == (summary.night,)
    winners = {one.jobs[0].best.trial for one in (interrupted, summary) if one.jobs[0].best}
    assert {int(path.parent.name) for path in trials.glob("*/result.json")} == winners


def test_pruning_counts_and_removes_traces_on_scratch_and_nothing_else(nightly_project: Path) -> None:
    scratch = nightly_project / "scratch"
    Path("launchers/sim.yaml").write_text(f"launcher: scripted-night\nscratch: {scratch}\n")
    first = night().jobs[0]
    assert first.best is not None
    trials = Path("runs") / str(first.run) / "trials"
    winner, loser, foreign = first.best.trial, *[n for n in range(1, 7) if n != first.best.trial][:2]
    for number in (winner, loser):
        held = scratch / f"{first.run}-t{number:04d}-a1-00c0ffee" / "trace"
        held.mkdir(parents=True)
        (held / "rank0.json").write_bytes(b"x" * 5000)
        (trials / f"{number:04d}" / "trace").symlink_to(held)
    others = scratch / "others-t0001-a1" / "trace"
    others.mkdir(parents=True)
    (scratch / f"{first.run}-t{loser:04d}-a1-00c0ffee" / "out").symlink_to(others)
    (trials / f"{foreign:04d}" / "trace").symlink_to(others)
    summary = night(keep={"nights": None, "gib": 4000 / 2**30})
    assert summary.pruned.trials == 5
    assert summary.pruned.gib > 5000 / 2**30
    kept = sorted(path.name for path in scratch.iterdir())
    assert kept == sorted([f"{first.run}-t{winner:04d}-a1-00c0ffee", "others-t0001-a1"])
    assert others.is_dir()


def test_pruning_keeps_winners_ledgers_and_the_targets_of_links(nightly_project: Path) -> None:
    first = night()
    run = Path("runs") / str(first.jobs[0].run)
    outside = nightly_project / "outside"
    outside.mkdir()
    (outside / "precious").write_text("keep me")
    assert first.jobs[0].best is not None
    best = run / "trials" / f"{first.jobs[0].best.trial:04d}"
    loser = next(p for p in sorted((run / "trials").iterdir()) if p != best)
    (loser / "link").symlink_to(outside)
    (run / "trials" / "0999").symlink_to(outside)
    (Path("runs") / "nightly-20300000-000001-a").symlink_to(outside)
    second = night(keep={"nights": 1})
    assert second.pruned.trials == 5
    assert second.pruned.nights == (first.night,)
    assert (outside / "precious").read_text() == "keep me"
    assert (best / "result.json").is_file()
    assert not loser.exists()
    assert load_run(run).state.best is not None
    third = night(keep={"nights": None, "gib": 1e-9})
    assert third.pruned.trials > 0
    tonight = Path("runs") / str(third.jobs[0].run) / "trials"
    assert len(list(tonight.glob("*/result.json"))) == 6


def test_pruning_keeps_the_winner_of_a_renamed_run_and_accepts_a_damaged_summary(nightly_project: Path) -> None:
    first = night()
    run = Path("runs") / str(first.jobs[0].run)
    assert first.jobs[0].best is not None
    named = next(n for n in range(1, 7) if n != first.jobs[0].best.trial)
    kept = Path("runs") / "nights" / "nightly" / first.night / "summary.json"
    data = json.loads(kept.read_text())
    data["jobs"][0]["best"]["trial"] = named
    kept.write_text(json.dumps(data))
    moved = run.rename(run.with_name(f"{run.name}-old"))
    second = night(keep={"nights": 1})
    assert second.pruned.trials == 4
    assert {int(path.name) for path in (moved / "trials").iterdir()} == {named, first.jobs[0].best.trial}
    kept.write_text('{"jobs": 3}')
    assert night(keep={"nights": 1}).pruned.trials == 6
