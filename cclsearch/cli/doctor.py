"""`ccl-search doctor`: what this machine provides, and what to do about what is missing."""

from __future__ import annotations

import argparse
import json

from cclsearch.checks.doctor import examine_machine
from cclsearch.core.text import one_line


def run(args: argparse.Namespace) -> int:
    """Print one line per check; returns 1 if something required is missing."""
    findings = examine_machine()
    usable = all(finding.check.ok for finding in findings if finding.is_required)
    if args.json:
        checks = [{**finding.check.model_dump(), "required": finding.is_required} for finding in findings]
        print(json.dumps({"ok": usable, "checks": checks}))
        return 0 if usable else 1
    for finding in findings:
        mark = "ok" if finding.check.ok else "NO" if finding.is_required else "--"
        print(f"{mark:<4}{finding.check.name:<21} {one_line(finding.check.detail)}")
        if not finding.check.ok:
            print(f"{'':<26}-> {one_line(finding.check.remedy, 300)}")
    print("\nEverything required is present." if usable else "\nFix the checks marked NO first.")
    print("(--: missing, and needed only for the purpose in its line)")
    return 0 if usable else 1
