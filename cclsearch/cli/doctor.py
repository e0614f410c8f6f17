"""`ccl-search doctor`: what this machine provides, and what to do about what is missing."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from cclsearch.checks.doctor import Finding, examine_llm, examine_machine
from cclsearch.cli.output import show
from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line


def run(args: argparse.Namespace) -> int:
    """Print one line per check; returns 1 if something required is missing."""
    if args.llm_effort and not args.llm:
        raise UserError("--llm-effort: no LLM is named; add one with `--llm SPEC`")
    findings = [*examine_machine(), *([examine_llm(args.llm, args.llm_effort)] if args.llm else [])]
    usable = all(finding.check.ok for finding in findings if finding.is_required)
    checks = [{**finding.check.model_dump(), "required": finding.is_required} for finding in findings]
    show({"ok": usable, "checks": checks}, _describe(findings, usable), as_json=args.json)
    return 0 if usable else 1


def _describe(findings: Sequence[Finding], usable: bool) -> Iterator[str]:
    for finding in findings:
        mark = "ok" if finding.check.ok else "NO" if finding.is_required else "--"
        yield f"{mark:<4}{finding.check.name:<21} {one_line(finding.check.detail, 400)}"
        if not finding.check.ok:
            yield f"{'':<26}-> {one_line(finding.check.remedy, 300)}"
    yield "\nEverything required is present." if usable else "\nFix the checks marked NO first."
    yield "(--: missing, and needed only for the purpose in its line)"
