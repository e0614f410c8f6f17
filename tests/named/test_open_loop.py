"""Ten searches of the real CPU server under a rate of requests: the winner keeps its limit in a second run of 120 s.

`make test-open-loop`; 90 minutes on two cores that nothing else uses (trials of a busy machine are not admitted).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cclsearch.cli import main

RATE, LIMIT = 12, 0.05
LOAD = ["-w", "tiny-serving", "--set", "arrival=poisson", "--set", f"request_rate={RATE}"]
LIMITED = ["--constraint", f"tpot_p90_s <= {LIMIT}", "--quiet"]
SEARCHES, KEPT = 10, []


@pytest.mark.parametrize("seed", range(SEARCHES))
def test_the_winner_of_an_open_loop_keeps_its_limit(seed: int, tmp_path: Path, capsys: Any) -> None:
    runs = ["--runs", str(tmp_path)]
    main(["run", *LOAD, "--set", "num_requests=0", "-b", "5", "--seed", str(seed), "--name", "search", *LIMITED, *runs])
    capsys.readouterr()
    main(["best", "search", "--json", *runs])
    best = json.loads(capsys.readouterr().out)
    assert best.get("config"), "no trial was admitted: is the machine busy?"
    knobs = [word for name, value in best["config"].items() for word in ("--knob", f"{name}={str(value).lower()}")]
    again = ["--set", f"num_requests={RATE * 120}", "--seed", str(seed + 100), *knobs, "--name", "again"]
    main(["run", *LOAD, *again, "-b", "1", *LIMITED, *runs])
    capsys.readouterr()
    main(["best", "again", "--json", *runs])
    KEPT.append(json.loads(capsys.readouterr().out).get("config") is not None)


def test_at_least_nine_of_ten_keep_it() -> None:
    assert len(KEPT) == SEARCHES
    assert sum(KEPT) >= SEARCHES - 1
