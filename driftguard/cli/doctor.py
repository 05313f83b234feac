"""`driftguard doctor`: every check, a line each."""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path

from driftguard.app.doctor import Finding, checks
from driftguard.cli.output import facts, terminal_width
from driftguard.settings import Settings
from driftguard.settings.loading import CONFIG_VARIABLE

_COLOURS = {"ok": "32", "warning": "33", "failed": "31"}


def run_doctor(settings: Settings, config: Path | None, *, as_json: bool, send_test_page: bool) -> int:
    """Prints what was found; 1 where a check failed."""
    if config is None and (named := os.environ.get(CONFIG_VARIABLE)):
        config = Path(named)
    found: list[Finding] = []
    made = checks(settings, config, send_test_page=send_test_page)
    while True:
        with redirect_stdout(sys.stderr):  # of what is logged meanwhile
            finding = next(made, None)
        if finding is None:
            break
        found.append(finding)
        if not as_json:
            print_finding(finding)
    failed = sum(finding.state == "failed" for finding in found)
    if as_json:
        print(json.dumps({"failed": failed, "checks": [asdict(finding) for finding in found]}))
    return 1 if failed else 0


def print_finding(finding: Finding) -> None:
    state, width = f"{finding.state:7}", terminal_width()
    if width is not None and not os.environ.get("NO_COLOR"):
        state = f"\x1b[{_COLOURS[finding.state]}m{state}\x1b[0m"
    told = [
        ("", f"{finding.check}: {finding.found}"),
        *([("", f"fix: {finding.fix}")] if finding.fix else []),
    ]
    first, *rest = facts(told, None if width is None else width - 7)
    sys.stdout.write(f"{state}{first}\n" + "".join(f"{'':7}{line}\n" for line in rest))
    sys.stdout.flush()
