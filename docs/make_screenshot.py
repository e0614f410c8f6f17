"""Draws docs/pictures/run.svg: the table of a real search of wl2 on its recording, as the terminal shows it.

python docs/make_screenshot.py
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from cclsearch.core.text import plain
from cclsearch.report.progress import observe_progress, render_progress
from cclsearch.report.summary import summarize_run
from cclsearch.run.folder import load_run

COMMAND = ["run", "--workload", "wl2", "--launcher", "replay", "--budget", "15", "--name", "wl2-demo", "--quiet"]


def main() -> None:
    with tempfile.TemporaryDirectory() as runs:
        subprocess.run(
            [sys.executable, "-m", "cclsearch", *COMMAND, "--runs", runs], check=True, stdout=subprocess.DEVNULL
        )
        run = load_run(Path(runs) / "wl2-demo")
        console = Console(record=True, width=132, file=io.StringIO())
        console.print("$ ccl-search run --workload wl2 --budget 15", style="bold")
        for line in run.spec.banner:
            console.print(f"note: {plain(line)}", style="dim", highlight=False)
        knobs = ("tp", "pp", "dp", "zero_stage", "micro_batch_size")
        progress = observe_progress(run.spec, run.state, run.folder, knobs=knobs, node_hours=None, is_running=False)
        for line in render_progress(progress, console.width, None, run.state.last_s):
            console.print(line, highlight=False, soft_wrap=True)
        for line in summarize_run(run.spec, run.state, Path("runs") / "wl2-demo").lines:
            console.print(plain(line), highlight=False)
        target = Path(__file__).parent / "pictures" / "run.svg"
        console.save_svg(str(target), title="ccl-search")
        print(target)


if __name__ == "__main__":
    main()
