"""A docstring or comment of the sidecar or the engine that names a file means one that is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from tests.deploy.committed import ROOT

# Neither `[metrics.py:125]` of a line of a log nor the name of a file as a value.
NAMED: Final = re.compile(r"""(?<![\w./["'])((?:\w+/)*[a-z_]+\.py)\b(?!:\d)""")
PROGRAMS: Final = ("driftguard", "driftguard_http", "engine/driftguard_engine", "engine/training")


def is_there(name: str, file: Path) -> bool:
    """A path of the repository; or a file of the same package directly below driftguard/, of the same program
    elsewhere, or of the migrations."""
    if "/" in name:
        return (ROOT / name).exists()
    places = file.relative_to(ROOT).parts
    own = ROOT.joinpath(*places[: 2 if places[0] == "driftguard" and len(places) > 2 else 1])
    return any(own.rglob(name)) or (ROOT / "migrations" / name).exists()


def test_the_files_that_docstrings_name_are_there() -> None:
    gone = [
        f"{file.relative_to(ROOT)}: {name}"
        for program in PROGRAMS
        for file in sorted((ROOT / program).rglob("*.py"))
        for name in NAMED.findall(file.read_text(encoding="utf-8"))
        if not is_there(name, file)
    ]
    assert gone == []
